"""Metrics of images by a classifier: failures, and the Fréchet distance in the classifier's penultimate layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError
from fmwc.modes import evaluating

__all__ = ["accuracy", "activations", "failed", "frechet", "predictions"]

CHUNK = 2000  # images per batch of the classifier


def _classify(classifier: Any, x: Tensor, method: str) -> Tensor:
    device = next(classifier.parameters()).device
    with evaluating(classifier), torch.no_grad():
        # Pixels outside [0, 1] are displayed as black or white, so the classifier is given the same.
        return torch.cat([getattr(classifier, method)(part.to(device).clamp(0, 1)).cpu() for part in x.split(CHUNK)])


def predictions(classifier: Any, x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B,)
    """Return the predicted class of each image."""
    return _classify(classifier, x, "forward").argmax(1)


def failed(classifier: Any, x: Tensor, y: Tensor) -> np.ndarray:  # (B, 1, H, W), (B,) -> (B,)
    """Return the positive class: images whose predicted class is not the requested one."""
    if len(x) != len(y):
        raise ShapeError(f"expected one class per image, got {len(y)} for {len(x)} images")
    return (predictions(classifier, x) != y.cpu()).numpy()


def accuracy(classifier: Any, x: Tensor, y: Tensor) -> float:
    """Return the fraction of images whose class is predicted correctly."""
    return 1 - float(failed(classifier, x, y).mean())


def activations(classifier: Any, x: Tensor) -> np.ndarray:  # (B, 1, H, W) -> (B, F)
    """Return the classifier's penultimate layer, in double precision."""
    return _classify(classifier, x, "features").double().numpy()


def frechet(a: np.ndarray, b: np.ndarray) -> float:  # (N, F), (M, F)
    r"""Return the Fréchet distance between Gaussians fitted to two sets of activations (FID, with this classifier).

    .. math:: \| μ_a - μ_b \|^2 + \mathrm{tr}(Σ_a + Σ_b - 2 (Σ_a Σ_b)^{1/2})

    The trace of the square root is the sum of the square roots of the eigenvalues of the symmetric matrix
    Σ_a^{1/2} Σ_b Σ_a^{1/2}, so that no complex number appears.
    """
    if min(len(a), len(b)) < 2:
        raise UsageError("a Fréchet distance needs at least 2 images on either side")
    shift = a.mean(0) - b.mean(0)
    first, second = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ second @ root).clip(0)
    return float(shift @ shift + np.trace(first) + np.trace(second) - 2 * np.sqrt(inner).sum())
