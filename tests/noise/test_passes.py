"""Draws: exact mean and variance by local reparameterisation, gradients, and seeds."""

import torch
from torch import nn

from fmwc.field import attach
from fmwc.noise import Pass, kl
from tests.conftest import mlp_field
from tests.reference import assert_within, statistics


def test_empty_pass_does_not_change_outputs(mlp):
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(mlp.run(Pass(), x, t), mlp(x, t))


def test_local_reparameterisation_is_sampling_the_weights():
    """Compare draws of every weight ω ~ N(θ, αθ²) with the draws of the library."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x, t):
            return self.layer(x)

    torch.manual_seed(0)
    field = attach(One(), initial_log_alpha=-1.0)
    x, count = torch.randn(3), 40_000
    drawn = field.draw(x.expand(count, 3), 0.5, seed=0).detach()
    theta, bias = field.network.layer.weight.detach(), field.network.layer.bias.detach()
    alpha = torch.tensor(-1.0).exp()
    weights = theta * (1 + alpha.sqrt() * torch.randn(count, 2, 3))
    mean, var, mean_error, var_error = statistics((weights @ x + bias).double())
    found = statistics(drawn.double())
    assert_within(found[0], mean, mean_error * 2**0.5)
    assert_within(found[1], var, var_error * 2**0.5)


def test_results_depend_on_the_seed(mlp):
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(mlp.draw(x, t, seed=1), mlp.draw(x, t, seed=1))
    assert not torch.equal(mlp.draw(x, t, seed=1), mlp.draw(x, t, seed=2))
    own = torch.Generator().manual_seed(1)
    first = mlp.draw(x, t, seed=own)
    assert torch.equal(first, mlp.draw(x, t, seed=1))
    assert not torch.equal(first, mlp.draw(x, t, seed=own))
    state = torch.get_rng_state()
    mlp.draw(x, t, seed=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_kl_is_that_of_the_alphas_the_draw_used():
    field = mlp_field(include=["layers.0"])  # only the first layer has the same input with and without noise
    x, t = torch.randn(4, 2), torch.rand(4)
    seen = []

    class Peek(Pass):
        def after(self, noisy, layer, h, y):
            seen.append(noisy.log_alpha(h))
            return y

    field.run(Peek(), x, t)
    found = field.draw_with_kl(x, t, seed=0)[1]
    torch.testing.assert_close(found, kl(seen, field.prior_rate))
    assert found.requires_grad


def test_gradients_reach_both_weights_and_noise_and_stay_finite_at_zero(mlp):
    v, divergence = mlp.draw_with_kl(torch.zeros(4, 2), torch.zeros(4), seed=0)
    (v.square().mean() + divergence).backward()
    for name, p in mlp.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
    assert all(float(layer.inference.out.bias.grad.abs().sum()) > 0 for layer in mlp.noise.layers)
