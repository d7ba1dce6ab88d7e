"""Training under torch.compile: with the hooks kept in, the loss is one graph, and gives what it gives uncompiled."""

import pytest
import torch

import fmwc
from fmwc.flow import Channel, FlatTorus, Space, elbo
from fmwc.nets import MLP, CSPNet, UNet
from fmwc.randomness import Stream
from fmwc.sampling import noise


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
    x = noise(space, 3, 0, atoms=atoms)
    x["lattice"][:, :3] = 4.0  # lengths
    net = CSPNet(8, 1, 2, 4, width=4)
    net.rooms[3] = (64, 128)  # compiled, it has as many rows whatever the atoms
    return fmwc.attach(net, space=space), x, {"atoms": atoms}


@pytest.mark.parametrize("made", [points, digits, crystals])
def test_the_loss_is_one_graph_while_the_hooks_are_kept_in(made):
    torch.manual_seed(0)
    field, x, cond = made()
    beta = torch.tensor(1e-3)

    def loss(x, **cond):
        return elbo(field, x, beta, seed=Stream(torch.Generator().manual_seed(1)), **cond)

    def drawn(x, **cond):
        return elbo(field, x, beta, seed=Stream(None), **cond)

    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with field.noise.hooked():
        expected = loss(x, **cond)
        torch.manual_seed(2)
        value = torch.compile(drawn, backend=count, fullgraph=True)(x, **cond)
        torch.manual_seed(2)
        if made is not crystals:  # rows that are not there are given noise too, so others get other noise
            torch.testing.assert_close(value, drawn(x, **cond))
    assert len(graphs) == 1
    assert torch.isfinite(value)
    torch.testing.assert_close(loss(x, **cond), expected)  # the same without them kept


def test_hooks_are_in_while_they_are_kept_and_gone_afterwards():
    field, x, _ = points()
    layers = [m for m in field.network.modules() if isinstance(m, torch.nn.Linear)]

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in layers)

    plain = field(x, torch.zeros(4))
    assert hooks() == 0
    with field.noise.hooked():
        assert hooks() == 2 * len(layers)
        with field.noise.hooked():  # kept once
            field.moments(x, 0.5)
            assert hooks() == 2 * len(layers)
        assert hooks() == 2 * len(layers)
        assert torch.equal(field(x, torch.zeros(4)), plain)  # no pass runs, so they do nothing
    assert hooks() == 0
    with pytest.raises(RuntimeError), field.noise.hooked():
        raise RuntimeError
    assert hooks() == 0
