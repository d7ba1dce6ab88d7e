"""Training objectives: flow matching, and its evidence lower bound (eq:elbo-param)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fmwc.flow.couplings import Pairs, couple
from fmwc.flow.space import Space, as_space, path_of
from fmwc.randomness import Randomness, as_randomness
from fmwc.state import State, batch_size, channels, require_state

__all__ = ["PathSample", "elbo", "flow_matching", "path_sample"]


class PathSample(NamedTuple):
    """A point of the path between noise and data: the state x_t at t, and the velocity u_t the network should have."""

    t: Tensor
    x_t: Any
    u_t: Any


class Trainable(Protocol):
    """What the evidence lower bound asks of a field."""

    @property
    def device(self) -> torch.device: ...
    def learn_space(self, x1: State) -> Space: ...
    def draw_with_kl(self, x: Any, t: Any, *, seed: Any = None, **cond: Any) -> tuple[Any, Tensor]: ...


def path_sample(
    space: Space | Sequence[int] | int,
    x1: State,
    randomness: Randomness,
    network: Any = None,
    pairs: Pairs = None,
) -> PathSample:
    """t ~ U(0, 1), x0 ~ noise, and the path between x0 and x1: linear in flat space.

    Arguments:
        network: The network whose path it is, where that may be its own (:func:`path_of`).
        pairs: Which noise goes with which data (:func:`couple`); independent if `None`.
    """
    space, first = as_space(space), next(iter(channels(x1).values()))
    t = randomness.uniform(torch.empty(batch_size(x1), device=first.device, dtype=first.dtype))
    x_t, u_t = path_of(network, space)(couple(pairs, space, x1, randomness), x1, t)
    return PathSample(t, x_t, u_t)


def flow_matching(
    velocity: Callable[..., Any],
    space: Space | Sequence[int] | int,
    x1: State,
    *,
    seed: Any = None,
    pairs: Pairs = None,
    **cond: Any,
) -> Tensor:
    """The conditional flow-matching loss E‖v(x_t, t) − u_t‖² (eqn:fm_obj), per coordinate.

    Arguments:
        velocity: A network; where it has a path of its own (:func:`path_of`), the loss is on that.
        space: Where states live.
        x1: Data, `(B, *)`.
        seed: Where t and x0 come from.
        pairs: Which noise goes with which data (:func:`couple`).
    """
    randomness = as_randomness(seed, next(iter(channels(x1).values())).device)
    space = as_space(space).given(cond)
    t, x_t, u_t = path_sample(space, x1, randomness, velocity, pairs)
    v = velocity(x_t, t, **cond)
    require_state(v, "the network's velocity")
    return space.squared_error(v, u_t)


def elbo(
    field: Trainable,
    x1: State,
    beta: float | Tensor = 1e-3,
    *,
    seed: Randomness | torch.Generator | int | None = None,
    pairs: PathSample | Pairs = None,
    **cond: Any,
) -> Tensor:
    r"""The loss of joint training: flow matching under one draw, plus the closed-form KL (eqn:vad_flow_matching).

    .. math:: E \| v_ω(x_t, t) - u_t \|^2 + β\, KL[q(ω|x,t) \| π(ω)], \quad ω ∼ q

    Arguments:
        field: A field; every parameter of it that requires a gradient gets one.
        x1: Data, `(B, *)`.
        beta: The weight of the KL.
        seed: Where t, x0 and ε come from.
        pairs: Which noise goes with which data (:func:`couple`), or a whole `PathSample(t, x_t, u_t)` of your own.
    """
    randomness = as_randomness(seed, field.device)
    space = field.learn_space(x1).given(cond)
    t, x_t, u_t = pairs if isinstance(pairs, tuple) else path_sample(space, x1, randomness, field, pairs)
    v, divergence = field.draw_with_kl(x_t, t, seed=randomness, **cond)
    return space.squared_error(v, u_t) + beta * divergence
