"""The space of states: named channels, each on a manifold with its own noise. A single channel is a plain tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError, nearest, pick
from fmwc.flow.manifolds import Euclidean, FlatTorus, Lattice, Manifold
from fmwc.randomness import Randomness
from fmwc.state import SINGLE, State, channels, require_state

__all__ = ["NOISES", "Channel", "Path", "Space", "as_space", "euclidean", "path_of"]

Path = Callable[[Any, Any, Tensor], tuple[Any, Any]]  # (x0, x1, t) -> (x_t, its velocity u_t)

NOISES = {
    "normal": lambda channel, r, like: r.normal(like),
    "uniform": lambda channel, r, like: r.uniform(like),
    "own": lambda channel, r, like: channel.manifold.noise(r, like),
}


@dataclass(frozen=True)
class Channel:
    """A channel of a space.

    Arguments:
        shape: The shape of one sample.
        manifold: Any object with expmap, logmap, projx and proju.
        noise: The distribution at t = 0: `normal`, `uniform`, or `own`, the manifold's `noise(randomness, like)`.
        rows: The condition that holds the number of rows of each sample, if samples have different numbers (`atoms`).
            The shape holds the largest number; unused rows stay zero.
        centred: Whether the mean over the rows is subtracted from velocities, so that samples do not drift.
        weight: The weight of the channel in the training loss.
        anneal: Anti-annealing s: samples follow the channel's velocity at 1 + s·t times its speed.
    """

    shape: tuple[int, ...]
    manifold: Manifold = Euclidean()
    noise: str = "normal"
    rows: str = ""
    centred: bool = False
    weight: float = 1.0
    anneal: float = 0.0

    def __post_init__(self) -> None:
        pick(NOISES, self.noise, "noise")
        if not isinstance(self.manifold, Manifold):
            raise UsageError("a manifold needs the methods expmap, logmap, projx and proju")
        if self.noise == "own" and not hasattr(self.manifold, "noise"):
            raise UsageError("the manifold has no method noise; use noise='normal' or 'uniform'")
        if (self.rows or self.centred) and not self.shape:
            raise UsageError("a channel with rows needs a shape with at least one dimension")
        if not self.weight > 0:
            raise UsageError(f"a channel's weight must be positive, got {self.weight}")


class Space:
    """Product of named channels.

    >>> crystal = Space({"coord": Channel((3,), FlatTorus(), "uniform"), "lattice": Channel((6,))})
    >>> sorted(crystal.channels)
    ['coord', 'lattice']
    """

    def __init__(self, channels: Mapping[str, Channel]) -> None:
        if not channels:
            raise UsageError("a space needs at least one channel")
        self.channels = dict(channels)
        self.present: dict[str, Tensor] = {}  # the mask of used rows by channel, once the condition is known

    def given(self, cond: Mapping[str, Any]) -> Space:
        """The space for given conditions, which hold the number of rows of each sample."""
        ragged = {name: c for name, c in self.channels.items() if c.rows}
        if not ragged:
            return self
        space = Space(self.channels)
        for name, channel in ragged.items():
            if channel.rows not in cond:
                give = f"give cond={{'{channel.rows}': ...}}"
                raise UsageError(f"channel '{name}' takes its number of rows from '{channel.rows}'; {give}")
            counts = torch.as_tensor(cond[channel.rows])
            present = torch.arange(channel.shape[0], device=counts.device) < counts[:, None]
            space.present[name] = present[(..., *[None] * (len(channel.shape) - 1))]
        return space

    def check_rows(self, cond: Mapping[str, Any], count: int) -> None:
        """Raise if a condition with numbers of rows is not one integer per sample within the channel's shape.

        This reads values from the device, so it is called once before sampling or training.
        """
        for name in {c.rows for c in self.channels.values() if c.rows}:
            if name not in cond:
                raise UsageError(f"samples take their number of rows from '{name}'; give cond={{'{name}': ...}}")
            value = torch.as_tensor(cond[name])
            if value.is_floating_point() or tuple(value.shape) != (count,):
                raise ShapeError(
                    f"{name} must be one integer for each of the {count} samples, got {value.dtype} of shape "
                    f"{tuple(value.shape)}"
                )
            most = min(c.shape[0] for c in self.channels.values() if c.rows == name)
            if count and not 1 <= int(value.min()) <= int(value.max()) <= most:
                raise UsageError(f"{name} must lie between 1 and {most}, got {int(value.min())} to {int(value.max())}")

    def tangent(self, x: Any, v: Any) -> Any:
        """The projection of v onto the velocities at x: tangent, zero in unused rows, without drift if centred."""

        def project(name: str, x: Tensor, v: Tensor) -> Tensor:
            channel, present = self.channels[name], self.present.get(name)
            v = channel.manifold.proju(x, v)
            if present is not None:
                v = v * present
            if channel.centred:
                count = v.shape[1] if present is None else present.sum(1, keepdim=True).clamp_min(1)
                v = v - v.sum(1, keepdim=True) / count
            return v if present is None or not channel.centred else v * present

        return self._lift(project, x, v)

    @property
    def single(self) -> bool:
        """Whether states are plain tensors."""
        return list(self.channels) == [SINGLE]

    def check(self, x: State, whose: str = "") -> None:
        """Raise if a state (or a velocity) has other channels or shapes than the space."""
        require_state(x, f"{whose or 'the state: '}this")
        if isinstance(x, dict) == self.single:
            given = "a dict of channels" if isinstance(x, dict) else "a tensor"
            raise ShapeError(f"states of this space are channels {list(self.channels)}, got {given}")
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
            name: NOISES[c.noise](c, randomness, torch.empty(count, *c.shape, device=device))
            for name, c in self.channels.items()
        }
        drawn = {name: self.channels[name].manifold.projx(value) for name, value in drawn.items()}
        drawn = {name: value * self.present[name] if name in self.present else value for name, value in drawn.items()}
        return drawn[SINGLE] if self.single else drawn

    def advance(self, x: Any, v: Any, dt: Tensor) -> Any:  # dt: (B,)
        """The state after following v for dt: exp_x(dt · proj v), projected onto the manifold."""

        def move(name: str, x: Tensor, v: Tensor) -> Tensor:
            manifold, present = self.channels[name].manifold, self.present.get(name)
            moved = manifold.projx(manifold.expmap(x, v * _against(dt, v)))
            return moved if present is None else moved * present

        return self._lift(move, x, self.tangent(x, v))

    def path(self, x0: Any, x1: Any, t: Tensor) -> tuple[Any, Any]:  # t: (B,)
        """The geodesic from x0 to x1: its point and velocity at t. On flat manifolds it is linear.

        In a centred channel it ends at x1 up to a common shift.
        """

        def start(name: str, x0: Tensor, x1: Tensor) -> Tensor:
            return self.channels[name].manifold.logmap(x0, x1)

        def here(name: str, x0: Tensor, x1: Tensor, x_t: Tensor, u: Tensor) -> Tensor:
            manifold = self.channels[name].manifold
            if getattr(manifold, "flat", False):
                return u
            # On curved manifolds the velocity turns; the logarithm to the farther end avoids a division by zero.
            time = _against(t, x_t)
            ahead, behind = manifold.logmap(x_t, x1) / (1 - time), -manifold.logmap(x_t, x0) / time
            return torch.where(time < 0.5, ahead, behind)

        u = self.tangent(x0, self._lift(start, x0, x1))
        x_t = self.advance(x0, u, t)
        return x_t, self.tangent(x_t, self._lift(here, x0, x1, x_t, u))

    def squared_error(self, v: Any, u: Any) -> Tensor:
        """(v − u)²: the mean over the used entries of each channel, and the weighted mean over channels."""
        got, wanted = ({n: tuple(c.shape) for n, c in channels(s).items()} for s in (v, u))
        if got != wanted:
            raise ShapeError(f"the network's velocity has shape {got}, but the data requires {wanted}")

        def error(name: str, v: Tensor, u: Tensor) -> Tensor:
            square, present = (v - u).square(), self.present.get(name)
            if present is None:
                return square.mean()
            return (square * present).sum() / (present.sum() * (square[0].numel() // present[0].numel()))

        found = channels(self._lift(error, v, u))
        weights = {name: self.channels[name].weight for name in found}
        return torch.stack([found[n] * (w / sum(weights.values())) for n, w in weights.items()]).sum()

    def _lift(self, f: Any, *states: Any) -> Any:
        if self.single:
            return f(SINGLE, *states)
        return {name: f(name, *(s[name] for s in states)) for name in self.channels}

    def describe(self) -> dict[str, Any]:
        """The description in a checkpoint, for spaces of this library's manifolds."""
        return {name: _described(c) for name, c in self.channels.items()}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Space:
        known = {m.__name__: m for m in (Euclidean, FlatTorus, Lattice)}

        def channel(about: dict[str, Any]) -> Channel:
            options = {k: tuple(v) if isinstance(v, list) else v for k, v in about.get("options", {}).items()}
            manifold = pick(known, about["manifold"], "manifold")(**options)
            rest = {k: v for k, v in about.items() if k not in ("shape", "manifold", "options")}
            return Channel(tuple(about["shape"]), manifold, **rest)

        return cls({name: channel(about) for name, about in description.items()})


def _described(channel: Channel) -> dict[str, Any]:
    manifold: Any = channel.manifold
    options = {"options": asdict(manifold)} if is_dataclass(manifold) else {}  # type: ignore[arg-type]
    defaults = {f.name: f.default for f in fields(Channel)}
    changed = {k: v for k in ("rows", "centred", "weight", "anneal") if (v := getattr(channel, k)) != defaults[k]}
    return {
        "shape": list(channel.shape),
        "manifold": type(manifold).__name__,
        "noise": channel.noise,
        **options,
        **changed,
    }


def euclidean(shape: Sequence[int]) -> Space:
    """Flat space of one channel with standard normal noise, whose states are plain tensors."""
    return Space({SINGLE: Channel(tuple(int(n) for n in shape))})


def as_space(space: Space | Sequence[int] | int) -> Space:
    """A space unchanged, or flat space by the shape of a sample.

    >>> as_space(2).channels["x"].shape, as_space([1, 28, 28]).channels["x"].shape
    ((2,), (1, 28, 28))
    """
    if isinstance(space, Space):
        return space
    try:
        shape = tuple(operator.index(n) for n in (space if isinstance(space, Sequence) else [space]))
    except TypeError:
        shape = (-1,)
    if isinstance(space, bool) or any(n < 1 for n in shape):
        raise UsageError(f"space is a Space, or the shape of one sample such as (2,) or (1, 28, 28), got {space!r:.80}")
    return euclidean(shape)


def _against(dt: Tensor, value: Tensor) -> Tensor:  # (B,) -> (B, 1, …)
    return dt.to(value.dtype)[(slice(None), *[None] * (value.ndim - 1))]


def path_of(network: Any, space: Space) -> Path:
    """The path between noise and data that a network was trained on: its method `path` if it has one, else the space's.

    Arguments:
        network: A network or a field. A method `path(x0, x1, t) -> (x_t, u_t)` defines a path other than the geodesic
            (as the adapter of a variance-preserving denoiser does).
        space: The space of the states, given the conditions (:meth:`Space.given`).
    """
    for module in (network, getattr(network, "network", None)):
        own: Path | None = getattr(module, "path", None)
        if callable(own) and not isinstance(own, nn.Module):  # a layer may have this name
            return own
    return space.path
