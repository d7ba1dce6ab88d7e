r"""The divergence of a velocity field, exact or by Hutchinson's estimator.

.. math:: ∇·v = \mathrm{tr}\, \frac{∂v}{∂x} = E_w[w^T \frac{∂v}{∂x} w], \quad E[ww^T] = 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.propagate import unit_probes
from fmwc.randomness import Randomness, as_randomness, signs
from fmwc.state import State, batch_size, channels, each

__all__ = ["PROBES", "along", "divergence", "estimates"]


PROBES: dict[str, Callable[[Randomness, Tensor], Tensor]] = {
    "rademacher": signs,
    "gaussian": lambda randomness, like: randomness.normal(like),
}


def divergence(
    velocity: Callable[..., Any],
    x: State,
    t: Tensor,
    probes: int | None = None,
    *,
    distribution: str = "rademacher",
    seed: Randomness | torch.Generator | int | None = None,
    **cond: Any,
) -> Tensor:  # (B, *), (B,) -> (B,)
    """∇·v for each sample, whatever the shape of one; summed over the channels of a state that has several.

    Arguments:
        velocity: `v(x, t, **cond)`.
        probes: `None` for the exact trace (one backward pass a coordinate), or the number of Hutchinson probes.
        distribution: `rademacher` or `gaussian`.
        seed: Where probes come from.
    """
    if probes is not None:
        return estimates(velocity, x, t, probes, distribution=distribution, seed=seed, **cond).mean(0)
    with torch.enable_grad():
        v, pull = _linearised(velocity, x, t, cond)
        names = list(channels(v))
        total = next(iter(channels(v).values())).new_zeros(batch_size(v))
        for name, i, w in unit_probes(each(Tensor.detach, v)):
            total += pull(w)[names.index(name)].flatten(1)[:, i]
        return total


def estimates(
    velocity: Callable[..., Any],
    x: State,
    t: Tensor,
    probes: int,
    *,
    distribution: str = "rademacher",
    seed: Randomness | torch.Generator | int | None = None,
    **cond: Any,
) -> Tensor:  # -> (K, B)
    """wᵀ(∂v/∂x)w of each Hutchinson probe alone, whose mean is an unbiased ∇·v; arguments as in :func:`divergence`."""
    draw = pick(PROBES, distribution, "distribution")
    if probes < 1:
        raise UsageError(f"probes is None (exact) or at least 1, got {probes}")
    found = []
    with torch.enable_grad():
        v, pull = _linearised(velocity, x, t, cond)
        like = each(Tensor.detach, v)
        randomness = as_randomness(seed, next(iter(channels(like).values())).device)
        for _ in range(probes):
            w = each(lambda c: draw(randomness, c), like)
            rows = zip(pull(w), channels(w).values(), strict=True)
            found.append(torch.stack([(g * c).flatten(1).sum(1) for g, c in rows]).sum(0))
    return torch.stack(found)


def _linearised(
    velocity: Callable[..., Any], x: State, t: Tensor, cond: dict[str, Any]
) -> tuple[State, Callable[[State], list[Tensor]]]:
    """The velocity, and what pulls a probe back through it: (∂v/∂x)ᵀw, one tensor a channel."""
    x = each(lambda c: c.detach().requires_grad_(), x)
    v = velocity(x, t, **cond)
    inputs = list(channels(x).values())
    moved = [name for name, value in channels(v).items() if value.requires_grad]  # a constant has no slope

    def pull(w: State) -> list[Tensor]:
        if not moved:
            return [torch.zeros_like(c) for c in inputs]
        ends, probes = ([channels(state)[name] for name in moved] for state in (v, w))
        found = torch.autograd.grad(ends, inputs, probes, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(c) if g is None else g for g, c in zip(found, inputs, strict=True)]

    return v, pull


def along(
    velocity: Callable[..., Any], states: list[Any], times: Tensor, probes: int | None = None, **options: Any
) -> Tensor:  # -> (steps, B)
    """The divergence at every step of a run that kept its states; `times` is its grid."""
    rows = zip(states[:-1], times[:-1], strict=True)
    return torch.stack([divergence(velocity, x, t, probes, **options) for x, t in rows])
