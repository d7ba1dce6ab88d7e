"""Data sets: real loaders."""

import hashlib

from torch import Tensor

__all__ = ["fingerprint"]


def fingerprint(*data: Tensor) -> str:
    """A short hash of the data a model is trained on."""
    digest = hashlib.sha256()
    for tensor in data:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
