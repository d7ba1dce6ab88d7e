"""Measure for digits how well more readings, or more probes per reading, find failures, and their cost.

    python -m benchmarks.probe_curve --draw runs/probes.safetensors            # on a GPU, about two minutes
    python -m benchmarks.probe_curve --probes runs/probes.safetensors --costs results/bench/h200/mnist.json

Each digit is read at every step by four separate probes, so one run holds every number of readings and probes: one
probe in four versions, two in two. Times are chosen on digits of another seed with as many probes, without outcomes.
Costs are those of `python -m experiments bench`: few readings of two probes, and every step of one and of two, with
linear interpolation; four probes cost as much as two and twice the difference.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

import fmwc
from benchmarks.schedule_curve import plot_auprc
from fmwc.estimators import Linearised
from fmwc.files import write_bytes, write_json
from fmwc.metrics.ranking import auprc
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.registry import domain_named
from fmwc.report.page import png
from fmwc.sampling import SamplingConfig, Trajectory, reread
from fmwc.sampling.pilot import fitted, score_at

STEPS, SETS = 50, 4
RUNS = {"pilot": (2_000, 100), "run": (10_000, 2027)}  # digits and seed; nothing was chosen on the second
READINGS = (1, 2, 3, 5, 10)


def draw(path: Path, device: torch.device) -> None:
    """Write the variance (probes, steps, digits) and classes of each run, and which digits failed."""
    setting, field, clock = domain_named("mnist"), fmwc.load("mnist", device=device), Clock(device)
    found: dict[str, Tensor] = {}
    for name, (count, seed) in RUNS.items():
        run = setting.draw(field, count, seed, None, confidence=None, config=SamplingConfig(keep_states=True))
        reads = [
            reread(field, run, Linearised(1), seed=k, batch=1000).var.flatten(2).mean(2).cpu() for k in range(SETS)
        ]
        found |= {name: torch.stack(reads), f"{name} y": run.cond["y"].cpu()}
        found[f"{name} bad"] = torch.as_tensor(setting.judge(run))
        print(f"{name}: {count} digits, {float(found[f'{name} bad'].float().mean()):.2%} failed", flush=True)
    about = provenance(device, clock.seconds, samples=RUNS["run"][0], seeds=[seed for _, seed in RUNS.values()])
    write_bytes(path, save({k: v.contiguous() for k, v in found.items()}, {"provenance": json.dumps(about)}))


def trajectory(var: Tensor, y: Tensor, standard: Any, score: str) -> Trajectory:  # (probes, R, B), (B,)
    """Return a run that holds only the inputs of a score."""
    numbers = var.mean(0)[..., None, None, None]
    times = (torch.arange(STEPS) / STEPS)[:, None].expand(STEPS, var.shape[2])
    grid = torch.cat([times, torch.ones_like(times[:1])])
    x = torch.zeros(var.shape[2], 1, 1, 1)
    return Trajectory(
        x, x, times, torch.zeros_like(numbers), numbers, grid, cond={"y": y}, standard=standard, default_score=score
    )


def curve(data: dict[str, Tensor], costs: dict[str, Any]) -> dict[str, Any]:
    """Return AUPRC and time relative to plain sampling, by number of readings and probes."""
    one, two = (  # the cost of a reading, in evaluations
        costs["compiled"][f"linearised {probes}in bf16, every step"]["ratio"] - 1 for probes in ("(1 probe) ", "")
    )
    field = fmwc.load("mnist")
    reference, shipped = field.reference, [round(t * STEPS) for t in field.schedule.times]
    few = costs["compiled"]["linearised in bf16, few readings"]["ratio"]
    constant = few - 1 - len(shipped) * two / STEPS  # the cost of a run, apart from its readings
    found = {}
    for probes, cost in {1: one, 2: two, 4: two + 2 * (two - one)}.items():
        sets = [slice(first, first + probes) for first in range(0, SETS, probes)]
        runs = {
            name: [
                trajectory(data[name][part], data[f"{name} y"], reference.standard, reference.score) for part in sets
            ]
            for name in RUNS
        }
        for readings in (*READINGS, STEPS, "the shipped"):
            known = {STEPS: range(STEPS), "the shipped": shipped}
            at = [
                known.get(readings) or [round(t * STEPS) for t in fitted(pilot, readings, lambda times: {}).times]
                for pilot in runs["pilot"]
            ]
            values = [
                auprc(score_at(run, steps).numpy(), data["run bad"].numpy())
                for run, steps in zip(runs["run"], at, strict=True)
            ]
            name = f"{readings} readings of {probes}"
            found[name] = {
                "readings": len(at[0]),
                "probes": probes,
                "auprc": float(np.mean(values)),
                "each": values,
                "times": [[round(step / STEPS, 3) for step in steps] for steps in at],
                "ratio": float(
                    np.interp(
                        len(at[0]),
                        [0, len(shipped), STEPS],
                        [1, 1 + constant + len(shipped) * cost / STEPS, 1 + cost],
                    )
                ),
            }
            each = ", ".join(f"{v:.3f}" for v in values)
            print(f"{name}: AUPRC {np.mean(values):.3f} ({each}), {found[name]['ratio']:.2f}× plain", flush=True)
    return found


def picture(rows: dict[str, Any], title: str) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for probes in sorted({row["probes"] for row in rows.values()}):
        group = [row for name, row in rows.items() if row["probes"] == probes and not name.startswith("the shipped")]
        x = [row["ratio"] for row in group]
        low, high = ([f(row["each"]) for row in group] for f in (min, max))
        line = plot_auprc(axes, x, group, "one probe per reading" if probes == 1 else f"{probes} probes")
        axes.vlines(x, low, high, color=line.get_color(), alpha=0.4)
    shipped, best = rows["the shipped readings of 2"], rows[f"{STEPS} readings of 2"]["auprc"]
    axes.plot(shipped["ratio"], shipped["auprc"], "k*", ms=10, label="the default: two readings of two")
    axes.vlines(shipped["ratio"], min(shipped["each"]), max(shipped["each"]), color="black", alpha=0.4)
    axes.axhspan(best - 0.02, best + 0.02, alpha=0.15, label="within 0.02 of every step, two probes")
    axes.axvline(1.15, color="grey", ls=":", lw=1)
    axes.set(xlabel="time ÷ plain sampling (H200, compiled)", ylabel="AUPRC", title=title, xscale="log")
    axes.set_xticks([1, 1.15, 1.5, 2, 3, 5, 8], ["1", "1.15", "1.5", "2", "3", "5", "8"])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="only write readings to this file")
    parser.add_argument("--probes", type=Path, default=Path("runs/probes.safetensors"), help="a file written by --draw")
    parser.add_argument(
        "--costs",
        type=Path,
        default=Path("results/bench/h200/mnist.json"),
        help="a file written by python -m experiments bench",
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    arguments = parser.parse_args()
    device, begin = pick_device(arguments.device), time.perf_counter()
    if arguments.draw:
        draw(arguments.draw, device)
        return
    with safe_open(arguments.probes, "pt") as file:
        data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        drawn = json.loads((file.metadata() or {}).get("provenance", "{}"))
    costs = json.loads(arguments.costs.read_text())
    rows = curve(data, costs)
    timed = {key: costs["provenance"][key] for key in ("commit", "device", "torch", "samples", "steps")}
    about = provenance(torch.device("cpu"), time.perf_counter() - begin, timed=timed, drawn=drawn)
    bad = data["run bad"]
    about |= {"samples": len(bad), "failed": int(bad.sum()), "score": fmwc.load("mnist").reference.score}
    write_json(arguments.out / "schedule-mnist.json", {"provenance": about, "schedules": rows})
    title = f"digits: {len(bad):,}, of which {float(bad.float().mean()):.1%} fail"
    write_bytes(arguments.out / "schedule-mnist.png", png(picture(rows, title)))


if __name__ == "__main__":
    main()
