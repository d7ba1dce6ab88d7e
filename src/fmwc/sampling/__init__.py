"""Sampling: one loop, from noise to a :class:`Trajectory`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.checks import run_checks, suited
from fmwc.checks.residuals import same
from fmwc.errors import UsageError, pick
from fmwc.field import ReadWith, Reference, Schedule, same_times
from fmwc.flow import Space, as_space, euclidean
from fmwc.propagate import Estimator, Linearised, Transport, as_estimator, estimator_of
from fmwc.randomness import Blocks, derive
from fmwc.sampling.adaptive import FEW, Damped, Ema, numbers
from fmwc.sampling.compiled import Compiled
from fmwc.sampling.controllers import Controller, Grid, Uniform, foreseen
from fmwc.sampling.controllers import needs_variance as reads_variance
from fmwc.sampling.decoders import DECODERS, Decoder, cost_of, decode_mean
from fmwc.sampling.growing import growing
from fmwc.sampling.parts import Parts
from fmwc.sampling.planned import Extrapolated, Planned, Profile
from fmwc.sampling.rereading import reread
from fmwc.sampling.sampler import Sampler
from fmwc.sampling.schedules import READINGS, fitted
from fmwc.sampling.scores import EARLY, LATE, SCORES, Standard, combined, names_of, parsed, standard_of
from fmwc.sampling.steppers import STEPPERS, Stepper
from fmwc.sampling.trajectory import Trajectory
from fmwc.sampling.watched import Watched
from fmwc.state import SEEDS, State, as_numbers, as_state, as_whole, batch_size, each, precision_of

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
    "for_each",
    "growing",
    "needs_variance",
    "noise",
    "read_times",
    "read_with",
    "reread",
    "sample",
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


def read_with(
    estimator: Estimator | str | None, steps: int, stepper: str, schedule: int | Sequence[float] = 1
) -> ReadWith:
    """How a run of equal steps from t = 0 is made and read."""
    reads = "" if estimator is None else str(as_estimator(estimator))
    return ReadWith(reads, steps, stepper, read_times(steps, schedule) if reads else ())


def read_times(steps: int, schedule: int | Sequence[float]) -> tuple[float, ...]:
    """The times that a run of equal steps is read at.

    >>> read_times(10, 5), read_times(10, [0.2, 0.35])
    ((0.4, 0.9), (0.2, 0.4))
    """
    read = foreseen(schedule, Uniform(steps), torch.zeros(1)) or set()
    return tuple(round(step / steps, 6) for step in sorted(read))


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
    schedule: int | Sequence[float] | Schedule | str | None = None,
    check: bool | int | Any = True,
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
        confidence: `True` for what the field's score takes (:func:`fmwc.fit_confidence`), which may need no variance; a
            field without a reference reads the variance (linearised; by random probes where a state is more than a few
            numbers), and so does a controller that goes by it. `False` for none, or an estimator (or its name).
        transport: `True` adds the transported dispersion (by random projections where a state is more than a few
            numbers); a number takes so many random projections.
        stepper: `euler`, `midpoint` or `heun`.
        schedule: Read the variance at every k-th step, or at a list of times, or `adaptive`: at the few that tell most
            of the score, by the field's own schedule (:func:`fit_schedule` makes one). By default as the field's
            reference was read, or at every step.
        check: Check the finished samples by the flow's own velocity (:mod:`fmwc.checks`): `True` for the checks that
            the field's score takes, `False` for none, a number of evaluations per sample to spend on the check that
            suits the conditions, or a check of your own (`Echo(...)`, `Contest(...)`).
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
    times = times.tolist() if isinstance(times, (Tensor, np.ndarray)) else times
    stepped = steps is None and evaluations is None and controller is None and _equal(times)
    if stepped:
        steps, times = len(times) - 1, None  # type: ignore[arg-type]
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
    if (times is not None or stepped) and not (isinstance(start, (int, float)) and start == 0):
        raise UsageError("times say where to start; leave start out")
    how = pick(STEPPERS, stepper, "stepper")
    chosen, tail = _controller(steps, evaluations, times, controller, how, cost_of(decoder))
    if (confidence is True or isinstance(confidence, str) or transport) and not hasattr(field, "run"):
        raise UsageError(
            "a plain network has no noise to read confidence from; attach it first, or say confidence=False"
        )
    device = _device(field)
    cond = {
        k: as_numbers(v, f"the condition '{k}'", device) if isinstance(v, (list, tuple, np.ndarray)) else v
        for k, v in cond.items()
    }
    schedule, reference = _schedule(field, schedule, chosen)
    estimator = _estimator(where, reference, confidence, always=reads_variance(chosen))
    total: int = batch_size(x0) if count is None else count  # type: ignore[arg-type]
    cond = for_each(cond, _compared_by(reference), total, device)
    strange = _strange(reference, cond, total)
    checks = _checks(field, where, reference, check, cond, confidence is not False and not strange)
    cond = for_each(cond, {getattr(own, "cond", "") for own in checks.values()}, total, device)
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
        score=_kept(reference),
        check=partial(run_checks, checks) if checks else None,
        batch=batch,
        tail=tail,
        anneal=anneal,
        keep_states=keep_states,
        progress=progress,
        parts=parts,
    )
    where.check_rows(cond, total)
    begin: Any = x0
    if x0 is None:
        precision = precision_of(getattr(field, "network", field))
        begin = each(lambda c: c.to(precision), noise(where, count, seed, device, first=first, **cond))  # type: ignore[arg-type]
    trajectory = sampler(begin, start=times[0] if times else start, seed=seed, first=first, **cond)
    if reference is None:
        return _by_evidence(trajectory, checks)
    if confidence is False and not checks:
        return replace(trajectory, without=NOT_ASKED)
    if strange:
        return _by_evidence(compared(trajectory, reference, strange), checks)
    usual = times is None and controller is None and isinstance(start, (int, float)) and start == 0
    without = ""
    if not (usual and anneal is None and decoder == "map") and not _of_samples(reference):
        without = "the reference is of runs with equal steps from t = 0, without changes of the velocity"
    elif any(checks.get(name) != own for name, own in reference.checks.items()):
        without = OTHER_CHECK
    if reference.read_with is not None and not without:
        made = read_with(estimator, chosen.steps, stepper, schedule)
        differs = reference.read_with.differs(made, variance=needs_variance(reference.score))
        without = f"the reference was made with {differs}" if differs else ""
    return _by_evidence(compared(trajectory, reference, without), [*checks, *names_of(reference.score)])


def _equal(times: Any) -> bool:
    """Whether times that were given are those of equal steps from 0 to 1."""
    if not isinstance(times, (list, tuple)) or len(times) < 2:
        return False
    steps = len(times) - 1
    return all(isinstance(t, (int, float)) and abs(t - i / steps) < 1e-6 for i, t in enumerate(times))


def _of_samples(reference: Reference) -> bool:
    """Whether a reference is made of checks of finished samples alone, however those were drawn."""
    return reference.read_with is None and {part.score for part in reference.parts} <= reference.checks.keys() != set()


def _by_evidence(run: Trajectory, names: Iterable[str]) -> Trajectory:
    """The run ranked by the first of these scores that it has, if it has not read its own."""
    own = run.default_score
    for name in (own, *names):
        with suppress(UsageError):
            run.score(name)
            if name == own:
                return run
            without = run.without or (f"this run did not read {own}" if run.reference is not None else "")
            return replace(run, default_score=name, reference=None, standard=None, without=without)
    return run


def _estimator(
    space: Space, reference: Reference | None, confidence: bool | str | Estimator, *, always: bool
) -> Estimator | None:
    """What reads the variance: if nothing is said, what the reference was read by.

    Arguments:
        always: Whether the variance is read for something else too, and so where the reference takes none.
    """
    if not isinstance(confidence, bool):
        return as_estimator(confidence)
    if not confidence or not (always or reference is None or needs_variance(reference.score)):
        return None
    text = reference.read_with.estimator if reference is not None and reference.read_with is not None else ""
    return estimator_of(text) or default_estimator(space)


def _compared_by(reference: Reference | None) -> dict[str, Tensor]:
    """The conditions that a reference compares samples by, each with the values that it knows."""
    if reference is None:
        return {}
    known: dict[str, Tensor] = {}
    for own in reference.checks.values():
        values = getattr(own, "rivals", getattr(own, "labels", None))
        if values is not None:
            known[own.cond] = values.unique(dim=0)
    for standard in (reference.standard, *(part.standard for part in reference.parts)):
        if standard is not None:
            known[standard.cond] = (~standard.spread.isnan()).nonzero()[:, 0]
    return known


def for_each(cond: Mapping[str, Any], names: Iterable[str], count: int, device: torch.device | str) -> dict[str, Any]:
    """Conditions of which the named ones have one row per sample, where one value is given for all samples."""

    def spread(value: Any) -> Any:
        if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
            value = torch.as_tensor(value, device=device)
        if isinstance(value, Tensor) and (not value.ndim or len(value) == 1 < count):
            value = torch.atleast_1d(value)
            return value.expand(count, *value.shape[1:])
        return value

    return {name: spread(value) if name in names else value for name, value in cond.items()}


def _strange(reference: Reference | None, cond: Mapping[str, Any], count: int) -> str:
    """Why samples with these conditions cannot be compared with the reference; empty if they can."""
    for own in getattr(reference, "checks", {}).values():
        if missing := getattr(own, "missing", ""):
            return missing
    for name, known in _compared_by(reference).items():
        value = cond.get(name)
        if not isinstance(value, Tensor):
            return f"the reference compares samples by '{name}', which this run was not given; give {name}=..."
        if len(value) != count:
            continue  # which sampling refuses
        if value.shape[1:] != known.shape[1:]:
            shapes = f"{tuple(known.shape[1:])} per sample, not {tuple(value.shape[1:])}"
            return f"the reference knows '{name}' with shape {shapes}"
        seen = value.unique(dim=0)
        missing = seen[~same(seen, known.to(value.device)).any(1)]
        if len(missing):
            return f"the reference holds no samples with {name} = {missing[0].tolist()}"
    return ""


OTHER_CHECK = "the samples were not checked as the reference was; leave out check (--check and --no-check)"
NOT_ASKED = "the run was drawn without it; leave out confidence=False (--propagation none)"


def needs_variance(score: str) -> bool:
    """Whether a score, or a part of a sum, is read from the variance of the velocity."""
    return any(parsed(name)[1] in SCORES for name in names_of(score))


def _kept(reference: Reference | None) -> str | Callable[[Trajectory], Trajectory]:
    """The score that a run keeps which keeps nothing else."""
    if reference is None:
        return "temporal_ratio"
    return partial(_scored, reference) if reference.parts else reference.score


def _scored(reference: Reference, run: Trajectory) -> Trajectory:
    """A run with the sum of scores that the reference is made of; without a score where a part of it cannot be read."""
    found = []
    for part in reference.parts:
        try:
            raw = run.score(part.score)
            if part.standard is not None:
                raw = part.standard(raw, run.cond[part.standard.cond])
        except (KeyError, UsageError):
            return run
        found.append((raw, part.weight, part.quantiles))
    return replace(run, scores=combined(found), default_score=reference.score)


def compared(run: Trajectory, reference: Reference, without: str = "") -> Trajectory:
    """The run by the reference's score.

    Arguments:
        without: Why the run cannot be compared with the reference; its confidence is then withheld.
    """
    if reference.parts and run.scores is None:
        run = _scored(reference, run)
        if run.scores is None:
            return replace(run, without=without or f"this run did not read all of {reference.score}")
    elif not reference.parts:
        run = replace(run, default_score=reference.score)
    without = reference.withheld or without
    if not without:
        standard = reference.standard and reference.standard._replace(source="checkpoint")
        return replace(run, reference=reference.quantiles, standard=standard)
    standard = None
    if reference.standard is not None:
        name = reference.standard.cond
        with suppress(UsageError, KeyError):  # across conditions only where it is too small for more
            standard = standard_of(name, run.score(), run.cond[name])
    return replace(run, standard=standard, without=without)


def _checks(
    field: Any, space: Space, reference: Reference | None, check: Any, cond: Mapping[str, Any], scored: bool
) -> dict[str, Any]:
    """The checks to run, by name."""
    if check is True:
        return dict(reference.checks) if reference is not None and scored else {}
    if check is False or check is None:
        return {}
    if isinstance(check, int):
        known = getattr(getattr(field, "reference", None), "checks", {})
        check = suited(space, cond, check, known)
    if not hasattr(check, "name"):
        raise UsageError(
            f"check is True, False, a number of evaluations, or a check such as fmwc.checks.Echo(...), got {check!r}"
        )
    return {check.name: check}


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
    lists = {
        k: as_numbers(v, f"the condition '{k}'")
        for k, v in options.items()
        if k not in own and isinstance(v, (list, np.ndarray))
    }
    options |= lists
    for first in range(0, count, batch):
        size = min(batch, count - first)
        here = {k: v[first : first + size] if _rows(v) == count else v for k, v in options.items()}
        part = sample(field, size, first=first, batch=batch, record=record, **here)
        if part.reference is None and (len(part.times) or part.scores is not None):
            raise UsageError(
                "samples that are not held together have their confidence by a checkpoint's reference; "
                f"{part.withheld.partition('; rank')[0]}"
            )
        yield part


def _rows(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.ndim else 0


def _schedule(
    field: Any, schedule: int | Sequence[float] | Schedule | str | None, controller: Controller
) -> tuple[int | Sequence[float], Any]:
    """When to read, and the reference for what is read then."""
    schedule = tuple(float(t) for t in schedule) if isinstance(schedule, (list, np.ndarray, Tensor)) else schedule
    reference, own = getattr(field, "reference", None), getattr(field, "schedule", None)
    if isinstance(schedule, str):
        pick({"adaptive": 0}, schedule, "schedule")
        if own is None:
            raise UsageError(
                "this field has no schedule of its own; field.schedule = fmwc.sampling.fit_schedule(field)"
            )
        schedule = own
    if isinstance(schedule, Schedule):
        return schedule.times, schedule.reference
    if schedule is None and reference is not None and reference.read_with is not None and reference.read_with.times:
        same = isinstance(controller, Uniform) and reference.read_with.steps == controller.steps
        schedule = reference.read_with.times if same else None
    when: Any = 1 if schedule is None else schedule
    # The times of the field's own schedule, given as a list, have the schedule's reference.
    if own is not None and isinstance(when, tuple) and same_times(when, own.times):
        same = reference is not None and reference.read_with is not None and same_times(when, reference.read_with.times)
        return when, reference if same or (reference and not needs_variance(reference.score)) else own.reference
    return when, reference


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
    if isinstance(pilot, Trajectory):
        run = pilot
    else:
        how: dict[str, Any] = {"steps": steps, "seed": seed, "check": False, **options}
        if how.get("confidence", True) is True and field.space is not None:  # also where the field's score takes none
            how["confidence"] = _estimator(field.space, field.reference, True, always=True)
        run = sample(field, pilot, **how)
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
    if needs_variance(run.default_score):
        return fitted(
            run, readings, lambda times: read_with(None if estimator is False else estimator, steps, stepper, times)
        )
    raise UsageError(f"the field's score, {run.default_score}, reads no variance, so it takes no schedule")


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
