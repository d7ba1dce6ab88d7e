"""Classifier-based image metrics: predicted classes, failures, and activations of the penultimate layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import ShapeError
from fmwc.modes import evaluating

__all__ = ["accuracy", "activations", "failed", "predictions"]

CHUNK = 2000  # images per batch of the classifier


def _classify(classifier: Any, x: Tensor, method: str) -> Tensor:
    device = next(classifier.parameters()).device
    with evaluating(classifier), torch.no_grad():
        # Clamp as a display does: pixels outside [0, 1] appear black or white.
        return torch.cat([getattr(classifier, method)(part.to(device).clamp(0, 1)).cpu() for part in x.split(CHUNK)])


def predictions(classifier: Any, x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B,)
    """Return the predicted class of each image."""
    return _classify(classifier, x, "forward").argmax(1)


def failed(classifier: Any, x: Tensor, y: Tensor) -> np.ndarray:  # (B, 1, H, W), (B,) -> (B,)
    """Return `True` for each image whose predicted class is not the requested one."""
    if len(x) != len(y):
        raise ShapeError(f"expected one class per image, got {len(y)} for {len(x)} images")
    return (predictions(classifier, x) != y.cpu()).numpy()


def accuracy(classifier: Any, x: Tensor, y: Tensor) -> float:
    """Return the fraction of images that are classified as the requested class."""
    return 1 - float(failed(classifier, x, y).mean())


def activations(classifier: Any, x: Tensor) -> np.ndarray:  # (B, 1, H, W) -> (B, F)
    """Return the activations of the classifier's penultimate layer, in double precision."""
    return _classify(classifier, x, "features").double().numpy()
