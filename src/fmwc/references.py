"""References: scores of reference samples that confidence is read from, and schedules that say when to read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fmwc.errors import UsageError

__all__ = ["EVERY_STEP", "Part", "ReadWith", "Reference", "Schedule", "same_times"]


def same_times(times: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two lists of times are the same, but for rounding."""
    return len(times) == len(others) and all(abs(a - b) < 1e-4 for a, b in zip(times, others, strict=True))


class ReadWith(NamedTuple):
    """How a run was made and what was read on the way: scores of runs that were made otherwise are not comparable.

    Attributes:
        estimator: The estimator of the variance with its options, as text; empty where none was read.
        steps: The number of steps.
        stepper: The name of the stepper.
        times: When the variance was read.
    """

    estimator: str
    steps: int
    stepper: str
    times: tuple[float, ...]

    def differs(self, other: ReadWith, *, variance: bool = True) -> str:
        """Return what is different in another run, in words; empty if nothing is.

        Arguments:
            other: How the other run was made.
            variance: Whether the score is read from the variance, so that it matters how that was read.
        """
        if (self.steps, self.stepper) != (other.steps, other.stepper):
            return f"{self.steps} {self.stepper} steps, not {other.steps} {other.stepper} steps"
        if variance and self.estimator != other.estimator:
            return f"the variance by {self.estimator or 'no estimator'}, not by {other.estimator or 'none'}"
        if variance and not same_times(self.times, other.times):
            return f"the variance at {len(self.times)} times, not at {len(other.times)} (or at others)"
        return ""


class Part(NamedTuple):
    """One of the scores that a combined score is made of.

    Attributes:
        score: Its name.
        weight: Its weight in the sum.
        quantiles: Its quantiles over reference samples, at evenly spaced levels from 0 to 1.
        standard: Makes it comparable between conditions, applied before the quantiles were taken.
    """

    score: str
    weight: float
    quantiles: Tensor
    standard: Any = None


class Reference(NamedTuple):
    """Scores of reference samples, so that one sample alone has a confidence. Kept in the checkpoint.

    Attributes:
        score: The name of the score, or the sum of several (`contest + 0.3 spread@0.3-0.8`).
        read_with: How the reference samples were made; `None` for a check of samples from anywhere.
        quantiles: The score's quantiles at evenly spaced levels from 0 to 1.
        standard: A function `(score, condition) -> score` that makes it comparable between conditions, with the name of
            the condition as `cond` (:class:`fmwc.sampling.Standard`); applied before the quantiles were taken.
        parts: What a sum is made of.
        checks: The checks of finished samples that the score reads, by name (:class:`fmwc.checks.Echo`,
            :class:`fmwc.checks.Contest`).
        reason: Why this score was chosen, in words.
        withheld: Why there is no confidence, where the evidence is at chance; else empty.
        candidates: What was compared, a row each: name, and numbers by name.
        classes: The classes that the reference samples are of, by the name of the condition; empty if it has none.
    """

    score: str
    read_with: ReadWith | None
    quantiles: Tensor
    standard: Any = None
    parts: tuple[Part, ...] = ()
    checks: dict[str, Any] = {}  # noqa: RUF012
    reason: str = ""
    withheld: str = ""
    candidates: tuple[dict[str, Any], ...] = ()
    classes: dict[str, tuple[int, ...]] = {}  # noqa: RUF012


@dataclass(frozen=True, eq=False)
class Schedule:
    """When a run reads the variance: `Schedule.every(5)`, `Schedule.at([0.2, 0.6])` or `Schedule.adaptive()`.

    :func:`fmwc.sampling.fit_schedule` chooses few times by a pilot run. A field keeps its schedule in its checkpoint.

    Attributes:
        times: The times to read at: each is read at the first step that starts at or after it, or at the last step.
        reference: The reference for scores that are read at these times.
        agreement: The correlation of those scores with the pilot's, read at every step.
        stride: In place of times, read at every k-th step, the last always among them.
        numbers: In place of times, read at the steps with these numbers.
    """

    times: tuple[float, ...] = ()
    reference: Reference | None = None
    agreement: float = math.nan
    stride: int = 0
    numbers: frozenset[int] | None = None

    @classmethod
    def every(cls, k: int) -> Schedule:
        """Return the schedule that reads at every k-th step, the last always among them."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(f"the schedule is every k-th step with k ≥ 1, got {k!r}")
        return cls(stride=k)

    @classmethod
    def at(cls, times: Iterable[float]) -> Schedule:
        """Return the schedule that reads at chosen times."""
        chosen = tuple(float(t) for t in times)
        if not chosen:
            raise UsageError("a schedule takes at least 1 time to read at")
        return cls(chosen)

    @classmethod
    def adaptive(cls) -> Schedule:
        """Return the schedule that stands for the field's own (`field.schedule`)."""
        return cls()

    @classmethod
    def steps(cls, numbers: Iterable[int]) -> Schedule:
        """Return the schedule that reads at the steps with these numbers."""
        return cls(numbers=frozenset(numbers))

    @property
    def is_adaptive(self) -> bool:
        """Whether this stands for the field's own schedule."""
        return not self.times and not self.stride and self.numbers is None


EVERY_STEP = Schedule.every(1)
