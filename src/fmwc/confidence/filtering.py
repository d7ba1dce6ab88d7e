"""Filtering: which samples to keep, the surest of them."""

from __future__ import annotations

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError, require_finite

__all__ = ["choose", "ranks"]


def choose(
    score: Tensor,  # (B,)
    keep: float | None = None,
    budget: int | None = None,
    threshold: float | None = None,
) -> Tensor:  # (K,)
    """The samples to keep, those of lowest score, as indices in the run's order. One of the three says how many.

    Arguments:
        score: High = doubtful.
        keep: The share to keep.
        budget: How many to keep.
        threshold: Keep every sample with a score of at most this; there may be none.

    >>> choose(torch.tensor([0.3, 0.9, 0.1, 0.5]), budget=2).tolist()
    [0, 2]
    """
    ways = {"keep": keep, "budget": budget, "threshold": threshold}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        said = " and ".join(given) or "none"
        raise UsageError(f"say in one way how many samples to keep, by keep, budget or threshold; got {said}")
    _check(score)
    count = len(score)
    if threshold is not None:
        return (score.double() <= threshold).nonzero()[:, 0]
    if keep is not None:
        if not 0 < keep <= 1:
            raise UsageError(f"the fraction to keep lies in (0, 1], got {keep}")
        budget = max(1, round(keep * count))
    assert budget is not None
    if not 1 <= budget <= count:
        raise UsageError(f"a budget is at least 1 and at most the number of samples, {count}; got {budget}")
    return score.argsort(stable=True)[:budget].sort().values


def ranks(score: Tensor) -> Tensor:  # (B,) -> (B,)
    """Each sample's place among all, the surest first: 1, 2, …; of equal scores the earlier sample comes first.

    >>> ranks(torch.tensor([0.3, 0.9, 0.1])).tolist()
    [2, 3, 1]
    """
    _check(score)
    place = torch.empty(len(score), dtype=torch.long, device=score.device)
    place[score.argsort(stable=True)] = torch.arange(1, len(score) + 1, device=score.device)
    return place


def _check(score: Tensor) -> None:
    if score.ndim != 1 or not len(score):
        raise ShapeError(f"one score a sample, of at least one sample; got shape {tuple(score.shape)}")
    require_finite(score, "the score")
