"""Endpoint dispersion: by how much k trajectories from one x0 disagree, at k times the cost (sec:method-readouts)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.flow import Space, as_space
from fmwc.sampling import sample
from fmwc.state import State, channels, each

__all__ = ["dispersion", "ensemble_ends", "stochastic_ends"]


def dispersion(ends: State, space: Space | Sequence[int] | int | None = None) -> Tensor:  # (k, B, *) -> (B,)
    """‖std_k(x₁)‖₂ over all channels, with the unbiased variance.

    With a space, ends are seen from the first of them along geodesics (two sides of a torus' border are close), and
    channels are added up by their weight in the loss.
    """
    found, space = [], None if space is None else as_space(space)
    for name, values in channels(ends).items():
        if len(values) < 2:
            raise UsageError("dispersion takes at least 2 trajectories")
        if space is not None:
            values = space.channels[name].manifold.logmap(values[:1].expand_as(values), values)
        weight = 1.0 if space is None else space.channels[name].weight  # as channels add up in a score
        found.append(values.var(0).flatten(1).sum(1) * weight)
    return torch.stack(found).sum(0).sqrt()


def stochastic_ends(
    field: Any,
    x0: State,
    trajectories: int,
    *,
    steps: int = 50,
    seed: int = 0,
    space: Space | None = None,
    **options: Any,
) -> Any:  # -> (k, B, *)
    """Ends of stochastic trajectories from the same x0, each with noise of its own: MC-dropout, or posterior draws.

    `options` go to :func:`fmwc.sampling.sample`, and what it does not know to the network (`y=labels`).
    """

    def end(seed: int) -> Any:
        run = sample(
            field, x0=x0, steps=steps, seed=seed, confidence=False, decoder="stochastic", space=space, **options
        )
        return run.x

    ends = [end(s) for s in range(seed * trajectories, (seed + 1) * trajectories)]
    return each(lambda *c: torch.stack(c), *ends)


def ensemble_ends(
    members: Sequence[Any], x0: State, *, steps: int = 50, space: Space | None = None, **options: Any
) -> Any:  # -> (k, B, *)
    """Ends of one trajectory a member, from the same x0; `options` as in :func:`stochastic_ends`."""
    ends = [sample(m, x0=x0, steps=steps, confidence=False, space=space, **options).x for m in members]
    return each(lambda *c: torch.stack(c), *ends)
