"""How well the variance follows the magnitude of the divergence (tab:universality)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

__all__ = ["Agreement", "agreement"]


class Agreement(NamedTuple):
    """Correlations per step (mean and standard deviation over steps) and of the sums along the trajectory."""

    pearson_step: float
    pearson_step_std: float
    spearman_step: float
    spearman_step_std: float
    pearson: float
    spearman: float


def agreement(var: Tensor, divergence: Tensor) -> Agreement:  # (R, B), (R, B)
    """Correlates σ_t² with |∇·v_t|, over samples."""
    a, b = var.double().cpu().numpy(), divergence.double().abs().cpu().numpy()
    # A step at which every sample reads alike has no correlation, and is left out.
    told = [(x, y) for x, y in zip(a, b, strict=True) if np.ptp(x) > 0 and np.ptp(y) > 0]
    linear = [pearsonr(x, y)[0] for x, y in told]
    ranks = [spearmanr(x, y)[0] for x, y in told]
    return Agreement(
        float(np.mean(linear)),
        float(np.std(linear)),
        float(np.mean(ranks)),
        float(np.std(ranks)),
        float(pearsonr(a.sum(0), b.sum(0))[0]),
        float(spearmanr(a.sum(0), b.sum(0))[0]),
    )
