"""What every estimator is: a way from a noisy network to the mean and variance of its velocity."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fmwc.randomness import Randomness
from fmwc.state import State
from fmwc.vad import Pass

__all__ = ["Estimator", "Noisy", "StateMoments", "plain_output"]


class Noisy(Protocol):
    """What an estimator asks of a field.

    Attributes:
        rows_known: Whether it was seen that every layer's rows are in the order of the samples.
    """

    rows_known: bool

    @property
    def fused(self) -> bool:
        """Whether torch may compute the plain network otherwise than layer by layer, as a pass does."""

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """The velocity, without noise."""

    def run(self, current: Pass, x: Any, t: Tensor, **cond: Any) -> Any:
        """The velocity, with a pass running."""


def plain_output(field: Noisy, x: Any, t: Tensor, cond: dict[str, Any]) -> Any:
    """The network without a pass. A pass that adds nothing returns the same, but for the last digits of networks that
    torch has a faster way through where no pass runs (`field.fused`): their mean is read here, so that no estimator
    changes a sample."""
    with torch.no_grad():
        return field(x, t, **cond)


class StateMoments(Protocol):
    """Moments of a state: `mean` and `var` are states (:class:`fmwc.moments.Moments` is one)."""

    @property
    def mean(self) -> State: ...
    @property
    def var(self) -> State: ...


class Estimator(Protocol):
    """`estimator(field, x, t, cond, randomness)` gives :class:`fmwc.moments.Moments`.

    `plain_mean` says that its mean is the plain network's output bit for bit, so that a sampler may step on it. With a
    true `rounds`, its variance may be computed in half precision: it is a sum of squares, or carried forward, and moves
    by as little as rounding moves each. A difference of draws is no such thing.
    """

    @property
    def plain_mean(self) -> bool: ...

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any: ...
