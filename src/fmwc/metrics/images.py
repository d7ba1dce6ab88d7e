"""Metrics of images, as a judge sees them: failures, and the Fréchet distance of its penultimate layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError
from fmwc.modes import evaluating

__all__ = ["accuracy", "activations", "failed", "frechet", "predictions"]

CHUNK = 2000  # images looked at together


def _look(judge: Any, x: Tensor, how: str) -> Tensor:
    device = next(judge.parameters()).device
    with evaluating(judge), torch.no_grad():
        # Pixels outside [0, 1] are shown as black or white, so that is what the judge sees.
        return torch.cat([getattr(judge, how)(part.to(device).clamp(0, 1)).cpu() for part in x.split(CHUNK)])


def predictions(judge: Any, x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B,)
    """The class the judge takes each image for."""
    return _look(judge, x, "forward").argmax(1)


def failed(judge: Any, x: Tensor, y: Tensor) -> np.ndarray:  # (B, 1, H, W), (B,) -> (B,)
    """The positive class: images that the judge takes for another class than was asked for."""
    if len(x) != len(y):
        raise ShapeError(f"one class an image: got {len(y)} for {len(x)} images")
    return (predictions(judge, x) != y.cpu()).numpy()


def accuracy(judge: Any, x: Tensor, y: Tensor) -> float:
    """The share of images that the judge takes for what they are."""
    return 1 - float(failed(judge, x, y).mean())


def activations(judge: Any, x: Tensor) -> np.ndarray:  # (B, 1, H, W) -> (B, F)
    """The judge's penultimate layer, in double precision."""
    return _look(judge, x, "features").double().numpy()


def frechet(a: np.ndarray, b: np.ndarray) -> float:  # (N, F), (M, F)
    r"""The Fréchet distance between Gaussians fitted to two sets of activations (FID, with the judge's layer).

    .. math:: \| μ_a - μ_b \|^2 + \mathrm{tr}(Σ_a + Σ_b - 2 (Σ_a Σ_b)^{1/2})

    The trace of the square root is the sum of the square roots of the eigenvalues of Σ_a^{1/2} Σ_b Σ_a^{1/2}, which is
    symmetric, so that no complex number appears.
    """
    if min(len(a), len(b)) < 2:
        raise UsageError("a Fréchet distance takes at least 2 images on either side")
    shift = a.mean(0) - b.mean(0)
    first, second = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ second @ root).clip(0)
    return float(shift @ shift + np.trace(first) + np.trace(second) - 2 * np.sqrt(inner).sum())
