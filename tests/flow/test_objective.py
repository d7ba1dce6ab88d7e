"""Losses: zero for the exact velocity, and the parts of the evidence lower bound."""

import pytest
import torch

from fmwc.flow import Channel, FlatTorus, Space, elbo_loss, euclidean, flow_matching_loss, path_sample
from fmwc.randomness import Stream
from tests.conftest import PRODUCT, mlp_field

POINT = torch.tensor([0.3, 0.8])


def stream(seed=0):
    return Stream(torch.Generator().manual_seed(seed))


def test_exact_velocity_to_one_point_has_zero_loss():
    def exact(x, t):
        return (POINT - x) / (1 - t)[:, None]

    x1 = POINT.expand(512, 2)
    assert flow_matching_loss(exact, euclidean((2,)), x1, seed=0).item() < 1e-6
    off = flow_matching_loss(lambda x, t: exact(x, t) + 1, euclidean((2,)), x1, seed=0)
    assert off.item() == pytest.approx(1, rel=1e-2)


def test_optimal_transport_on_the_torus():
    space = Space({"x": Channel((2,), FlatTorus(), "uniform")})
    found = flow_matching_loss(
        lambda x, t: FlatTorus().logmap(x, POINT.expand_as(x)) / (1 - t)[:, None], space, POINT.expand(512, 2), seed=0
    )
    assert found.item() < 1e-6


def test_path_samples():
    space, x1 = euclidean((2,)), torch.randn(4000, 2)
    t, x_t, u_t = path_sample(space, x1, stream())
    assert t.shape == (4000,)
    assert t.min() >= 0
    assert t.max() < 1
    assert float((t.mean() - 0.5).abs()) < 6 * (1 / 12 / 4000) ** 0.5
    torch.testing.assert_close(
        x_t + (1 - t)[:, None] * u_t, x1, rtol=1e-4, atol=1e-5
    )  # following u_t leads to the data
    x0 = x_t - t[:, None] * u_t
    assert float((x0.var(0) - 1).abs().max()) < 6 * (2 / 4000) ** 0.5


def test_squared_error_is_a_mean_over_coordinates_then_channels():
    v = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 1)}
    u = {"a": torch.full((2, 3), 2.0), "b": torch.ones(2, 1)}
    assert Space({"a": Channel((3,)), "b": Channel((1,))}).squared_error(v, u).item() == (4 + 1) / 2
    assert euclidean((3,)).squared_error(v["a"], u["a"]).item() == 4


def test_flow_matching_of_a_product(product):
    x1 = PRODUCT.noise(16, stream(1))
    expected = path_sample(PRODUCT, x1, stream(5))
    found = flow_matching_loss(product, PRODUCT, x1, seed=5)
    torch.testing.assert_close(found, PRODUCT.squared_error(product(expected.x_t, expected.t), expected.u_t))


def test_elbo_is_the_error_of_a_draw_and_the_kl(mlp):
    x1, generator = torch.randn(16, 2), torch.Generator().manual_seed(3)
    t, x_t, u_t = path_sample(mlp.space, x1, Stream(generator))
    v, divergence = mlp.draw_with_kl(x_t, t, seed=generator)
    torch.testing.assert_close(elbo_loss(mlp, x1, 0.25, seed=3), (v - u_t).square().mean() + 0.25 * divergence)
    torch.testing.assert_close(elbo_loss(mlp, x1, torch.tensor(0.25), seed=3), elbo_loss(mlp, x1, 0.25, seed=3))
    assert elbo_loss(mlp, x1, 0.0, seed=3) < elbo_loss(mlp, x1, 1.0, seed=3)


def test_frozen_backbone_gets_no_gradient():
    field = mlp_field()
    before = {k: v.clone() for k, v in field.network.state_dict().items()}
    field.network.requires_grad_(False)
    elbo_loss(field, torch.randn(16, 2), 0.1, seed=0).backward()
    assert all(p.grad is None for p in field.network.parameters())
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in field.noise.parameters())
    assert all(torch.equal(v, before[k]) for k, v in field.network.state_dict().items())


def test_joint_training_has_gradients_for_all_parameters(mlp):
    elbo_loss(mlp, torch.randn(16, 2), 0.1, seed=0).backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in mlp.parameters())
