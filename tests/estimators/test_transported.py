"""Transport through the ODE against an explicit recursion and the Jacobian of the whole run."""

import pytest
import torch
from torch import nn

from fmwc.errors import UsageError
from fmwc.estimators import Transport
from fmwc.field import attach
from fmwc.sampling import STEPPERS, SamplingConfig, sample
from tests.conftest import conv_field, dict_field, mlp_field
from tests.reference import assert_within, integrate, jacobian_var, statistics

A = torch.tensor([[0.3, -1.1], [0.7, 0.4]], dtype=torch.float64)
LOG_ALPHA = -2.0


class Line(nn.Module):
    """v = A x."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        self.layer.weight.data = A.clone()

    def forward(self, x, t):
        return self.layer(x)


def line():
    return attach(Line(), space=(2,), initial_log_alpha=LOG_ALPHA)


def x0(count=3):
    return torch.randn(count, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_a_linear_field_against_the_covariance_recursion():
    """P ← (1 + dt A) P (1 + dt A)ᵀ + dt² diag(A²(α x²)), x ← (1 + dt A) x."""
    steps, alpha = 6, torch.tensor(LOG_ALPHA, dtype=torch.float64).exp()
    found = sample(line(), x0=x0(), steps=steps, transport=True).transported
    step = torch.eye(2, dtype=torch.float64) + A / steps
    for i, x in enumerate(x0()):
        covariance = torch.zeros(2, 2, dtype=torch.float64)
        for _ in range(steps):
            fresh = torch.diag(A.square() @ (alpha * x.square())) / steps**2
            covariance = step @ covariance @ step.T + fresh
            x = step @ x
        torch.testing.assert_close(found.var[i], covariance.diagonal())


def test_profile_is_the_contribution_of_each_step():
    """Noise of step n is propagated by the later steps: (1 + dt A)^(N−n−1)."""
    steps, alpha = 5, torch.tensor(LOG_ALPHA, dtype=torch.float64).exp()
    run = sample(line(), x0=x0(), steps=steps, transport=True)
    step = torch.eye(2, dtype=torch.float64) + A / steps
    assert run.transported.profile.shape == (steps, 1, 3)
    for i, x in enumerate(x0()):
        for n in range(steps):
            fresh = torch.diag(A.square() @ (alpha * x.square())) / steps**2
            ahead = torch.linalg.matrix_power(step, steps - n - 1)
            expected = (ahead @ fresh @ ahead.T).trace()
            torch.testing.assert_close(run.transported.profile[n, 0, i], expected)
            x = step @ x


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("build", [mlp_field, conv_field], ids=["mlp", "conv"])
def test_against_the_jacobian_of_the_whole_run(build, stepper):
    field = build().double()
    shape, steps = field.space.channels["x"].shape, 3
    start = torch.randn(2, *shape, dtype=torch.float64)
    times = [n / steps for n in range(steps + 1)]

    def end(given):
        return integrate(
            lambda x, t: field.run(given, x, torch.full((2,), t, dtype=torch.float64)), start, times, stepper
        )

    var, calls = jacobian_var(end)
    found = sample(field, x0=start, steps=steps, transport=True, config=SamplingConfig(stepper=stepper)).transported
    torch.testing.assert_close(found.var, var.reshape(2, -1), rtol=1e-6, atol=1e-12)
    # calls: for each step, for each evaluation, for each layer
    profile = calls.reshape(steps, STEPPERS[stepper].evaluations, len(field.noise.names), 2).sum(1)
    torch.testing.assert_close(found.profile, profile, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("evaluations", [3, 4])
def test_the_profile_adds_up_to_the_variance(stepper, evaluations, mlp):
    run = sample(mlp, 5, transport=True, config=SamplingConfig(evaluations=evaluations, stepper=stepper))
    found = run.transported
    assert found.profile.shape == (len(run.grid) - 1, 3, 5)
    torch.testing.assert_close(found.profile.sum((0, 1)), found.var.sum(1))
    torch.testing.assert_close(run.score("dispersion"), found.var.sum(1).sqrt())
    assert bool((found.profile >= 0).all())


def test_random_directions_are_unbiased_for_the_mean_over_coordinates(mlp):
    start = torch.randn(2, 2)
    exact = sample(mlp, x0=start, steps=4, transport=True).transported.var.mean(1)
    found = sample(mlp, x0=start, steps=4, transport=True, config=SamplingConfig(projections=800)).transported.var
    assert found.shape == (2, 800)
    mean, _, error, _ = statistics(found.T)
    assert_within(mean, exact, error)
    assert float((error / exact).max()) < 0.1


def test_transport_is_the_limit_of_stochastic_dispersion():
    field = mlp_field(initial_log_alpha=-7.0)
    for layer in field.noise.layers:
        layer.inference.out.weight.data.zero_()
    count = 4000
    start = torch.randn(1, 2).expand(count, 2)
    ends = sample(field, x0=start, steps=4, confidence=None, config=SamplingConfig(decoder="stochastic")).x
    exact = sample(field, x0=start[:1], steps=4, transport=True).transported.var[0]
    assert float((ends.var(0) / exact - 1).abs().max()) < 6 * (2 / count) ** 0.5 + 0.03


def test_transport_does_not_change_a_sample(mlp):
    plain = sample(mlp, 6, steps=5, confidence=None)
    assert torch.equal(sample(mlp, 6, steps=5, transport=True).x, plain.x)
    only = sample(mlp, 6, steps=5, transport=True, confidence=None)
    assert torch.equal(only.x, plain.x)
    assert only.evaluations == 5


def test_in_place_operations_are_supported():
    start = torch.randn(2, 1, 4, 4)
    found = [sample(conv_field(inplace=b), x0=start, steps=3, transport=True).transported.var for b in (False, True)]
    assert not torch.allclose(*found)  # SiLU and ReLU
    field = conv_field(inplace=True)
    field.network.act.inplace = False
    torch.testing.assert_close(sample(field, x0=start, steps=3, transport=True).transported.var, found[1])


@pytest.mark.parametrize("build", [mlp_field, conv_field], ids=["mlp", "conv"])
def test_inference_mode(build):
    field = build()
    expected = sample(field, 3, steps=4, transport=True)
    with torch.inference_mode():
        found = sample(field, 3, steps=4, transport=True)
    torch.testing.assert_close(found.transported.var, expected.transported.var)
    torch.testing.assert_close(found.var, expected.var)
    assert torch.equal(found.x, expected.x)


def test_channels_on_a_torus():
    """Compare with the Jacobian; the torus wraps, with slope 1 almost everywhere."""
    field = dict_field().double()
    start = {
        "place": torch.rand(2, 2, dtype=torch.float64) * 0.1 + 0.45,
        "shape": torch.randn(2, 3, dtype=torch.float64),
    }
    steps = 3

    def end(given):
        x = dict(start)
        for n in range(steps):
            v = field.run(given, x, torch.full((2,), n / steps).double())
            x = {"place": torch.remainder(x["place"] + v["place"] / steps, 1), "shape": x["shape"] + v["shape"] / steps}
        return torch.cat([x["place"], x["shape"]], 1)

    var, _ = jacobian_var(end)
    found = sample(field, x0=start, steps=steps, transport=True).transported
    assert found.var.shape == (2, 5)
    torch.testing.assert_close(found.var, var, rtol=1e-6, atol=1e-12)
    few = sample(field, x0=start, steps=steps, transport=True, config=SamplingConfig(projections=7)).transported
    assert few.var.shape == (2, 7)


def test_refusals():
    with pytest.raises(UsageError, match="at least 1"):
        Transport(0)
