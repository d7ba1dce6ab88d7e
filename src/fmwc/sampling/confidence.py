"""The confidence of a run: by which reference it is compared, or why it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmwc.checks import choose_check
from fmwc.checks.residuals import same
from fmwc.errors import UsageError
from fmwc.estimators import Estimator, Linearised, as_estimator, estimator_of
from fmwc.flow import Space
from fmwc.references import ReadWith, Reference, Schedule, same_times
from fmwc.sampling.config import AsReference
from fmwc.sampling.controllers import FEW, Controller, Uniform, foreseen, numbers
from fmwc.sampling.scores import SCORES, combined, names_of, parsed, standard_of
from fmwc.sampling.trajectory import Trajectory

__all__ = ["compared", "default_estimator", "needs_variance", "read_times", "read_with"]

PROBES = 2  # random probes per reading for larger states; a score over many readings averages their noise
OTHER_CHECK = "the samples were not checked as the reference was; leave out check (--check and --no-check)"
NOT_ASKED = "the run was drawn without it; leave out confidence=None (--propagation none)"
OTHER_STEPS = "the reference is of runs with equal steps from t = 0, without changes of the velocity"


def default_estimator(space: Space) -> Estimator:
    """Return the linearised estimator: exact for states of a few numbers, by random probes for larger ones."""
    return Linearised(None if numbers(space) <= FEW else PROBES)


def read_with(
    estimator: Estimator | str | None, steps: int, stepper: str, schedule: Schedule | None = None
) -> ReadWith:
    """Return the record of how a run of equal steps from t = 0 is made and read, by default at every step."""
    reads = "" if estimator is None else str(as_estimator(estimator))
    return ReadWith(reads, steps, stepper, read_times(steps, schedule or Schedule.every(1)) if reads else ())


def read_times(steps: int, schedule: Schedule) -> tuple[float, ...]:
    """Return the times at which a run of equal steps is read.

    >>> read_times(10, Schedule.every(5)), read_times(10, Schedule.at([0.2, 0.35]))
    ((0.4, 0.9), (0.2, 0.4))
    """
    read = foreseen(schedule, Uniform(steps), torch.zeros(1)) or set()
    return tuple(round(step / steps, 6) for step in sorted(read))


def needs_variance(score: str) -> bool:
    """Return whether a score, or a part of a sum, is read from the variance of the velocity."""
    return any(parsed(name)[1] in SCORES for name in names_of(score))


def compared(run: Trajectory, reference: Reference, without: str = "") -> Trajectory:
    """Return the run with the reference's score and, unless it is withheld, its confidence.

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


def _scored(reference: Reference, run: Trajectory) -> Trajectory:
    """Return a run with the reference's sum of scores; unchanged where a part of it cannot be read."""
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


def kept_score(reference: Reference | None) -> str | Callable[[Trajectory], Trajectory]:
    """Return the score of a run that keeps its score alone."""
    if reference is None:
        return "temporal_ratio"
    return partial(_scored, reference) if reference.parts else reference.score


# ---- before a run is drawn -----------------------------------------------------------------------------------------


def chosen_estimator(
    space: Space, reference: Reference | None, confidence: Estimator | None, *, always: bool
) -> Estimator | None:
    """Return what reads the variance.

    Arguments:
        always: Whether something other than the score needs the variance, so that it is read in any case.
    """
    if not isinstance(confidence, AsReference):
        return confidence
    if not (always or reference is None or needs_variance(reference.score)):
        return None
    text = reference.read_with.estimator if reference is not None and reference.read_with is not None else ""
    return estimator_of(text) or default_estimator(space)


def chosen_schedule(field: Any, schedule: Schedule | None, controller: Controller) -> tuple[Schedule, Reference | None]:
    """Return when to read the variance, and the reference for what is read then."""
    reference, own = getattr(field, "reference", None), getattr(field, "schedule", None)
    if schedule is not None and schedule.is_adaptive:
        if own is None:
            raise UsageError(
                "this field has no schedule of its own; field.schedule = fmwc.sampling.fit_schedule(field)"
            )
        schedule = own
    if schedule is not None and schedule.reference is not None:
        return schedule, schedule.reference
    made = getattr(reference, "read_with", None)
    uniform = isinstance(controller, Uniform)
    if schedule is None and made is not None and made.times and uniform and made.steps == controller.steps:
        schedule = Schedule.at(made.times)
    schedule = schedule or Schedule.every(1)
    # The times of the field's own schedule, given as such, have the schedule's reference.
    if own is not None and schedule.times and same_times(schedule.times, own.times):
        same = made is not None and same_times(schedule.times, made.times)
        return schedule, reference if same or (reference and not needs_variance(reference.score)) else own.reference
    return schedule, reference


def compared_by(reference: Reference | None) -> dict[str, Tensor]:
    """Return the conditions that a reference compares samples by, each with the values that it knows."""
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


def unknown_conditions(reference: Reference | None, cond: Mapping[str, Any], count: int) -> str:
    """Return why samples with these conditions cannot be compared with the reference; empty if they can."""
    for own in getattr(reference, "checks", {}).values():
        if missing := getattr(own, "missing", ""):
            return missing
    for name, known in compared_by(reference).items():
        value = cond.get(name)
        if not isinstance(value, Tensor):
            return f"the reference compares samples by '{name}', which was not given; give cond={{'{name}': ...}}"
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


def chosen_checks(
    field: Any, space: Space, reference: Reference | None, check: Any, cond: Mapping[str, Any], scored: bool
) -> dict[str, Any]:
    """Return the checks to run, by name."""
    if check is True:
        return dict(reference.checks) if reference is not None and scored else {}
    if check is False or check is None:
        return {}
    if isinstance(check, int):
        known = getattr(getattr(field, "reference", None), "checks", {})
        check = choose_check(space, cond, check, known)
    if not hasattr(check, "name"):
        raise UsageError(
            f"check is True, False, a number of evaluations, or a check such as fmwc.checks.Echo(...), got {check!r}"
        )
    return {check.name: check}


# ---- after it is drawn ---------------------------------------------------------------------------------------------


def with_confidence(
    run: Trajectory,
    reference: Reference | None,
    checks: Mapping[str, Any],
    made: ReadWith,
    *,
    usual: bool,
    unread: bool,
    strange: str,
) -> Trajectory:
    """Return a run compared with its reference, with the reason where it cannot be.

    Arguments:
        checks: The checks that it ended with.
        made: How it was made and read.
        usual: Whether it took equal steps from t = 0 and followed the plain velocity.
        unread: Whether neither variance nor a check was asked for.
        strange: Why its conditions are unknown to the reference; empty if they are known.
    """
    if reference is None:
        return _by_evidence(run, checks)
    if unread:
        return replace(run, without=NOT_ASKED)
    if strange:
        return _by_evidence(compared(run, reference, strange), checks)
    without = ""
    if not usual and not _of_samples(reference):
        without = OTHER_STEPS
    elif any(checks.get(name) != own for name, own in reference.checks.items()):
        without = OTHER_CHECK
    if reference.read_with is not None and not without:
        differs = reference.read_with.differs(made, variance=needs_variance(reference.score))
        without = f"the reference was made with {differs}" if differs else ""
    return _by_evidence(compared(run, reference, without), [*checks, *names_of(reference.score)])


def _of_samples(reference: Reference) -> bool:
    """Return whether a reference consists of checks of finished samples, however those were drawn."""
    return reference.read_with is None and {part.score for part in reference.parts} <= reference.checks.keys() != set()


def _by_evidence(run: Trajectory, names: Iterable[str]) -> Trajectory:
    """Return the run ranked by the first of these scores that it has, if it cannot read its own."""
    own = run.default_score
    for name in (own, *names):
        with suppress(UsageError):
            run.score(name)
            if name == own:
                return run
            without = run.without or (f"this run did not read {own}" if run.reference is not None else "")
            return replace(run, default_score=name, reference=None, standard=None, without=without)
    return run
