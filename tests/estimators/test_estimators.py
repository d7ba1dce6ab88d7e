"""Properties of every estimator, and the Monte Carlo reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fmwc.errors import UnknownNameError, UsageError
from fmwc.estimators import ESTIMATORS, MonteCarlo, as_estimator
from fmwc.field import attach
from fmwc.networks import MLP
from fmwc.noise import NoisyLayer
from tests.conftest import awaken, mlp_field

EXACT = ("diagonal", "linearised")  # deterministic estimators


class Scaled(nn.Module):
    def __init__(self, network, c):
        super().__init__()
        self.inner, self.c = network, c

    def forward(self, x, t):
        return self.inner(x, t) * self.c


def build(hidden, depth, seed, c=1.0):
    torch.manual_seed(seed)
    return awaken(attach(Scaled(MLP(2, hidden, depth, 4), c), space=(2,), width=4), seed=seed)


sizes = {"hidden": st.integers(1, 12), "depth": st.integers(1, 3), "seed": st.integers(0, 99)}


def inputs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, generator=generator), torch.rand(count, generator=generator)


@pytest.mark.parametrize("name", ESTIMATORS)
@given(**sizes)
def test_variance_is_never_negative_and_has_the_shape_of_the_velocity(name, hidden, depth, seed):
    x, t = inputs(4, seed)
    mean, var = build(hidden, depth, seed).moments(x, t, name, seed=seed)
    assert mean.shape == var.shape == x.shape
    assert bool((var >= 0).all())
    assert bool(torch.isfinite(var).all())


@pytest.mark.parametrize("name", ESTIMATORS)
@given(c=st.floats(-4, 4), **sizes)
def test_scaling_the_output_scales_the_variance_by_the_square(name, c, hidden, depth, seed):
    x, t = inputs(3, seed)
    plain = build(hidden, depth, seed).moments(x, t, name, seed=0)
    scaled = build(hidden, depth, seed, c).moments(x, t, name, seed=0)
    torch.testing.assert_close(scaled.var, plain.var * c**2, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(scaled.mean, plain.mean * c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EXACT)
@given(order=st.permutations(range(5)), **sizes)
def test_the_order_of_the_batch_does_not_matter(name, order, hidden, depth, seed):
    x, t = inputs(5, seed)
    field = build(hidden, depth, seed)
    found, moved = field.moments(x, t, name), field.moments(x[order], t[order], name)
    torch.testing.assert_close(moved.var, found.var[order])
    torch.testing.assert_close(moved.mean, found.mean[order])


@pytest.mark.parametrize("name", EXACT)
def test_samples_do_not_depend_on_the_batch(name, mlp):
    x, t = inputs(5, 0)
    whole = mlp.moments(x, t, name).var
    apart = torch.cat([mlp.moments(x[i : i + 1], t[i : i + 1], name).var for i in range(5)])
    torch.testing.assert_close(whole, apart)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_noise_gives_the_plain_network(name, mlp, monkeypatch):
    monkeypatch.setattr(NoisyLayer, "log_alpha", lambda self, h: torch.full_like(h, -torch.inf))
    x, t = inputs(5, 0)
    found = mlp.moments(x, t, name, seed=0)
    torch.testing.assert_close(found.mean, mlp(x, t))
    assert float(found.var.max()) < 1e-12
    torch.testing.assert_close(mlp.draw(x, t, seed=0), mlp(x, t))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_more_noise_is_more_variance(name):
    x, t = inputs(5, 0)
    small = mlp_field(initial_log_alpha=-6.0).moments(x, t, name, seed=0).var
    large = mlp_field(initial_log_alpha=-2.0).moments(x, t, name, seed=0).var
    assert bool((large.sum(1) > small.sum(1)).all())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_results_depend_only_on_the_seed(name, mlp):
    x, t = inputs(5, 0)
    state = torch.get_rng_state()
    assert torch.equal(mlp.moments(x, t, name, seed=1).var, mlp.moments(x, t, name, seed=1).var)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(mlp.moments(x, t, name, seed=1).var, mlp.moments(x, t, name, seed=2).var) == (name in EXACT)


def test_estimators_are_found_by_name():
    assert set(ESTIMATORS) == {"diagonal", "linearised", "tangent", "monte_carlo"}
    for name, estimator in ESTIMATORS.items():
        assert as_estimator(name) is estimator
        assert as_estimator(estimator) is estimator
    with pytest.raises(UnknownNameError, match="did you mean 'linearised'"):
        as_estimator("linearized")


def test_monte_carlo_is_mean_and_unbiased_variance_of_its_draws(mlp):
    x, t = inputs(4, 0)
    found = mlp.moments(x, t, MonteCarlo(7), seed=3)
    generator = torch.Generator().manual_seed(3)
    draws = torch.stack([mlp.draw(x, t, seed=generator) for _ in range(7)])
    torch.testing.assert_close(found.mean, draws.mean(0))
    torch.testing.assert_close(found.var, draws.var(0))


def test_monte_carlo_takes_two_draws():
    with pytest.raises(UsageError, match="at least 2 draws"):
        MonteCarlo(1)
