"""Draw the samples of each part of a study: labelled rows, each with the data for the judge and the cost.

The baselines of a row use the same number of network evaluations and, if they start from noise, the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from experiments.common.experiment import Experiment, Intent
from fmwc.errors import UsageError
from fmwc.provenance import Clock
from fmwc.sampling import (
    Controller,
    Damped,
    Ema,
    Extrapolated,
    Grid,
    SamplingConfig,
    Schedule,
    Trajectory,
    Uniform,
    fit_grid,
)
from fmwc.sampling.config import needs_moments
from fmwc.uses.edit import critical_time, edit, random_times

STEPS = 50
SWEEP = (5, 10, 20, 30, 50)
FIXED = (0.0, 0.2, 0.4, 0.6, 0.8)
PILOT, PILOT_SEED = 1_000, 99
BLIND = (0.0, 0.71, 0.78, 0.84, 0.85, 1.0)  # the five steps with the lowest misplacement for another network


@dataclass(frozen=True)
class Drawn:
    """A row: tensors for the judge and for figures, and information on how the samples were drawn."""

    tensors: dict[str, Tensor]
    info: dict[str, Any]


Rows = Iterator[tuple[str, Drawn]]


def _row(experiment: Experiment, run: Trajectory, evaluations: float, seconds: float, **info: Any) -> Drawn:
    return Drawn(experiment.keep(run.x, run.cond), {"evaluations": evaluations, "seconds": seconds, **info})


def _draw(experiment: Experiment, count: int, seed: int, **options: Any) -> tuple[Trajectory, Drawn]:
    clock = Clock(experiment.field.device)
    run = experiment.draw(count, seed, **options)
    return run, _row(experiment, run, run.evaluations, clock.seconds)


# ---- filtering and risk control ----------------------------------------------------------------------------------


def draw_samples(experiment: Experiment, seed: int) -> Rows:
    """Draw samples with all scores and their confidence, or their rank if the confidence is withheld."""
    options = {"transport": experiment.dispersion, "schedule": Schedule.every(experiment.usual)}
    run, row = _draw(experiment, experiment.sizes.samples, seed, **options)
    row.tensors["confidence"] = (run.rank if (confidence := run.confidence) is None else confidence).float()
    row.tensors.update({f"score {name}": score.float() for name, score in experiment.scores(run).items()})
    yield "samples", row


# ---- editing -----------------------------------------------------------------------------------------------------


def _edit_times(experiment: Experiment, run: Trajectory, intent: Intent, seed: int) -> dict[str, Any]:
    """Return the times of edits by name; the first is the baseline."""
    peaks = {"variance": critical_time(run, intent.channel), "transported": critical_time(run, kind="transported")}
    return {
        "random": random_times(run, seed, experiment.sizes.replicates),
        **peaks,
        **{f"{intent.before:g} before {name}": (peak - intent.before).clamp_min(0) for name, peak in peaks.items()},
        **{f"t = {t}": t for t in FIXED},
    }


def draw_edits(experiment: Experiment, seed: int) -> Rows:
    """Add noise to a channel at several times, and integrate all channels from there."""
    count, replicates = experiment.sizes.edited, experiment.sizes.replicates
    run, row = _draw(experiment, count, seed, transport=True, config=SamplingConfig(keep_states=True))
    row.tensors.update(experiment.shown(run))
    yield "seeds", row
    steps = len(run.times)
    run_to_edit = run.read_at(
        range((steps - 1) % experiment.every, steps, experiment.every)
    )  # sufficient to rank edits
    options = {**experiment.options(), "seed": seed, "replicates": replicates}
    for name, intent in experiment.intents.items():
        cond = experiment.edited_conditions(run, intent, seed)
        options["scale"] = intent.scale
        for label, at in _edit_times(experiment, run, intent, seed).items():
            clock = Clock(experiment.field.device)
            edited = edit(experiment.field, run_to_edit, intent.channel, at=at, cond=cond, **options)
            time = torch.as_tensor(at, dtype=torch.float32).cpu()
            info = {"time": float(time.mean()), "scale": intent.scale, "seconds": clock.seconds}
            new_cond = {k: v.repeat_interleave(replicates, 0) for k, v in cond.items()}
            row = Drawn(experiment.keep(edited.x, {**edited.cond, **new_cond}), info)
            time = time.reshape(-1, 1) if time.ndim < 2 else time
            row.tensors["time"] = time.expand(count, replicates).flatten()
            with suppress(UsageError):  # too few readings for the score
                row.tensors["score"] = edited.score(edited.default_score).float()
            row.tensors.update(experiment.shown(edited, replicates))
            yield f"{name}, {label}", row


# ---- steps -------------------------------------------------------------------------------------------------------

ByCount = Callable[[int], Controller]  # a controller for a number of steps


def _controllers(experiment: Experiment, pilot: Trajectory) -> dict[str, ByCount]:
    """Return the controllers by name; the first is the baseline."""

    def grid(steps: int) -> Controller:
        return fit_grid(None, steps, pilot=pilot, power=experiment.power)

    def extrapolated(times: ByCount) -> ByCount:
        return lambda steps: Extrapolated(times(steps), experiment.weight)

    return {
        "uniform": Uniform,
        "Ema (paper)": Ema,
        "Damped (paper)": Damped,
        "fitted grid": grid,
        "uniform, extrapolated": extrapolated(Uniform),
        "fitted grid, extrapolated": extrapolated(grid),
    }


def draw_steps(experiment: Experiment, seed: int) -> Rows:
    """Sweep the number of steps of every controller, at exactly N evaluations; variance readings cost extra time."""
    count = experiment.sizes.swept
    pilot = experiment.draw(min(PILOT, count), PILOT_SEED)
    for (name, make), steps in product(_controllers(experiment, pilot).items(), SWEEP):
        controller = make(steps)
        options = {} if needs_moments(controller) else {"confidence": None}
        run, row = _draw(experiment, count, seed, config=SamplingConfig(controller=controller), **options)
        row.info["grid"] = [round(float(t), 3) for t in run.grid.mean(1)]
        row.info["grid_std"] = [round(float(t), 3) for t in run.grid.std(1)]
        yield f"{name}, {steps}", row
    if experiment.name == "checkerboard":
        _, row = _draw(experiment, count, seed, confidence=None, config=SamplingConfig(controller=Grid(BLIND)))
        yield f"blind grid, {len(BLIND) - 1}", Drawn(row.tensors, {**row.info, "seconds": 0.0, "grid": list(BLIND)})


# ---- guidance ----------------------------------------------------------------------------------------------------


def draw_guides(experiment: Experiment, seed: int) -> Rows:
    """Draw from the same noise with and without guidance."""
    for name, guide in {"none": None, **experiment.guides}.items():
        options = {} if guide is None else {"config": SamplingConfig(decoder=guide)}
        run, row = _draw(experiment, experiment.sizes.guided, seed, confidence=None, **options)
        row.tensors.update(experiment.shown(run))
        yield name, row


DRAWINGS: dict[str, Callable[[Experiment, int], Rows]] = {
    "samples": draw_samples,
    "edit": draw_edits,
    "steps": draw_steps,
    "guide": draw_guides,
}
