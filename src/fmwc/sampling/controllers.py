"""Controllers: the policy that picks the times. And schedules: at which of its steps the variance is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.flow import Space

__all__ = ["Controller", "Grid", "Readings", "Uniform", "begin", "due", "follows", "foreseen", "needs_variance"]


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

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return torch.full_like(t, self.times[step + 1])


Readings = int | Sequence[float] | frozenset[int]  # every k-th step; chosen times; or the numbers of chosen steps


ROUNDING = 1e-6  # of times that were recorded: the step at 1/6 is the one that 0.166667 means


def due(schedule: Readings, step: int, steps: int, before: Tensor | None, t: Tensor) -> bool:
    """Whether the variance is read at a step, which starts at t after one that started at `before`.

    An integer k reads every k-th step, the last always among them. A chosen time is read at the first step that
    starts at or after it (for any sample of the batch), or at the last step if none does.
    """
    if isinstance(schedule, frozenset):
        return step in schedule
    if isinstance(schedule, int):
        return (steps - 1 - step) % schedule == 0
    chosen = t.new_tensor(list(schedule))[:, None] - ROUNDING
    reached = (t >= chosen) | (step == steps - 1)
    fresh = reached if before is None else reached & (before < chosen)
    return bool(fresh.any())  # on a GPU it waits


def foreseen(schedule: Readings, controller: Controller, start: Tensor) -> set[int] | None:
    """The steps at which the variance is read, where a controller's times are known before the first; else `None`.

    What `due` says of each, but a GPU is waited for once, and not at every step.
    """
    steps = controller.steps
    if isinstance(schedule, (int, frozenset)):
        return {step for step in range(steps) if due(schedule, step, steps, None, start)}
    if not getattr(controller, "foreseen", False):
        return None
    times = [start]
    for step in range(steps - 1):
        times.append(controller.next_time(step, times[-1], start, None))
    chosen, t = start.new_tensor(list(schedule))[:, None] - ROUNDING, torch.stack(times)
    reached = t[:, None] >= chosen  # (steps, K, B)
    reached[-1] = True
    fresh = reached & ~torch.cat([torch.zeros_like(reached[:1]), t[:-1, None] >= chosen])
    return set(fresh.flatten(1).any(1).nonzero()[:, 0].tolist())
