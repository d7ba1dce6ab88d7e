"""The MLP: shapes and times; for every network, a configuration that rebuilds it."""

import json

import pytest
import torch

from fmwc.checkpoint import NETS
from fmwc.networks import MLP, TimeEmbedding
from fmwc.state import channels


def test_forward_equals_the_written_out_network():
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


IMAGE = {"x": torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))}
TIME = {"t": torch.tensor([0.1, 0.5, 0.9])}
# For every network, a configuration without defaults, and its inputs.
NETWORKS = {
    "MLP": (
        {"dim": 2, "hidden": 8, "depth": 1, "time_features": 4, "outputs": 3},
        {"x": torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]]), **TIME},
    ),
    "UNet": (
        {"channels": 1, "base": 8, "stages": [1, 2], "blocks": 2, "cond": 8, "classes": 3, "outputs": 2},
        {**IMAGE, **TIME, "y": torch.tensor([2, 0, 1])},
    ),
    "LeNet": ({"classes": 7, "side": 8}, IMAGE),
    "CSPNet": (
        {"hidden": 8, "layers": 1, "frequencies": 2, "time_features": 4, "types": 3, "width": 4},
        {
            "x": {"type": torch.ones(3, 4, 3), "coord": torch.rand(3, 4, 3), "lattice": torch.full((3, 6), 2.0)},
            **TIME,
            "atoms": torch.tensor([2, 4, 1]),
        },
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_rebuilt_from_its_config(name):
    config, inputs = NETWORKS[name]
    net = NETS[name](**config).eval()
    assert net.config == config
    again = NETS[name](**json.loads(json.dumps(net.config))).eval()
    own, other = (next(iter(channels(n(**inputs)).values())) for n in (net, again))
    assert not torch.equal(other, own)
    again.load_state_dict(net.state_dict())
    assert torch.equal(next(iter(channels(again(**inputs)).values())), own)
