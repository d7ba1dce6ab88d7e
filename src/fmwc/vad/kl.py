"""The closed-form KL of variational adaptive dropout, and the schedule of its weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fmwc.errors import UsageError

__all__ = ["cyclic", "divergence_from_prior", "kl"]


def divergence_from_prior(log_alpha: Tensor, prior_rate: float, factor: float = 0.5) -> Tensor:
    r"""KL[N(θ, αθ²) ‖ N(0, rθ²)] per weight, exact, with r = p/(1−p) (eqn:kl_analytical, with the ½ it lacks).

    .. math:: \tfrac12 \left[ \frac{α + 1}{r} - 1 + \log r - \log α \right]

    Arguments:
        log_alpha: log α, any shape.
        prior_rate: The prior rate p.
        factor: The leading factor; 1 is the paper's formula as printed.
    """
    if not 0 < prior_rate < 1:
        raise UsageError(f"prior_rate lies strictly between 0 and 1, got {prior_rate}")
    r = prior_rate / (1 - prior_rate)
    return factor * ((log_alpha.exp() + 1) / r - 1 + math.log(r) - log_alpha)


def kl(
    log_alphas: Sequence[Tensor],
    prior_rate: float,
    factor: float = 0.5,
    owners: Sequence[Tensor | None] | None = None,
    count: int = 0,
) -> Tensor:
    """Mean over batch and channels, sum over layers.

    Arguments:
        owners: For each layer, the sample each row belongs to, or `None`; rows that belong to none of the `count`
            samples are left out of the mean.
    """
    if not log_alphas:
        raise UsageError("no noisy layer was called, so no noise can be learned; look at attach's include and exclude")

    def mean(log_alpha: Tensor, owner: Tensor | None) -> Tensor:
        found = divergence_from_prior(log_alpha, prior_rate, factor)
        if owner is None:
            return found.mean()
        there = (owner < count).to(found.dtype)
        return (found.flatten(1).mean(1) * there).sum() / there.sum().clamp_min(1)

    whose = owners or [None] * len(log_alphas)
    return torch.stack([mean(a, o) for a, o in zip(log_alphas, whose, strict=True)]).sum()


def cyclic(step: int, total: int, cycles: int = 4, warmup: float = 0.1) -> float:
    """The share of β at a step: in each cycle it ramps from 0 to 1 over the first `warmup`, then holds.

    >>> [cyclic(s, 400) for s in (0, 5, 10, 99, 100)]
    [0.0, 0.5, 1.0, 1.0, 0.0]
    """
    place = (step * cycles / max(total, 1)) % 1
    return 1.0 if warmup <= 0 else min(place / warmup, 1.0)
