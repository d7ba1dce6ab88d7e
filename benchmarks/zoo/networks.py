"""Networks of the zoo: standard layers, called as `network(x, t, **cond)`, with noise at t = 0 and data at t = 1.

A network may define `objective(space, x0, x1, t, randomness, **cond)`, a training loss that replaces plain flow
matching, and `path(x0, x1, t)`, which replaces the path of the space between noise and data.
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


class Condition(nn.Module):
    """The embedding of the time, and of the class if there are classes: (B,), (B,) -> (B, F)."""

    def __init__(self, features: int, classes: int = 0) -> None:
        super().__init__()
        self.embed = TimeEmbedding(features)
        self.time = nn.Linear(features, features)
        self.label = nn.Embedding(classes, features) if classes else None

    def forward(self, t: Tensor, y: Tensor | None) -> Tensor:
        e = self.time(self.embed(t))
        return F.silu(e if self.label is None else e + self.label(y))


class ResidualMLP(nn.Module):
    """A residual MLP with LayerNorm for vectors.

    Arguments:
        dim: The size of a sample; samples of other shapes are flattened.
        hidden, depth: The width, and the number of residual blocks.
        classes: How many classes; 0 for none.
        periodic: Whether coordinates have period 1 (a torus). If so, the network sees their sines and cosines.
    """

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


class Denoiser(nn.Module):
    r"""A velocity network from a denoiser E[x₁ | x_t] on a variance-preserving path with a cosine schedule.

    x_t = α x₁ + σ x₀ with α = sin θ, σ = cos θ and θ = (π/2) · 0.98 · t: a little noise is left at t = 1, so that the
    velocity stays finite. The velocity follows from x₀ = (x_t − α x₁)/σ:

    .. math:: v = α' x_1 + σ' x_0 = \frac{θ'}{σ} E[x_1|x_t] - θ' \frac{α}{σ} x_t

    Arguments:
        network: Called as `network(x, t, **cond)`; returns E[x₁ | x_t].
    """

    RATE = 0.98 * math.pi / 2

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        alpha, sigma = self._scales(t, x)
        return self.RATE / sigma * self.network(x, t, **cond) - self.RATE * alpha / sigma * x

    def path(self, x0: Tensor, x1: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return x_t and its velocity."""
        alpha, sigma = self._scales(t, x1)
        return alpha * x1 + sigma * x0, self.RATE * (sigma * x1 - alpha * x0)

    def objective(self, space: Space, x0: Tensor, x1: Tensor, t: Tensor, randomness: Randomness, **cond: Any) -> Tensor:
        """E‖E[x₁ | x_t] − x₁‖²: data prediction."""
        return space.squared_error(self.network(self.path(x0, x1, t)[0], t, **cond), x1)

    def _scales(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        angle = (self.RATE * t)[(..., *[None] * (like.ndim - 1))]
        return angle.sin(), angle.cos()


class Guided(nn.Module):
    """Classifier-free guidance: v(∅) + w (v(y) − v(∅)), from one call with twice the batch.

    Arguments:
        network: Called as `network(x, t, y=labels)`; has one additional class, which stands for no label.
        none: The number of the additional class.
        weight: w.
        dropped: The share of labels that training drops.
    """

    def __init__(self, network: nn.Module, none: int, weight: float = 2.0, dropped: float = 0.15) -> None:
        super().__init__()
        self.network, self.none, self.weight, self.dropped = network, none, weight, dropped

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        # The two rows of a sample lie side by side, so that every layer sees the samples in their order.
        both = torch.stack([y, torch.full_like(y, self.none)], 1).flatten()
        v = self.network(x.repeat_interleave(2, 0), t.repeat_interleave(2, 0), y=both)
        with_, without = v.reshape(len(x), 2, *x.shape[1:]).unbind(1)
        return without + self.weight * (with_ - without)

    def unconditional(self, x: Tensor, t: Tensor) -> Tensor:
        """v(∅)."""
        return self.network(x, t, y=torch.full((len(x),), self.none, device=x.device))

    def objective(self, space: Space, x0: Tensor, x1: Tensor, t: Tensor, randomness: Randomness, y: Tensor) -> Tensor:
        """Flow matching of the unguided network, with labels dropped at random."""
        x_t, u_t = space.path(x0, x1, t)
        y = torch.where(randomness.uniform(torch.empty_like(t)) < self.dropped, self.none, y)
        return space.squared_error(self.network(x_t, t, y=y), u_t)


class ConvGru(nn.Module):
    """A network for waves (B, 1, L): strided convolutions, a bidirectional GRU, and upsampling.

    The GRU is written with linear layers, one step at a time, over L/4 places.
    """

    def __init__(self, hidden: int = 48, features: int = 32) -> None:
        super().__init__()
        self.condition = Condition(features)
        self.join = nn.Linear(features, hidden)
        self.first = nn.Conv1d(1, hidden, 5, padding=2)
        self.down = nn.Conv1d(hidden, hidden, 8, stride=4, padding=2)
        self.seen = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(2))
        self.kept = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(2))
        self.up = nn.ConvTranspose1d(2 * hidden, hidden, 8, stride=4, padding=2)
        self.mix = nn.Conv1d(2 * hidden, hidden, 5, padding=2)
        self.out = nn.Conv1d(hidden, 1, 5, padding=2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        wide = F.silu(self.first(x) + self.join(self.condition(t, None))[:, :, None])
        places = F.silu(self.down(wide)).unbind(2)
        forth = self._scan(0, places)
        back = self._scan(1, places[::-1])[::-1]
        h = torch.stack([torch.cat(pair, 1) for pair in zip(forth, back, strict=True)], 2)
        return self.out(F.silu(self.mix(torch.cat([wide, F.silu(self.up(h))], 1))))

    def _scan(self, way: int, places: tuple[Tensor, ...]) -> list[Tensor]:
        h, found = torch.zeros_like(places[0]), []
        for place in places:
            a, b, c = self.seen[way](place).chunk(3, 1)
            p, q, r = self.kept[way](h).chunk(3, 1)
            update = torch.sigmoid(a + p)
            h = update * h + (1 - update) * torch.tanh(c + torch.sigmoid(b + q) * r)
            found.append(h)
        return found


class Dilated(nn.Module):
    """A network for waves (B, 1, L) with a class: residual dilated convolutions at full length."""

    def __init__(self, classes: int, hidden: int = 32, features: int = 32, dilations: tuple[int, ...] = (1, 4, 16, 2)):
        super().__init__()
        self.condition = Condition(features, classes)
        self.first = nn.Conv1d(1, hidden, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, hidden) for _ in dilations)
        self.wide = nn.ModuleList(nn.Conv1d(hidden, hidden, 5, padding=2 * d, dilation=d) for d in dilations)
        self.join = nn.ModuleList(nn.Linear(features, hidden) for _ in dilations)
        self.back = nn.ModuleList(nn.Conv1d(hidden, hidden, 1) for _ in dilations)
        self.out = nn.Conv1d(hidden, 1, 1)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        e, h = self.condition(t, y), self.first(x)
        for norm, wide, join, back in zip(self.norms, self.wide, self.join, self.back, strict=True):
            h = h + back(F.gelu(wide(norm(h)) + join(e)[:, :, None]))
        return self.out(h)


class SetTransformer(nn.Module):
    """A transformer for sets of points (B, N, D): pre-norm blocks without positions, so that order is ignored."""

    def __init__(self, dim: int, hidden: int = 48, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.condition = Condition(hidden)
        self.first = nn.Linear(dim, hidden)
        self.attend = nn.ModuleList(nn.MultiheadAttention(hidden, heads, batch_first=True) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * depth + 1))
        self.wide = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x) + self.condition(t, None)[:, None]
        for i, (attend, wide, back) in enumerate(zip(self.attend, self.wide, self.back, strict=True)):
            k = self.norms[2 * i](h)
            h = h + attend(k, k, k, need_weights=False)[0]
            h = h + back(F.gelu(wide(self.norms[2 * i + 1](h))))
        return self.out(self.norms[-1](h))


class GraphNet(nn.Module):
    """A graph network for nodes in space (B, N, D) whose class y says which of them are bonded.

    Messages pass between all pairs. The inputs of a pair are its difference, its distance and its bond.

    Arguments:
        bonds: The adjacency of each class, `(C, N, N)`.
        dim: The dimension of space.
    """

    def __init__(self, bonds: Tensor, dim: int, hidden: int = 64, depth: int = 3, features: int = 32) -> None:
        super().__init__()
        self.bonds: Tensor
        self.register_buffer("bonds", bonds.float(), persistent=False)
        self.condition = Condition(features)
        self.first = nn.Linear(features + bonds.shape[1], hidden)  # time, and which nodes it is bonded to
        self.edge = nn.ModuleList(nn.Linear(2 * hidden + dim + 2, hidden) for _ in range(depth))
        self.message = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.node = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(depth))
        self.place = nn.Linear(dim, hidden)
        self.out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        bonds, nodes = self.bonds[y], x.shape[1]  # (B, N, N)
        e = self.condition(t, None)[:, None].expand(-1, nodes, -1)
        h = self.first(torch.cat([e, bonds], -1)) + self.place(x)
        apart = x[:, :, None] - x[:, None]  # (B, N, N, D)
        pair = torch.cat([apart, (apart.square().sum(-1, keepdim=True) + 1e-4).sqrt(), bonds[..., None]], -1)
        for edge, message, node in zip(self.edge, self.message, self.node, strict=True):
            ends = torch.cat([h[:, :, None].expand(-1, -1, nodes, -1), h[:, None].expand(-1, nodes, -1, -1)], -1)
            sent = F.silu(message(F.silu(edge(torch.cat([ends, pair], -1)))))
            h = h + F.silu(node(torch.cat([h, sent.mean(2)], -1)))
        return self.out(h)


class SmallUNet(nn.Module):
    """A small UNet for images (B, 1, H, W) with even sides: two blocks at full and two blocks at half resolution.

    Arguments:
        classes: How many classes; 0 for none.
        width: Channels at full resolution; half resolution has twice as many.
    """

    def __init__(self, classes: int = 0, width: int = 16, features: int = 64) -> None:
        super().__init__()
        self.condition = Condition(features, classes)
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

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        e = self.condition(t, y)
        wide = self._block(0, self.first(x), e)
        h = self._block(2, self._block(1, self.down(wide), e), e)
        h = self._block(3, self.mix(torch.cat([wide, self.up(h)], 1)), e)
        return self.out(F.silu(h))

    def _block(self, i: int, h: Tensor, e: Tensor) -> Tensor:
        inner = self.inner[i](F.silu(self.norms[i](h))) + self.join[i](e)[:, :, None, None]
        return h + self.outer[i](F.silu(inner))


class GatedMLP(nn.Module):
    """An MLP of gated blocks (SwiGLU) for vectors. The class scales and shifts the input of every block."""

    def __init__(self, dim: int, classes: int, hidden: int = 96, depth: int = 3, features: int = 64) -> None:
        super().__init__()
        self.condition = Condition(features, classes)
        self.first = nn.Linear(dim, hidden)
        self.film = nn.ModuleList(nn.Linear(features, 2 * hidden) for _ in range(depth))
        self.gate = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.value = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        e, h = self.condition(t, y), self.first(x)
        for film, gate, value, back in zip(self.film, self.gate, self.value, self.back, strict=True):
            scale, shift = film(e).chunk(2, 1)
            k = h * (1 + scale) + shift
            h = h + back(F.silu(gate(k)) * value(k))
        return self.out(h)


class Mixer(nn.Module):
    """An MLP-Mixer for sequences (B, L, A): dense layers alternate between positions and features."""

    def __init__(self, length: int, letters: int, hidden: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.condition = Condition(hidden)
        self.first = nn.Linear(letters, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2 * depth + 1))
        self.along = nn.ModuleList(_dense(length, 4 * length) for _ in range(depth))
        self.across = nn.ModuleList(_dense(hidden, 2 * hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, letters)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x) + self.condition(t, None)[:, None]
        for i, (along, across) in enumerate(zip(self.along, self.across, strict=True)):
            h = h + along(self.norms[2 * i](h).transpose(1, 2)).transpose(1, 2)
            h = h + across(self.norms[2 * i + 1](h))
        return self.out(self.norms[-1](h))


def _dense(size: int, hidden: int, out: int = 0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, out or size))


class Endpoint(nn.Module):
    """The velocity (E[x₁ | x_t] − x_t) / (1 − t) for one-hot letters, from a network that returns their logits.

    The loss is cross entropy (variational flow matching). The denominator is at least 0.02, the last of 50 steps.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return (self.network(x, t).softmax(-1) - x) / (1 - t).clamp_min(0.02)[:, None, None]

    def objective(self, space: Space, x0: Tensor, x1: Tensor, t: Tensor, randomness: Randomness) -> Tensor:
        """Cross entropy of the letters."""
        return -(x1 * self.network(space.path(x0, x1, t)[0], t).log_softmax(-1)).sum(-1).mean()


class NoisePrediction(Predicting):
    """A velocity network from a noise prediction on DDPM's variance-preserving path, by fmwc's adapter."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network, "noise", "vp")

    def objective(self, space: Space, x0: Tensor, x1: Tensor, t: Tensor, randomness: Randomness, **cond: Any) -> Tensor:
        """E‖E[x₀ | x_t] − x₀‖²."""
        t = t.clamp(self.floor, 1 - self.floor)
        return space.squared_error(self.called(self.path(x0, x1, t)[0], t, **cond), x0)


class Experts(nn.Module):
    """A mixture of MLPs for samples with a class. A gate, which sees the sample, time and class, weights them."""

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
        e, h, kept = self.condition(t, None), self.first(x), []
        for join, down in zip(self.join, self.down, strict=False):
            kept.append(F.silu(h + join(e)[:, :, None]))
            h = down(kept[-1])
        h = h + self.join[2](e)[:, :, None]
        for middle in self.middle:
            h = h + middle(F.silu(h))
        for up, mix in zip(self.up, self.mix, strict=True):
            h = mix(torch.cat([kept.pop(), F.silu(up(F.silu(h)))], 1))
        return self.out(F.silu(h))


class DeepSet(nn.Module):
    """A network for sets of points (B, N, D) in which each point sees only the mean of the others."""

    def __init__(self, dim: int, hidden: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.condition = Condition(hidden)
        self.first = nn.Linear(dim, hidden)
        self.blocks = nn.ModuleList(_dense(2 * hidden, hidden, hidden) for _ in range(depth))
        self.out = nn.Linear(hidden, dim)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x) + self.condition(t, None)[:, None]
        for block in self.blocks:
            h = h + block(torch.cat([h, h.mean(1, keepdim=True).expand_as(h)], -1))
        return self.out(h)


class Recurrent(nn.Module):
    """A network for series (B, L, D): LSTM layers that alternate between backward and forward.

    The LSTM is written with linear layers, one step at a time.
    """

    def __init__(self, dim: int, hidden: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.condition = Condition(hidden)
        self.first = nn.Linear(dim, hidden)
        self.seen = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(depth))
        self.kept = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(depth))
        self.out = nn.Linear(2 * hidden, dim)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        wide = self.first(x) + self.condition(t, None)[:, None]
        h = wide
        for seen, kept in zip(self.seen, self.kept, strict=True):
            h = self._scan(seen(h).unbind(1)[::-1], kept)  # the next layer reads the other way
        h = h if len(self.seen) % 2 == 0 else h.flip(1)
        return self.out(torch.cat([wide, h], -1))

    def _scan(self, places: tuple[Tensor, ...], kept: nn.Module) -> Tensor:
        h = c = torch.zeros_like(places[0].chunk(4, 1)[0])
        found = []
        for place in places:
            take, forget, show, new = (place + kept(h)).chunk(4, 1)
            c = torch.sigmoid(forget + 1) * c + torch.sigmoid(take) * torch.tanh(new)
            h = torch.sigmoid(show) * torch.tanh(c)
            found.append(h)
        return torch.stack(found, 1)


class Equivariant(nn.Module):
    """A network for sets of unit vectors (B, N, D), equivariant to rotations and permutations.

    It sees inner products only. The velocity of each vector is the tangent part of a weighted sum of all vectors.
    """

    def __init__(self, hidden: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.condition = Condition(hidden)
        self.edge = nn.ModuleList(nn.Linear(2 * hidden + 1, hidden) for _ in range(depth))
        self.node = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(depth))
        self.weight = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        count = x.shape[1]
        inner = (x @ x.transpose(1, 2))[..., None]  # (B, N, N, 1)
        h = self.condition(t, None)[:, None].expand(-1, count, -1)
        for edge, node in zip(self.edge, self.node, strict=True):
            ends = [h[:, :, None].expand(-1, -1, count, -1), h[:, None].expand(-1, count, -1, -1)]
            sent = F.silu(edge(torch.cat([*ends, inner], -1)))
            h = h + F.silu(node(torch.cat([h, sent.mean(2)], -1)))
        v = self.weight(sent)[..., 0] @ x
        return v - (x * v).sum(-1, keepdim=True) * x


class PatchTransformer(nn.Module):
    """A transformer over patches of images (B, C, S, S); time and class scale, shift and gate every block."""

    def __init__(
        self, channels: int, side: int, patch: int, classes: int, hidden: int = 64, heads: int = 4, depth: int = 3
    ) -> None:
        super().__init__()
        self.condition = Condition(hidden, classes)
        self.first = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.place = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, hidden))
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.film = nn.ModuleList(nn.Linear(hidden, 6 * hidden) for _ in range(depth))
        self.attend = nn.ModuleList(nn.MultiheadAttention(hidden, heads, batch_first=True) for _ in range(depth))
        self.across = nn.ModuleList(_dense(hidden, 2 * hidden) for _ in range(depth))
        self.out = nn.ConvTranspose2d(hidden, channels, patch, stride=patch)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        e, h = self.condition(t, y), self.first(x)
        wide = h.shape
        h = h.flatten(2).transpose(1, 2) + self.place
        for film, attend, across in zip(self.film, self.attend, self.across, strict=True):
            a, b, c, d, g, k = film(e)[:, None].chunk(6, -1)
            seen = self.norm(h) * (1 + a) + b
            h = h + c * attend(seen, seen, seen, need_weights=False)[0]
            h = h + d * across(self.norm(h) * (1 + g) + k)
        return self.out(self.norm(h).transpose(1, 2).reshape(wide))


class Classifier(nn.Module):
    """The judge of 14 × 14 images: three convolutions, two pools, two dense layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 9, 128), nn.ReLU(), nn.Linear(128, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
