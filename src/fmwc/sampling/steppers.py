"""Steppers: one update of the state. The sampler owns the loop, and has already evaluated the velocity at (x, t)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fmwc.flow import Space
from fmwc.state import each

__all__ = ["STEPPERS", "Stepper"]

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
    return space.advance(x, each(lambda a, b: (a + b) / 2, v, ahead), dt)


STEPPERS: dict[str, Stepper] = {
    "euler": Stepper(euler, evaluations=1, order=1),
    "midpoint": Stepper(midpoint, evaluations=2, order=2),
    "heun": Stepper(heun, evaluations=2, order=2),
}
