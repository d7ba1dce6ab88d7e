"""Adaptive controllers: the variance of a sample sets its step sizes, or scales its velocity.

:class:`Ema` and :class:`Damped` come from the paper (App. adaptive-controllers). σ_j is ‖σ_t‖₂ of sample j in the units
of its space, as in :attr:`Trajectory.std`. :class:`Extrapolated` makes the steps of another controller second order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.flow import Space
from fmwc.sampling.config import Controller, Uniform, begin, follows, is_small, needs_moments
from fmwc.state import SINGLE, channels, tree_map

if TYPE_CHECKING:
    from typing_extensions import Self

SMALLEST = 1e-2  # the shortest adaptive step, relative to an equal step (as in the paper)


def std_norm(space: Space, moments: Any) -> Tensor:  # -> (B,)
    """Return ‖σ‖₂ per sample: √(Σ over channels of weight × variance), as :attr:`Trajectory.std`."""
    mean = channels(moments.mean)
    totals = [
        var.expand_as(mean[name]).flatten(1).sum(1) * space.channels[name].weight
        for name, var in channels(moments.var).items()
    ]
    return torch.stack(totals).sum(0).sqrt()


def _positive(value: Tensor) -> Tensor:
    """Clamp values to be positive, so that the ratio of two zero variances is 1."""
    return value.clamp_min(torch.finfo(value.dtype).tiny)


def _advance(t: Tensor, dt: Tensor, last: bool) -> Tensor:
    """Return t + dt, at most 1; return exactly 1 at the last step."""
    return torch.ones_like(t) if last else torch.where(dt >= 1 - t, torch.ones_like(t), t + dt)


def _at_least(low: float, **values: float) -> None:
    for name, value in values.items():
        if not low <= value < math.inf:
            raise UsageError(f"{name} must be at least {low:g}, got {value}")


def _check(steps: int, rate: float = 1.0, **values: float) -> None:
    """Check the number of steps, the rate of a running mean, and values that are at least 0."""
    if not 1 <= steps < math.inf:
        raise UsageError(f"the number of steps must be at least 1, got {steps}")
    if not 0 < rate <= 1:
        raise UsageError(f"the rate of a running mean must lie in (0, 1], got {rate}")
    _at_least(0, **values)


@dataclass
class _InSpace:
    """Base class of controllers that use the space of the run."""

    space: Space | None = field(default=None, kw_only=True, repr=False, compare=False)

    def begin(self, space: Space) -> Self:
        return replace(self, space=space)

    def _std(self, moments: Any) -> Tensor:  # -> (B,)
        assert self.space is not None
        return std_norm(self.space, moments)


@dataclass
class Ema(_InSpace):
    r"""The paper's naive controller, which sets each sample's steps by the running mean of its σ.

    .. math:: Δt_j = \frac{1 - t_j}{K_j} \sqrt{\frac{\barσ_j}{σ_j(t_j)}}, \qquad
        \barσ_j ← (1 - λ) \barσ_j + λ σ_j(t_j)

    with K steps remaining and σ̄ starting at σ(0). As in the paper's text, the running mean is updated before it is
    compared. The last step ends at t = 1.

    Arguments:
        steps: The number of steps N.
        rate: λ.
        smallest: The shortest step; 10⁻²/N if `None`.
    """

    steps: int
    rate: float = 0.5
    smallest: float | None = None
    mean: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    needs_variance = True

    def __post_init__(self) -> None:
        _check(self.steps, self.rate, smallest=self.smallest or 0.0)

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        std = self._std(moments)
        self.mean = std if self.mean is None else torch.lerp(self.mean, std, self.rate)
        ratio = (_positive(self.mean) / _positive(std)).sqrt().clamp_max(1e6).to(t)
        smallest = SMALLEST / self.steps if self.smallest is None else self.smallest
        dt = ((1 - t) / (self.steps - step) * ratio).clamp_min(smallest)
        return _advance(t, dt, step == self.steps - 1)


@dataclass
class Damped(_InSpace):
    r"""The paper's *Online Adaptive*: equal steps; late steps slow each component whose σ exceeds its running mean.

    .. math:: v_c ← (1 - κ_c r_c)_+ v_c, \qquad r_c = \max(σ_c / \barσ_c - 1, 0), \qquad t ≥ t_{late}

    In a channel with anti-annealing 1 + s·t, the slope s is damped instead of the velocity. The components are the
    channels if the state has several, else the coordinates of a small state, else the image channels. Image channels
    are damped equally if the estimator returns one variance per sample, as random probes do.

    Arguments:
        steps: The number of steps N.
        late: t_late.
        rate: λ of the running means, which start at σ_c(0) and are updated before they are compared.
        gain: κ, one number, or one per channel by name (0 for channels that are not named).
    """

    steps: int
    late: float = 0.7
    rate: float = 0.3
    gain: float | Mapping[str, float] = 0.05
    mean: dict[str, Tensor] | None = field(default=None, init=False, repr=False, compare=False)
    needs_variance = True

    def __post_init__(self) -> None:
        for gain in self.gain.values() if isinstance(self.gain, Mapping) else [self.gain]:
            _check(self.steps, self.rate, gain=gain)
        if not 0 <= self.late <= 1:
            raise UsageError(f"late must lie in [0, 1], got {self.late}")

    def begin(self, space: Space) -> Self:
        for name in self.gain if isinstance(self.gain, Mapping) else ():
            pick(space.channels, name, "channel")
        return super().begin(space)

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return Uniform(self.steps).next_time(step, t, start, moments)

    def follow(self, v: Any, t: Tensor, moments: Any, speeds: Mapping[str, Tensor]) -> Any:
        means = channels(moments.mean)
        std = {n: self._component(var.expand_as(means[n])) for n, var in channels(moments.var).items()}
        before = self.mean or std
        self.mean = {n: torch.lerp(before[n], std[n], self.rate) for n in std}
        slowed = {
            n: value * self._factor(n, t, std[n] / _positive(self.mean[n]), speeds.get(n))
            for n, value in channels(v).items()
        }
        return slowed if isinstance(v, dict) else slowed[SINGLE]

    def _component(self, var: Tensor) -> Tensor:  # (B, *) -> (B, 1 or component, …)
        assert self.space is not None
        if self.space.single and is_small(self.space):
            return var.sqrt()
        whole = tuple(range(2 if self.space.single and var.ndim == 4 else 1, var.ndim))
        return (var.sum(whole, keepdim=True) if whole else var).sqrt()

    def _factor(self, name: str, t: Tensor, ratio: Tensor, speed: Tensor | None) -> Tensor:
        gain = self.gain.get(name, 0.0) if isinstance(self.gain, Mapping) else self.gain
        rows = (..., *[None] * (ratio.ndim - 1))
        factor = (1 - gain * (ratio - 1).clamp_min(0)).clamp_min(0)
        if speed is not None:  # the velocity is scaled by this factor; only the excess over 1 is damped
            pace = speed.to(ratio)[rows]
            factor = (1 + (pace - 1) * factor) / pace
        return torch.where(t.to(ratio)[rows] >= self.late, factor, torch.ones_like(factor))


@dataclass
class Extrapolated:
    r"""Controller that takes the times of another controller and extrapolates the velocity within each step.

    .. math:: v ← v_i + θ Δt_i \frac{v_i - v_{i-1}}{Δt_{i-1}}

    θ = ½ is the two-step Adams–Bashforth rule: second order, with as many evaluations as Euler.

    Arguments:
        times: The controller that chooses the times.
        weight: θ.
    """

    times: Controller
    weight: float = 0.5
    dt: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    last: tuple[Any, Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _at_least(0, weight=self.weight)

    @property
    def steps(self) -> int:
        return self.times.steps

    @property
    def needs_variance(self) -> bool:
        return needs_moments(self.times)

    def begin(self, space: Space) -> Self:
        return replace(self, times=begin(self.times, space))

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        after = self.times.next_time(step, t, start, moments)
        self.dt = after - t
        return after

    def follow(self, v: Any, t: Tensor, moments: Any, speeds: Mapping[str, Tensor]) -> Any:
        assert self.dt is not None
        if follows(self.times):
            v = self.times.follow(v, t, moments, speeds)  # type: ignore[attr-defined]
        before, self.last = self.last, (v, self.dt)
        if before is None:
            return v
        # A step of length zero (of a finished sample) does not show how the velocity changes.
        ahead = torch.where(before[1] > 0, self.dt / before[1] * self.weight, torch.zeros_like(self.dt))
        return tree_map(lambda a, b: a + (a - b) * ahead.to(a)[(..., *[None] * (a.ndim - 1))], v, before[0])
