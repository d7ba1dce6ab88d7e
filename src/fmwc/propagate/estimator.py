"""What every estimator is: a way from a noisy network to the mean and variance of its velocity."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from fmwc.randomness import Randomness
from fmwc.state import State
from fmwc.vad import Pass

__all__ = ["Estimator", "Noisy", "StateMoments"]


class Noisy(Protocol):
    """What an estimator asks of a field."""

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """The velocity, without noise."""

    def run(self, current: Pass, x: Any, t: Tensor, **cond: Any) -> Any:
        """The velocity, with a pass running."""


class StateMoments(Protocol):
    """Moments of a state: `mean` and `var` are states (:class:`fmwc.moments.Moments` is one)."""

    @property
    def mean(self) -> State: ...
    @property
    def var(self) -> State: ...


class Estimator(Protocol):
    """`estimator(field, x, t, cond, randomness)` gives :class:`fmwc.moments.Moments`.

    `plain_mean` says that its mean is the plain network's output bit for bit, so that a sampler may step on it.
    """

    @property
    def plain_mean(self) -> bool: ...

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any: ...
