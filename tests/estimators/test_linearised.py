"""The linearised estimators against the full Jacobian ∂v/∂ε in float64."""

import pytest
import torch

from fmwc.errors import UsageError
from fmwc.estimators import Linearised, MonteCarlo, Tangent
from fmwc.field import attach
from tests.conftest import conv_field, dict_field, mlp_field
from tests.reference import assert_within, jacobian_moments, jacobian_var, statistics

BUILDS = {"mlp": mlp_field, "conv": conv_field}
BUILDS |= {"conv, overwritten in place": lambda **o: conv_field(inplace=True, **o)}
OPTIONS = {"every layer": {}, "output only": {"include": ["out"]}}


def inputs(field, count=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shape = field.space.channels["x"].shape
    return (
        torch.randn(count, *shape, generator=generator, dtype=torch.float64).to(dtype),
        torch.rand(count, generator=generator, dtype=torch.float64).to(dtype),
    )


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BUILDS)
def test_exact_variance_equals_the_whole_jacobian(name, options, frozen):
    field = BUILDS[name](**OPTIONS[options]).double()
    field.network.requires_grad_(not frozen)
    x, t = inputs(field)
    mean, var = jacobian_moments(field, x, t)
    found = field.moments(x, t, Linearised())
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=0)
    torch.testing.assert_close(found.var, var, rtol=1e-9, atol=1e-14)
    assert float(var.min()) > 0


@pytest.mark.parametrize("name", BUILDS)
def test_random_signs_converge_to_the_mean_over_coordinates(name):
    field = BUILDS[name]().double()
    x, t = inputs(field)
    count = 400
    found = torch.stack([field.moments(x, t, Linearised(1), seed=s).var for s in range(count)])
    assert found.shape[1:] == (3, *[1] * (x.ndim - 1))
    exact = field.moments(x, t).var.flatten(1).mean(1)
    mean, _, error, _ = statistics(found.flatten(1))
    assert_within(mean, exact, error)
    assert float((error / exact).max()) < 0.1  # tight enough to detect a wrong factor
    together = field.moments(x, t, Linearised(400), seed=0).var.flatten()
    assert_within(together, exact, error)


@pytest.mark.parametrize("name", BUILDS)
def test_tangents_converge_to_every_coordinate(name):
    field = BUILDS[name]().double()
    x, t = inputs(field)
    count = 400
    found = torch.stack([field.moments(x, t, "tangent", seed=s).var for s in range(count)])
    exact = field.moments(x, t).var
    mean, _, error, _ = statistics(found)
    assert_within(mean, exact, error)
    assert float((error / exact).max()) < 0.15
    together = field.moments(x, t, Tangent(count), seed=0).var
    assert_within(together, exact, error * 1.5)


@pytest.mark.parametrize("name", BUILDS)
def test_monte_carlo_converges_to_linearised_for_small_alpha(name):
    field = BUILDS[name](initial_log_alpha=-7.0).double()
    for layer in field.noise.layers:  # every α small, whatever the input
        layer.inference.out.weight.data.zero_()
    x, t = inputs(field)
    draws = 4000
    found = field.moments(x, t, MonteCarlo(draws), seed=0)
    exact = field.moments(x, t)
    # The sample variance of a Gaussian has relative error √(2/k); second-order terms in α are below 3 % here.
    assert float((found.var / exact.var - 1).abs().max()) < 6 * (2 / draws) ** 0.5 + 0.03
    assert_within(found.mean, exact.mean, (exact.var / draws).sqrt() + 0.03 * exact.var.sqrt())


ESTIMATORS = {"exact": Linearised(), "signs": Linearised(2), "tangent": Tangent(2)}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", BUILDS)
def test_the_mean_is_the_plain_output_bit_for_bit(name, estimator):
    field = BUILDS[name]()
    x, t = inputs(field, 7, torch.float32)
    assert ESTIMATORS[estimator].plain_mean
    found = field.moments(x, t, ESTIMATORS[estimator], seed=0)
    assert torch.equal(found.mean, field(x, t))
    assert not found.mean.requires_grad
    assert not found.var.requires_grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", BUILDS)
def test_inference_mode_does_not_change_results(name, estimator):
    """Tensors created in inference mode, such as the time and the state, have no derivatives."""
    field = BUILDS[name]()
    x, t = inputs(field, 3, torch.float32)
    expected = field.moments(x, t, ESTIMATORS[estimator], seed=0)
    for born_outside in (True, False):
        with torch.inference_mode():
            here = (x, t) if born_outside else (x + 0, t + 0)
            found = field.moments(*here, ESTIMATORS[estimator], seed=0)
        torch.testing.assert_close(found.var, expected.var)
        assert torch.equal(found.mean, expected.mean)
    with torch.no_grad():
        torch.testing.assert_close(field.moments(x, t, ESTIMATORS[estimator], seed=0).var, expected.var)


def test_conditions_born_in_inference_mode():
    class Conditional(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(2, 4), torch.nn.Linear(3, 4)
            self.out = torch.nn.Linear(4, 2)

        def forward(self, x, t, label):
            return self.out(torch.tanh(self.a(x) + self.b(label)))

    field = attach(Conditional(), space=(2,))
    x, label = torch.randn(3, 2), torch.randn(3, 3)
    expected = field.moments(x, 0.5, cond={"label": label}).var
    with torch.inference_mode():
        torch.testing.assert_close(field.moments(x, 0.5, cond={"label": label + 0}).var, expected)


def test_user_gradients_are_not_changed(mlp):
    x, t = inputs(mlp, 3, torch.float32)
    mlp.moments(x, t)
    assert all(p.grad is None for p in mlp.parameters())
    x.requires_grad_()
    mlp.moments(x, t)
    assert x.grad is None


def test_channels_of_a_product_against_the_jacobian():
    field = dict_field().double()
    x = {"place": torch.rand(3, 2, dtype=torch.float64), "shape": torch.randn(3, 3, dtype=torch.float64)}
    t = torch.rand(3, dtype=torch.float64)
    found = field.moments(x, t)
    var, _ = jacobian_var(lambda given: torch.cat(list(field.run(given, x, t).values()), 1))
    torch.testing.assert_close(torch.cat([found.var["place"], found.var["shape"]], 1), var)
    rough = field.moments(x, t, Linearised(2000), seed=0).var
    assert rough["place"].shape == (3, 1)
    torch.testing.assert_close(rough["place"][:, 0], found.var["place"].mean(1), rtol=0.2, atol=0)
    torch.testing.assert_close(rough["shape"][:, 0], found.var["shape"].mean(1), rtol=0.2, atol=0)


def test_noise_that_does_not_reach_the_output_has_no_variance():
    class Idle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.idle = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x, t):
            self.idle(x)
            return self.a(x)

    field = attach(Idle(), include=["idle"], space=(2,))
    for estimator in ("linearised", "diagonal", "tangent", "monte_carlo", Linearised(1)):
        assert not field.moments(torch.randn(3, 2), 0.5, estimator, seed=0).var.any()


def test_refusals(mlp):
    with pytest.raises(UsageError, match="at least 1"):
        Linearised(0)
    with pytest.raises(UsageError, match="at least 1"):
        mlp.moments(torch.zeros(1, 2), 0.5, Tangent(0))
