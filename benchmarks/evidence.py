"""Draws samples of a checkpoint, and reads all the evidence there is about them, for :mod:`benchmarks.lifts`.

    python benchmarks/evidence.py mnist --seed 100 --count 10000 --device cuda --out runs/evidence/mnist-100.npz
    python benchmarks/evidence.py runs/fashion --setting mnist --judge runs/fashion-judge …

Writes one compressed file: scores that the trajectory holds, residuals of the flow at many times and draws (under every
class where there are classes), and whether samples failed where that can be judged on this machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmwc import load
from fmwc.checks.residuals import _noisy, residuals
from fmwc.modes import evaluating
from fmwc.propagate import Linearised
from fmwc.randomness import derive
from fmwc.sampling import sample
from fmwc.state import batch_size, each

TIMES = {
    "mnist": (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "crystals": (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
    "checkerboard": (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98),
}


def all_residuals(
    field: Any, x: Any, cond: dict[str, Any], times: tuple[float, ...], draws: int, seed: int, classes: int, rows: int
) -> np.ndarray:  # (T, D, K or 1, C, B)
    """Return r at every time, draw and class, with the same noise for all classes."""
    count, found = batch_size(x), []
    with torch.no_grad(), evaluating(field):
        for a in range(0, count, rows):
            b = min(a + rows, count)
            part, given = each(lambda c: c[a:b], x), {k: v[a:b] for k, v in cond.items()}  # noqa: B023
            space = field.space.given(given)
            own = []
            for t in times:
                for draw in range(draws):
                    noisy = _noisy(space, part, t, seed, a, draw, t)
                    for label in range(max(classes, 1)):
                        tried = {**given, "y": torch.full_like(given["y"], label)} if classes else given
                        own.append(residuals(field, space, *noisy, tried).float().cpu().numpy())
            found.append(np.stack(own).reshape(len(times), draws, max(classes, 1), -1, b - a))
    return np.concatenate(found, -1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--setting", default="")
    parser.add_argument("--judge", default="mnist-judge")
    parser.add_argument("--data", default="", help="for mnist: real test images, checked likewise")
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=2500)
    parser.add_argument("--transport", type=int, default=0)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    device, setting = torch.device(args.device), args.setting or args.checkpoint
    field: Any = load(args.checkpoint, device=device)
    cond: dict[str, torch.Tensor] = {}
    classes = 0
    if setting == "mnist":
        classes = int(field.network.config["classes"])
        cond = {"y": torch.arange(args.count, device=device) % classes}
    if setting == "crystals":
        cond = {"atoms": field.network.draw_sizes(args.count, derive(args.seed, "atoms")).to(device)}
    begin, found = time.time(), {}
    options: dict[str, Any] = {"steps": 50, "seed": args.seed, "record": "total", **cond}
    reads = Linearised(None if setting == "checkerboard" else 2)
    every = {"crystals": 5}.get(setting, 1)
    run = sample(
        field, args.count, confidence=reads, schedule=every, batch=args.rows, transport=args.transport, **options
    )
    scores = {n: run.score(n) for n in ("temporal_ratio", "integrated", "endpoint", "peak", "geometric")}
    if field.reference is not None:
        scores["default"] = run.score(field.reference.score)
        found["default_score"] = np.array(field.reference.score)
    if args.transport:
        scores["dispersion"] = run.score("dispersion")
    found |= {f"score.{n}": v.float().cpu().numpy() for n, v in scores.items()}
    found |= {f"evidence.{n}": v.float().cpu().numpy() for n, v in run.evidence.items()}
    print(f"drawn in {time.time() - begin:.1f} s", flush=True)
    times = TIMES[setting]
    r = all_residuals(field, run.x, cond, times, args.draws, derive(args.seed, "check"), classes, args.rows)
    found |= {"residuals": r.astype(np.float32), "times": np.array(times)}
    found |= {f"cond.{n}": v.cpu().numpy() for n, v in cond.items()}
    print(f"checked in {time.time() - begin:.1f} s", flush=True)
    if setting == "mnist":
        from fmwc.checkpoint import load_network
        from fmwc.metrics.images import failed, predictions

        judge = load_network(args.judge, device=device)
        found["failed"] = failed(judge, run.x, cond["y"])
        found["taken"] = predictions(judge, run.x).cpu().numpy()
        if args.data:
            from fmwc.data import mnist

            test = mnist.load(args.data, "test", own=True)
            rows = slice(0, 4000)
            x, y = mnist.unit(test.x[rows]).to(device), test.y[rows].to(device)
            r = all_residuals(field, x, {"y": y}, times, args.draws, derive(args.seed, "real"), classes, args.rows)
            found |= {"real.residuals": r.astype(np.float32), "real.y": y.cpu().numpy()}
            train = mnist.unit(mnist.load(args.data, "train", own=True).x[:20_000]).to(device)
            labels = mnist.load(args.data, "train", own=True).y[:20_000].to(device)
            far = torch.cdist(run.x.flatten(1), train.flatten(1))
            own = far.masked_fill(labels[None] != cond["y"][:, None], torch.inf).amin(1)
            other = far.masked_fill(labels[None] == cond["y"][:, None], torch.inf).amin(1)
            found |= {"score.nearest": own.cpu().numpy(), "score.nearest_other": other.cpu().numpy()}
    if setting == "checkerboard":
        from fmwc.metrics.points import misplaced

        found["failed"] = misplaced(run.x)
        found["x"] = run.x.cpu().numpy()
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if setting == "crystals":
        run.compact().to("cpu").save(out.with_suffix(".safetensors"))
    np.savez_compressed(out, **found)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, {time.time() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
