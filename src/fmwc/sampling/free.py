r"""Free signals: what a trajectory says of its end without a noise model and without another evaluation.

At every step the velocity predicts the end, x̂₁ = x_t + (1 − t) v. A flow that changes its mind on the way is doubtful:

- `spread`: the geometric mean of the root mean square over numbers of x̂₁(t) − x₁, over ten times of the trajectory, or
  those in a window, and over channels.
- `detour`: the length of the trajectory divided by the distance between its ends, likewise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.flow import Space
from fmwc.state import channels

__all__ = ["GUESSES", "Free", "spread"]

GUESSES = 10  # predicted ends that are kept while a batch is integrated
TINY = 1e-30


class Free:
    """Collects the free signals of a batch while it is integrated.

    Arguments:
        space: The space of the samples, given their conditions.
        x0: Where they start.
        steps: The number of steps of the run.
    """

    def __init__(self, space: Space, x0: Any, steps: int) -> None:
        self.space, self.x0, self.last = space, x0, x0
        self.when = {round(i * steps / GUESSES) for i in range(GUESSES)} if steps > GUESSES else set(range(steps))
        self.guesses: list[tuple[Tensor, Any]] = []
        self.length: Any = 0.0

    def guess(self, step: int, x: Any, t: Tensor, v: Any) -> None:
        """Note the end that the velocity at a step predicts."""
        if step in self.when:
            self.guesses.append((t, self.space.advance(x, v, 1 - t)))

    def move(self, x: Any) -> None:
        """Note where a step ended."""
        self.length = self.length + self._between(self.last, x).sqrt()
        self.last = x

    def found(self) -> dict[str, Tensor]:
        """Return the signals, a row per sample."""
        squares = torch.stack([self._between(x, self.last) for _, x in self.guesses], 1)  # (C, G, B)
        far = self._between(self.x0, self.last).sqrt()
        return {
            "guess": self._over_channels(squares).T.contiguous(),  # (B, G)
            "guess_t": torch.stack([t for t, _ in self.guesses], 1),  # (B, G)
            "detour": self._over_channels(self.length / far.clamp_min(TINY)),
        }

    def _between(self, x: Any, y: Any) -> Tensor:  # -> (C, B)
        """The squared distance along the geodesic, per number of each channel."""
        found = []
        for name, channel in self.space.channels.items():
            square = channel.manifold.logmap(channels(x)[name], channels(y)[name]).square().flatten(1)
            found.append(square.sum(1) / self._numbers(name, square))
        return torch.stack(found)

    def _numbers(self, name: str, square: Tensor) -> Any:
        present = self.space.present.get(name)
        if present is None:
            return square.shape[1]
        return present.flatten(1).sum(1) * (square.shape[1] / self.space.channels[name].shape[0])

    def _over_channels(self, value: Tensor) -> Tensor:  # (C, ...) -> (...)
        """The geometric mean over channels that move at all."""
        moves = (value > TINY).to(value.dtype)
        return ((value.clamp_min(TINY).log() * moves).sum(0) / moves.sum(0).clamp_min(1)).exp() * (moves.sum(0) > 0)


def spread(guess: Tensor, times: Tensor, early: float = 0.0, late: float = 1.0) -> Tensor:  # (B, G), (B, G) -> (B,)
    """The geometric mean of the distance to the end over the predictions with early ≤ t < late.

    Not the arithmetic one, which would be that of the first predictions alone.
    """
    inside = ((times >= early - 1e-6) & (times < late - 1e-6)).to(guess.dtype)
    if not bool((inside.sum(1) > 0).all()):
        raise UsageError(f"no predicted end is known for {early} ≤ t < {late}; take more steps, or another window")
    return ((guess.clamp_min(TINY).log() * inside).sum(1) / inside.sum(1) / 2).exp()
