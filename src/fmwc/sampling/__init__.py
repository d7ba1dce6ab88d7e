"""Sampling: one loop, from noise to a :class:`Trajectory`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.errors import UsageError, pick
from fmwc.field import Reference, Schedule
from fmwc.flow import Space, as_space, euclidean
from fmwc.propagate import Estimator, Linearised, Transport, as_estimator
from fmwc.randomness import Blocks, derive
from fmwc.sampling.adaptive import FEW, Damped, Ema, numbers
from fmwc.sampling.compiled import Compiled
from fmwc.sampling.controllers import Controller, Grid, Uniform
from fmwc.sampling.decoders import DECODERS, Decoder, cost_of, decode_mean
from fmwc.sampling.growing import growing
from fmwc.sampling.parts import Parts
from fmwc.sampling.planned import Extrapolated, Planned, Profile
from fmwc.sampling.rereading import reread
from fmwc.sampling.sampler import Sampler
from fmwc.sampling.schedules import READINGS, fitted
from fmwc.sampling.scores import EARLY, LATE, SCORES, Standard, standard_of
from fmwc.sampling.steppers import STEPPERS, Stepper
from fmwc.sampling.trajectory import Trajectory
from fmwc.sampling.watched import Watched
from fmwc.state import SEEDS, State, as_state, as_whole, batch_size, each, precision_of

__all__ = [
    "DECODERS",
    "EARLY",
    "LATE",
    "PILOT",
    "SCORES",
    "STEPPERS",
    "Compiled",
    "Controller",
    "Damped",
    "Ema",
    "Extrapolated",
    "Grid",
    "Parts",
    "Planned",
    "Profile",
    "Sampler",
    "Schedule",
    "Standard",
    "Stepper",
    "Trajectory",
    "Uniform",
    "Watched",
    "compared",
    "decode_mean",
    "default_estimator",
    "fit_grid",
    "fit_schedule",
    "growing",
    "noise",
    "reread",
    "sample",
    "setting",
    "standard_of",
    "stream",
    "survey",
]

PROBES = 2  # random probes a reading for larger states; a score over many readings averages their noise
PROJECTIONS = 8  # random projections of the endpoint, read once
_BOUNDS: dict[str, tuple[int, int, str]] = {  # of what is a whole number
    "count": (1, 10**12, "sample"),
    "first": (0, 10**12, ""),
    "batch": (1, 10**12, "sample"),
    "steps": (1, 10**6, "step"),
    "evaluations": (
        1,
        10**7,
        "evaluation",
    ),  # of as many steps: a step takes two velocities at most, and a velocity five
    "seed": (*SEEDS, ""),
}


def _whole(name: str, value: Any) -> int:
    return as_whole(value, name, *_BOUNDS[name])


def noise(
    space: Space | Sequence[int] | int,
    count: int,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    first: int = 0,
    **cond: Any,
) -> Any:
    """x0 of `count` samples of a seed, the `first …`: a longer run starts with the same samples."""
    return as_space(space).given(cond).noise(count, Blocks(derive(seed, "x0"), first, count), device)


def default_estimator(space: Space) -> Estimator:
    """Linearised: exact for states of a few numbers, by random probes for images."""
    return Linearised(None if numbers(space) <= FEW else PROBES)


def setting(estimator: Estimator | str | None, steps: int, stepper: str, schedule: int | Sequence[float]) -> str:
    """In words, what a score was read with: scores read otherwise are not comparable."""
    reads = None if estimator is None else as_estimator(estimator)
    return f"{reads}, {steps} {stepper} steps, read at {schedule}"


def sample(
    field: Any,
    count: int | None = None,
    *,
    steps: int | None = None,
    evaluations: int | None = None,
    times: Sequence[float] | None = None,
    controller: Controller | None = None,
    seed: int = 0,
    first: int = 0,
    confidence: bool | str | Estimator = True,
    transport: bool | int = False,
    stepper: str = "euler",
    schedule: int | Sequence[float] | Schedule | str = 1,
    decoder: str | Decoder = "map",
    x0: State | None = None,
    start: float | Tensor = 0.0,
    space: Space | Sequence[int] | int | None = None,
    record: str = "full",
    anneal: Mapping[str, float] | None = None,
    keep_states: bool = False,
    batch: int = 16384,
    progress: Callable[[int], None] | None = None,
    parts: Parts | None = None,
    **cond: Any,
) -> Trajectory:
    """Draws samples with their confidence. Turning confidence on does not change a sample.

    Arguments:
        field: A field, compiled (:class:`Compiled`) or not (or, with `confidence=False`, any velocity function).
        count: How many samples; not needed with `x0`.
        steps: Equal steps to take (50 if nothing else is said); or
        evaluations: evaluations of the network to spend, exactly (a two-stage stepper ends an odd number with an Euler
            step); or
        times: the times to step through, rising to 1; or
        controller: what picks the times: `Ema(10)`, `survey(field).plan(10)`.
        seed: Seeds the noise; the same samples come however the run is split into batches (to rounding, and with the
            stochastic decoder only where a network sees as many rows of every sample).
        first: The number of the first sample: a run may be drawn in pieces, which are those of the whole.
        confidence: `True` (linearised; by random probes where a state is more than a few numbers), `False`, or an
            estimator by name or with options.
        transport: `True` adds the transported dispersion (by random projections where a state is more than a few
            numbers); a number takes so many random projections.
        stepper: `euler`, `midpoint` or `heun`.
        schedule: Read the variance at every k-th step, or at a list of times, or `adaptive`: at the few that tell most
            of the score, by the field's own schedule (:func:`fit_schedule` makes one).
        decoder: `map`, `stochastic` or `mean5`.
        x0, start: Start from these states, at this t (a number, or one a sample).
        space: The shape of a sample, where the field does not know it.
        record: `full`, or `total` to keep one variance a sample and channel, or `score` to keep a sample's score alone:
            memory does not grow with the steps.
        anneal: Anti-annealing, `{"coord": 5.0}`: those channels follow their velocity at 1 + s·t times its speed; as
            the space says if not given.
        keep_states: Keep the states of every step.
        batch: Samples integrated together, at most: where they do not fit in memory, half of them, and so on.
        progress: Called with the number of samples done since the last call.
        parts: A folder that batches are kept in as they are drawn (:class:`Parts`); those that are there already are
            not drawn again, so that a run that was interrupted goes on.
        cond: Given to the network; tensors with a row for each sample are split with the batches.
    """
    if "keep" in cond:
        raise UsageError("keep was replaced by parts; parts=fmwc.sampling.Parts(folder)")
    seed, first, batch = _whole("seed", seed), _whole("first", first), _whole("batch", batch)
    count, steps, evaluations = (
        None if value is None else _whole(name, value)
        for name, value in (("count", count), ("steps", steps), ("evaluations", evaluations))
    )
    where = getattr(field, "space", None) if space is None else as_space(space)
    if x0 is not None:
        device = _device(field) if hasattr(field, "parameters") or hasattr(field, "device") else None
        x0 = as_state(x0, "x0", getattr(field, "network", field), device)
    if where is None:
        if not isinstance(x0, Tensor):
            raise UsageError("the shape of a sample is not known; give space=(...) here or to attach, or x0")
        where = euclidean(x0.shape[1:])
    if count is None and x0 is None:
        raise UsageError("say how many samples: sample(field, 1000)")
    if x0 is not None and count is not None and count != batch_size(x0):
        raise UsageError(f"x0 holds {batch_size(x0)} states, and {count} samples were asked for")
    if times is not None and not (isinstance(start, (int, float)) and start == 0):
        raise UsageError("times say where to start; leave start out")
    how = pick(STEPPERS, stepper, "stepper")
    chosen, tail = _controller(steps, evaluations, times, controller, how, cost_of(decoder))
    if (confidence is True or isinstance(confidence, str) or transport) and not hasattr(field, "run"):
        raise UsageError(
            "a plain network has no noise to read confidence from; attach it first, or say confidence=False"
        )
    estimator = (
        None if confidence is False else default_estimator(where) if confidence is True else as_estimator(confidence)
    )
    schedule, reference = _schedule(field, schedule)
    projections = (None if numbers(where) <= FEW else PROJECTIONS) if transport is True else int(transport)
    sampler = Sampler(
        field,
        where,
        chosen,
        stepper=stepper,
        estimator=estimator,
        decoder=decoder,
        schedule=schedule,
        transport=Transport(projections) if transport else None,
        record=record,
        score=getattr(reference, "score", "temporal_ratio"),
        batch=batch,
        tail=tail,
        anneal=anneal,
        keep_states=keep_states,
        progress=progress,
        parts=parts,
    )
    device = _device(field)
    cond = {
        k: torch.as_tensor(v, device=device) if isinstance(v, (list, tuple, np.ndarray)) else v for k, v in cond.items()
    }
    where.check_rows(cond, batch_size(x0) if count is None else count)  # type: ignore[arg-type]
    begin: Any = x0
    if x0 is None:
        precision = precision_of(getattr(field, "network", field))
        begin = each(lambda c: c.to(precision), noise(where, count, seed, device, first=first, **cond))  # type: ignore[arg-type]
    trajectory = sampler(begin, start=times[0] if times else start, seed=seed, first=first, **cond)
    if reference is None or estimator is None:
        return trajectory
    usual = times is None and controller is None and isinstance(start, (int, float)) and start == 0
    ordinary = usual and anneal is None and decoder == "map"
    comparable = ordinary and reference.setting == setting(estimator, chosen.steps, stepper, schedule)
    return compared(trajectory, reference, comparable)


def compared(run: Trajectory, reference: Reference, comparable: bool) -> Trajectory:
    """The run by the reference's score: beside its samples where it was read as they were, else within itself."""
    if comparable:
        standard = reference.standard and reference.standard._replace(source="checkpoint")
        return replace(run, reference=reference.quantiles, standard=standard, default_score=reference.score)
    standard, run = None, replace(run, default_score=reference.score)
    if reference.standard is not None:
        name = reference.standard.cond
        with suppress(UsageError, KeyError):  # across conditions only where it is too small for more
            standard = standard_of(name, run.score(), run.cond[name])
    return replace(run, standard=standard)


def stream(
    field: Any, count: int, *, batch: int = 16384, record: str = "score", **options: Any
) -> Iterator[Trajectory]:
    """The samples of `sample(field, count, …)`, a batch at a time: memory grows neither with them nor with the steps.

    Confidence is a sample's place among the checkpoint's reference, so what is asked for is read as that was.

    Arguments:
        batch: Samples drawn together, and handed over.
        record, options: Those of :func:`sample`; tensors with a row for each sample are split.
    """
    count, batch = _whole("count", count), _whole("batch", batch)
    if "first" in options:
        raise UsageError("a stream begins with its first sample; leave out first")
    own = inspect.signature(sample).parameters  # others are conditions
    lists = {k: torch.as_tensor(v) for k, v in options.items() if k not in own and isinstance(v, (list, np.ndarray))}
    options |= lists
    for first in range(0, count, batch):
        size = min(batch, count - first)
        here = {k: v[first : first + size] if _rows(v) == count else v for k, v in options.items()}
        part = sample(field, size, first=first, batch=batch, record=record, **here)
        if part.reference is None and (len(part.times) or part.scores is not None):
            raise UsageError(
                "samples that are not held together are ranked among a checkpoint's reference, and there is none for "
                "this setting; draw them with sample(), or as the reference was read"
            )
        yield part


def _rows(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.ndim else 0


def _schedule(field: Any, schedule: int | Sequence[float] | Schedule | str) -> tuple[int | Sequence[float], Any]:
    """When to read, and the reference for what is read then."""
    if isinstance(schedule, str):
        pick({"adaptive": 0}, schedule, "schedule")
        if getattr(field, "schedule", None) is None:
            raise UsageError(
                "this field has no schedule of its own; field.schedule = fmwc.sampling.fit_schedule(field)"
            )
        return _schedule(field, field.schedule)
    if isinstance(schedule, Schedule):
        return schedule.times, schedule.reference
    return schedule, getattr(field, "reference", None)


PILOT = 1000  # samples whose variance says where steps go
POWER = 2.0  # of the measure: more drops the outer cells of the Checkerboard (fmwc study checkerboard --wide)


def survey(
    field: Any, *, pilot: int | Trajectory = PILOT, power: float = POWER, steps: int = 50, seed: int = 0, **options: Any
) -> Profile:
    """Where on the way a checkpoint's variance is, from a pilot run: made once, used for every run after it.

    Arguments:
        field: A field.
        pilot: How many samples to draw, or a run at hand whose samples share their times.
        power: p of the measure, the mean over samples of σ^p.
        steps, seed, options: Those of :func:`sample`, for the pilot (`y=…`).
    """
    run = pilot if isinstance(pilot, Trajectory) else sample(field, pilot, steps=steps, seed=seed, **options)
    if not len(run.times) or not bool((run.times == run.times[:, :1]).all()):
        raise UsageError("a pilot reads the variance, at the same times for every sample")
    return Profile(run.times[:, 0], run.std, power)


def fit_grid(
    field: Any, steps: int, *, pilot: int | Trajectory = PILOT, power: float = POWER, **options: Any
) -> list[float]:
    """A shared grid for `sample(times=…)`: each step takes an equal share of ∫ E[σ^p] dt, by a pilot run.

    Arguments:
        field: A field.
        steps: How many steps the grid has.
        pilot, power, options: As :func:`survey` takes them, but for its steps.
    """
    return list(survey(field, pilot=pilot, power=power, **options).grid(steps))


def fit_schedule(
    field: Any,
    readings: int = READINGS,
    *,
    pilot: int | Trajectory = PILOT,
    steps: int = 50,
    seed: int = 0,
    confidence: bool | str | Estimator = True,
    stepper: str = "euler",
    **options: Any,
) -> Schedule:
    """Few times to read the variance at, for `sample(schedule=…)`: those that tell most of the field's score.

    >>> field.schedule = fit_schedule(field)  # doctest: +SKIP
    >>> sample(field, 1000, schedule="adaptive")  # doctest: +SKIP

    Made once, with as many steps as it is used with, and saved with the field. Other scores, peak or those of other
    windows, are not to be read at these times.

    Arguments:
        field: A field.
        readings: How many times.
        pilot: How many samples to draw, or a run at hand that was read at every step, by `confidence`.
        steps, seed, confidence, stepper, options: Those of :func:`sample`, for the pilot (`y=…`).
    """
    estimator = default_estimator(field.space) if confidence is True else confidence
    if isinstance(pilot, Trajectory):
        run = pilot
        if len(run.grid) - 1 != steps:
            raise UsageError(f"the pilot took {len(run.grid) - 1} steps, and a schedule for {steps} is asked for")
    else:
        how: dict[str, Any] = {"steps": steps, "seed": seed, "stepper": stepper, "record": "total", **options}
        run = sample(field, pilot, confidence=estimator, **how)
    return fitted(run, readings, setting(estimator, steps, stepper, "{}"))  # type: ignore[arg-type]


def _device(field: Any) -> torch.device:
    """Where a field, or a plain network, lives; a velocity function that does not say lives on the CPU."""
    if hasattr(field, "device"):
        return torch.device(field.device)
    parameter = next(field.parameters(), None) if isinstance(field, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _controller(
    steps: int | None,
    evaluations: int | None,
    times: Sequence[float] | None,
    controller: Controller | None,
    stepper: Stepper,
    cost: int,
) -> tuple[Controller, int]:
    """The controller, and how many of its last steps are Euler's."""
    if sum(choice is not None for choice in (steps, evaluations, times, controller)) > 1:
        raise UsageError("give one of steps, evaluations and times, or a controller")
    if controller is not None:
        return controller, 0
    if times is not None:
        return Grid(tuple(float(t) for t in times)), 0
    if evaluations is None:
        return Uniform(50 if steps is None else steps), 0
    velocities, rest = divmod(evaluations, cost)
    if rest:
        raise UsageError(f"this decoder takes {cost} evaluations a velocity, so {evaluations} cannot be spent exactly")
    whole, tail = divmod(velocities, stepper.evaluations)
    return Uniform(whole + tail), tail
