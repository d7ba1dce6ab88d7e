"""Small networks in the style of other libraries: the diagonal and the linearised estimator on each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.field import Field, attach
from tests.conftest import awaken

WIDTH, HEADS = 8, 2


def heads(x: Tensor) -> Tensor:  # (B, N, C) -> (B, H, N, C/H)
    return x.view(x.shape[0], -1, HEADS, x.shape[-1] // HEADS).transpose(1, 2)


class Modulated(nn.Module):
    """A diffusion transformer's block (DiT): shift, scale and gate from the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GELU(approximate="tanh"), nn.Dropout(0.1), nn.Linear(16, WIDTH)
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, 4, 8)
        wave = t[:, None] * torch.exp(-torch.arange(2, device=t.device) * math.log(10))
        c = self.time(torch.cat([wave.cos(), wave.sin()], -1).to(x.dtype))
        shift1, scale1, gate1, shift2, scale2, gate2 = c.chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        q, k, v = self.qkv(h).reshape(len(x), -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0).transpose(1, 2).reshape(x.shape)
        x = x + gate1.unsqueeze(1) * self.proj(h)
        h = torch.addcmul(shift2[:, None], self.norm2(x), 1 + scale2[:, None])
        return self.out(x + gate2.unsqueeze(1) * self.mlp(h))


class Rotary(nn.Module):
    """Joint attention of two streams with rotary positions and RMS norms, as in Flux and SD3."""

    def __init__(self, complex: bool) -> None:
        super().__init__()
        self.complex = complex
        self.q, self.k, self.v, self.text = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.gate, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[-2])[:, None] / torch.tensor([1.0, 10.0])
        if self.complex:
            turns = torch.polar(torch.ones_like(angle), angle)
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(3).type_as(x)
        cos, sin = angle.cos().repeat_interleave(2, -1), angle.sin().repeat_interleave(2, -1)
        real, imag = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([-imag, real], dim=-1).flatten(3)
        return (x.float() * cos + turned.float() * sin).to(x.dtype)

    def by_hand(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, 4, 8)
        words = self.text(t[:, None, None].to(x.dtype).expand(-1, 2, WIDTH))
        h = torch.cat([words, x], dim=1)
        q, k, v = (heads(layer(h)) for layer in (self.q, self.k, self.v))
        q, k = self.turn(self.norm(q)), self.turn(self.by_hand(k))
        weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1]), dim=-1)
        h = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        words, h = h.split([2, x.shape[1]], dim=1)
        a, b = self.gate(h + words.mean(1, keepdim=True)).chunk(2, -1)
        return self.out(a * F.gelu(b))


class Vision(nn.Module):
    """A ViT: patches, a class token, positions, torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, 1, 4, 4)
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat((self.token.expand(len(x), -1, -1), h), dim=1) + self.positions + t[:, None, None]
        h = self.out(self.encoder(h)[:, 1:])
        return F.fold(h.transpose(1, 2), (4, 4), 2, stride=2)


class Convolutions(nn.Module):
    """A UNet with batch norms, pooling, in-place activations, spatial attention, and two kinds of upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.LeakyReLU(0.2, inplace=True))
        self.norm, self.qkv, self.proj = nn.GroupNorm(2, 8), nn.Conv1d(8, 24, 1), nn.Conv1d(8, 8, 1)
        self.up, self.squeeze = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(8, 4)
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.out = nn.Conv2d(16, 1, 3, padding=1, padding_mode="reflect")

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, 1, 4, 4)
        kept = self.first(x)
        h = self.down(kept)
        b, c, *space = h.shape
        q, k, v = self.qkv(self.norm(h).view(b, c, -1)).chunk(3, dim=1)
        weights = torch.bmm(q.transpose(1, 2), k).mul_(c**-0.5).softmax(-1)
        h = h + self.proj(torch.bmm(v, weights.transpose(1, 2))).view(b, c, *space)
        scale = torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(h, 1).flatten(1)))
        up = self.up(h)
        up *= scale[:, :, None, None]
        up += t.view(-1, 1, 1, 1)
        return self.out(torch.cat([up, kept, self.upsample(h)], dim=1))


class Messages(nn.Module):
    """A graph network on a ring of points that gathers and scatters as torch_geometric does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH)
        self.first, self.edge, self.node = nn.Linear(3, WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:  # (B, 4, 3)
        b, n, _ = x.shape
        node = torch.arange(b * n).view(b, n)
        source, target = (
            torch.cat([node, node], 1).flatten(),
            torch.cat([node.roll(1, 1), node.roll(-1, 1)], 1).flatten(),
        )
        h = self.first(x).flatten(0, 1) + self.embed(torch.arange(n)).repeat(b, 1)
        m = F.silu(self.edge(torch.cat([h.index_select(0, source), h[target]], -1)))
        weight = torch.exp(self.attend(m))
        norm = weight.new_zeros(b * n, 1).scatter_add_(0, target[:, None], weight)
        m = m * (weight / norm[target])
        total = m.new_zeros(b * n, WIDTH).index_add_(0, target, m)
        mean = torch.zeros_like(h).scatter_reduce(0, target[:, None].expand_as(m), m, "mean", include_self=False)
        h = h + self.node(torch.cat([total, mean], -1)) * t.repeat_interleave(n)[:, None]
        return self.out(h).view_as(x)


NETWORKS = {
    "DiT": (Modulated, (4, WIDTH)),
    "rotary": (lambda: Rotary(complex=False), (4, WIDTH)),
    "rotary, complex": (lambda: Rotary(complex=True), (4, WIDTH)),
    "ViT": (Vision, (1, 4, 4)),
    "UNet": (Convolutions, (1, 4, 4)),
    "graph": (Messages, (4, 3)),
}


def built(name: str, **options: object) -> tuple[Field, Tensor, Tensor]:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    field = awaken(attach(build().eval(), space=shape, width=8, **options))
    return field, torch.randn(2, *shape), torch.tensor([0.2, 0.7])


@pytest.mark.parametrize("name", NETWORKS)
def test_diagonal_estimator_supports_every_network(name):
    field, x, t = built(name, initial_log_alpha=-9.0)
    found, first_order = field.moments(x, t, "diagonal"), field.moments(x, t)
    plain = field(x, t).detach()
    torch.testing.assert_close(found.mean, plain, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(first_order.mean, plain)
    assert found.var.shape == x.shape
    assert bool((found.var > 0).all())
    # This estimator ignores correlations, so the variances are close, not equal.
    assert 0.2 < (found.var.sum() / first_order.var.sum()).item() < 5


@pytest.mark.parametrize("name", NETWORKS)
def test_noise_in_the_output_layer_only_is_exact(name):
    field, x, t = built(name, include=["out"])
    found, exact = field.moments(x, t, "diagonal"), field.moments(x, t)
    torch.testing.assert_close(found.mean, exact.mean)
    torch.testing.assert_close(found.var, exact.var)


@pytest.mark.parametrize("name", NETWORKS)
def test_rules_give_the_plain_value_for_tiny_noise(name):
    """The mean of a whole network at the smallest α = e⁻¹⁰, to find rules with a wrong mean."""
    field, x, t = built(name, initial_log_alpha=-30.0)
    for layer in field.noise.layers:
        nn.init.zeros_(layer.inference.out.weight)
    found = field.moments(x, t, "diagonal").mean
    torch.testing.assert_close(found, field(x, t).detach(), rtol=5e-3, atol=5e-3)
