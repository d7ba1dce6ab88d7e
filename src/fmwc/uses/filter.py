"""Filtering: keep the surest samples."""

from __future__ import annotations

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError, require_finite
from fmwc.sampling.trajectory import require_varied

__all__ = ["choose", "ranks"]


def choose(
    score: Tensor,  # (B,)
    keep: float | None = None,
    budget: int | None = None,
    threshold: float | None = None,
) -> Tensor:  # (K,)
    """Return the indices of the samples with the lowest scores, in the order of the run.

    Scores that are the same for all samples choose none of them, so `keep` and `budget` then raise an error.
    Exactly one of `keep`, `budget` and `threshold` must be given.

    Arguments:
        score: High = doubtful.
        keep: The share of samples to keep.
        budget: The number of samples to keep.
        threshold: Keep every sample with at most this score; the result may be empty.

    >>> choose(torch.tensor([0.3, 0.9, 0.1, 0.5]), budget=2).tolist()
    [0, 2]
    """
    options = {"keep": keep, "budget": budget, "threshold": threshold}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise UsageError(f"give exactly one of keep, budget and threshold; got {' and '.join(given) or 'none'}")
    _check(score)
    count = len(score)
    if threshold is not None:
        return (score.double() <= threshold).nonzero()[:, 0]
    if keep is not None:
        if not 0 < keep <= 1:
            raise UsageError(f"keep must be in (0, 1], got {keep}")
        budget = max(1, round(keep * count))
    assert budget is not None
    if not 1 <= budget <= count:
        raise UsageError(f"budget must be between 1 and the number of samples, {count}, got {budget}")
    if budget < count:
        require_varied(score)
    return score.argsort(stable=True)[:budget].sort().values


def ranks(score: Tensor) -> Tensor:  # (B,) -> (B,)
    """Return the rank of each sample, from 1 for the surest; equal scores are ranked by position.

    >>> ranks(torch.tensor([0.3, 0.9, 0.1])).tolist()
    [2, 3, 1]
    """
    _check(score)
    place = torch.empty(len(score), dtype=torch.long, device=score.device)
    place[score.argsort(stable=True)] = torch.arange(1, len(score) + 1, device=score.device)
    return place


def _check(score: Tensor) -> None:
    if score.ndim != 1 or not len(score):
        raise ShapeError(f"score must have shape (B,) with at least one sample, got shape {tuple(score.shape)}")
    require_finite(score, "the score")
