"""The space of states: named channels, each on a manifold with noise of its own. A lone channel is a plain tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError, nearest, pick
from fmwc.flow.manifolds import Euclidean, FlatTorus, Manifold
from fmwc.randomness import Randomness
from fmwc.state import SINGLE, State, channels

__all__ = ["NOISES", "Channel", "Space", "euclidean"]

NOISES = {"normal": lambda r, like: r.normal(like), "uniform": lambda r, like: r.uniform(like)}


@dataclass(frozen=True)
class Channel:
    """Creates a channel.

    Arguments:
        shape: The shape of one sample.
        manifold: Any object with expmap, logmap, projx and proju.
        noise: The distribution at t = 0: `normal` or `uniform`.
    """

    shape: tuple[int, ...]
    manifold: Manifold = Euclidean()
    noise: str = "normal"

    def __post_init__(self) -> None:
        pick(NOISES, self.noise, "noise")
        if not isinstance(self.manifold, Manifold):
            raise UsageError("a manifold has the methods expmap, logmap, projx and proju")


class Space:
    """Creates a product of named channels.

    >>> crystal = Space({"coord": Channel((3,), FlatTorus(), "uniform"), "lattice": Channel((6,))})
    >>> sorted(crystal.channels)
    ['coord', 'lattice']
    """

    def __init__(self, channels: Mapping[str, Channel]) -> None:
        if not channels:
            raise UsageError("a space has at least one channel")
        self.channels = dict(channels)

    @property
    def single(self) -> bool:
        """Whether states are plain tensors."""
        return list(self.channels) == [SINGLE]

    def check(self, x: State, whose: str = "") -> None:
        """Raises where a state (or a velocity) has other channels or other shapes than the space."""
        if isinstance(x, dict) == self.single:
            given = "a dict of channels" if isinstance(x, dict) else "a tensor"
            raise ShapeError(f"this space's states are channels {list(self.channels)}, got {given}")
        if missing := self.channels.keys() - channels(x).keys():
            raise ShapeError(f"the state lacks {', '.join(sorted(missing))} of the channels {list(self.channels)}")
        for name, value in channels(x).items():
            if name not in self.channels:
                raise ShapeError(nearest(name, self.channels, "channel"))
            shape = self.channels[name].shape
            if tuple(value.shape[1:]) != shape:
                expected = ", ".join(["B", *map(str, shape)])
                raise ShapeError(
                    f"{whose}channel '{name}' takes states of shape ({expected}), got {tuple(value.shape)}"
                )

    def noise(self, count: int, randomness: Randomness, device: torch.device | str = "cpu") -> Any:
        """x0: `count` states at t = 0."""
        drawn = {
            name: NOISES[c.noise](randomness, torch.empty(count, *c.shape, device=device))
            for name, c in self.channels.items()
        }
        return drawn[SINGLE] if self.single else drawn

    def advance(self, x: Any, v: Any, dt: Tensor) -> Any:  # dt: (B,)
        """x after following v for dt: exp_x(dt · proj v), put back on the manifold."""

        def move(manifold: Manifold, x: Tensor, v: Tensor) -> Tensor:
            return manifold.projx(manifold.expmap(x, manifold.proju(x, v) * _against(dt, v)))

        return self._lift(move, x, v)

    def path(self, x0: Any, x1: Any, t: Tensor) -> tuple[Any, Any]:  # t: (B,)
        """The geodesic from x0 to x1: where it is at t, and its (constant) velocity. On flat manifolds, linear."""

        def velocity(manifold: Manifold, x0: Tensor, x1: Tensor) -> Tensor:
            return manifold.proju(x0, manifold.logmap(x0, x1))

        u = self._lift(velocity, x0, x1)
        return self.advance(x0, u, t), u

    def _lift(self, f: Any, *states: Any) -> Any:
        if self.single:
            return f(self.channels[SINGLE].manifold, *states)
        return {name: f(c.manifold, *(s[name] for s in states)) for name, c in self.channels.items()}

    def describe(self) -> dict[str, Any]:
        """What a checkpoint records, for spaces made of our own manifolds."""
        return {
            name: {"shape": list(c.shape), "manifold": type(c.manifold).__name__, "noise": c.noise}
            for name, c in self.channels.items()
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Space:
        known = {m.__name__: m for m in (Euclidean, FlatTorus)}
        return cls(
            {
                name: Channel(tuple(c["shape"]), pick(known, c["manifold"], "manifold")(), c["noise"])
                for name, c in description.items()
            }
        )


def euclidean(shape: Sequence[int]) -> Space:
    """Flat space of one channel, with standard normal noise: states are plain tensors."""
    return Space({SINGLE: Channel(tuple(int(n) for n in shape))})


def _against(dt: Tensor, value: Tensor) -> Tensor:  # (B,) -> (B, 1, …)
    return dt.to(value.dtype)[(slice(None), *[None] * (value.ndim - 1))]
