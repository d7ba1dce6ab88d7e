r"""Planned controllers: a pilot run says where on the way the variance is, and steps go there.

A pilot's σ_j(t) gives the measure

.. math:: m(t) = \frac1P \sum_j σ_j(t)^p, \qquad u(t) = \int_0^t m \Big/ \int_0^1 m

and equal shares of u are the steps that put the network's evaluations where the variance is. A mean over samples of
σ^p with p > 1 listens to the doubtful few: the sure ones end where they should on any grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.flow import Space
from fmwc.sampling.adaptive import SMALLEST, ahead_of, at_least, positive, spread
from fmwc.sampling.controllers import Controller, begin, follows, needs_variance
from fmwc.state import each

__all__ = ["Extrapolated", "Planned", "Profile"]

MOST = 2.0  # times θ: a velocity extrapolated further than a step's own end is a guess


class Profile:
    """Creates what a pilot run tells of a checkpoint: where on the way the variance is.

    Arguments:
        times: The pilot's times, rising from 0, `(R,)`; each reading stands until the next, the last until t = 1.
        std: σ of its samples there, `(R, P)`.
        power: p of the measure.
    """

    def __init__(self, times: Tensor, std: Tensor, power: float) -> None:
        at_least("power", power, 0)
        if len(times) != len(std) or not len(times) or not bool((times.diff() > 0).all()) or times[0] < 0:
            raise UsageError("a profile has readings at times that rise from 0, the same for all samples of the pilot")
        self.edges = torch.cat([times.double(), times.new_ones(1).double()]).cpu()
        std = std.double().cpu()
        self.usual = positive(std).log().mean(1).exp()  # (R,)
        # Relative to the largest, so that no power overflows; never quite zero, so that u rises.
        density = (std / positive(std.amax())).pow(power).mean(1)
        density = torch.where(density.amax() > 0, density, 1.0).clamp_min(1e-9 * density.amax())
        shares = (density * self.edges.diff()).cumsum(0)
        self.shares = torch.cat([shares.new_zeros(1), shares / shares[-1]])  # (R + 1,)

    def share(self, t: Tensor) -> Tensor:
        """u(t)."""
        return _interpolated(t, self.edges, self.shares)

    def time(self, share: Tensor) -> Tensor:
        """t(u)."""
        return _interpolated(share, self.shares, self.edges)

    def usually(self, t: Tensor) -> Tensor:
        """The pilot's σ at t: the geometric mean over its samples."""
        return _interpolated(t, self.edges, torch.cat([self.usual, self.usual[-1:]]))

    def grid(self, steps: int) -> tuple[float, ...]:
        """Times of equal shares."""
        at_least("the number of steps", steps, 1)
        inner = self.time(torch.arange(1, steps, dtype=torch.float64) / steps)
        return (float(self.edges[0]), *inner.tolist(), 1.0)

    def plan(self, steps: int) -> Extrapolated:
        """The controller to use with this profile: steps planned for each sample, and extrapolated by its variance."""
        return Extrapolated(Planned(self, steps), boost=1.0, profile=self)


def _interpolated(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Piecewise linear, computed in double precision."""
    xs, ys, at = xs.to(x.device), ys.to(x.device), x.double().contiguous()
    right = torch.searchsorted(xs, at, right=True).clamp(1, len(xs) - 1)
    weight = (at - xs[right - 1]) / (xs[right] - xs[right - 1])
    return torch.lerp(ys[right - 1], ys[right], weight.clamp(0, 1)).to(x.dtype)


@dataclass
class Planned:
    r"""Creates a controller that plans on the pilot's profile, and plans again at each step for each sample.

    .. math:: Δu_j = \frac{1 - u(t_j)}{K_j} \left( \frac{\barσ(t_j)}{σ_j(t_j)} \right)^b

    so that a sample above the pilot's σ̄ at its time takes a shorter step there than the shared grid of the same
    profile, and one below it a longer; the last step lands at t = 1. With b = 0 it is that grid.

    Arguments:
        profile: The pilot's; :func:`fmwc.sampling.survey` makes one.
        steps: N, exactly.
        boost: b.
    """

    profile: Profile
    steps: int
    boost: float = 0.5
    space: Space | None = field(default=None, repr=False, compare=False)
    needs_variance = True

    def __post_init__(self) -> None:
        at_least("the number of steps", self.steps, 1)
        at_least("boost", self.boost, 0)

    def begin(self, space: Space) -> Planned:
        return replace(self, space=space)

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        assert self.space is not None
        own = positive(spread(self.space, moments)).to(t)
        ratio = (positive(self.profile.usually(t)) / own).pow(self.boost).clamp_max(1e6)
        done = self.profile.share(t)
        share = ahead_of(done, ((1 - done) / (self.steps - step) * ratio).clamp_min(SMALLEST / self.steps), False)
        after = self.profile.time(share)
        return ahead_of(t, after - t, step == self.steps - 1)


@dataclass
class Extrapolated:
    r"""Creates a controller that takes another's times, and follows on each step the velocity expected later in it.

    .. math:: v ← v_i + θ_j Δt_i \frac{v_i - v_{i-1}}{Δt_{i-1}}, \qquad
        θ_j = θ \left( \frac{σ_j(t_j)}{\barσ(t_j)} \right)^c

    θ = ½ alone is the two-step Adams–Bashforth rule: second order, and no evaluation more than Euler's; it reads no
    variance. With c > 0, a sample above the pilot's σ̄ at its time is taken further along the way its velocity turns
    (θ_j within a factor of 2 of θ), because it is where the variance is that a velocity still has to turn.

    Arguments:
        times: The controller that picks the times.
        weight: θ.
        boost: c; 0 reads no variance.
        profile: The pilot's, for σ̄; where c > 0.
    """

    times: Controller
    weight: float = 0.5
    boost: float = 0.0
    profile: Profile | None = None
    space: Space | None = field(default=None, repr=False, compare=False)
    dt: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    last: tuple[Any, Tensor] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least("weight", self.weight, 0)
        at_least("boost", self.boost, 0)
        if self.boost and self.profile is None:
            raise UsageError("boost compares a sample's variance with a pilot's; give profile=survey(field)")

    @property
    def steps(self) -> int:
        return self.times.steps

    @property
    def needs_variance(self) -> bool:
        return self.boost > 0 or needs_variance(self.times)

    def begin(self, space: Space) -> Extrapolated:
        return replace(self, times=begin(self.times, space), space=space)

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
        # A step of length zero (a sample that has arrived) tells nothing of how the velocity changes.
        ahead = torch.where(before[1] > 0, self.dt / before[1] * self.weight, torch.zeros_like(self.dt))
        if self.boost:
            assert self.profile is not None
            assert self.space is not None
            excess = spread(self.space, moments).to(t) / positive(self.profile.usually(t))
            ahead = ahead * excess.pow(self.boost).clamp(1 / MOST, MOST)
        return each(lambda a, b: a + (a - b) * ahead.to(a)[(..., *[None] * (a.ndim - 1))], v, before[0])
