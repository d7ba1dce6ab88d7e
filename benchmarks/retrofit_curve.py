"""How many steps a retrofit takes, with data and with the network's own samples, beside joint training.

.venv/bin/python benchmarks/retrofit_curve.py checkerboard
.venv/bin/python benchmarks/retrofit_curve.py mnist --device cuda --data ../shared/data/mnist

The shipped flow's noise is fitted anew for each number of steps. Every one of them reads the same samples on the same
way (`fmwc.sampling.reread`), so that rows differ by the noise alone. Joint training has samples of its own; so a lift,
AUPRC over the share that failed, is what is compared, and each row has an interval over resampled samples.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fmwc
from fmwc.checkpoint import load_network
from fmwc.files import write_json
from fmwc.metrics.images import failed
from fmwc.metrics.points import misplaced
from fmwc.metrics.ranking import auprc, bootstrap
from fmwc.propagate import Estimator, Linearised
from fmwc.recipes.checkerboard.recipe import PRESETS as BOARD
from fmwc.recipes.mnist.recipe import JUDGE, WITHIN, Mnist, labels
from fmwc.recipes.own import held_out_elbo
from fmwc.recipes.recipe import Clock, pick_device, provenance
from fmwc.sampling import Trajectory, reread, sample

STEPS = (10, 30, 100, 300, 1000, 3000)
SEED, OWN_SEED, HELD_OUT = 2026, 7, 1000  # nothing was chosen on the samples; the network's own are others


@dataclass(frozen=True)
class Case:
    """One setting: what to fit to, how samples are read, and which of them failed."""

    joint: str
    rows: Callable[[], tuple[Tensor, dict[str, Any]]]
    conditions: Callable[[int], dict[str, Any]]
    bad: Callable[[Trajectory], np.ndarray]
    score: str
    within: str | None
    estimator: Estimator
    batch: int
    lr: float
    trained: int  # steps of the joint training


def cases(data: str, device: torch.device) -> dict[str, Callable[[], Case]]:
    def board() -> Case:
        recipe = BOARD["recommended"]
        return Case(
            "checkerboard-joint",
            recipe.rows,
            lambda count: {},
            lambda run: misplaced(run.x.cpu()),
            "temporal_ratio",
            None,
            Linearised(None),
            1024,
            recipe.lr,
            recipe.iterations,
        )

    def digits() -> Case:
        recipe, judge = Mnist(data=data), load_network(JUDGE, device=device)
        return Case(
            "mnist-joint",
            recipe.rows,
            lambda count: {"y": labels(count, 10).to(device)},
            lambda run: failed(judge, run.x, run.cond["y"]),
            "integrated",
            WITHIN,
            Linearised(2),
            256,
            recipe.noise_lr,
            recipe.iterations,
        )

    return {"checkerboard": board, "mnist": digits}


def lift(case: Case, run: Trajectory, bad: np.ndarray) -> dict[str, Any]:
    score = run.score(case.score, within=case.within).cpu().numpy()

    def read(index: np.ndarray) -> float:
        return auprc(score[index], bad[index]) / bad[index].mean() if bad[index].any() else float("nan")

    return {"lift": read(np.arange(len(bad))), "interval": bootstrap(read, len(bad)), "bad": float(bad.mean())}


def fitted(case: Case, source: str, steps: int, x: Tensor, cond: dict[str, Any], device: torch.device) -> fmwc.Field:
    """The shipped flow with noise fitted anew."""
    shipped = fmwc.load(source, device=device)
    shipped.noise.remove()
    options = shipped.noise.options
    field = fmwc.attach(
        shipped.network,
        include=options["include"],
        exclude=options["exclude"],
        width=options["width"],
        space=shipped.space,
        prior_rate=shipped.prior_rate,
    ).to(device)
    fmwc.fit_noise(field, x, steps, batch=case.batch, lr=case.lr, **cond)
    return field


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=["checkerboard", "mnist"])
    parser.add_argument("--count", type=int, default=4000, help="samples that are read")
    parser.add_argument("--own", type=int, default=10_000, help="samples of the network's own that stand in for data")
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--every", type=int, default=1, help="the variance is read at every k-th step")
    parser.add_argument("--joint", default="", help="the jointly trained field; the shipped one if not given")
    parser.add_argument("--data", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="results/retrofit/SETTING.json if not given")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    clock = Clock(device)
    case = cases(arguments.data, device)[arguments.setting]()
    x, cond = case.rows()
    fresh, fresh_cond = x[:HELD_OUT].to(device), {k: v[:HELD_OUT].to(device) for k, v in cond.items()}
    x, cond = x[HELD_OUT:], {k: v[HELD_OUT:] for k, v in cond.items()}
    draw = partial(sample, steps=50, confidence=False, batch=1024)
    flow = fmwc.load(arguments.setting, device=device)
    here = case.conditions(arguments.own)
    own = draw(flow, arguments.own, seed=OWN_SEED, **here).x
    run = draw(flow, arguments.count, seed=SEED, keep_states=True, **case.conditions(arguments.count))
    bad = case.bad(run)
    joint = fmwc.load(arguments.joint or case.joint, device=device)
    theirs = draw(joint, arguments.count, seed=SEED, keep_states=True, **case.conditions(arguments.count))
    read = partial(reread, confidence=case.estimator, every=arguments.every)
    found: dict[str, Any] = {"joint": {"steps": case.trained, **lift(case, read(joint, theirs), case.bad(theirs))}}
    print(f"joint, {case.trained} steps: lift {found['joint']['lift']:.2f}", flush=True)
    for name, (data, with_) in {"data": (x, cond), "own samples": (own, here)}.items():
        found[name] = {}
        for steps in arguments.steps:
            field = fitted(case, arguments.setting, steps, data, with_, device)
            row = lift(case, read(field, run), bad)
            row["held_out"] = held_out_elbo(field, fresh, fresh_cond, 1e-3)
            row["of_joint"] = row["lift"] / found["joint"]["lift"]
            found[name][str(steps)] = row
            print(
                f"{name}, {steps} steps: lift {row['lift']:.2f} {row['interval']}, held out {row['held_out']:.5f}",
                flush=True,
            )
    about = provenance(device, clock.seconds, samples=arguments.count, seeds=[SEED], own_samples=arguments.own)
    out = arguments.out or Path("results") / "retrofit" / f"{arguments.setting}.json"
    write_json(out, {"provenance": about, "score": case.score, "numbers": found})


if __name__ == "__main__":
    main()
