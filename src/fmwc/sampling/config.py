"""Steppers, decoders, controllers with fixed steps, and :class:`SamplingConfig`, which combines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.flow import Space
from fmwc.randomness import Randomness
from fmwc.state import as_whole, tree_map

SMALL = 16  # coordinates


def is_small(space: Space) -> bool:
    """Return whether a state has few coordinates: each is then a component, and exact estimators are affordable."""
    return sum(math.prod(channel.shape) for channel in space.channels.values()) <= SMALL


# ---- steppers --------------------------------------------------------------------------------------------------------
# One update of the state. The sampler has already evaluated the velocity v at (x, t).

Velocity = Callable[[Any, Tensor], Any]


@dataclass(frozen=True)
class Stepper:
    """An integration rule.

    Arguments:
        step: `(space, velocity, x, v, t, dt) -> x at t + dt`, where v is the velocity at (x, t).
        evaluations: Evaluations of the network per step, including that of v.
        order: The global order of convergence.
    """

    step: Callable[[Space, Velocity, Any, Any, Tensor, Tensor], Any]
    evaluations: int
    order: int


def euler(space: Space, velocity: Velocity, x: Any, v: Any, t: Tensor, dt: Tensor) -> Any:
    return space.advance(x, v, dt)


def midpoint(space: Space, velocity: Velocity, x: Any, v: Any, t: Tensor, dt: Tensor) -> Any:
    return space.advance(x, velocity(space.advance(x, v, dt / 2), t + dt / 2), dt)


def heun(space: Space, velocity: Velocity, x: Any, v: Any, t: Tensor, dt: Tensor) -> Any:
    ahead = velocity(space.advance(x, v, dt), t + dt)
    return space.advance(x, tree_map(lambda a, b: (a + b) / 2, v, ahead), dt)


STEPPERS: dict[str, Stepper] = {
    "euler": Stepper(euler, evaluations=1, order=1),
    "midpoint": Stepper(midpoint, evaluations=2, order=2),
    "heun": Stepper(heun, evaluations=2, order=2),
}


# ---- decoders --------------------------------------------------------------------------------------------------------
# Which velocity a sample follows (App. sampling-strategy).

Decoder = Callable[[Any, Any, Tensor, dict[str, Any], Randomness], Any]


def decode_map(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
    """Return the velocity of the plain network (MAP)."""
    return field(x, t, **cond)


def decode_stochastic(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
    """Return the velocity of one posterior draw."""
    return field.draw(x, t, seed=randomness, cond=cond)


def decode_mean(draws: int) -> Decoder:
    """Return a decoder that averages several posterior draws per evaluation."""

    def decode(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
        total = field.draw(x, t, seed=randomness, cond=cond)
        for _ in range(draws - 1):
            total = tree_map(torch.add, total, field.draw(x, t, seed=randomness, cond=cond))
        return tree_map(lambda c: c / draws, total)

    decode.evaluations = draws  # type: ignore[attr-defined]
    return decode


DECODERS: dict[str, Decoder] = {"map": decode_map, "stochastic": decode_stochastic, "mean5": decode_mean(5)}


def cost_of(decoder: str | Decoder) -> int:
    """Return how many evaluations of the network one velocity takes."""
    return getattr(DECODERS[decoder] if isinstance(decoder, str) else decoder, "evaluations", 1)


# ---- controllers -----------------------------------------------------------------------------------------------------
# Controllers choose the times. Those that use the variance are in fmwc.sampling.adaptive.


class Controller(Protocol):
    """Chooses each sample's next time: `next_time(step, t, start, moments)`; `steps` is the total number of steps.

    `t` and `start` are the current and the initial time of each sample, `(B,)`; they may differ between samples.
    `moments` are those of this step, or `None` if the schedule does not read it.

    A controller may also have

    - `begin(space) -> controller`: the controller for one batch, with its own state. `space` carries the anti-annealing
      of the run. A controller that has state and no `begin` shares it between batches, and between threads;
    - `follow(v, t, moments, speeds) -> v`: the velocity to follow, called once per step after `next_time`. `v` includes
      anti-annealing; `speeds` holds its factor per channel, `(B,)`;
    - `needs_variance = True` if it reads `moments` at every step;
    - `foreseen = True` if its times depend on the start alone.
    """

    @property
    def steps(self) -> int: ...
    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor: ...


def begin(controller: Controller, space: Space) -> Controller:
    """Return the controller for one batch."""
    fresh: Controller = controller.begin(space) if hasattr(controller, "begin") else controller
    return fresh


def follows(controller: Controller) -> bool:
    """Return whether a controller changes the velocity."""
    return hasattr(controller, "follow")


def needs_moments(controller: Controller) -> bool:
    """Return whether a controller reads the variance at every step."""
    return bool(getattr(controller, "needs_variance", False))


@dataclass(frozen=True)
class Uniform:
    """Equal steps from each sample's start to t = 1."""

    steps: int
    foreseen = True

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"steps must be at least 1, got {self.steps}")

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        # Computed from the step number instead of by adding dt, so that the last time is exactly 1.
        return start + (1 - start) * ((step + 1) / self.steps)


@dataclass(frozen=True)
class Grid:
    """Steps between given times, which rise from the start to 1."""

    times: tuple[float, ...]
    foreseen = True

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in zip(self.times, self.times[1:], strict=False))
        if len(self.times) < 2 or not rises or self.times[0] < 0 or self.times[-1] != 1:
            raise UsageError(f"the times of a grid must rise from at least 0 to exactly 1, got {list(self.times)}")

    @property
    def steps(self) -> int:
        return len(self.times) - 1

    @property
    def equal(self) -> bool:
        """Whether these are equal steps from 0."""
        return all(abs(t - i / self.steps) < 1e-6 for i, t in enumerate(self.times))

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return torch.full_like(t, self.times[step + 1])


# ---- the configuration -----------------------------------------------------------------------------------------------

STEPS = 50
BATCH = 16384
TWO_PLANS = "give only one of steps, evaluations and a controller"


@dataclass(frozen=True)
class AsReference:
    """The default `confidence` of :func:`fmwc.sample`: the estimator of the field's reference."""

    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Any) -> Any:
        raise UsageError("AsReference is a placeholder and cannot be called; use an estimator of fmwc.estimators")


AS_REFERENCE = AsReference()


@dataclass(frozen=True, eq=False)
class SamplingConfig:
    """Options of :func:`fmwc.sample`.

    Arguments:
        stepper: `euler`, `midpoint` or `heun`.
        controller: Chooses the times, instead of equal steps: `Grid(times)`, `Ema(10)`, `fit_grid(field, 10)`.
        evaluations: Instead of steps, the exact number of network evaluations to spend. With an odd number, a two-stage
            stepper ends with an Euler step.
        decoder: `map`, `stochastic`, `mean5`, or a function such as :class:`fmwc.uses.guidance.Guidance`.
        anneal: Anti-annealing, `{"coord": 5.0}`: multiplies the velocity of these channels by 1 + s·t. By default that
            of the space.
        start: The time of `x0`: one number, or one per sample.
        space: The space of the samples, or the shape of one, if the field does not know it.
        first: The index of the first sample, to draw a run in parts.
        projections: Random projections of the endpoint for `transport`. By default 8, or one per coordinate for states
            of at most 16 numbers.
        keep_states: Whether to keep the states of every step.
        batch: The number of samples integrated together, at most 16384 by default. A batch that does not fit in memory
            is halved.
        compact: Whether to keep one variance per sample and channel instead of one per coordinate.
        on_step: Called after every step as `on_step(first, t, x)`, with the index of the first sample of the batch, the
            times that its samples have reached and their states, to show samples while they are drawn. An exception
            that it raises ends the run.
    """

    stepper: str = "euler"
    controller: Controller | None = None
    evaluations: int | None = None
    decoder: str | Decoder = "map"
    anneal: Mapping[str, float] | None = None
    start: float | Tensor = 0.0
    space: Space | Sequence[int] | int | None = None
    first: int = 0
    projections: int | None = None
    keep_states: bool = False
    batch: int | None = None
    compact: bool = False
    on_step: Callable[[int, Tensor, Any], None] | None = None
    scores_only: ClassVar[bool] = False

    def __post_init__(self) -> None:
        pick(STEPPERS, self.stepper, "stepper")
        if isinstance(self.decoder, str):
            pick(DECODERS, self.decoder, "decoder")
        for name, low, high, unit in (
            ("batch", 1, 10**12, "sample"),
            ("first", 0, 10**12, ""),
            ("evaluations", 1, 10**7, "evaluation"),
            ("projections", 1, 10**6, "projection"),
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_whole(value, name, low, high, unit))
        if self.controller is not None and self.evaluations is not None:
            raise UsageError(TWO_PLANS)
        if isinstance(self.controller, Grid) and not self.starts_at_0:
            raise UsageError("the first time of a grid is the start; leave out start")

    @property
    def starts_at_0(self) -> bool:
        return isinstance(self.start, (int, float)) and self.start == 0

    def with_defaults(self, **defaults: Any) -> SamplingConfig:
        """Return the configuration with these values for the fields that are not set."""
        unset = {field.name for field in fields(self) if getattr(self, field.name) is field.default}
        return replace(self, **{name: value for name, value in defaults.items() if name in unset})

    def with_steps(self, steps: int | None) -> SamplingConfig:
        """Return the configuration for a number of equal steps. A grid of equal steps from 0 becomes `Uniform`."""
        if steps is not None:
            if self.controller is not None or self.evaluations is not None:
                raise UsageError(TWO_PLANS)
            return replace(self, controller=Uniform(steps))
        if isinstance(self.controller, Grid) and self.controller.equal:
            return replace(self, controller=Uniform(self.controller.steps))
        return self

    def plan(self) -> tuple[Controller, int]:
        """Return the controller and the number of Euler steps at the end."""
        if self.controller is not None or self.evaluations is None:
            return self.controller or Uniform(STEPS), 0
        cost = cost_of(self.decoder)
        velocities, rest = divmod(self.evaluations, cost)
        if rest:
            raise UsageError(
                f"this decoder takes {cost} evaluations per velocity; give a multiple, not {self.evaluations}"
            )
        steps, tail = divmod(velocities, STEPPERS[self.stepper].evaluations)
        return Uniform(steps + tail), tail


class ScoresOnly(SamplingConfig):
    """Options of :func:`fmwc.sampling.stream`: a run keeps only its scores, so that it does not grow with its steps."""

    scores_only = True
