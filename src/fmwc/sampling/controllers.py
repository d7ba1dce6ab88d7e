"""Controllers: the policy that picks the times. And schedules: at which of its steps the variance is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.flow import Space
from fmwc.references import Schedule
from fmwc.state import SINGLE, channels, tree_map

__all__ = [
    "FEW",
    "SMALLEST",
    "Controller",
    "Damped",
    "Ema",
    "Extrapolated",
    "Grid",
    "Planned",
    "Profile",
    "Uniform",
    "ahead_of",
    "at_least",
    "begin",
    "due",
    "follows",
    "foreseen",
    "needs_variance",
    "numbers",
    "positive",
    "spread",
]


# ---- interface and fixed steps ---------------------------------------------------------------------------------------


class Controller(Protocol):
    """`next_time(step, t, start, moments)` returns each sample's next time; `steps` is the total number of steps.

    `t` and `start` hold each sample's time and the time it started from, `(B,)`. `moments` are those of this step, or
    `None` where the schedule reads none. A batch may sit at different t.

    A controller may also have

    - `begin(space) -> controller`: the one to use for a batch, with state of its own; itself where there is none. The
      space's channels carry the anti-annealing of the run. One with state and without `begin` is shared by all
      batches, and by threads that sample with it;
    - `follow(v, t, moments, speeds) -> v`: the velocity to follow, called once per step after `next_time`;
      anti-annealing is in `v` already, and `speeds` holds its factor for each channel, `(B,)`;
    - `needs_variance = True`: it reads `moments` at every step;
    - `foreseen = True`: its times follow from the start alone, whatever is read.
    """

    @property
    def steps(self) -> int: ...
    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor: ...


def begin(controller: Controller, space: Space) -> Controller:
    """The controller of one batch."""
    fresh: Controller = controller.begin(space) if hasattr(controller, "begin") else controller
    return fresh


def follows(controller: Controller) -> bool:
    """Whether a controller has a say in the velocity."""
    return hasattr(controller, "follow")


def needs_variance(controller: Controller) -> bool:
    """Whether a controller reads the variance at every step."""
    return bool(getattr(controller, "needs_variance", False))


@dataclass(frozen=True)
class Uniform:
    """Creates equal steps from wherever a sample starts to t = 1."""

    steps: int
    foreseen = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"sampling takes at least 1 step, got {self.steps}")

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        # From the step number, not by adding dt: the last time is then exactly 1.
        return start + (1 - start) * ((step + 1) / self.steps)


@dataclass(frozen=True)
class Grid:
    """Creates steps between chosen times, which rise from the start to 1."""

    times: tuple[float, ...]
    foreseen = True

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in zip(self.times, self.times[1:], strict=False))
        if len(self.times) < 2 or not rises or self.times[0] < 0 or self.times[-1] != 1:
            raise UsageError(f"a time grid rises from at least 0 to exactly 1, got {list(self.times)}")

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @property
    def equal(self) -> bool:
        """Whether these are equal steps from 0."""
        return all(abs(t - i / self.steps) < 1e-6 for i, t in enumerate(self.times))

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return torch.full_like(t, self.times[step + 1])


ROUNDING = 1e-6  # of times that were recorded: the step at 1/6 is the one that 0.166667 means


def due(schedule: Schedule, step: int, steps: int, before: Tensor | None, t: Tensor) -> bool:
    """Whether the variance is read at a step, which starts at t after one that started at `before`."""
    if schedule.numbers is not None:
        return step in schedule.numbers
    if schedule.stride:
        return (steps - 1 - step) % schedule.stride == 0
    chosen = t.new_tensor(schedule.times)[:, None] - ROUNDING
    reached = (t >= chosen) | (step == steps - 1)
    fresh = reached if before is None else reached & (before < chosen)
    return bool(fresh.any())  # on a GPU it waits


def foreseen(schedule: Schedule, controller: Controller, start: Tensor) -> set[int] | None:
    """The steps at which the variance is read, where a controller's times are known before the first; else `None`.

    What `due` says of each, but a GPU is waited for once, and not at every step.
    """
    steps = controller.steps
    if not schedule.times:
        return {step for step in range(steps) if due(schedule, step, steps, None, start)}
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


# ---- adaptive --------------------------------------------------------------------------------------------------------
# The paper's adaptive controllers (App. adaptive-controllers): a sample's variance sets its step, or its speed.
#
# σ_j is a sample's ‖σ_t‖₂ in its space's units, as :attr:`Trajectory.std`.

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


# ---- planned ---------------------------------------------------------------------------------------------------------
# Planned controllers: a pilot run says where on the way the variance is, and steps go there.
#
# A pilot's σ_j(t) gives the measure
#
# .. math:: m(t) = \frac1P \sum_j σ_j(t)^p, \qquad u(t) = \int_0^t m \Big/ \int_0^1 m
#
# and equal shares of u are the steps that put the network's evaluations where the variance is. A mean over samples of
# σ^p with p > 1 listens to the doubtful few: the sure ones end where they should on any grid.

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
        return tree_map(lambda a, b: a + (a - b) * ahead.to(a)[(..., *[None] * (a.ndim - 1))], v, before[0])
