"""The closed-form KL against torch.distributions, and the annealing schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from fmwc.errors import UsageError
from fmwc.noise import cyclic, divergence_from_prior, kl

rates = st.floats(0.01, 0.99)
logs = st.floats(-10, 4)


@given(logs, rates, st.floats(-3, 3).filter(lambda w: abs(w) > 1e-3))
def test_kl_is_that_of_the_gaussians_whatever_the_weight(log_alpha, rate, theta):
    theta = torch.tensor(theta, dtype=torch.float64)
    alpha = torch.tensor(log_alpha, dtype=torch.float64)
    r = rate / (1 - rate)
    expected = kl_divergence(
        Normal(theta, (alpha.exp() * theta.square()).sqrt()), Normal(torch.zeros_like(theta), (r * theta**2).sqrt())
    )
    torch.testing.assert_close(divergence_from_prior(alpha, rate), expected, rtol=1e-6, atol=1e-6)


@given(logs, rates)
def test_kl_by_the_numbers(log_alpha, rate):
    """∫ q log(q/p), with θ = 1, on a fine grid."""
    a, r = torch.tensor(log_alpha, dtype=torch.float64).exp(), rate / (1 - rate)
    q = Normal(torch.ones((), dtype=torch.float64), a.sqrt())
    z = 1 + a.sqrt() * torch.linspace(-10, 10, 40_001, dtype=torch.float64)
    log_q, log_p = q.log_prob(z), Normal(torch.zeros_like(a), torch.full_like(a, r).sqrt()).log_prob(z)
    expected = torch.trapezoid(log_q.exp() * (log_q - log_p), z)
    torch.testing.assert_close(divergence_from_prior(a.log(), rate), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.8])
def test_kl_is_minimal_at_the_prior_ratio(rate):
    log_alpha = torch.linspace(-8, 4, 12_001, dtype=torch.float64)
    best = log_alpha[divergence_from_prior(log_alpha, rate).argmin()]
    assert best.exp().item() == pytest.approx(rate / (1 - rate), rel=2e-3)


def test_the_papers_factor():
    a = torch.tensor([-1.0, 0.5])
    torch.testing.assert_close(divergence_from_prior(a, 0.3, factor=1.0), 2 * divergence_from_prior(a, 0.3))


def test_mean_over_batch_and_channels_sum_over_layers():
    layers = [torch.randn(4, 3), torch.randn(4, 7, 1, 1)]
    expected = sum(divergence_from_prior(a, 0.3).mean() for a in layers)
    torch.testing.assert_close(kl(layers, 0.3), expected)


def test_unused_rows_do_not_count_in_the_mean():
    """Two samples of three rows and one row, and two rows of arbitrary padding."""
    owner = torch.tensor([0, 0, 0, 1, 2, 2])
    pairs, cells = torch.randn(6, 3), torch.randn(2, 5)
    pairs[4:] = 50.0
    expected = divergence_from_prior(pairs[:4], 0.3).mean() + divergence_from_prior(cells, 0.3).mean()
    torch.testing.assert_close(kl([pairs, cells], 0.3, owners=[owner, None], count=2), expected)
    every = divergence_from_prior(pairs, 0.3).mean() + divergence_from_prior(cells, 0.3).mean()
    torch.testing.assert_close(kl([pairs, cells], 0.3, owners=[None, None], count=2), every)
    assert not torch.allclose(every, expected)


def test_rows_of_more_dimensions_and_layers_of_padding_alone():
    owner = torch.tensor([1, 0, 2])
    spatial = torch.randn(3, 4, 1, 1)
    found = kl([spatial], 0.3, factor=1.0, owners=[owner], count=2)
    torch.testing.assert_close(found, divergence_from_prior(spatial[:2], 0.3, factor=1.0).mean())
    nothing = torch.randn(2, 4, requires_grad=True)
    found = kl([nothing], 0.3, owners=[torch.tensor([2, 2])], count=2)
    assert found.item() == 0  # without rows, the divergence is 0, not 0/0
    found.backward()
    assert not nothing.grad.any()


def test_kl_takes_one_owner_per_layer():
    with pytest.raises(ValueError, match="zip"):
        kl([torch.zeros(2, 1), torch.zeros(2, 1)], 0.3, owners=[None], count=2)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan")])
def test_the_prior_rate_is_a_rate(rate):
    with pytest.raises(UsageError, match="strictly between 0 and 1"):
        divergence_from_prior(torch.zeros(1), rate)


@given(st.integers(1, 6), st.sampled_from([0.1, 0.25, 1.0]), st.integers(1, 50))
def test_annealing_ramps_and_holds_in_every_cycle(cycles, warmup, length):
    total = cycles * length * 4
    shares = [cyclic(s, total, cycles, warmup) for s in range(total)]
    cycle = total // cycles
    for s, share in enumerate(shares):
        assert share == pytest.approx(min((s % cycle) / cycle / warmup, 1.0), abs=1e-9)
    assert shares[0] == 0
    assert all(shares[k * cycle] == pytest.approx(0, abs=1e-9) for k in range(cycles))


def test_no_warm_up_is_full_weight_from_the_start():
    assert [cyclic(s, 10, 1, 0.0) for s in range(10)] == [1.0] * 10
