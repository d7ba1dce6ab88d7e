"""Training under torch.compile: inside keep_hooks the loss is one graph with the same value as uncompiled."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.flow import Channel, FlatTorus, Space, elbo_loss
from fmwc.networks import MLP, CSPNet, UNet
from fmwc.randomness import Stream
from fmwc.sampling import noise
from tests.conftest import awaken


def points():
    return fmwc.attach(MLP(2, 8, 2), space=(2,)), torch.randn(4, 2), {}


def digits():
    net = UNet(1, 8, (1, 2), 1, 8, 3)
    return fmwc.attach(net, space=(1, 8, 8)), torch.randn(3, 1, 8, 8), {"y": torch.arange(3)}


def crystals():
    atoms = torch.tensor([2, 1, 3])
    space = Space(
        {
            "type": Channel((4, 7), rows="atoms"),
            "coord": Channel((4, 3), FlatTorus(), "uniform", rows="atoms", centred=True),
            "lattice": Channel((6,)),
        }
    )
    x = noise(space, 3, 0, cond={"atoms": atoms})
    x["lattice"][:, :3] = 4.0  # lengths
    net = CSPNet(8, 1, 2, 4, width=4)
    net.static_capacity[3] = (64, 128)  # compiled, the number of rows does not depend on the atoms
    return fmwc.attach(net, space=space), x, {"atoms": atoms}


class Attends(nn.Module):
    """Attention with torch's module, whose projections are not layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 2)

    def forward(self, x, t):
        h = self.first(torch.cat([x, t[:, None, None].expand(-1, x.shape[1], 1)], -1))
        return self.last(h + self.attention(h, h, h, need_weights=False)[0])


def attention():
    return fmwc.attach(Attends(), space=(3, 2)), torch.randn(4, 3, 2), {}


class Pieces(nn.Module):
    """A network with a graph break."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, x, t):
        h = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.last(h)


@pytest.mark.parametrize("made", [points, digits, crystals, attention])
def test_loss_compiles_to_one_graph_inside_keep_hooks(made):
    torch.manual_seed(0)
    field, x, cond = made()
    beta = torch.tensor(1e-3)

    def loss(x, **cond):
        return elbo_loss(field, x, beta, seed=Stream(torch.Generator().manual_seed(1)), cond=cond)

    def drawn(x, **cond):
        return elbo_loss(field, x, beta, seed=Stream(None), cond=cond)

    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with field.noise.keep_hooks():
        expected = loss(x, **cond)
        torch.manual_seed(2)
        value = torch.compile(drawn, backend=count, fullgraph=True)(x, **cond)
        torch.manual_seed(2)
        if made is not crystals:  # unused rows also draw noise, so the others get different noise
            torch.testing.assert_close(value, drawn(x, **cond))
    assert len(graphs) == 1
    assert torch.isfinite(value)
    torch.testing.assert_close(loss(x, **cond), expected)  # the same without kept hooks


def test_keep_hooks_registers_and_removes_hooks():
    field, x, _ = points()
    layers = [m for m in field.network.modules() if isinstance(m, torch.nn.Linear)]

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in layers)

    plain = field(x, torch.zeros(4))
    assert hooks() == 0
    with field.noise.keep_hooks():
        assert hooks() == 2 * len(layers)
        with field.noise.keep_hooks():  # nested
            field.moments(x, 0.5)
            assert hooks() == 2 * len(layers)
        assert hooks() == 2 * len(layers)
        assert torch.equal(field(x, torch.zeros(4)), plain)  # hooks do nothing outside a pass
    assert hooks() == 0
    with pytest.raises(RuntimeError), field.noise.keep_hooks():
        raise RuntimeError
    assert hooks() == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # raised by torch while it traces
@pytest.mark.parametrize("build", [lambda: MLP(2, 8, 2), Pieces, Attends], ids=["one piece", "pieces", "attention"])
def test_compiled_draws_with_and_without_keep_hooks(build):
    torch.manual_seed(0)
    x, t = torch.randn(4, *(3,) * (build is Attends), 2), torch.rand(4)
    field = awaken(fmwc.attach(build(), space=tuple(x.shape[1:])))

    def draw(x, t):
        return field.draw_with_kl(x * 2, t, seed=Stream(None))[0] + 1

    torch._dynamo.reset()
    fast, plain = (torch.compile(f, backend="eager") for f in (draw, field))

    def check():
        values = []
        for call in (draw, fast):
            torch.manual_seed(1)
            values.append(call(x, t))
        torch.testing.assert_close(*values)
        assert not torch.allclose(values[0], field(x * 2, t) + 1)

    for _ in range(2):  # compiled code is not reused after the hooks have changed
        with field.noise.keep_hooks():
            check()
        check()
    torch.testing.assert_close(plain(x, t), field(x, t))


class Encodes(nn.Module):
    """torch's encoder layer, which has a fused kernel without hooks."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, t):
        return self.encoder(x) * t[:, None, None]


def test_plain_output_of_fused_attention_inside_keep_hooks():
    torch.manual_seed(0)
    field = awaken(fmwc.attach(Encodes().eval(), space=(3, 8)))
    x, t = torch.randn(4, 3, 8), torch.rand(4)
    with torch.no_grad():
        plain = field(x, t)
        with field.noise.keep_hooks():
            torch.testing.assert_close(field(x, t), plain)  # runs the layers, not torch's fused kernel
