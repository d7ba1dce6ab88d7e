"""Measure how many steps a retrofit takes, with data and with the network's own samples, compared with joint training.

python -m benchmarks.retrofit_curve checkerboard
python -m benchmarks.retrofit_curve mnist --device cuda --data ../shared/data/mnist --every 5
python -m benchmarks.retrofit_curve picture

The noise of the shipped flow is fitted again for each number of steps. All rows read the same samples along the same
trajectories (`fmwc.sampling.reread`), so they differ only in the noise. Joint training has other samples, so lifts are
compared: AUPRC divided by the share of failures, each with an interval over resampled samples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import fmwc
from fmwc.checkerboard.data import misplaced
from fmwc.checkerboard.recipe import PRESETS as BOARD
from fmwc.checkpoint import load_network
from fmwc.estimators import Estimator, Linearised
from fmwc.files import write_bytes, write_json
from fmwc.metrics.ranking import auprc, bootstrap
from fmwc.mnist.classifier import failed
from fmwc.mnist.recipe import JUDGE, WITHIN, Mnist
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.registry import domain_named
from fmwc.report.page import FAINT, LINES, png, styled
from fmwc.retrofit import held_out_elbo
from fmwc.sampling import SamplingConfig, Schedule, Trajectory, reread, sample

RESULTS = Path("results/retrofit")
STEPS = (10, 30, 100, 300, 1000, 3000)
SEED, OWN_SEED, HELD_OUT = 2026, 7, 1000  # nothing was chosen on these samples
OWN_SAMPLES, BATCH = 10_000, 1024  # own samples that replace the data; samples drawn and read together
JOINT, SHIPPED, DATA, OWN = "joint", "as shipped", "data", "own samples"


@dataclass(frozen=True)
class Case:
    """How noise is fitted in one domain (data, batch size, learning rate), and how samples are judged and read."""

    recipe: Any
    failed: Callable[[Trajectory], np.ndarray]
    score: str
    estimator: Estimator
    batch: int
    lr: float
    joint: str  # the shipped field of joint training
    within: str | None = None


def board(data: str, device: torch.device) -> Case:
    recipe, reading = BOARD["recommended"], Linearised(None)
    judge = lambda run: misplaced(run.x.cpu())  # noqa: E731
    return Case(recipe, judge, "temporal_ratio", reading, 1024, recipe.lr, "checkerboard-joint")


def digits(data: str, device: torch.device) -> Case:
    recipe, judge = Mnist(data=data), load_network(JUDGE, device=device)
    judged = lambda run: failed(judge, run.x, run.cond["y"])  # noqa: E731
    return Case(recipe, judged, "integrated", Linearised(2), 256, recipe.noise_lr, "mnist-joint", WITHIN)


CASES = {"checkerboard": board, "mnist": digits}


def fitted(case: Case, name: str, steps: int, x: Any, cond: dict[str, Any], device: torch.device) -> fmwc.Field:
    """Return the shipped flow with newly fitted noise."""
    shipped = fmwc.load(name, device=device)
    shipped.noise.remove()
    options = {key: shipped.noise.options[key] for key in ("include", "exclude", "width")}
    field = fmwc.attach(shipped.network, space=shipped.space, prior_rate=shipped.prior_rate, **options).to(device)
    fmwc.fit_noise(field, x, steps, batch=case.batch, lr=case.lr, cond=cond, captured=True, confidence=False)
    return field


def measured(case: Case, name: str, count: int, every: int, device: torch.device) -> dict[str, Any]:
    """Return the lift of every row, and its ratio to that of joint training."""
    x, cond = case.recipe.rows()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    fresh, rest = order[:HELD_OUT], order[HELD_OUT:]
    held = x[fresh].to(device), {k: v[fresh].to(device) for k, v in cond.items()}
    flow, joint = fmwc.load(name, device=device), fmwc.load(case.joint, device=device)
    make = partial(sample, steps=50, confidence=None)
    read = partial(reread, confidence=case.estimator, schedule=Schedule.every(every), batch=BATCH)

    def conditions(count: int, seed: int) -> dict[str, Tensor]:
        return {k: v.to(device) for k, v in domain_named(name).conditions(flow, count, seed=seed).items()}

    own = conditions(OWN_SAMPLES, OWN_SEED)
    drawn = make(flow, OWN_SAMPLES, seed=OWN_SEED, cond=own, config=SamplingConfig(batch=BATCH)).x
    sources = {DATA: (x[rest], {k: v[rest] for k, v in cond.items()}), OWN: (drawn, own)}
    kept = {"seed": SEED, "cond": conditions(count, SEED), "config": SamplingConfig(batch=BATCH, keep_states=True)}
    run, joint_run = make(flow, count, **kept), make(joint, count, **kept)
    rows: dict[str, Any] = {}

    def note(label: str, field: fmwc.Field, run: Trajectory, **about: Any) -> None:
        score, bad = read(field, run).score(case.score, within=case.within).cpu().numpy(), case.failed(run)
        lift = lambda index: auprc(score[index], bad[index]) / bad[index].mean() if bad[index].any() else np.nan  # noqa: E731
        found = {"lift": lift(np.arange(len(bad))), "interval": bootstrap(lift, len(bad)), "share": float(bad.mean())}
        rows[label] = about | found
        print(label, rows[label], flush=True)

    note(JOINT, joint, joint_run, steps=case.recipe.iterations)
    note(SHIPPED, flow, run, steps=case.recipe.noise_steps)
    for source, given in sources.items():
        for steps in STEPS:
            field = fitted(case, name, steps, *given, device)
            note(f"{source}, {steps}", field, run, steps=steps, held_out=held_out_elbo(field, *held, 1e-3))
    return {label: {**row, "of_joint": row["lift"] / rows[JOINT]["lift"]} for label, row in rows.items()}


@styled
def picture(folder: Path) -> Figure:
    """Draw lift and held-out ELBO against steps, one column per setting."""
    results = {path.stem: json.loads(path.read_text())["numbers"] for path in sorted(folder.glob("*.json"))}
    figure = Figure(figsize=(4.2 * len(results), 5.2))
    columns = figure.subplots(2, len(results), sharex="col", squeeze=False).T
    for (above, below), (setting, rows) in zip(columns, results.items(), strict=True):
        for name, colour in ((DATA, LINES[0]), (OWN, LINES[1])):
            fitted_rows = [r for label, r in rows.items() if label.startswith(f"{name}, ") and r["steps"]]
            fitted_rows.sort(key=lambda r: r["steps"])
            keys = ("steps", "lift", "interval", "held_out")
            steps, lifts, intervals, elbos = ([r[key] for r in fitted_rows] for key in keys)
            above.plot(steps, lifts, "o-", color=colour, label=f"retrofit, {name}")
            above.fill_between(steps, *zip(*intervals, strict=True), color=colour, alpha=0.12, lw=0)
            below.plot(steps, elbos, "o-", color=colour)
        joint = rows[JOINT]
        if shipped := rows.get(SHIPPED):
            above.plot(shipped["steps"], shipped["lift"], "D", color=FAINT, label="retrofit, as shipped")
        above.axhline(joint["lift"], color=FAINT, ls="--", label=f"joint training, {joint['steps']:,} steps")
        above.set(title=setting, xscale="log", ylim=(0, None))
        below.set(xlabel="steps of the retrofit")
        above.legend(loc="lower right")
    columns[0][0].set_ylabel("lift: AUPRC ÷ share")
    columns[0][1].set_ylabel("held-out negative ELBO")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=[*CASES, "picture"])
    parser.add_argument("--count", type=int, default=4000, help="samples that are read")
    parser.add_argument("--every", type=int, default=1, help="read the variance at every k-th step")
    parser.add_argument("--data", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.setting != "picture":
        clock = Clock(device := pick_device(arguments.device))
        case = CASES[arguments.setting](arguments.data, device)
        rows = measured(case, arguments.setting, arguments.count, arguments.every, device)
        about = provenance(device, clock.seconds, samples=arguments.count, seeds=[SEED], own_samples=OWN_SAMPLES)
        content = {"provenance": about, "score": case.score, "numbers": rows}
        write_json(arguments.out / f"{arguments.setting}.json", content)
    write_bytes(arguments.out / "curve.png", png(picture(arguments.out)))


if __name__ == "__main__":
    main()
