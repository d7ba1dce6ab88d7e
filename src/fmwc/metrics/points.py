"""Metrics of the Checkerboard (App. dataset-metrics)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fmwc.data import checkerboard

__all__ = ["kernel_density", "misplaced", "misplacement", "squares", "symmetric_kl"]

FLOOR = 1e-3  # of densities: between the cells the target is zero and has no logarithm


def misplaced(x: Tensor) -> np.ndarray:  # (B, 2) -> (B,)
    """Return the positive class: samples outside the eight cells."""
    return (~checkerboard.inside(x)).cpu().numpy()


def misplacement(x: Tensor) -> float:
    """Return the fraction of samples outside the eight cells."""
    return float(misplaced(x).mean())


def squares(x: Tensor) -> list[str]:  # (B, 2)
    """Return the square of each point, named as on a chessboard with a1 at the lower left; empty outside the board.

    >>> squares(torch.tensor([[-1.5, -1.5], [1.5, -0.5], [3.0, 0.0]]))
    ['a1', 'd2', '']
    """
    places = ((x + checkerboard.HALF) / checkerboard.CELL).floor().long().tolist()
    files = "abcd"
    return [f"{files[a]}{b + 1}" if 0 <= a < len(files) and 0 <= b < len(files) else "" for a, b in places]


def kernel_density(x: Tensor, at: Tensor) -> Tensor:  # (B, D), (N, D) -> (N,)
    """Return a Gaussian kernel density estimate with the samples' covariance, scaled by Silverman's rule."""
    count, dim = x.shape
    factor = (count * (dim + 2) / 4) ** (-1 / (dim + 4))
    root = torch.linalg.cholesky(torch.cov(x.T)) * factor
    white, query = (torch.linalg.solve_triangular(root, v.T, upper=False).T for v in (x, at))
    norm = (2 * math.pi) ** (dim / 2) * root.diagonal().prod() * count
    return torch.cat([(torch.cdist(q, white).square() / -2).exp().sum(1) for q in query.split(1000)]) / norm


def symmetric_kl(x: Tensor, cells: int = 200) -> float:
    """Return ½ (KL(p‖q) + KL(q‖p)) between the target p and a kernel density q of the samples.

    Evaluated on a `cells`² grid over the board, with both densities floored at 1e-3 and normalised. The paper does not
    say how it treats the target's zeros, so compare values between runs of this library only.
    """
    centres = (torch.arange(cells, device=x.device) + 0.5) / cells * 2 * checkerboard.HALF - checkerboard.HALF
    grid = torch.cartesian_prod(centres, centres)
    densities = (checkerboard.density(grid), kernel_density(x, grid))
    p, q = (d.clamp_min(FLOOR) / d.clamp_min(FLOOR).sum() for d in densities)
    return float(((p - q) * (p / q).log()).sum() / 2)
