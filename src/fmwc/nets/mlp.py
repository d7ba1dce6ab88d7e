"""The Checkerboard backbone: an MLP that sees the time at every layer (App. architectures)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.nets.embedding import TimeEmbedding

__all__ = ["MLP"]


class MLP(nn.Module):
    """Creates an MLP velocity network v(x, t), SiLU, with the time embedding joined to the input of every layer.

    Arguments:
        dim: The dimension of a sample.
        hidden: The width of the hidden layers.
        depth: The number of hidden layers.
        time_features: The size of the time embedding.
        outputs: Numbers given out; `dim` unless a second head is wanted.
    """

    def __init__(
        self, dim: int, hidden: int = 512, depth: int = 3, time_features: int = 64, outputs: int | None = None
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "dim": dim,
            "hidden": hidden,
            "depth": depth,
            "time_features": time_features,
            "outputs": outputs,
        }
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
