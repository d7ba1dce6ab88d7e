r"""The divergence of a velocity field, exact or by Hutchinson's estimator.

.. math:: ∇·v = \mathrm{tr}\, \frac{∂v}{∂x} = E_w[w^T \frac{∂v}{∂x} w], \quad E[ww^T] = 1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.estimators import unit_probes
from fmwc.randomness import Randomness, as_randomness, signs
from fmwc.state import State, as_conditions, batch_size, channels, tree_map

__all__ = ["PROBES", "divergence", "estimates"]

PROBES: dict[str, Callable[[Randomness, Tensor], Tensor]] = {
    "rademacher": signs,
    "gaussian": lambda randomness, like: randomness.normal(like),
}
Velocity = Callable[..., Any]  # v(x, t, **cond)


def divergence(
    velocity: Velocity,
    x: State,
    t: Tensor,
    probes: int | None = None,
    *,
    distribution: str = "rademacher",
    seed: Randomness | torch.Generator | int | None = None,
    cond: Mapping[str, Any] | None = None,
) -> Tensor:  # (B, *), (B,) -> (B,)
    """Return the divergence ∇·v per sample, summed over the channels of the state.

    Arguments:
        velocity: Called as `v(x, t, **cond)`.
        probes: The number of Hutchinson probes, or `None` for the exact trace (one backward pass per coordinate).
        distribution: The distribution of the probes, `rademacher` or `gaussian`.
        seed: Seeds the probes.
        cond: Conditions by name, passed to the velocity.
    """
    if probes is not None:
        return estimates(velocity, x, t, probes, distribution=distribution, seed=seed, cond=cond).mean(0)
    with torch.enable_grad():
        v, pull = _vjp(velocity, x, t, as_conditions(cond))
        names = list(channels(v))
        total = next(iter(channels(v).values())).new_zeros(batch_size(v))
        for name, i, w in unit_probes(tree_map(Tensor.detach, v)):
            total += pull(w)[names.index(name)].flatten(1)[:, i]
        return total


def estimates(
    velocity: Velocity,
    x: State,
    t: Tensor,
    probes: int,
    *,
    distribution: str = "rademacher",
    seed: Randomness | torch.Generator | int | None = None,
    cond: Mapping[str, Any] | None = None,
) -> Tensor:  # -> (K, B)
    """Return wᵀ(∂v/∂x)w for each Hutchinson probe; the mean is an unbiased estimate of ∇·v.

    The arguments are those of :func:`divergence`.
    """
    draw = pick(PROBES, distribution, "distribution")
    if probes < 1:
        raise UsageError(f"probes must be None (exact) or at least 1, got {probes}")
    rows = []
    with torch.enable_grad():
        v, pull = _vjp(velocity, x, t, as_conditions(cond))
        like = tree_map(Tensor.detach, v)
        randomness = as_randomness(seed, next(iter(channels(like).values())).device)
        for _ in range(probes):
            w = tree_map(lambda c: draw(randomness, c), like)
            pairs = zip(pull(w), channels(w).values(), strict=True)
            rows.append(torch.stack([(g * c).flatten(1).sum(1) for g, c in pairs]).sum(0))
    return torch.stack(rows)


def _vjp(
    velocity: Velocity, x: State, t: Tensor, cond: dict[str, Any]
) -> tuple[State, Callable[[State], list[Tensor]]]:
    """Return the velocity, and the function w ↦ (∂v/∂x)ᵀw, which returns one tensor per channel."""
    x = tree_map(lambda c: c.detach().requires_grad_(), x)
    v = velocity(x, t, **cond)
    inputs = list(channels(x).values())
    moved = [name for name, value in channels(v).items() if value.requires_grad]  # a constant has no gradient

    def pull(w: State) -> list[Tensor]:
        if not moved:
            return [torch.zeros_like(c) for c in inputs]
        ends, probes = ([channels(state)[name] for name in moved] for state in (v, w))
        grads = torch.autograd.grad(ends, inputs, probes, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(c) if g is None else g for g, c in zip(grads, inputs, strict=True)]

    return v, pull
