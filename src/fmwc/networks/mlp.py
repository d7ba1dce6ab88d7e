"""Network for the Checkerboard: an MLP with the time as an input of every layer (App. architectures)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class TimeEmbedding(nn.Module):
    """Sinusoidal embedding of t in [0, 1], with wavelengths from 2π down to 2π/`fastest`.

    Arguments:
        features: The number of features, even.
        fastest: The highest angular frequency.
    """

    rates: Tensor

    def __init__(self, features: int, fastest: float = 100.0) -> None:
        super().__init__()
        # Computed off the meta device, whose exponential would import torch's compiler.
        device = torch.get_default_device()
        steps = torch.linspace(0, math.log(fastest), features // 2, device="cpu" if device.type == "meta" else device)
        self.register_buffer("rates", torch.exp(steps), persistent=False)

    def forward(self, t: Tensor) -> Tensor:  # (B,) -> (B, F)
        angle = t[..., None] * self.rates
        return torch.cat([angle.sin(), angle.cos()], -1)


class MLP(nn.Module):
    """MLP velocity network v(x, t) with SiLU; the time embedding is concatenated to the input of every layer.

    Arguments:
        dim: The dimension of a sample.
        hidden: The width of the hidden layers.
        depth: The number of hidden layers.
        time_features: The size of the time embedding.
        outputs: The number of outputs; `dim` unless a second head is needed.
    """

    def __init__(
        self, dim: int, hidden: int = 512, depth: int = 3, time_features: int = 64, outputs: int | None = None
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "dim": dim, "hidden": hidden, "depth": depth, "time_features": time_features, "outputs": outputs,
        }  # fmt: skip
        self.embed = TimeEmbedding(time_features)
        widths = [dim] + [hidden] * depth
        self.layers = nn.ModuleList(nn.Linear(a + time_features, b) for a, b in pairwise(widths))
        self.acts = nn.ModuleList(nn.SiLU() for _ in range(depth))
        self.out = nn.Linear(hidden + time_features, outputs or dim)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, D), (B,) or () -> (B, D)
        embedded = self.embed(t.expand(x.shape[0]).to(x.dtype))
        for layer, act in zip(self.layers, self.acts, strict=True):
            x = act(layer(torch.cat([x, embedded], -1)))
        return self.out(torch.cat([x, embedded], -1))
