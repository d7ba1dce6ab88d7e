"""The divergence: the trace of a linear field, and estimates that converge to it."""

import pytest
import torch

from experiments.common.evaluation import agreement, along
from fmwc.metrics.divergence import PROBES, divergence, estimates
from fmwc.sampling import SamplingConfig, sample
from tests.conftest import conv_field
from tests.reference import assert_within, statistics

A = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def linear(x, t):
    return (x.flatten(1) @ A.T).reshape(x.shape) * t.reshape(-1, *[1] * (x.ndim - 1))


def test_exact_divergence_equals_the_trace_of_a_network():
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


def product_state(count=3):
    generator = torch.Generator().manual_seed(1)
    x = {n: torch.rand(count, d, dtype=torch.float64, generator=generator) for n, d in (("place", 2), ("shape", 3))}
    return x, torch.rand(count, dtype=torch.float64, generator=generator)


def jacobian(field, x, t, i):  # -> (5, 5)
    """∂v/∂x of one sample, with its channels concatenated."""

    def flat(z):
        v = field.network({"place": z[None, :2], "shape": z[None, 2:]}, t[i : i + 1])
        return torch.cat([v["place"][0], v["shape"][0]])

    return torch.func.jacrev(flat)(torch.cat([x["place"][i], x["shape"][i]])).detach()


def test_of_channels_it_is_the_trace_of_the_whole_jacobian(product):
    field = product.double()
    x, t = product_state()
    found = divergence(field, x, t)
    for i in range(3):
        whole = jacobian(field, x, t, i)
        assert whole[:2, 2:].abs().min() > 0  # channels depend on one another, which the trace does not include
        torch.testing.assert_close(found[i], whole.trace())


@pytest.mark.parametrize("distribution", PROBES)
def test_estimates_are_of_single_probes_and_their_mean_is_the_divergence(distribution, product):
    field = product.double()
    x, t = product_state()
    single = estimates(field, x, t, 600, distribution=distribution, seed=0)
    assert single.shape == (600, 3)
    mean, _, error, _ = statistics(single)
    assert_within(mean, divergence(field, x, t), error)
    # The spread of one probe, by hand: 2 Σ S² for normal w, and without the diagonal for signs (S: symmetric part).
    for i in range(3):
        s = (whole := jacobian(field, x, t, i)) / 2 + whole.T / 2
        variance = 2 * (s.square().sum() - (s.diagonal().square().sum() if distribution == "rademacher" else 0))
        assert float(single[:, i].var() / variance) == pytest.approx(1, abs=0.3)
    few = divergence(field, x, t, 5, distribution=distribution, seed=0)
    torch.testing.assert_close(few, single[:5].mean(0))  # fewer probes are a prefix of more probes


def test_rademacher_is_exact_for_a_diagonal_field():
    x, t = torch.randn(3, 4), torch.ones(3)
    found = divergence(lambda x, t: x * torch.tensor([1.0, -2.0, 3.0, 0.5]), x, t, 1, seed=0)
    torch.testing.assert_close(found, torch.full((3,), 2.5))


def test_along_a_run(mlp):
    run = sample(mlp, 3, steps=4, config=SamplingConfig(keep_states=True))
    found = along(mlp, run.states, run.grid)
    assert found.shape == (4, 3)
    for n in range(4):
        torch.testing.assert_close(found[n], divergence(mlp, run.states[n], run.grid[n]))


def test_agreement_by_hand():
    var = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    divergence = torch.tensor([[-1.0, 2.0, -3.0], [6.0, -4.0, 2.0]])
    found = agreement(var, divergence)
    assert found.pearson_step == pytest.approx(0, abs=1e-12)  # 1 and −1
    assert found.pearson_step_std == pytest.approx(1)
    var = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    divergence = torch.tensor([[-1.0, 2.0, -3.0], [0.0, 1.0, 2.0]])
    assert agreement(var, divergence).spearman == pytest.approx(1)  # of (1, 2, 4) and (1, 3, 5)
