"""Measure how well few readings of the variance find failed samples, and how much time they take.

    python -m benchmarks.schedule_curve checkerboard
    python -m benchmarks.schedule_curve crystals --draws runs/curve --costs results/bench/h200/crystals.json

For digits use `probe_curve.py`, which also varies the number of probes. --draw-only only writes samples to the folder
--draws, so that another machine can judge them.

One run is read at every step, and every schedule uses some of these readings, so schedules differ only in their times.
Adaptive schedules are chosen on a pilot run of another seed, without outcomes. Times are measured for sampling with as
many readings, interleaved with plain sampling in one process; or, with --costs, taken from
`python -m experiments bench` on another machine (compiled), and interpolated linearly between numbers of readings.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.stats import spearmanr

import fmwc
from experiments.cost.costs import SIZES
from experiments.cost.meter import Meter
from fmwc.compiled import Compiled
from fmwc.domains import Domain
from fmwc.estimators import Linearised
from fmwc.files import write_bytes, write_json
from fmwc.metrics.ranking import auprc, bootstrap
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.registry import domain_named
from fmwc.report.page import png
from fmwc.sampling import SamplingConfig, Schedule, Trajectory, noise, sample
from fmwc.sampling.pilot import fitted, score_at

STEPS = 50
EVERY = (1, 2, 3, 5, 7, 10, 16, 25)
READINGS = (2, 3, 4, 5, 8, 12)
BENCHED = {  # readings of `STEPS` steps that python -m experiments bench measures, besides those of the checkpoint
    5: "linearised, every 10th step",
    10: "linearised, every 5th step",
    50: "linearised, every step",
}
DRAWN = "drawn.json"  # the provenance of the samples in a folder
SEED, PILOT_SEED = 2027, 100  # nothing was chosen on the first
PILOT = {"checkerboard": (1_000, 4_000), "crystals": (60, 1_000)}  # on a CPU, on a GPU
COUNT = {"checkerboard": (4_000, 10_000), "crystals": (60, 2_500)}


def schedules(pilot: Trajectory) -> dict[str, list[int]]:
    """Return the steps that are read, by name."""
    every = {f"every {k}": list(range((STEPS - 1) % k, STEPS, k)) for k in EVERY}
    return every | {
        f"adaptive {n}": [round(t * STEPS) for t in fitted(pilot, n, lambda times: {}).times] for n in READINGS
    }


def quality(setting: Domain, run: Trajectory, bad: np.ndarray, steps: dict[str, list[int]]) -> dict[str, Any]:
    """Return the AUPRC, and the difference (with an interval) and rank correlation to reading every step."""
    few = setting.name == "crystals"  # good crystals are few, so they are the positives

    def precision(score: np.ndarray, index: np.ndarray) -> float:
        positive = ~bad[index] if few else bad[index]
        return auprc(-score[index] if few else score[index], positive) if positive.any() else float("nan")

    every, all_ = score_at(run, range(STEPS)).cpu().numpy(), np.arange(len(bad))
    rows = {}
    for name, read in steps.items():
        try:
            score = score_at(run, read).cpu().numpy()
        except fmwc.errors.UsageError as error:  # a window that is not read
            print(f"{name}: {error}")
            continue
        difference = partial(lambda score, index: precision(score, index) - precision(every, index), score)
        rows[name] = {
            "readings": len(read),
            "times": [round(step / STEPS, 3) for step in read],
            "spearman": float(spearmanr(score, every).statistic),
            "auprc": precision(score, all_),
            "to_every_step": difference(all_),
            "interval": bootstrap(difference, len(bad)),
        }
    return rows


def overheads(setting: Domain, field: Any, reading: Any, rows: dict[str, Any], rounds: int, size: int) -> None:
    """Add the time of each number of readings, as a ratio to plain sampling."""
    device = field.device
    size = size or SIZES[setting.name][device.type][0]
    cond = {k: v.to(device) for k, v in setting.conditions(field, size).items()}
    x0 = noise(field.space, size, 0, device, cond=cond)
    drawn = Compiled(field, cuda_graph=True) if device.type == "cuda" else field
    draw = partial(sample, drawn, x0=x0, steps=STEPS, cond=cond, config=SamplingConfig(batch=size, record="total"))
    tasks: dict[str, Any] = {"plain": partial(draw, confidence=None)}
    times = {row["readings"]: row["times"] for row in rows.values()}  # the cost depends on their number only
    tasks |= {
        str(n): partial(draw, confidence=reading, schedule=Schedule.at(when)) for n, when in sorted(times.items())
    }
    meter = Meter(device, rounds, time.perf_counter() + 3600, partial(print, flush=True))
    costs = meter(tasks, f"{size} samples")
    for row in rows.values():
        row["time"] = costs[str(row["readings"])]


def measured(rows: dict[str, Any], path: Path) -> None:
    """Add the times that `python -m experiments bench` measured with the same number of steps."""
    found = json.loads(path.read_text())
    assert found["provenance"]["steps"] == STEPS
    named = BENCHED | {len(found["provenance"]["few"]): "linearised, few readings"}
    if "CPU" not in found["provenance"]["device"]:  # compiled fields are read in half precision on a GPU
        named = {n: name.replace("linearised", "linearised in bf16") for n, name in named.items()}
    known = {0: 1.0} | {n: found["compiled"][name]["ratio"] for n, name in named.items() if name in found["compiled"]}
    if not {len(found["provenance"]["few"]), STEPS} <= known.keys():
        raise SystemExit(f"{path} was not measured with few readings and at every step; it has {sorted(known)}")
    at = sorted(known)
    for row in rows.values():
        row["time"] = {"ratio": float(np.interp(row["readings"], at, [known[n] for n in at]))}


def plot_auprc(axes: Axes, x: list[float], rows: list[dict[str, Any]], label: str) -> Line2D:
    """Draw the AUPRC of rows as a line, with the number of readings at each point."""
    (line,) = axes.plot(x, [row["auprc"] for row in rows], "o-", label=label)
    for at, row in zip(x, rows, strict=True):
        axes.annotate(str(row["readings"]), (at, row["auprc"]), textcoords="offset points", xytext=(4, 4), size=7)
    return line


def picture(rows: dict[str, Any], title: str) -> Figure:
    """Draw AUPRC against time, for every k-th step and for adaptive times."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind, word in (("every", "every k-th step"), ("adaptive", "adaptive")):
        group = sorted((row for name, row in rows.items() if name.startswith(kind)), key=lambda row: row["readings"])
        plot_auprc(axes, [row["time"]["ratio"] for row in group], group, word)
    best = rows["every 1"]["auprc"]
    axes.axhspan(best - 0.02, best + 0.02, alpha=0.15, label="within 0.02 of every step")
    axes.set(xlabel="time ÷ plain sampling", ylabel="AUPRC", title=title)
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=list(COUNT))
    parser.add_argument("--count", type=int, default=0, help="samples that are read")
    parser.add_argument("--pilot", type=int, default=0, help="samples that schedules are chosen on")
    parser.add_argument("--draws", type=Path, help="a folder of samples read at every step; existing ones are used")
    parser.add_argument("--draw-only", action="store_true", help="only write samples to --draws")
    parser.add_argument(
        "--probes", type=int, default=0, help="random probes per reading; default: those of the setting"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timed", type=int, default=0, help="samples in the batch that is timed")
    parser.add_argument(
        "--costs", type=Path, help="a file written by python -m experiments bench --steps 50, instead of measuring"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    clock, setting = Clock(device), domain_named(arguments.setting)
    field = fmwc.load(setting.name, device=device)
    reading = Linearised(arguments.probes) if arguments.probes else setting.estimator(field)
    gpu = int(device.type == "cuda")
    draw = partial(
        setting.draw,
        field,
        progress=None,
        confidence=reading,
        schedule=Schedule.every(1),
        config=SamplingConfig(record="total"),
    )
    if gpu:
        draw = partial(draw, config=SamplingConfig(record="total", batch=2048))  # fills the GPU, uncompiled
    runs = []
    for name, count, seed in (
        ("pilot", arguments.pilot or PILOT[setting.name][gpu], PILOT_SEED),
        ("run", arguments.count or COUNT[setting.name][gpu], SEED),
    ):
        path = arguments.draws and arguments.draws / f"{name}.safetensors"
        found = Trajectory.load(path).to(device) if path and path.exists() else draw(count, seed).compact()
        runs.append(found)
        if path and not path.exists():
            found.save(path)
            write_json(path.parent / DRAWN, {**provenance(device, clock.seconds), "reading": str(reading)})
    if arguments.draw_only:
        return
    pilot, run = runs
    bad = setting.judge(run)
    rows = quality(setting, run, bad, schedules(pilot))
    if arguments.costs:
        measured(rows, arguments.costs)
    else:
        overheads(setting, field, reading, rows, arguments.rounds, arguments.timed)
    for name, row in rows.items():
        print(
            f"{name:12s} {row['readings']:3d} readings: AUPRC {row['auprc']:.3f} ({row['to_every_step']:+.3f}), "
            f"Spearman {row['spearman']:.3f}, {row['time']['ratio']:.2f}× plain"
        )
    about = provenance(
        device, clock.seconds, samples=len(bad), pilot=len(pilot), steps=STEPS, seeds=[run.seed, pilot.seed]
    )
    if arguments.costs:
        timed = json.loads(arguments.costs.read_text())["provenance"]
        about["timed"] = {key: timed[key] for key in ("commit", "device", "torch", "samples", "reading")}
    drawn = arguments.draws and arguments.draws / DRAWN
    if drawn and drawn.exists():  # maybe from another machine, with another estimator
        about["drawn"] = json.loads(drawn.read_text())
    about |= {"reading": str(reading), "score": pilot.default_score, "prevalence": float(bad.mean())}
    name = f"schedule-{setting.name}" + (f"-{arguments.probes}" if arguments.probes else "")
    write_json(arguments.out / f"{name}.json", {"provenance": about, "schedules": rows})
    title = f"{setting.name}: {len(bad):,} samples, of which {bad.mean():.1%} fail"
    write_bytes(arguments.out / f"{name}.png", png(picture(rows, title)))


if __name__ == "__main__":
    main()
