"""Flow matching: manifolds, spaces of named channels, paths between noise and data, and training losses."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError, nearest, pick
from fmwc.randomness import Randomness, Share, as_randomness
from fmwc.state import SINGLE, State, batch_size, channels, first_channel, require_state, tree_map, unsqueeze_like

__all__ = [
    "COUPLINGS",
    "CellVectors",
    "Channel",
    "Euclidean",
    "FlatTorus",
    "Lattice",
    "Manifold",
    "Pairs",
    "Path",
    "PathSample",
    "Space",
    "as_space",
    "couple",
    "couples_samples",
    "elbo_loss",
    "euclidean",
    "flow_matching_loss",
    "optimal_transport",
    "path_of",
    "path_sample",
    "restriction_of",
    "rows_of",
    "speeds_of",
]

# ---- manifolds -------------------------------------------------------------------------------------------------------


@runtime_checkable
class Manifold(Protocol):
    """Interface of manifolds; batches of points are tensors."""

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the point reached from x in unit time along the geodesic with initial velocity u."""

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the velocity at x whose geodesic reaches y in unit time."""

    def projx(self, x: Tensor) -> Tensor:
        """Return the nearest point on the manifold."""

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the part of u that is tangent at x."""


class Euclidean:
    """Flat space: exp is x + u, log is y − x."""

    flat = True  # the velocity of a geodesic is constant

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def projx(self, x: Tensor) -> Tensor:
        return x

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u


class FlatTorus:
    """Flat torus [0, 1)ⁿ: exp is x + u mod 1, log is the shortest displacement."""

    flat = True

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(x + u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        angle = 2 * math.pi * (y - x)
        return torch.atan2(angle.sin(), angle.cos()) / (2 * math.pi)

    def projx(self, x: Tensor) -> Tensor:
        return torch.remainder(torch.remainder(x, 1.0), 1.0)  # a single remainder rounds −1e−9 to 1

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u


@dataclass(frozen=True)
class Lattice(Euclidean):
    """Manifold of unit cells: three lengths in ångström, and the logits of three angles scaled to (0, 1).

    The manifold is flat, with a lower bound on the lengths. Noise has log-normal lengths and uniform angles.

    Arguments:
        mean, std: The mean and standard deviation of the logarithm of the lengths at t = 0.
        shortest: The lower bound of the lengths.
    """

    mean: Sequence[float] = (1.5754, 1.7017, 1.9782)
    std: Sequence[float] = (0.2444, 0.2653, 0.3536)
    shortest: float = 0.5

    def projx(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :3].clamp_min(self.shortest), x[..., 3:]], -1)

    def noise(self, randomness: Any, like: Tensor) -> Tensor:  # (B, 6)
        normal = randomness.normal(like)
        # Scalars, because a captured graph cannot copy a tensor to the device.
        drawn = torch.stack(
            [normal[..., i] * s + m for i, (s, m) in enumerate(zip(self.std, self.mean, strict=True))], -1
        )
        # 0 and 1 have no logit, and float32 draws in [0, 1) include 0.
        angles = randomness.uniform(like)[..., 3:].clamp(1e-4, 1 - 1e-4).logit()
        return torch.cat([drawn.exp(), angles], -1)


@dataclass(frozen=True)
class CellVectors(Euclidean):
    """Manifold of unit cells as three vectors in ångström, the rows of a matrix.

    Noise has log-normal lengths and uniform angles, with a along x and b in the plane of x and y.

    Arguments:
        mean, std: The mean and standard deviation of the logarithm of the lengths at t = 0.
        angles: The range of the angles in degrees.
    """

    mean: Sequence[float] = Lattice.mean
    std: Sequence[float] = Lattice.std
    angles: Sequence[float] = (60.0, 120.0)

    def noise(self, randomness: Any, like: Tensor) -> Tensor:  # (B, 3, 3)
        normal, low, high = randomness.normal(like)[:, 0], *self.angles
        lengths = torch.stack([(normal[:, i] * self.std[i] + self.mean[i]).exp() for i in range(3)], -1)
        alpha, beta, gamma = torch.deg2rad(low + (high - low) * randomness.uniform(like)[:, 0]).unbind(-1)
        zero, one = torch.zeros_like(alpha), torch.ones_like(alpha)
        y = (alpha.cos() - beta.cos() * gamma.cos()) / gamma.sin()
        z = (1 - beta.cos().square() - y.square()).clamp_min(0).sqrt()
        rows = [one, zero, zero, gamma.cos(), gamma.sin(), zero, beta.cos(), y, z]
        return lengths[..., None] * torch.stack(rows, -1).unflatten(-1, (3, 3))


# ---- spaces ----------------------------------------------------------------------------------------------------------

Path = Callable[[Any, Any, Tensor], tuple[Any, Any]]  # (x0, x1, t) -> (x_t, its velocity u_t)
Restriction = Callable[[Any, Tensor], Any]  # (predicted x1, t) -> the x1 that is allowed

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
        noise: The distribution at t = 0: `normal`, `uniform`, or `own` for the manifold's method `noise(randomness,
            like)`.
        rows: The condition with the number of rows of each sample (`atoms`), if samples differ in it. `shape` then has
            the largest number of rows, and unused rows stay zero.
        centred: Whether the mean over the rows is subtracted from velocities, so that samples do not drift.
        weight: The weight of the channel in the training loss.
        anneal: Anti-annealing s: the channel's velocity is multiplied by 1 + s·t when sampling.
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
            raise UsageError("manifold must have the methods expmap, logmap, projx and proju")
        if self.noise == "own" and not hasattr(self.manifold, "noise"):
            raise UsageError("the manifold has no method noise; use noise='normal' or 'uniform'")
        if (self.rows or self.centred) and not self.shape:
            raise UsageError("a channel with rows must have a shape with at least one dimension")
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
        self.present: dict[str, Tensor] = {}  # mask of used rows by channel, known once the condition is given
        self.used: dict[str, Tensor] = {}  # their number; in training on a share of a batch, as in the whole batch

    @property
    def single(self) -> bool:
        """Whether states are plain tensors."""
        return list(self.channels) == [SINGLE]

    def given(self, cond: Mapping[str, Any], randomness: Any = None) -> Space:
        """Return the space for samples with these conditions, which set the number of rows of each sample.

        Arguments:
            cond: The conditions.
            randomness: If it is the :class:`fmwc.randomness.Share` of a batch, losses are divided by the number of rows
                in the whole batch, so that the mean over shares is the loss of the batch.
        """
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
        if isinstance(randomness, Share):
            whole = self.given(randomness.batch()[1]).present
            space.used = {name: present.sum() * randomness.part for name, present in whole.items()}
        return space

    def check_rows(self, cond: Mapping[str, Any], count: int) -> None:
        """Raise unless the conditions that count rows hold one integer per sample, within the channel's shape.

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
        """Project v onto the velocities at x: tangent, zero in unused rows, without drift if centred."""

        def project(name: str, x: Tensor, v: Tensor) -> Tensor:
            channel, present = self.channels[name], self.present.get(name)
            v = channel.manifold.proju(x, v)
            if present is not None:
                v = v * present
            if channel.centred:
                count = v.shape[1] if present is None else present.sum(1, keepdim=True).clamp_min(1)
                v = v - v.sum(1, keepdim=True) / count
            return v if present is None or not channel.centred else v * present

        return self._map(project, x, v)

    def check(self, x: State, whose: str = "") -> None:
        """Raise if a state or velocity does not have the channels and shapes of the space."""
        require_state(x, f"{whose or 'the state: '}this")
        if isinstance(x, dict) == self.single:
            if self.single:
                raise ShapeError(
                    f"a space whose only channel is named '{SINGLE}' has plain tensors as states, got a dict; give the "
                    "tensor, or give the channel another name"
                )
            raise ShapeError(f"a state of this space must be a dict of {list(self.channels)}, got a tensor")
        if missing := self.channels.keys() - channels(x).keys():
            raise ShapeError(f"the state lacks {', '.join(sorted(missing))} of the channels {list(self.channels)}")
        for name, value in channels(x).items():
            if name not in self.channels:
                raise ShapeError(nearest(name, self.channels, "channel"))
            shape = self.channels[name].shape
            if tuple(value.shape[1:]) != shape:
                expected = ", ".join(["B", *map(str, shape)])
                raise ShapeError(f"{whose}channel '{name}' must have shape ({expected}), got {tuple(value.shape)}")

    def noise(self, count: int, randomness: Randomness, device: torch.device | str = "cpu") -> Any:
        """Draw x0: `count` states at t = 0."""

        def draw(name: str) -> Tensor:
            channel = self.channels[name]
            like = torch.empty(count, *channel.shape, dtype=torch.float32, device=device)  # whatever the default is
            x0 = channel.manifold.projx(NOISES[channel.noise](channel, randomness, like))
            return x0 * self.present[name] if name in self.present else x0

        return self._map(draw)

    def advance(self, x: Any, v: Any, dt: Tensor) -> Any:  # dt: (B,)
        """Return the state after following v for dt: exp_x(dt · proj v), projected onto the manifold."""

        def move(name: str, x: Tensor, v: Tensor) -> Tensor:
            manifold, present = self.channels[name].manifold, self.present.get(name)
            moved = manifold.projx(manifold.expmap(x, v * unsqueeze_like(dt.to(v.dtype), v)))
            return moved if present is None else moved * present

        return self._map(move, x, self.tangent(x, v))

    def steered(self, x: Any, v: Any, t: Tensor, restrict: Restriction) -> Any:  # t: (B,)
        """Return the velocity towards the restricted end, instead of the end that v predicts (:func:`restriction_of`).

        Entries that the restriction returns unchanged keep their velocity.
        """
        end = self.advance(x, v, 1 - t)
        allowed = restrict(end, t)

        def turn(name: str, x: Tensor, v: Tensor, end: Tensor, allowed: Tensor) -> Tensor:
            rest = unsqueeze_like((1 - t).to(v.dtype), v)
            ahead = self.channels[name].manifold.logmap(x, allowed) / rest.clamp_min(torch.finfo(v.dtype).tiny)
            return torch.where((allowed == end) | (rest <= 0), v, ahead)

        return self._map(turn, x, v, end, allowed)

    def path(self, x0: Any, x1: Any, t: Tensor) -> tuple[Any, Any]:  # t: (B,)
        """Return the point and the velocity at time t on the geodesic from x0 to x1 (a straight line if flat).

        In a centred channel, the geodesic ends at x1 up to a common shift.
        """

        def initial(name: str, x0: Tensor, x1: Tensor) -> Tensor:
            return self.channels[name].manifold.logmap(x0, x1)

        def current(name: str, x0: Tensor, x1: Tensor, x_t: Tensor, u: Tensor) -> Tensor:
            manifold = self.channels[name].manifold
            if getattr(manifold, "flat", False):
                return u
            # On curved manifolds the velocity changes along the path; using the farther end avoids a division by zero.
            time = unsqueeze_like(t.to(x_t.dtype), x_t)
            ahead, behind = manifold.logmap(x_t, x1) / (1 - time), -manifold.logmap(x_t, x0) / time
            return torch.where(time < 0.5, ahead, behind)

        u = self.tangent(x0, self._map(initial, x0, x1))
        x_t = self.advance(x0, u, t)
        return x_t, self.tangent(x_t, self._map(current, x0, x1, x_t, u))

    def squared_error(self, v: Any, u: Any) -> Tensor:
        """Return (v − u)²: the mean over the used entries of each channel, and the weighted mean over channels."""
        shape, expected = ({n: tuple(c.shape) for n, c in channels(s).items()} for s in (v, u))
        if shape != expected:
            raise ShapeError(f"the network's velocity has shape {shape}, but the data requires {expected}")

        def error(name: str, v: Tensor, u: Tensor) -> Tensor:
            square, present = (v - u).square(), self.present.get(name)
            if present is None:
                return square.mean()
            used = self.used.get(name, present.sum())
            return (square * present).sum() / (used * (square[0].numel() // present[0].numel()))

        errors = channels(self._map(error, v, u))
        total = sum(self.channels[name].weight for name in errors)
        return torch.stack([value * (self.channels[name].weight / total) for name, value in errors.items()]).sum()

    def _map(self, f: Callable[..., Tensor], *states: Any) -> Any:
        """Apply `f(name, *values)` to each channel."""
        if self.single:
            return f(SINGLE, *states)
        return {name: f(name, *(s[name] for s in states)) for name in self.channels}

    def describe(self) -> dict[str, Any]:
        """Return the description that a checkpoint stores, for spaces with manifolds of this library."""
        defaults = {f.name: f.default for f in fields(Channel)}

        def describe(channel: Channel) -> dict[str, Any]:
            manifold: Any = channel.manifold
            about: dict[str, Any] = {
                "shape": list(channel.shape),
                "manifold": type(manifold).__name__,
                "noise": channel.noise,
            }
            if is_dataclass(manifold):
                about["options"] = asdict(manifold)  # type: ignore[arg-type]
            options = ((name, getattr(channel, name)) for name in ("rows", "centred", "weight", "anneal"))
            return about | {name: value for name, value in options if value != defaults[name]}

        return {name: describe(channel) for name, channel in self.channels.items()}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Space:
        """Return the space for a description by :meth:`describe`."""
        known = {m.__name__: m for m in (Euclidean, FlatTorus, Lattice, CellVectors)}

        def channel(about: dict[str, Any]) -> Channel:
            options = {k: tuple(v) if isinstance(v, list) else v for k, v in about.get("options", {}).items()}
            manifold = pick(known, about["manifold"], "manifold")(**options)
            rest = {k: v for k, v in about.items() if k not in ("shape", "manifold", "options")}
            return Channel(tuple(about["shape"]), manifold, **rest)

        return cls({name: channel(about) for name, about in description.items()})


def euclidean(shape: Sequence[int]) -> Space:
    """Return the flat space of plain tensors with standard normal noise."""
    return Space({SINGLE: Channel(tuple(int(n) for n in shape))})


def as_space(space: Space | Sequence[int] | int) -> Space:
    """Return a space unchanged; return the flat space for the shape of one sample.

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
        raise UsageError(
            f"space must be a Space, or the shape of one sample such as (2,) or (1, 28, 28); got {space!r:.80}"
        )
    return euclidean(shape)


DECLARED = ("doubled", "path", "restriction", "rows", "speeds")  # what a network may declare besides its velocity


def declared(network: Any, name: str) -> Any:
    """Return what a network, or the network of a field, declares by a method or flag; `None` if it declares nothing.

    Adapters pass on what their network declares (a method `passed_on`). Raise if another module hides what its part
    declares.
    """
    network = getattr(network, "network", network) if hasattr(network, "run") else network
    if hasattr(network, name):
        return _declaration(network, name)
    if (passed_on := getattr(network, "passed_on", None)) is not None:
        return passed_on(name)
    if isinstance(network, nn.Module) and not torch.compiler.is_dynamo_compiling():  # attach has searched the parts
        for part, module in network.named_modules():
            if module is not network and _declaration(module, name) is not None:
                raise UsageError(
                    f"the network's part '{part}' ({type(module).__name__}) declares '{name}', but the module around "
                    f"it ({type(network).__name__}) does not, so it would be ignored; define '{name}' there as well "
                    f"(`{name} = None` if it does not apply), or use an adapter of fmwc.adapters, which passes it on"
                )
    return None


def _declaration(module: Any, name: str) -> Any:
    found = getattr(module, name, None)
    if found is True or (callable(found) and not isinstance(found, nn.Module)):  # a submodule may have this name
        return found
    return None


def rows_of(network: Any, x: Any, t: Any, cond: Mapping[str, Any]) -> dict[str, Tensor | int] | None:
    """Return whose rows the layers of a network see, by pattern of layer names; `None` if it does not declare them.

    Arguments:
        network: A network or a field. Its method `rows(x, t, **cond)`, if any, returns for each pattern the sample of
            each row (the number of samples for unused rows), or the number of rows of every sample. The first pattern
            that matches a layer's name counts.
    """
    method = declared(network, "rows")
    if method is None:
        return None
    found = method(x, t, **cond)
    if isinstance(found, Mapping) and all(isinstance(owner, (int, Tensor)) for owner in found.values()):
        return dict(found)
    raise UsageError(
        "the network's method rows must return the rows of its layers by name, {'edges.*': the sample of each row, "
        f"'time': 1, '*': …}}, where a number is that of the rows of every sample; got {type(found).__name__}"
    )


def path_of(network: Any, space: Space) -> Path:
    """Return the path that a network was trained on: its method `path`, or the geodesics of the space by default.

    Arguments:
        network: A network or a field. Its method `path(x0, x1, t) -> (x_t, u_t)`, if any, defines a path other than the
            geodesic (as for a variance-preserving denoiser).
        space: The space of the states, given the conditions (:meth:`Space.given`).
    """
    return declared(network, "path") or space.path


def restriction_of(network: Any, cond: Mapping[str, Any]) -> Restriction | None:
    """Return how conditions restrict the ends of samples, or `None` if they do not.

    Arguments:
        network: A network or a field. Its method `restriction(**cond)`, if any, returns `None` or a function
            `(x1, t) -> x1`. For t < 1 it returns the expected end among the allowed ones, given the predicted end x1;
            for t = 1, the nearest allowed end.
        cond: The conditions, by name.
    """
    method = declared(network, "restriction")
    return None if method is None else method(**cond)


def speeds_of(network: Any, t: Tensor) -> dict[str, Tensor] | None:  # (B,) -> (B,) per channel
    """Return the factors by which a network's own sampler multiplies the velocity of each channel, or `None`.

    Arguments:
        network: A network or a field. Its method `speeds(t)`, if any, replaces the anti-annealing of the space.
        t: The time of each sample.
    """
    method = declared(network, "speeds")
    return None if method is None else method(t)


# ---- couplings of noise and data -------------------------------------------------------------------------------------

Seed: TypeAlias = Randomness | torch.Generator | int | None
Pairs: TypeAlias = str | State | Callable[[State, Randomness], State] | None


def optimal_transport(space: Space, x1: Any, randomness: Randomness) -> Any:
    """Draw noise for a batch of data, paired with minimal total squared distance. Exact; needs scipy.

    Distances are geodesic, with each channel multiplied by its weight.

    Arguments:
        space: The space of the states.
        x1: A batch of data.
        randomness: The source of the noise.
    """
    if space.present:
        raise UsageError("pairs='ot' does not support samples with different numbers of rows; give a function as pairs")
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise UsageError("pairs='ot' needs scipy; pip install 'fmwc[learn]'") from error
    device = first_channel(x1).device
    x0 = space.noise(batch_size(x1), randomness, device)
    cost = sum(c.weight * _squared(c.manifold, channels(x0)[n], channels(x1)[n]) for n, c in space.channels.items())
    data = linear_sum_assignment(torch.as_tensor(cost).cpu().numpy())[1]  # for each row of noise
    order = torch.as_tensor(data, device=device).argsort()
    return tree_map(lambda c: c[order], x0)


def _squared(manifold: Manifold, x0: Tensor, x1: Tensor) -> Tensor:  # -> (B, B)
    """Return the squared distance of every noise point from every data point."""
    if isinstance(manifold, Euclidean):
        return torch.cdist(x0.flatten(1).double(), x1.flatten(1).double()).square()
    logarithms = (manifold.logmap(row.to(x1.dtype).expand_as(x1), x1) for row in x0)  # one at a time, to save memory
    return torch.stack([log.flatten(1).double().square().sum(1) for log in logarithms])


COUPLINGS: dict[str, Callable[[Space, Any, Randomness], Any]] = {
    "independent": lambda space, x1, r: space.noise(batch_size(x1), r, first_channel(x1).device),
    "ot": optimal_transport,
}


def couples_samples(pairs: Any) -> bool:
    """Return whether the noise of a sample depends on the other samples of its batch."""
    return callable(pairs) or (isinstance(pairs, str) and pairs != "independent")


def couple(pairs: Pairs, space: Space, x1: Any, randomness: Randomness) -> Any:
    """Return the noise x0 that is paired with a batch of data.

    Arguments:
        pairs: `None` or `"independent"`, `"ot"` (:func:`optimal_transport` within the batch), a function
            `(x1, randomness) -> x0`, or the noise itself with one row per sample.
        space: The space of the states, given the conditions.
        x1: A batch of data.
        randomness: The source of the noise.
    """
    if isinstance(randomness, Share) and couples_samples(pairs):
        whole = couple(pairs, space, randomness.batch()[0], randomness.stream)
        return tree_map(lambda c: c[randomness.samples], whole)
    if pairs is None or isinstance(pairs, str):
        return pick(COUPLINGS, pairs or "independent", "coupling")(space, x1, randomness)
    x0 = pairs(x1, randomness) if callable(pairs) else pairs
    if not isinstance(x0, (Tensor, dict)):
        raise UsageError(
            f"pairs must be 'ot', a function (x1, randomness) -> x0, or a tensor x0 with one row per sample, got "
            f"{type(x0).__name__}"
        )
    space.check(x0, "pairs: ")
    if batch_size(x0) != batch_size(x1):
        raise ShapeError(
            f"pairs must have one row of noise per sample, got {batch_size(x0)} for {batch_size(x1)} samples"
        )
    return x0


# ---- losses ----------------------------------------------------------------------------------------------------------


class PathSample(NamedTuple):
    """Points on the paths between noise and data: the states x_t at times t, and the target velocities u_t."""

    t: Tensor
    x_t: Any
    u_t: Any


class Trainable(Protocol):
    """Interface of a field that :func:`elbo_loss` can train."""

    @property
    def device(self) -> torch.device: ...
    def learn_space(self, x1: State) -> Space: ...
    def draw_with_kl(
        self,
        x: Any,
        t: Any,
        *,
        seed: Seed = None,
        cond: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Tensor]: ...


def path_sample(
    space: Space | Sequence[int] | int,
    x1: State,
    randomness: Randomness,
    network: Any = None,
    pairs: Pairs = None,
) -> PathSample:
    """Draw t ~ U(0, 1) and noise x0, and return points on the paths from x0 to x1 (straight in flat space).

    Arguments:
        network: A network that may define its own path (:func:`path_of`).
        pairs: The coupling of noise and data (:func:`couple`); independent if `None`.
    """
    space, first = as_space(space), first_channel(x1)
    t = randomness.uniform(torch.empty(batch_size(x1), device=first.device, dtype=first.dtype))
    x_t, u_t = path_of(network, space)(couple(pairs, space, x1, randomness), x1, t)
    return PathSample(t, x_t, u_t)


def flow_matching_loss(
    velocity: Callable[..., Any],
    space: Space | Sequence[int] | int,
    x1: State,
    *,
    seed: Seed = None,
    pairs: Pairs = None,
    cond: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the conditional flow-matching loss E‖v(x_t, t) − u_t‖² (eqn:fm_obj), per coordinate.

    Arguments:
        velocity: A network, called as `v(x, t, **cond)`; it may define its own path (:func:`path_of`).
        space: The space of the states, or the shape of one sample.
        x1: Data, `(B, *)`.
        seed: The source of t and x0.
        pairs: The coupling of noise and data (:func:`couple`).
        cond: Conditions by name, one row per sample, passed to the network.
    """
    cond = cond or {}
    randomness = as_randomness(seed, first_channel(x1).device)
    space = as_space(space).given(cond, randomness)
    t, x_t, u_t = path_sample(space, x1, randomness, velocity, pairs)
    v = velocity(x_t, t, **cond)
    require_state(v, "the network's velocity")
    return space.squared_error(v, u_t)


def elbo_loss(
    field: Trainable,
    x1: State,
    beta: float | Tensor = 1e-3,
    *,
    seed: Seed = None,
    pairs: PathSample | Pairs = None,
    cond: Mapping[str, Any] | None = None,
) -> Tensor:
    r"""Return the loss of joint training: flow matching under one posterior draw, plus the KL (eqn:vad_flow_matching).

    .. math:: E \| v_ω(x_t, t) - u_t \|^2 + β\, KL[q(ω|x,t) \| π(ω)], \quad ω ∼ q

    Arguments:
        field: A field. Gradients reach all parameters that require them.
        x1: Data, `(B, *)`.
        beta: The weight of the KL.
        seed: The source of t, x0 and ε.
        pairs: The coupling of noise and data (:func:`couple`), or a `PathSample(t, x_t, u_t)`.
        cond: Conditions by name, one row per sample, passed to the network.
    """
    cond = cond or {}
    randomness = as_randomness(seed, field.device)
    space = field.learn_space(x1).given(cond, randomness)
    t, x_t, u_t = pairs if isinstance(pairs, tuple) else path_sample(space, x1, randomness, field, pairs)
    v, divergence = field.draw_with_kl(x_t, t, seed=randomness, cond=cond)
    return space.squared_error(v, u_t) + beta * divergence
