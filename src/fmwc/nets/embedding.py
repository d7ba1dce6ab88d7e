"""The sinusoidal embedding of time that all backbones share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["TimeEmbedding"]


class TimeEmbedding(nn.Module):
    """Creates the sinusoidal embedding of t in [0, 1], with wavelengths from 2π down to 2π/`fastest`.

    Arguments:
        features: The number of features, even.
        fastest: The highest angular frequency.
    """

    def __init__(self, features: int, fastest: float = 100.0) -> None:
        super().__init__()
        count = features // 2
        self.rates: Tensor
        # Not on the meta device, whose exponential would import torch's compiler.
        where = torch.get_default_device()
        steps = torch.linspace(0, math.log(fastest), count, device="cpu" if where.type == "meta" else where)
        self.register_buffer("rates", torch.exp(steps), persistent=False)

    def forward(self, t: Tensor) -> Tensor:  # (B,) -> (B, F)
        angle = t[..., None] * self.rates
        return torch.cat([angle.sin(), angle.cos()], -1)
