"""Quantised weights: a matrix as 8-bit integers from −127 to 127 with one scale per row.

A network is rounded before it is evaluated, so that the results hold for the shipped weights. Rounding twice is the
same as rounding once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["decode", "encode", "round_weights"]

LEVELS = 127


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:  # (O, *) -> (O, *) int8, (O,)
    """Return integers and the scale of each row, which is its largest entry divided by 127.

    >>> levels, scale = encode(torch.tensor([[1.0, -0.5]]))
    >>> levels.tolist(), round(float(scale) * 127, 6)
    ([[127, -64]], 1.0)
    """
    flat = weight.detach().float().flatten(1)
    scale = flat.abs().amax(1) / LEVELS
    levels = (flat / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().clamp(-LEVELS, LEVELS)
    return levels.to(torch.int8).reshape(weight.shape), scale


def decode(levels: Tensor, scale: Tensor) -> Tensor:
    """Return the matrix that :func:`encode` encoded."""
    return levels.float() * scale[(..., *[None] * (levels.ndim - 1))]


def round_weights(module: nn.Module) -> None:
    """Round every matrix of a module to quantised values; vectors do not change."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.copy_(decode(*encode(parameter)))
