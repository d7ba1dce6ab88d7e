"""How samples are drawn: what :func:`fmwc.sample` is told beside how many, of what, and with which confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.flow import Space
from fmwc.randomness import Randomness
from fmwc.sampling.controllers import Controller, Grid, Uniform
from fmwc.sampling.parts import Parts
from fmwc.state import as_whole, tree_map

__all__ = [
    "DECODERS",
    "STEPPERS",
    "AsReference",
    "Decoder",
    "SamplingConfig",
    "Stepper",
    "cost_of",
    "decode_map",
    "decode_mean",
    "decode_stochastic",
]


# ---- steppers --------------------------------------------------------------------------------------------------------
# Steppers: one update of the state. The sampler owns the loop, and has already evaluated the velocity at (x, t).

Velocity = Callable[[Any, Tensor], Any]


@dataclass(frozen=True)
class Stepper:
    """One row of the table.

    Arguments:
        step: `(space, velocity, x, v, t, dt) -> x at t + dt`, where v is the velocity at (x, t).
        evaluations: Evaluations of the network a step, that of v included.
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
# Decoders: which velocity a sample follows (App. sampling-strategy).

Decoder = Callable[[Any, Any, Tensor, dict[str, Any], Randomness], Any]


def decode_map(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
    """MAP: the plain network."""
    return field(x, t, **cond)


def decode_stochastic(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
    """Stochastic: one posterior draw at each evaluation."""
    return field.draw(x, t, seed=randomness, cond=cond)


def decode_mean(draws: int) -> Decoder:
    """Mean velocity: the average of k posterior draws at each evaluation."""

    def decode(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
        total = field.draw(x, t, seed=randomness, cond=cond)
        for _ in range(draws - 1):
            total = tree_map(torch.add, total, field.draw(x, t, seed=randomness, cond=cond))
        return tree_map(lambda c: c / draws, total)

    decode.evaluations = draws  # type: ignore[attr-defined]
    return decode


def cost_of(decoder: str | Decoder) -> int:
    """Evaluations of the network that one velocity takes."""
    chosen = pick(DECODERS, decoder, "decoder") if isinstance(decoder, str) else decoder
    return getattr(chosen, "evaluations", 1)


DECODERS: dict[str, Decoder] = {"map": decode_map, "stochastic": decode_stochastic, "mean5": decode_mean(5)}


# ---- config ----------------------------------------------------------------------------------------------------------

STEPS = 50
BATCH = 16384
RECORDS = ("full", "total", "score")


@dataclass(frozen=True)
class AsReference:
    """The default `confidence` of :func:`fmwc.sample`: read what the field's reference was made from."""

    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Any) -> Any:
        raise UsageError("AsReference stands for the estimator of a field's reference; give one of fmwc.estimators")


AS_REFERENCE = AsReference()


@dataclass(frozen=True, eq=False)
class SamplingConfig:
    """How samples are drawn.

    Arguments:
        stepper: `euler`, `midpoint` or `heun`.
        controller: Picks the times in place of equal steps: `Grid(times)`, `Ema(10)`, `survey(field).plan(10)`.
        evaluations: In place of steps, the evaluations of the network to spend, exactly. A two-stage stepper ends an
            odd number with an Euler step.
        decoder: `map`, `stochastic`, `mean5`, or a function such as :class:`fmwc.uses.guidance.Guidance`.
        anneal: Anti-annealing, `{"coord": 5.0}`: these channels follow their velocity at 1 + s·t times its speed. By
            default as the space says.
        start: The time of `x0`, a number or one per sample.
        space: The shape of a sample or its space, where the field does not know it.
        first: The number of the first sample, so that a run can be drawn in pieces.
        projections: Random projections of the endpoint that `transport` reads. By default 8, or one per coordinate
            where a state is at most 16 numbers.
        record: What a run keeps of the variance: `full`, one value per coordinate; `total`, one per sample and channel;
            `score`, the score alone, so that memory does not grow with the steps. By default `full`, or `score` for
            :func:`fmwc.sampling.stream`.
        keep_states: Keep the states of every step.
        batch: Samples integrated together, at most 16384 by default. A batch that does not fit in memory is halved.
        parts: A folder that keeps batches as they are drawn, so that an interrupted run resumes.
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
    record: Literal["full", "total", "score"] | None = None
    keep_states: bool = False
    batch: int | None = None
    parts: Parts | None = None

    def __post_init__(self) -> None:
        pick(STEPPERS, self.stepper, "stepper")
        if isinstance(self.decoder, str):
            pick(DECODERS, self.decoder, "decoder")
        if self.record is not None:
            pick(dict.fromkeys(RECORDS), self.record, "record")
        for name, low, high, unit in (
            ("batch", 1, 10**12, "sample"),
            ("first", 0, 10**12, ""),
            ("evaluations", 1, 10**7, "evaluation"),
            ("projections", 1, 10**6, "projection"),
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, as_whole(value, name, low, high, unit))
        if self.controller is not None and self.evaluations is not None:
            raise UsageError("give one of steps, evaluations and a controller")
        if self.parts and self.keep_states:
            raise UsageError("batches that are kept on disk do not hold their states; leave out keep_states or parts")
        if isinstance(self.controller, Grid) and not self.starts_at_0:
            raise UsageError("the times of a grid say where to start; leave start out")

    @property
    def starts_at_0(self) -> bool:
        return isinstance(self.start, (int, float)) and self.start == 0

    def with_defaults(self, **usual: Any) -> SamplingConfig:
        """Return the configuration with these values for the fields that are still at their defaults."""
        known = {field.name: field.default for field in fields(self)}
        return replace(self, **{name: value for name, value in usual.items() if getattr(self, name) is known[name]})

    def timed(self, steps: int | None) -> SamplingConfig:
        """Return the configuration for a number of equal steps; a grid of equal steps from 0 counts as such."""
        if steps is not None:
            if self.controller is not None or self.evaluations is not None:
                raise UsageError("give one of steps, evaluations and a controller")
            return replace(self, controller=Uniform(steps))
        if isinstance(self.controller, Grid) and self.controller.equal:
            return replace(self, controller=Uniform(self.controller.steps))
        return self

    def plan(self) -> tuple[Controller, int]:
        """Return the controller, and how many of its last steps are Euler's."""
        if self.controller is not None:
            return self.controller, 0
        if self.evaluations is None:
            return Uniform(STEPS), 0
        cost = cost_of(self.decoder)
        velocities, rest = divmod(self.evaluations, cost)
        if rest:
            raise UsageError(
                f"this decoder takes {cost} evaluations per velocity, so {self.evaluations} cannot be spent exactly"
            )
        whole, tail = divmod(velocities, STEPPERS[self.stepper].evaluations)
        return Uniform(whole + tail), tail
