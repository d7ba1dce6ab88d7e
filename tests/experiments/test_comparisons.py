"""Scores of other papers against closed forms: linear fields, Gaussian data, and a known variance."""

import pytest
import torch
from torch import nn

from experiments.common.comparisons import (
    HeteroscedasticHead,
    PosteriorTrace,
    StateSensitivity,
    nll,
)
from fmwc.flow import euclidean, path_sample
from fmwc.randomness import Stream
from tests.reference import assert_within, statistics

A = torch.tensor([[0.3, -1.1], [0.7, 0.4]], dtype=torch.float64)


class Labelled(nn.Module):
    """A velocity network for 1×8×8 images of three classes."""

    def __init__(self, outputs=1):
        super().__init__()
        self.first, self.act, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, outputs, 3, padding=1)
        self.label = nn.Embedding(3, 4)

    def forward(self, x, t, y):
        return self.out(self.act(self.first(x) + self.label(y)[:, :, None, None] + t[:, None, None, None]))


def read(estimator, field, x, t, randomness=None, **cond):
    return estimator(field, x, t, cond, randomness)


# ---- state sensitivity ----------------------------------------------------------------------------------------------


def test_state_sensitivity_of_a_linear_field_is_its_frobenius_norm():
    x, t = torch.randn(3, 2, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    mean, var = read(StateSensitivity(), lambda x, t: x @ A.T, x, t)
    torch.testing.assert_close(mean, x @ A.T)
    # scaled as a mean over two coordinates, so that the norm of the deviation is ‖A‖_F
    torch.testing.assert_close(var * 2, A.square().sum().expand(3, 1))


# ---- random probes --------------------------------------------------------------------------------------------------

SCORES = (StateSensitivity, PosteriorTrace)


@pytest.mark.parametrize("score", SCORES)
def test_random_probes_converge_to_the_exact_reading_of_an_image(score):
    net = Labelled().double()
    x, t = torch.randn(3, 1, 8, 8, dtype=torch.float64), torch.tensor([0.3, 0.5, 0.8], dtype=torch.float64)
    y = torch.tensor([0, 2, 1])
    exact = read(score(), net, x, t, y=y)
    many = 500
    repeated = [v.repeat(many, *[1] * (v.ndim - 1)) for v in (x, t)]
    single = read(score(probes=1), net, *repeated, Stream(torch.Generator().manual_seed(0)), y=y.repeat(many))
    assert single.var.shape == (3 * many, 1, 1, 1)
    mean, _, error, _ = statistics(single.var.reshape(many, 3))
    assert_within(mean, exact.var.flatten(), error)
    assert float((error / mean).max()) < 0.05
    together = read(score(probes=many), net, x, t, Stream(torch.Generator().manual_seed(1)), y=y)
    assert_within(together.var.flatten(), exact.var.flatten(), error)
    torch.testing.assert_close(together.mean, exact.mean)
    other = read(score(), net, x, t, y=y.flip(0))
    assert not torch.allclose(other.var, exact.var)


# ---- posterior trace ------------------------------------------------------------------------------------------------


def optimal(s):
    """For x1 ~ N(0, s²) the optimal velocity is linear: E[x1 | x_t] = t s² x / (t² s² + (1 − t)²)."""

    def velocity(x, t):
        t = t[:, None]
        return (t * s**2 / (t**2 * s**2 + (1 - t) ** 2) * x - x) / (1 - t)

    return velocity


@pytest.mark.parametrize("s", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dim", [1, 3])
def test_posterior_trace_of_gaussian_data(s, dim):
    t = torch.tensor([0.05, 0.3, 0.5, 0.9, 0.99], dtype=torch.float64)
    x = torch.randn(5, dim, dtype=torch.float64)
    _, var = read(PosteriorTrace(), optimal(s), x, t)
    expected = s**2 * (1 - t) ** 2 / (t**2 * s**2 + (1 - t) ** 2)  # Cov[x1 | x_t], per coordinate
    torch.testing.assert_close(var[:, 0], expected)


def test_posterior_trace_at_the_ends_and_where_it_would_be_negative():
    x = torch.randn(3, 2)
    _, at_zero = read(PosteriorTrace(), optimal(2.0), x, torch.zeros(3))
    assert torch.isfinite(at_zero).all()
    assert at_zero.unique().numel() == 1
    _, negative = read(PosteriorTrace(), lambda x, t: -100 * x, x, torch.full((3,), 0.5))
    assert not negative.any()


# ---- two heads ------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Return the optimal velocity for standard normal data, and a constant log variance."""

    def __init__(self, log_var):
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor(log_var))

    def forward(self, x, t):
        return torch.cat([optimal(1.0)(x, t), self.log_var.expand_as(x)], -1)


def test_likelihood_is_best_at_the_true_variance():
    """For a fixed velocity, ½[e²/σ² + log σ²] is minimal at σ² = E[e²]."""
    space, x1 = euclidean((2,)), torch.randn(4000, 2)
    t, x_t, u_t = path_sample(space, x1, Stream(torch.Generator().manual_seed(0)))
    error = (optimal(1.0)(x_t, t) - u_t).square().mean()

    def loss(log_var):
        return nll(HeteroscedasticHead(Fixed(log_var)), space, x1, Stream(torch.Generator().manual_seed(0)))

    best = loss(error.log().item())
    assert best.item() == pytest.approx((1 + error.log().item()) / 2, rel=1e-5)
    for shift in (-0.2, -0.01, 0.01, 0.2):
        assert loss(error.log().item() + shift) > best
    head = HeteroscedasticHead(Fixed(error.log().item()))
    nll(head, space, x1, Stream(torch.Generator().manual_seed(0))).backward()
    assert abs(head.network.log_var.grad.item()) < 1e-4
