"""Couplings: noise is fitted to the pairs that a network was trained on."""

import itertools

import pytest
import torch
from torch import nn

import fmwc
from fmwc.flow import Channel, FlatTorus, Space, as_space, couple, elbo_loss, flow_matching_loss, path_sample
from fmwc.networks import MLP
from fmwc.randomness import as_randomness

WIDE = 3.0  # data are N(0, WIDE²)


def randomness(seed=0):
    return as_randomness(seed, torch.device("cpu"))


SPACES = {
    "flat": as_space(2),
    "torus": Space({"x": Channel((2, 3), FlatTorus(), "uniform")}),
    "channels": Space({"a": Channel((2,), weight=3.0), "b": Channel((1,), FlatTorus(), "uniform")}),
}


@pytest.mark.parametrize("name", SPACES)
def test_optimal_transport_is_the_best_of_all_assignments(name):
    space = SPACES[name]
    x1 = space.noise(5, randomness(1))
    paired = couple("ot", space, x1, randomness(2))
    drawn = space.noise(5, randomness(2))

    def cost(x0):
        parts = (x1, x0, drawn) if isinstance(x1, dict) else ({"x": x1}, {"x": x0}, {"x": drawn})
        return sum(
            float(c.weight * c.manifold.logmap(parts[1][n], parts[0][n]).square().sum())
            for n, c in space.channels.items()
        )

    def ordered(order):
        rows = list(order)
        return {n: c[rows] for n, c in drawn.items()} if isinstance(drawn, dict) else drawn[rows]

    best = min(cost(ordered(order)) for order in itertools.permutations(range(5)))
    assert cost(paired) == pytest.approx(best, rel=1e-5)
    assert best < cost(drawn)


class Transport(nn.Module):
    """The optimal-transport flow from N(0, 1) to N(0, c²), in closed form: x_t = (1 + (c − 1)t) x0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_((WIDE - 1) * torch.eye(2) + 1e-3)

    def forward(self, x, t):
        return self.layer(x) / (1 + (WIDE - 1) * t)[:, None]


def split(x1, randomness):
    """Noise on the side of its data: the optimal transport to two clusters on the left and right."""
    x0 = randomness.normal(x1)
    return torch.stack([x0[:, 0].abs() * x1[:, 0].sign(), x0[:, 1]], 1)


def test_without_its_pairs_an_optimal_transport_flow_has_far_too_much_variance():
    generator = torch.Generator().manual_seed(0)
    data = 0.3 * torch.randn(2048, 2, generator=generator)
    data[:, 0] += torch.where(torch.rand(2048, generator=generator) < 0.5, -2.0, 2.0)
    net = MLP(dim=2, hidden=32, depth=2)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for step in range(400):
        loss = flow_matching_loss(net, 2, data[step % 8 :: 8], seed=step, pairs=split)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    x = torch.randn(512, 2, generator=generator)
    var = {}
    for name, pairs in {"function": split, "none": None}.items():
        field = fmwc.attach(net, space=2)
        fmwc.fit_noise(field, data, 150, lr=5e-3, batch=128, pairs=pairs, confidence=False)
        var[name] = float(field.moments(x, 0.1).var.mean())
    assert var["none"] > 20 * var["function"]


def test_the_loss_of_an_optimal_transport_flow_vanishes_on_its_pairs_only():
    net, data = Transport(), WIDE * torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    exact = flow_matching_loss(net, 2, data, seed=0, pairs=lambda x1, r: x1 / WIDE)
    batch = flow_matching_loss(net, 2, data, seed=0, pairs="ot")
    alone = flow_matching_loss(net, 2, data, seed=0)
    assert exact < 1e-4 < batch < 0.1 * alone


def test_networks_with_a_path_are_fitted_on_it():
    class Turning(Transport):
        def path(self, x0, x1, t):
            angle = t[:, None] * torch.pi / 2
            return x0 * torch.cos(angle) + x1 * torch.sin(angle), x1 * torch.cos(angle) - x0 * torch.sin(angle)

    field, x1 = fmwc.attach(Turning(), space=2), torch.randn(6, 2)
    t, x_t, u_t = path_sample(field.space, x1, randomness(3), field)
    x0 = couple(None, as_space(2), x1, _after_times(3, 6))
    torch.testing.assert_close((x_t, u_t), field.network.path(x0, x1, t))
    own = path_sample(field.space, x1, randomness(3), field.network)
    torch.testing.assert_close(own.x_t, x_t)
    r = randomness(3)
    given = elbo_loss(field, x1, 0.5, seed=r)
    r = randomness(3)
    again = elbo_loss(field, x1, 0.5, seed=r, pairs=path_sample(field.space, x1, r, field))
    torch.testing.assert_close(given, again)
    layer = Transport()
    layer.path = nn.Linear(2, 2)  # a layer named `path` is not a path
    assert torch.equal(path_sample(as_space(2), x1, randomness(3), layer).x_t, path_sample(2, x1, randomness(3)).x_t)


def _after_times(seed, count):
    r = randomness(seed)
    r.uniform(torch.empty(count))
    return r
