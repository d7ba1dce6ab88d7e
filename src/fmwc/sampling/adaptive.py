"""The paper's adaptive controllers (App. adaptive-controllers): a sample's variance sets its step, or its speed.

σ_j is a sample's ‖σ_t‖₂ in its space's units, as :attr:`Trajectory.std`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.flow import Space
from fmwc.state import SINGLE, channels

__all__ = ["FEW", "SMALLEST", "Damped", "Ema", "ahead_of", "at_least", "numbers", "positive", "spread"]

FEW = 16  # numbers of a state that are few: each is a component, and one probe a coordinate pays
SMALLEST = 1e-2  # of an equal step: the shortest an adaptive one may be (the paper's)


def numbers(space: Space) -> int:
    """How many numbers a state is."""
    return sum(math.prod(channel.shape) for channel in space.channels.values())


def spread(space: Space, moments: Any) -> Tensor:  # -> (B,)
    """‖σ‖₂ of each sample: √(Σ over channels of weight × variance), as :attr:`Trajectory.std`."""
    mean = channels(moments.mean)
    totals = [
        var.expand_as(mean[name]).flatten(1).sum(1) * space.channels[name].weight
        for name, var in channels(moments.var).items()
    ]
    return torch.stack(totals).sum(0).sqrt()


def positive(value: Tensor) -> Tensor:
    """Away from zero, so that ratios of variances that are none are 1."""
    return value.clamp_min(torch.finfo(value.dtype).tiny)


def ahead_of(t: Tensor, dt: Tensor, last: bool) -> Tensor:
    """t + dt, and exactly 1 where that would pass it and at the last step."""
    return torch.ones_like(t) if last else torch.where(dt >= 1 - t, torch.ones_like(t), t + dt)


def at_least(name: str, value: float, low: float) -> None:
    if not low <= value < math.inf:
        raise UsageError(f"{name} is at least {low:g}, got {value}")


def _rate(value: float) -> None:
    if not 0 < value <= 1:
        raise UsageError(f"the rate of a running mean lies in (0, 1], got {value}")


@dataclass
class Ema:
    r"""Creates the paper's naive controller: each sample's step against its own running mean of σ.

    .. math:: Δt_j = \frac{1 - t_j}{K_j} \left( \frac{\barσ_j}{σ_j(t_j)} \right)^b, \qquad
        \barσ_j ← (1 - λ) \barσ_j + λ σ_j(t_j)

    with K steps remaining and σ̄ from σ(0); clipped to what is left of the way, and the last step lands at t = 1. The
    running mean takes σ_j(t_j) in before it is compared, in the order of the paper's text.

    Arguments:
        steps: N, exactly.
        rate: λ.
        boost: b; 0 is equal steps.
        smallest: The shortest step, 10⁻²/N if `None`.
    """

    steps: int
    rate: float = 0.5
    boost: float = 0.5
    smallest: float | None = None
    space: Space | None = field(default=None, repr=False, compare=False)
    mean: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    needs_variance = True

    def __post_init__(self) -> None:
        at_least("the number of steps", self.steps, 1)
        _rate(self.rate)
        at_least("boost", self.boost, 0)
        if self.smallest is not None:
            at_least("smallest", self.smallest, 0)

    def begin(self, space: Space) -> Ema:
        return replace(self, space=space)

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        assert self.space is not None
        own = spread(self.space, moments)
        self.mean = own if self.mean is None else torch.lerp(self.mean, own, self.rate)
        ratio = (positive(self.mean) / positive(own)).pow(self.boost).clamp_max(1e6).to(t)
        smallest = SMALLEST / self.steps if self.smallest is None else self.smallest
        dt = ((1 - t) / (self.steps - step) * ratio).clamp_min(smallest)
        return ahead_of(t, dt, step == self.steps - 1)


@dataclass
class Damped:
    r"""Creates the paper's *Online Adaptive*: equal steps, and late in the way a component whose σ stands above its own
    running mean is followed more slowly.

    .. math:: v_c ← (1 - κ_c r_c)_+ v_c, \qquad r_c = \max(σ_c / \barσ_c - 1, 0), \qquad t ≥ t_{late}

    In a channel with anti-annealing 1 + s·t the slope is damped, s (1 − κ r)₊, not the velocity (and where its pace is
    capped, what it is above 1). Components are the
    named channels of a state that has them, else coordinates where they are few, else image channels (all alike where
    the estimator gives one variance a sample, as random probes do).

    Arguments:
        steps: N.
        late: t_late.
        rate: λ of the running means, which start at σ_c(0) and take σ_c in before it is compared.
        gain: κ, one for all or by channel name (0 where not named).
    """

    steps: int
    late: float = 0.7
    rate: float = 0.3
    gain: float | Mapping[str, float] = 0.05
    space: Space | None = field(default=None, repr=False, compare=False)
    mean: dict[str, Tensor] | None = field(default=None, init=False, repr=False, compare=False)
    needs_variance = True

    def __post_init__(self) -> None:
        at_least("the number of steps", self.steps, 1)
        _rate(self.rate)
        for gain in self.gain.values() if isinstance(self.gain, Mapping) else [self.gain]:
            at_least("gain", gain, 0)
        if not 0 <= self.late <= 1:
            raise UsageError(f"late lies in [0, 1], got {self.late}")

    def begin(self, space: Space) -> Damped:
        for name in self.gain if isinstance(self.gain, Mapping) else ():
            pick(space.channels, name, "channel")
        return replace(self, space=space)

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return start + (1 - start) * ((step + 1) / self.steps)

    def follow(self, v: Any, t: Tensor, moments: Any, speeds: Mapping[str, Tensor]) -> Any:
        assert self.space is not None
        means = channels(moments.mean)
        own = {n: self._component(var.expand_as(means[n])) for n, var in channels(moments.var).items()}
        before = self.mean or own
        self.mean = {n: torch.lerp(before[n], own[n], self.rate) for n in own}
        slowed = {
            n: value * self._factor(n, t, own[n] / positive(self.mean[n]), speeds.get(n))
            for n, value in channels(v).items()
        }
        return slowed if isinstance(v, dict) else slowed[SINGLE]

    def _component(self, var: Tensor) -> Tensor:  # (B, *) -> (B, 1 or component, …)
        assert self.space is not None
        if self.space.single and numbers(self.space) <= FEW:
            return var.sqrt()
        whole = tuple(range(2 if self.space.single and var.ndim == 4 else 1, var.ndim))
        return (var.sum(whole, keepdim=True) if whole else var).sqrt()

    def _factor(self, name: str, t: Tensor, ratio: Tensor, speed: Tensor | None) -> Tensor:
        gain = self.gain.get(name, 0.0) if isinstance(self.gain, Mapping) else self.gain
        rows = (..., *[None] * (ratio.ndim - 1))
        kept = (1 - gain * (ratio - 1).clamp_min(0)).clamp_min(0)
        if speed is not None:  # v comes so many times faster, and what it is faster by is damped
            pace = speed.to(ratio)[rows]
            kept = (1 + (pace - 1) * kept) / pace
        return torch.where(t.to(ratio)[rows] >= self.late, kept, torch.ones_like(kept))
