"""Networks of the zoo: standard layers, called as `network(x, t, **cond)`, with noise at t = 0 and data at t = 1.

A network may define `objective(space, x0, x1, t, randomness, **cond)`, a training loss that replaces flow matching.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.adapters import Predicting
from fmwc.flow import Space
from fmwc.networks import TimeEmbedding
from fmwc.randomness import Randomness


def _dense(size: int, hidden: int, out: int = 0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, out or size))


class Condition(nn.Module):
    """The embedding of the time, and of the class if there are classes: (B,), (B,) -> (B, F)."""

    def __init__(self, features: int, classes: int = 0) -> None:
        super().__init__()
        self.embed = TimeEmbedding(features)
        self.time = nn.Linear(features, features)
        self.label = nn.Embedding(classes, features) if classes else None

    def forward(self, t: Tensor, y: Tensor | None = None) -> Tensor:
        e = self.time(self.embed(t))
        return F.silu(e if self.label is None else e + self.label(y))


class ResidualMLP(nn.Module):
    """A residual MLP with LayerNorm; on a torus (`periodic`) it sees sines and cosines."""

    def __init__(self, dim: int, hidden: int = 128, depth: int = 3, classes: int = 0, periodic: bool = False) -> None:
        super().__init__()
        self.periodic = periodic
        self.condition = Condition(64, classes)
        self.first = nn.Linear(4 * dim if periodic else dim, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(depth))
        self.inner = nn.ModuleList(nn.Linear(hidden + 64, hidden) for _ in range(depth))
        self.outer = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        flat = x.flatten(1)
        if self.periodic:
            angle = 2 * math.pi * flat
            flat = torch.cat([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], -1)
        e, h = self.condition(t, y), self.first(flat)
        for norm, inner, outer in zip(self.norms, self.inner, self.outer, strict=True):
            h = h + outer(F.silu(inner(torch.cat([norm(h), e], -1))))
        return self.out(h).view_as(x)


class Experts(nn.Module):
    """A mixture of MLPs. A gate, which sees the sample, time and class, weights them."""

    def __init__(self, dim: int, classes: int, hidden: int = 64, count: int = 6, features: int = 32) -> None:
        super().__init__()
        self.condition = Condition(features, classes)
        self.gate = _dense(dim + features, hidden, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim + features, hidden), nn.SiLU(), _dense(hidden, hidden, dim))
            for _ in range(count)
        )

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        seen = torch.cat([x.flatten(1), self.condition(t, y)], 1)
        weights = self.gate(seen).softmax(1)
        return sum(weights[:, i, None] * expert(seen) for i, expert in enumerate(self.experts)).view_as(x)


class NoisePrediction(Predicting):
    """A velocity network from a noise prediction on DDPM's variance-preserving path, by fmwc's adapter."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, "noise", "vp")

    def objective(self, space: Space, x0: Tensor, x1: Tensor, t: Tensor, randomness: Randomness, **cond: Any) -> Tensor:
        t = t.clamp(self.floor, 1 - self.floor)
        return space.squared_error(self.called(self.path(x0, x1, t)[0], t, **cond), x0)


class DeepSet(nn.Module):
    """A network for sets of points (B, N, D) in which each point sees only the mean of the others."""

    def __init__(self, dim: int, hidden: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.condition = Condition(hidden)
        self.first = nn.Linear(dim, hidden)
        self.blocks = nn.ModuleList(_dense(2 * hidden, hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x) + self.condition(t)[:, None]
        for block in self.blocks:
            h = h + block(torch.cat([h, h.mean(1, keepdim=True).expand_as(h)], -1))
        return self.out(h)


class LetterMixer(nn.Module):
    """The velocity (E[x₁ | x_t] − x_t) / (1 − t) of one-hot letters (B, L, A), from an MLP-Mixer trained by cross
    entropy. The denominator is at least 0.02, the last of 50 steps."""

    def __init__(self, length: int, letters: int, hidden: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.condition = Condition(hidden)
        self.first = nn.Linear(letters, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * depth + 1))
        self.along = nn.ModuleList(_dense(length, 4 * length) for _ in range(depth))
        self.across = nn.ModuleList(_dense(hidden, 2 * hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, letters)

    def logits(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x) + self.condition(t)[:, None]
        for i, (along, across) in enumerate(zip(self.along, self.across, strict=True)):
            h = h + along(self.norms[2 * i](h).transpose(1, 2)).transpose(1, 2)
            h = h + across(self.norms[2 * i + 1](h))
        return self.out(self.norms[-1](h))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return (self.logits(x, t).softmax(-1) - x) / (1 - t).clamp_min(0.02)[:, None, None]

    def objective(self, space: Space, x0: Tensor, x1: Tensor, t: Tensor, randomness: Randomness) -> Tensor:
        return -(x1 * self.logits(space.path(x0, x1, t)[0], t).log_softmax(-1)).sum(-1).mean()


class SmallUNet(nn.Module):
    """A small UNet for images (B, 1, H, W) with even sides: two blocks at full and two at half resolution."""

    def __init__(self, width: int = 16, features: int = 64) -> None:
        super().__init__()
        self.condition = Condition(features)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        sizes = (width, 2 * width, 2 * width, width)
        self.norms = nn.ModuleList(nn.GroupNorm(8, size) for size in sizes)
        self.inner = nn.ModuleList(nn.Conv2d(size, size, 3, padding=1) for size in sizes)
        self.join = nn.ModuleList(nn.Linear(features, size) for size in sizes)
        self.outer = nn.ModuleList(nn.Conv2d(size, size, 3, padding=1) for size in sizes)
        self.down = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.mix = nn.Conv2d(2 * width, width, 1)
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        e = self.condition(t)
        wide = self._block(0, self.first(x), e)
        h = self._block(2, self._block(1, self.down(wide), e), e)
        h = self._block(3, self.mix(torch.cat([wide, self.up(h)], 1)), e)
        return self.out(F.silu(h))

    def _block(self, i: int, h: Tensor, e: Tensor) -> Tensor:
        inner = self.inner[i](F.silu(self.norms[i](h))) + self.join[i](e)[:, :, None, None]
        return h + self.outer[i](F.silu(inner))


class ConvUNet(nn.Module):
    """A UNet for series (B, 1, L): convolutions at full, half and a quarter of the length."""

    def __init__(self, hidden: int = 32, features: int = 32) -> None:
        super().__init__()
        self.condition = Condition(features)
        self.first = nn.Conv1d(1, hidden, 5, padding=2)
        self.down = nn.ModuleList(nn.Conv1d(hidden, hidden, 4, stride=2, padding=1) for _ in range(2))
        self.join = nn.ModuleList(nn.Linear(features, hidden) for _ in range(3))
        self.middle = nn.ModuleList(nn.Conv1d(hidden, hidden, 5, padding=2) for _ in range(3))
        self.up = nn.ModuleList(nn.ConvTranspose1d(hidden, hidden, 4, stride=2, padding=1) for _ in range(2))
        self.mix = nn.ModuleList(nn.Conv1d(2 * hidden, hidden, 5, padding=2) for _ in range(2))
        self.out = nn.Conv1d(hidden, 1, 5, padding=2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        e, h, kept = self.condition(t), self.first(x), []
        for join, down in zip(self.join, self.down, strict=False):
            kept.append(F.silu(h + join(e)[:, :, None]))
            h = down(kept[-1])
        h = h + self.join[2](e)[:, :, None]
        for middle in self.middle:
            h = h + middle(F.silu(h))
        for up, mix in zip(self.up, self.mix, strict=True):
            h = mix(torch.cat([kept.pop(), F.silu(up(F.silu(h)))], 1))
        return self.out(F.silu(h))
