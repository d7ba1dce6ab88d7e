"""Measure how smoothly the studio shows large runs: 10,000 images and 100,000 points, in headless Chromium.

    python -m benchmarks.studio_load [--out results/studio/load.json]

Each run is opened from a folder. Measures the time from the start of the navigation to the first frame that shows
samples, and the frames per second while every frame sorts (images), moves the slider, or scrolls. The samples are
random, because the cost of drawing them does not depend on what they show.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import fmwc
from fmwc.cli.verbs import Studio as Options
from fmwc.files import write_json
from fmwc.networks import MLP
from fmwc.provenance import Clock, provenance
from fmwc.studio.server import opened
from tests.studio.browser import launched, watched

RESULTS = Path(__file__).parent.parent / "results/studio/load.json"
SECONDS = 4
FIRST_PAINT = """
window.painted = new Promise((done) => {
  const look = () => {
    const canvas = document.querySelector(".gallery .view canvas");
    if (canvas && canvas.width > 350) requestAnimationFrame(() => setTimeout(() => done(performance.now())));
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
});
"""
FRAMES = """
([action, seconds]) => new Promise((done) => {
  const act = {
    sort: () => document.querySelector("[aria-label='Reverse the order']").click(),
    keep: (n) => {
      const slider = document.getElementById("keep-share");
      slider.value = String(20 + (n % 80));
      slider.dispatchEvent(new Event("input"));
    },
    scroll: (n) => { document.querySelector(".wall").scrollTop = 40 * n; },
  }[action];
  const times = [performance.now()];
  const frame = (now) => {
    times.push(performance.now());
    act(times.length);
    if (now - times[0] < 1000 * seconds) requestAnimationFrame(frame);
    else done(times);
  };
  requestAnimationFrame(frame);
})
"""


def samples(shape: tuple[int, ...], count: int, folder: Path) -> Path:
    """Write a run of random samples with scores and labels."""
    torch.manual_seed(0)
    field = fmwc.attach(MLP(dim=2, hidden=8, depth=1), space=(2,))
    run = fmwc.sample(field, count, steps=1, seed=0, confidence=None)
    x = torch.rand(count, *shape) if len(shape) > 1 else 2 * torch.rand(count, *shape) - 1
    run = replace(run, x=x, x0=x.clone(), scores=torch.rand(count), default_score="integrated", evidence={})
    run.save(folder / "samples.safetensors")
    rows = [f"{name},{i % 10},{int(i % 7 == 0)}" for i, name in enumerate(run.names)]
    (folder / "samples.csv").write_text("\n".join(["name,y,bad", *rows]) + "\n")
    return folder


@contextmanager
def serving(folder: Path, out: Path) -> Iterator[Any]:
    """Run a studio that shows a folder."""
    with opened(Options(str(folder), out, 0, browser=False, device="cpu")) as served:
        thread = threading.Thread(target=served.server.run, args=([served.listener],))
        thread.start()
        try:
            while not served.server.started or not all(model.ready for model in served.studio.models.values()):
                time.sleep(0.1)
            yield served
        finally:
            served.server.should_exit = True
            thread.join()


def measure(browser: Any, served: Any, actions: tuple[str, ...]) -> dict[str, Any]:
    """Return the time to the first paint, twice, and the frames per second of each action."""
    found: dict[str, Any] = {"first_paint_s": []}
    host = served.address.removeprefix("http://").partition("/")[0]
    for _ in range(2):
        with watched(browser, host) as page:
            page.add_init_script(FIRST_PAINT)
            page.goto(served.address)
            found["first_paint_s"].append(round(page.evaluate("window.painted") / 1000, 3))
            for action in actions:
                times = page.evaluate(FRAMES, [action, SECONDS])
                gaps = sorted(b - a for a, b in pairwise(times))
                found[action] = {
                    "frames_per_s": round(1000 * len(gaps) / sum(gaps), 1),
                    "frame_ms_99_percent": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    device = torch.device("cpu")
    clock, found = Clock(device), {}
    with tempfile.TemporaryDirectory() as name, launched() as browser:
        for kind, shape, count, actions in (
            ("images", (1, 28, 28), 10_000, ("sort", "keep", "scroll")),
            ("points", (2,), 100_000, ("keep",)),
        ):
            folder = Path(name) / kind
            folder.mkdir()
            with serving(samples(shape, count, folder), Path(name) / f"studio-{kind}") as served:
                found[kind] = {"count": count, **measure(browser, served, actions)}
                print(kind, found[kind], flush=True)
        about = {
            "browser": f"Chromium {browser.version}, headless",
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
    write_json(out, {**found, **about, "made": provenance(device, clock.seconds)})


if __name__ == "__main__":
    main()
