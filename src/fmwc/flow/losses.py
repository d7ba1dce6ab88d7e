"""Training objectives (flow matching and eq:elbo-param), and the couplings of noise and data that they train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError, pick
from fmwc.flow.manifolds import Euclidean, Manifold
from fmwc.flow.space import Space, as_space, path_of
from fmwc.randomness import Randomness, as_randomness
from fmwc.state import State, batch_size, channels, require_state, tree_map

__all__ = [
    "COUPLINGS",
    "Pairs",
    "PathSample",
    "couple",
    "elbo_loss",
    "flow_matching_loss",
    "optimal_transport",
    "path_sample",
]

Seed: TypeAlias = Randomness | torch.Generator | int | None
Pairs: TypeAlias = str | State | Callable[[State, Randomness], State] | None


def optimal_transport(space: Space, x1: Any, randomness: Randomness) -> Any:
    """Noise for a batch of data, assigned so that the sum of squared distances is minimal. Exact; needs scipy.

    Distances are geodesic, and each channel is multiplied by its weight.

    Arguments:
        space: The space of the states.
        x1: A batch of data.
        randomness: The source of the noise.
    """
    if space.present:
        raise UsageError("optimal transport is not defined for samples with different numbers of rows; give a function")
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise UsageError("pairs='ot' needs scipy; pip install 'fmwc[learn]'") from error
    count, device = batch_size(x1), next(iter(channels(x1).values())).device
    x0 = space.noise(count, randomness, device)
    cost = sum(c.weight * _squared(c.manifold, channels(x0)[n], channels(x1)[n]) for n, c in space.channels.items())
    solved = linear_sum_assignment(torch.as_tensor(cost).cpu().numpy())[1]  # for each noise, its data
    chosen = torch.as_tensor(solved, device=device).argsort()
    return tree_map(lambda c: c[chosen], x0)


def _squared(manifold: Manifold, x0: Tensor, x1: Tensor) -> Tensor:  # -> (B, B)
    """The squared distance of every noise point from every data point."""
    if isinstance(manifold, Euclidean):
        return torch.cdist(x0.flatten(1).double(), x1.flatten(1).double()).square()
    away = (manifold.logmap(row.to(x1.dtype).expand_as(x1), x1) for row in x0)  # one at a time, to save memory
    return torch.stack([log.flatten(1).double().square().sum(1) for log in away])


COUPLINGS: dict[str, Callable[[Space, Any, Randomness], Any]] = {
    "independent": lambda space, x1, r: space.noise(batch_size(x1), r, next(iter(channels(x1).values())).device),
    "ot": optimal_transport,
}


def couple(pairs: Pairs, space: Space, x1: Any, randomness: Randomness) -> Any:
    """The noise x0 that is paired with a batch of data.

    Arguments:
        pairs: `None` or `"independent"`, `"ot"` (:func:`optimal_transport` within the batch), a function
            `(x1, randomness) -> x0`, or the noise itself with one row per sample.
        space: The space of the states, given the conditions.
        x1: A batch of data.
        randomness: The source of the noise.
    """
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
    """Points of the paths between noise and data: the states x_t at times t, and the target velocities u_t."""

    t: Tensor
    x_t: Any
    u_t: Any


class Trainable(Protocol):
    """A field as the evidence lower bound uses it."""

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
    """Draw t ~ U(0, 1) and x0 ~ noise, and return the points of the paths between x0 and x1 (linear in flat space).

    Arguments:
        network: A network that may define its own path (:func:`path_of`).
        pairs: The coupling of noise and data (:func:`couple`); independent if `None`.
    """
    space, first = as_space(space), next(iter(channels(x1).values()))
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
    """The conditional flow-matching loss E‖v(x_t, t) − u_t‖² (eqn:fm_obj), per coordinate.

    Arguments:
        velocity: A network, called as `v(x, t, **cond)`; it may define its own path (:func:`path_of`).
        space: The space of the states, or the shape of one sample.
        x1: Data, `(B, *)`.
        seed: The source of t and x0.
        pairs: The coupling of noise and data (:func:`couple`).
        cond: Conditions by name, one row per sample, passed to the network.
    """
    cond = cond or {}
    randomness = as_randomness(seed, next(iter(channels(x1).values())).device)
    space = as_space(space).given(cond)
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
    r"""The loss of joint training: flow matching under one draw, plus the closed-form KL (eqn:vad_flow_matching).

    .. math:: E \| v_ω(x_t, t) - u_t \|^2 + β\, KL[q(ω|x,t) \| π(ω)], \quad ω ∼ q

    Arguments:
        field: A field; all its parameters that require a gradient get one.
        x1: Data, `(B, *)`.
        beta: The weight of the KL.
        seed: The source of t, x0 and ε.
        pairs: The coupling of noise and data (:func:`couple`), or a `PathSample(t, x_t, u_t)`.
        cond: Conditions by name, one row per sample, passed to the network.
    """
    cond = cond or {}
    randomness = as_randomness(seed, field.device)
    space = field.learn_space(x1).given(cond)
    t, x_t, u_t = pairs if isinstance(pairs, tuple) else path_sample(space, x1, randomness, field, pairs)
    v, divergence = field.draw_with_kl(x_t, t, seed=randomness, cond=cond)
    return space.squared_error(v, u_t) + beta * divergence
