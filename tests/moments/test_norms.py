"""Normalisation rules against Monte Carlo, the delta method, and invariances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fmwc.estimators import Diagonal
from fmwc.field import Field, attach
from fmwc.moments import CLOSURES, Gaussian, moments_of
from fmwc.moments.norms import normalised
from tests.conftest import awaken
from tests.reference import assert_within, drawn

EPS = 0.05  # large enough to matter


def plain(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gaussian(*shape: int, noise: float, seed: int = 0) -> Gaussian:
    """Means with unit standard deviation, and standard deviations of about `noise`."""
    return Gaussian(plain(*shape, seed=seed), (noise * (0.5 + plain(*shape, seed=seed + 1).sigmoid())).square())


GAMMA, BETA = plain(4), plain(4, seed=8)
IMAGE_GAMMA, IMAGE_BETA = plain(4, 2, 3), plain(4, 2, 3, seed=8)
NORMS: dict[Callable[..., Any], tuple[Callable[..., Any], ...]] = {  # of states (B, 4, 2, 3)
    F.group_norm: (
        lambda x: F.group_norm(x, 2),
        lambda x: F.group_norm(x, 1, GAMMA, BETA, EPS),
        lambda x: F.group_norm(input=x, num_groups=4, weight=GAMMA, eps=EPS),
        nn.GroupNorm(2, 4, EPS).double(),
    ),
    torch.group_norm: (lambda x: torch.group_norm(x, 2, GAMMA, BETA, EPS),),
    F.layer_norm: (
        lambda x: F.layer_norm(x, (4, 2, 3), IMAGE_GAMMA, IMAGE_BETA, EPS),
        lambda x: F.layer_norm(x, [2, 3], bias=IMAGE_BETA[0], eps=EPS),
        nn.LayerNorm((4, 2, 3), EPS).double(),
    ),
    torch.layer_norm: (lambda x: torch.layer_norm(x, (4, 2, 3), IMAGE_GAMMA, IMAGE_BETA, EPS),),
    F.instance_norm: (
        lambda x: F.instance_norm(x, weight=GAMMA, bias=BETA, eps=EPS),
        nn.InstanceNorm2d(4, EPS, affine=True).double(),
        nn.InstanceNorm2d(4, EPS, affine=True, track_running_stats=True).double().eval(),
        lambda x: F.instance_norm(x, BETA, GAMMA.square(), None, BETA, use_input_stats=False),
    ),
    F.rms_norm: (
        lambda x: F.rms_norm(x, (4, 2, 3), IMAGE_GAMMA, EPS),
        lambda x: F.rms_norm(x, [3]),
        nn.RMSNorm((2, 3), EPS).double(),
    ),
    torch.rms_norm: (lambda x: torch.rms_norm(x, (2, 3), IMAGE_GAMMA[0], EPS),),
    F.normalize: (lambda x: F.normalize(x), lambda x: F.normalize(x, dim=-1), lambda x: F.normalize(x, 2.0, 2)),
    F.batch_norm: (
        lambda x: F.batch_norm(x, BETA, GAMMA.square(), GAMMA, BETA, eps=EPS),
        nn.BatchNorm2d(4, EPS).double().eval(),
    ),
}
CASES = [pytest.param(f, id=f"{k.__module__}.{k.__name__}-{i}") for k, v in NORMS.items() for i, f in enumerate(v)]


@pytest.mark.parametrize("f", CASES)
def test_a_small_variance_is_the_delta_method(f):
    """J diag(σ²) Jᵀ with torch's Jacobian."""
    x = gaussian(2, 4, 2, 3, noise=1e-5)
    found = moments_of(f(x))
    jacobian = torch.autograd.functional.jacobian(f, x._mean).reshape(48, 48)
    expected = (jacobian.square() @ x._var.flatten()).reshape(x.shape)
    torch.testing.assert_close(found.var, expected.detach(), rtol=1e-6, atol=1e-18)
    torch.testing.assert_close(found.mean, f(x._mean), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("f", CASES)
def test_a_small_variance_against_monte_carlo(f):
    x = gaussian(1, 4, 2, 3, noise=0.02)
    found = moments_of(f(x))
    mean, var, mean_error, var_error = drawn(f, [moments_of(x)], draws=4000)
    assert_within(found.mean, mean, mean_error + 1e-4)  # second-order terms, at σ²/n = 10⁻⁴
    assert_within(found.var, var, var_error)


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_large_groups_with_large_noise(noise):
    """Statistics of the means alone would leave the variance 1 + σ² times too large."""

    def f(z: Tensor) -> Tensor:
        return F.group_norm(z, 2)

    x = gaussian(1, 8, 16, 8, noise=noise)  # 512 entries per group
    found = moments_of(f(x))
    mean, var, mean_error, var_error = drawn(f, [moments_of(x)], draws=4000)
    assert_within(found.mean, mean, mean_error)
    assert_within(found.var, var, var_error)
    assert found.var.mean().item() == pytest.approx(var.mean().item(), rel=0.01)
    torch.testing.assert_close(
        found.mean.square().mean() + found.var.mean(), torch.ones((), dtype=torch.float64), rtol=5e-3, atol=0
    )


@given(st.integers(1, 9), st.floats(0, 4), st.integers(0, 99))
def test_the_square_of_the_jacobian_multiplied_out(n, noise, seed):
    x = gaussian(3, n, noise=noise, seed=seed)
    mean, var = moments_of(x)
    found = normalised(mean, var, EPS)
    spread = mean.var(-1, correction=0) + var.mean(-1) * (n - 1) / n + EPS
    z = (mean - mean.mean(-1, keepdim=True)) / spread.sqrt()[:, None]
    jacobian = torch.eye(n, dtype=torch.float64) - (1 + z[:, :, None] * z[:, None, :]) / n
    expected = (jacobian.square() @ var[:, :, None])[..., 0] / spread[:, None]
    torch.testing.assert_close(found.mean, z)
    torch.testing.assert_close(found.var, expected, rtol=1e-7, atol=1e-12)


def test_the_variance_of_a_group_is_exact_in_expectation():
    """E of the population variance of independent entries, against Monte Carlo; s² is what z was divided by."""
    x = gaussian(1, 5, noise=1.0)
    z = moments_of(F.layer_norm(x, (5,), eps=0.0)).mean
    spread = ((x._mean - x._mean.mean()) / z).square().mean()[None]
    mean, _, error, _ = drawn(lambda v: v.var(-1, correction=0), [moments_of(x)], draws=100_000)
    assert_within(spread, mean, error)


@given(st.floats(-5, 5), st.floats(0.1, 10), st.integers(0, 99))
def test_norms_ignore_shift_and_scale_of_the_input(shift, scale, seed):
    x = gaussian(2, 6, noise=0.5, seed=seed)
    found = moments_of(F.layer_norm(x * scale + shift, (6,), eps=0.0))
    expected = moments_of(F.layer_norm(x, (6,), eps=0.0))
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.var, expected.var)


# ---- in a network ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.cond = nn.Linear(4, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.cond(e)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class TinyUNet(nn.Module):
    """Every operation of an image network once: 1×8×8 images of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.label, self.time = nn.Embedding(3, 4), nn.Linear(1, 4)
        self.first = nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular")
        self.down, self.shrink = Block(4, 4), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.middle, self.up = Block(4, 4), Block(8, 4)
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        e = F.silu(self.time(t[:, None]) + self.label(y))
        kept = self.down(self.first(x), e)
        h = self.middle(self.shrink(kept), e)
        h = torch.cat([F.interpolate(h, scale_factor=2.0, mode="nearest"), kept], 1)
        return self.out(F.silu(self.norm(self.up(h, e))))


def unet_field(**options: Any) -> Field:
    torch.manual_seed(0)
    return awaken(attach(TinyUNet(), space=(1, 8, 8), width=8, **options)).double()


def inputs() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return plain(3, 1, 8, 8), torch.rand(3, dtype=torch.float64), {"y": torch.tensor([0, 2, 1])}


@pytest.mark.parametrize("closure", CLOSURES)
def test_a_unet_runs_under_the_diagonal_estimator(closure):
    field = unet_field(initial_log_alpha=-10.0)
    x, t, cond = inputs()
    found, first_order = field.moments(x, t, Diagonal(closure), cond=cond), field.moments(x, t, cond=cond)
    torch.testing.assert_close(found.mean, field(x, t, **cond), rtol=1e-3, atol=1e-3)
    assert bool((found.var > 0).all())
    # Skip connections and norms correlate activations, which this estimator ignores: close, not equal.
    ratio = found.var.sum() / first_order.var.sum()
    assert 0.3 < ratio.item() < 3
