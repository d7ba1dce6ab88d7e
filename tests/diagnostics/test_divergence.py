"""The divergence: the trace of a linear field, and estimates that converge to it."""

import pytest
import torch

from fmwc.diagnostics import divergence
from fmwc.diagnostics.divergence import PROBES, along
from fmwc.errors import UnknownNameError, UsageError
from fmwc.sampling import sample
from tests.conftest import conv_field
from tests.reference import assert_within, statistics

A = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def linear(x, t):
    return (x.flatten(1) @ A.T).reshape(x.shape) * t.reshape(-1, *[1] * (x.ndim - 1))


@pytest.mark.parametrize("shape", [(4,), (1, 2, 2)])
def test_exact_is_the_trace(shape):
    t = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    found = divergence(linear, torch.randn(3, *shape, dtype=torch.float64), t)
    torch.testing.assert_close(found, A.trace() * t)


def test_exact_is_the_trace_of_the_jacobian_of_a_network():
    field = conv_field().double()
    x, t = torch.randn(2, 1, 4, 4, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    for i in range(2):
        jacobian = torch.func.jacrev(lambda z, i=i: field.network(z[None], t[i : i + 1])[0])(x[i])
        expected = jacobian.reshape(16, 16).trace()
        torch.testing.assert_close(divergence(field, x, t)[i], expected.detach())


@pytest.mark.parametrize("distribution", PROBES)
@pytest.mark.parametrize("shape", [(4,), (1, 2, 2)])
def test_hutchinson_converges_whatever_the_shape(distribution, shape):
    x, t = torch.randn(2, *shape, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    single = torch.stack([divergence(linear, x, t, 1, distribution=distribution, seed=s) for s in range(800)])
    mean, _, error, _ = statistics(single)
    assert_within(mean, A.trace().expand(2), error)
    together = divergence(linear, x, t, 800, distribution=distribution, seed=0)
    assert_within(together, A.trace().expand(2), error)
    assert float(error.max()) < 0.3


def test_every_distribution_has_unit_covariance():
    assert set(PROBES) == {"rademacher", "gaussian"}


def test_rademacher_is_exact_for_a_diagonal_field():
    x, t = torch.randn(3, 4), torch.ones(3)
    found = divergence(lambda x, t: x * torch.tensor([1.0, -2.0, 3.0, 0.5]), x, t, 1, seed=0)
    torch.testing.assert_close(found, torch.full((3,), 2.5))


def test_seeds_and_gradients(mlp):
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(divergence(mlp, x, t, 2, seed=1), divergence(mlp, x, t, 2, seed=1))
    assert not torch.equal(divergence(mlp, x, t, 2, seed=1), divergence(mlp, x, t, 2, seed=2))
    with torch.no_grad():
        divergence(mlp, x, t)
    assert all(p.grad is None for p in mlp.parameters())
    assert not x.requires_grad


def test_along_a_run(mlp):
    run = sample(mlp, 3, steps=4, keep_states=True)
    found = along(mlp, run.states, run.grid)
    assert found.shape == (4, 3)
    for n in range(4):
        torch.testing.assert_close(found[n], divergence(mlp, run.states[n], run.grid[n]))


def test_refusals():
    with pytest.raises(UsageError, match="at least 1"):
        divergence(linear, torch.zeros(1, 4), torch.ones(1), 0)
    with pytest.raises(UnknownNameError, match="did you mean 'gaussian'"):
        divergence(linear, torch.zeros(1, 4), torch.ones(1), 1, distribution="gauss")
