r"""Pilot runs: where on the way the variance is (:func:`survey`), and the few times that tell most of a score.

:func:`fit_schedule` draws a pilot that is read at every step. It leaves out readings, one after another, so that the
score s of the pilot's samples stays most like itself, and then exchanges the K readings that are left for others as
long as that helps:

.. math:: \max_{|T| = K} \; ρ \big( s_T, s \big)

with Pearson's ρ, which the few most doubtful samples dominate. A reading stands until the next, as everywhere
(:attr:`Trajectory.weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.estimators import Estimator
from fmwc.references import ReadWith, Reference, Schedule
from fmwc.sampling.confidence import chosen_estimator, default_estimator, needs_variance, read_with
from fmwc.sampling.config import AS_REFERENCE, AsReference, SamplingConfig
from fmwc.sampling.controllers import Grid, Profile
from fmwc.sampling.sample import sample
from fmwc.sampling.scores import standard_of
from fmwc.sampling.trajectory import Trajectory

__all__ = ["PILOT", "fit_grid", "fit_schedule", "fitted", "score_at", "survey"]

PILOT = 1000  # samples whose variance says where steps go
POWER = 2.0  # of the measure: more drops the outer cells of the Checkerboard (`study checkerboard --wide`)
READINGS = 3  # makes 50 steps 1.2 times as long (results/bench)
LEVELS = 201  # quantiles of the pilot's scores


def survey(
    field: Any,
    *,
    pilot: int | Trajectory = PILOT,
    power: float = POWER,
    steps: int = 50,
    seed: int = 0,
    cond: Mapping[str, Any] | None = None,
    **options: Any,
) -> Profile:
    """Return where along the trajectories a field's variance is, by a pilot run: made once, used for every run after.

    Arguments:
        field: A field.
        pilot: How many samples to draw, or a run at hand whose samples share their times.
        power: p of the measure, the mean over samples of σ^p.
        steps, seed, cond, options: Those of :func:`fmwc.sample`, for the pilot.
    """
    if isinstance(pilot, Trajectory):
        run = pilot
    else:
        how: dict[str, Any] = {"steps": steps, "seed": seed, "check": False, "cond": cond, **options}
        confidence = how.get("confidence", AsReference())
        if field.space is not None:  # also where the field's score takes none
            how["confidence"] = chosen_estimator(field.space, field.reference, confidence, always=True)
        run = sample(field, pilot, **how)
    if not len(run.times) or not bool((run.times == run.times[:, :1]).all()):
        raise UsageError("a pilot reads the variance, at the same times for every sample")
    return Profile(run.times[:, 0], run.std, power)


def fit_grid(
    field: Any,
    steps: int,
    *,
    pilot: int | Trajectory = PILOT,
    power: float = POWER,
    cond: Mapping[str, Any] | None = None,
    **options: Any,
) -> Grid:
    """Return the controller whose steps each take an equal share of ∫ E[σ^p] dt, by a pilot run.

    >>> sample(field, 1000, config=SamplingConfig(controller=fit_grid(field, 10)))  # doctest: +SKIP

    Arguments:
        field: A field.
        steps: How many steps the grid has.
        pilot, power, cond, options: As :func:`survey` takes them, but for its steps.
    """
    return Grid(survey(field, pilot=pilot, power=power, cond=cond, **options).grid(steps))


def fit_schedule(
    field: Any,
    readings: int = READINGS,
    *,
    pilot: int | Trajectory = PILOT,
    steps: int = 50,
    seed: int = 0,
    confidence: Estimator | None = AS_REFERENCE,
    cond: Mapping[str, Any] | None = None,
    config: SamplingConfig | None = None,
    **options: Any,
) -> Schedule:
    """Return the few times to read the variance at that tell most of the field's score.

    >>> field.schedule = fit_schedule(field)  # doctest: +SKIP
    >>> sample(field, 1000, schedule=Schedule.adaptive())  # doctest: +SKIP

    Fit it once, for the number of steps that it is used with, and save it with the field. Other scores, such as peak or
    those of other windows, cannot be read at these times.

    Arguments:
        field: A field.
        readings: How many times.
        pilot: How many samples to draw, or a run at hand that `confidence` read at every step.
        steps, seed, confidence, cond, config, options: Those of :func:`fmwc.sample`, for the pilot.
    """
    estimator = default_estimator(field.space) if isinstance(confidence, AsReference) else confidence
    config = config or SamplingConfig()
    if isinstance(pilot, Trajectory):
        run = pilot
        if len(run.grid) - 1 != steps:
            raise UsageError(f"the pilot took {len(run.grid) - 1} steps, and a schedule for {steps} is asked for")
    else:
        how = replace(config, record=config.record or "total")
        run = sample(field, pilot, steps=steps, seed=seed, confidence=estimator, cond=cond, config=how, **options)
    if not needs_variance(run.default_score):
        raise UsageError(f"the field's score, {run.default_score}, reads no variance, so it takes no schedule")
    return fitted(run, readings, lambda times: read_with(estimator, steps, config.stepper, Schedule.at(times)))


def fitted(run: Trajectory, readings: int, read_with: Callable[[tuple[float, ...]], ReadWith]) -> Schedule:
    """Return the schedule for a pilot's score.

    Arguments:
        run: The pilot, read at every step.
        readings: K.
        read_with: How a run that is read at these times is made (:func:`read_with`).
    """
    every = range(len(run.times))
    if not 1 <= readings <= len(every):
        raise UsageError(f"a schedule takes 1 to {len(every)} of the pilot's readings, got {readings}")
    if not bool((run.times == run.times[:, :1]).all()):
        raise UsageError("a pilot reads the variance at the same times for every sample")
    run = run.compact().to("cpu")  # thousands of small sums
    whole = score_at(run, every)

    def alike(steps: Iterable[int]) -> float:
        try:
            both = torch.stack([score_at(run, steps), whole]).double()
        except UsageError:  # nothing is left in a window that the score looks at
            return -math.inf
        return float(torch.corrcoef(both)[0, 1].nan_to_num(-1.0))

    kept = frozenset(every)
    while len(kept) > readings:
        kept = max((kept - {step} for step in sorted(kept)), key=alike)
    while others := [kept - {old} | {new} for old in sorted(kept) for new in every if new not in kept]:
        best = max(others, key=alike)
        if alike(best) <= alike(kept):
            break
        kept = best
    if (agreement := alike(kept)) == -math.inf:
        raise UsageError(f"{run.default_score} cannot be read from {readings} readings; take more")
    # In the fewest digits that give the same number again: rounded up, a time would be read a step later.
    times = tuple(float(str(run.times[step, 0].cpu().numpy())) for step in sorted(kept))
    few, standard = run.read_at(sorted(kept)), None
    if run.standard is not None:
        name = run.standard.cond
        standard = standard_of(name, few.score(run.default_score), run.cond[name])
    score = replace(few, standard=standard).score()
    quantiles = score.quantile(torch.linspace(0, 1, LEVELS, device=score.device, dtype=score.dtype))
    return Schedule(times, Reference(run.default_score, read_with(times), quantiles, standard), agreement)


def score_at(run: Trajectory, steps: Iterable[int]) -> Tensor:  # (B,)
    """The score read at some of the steps, among samples of the same condition where the run's own is."""
    within = run.standard.cond if run.standard else None
    return run.read_at(sorted(steps)).score(run.default_score, within=within)
