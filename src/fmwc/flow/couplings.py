"""Couplings: which noise x0 goes with which data x1, where they were not drawn independently in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError, pick
from fmwc.flow.manifolds import Euclidean, Manifold
from fmwc.flow.space import Space
from fmwc.randomness import Randomness
from fmwc.state import State, batch_size, channels, each

__all__ = ["COUPLINGS", "Pairs", "couple", "optimal_transport"]

Pairs: TypeAlias = str | State | Callable[[State, Randomness], State] | None


def optimal_transport(space: Space, x1: Any, randomness: Randomness) -> Any:
    """Noise for a batch of data, assigned so that the sum of squared distances in the batch is least. Exact.

    Distances are geodesic, each channel times its weight. Needs scipy.

    Arguments:
        space: Where states live.
        x1: A batch of data.
        randomness: Draws the noise.
    """
    if space.present:
        raise UsageError("noise of samples with different numbers of rows cannot be reassigned; give a function")
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise UsageError("pairs='ot' needs scipy; pip install 'fmwc[learn]'") from error
    count, device = batch_size(x1), next(iter(channels(x1).values())).device
    x0 = space.noise(count, randomness, device)
    cost = sum(c.weight * _squared(c.manifold, channels(x0)[n], channels(x1)[n]) for n, c in space.channels.items())
    solved = linear_sum_assignment(torch.as_tensor(cost).cpu().numpy())[1]  # for each noise, its data
    chosen = torch.as_tensor(solved, device=device).argsort()
    return each(lambda c: c[chosen], x0)


def _squared(manifold: Manifold, x0: Tensor, x1: Tensor) -> Tensor:  # -> (B, B)
    """The squared distance of every noise from every data point."""
    if isinstance(manifold, Euclidean):
        return torch.cdist(x0.flatten(1).double(), x1.flatten(1).double()).square()
    away = (manifold.logmap(row.to(x1.dtype).expand_as(x1), x1) for row in x0)  # one at a time, to save memory
    return torch.stack([log.flatten(1).double().square().sum(1) for log in away])


COUPLINGS: dict[str, Callable[[Space, Any, Randomness], Any]] = {
    "independent": lambda space, x1, r: space.noise(batch_size(x1), r, next(iter(channels(x1).values())).device),
    "ot": optimal_transport,
}


def couple(pairs: Pairs, space: Space, x1: Any, randomness: Randomness) -> Any:
    """The noise x0 that goes with a batch of data.

    Arguments:
        pairs: `None` or `"independent"`, `"ot"` (:func:`optimal_transport` within the batch), a function
            `(x1, randomness) -> x0`, or the noise itself, a row for each sample.
        space: Where states live, given the conditions.
        x1: A batch of data.
        randomness: Draws the noise.
    """
    if pairs is None or isinstance(pairs, str):
        return pick(COUPLINGS, pairs or "independent", "coupling")(space, x1, randomness)
    x0 = pairs(x1, randomness) if callable(pairs) else pairs
    if not isinstance(x0, (Tensor, dict)):
        raise UsageError(
            f"pairs is 'ot', a function (x1, randomness) -> x0, or a tensor x0 with a row per sample, got "
            f"{type(x0).__name__}"
        )
    space.check(x0, "pairs: ")
    if batch_size(x0) != batch_size(x1):
        raise ShapeError(f"pairs: one row of noise per sample, got {batch_size(x0)} for {batch_size(x1)} samples")
    return x0
