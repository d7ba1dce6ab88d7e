"""Schedules of readings, references, and the comparison of a run with a reference.

The confidence of a sample is the position of its score among reference samples that were drawn from the same field in
the same way. A run that was drawn differently has no confidence; `Trajectory.withheld` gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.checks import choose_check
from fmwc.checks.evidence import same
from fmwc.errors import UsageError
from fmwc.estimators import Estimator, Linearised, as_estimator, estimator_of
from fmwc.flow import Space
from fmwc.identity import plain
from fmwc.sampling.config import AsReference, Controller, Uniform, is_small
from fmwc.sampling.trajectory import Standard, Trajectory, combined, names_of, needs_variance, standard_of

PROBES = 2  # random probes per reading for large states; a score over many readings averages their noise
OTHER_CHECK = "the samples were not checked like those of the reference; leave out check (--check and --no-check)"
NOT_READ = "the run was drawn without it; leave out confidence=None (--propagation none)"
OTHER_STEPS = "the reference is for runs with equal steps from t = 0 and an unmodified velocity"

CHANGED = (
    "the weights of the network or its noise have changed since the reference was made; call "
    "fmwc.fit_confidence(field, data) again"
)
OTHER_SPACE = "the reference was made in another space; call fmwc.fit_confidence(field, data) again"
OTHER_SOURCE = (
    "x0 was given, so it may come from another distribution than that of the reference samples; leave out x0, or give "
    "fmwc.sampling.noise(space, count, seed, device, cond=cond) with the seed, device and conditions of the run"
)
RESTRICTED = "the reference holds only samples whose ends are not restricted by conditions"


# ---- schedules -------------------------------------------------------------------------------------------------------

ROUNDING = 1e-6  # tolerance of recorded times: 0.166667 means the step at 1/6


@dataclass(frozen=True, eq=False)
class Schedule:
    """Steps at which a run reads the variance: `Schedule.every(5)` or `Schedule.at([0.2, 0.6])`.

    Attributes:
        times: The times of the readings. Each takes place at the first step that starts at or after it, or at the last
            step.
        stride: Instead of times, read at every k-th step, always including the last.
        numbers: Instead of times, read at these steps.
    """

    times: tuple[float, ...] = ()
    stride: int = 0
    numbers: frozenset[int] | None = None

    @classmethod
    def every(cls, k: int) -> Schedule:
        """Return a schedule that reads at every k-th step, always including the last."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(f"Schedule.every(k) needs an integer k ≥ 1, got {k!r}")
        return cls(stride=k)

    @classmethod
    def at(cls, times: Iterable[float]) -> Schedule:
        """Return a schedule that reads at the given times."""
        chosen = tuple(float(t) for t in times)
        if not chosen:
            raise UsageError("a schedule needs at least one time")
        return cls(chosen)

    @classmethod
    def steps(cls, numbers: Iterable[int]) -> Schedule:
        """Return a schedule that reads at the steps with these numbers."""
        return cls(numbers=frozenset(numbers))


EVERY_STEP = Schedule.every(1)


def is_due(schedule: Schedule, step: int, steps: int, before: Tensor | None, t: Tensor) -> bool:
    """Return whether to read the variance at a step that starts at t, when the previous one started at `before`."""
    if schedule.numbers is not None:
        return step in schedule.numbers
    if schedule.stride:
        return (steps - 1 - step) % schedule.stride == 0
    chosen = t.new_tensor(schedule.times)[:, None] - ROUNDING
    reached = (t >= chosen) | (step == steps - 1)
    fresh = reached if before is None else reached & (before < chosen)
    return bool(fresh.any())  # waits for a GPU


def foreseen(schedule: Schedule, controller: Controller, start: Tensor) -> set[int] | None:
    """Return the steps at which the variance is read, or `None` if the controller's times are not known in advance.

    This agrees with :func:`is_due` for each step, but waits for a GPU once instead of at every step.
    """
    steps = controller.steps
    if not schedule.times:
        return {step for step in range(steps) if is_due(schedule, step, steps, None, start)}
    if not getattr(controller, "foreseen", False):
        return None
    times = [start]
    for step in range(steps - 1):
        times.append(controller.next_time(step, times[-1], start, None))
    chosen, t = start.new_tensor(schedule.times)[:, None] - ROUNDING, torch.stack(times)
    reached = t[:, None] >= chosen  # (steps, K, B)
    reached[-1] = True
    fresh = reached & ~torch.cat([torch.zeros_like(reached[:1]), t[:-1, None] >= chosen])
    return set(fresh.flatten(1).any(1).nonzero()[:, 0].tolist())


def read_times(steps: int, schedule: Schedule) -> tuple[float, ...]:
    """Return the times at which a run of equal steps is read.

    >>> read_times(10, Schedule.every(5)), read_times(10, Schedule.at([0.2, 0.35]))
    ((0.4, 0.9), (0.2, 0.4))
    """
    read = foreseen(schedule, Uniform(steps), torch.zeros(1)) or set()
    return tuple(round(step / steps, 6) for step in sorted(read))


# ---- references ------------------------------------------------------------------------------------------------------


def _same_times(times: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two lists of times are the same up to rounding."""
    return len(times) == len(others) and all(abs(a - b) < 1e-4 for a, b in zip(times, others, strict=True))


class ReadWith(NamedTuple):
    """Settings of a run and its readings. Scores of runs with different settings cannot be compared.

    Attributes:
        estimator: The estimator of the variance with its options, as text; empty if none was used.
        steps: The number of steps.
        stepper: The name of the stepper.
        times: When the variance was read.
    """

    estimator: str
    steps: int
    stepper: str
    times: tuple[float, ...]

    def differs(self, other: ReadWith, *, variance: bool = True) -> str:
        """Describe the first difference from another run; empty if there is none.

        Arguments:
            other: The settings of the other run.
            variance: Whether the score depends on the variance, and so on the estimator and the times.
        """
        if (self.steps, self.stepper) != (other.steps, other.stepper):
            return f"{self.steps} {self.stepper} steps, not {other.steps} {other.stepper} steps"
        if variance and self.estimator != other.estimator:
            return f"the variance estimated by {self.estimator or 'no estimator'}, not by {other.estimator or 'none'}"
        if variance and not _same_times(self.times, other.times):
            return f"the variance at {len(self.times)} times, not at {len(other.times)} (or at other times)"
        return ""


class Part(NamedTuple):
    """One term of a combined score.

    Attributes:
        score: The name of the score.
        weight: The weight in the sum.
        quantiles: The quantiles over reference samples, at evenly spaced levels from 0 to 1.
        standard: Makes the score comparable between conditions; applied before the quantiles were computed.
    """

    score: str
    weight: float
    quantiles: Tensor
    standard: Standard | None = None


class Reference(NamedTuple):
    """Scores of reference samples, which give even a single sample a confidence. Stored in checkpoints.

    Attributes:
        score: The name of the score, or a sum of several (`contest + 0.3 spread@0.3-0.8`).
        read_with: How the reference samples were drawn; `None` if the score checks samples from any source.
        quantiles: The score's quantiles at evenly spaced levels from 0 to 1.
        standard: Makes the score comparable between conditions; applied before the quantiles were computed.
        parts: The terms of a sum.
        checks: The checks of finished samples that the score uses, by name (:class:`fmwc.checks.Echo`,
            :class:`fmwc.checks.Contest`).
        reason: A text that says why this score was chosen.
        withheld: Why there is no confidence, if the evidence is no better than chance; else empty.
        candidates: The scores that were compared: for each, its name and its figures by name.
        classes: The classes of the reference samples, by name of the condition; empty without classes.
        weights: The checksum of the weights that drew the reference samples (:meth:`fmwc.Field.checksum`). It is not
            stored: a checkpoint holds one set of weights, and loading computes their checksum. `None` is not compared.
        space: The space of the reference samples, likewise.
    """

    score: str
    read_with: ReadWith | None
    quantiles: Tensor
    standard: Standard | None = None
    parts: tuple[Part, ...] = ()
    checks: dict[str, Any] = {}  # noqa: RUF012
    reason: str = ""
    withheld: str = ""
    candidates: tuple[dict[str, Any], ...] = ()
    classes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    weights: int | None = None
    space: Space | None = None

    @property
    def needs_variance(self) -> bool:
        """Whether the score or a part of it depends on the variance."""
        return needs_variance(self.score)

    @property
    def of_any_samples(self) -> bool:
        """Whether the score consists only of checks of finished samples, which may come from any source."""
        return self.read_with is None and {part.score for part in self.parts} <= self.checks.keys() != set()

    def outdated(self, field: Any, space: Space) -> str:
        """Return why the reference does not hold for samples of a field in a space; empty if it does."""
        if self.space is not None and plain(space.describe()) != plain(self.space.describe()):
            return OTHER_SPACE
        known = getattr(field, "checksum", None)
        return CHANGED if self.weights is not None and known is not None and known() != self.weights else ""

    def unknown(self, cond: Mapping[str, Any], count: int) -> str:
        """Return why samples with these conditions cannot be compared with the reference; empty if they can."""
        return unknown_conditions(self, cond, count)


# ---- before a run ----------------------------------------------------------------------------------------------------


def default_estimator(space: Space) -> Estimator:
    """Return the linearised estimator: exact for small states, with random probes for larger ones."""
    return Linearised(None if is_small(space) else PROBES)


def read_with(
    estimator: Estimator | str | None, steps: int, stepper: str, schedule: Schedule | None = None
) -> ReadWith:
    """Return the settings of a run with equal steps from t = 0, read at every step unless a schedule is given."""
    name = "" if estimator is None else str(as_estimator(estimator))
    return ReadWith(name, steps, stepper, read_times(steps, schedule or EVERY_STEP) if name else ())


def choose_estimator(
    space: Space, reference: Reference | None, confidence: Estimator | None, *, always: bool
) -> Estimator | None:
    """Return the estimator of the variance.

    Arguments:
        always: Whether something other than the score needs the variance.
    """
    if not isinstance(confidence, AsReference):
        return confidence
    if reference is not None and not always and not reference.needs_variance:
        return None
    made = reference.read_with if reference is not None else None
    return estimator_of(made.estimator if made else "") or default_estimator(space)


def choose_schedule(reference: Reference | None, schedule: Schedule | None, controller: Controller) -> Schedule:
    """Return when to read the variance: if not given, as for the reference, or at every step."""
    if schedule is not None:
        return schedule
    made = reference.read_with if reference is not None else None
    if made is not None and made.times and isinstance(controller, Uniform) and made.steps == controller.steps:
        return Schedule.at(made.times)
    return EVERY_STEP


def choose_checks(
    field: Any, space: Space, reference: Reference | None, check: Any, cond: Mapping[str, Any], scored: bool
) -> dict[str, Any]:
    """Return the checks to run, by name; those of the reference only if the run is compared with it (`scored`)."""
    if check is True:
        return dict(reference.checks) if reference is not None and scored else {}
    if check is False or check is None:
        return {}
    if isinstance(check, int):
        known = getattr(getattr(field, "reference", None), "checks", {})
        check = choose_check(space, cond, check, known)
    if not hasattr(check, "name"):
        raise UsageError(
            f"check must be a bool, a number of evaluations, or a check such as fmwc.checks.Echo(...), got {check!r}"
        )
    return {check.name: check}


def compared_by(reference: Reference | None) -> dict[str, Tensor]:
    """Return the conditions by which a reference compares samples, each with its known values."""
    if reference is None:
        return {}
    known: dict[str, Tensor] = {}
    for check in reference.checks.values():
        values = getattr(check, "rivals", getattr(check, "labels", None))
        if values is not None:
            known[check.cond] = values.unique(dim=0)
    known |= {name: torch.tensor(values) for name, values in reference.classes.items() if name not in known}
    for standard in (reference.standard, *(part.standard for part in reference.parts)):
        if standard is not None:
            known[standard.cond] = (~standard.spread.isnan()).nonzero()[:, 0]
    return known


def unknown_conditions(reference: Reference | None, cond: Mapping[str, Any], count: int) -> str:
    """Return why samples with these conditions cannot be compared with the reference; empty if they can."""
    for check in getattr(reference, "checks", {}).values():
        if missing := getattr(check, "missing", ""):
            return missing
    for name, known in compared_by(reference).items():
        value = cond.get(name)
        if not isinstance(value, Tensor):
            return f"the reference compares samples by '{name}', which is missing; give cond={{'{name}': ...}}"
        if len(value) != count:
            continue  # the sampler raises
        if value.shape[1:] != known.shape[1:]:
            shapes = f"{tuple(known.shape[1:])} per sample, not {tuple(value.shape[1:])}"
            return f"the reference knows '{name}' with shape {shapes}"
        seen = value.unique(dim=0)
        missing = seen[~same(seen, known.to(value.device)).any(1)]
        if len(missing):
            return f"the reference holds no samples with {name} = {missing[0].tolist()}"
    return ""


# ---- after a run -----------------------------------------------------------------------------------------------------


def score_to_keep(reference: Reference | None) -> str | Callable[[Trajectory], Trajectory]:
    """Return the score that a stream keeps."""
    if reference is None:
        return "temporal_ratio"
    return partial(_with_sum, reference) if reference.parts else reference.score


def compared(run: Trajectory, reference: Reference, without: str = "") -> Trajectory:
    """Return the run with the reference's score and, unless it is withheld, its confidence.

    Arguments:
        without: The reason why the run cannot be compared with the reference; withholds the confidence.
    """
    without = reference.withheld or without
    if reference.parts and run.scores is None:
        run = _with_sum(reference, run)
        if run.scores is None:
            return replace(run, without=without or f"this run lacks a part of the score {reference.score}")
    elif not reference.parts:
        run = replace(run, default_score=reference.score)
    if not without:
        standard = reference.standard and reference.standard._replace(source="checkpoint")
        return replace(run, reference=reference.quantiles, standard=standard)
    standard = None
    if reference.standard is not None:
        name = reference.standard.cond
        with suppress(UsageError, KeyError):  # too few samples per condition
            standard = standard_of(name, run.score(), run.cond[name])
    return replace(run, standard=standard, without=without)


def _with_sum(reference: Reference, run: Trajectory) -> Trajectory:
    """Return a run with the reference's sum of scores; unchanged if the run lacks a part of it."""
    scores = []
    for part in reference.parts:
        try:
            raw = run.score(part.score)
            if part.standard is not None:
                raw = part.standard(raw, run.cond[part.standard.cond])
        except (KeyError, UsageError):
            return run
        scores.append((raw, part.weight, part.quantiles))
    return replace(run, scores=combined(scores), default_score=reference.score)


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
    """Return a run compared with its reference, or with the reason why it cannot be compared.

    Arguments:
        checks: The checks of the finished samples.
        made: The settings of the run.
        usual: Whether the run took equal steps from t = 0 and followed the plain velocity.
        unread: Whether the run read neither the variance nor a check.
        strange: Why the reference does not know the conditions; empty if it knows them.
    """
    if reference is None:
        return _by_evidence(run, checks)
    if unread:
        return replace(run, without=NOT_READ)
    if strange:
        return _by_evidence(compared(run, reference, strange), checks)
    without = ""
    if not usual and not reference.of_any_samples:
        without = OTHER_STEPS
    elif any(checks.get(name) != check for name, check in reference.checks.items()):
        without = OTHER_CHECK
    elif reference.read_with is not None:
        differs = reference.read_with.differs(made, variance=reference.needs_variance)
        without = f"the reference was made with {differs}" if differs else ""
    return _by_evidence(compared(run, reference, without), [*checks, *names_of(reference.score)])


def _by_evidence(run: Trajectory, names: Iterable[str]) -> Trajectory:
    """Return the run; if it lacks its default score, rank it by the first of these scores that it has."""
    default = run.default_score
    for name in (default, *names):
        with suppress(UsageError):
            run.score(name)
            if name == default:
                return run
            without = run.without or (f"this run lacks the score {default}" if run.reference is not None else "")
            return replace(run, default_score=name, reference=None, standard=None, without=without)
    return run
