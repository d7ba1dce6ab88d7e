"""The MLP: shapes, times, and a record that builds it again."""

import pytest
import torch

from fmwc.nets import MLP, NETS
from fmwc.nets.embedding import TimeEmbedding


def test_shapes_and_times():
    net = MLP(3, 16, 2, 8)
    x, t = torch.randn(5, 3), torch.rand(5)
    assert net(x, t).shape == (5, 3)
    assert torch.equal(net(x, torch.tensor(0.5)), net(x, torch.full((5,), 0.5)))
    assert not torch.allclose(net(x, torch.tensor(0.1)), net(x, torch.tensor(0.9)))
    torch.testing.assert_close(net(x, t)[2:3], net(x[2:3], t[2:3]))
    assert MLP(3, 16, 2, 8, outputs=7)(x, t).shape == (5, 7)


def test_it_is_the_network_written_out():
    net = MLP(2, 8, 2, 4)
    x, t = torch.randn(3, 2), torch.rand(3)
    e = net.embed(t)
    h = torch.nn.functional.silu(net.layers[0](torch.cat([x, e], -1)))
    h = torch.nn.functional.silu(net.layers[1](torch.cat([h, e], -1)))
    torch.testing.assert_close(net(x, t), net.out(torch.cat([h, e], -1)))


def test_the_time_embedding_is_sines_and_cosines_of_rising_rates():
    t = torch.tensor([0.0, 0.25, 1.0])
    found = TimeEmbedding(6, fastest=100.0)(t)
    rates = torch.tensor([1.0, 10.0, 100.0])
    torch.testing.assert_close(found[:, :3], (t[:, None] * rates).sin(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:, 3:], (t[:, None] * rates).cos(), atol=1e-5, rtol=1e-5)


CONFIGS = {"MLP": {"dim": 2, "hidden": 8, "depth": 1, "time_features": 4, "outputs": None}}


def test_every_network_is_tested():
    assert CONFIGS.keys() == NETS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_network_is_rebuilt_from_its_config(name):
    net = NETS[name](**CONFIGS[name])
    assert net.config == CONFIGS[name]
    again = NETS[name](**net.config)
    again.load_state_dict(net.state_dict())
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(again(x, t), net(x, t))
