r"""Pilot runs, which place steps by the variance (:func:`fit_grid`) and choose the times that determine a score.

:func:`fit_schedule` draws a pilot that is read at every step. It removes one reading after another, each time the one
that changes the score s of the pilot's samples least, and then exchanges the remaining K readings for others while
that increases the similarity to s:

.. math:: \max_{|T| = K} \; ρ \bigl( s_T, s \bigr)

with Pearson's ρ, which the few most doubtful samples dominate. A reading holds until the next one
(:attr:`Trajectory.weights`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.estimators import Estimator
from fmwc.sampling.confidence import ReadWith, Reference, Schedule, choose_estimator, default_estimator, read_with
from fmwc.sampling.config import AS_REFERENCE, AsReference, Grid, SamplingConfig
from fmwc.sampling.sampler import sample
from fmwc.sampling.trajectory import Trajectory, needs_variance, standard_of
from fmwc.state import as_whole

PILOT = 1000  # samples
POWER = 2.0  # a larger one misses the outer cells of the Checkerboard
READINGS = 3  # a run of 50 steps then takes 1.2 times as long (results/bench)
LEVELS = 201  # quantiles of the pilot's scores


def fit_grid(field: Any, steps: int, *, pilot: int | Trajectory = PILOT, power: float = POWER, **options: Any) -> Grid:
    r"""Return a controller whose steps each take an equal share of ∫ E[σ^p] dt, measured by a pilot run.

    Steps with equal shares spend the network's evaluations where the variance is large. With p > 1, the few doubtful
    samples dominate the mean; the other samples are accurate on any grid. Fit the grid once and use it for all runs.

    >>> sample(field, 1000, config=SamplingConfig(controller=fit_grid(field, 10)))  # doctest: +SKIP

    Arguments:
        field: A field.
        steps: The number of steps of the grid.
        pilot: The number of samples to draw, or an existing run with the same times for all samples. Each reading
            holds until the next one, and the last until t = 1.
        power: The exponent p.
        options: Options of :func:`fmwc.sample` for the pilot, such as `seed` and `cond`.
    """
    steps = as_whole(steps, "steps", 1, 10**6, "step")
    if not 0 <= power < math.inf:
        raise UsageError(f"power must be at least 0, got {power}")
    if isinstance(pilot, Trajectory):
        run = pilot
    else:
        options = {"check": False, **options}
        if field.space is not None:  # read the variance even if the field's score does not need it
            confidence = options.get("confidence", AS_REFERENCE)
            options["confidence"] = choose_estimator(field.space, field.reference, confidence, always=True)
        run = sample(field, pilot, **options)
    _require_shared_times(run)
    edges = torch.cat([run.times[:, 0].double().cpu(), torch.ones(1, dtype=torch.float64)])
    std = run.std.double().cpu()
    # Divide by the largest, so that no power overflows; keep positive, so that shares rise.
    density = (std / std.amax().clamp_min(torch.finfo(std.dtype).tiny)).pow(power).mean(1)
    density = torch.where(density.amax() > 0, density, 1.0).clamp_min(1e-9 * density.amax())
    shares = torch.cat([edges.new_zeros(1), (density * edges.diff()).cumsum(0)])
    inner = np.interp(np.arange(1, steps) / steps, shares / shares[-1], edges)
    return Grid((float(edges[0]), *inner.tolist(), 1.0))


def fit_schedule(
    field: Any,
    readings: int = READINGS,
    *,
    pilot: int | Trajectory = PILOT,
    steps: int = 50,
    confidence: Estimator | None = AS_REFERENCE,
    config: SamplingConfig | None = None,
    **options: Any,
) -> Schedule:
    """Return the few times at which the variance determines most of the field's score.

    >>> field.schedule = fit_schedule(field)  # doctest: +SKIP
    >>> sample(field, 1000, schedule=Schedule.adaptive())  # doctest: +SKIP

    Fit the schedule once, for the number of steps used later, and save it with the field. Other scores, such as peak or
    other time windows, are not valid with this schedule.

    Arguments:
        field: A field.
        readings: The number of times.
        pilot: The number of samples to draw, or an existing run in which `confidence` read every step.
        steps, confidence, config, options: Arguments of :func:`fmwc.sample` for the pilot.
    """
    estimator = default_estimator(field.space) if isinstance(confidence, AsReference) else confidence
    config = config or SamplingConfig()
    if isinstance(pilot, Trajectory):
        run = pilot
        if len(run.grid) - 1 != steps:
            raise UsageError(f"the pilot took {len(run.grid) - 1} steps; give steps={len(run.grid) - 1}, not {steps}")
    else:
        config = replace(config, record=config.record or "total")
        run = sample(field, pilot, steps=steps, confidence=estimator, config=config, **options)
    if not needs_variance(run.default_score):
        raise UsageError(f"the field's score, {run.default_score}, does not use the variance, so it needs no schedule")
    found = fitted(run, readings, lambda times: read_with(estimator, steps, config.stepper, Schedule.at(times)))
    assert found.reference is not None
    return replace(found, reference=found.reference._replace(weights=field.checksum(), space=field.space))


def fitted(run: Trajectory, readings: int, read_with: Callable[[tuple[float, ...]], ReadWith]) -> Schedule:
    """Return the schedule for a pilot's score.

    Arguments:
        run: The pilot, read at every step.
        readings: The number of times K.
        read_with: Returns the settings of a run that is read at these times (:func:`fmwc.sampling.read_with`).
    """
    every = range(len(run.times))
    if not 1 <= readings <= len(every):
        raise UsageError(
            f"readings must lie between 1 and {len(every)}, the number of the pilot's readings; got {readings}"
        )
    _require_shared_times(run)
    run = run.compact().to("cpu")  # thousands of small sums
    whole = score_at(run, every)

    def similarity(steps: Iterable[int]) -> float:
        try:
            both = torch.stack([score_at(run, steps), whole]).double()
        except UsageError:  # a window of the score has no readings
            return -math.inf
        return float(torch.corrcoef(both)[0, 1].nan_to_num(-1.0))

    chosen = frozenset(every)
    while len(chosen) > readings:
        chosen = max((chosen - {step} for step in sorted(chosen)), key=similarity)
    while others := [chosen - {old} | {new} for old in sorted(chosen) for new in every if new not in chosen]:
        best = max(others, key=similarity)
        if similarity(best) <= similarity(chosen):
            break
        chosen = best
    if (agreement := similarity(chosen)) == -math.inf:
        raise UsageError(f"{run.default_score} cannot be computed from {readings} readings; increase readings")
    # The shortest decimals that give the same number; a time rounded up would be read one step later.
    times = tuple(float(str(run.times[step, 0].cpu().numpy())) for step in sorted(chosen))
    few, standard = run.read_at(sorted(chosen)), None
    if run.standard is not None:
        name = run.standard.cond
        standard = standard_of(name, few.score(run.default_score), run.cond[name])
    score = replace(few, standard=standard).score()
    quantiles = score.quantile(torch.linspace(0, 1, LEVELS, device=score.device, dtype=score.dtype))
    return Schedule(times, Reference(run.default_score, read_with(times), quantiles, standard), agreement)


def score_at(run: Trajectory, steps: Iterable[int]) -> Tensor:  # (B,)
    """Return the score from some of the steps, standardised within conditions if the run's score is."""
    within = run.standard.cond if run.standard else None
    return run.read_at(sorted(steps)).score(run.default_score, within=within)


def _require_shared_times(run: Trajectory) -> None:
    if not len(run.times) or not bool((run.times == run.times[:, :1]).all()):
        raise UsageError("the pilot must read the variance, at the same times for every sample")
