"""Layers that were replaced after attach raise an error."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fmwc
from fmwc.errors import UsageError
from fmwc.networks import MLP
from fmwc.noise import KINDS, LayerKind
from fmwc.sampling.trajectory import require_varied


class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.last = first, nn.Linear(8, 2)

    def forward(self, x, t):
        return self.last(torch.tanh(self.first(x)))


def wrapped(layer):
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = layer

        def forward(self, x):
            return self.base(x)

    return Wrapper()


USES = {
    "reading": lambda field, path: field.moments(torch.zeros(2, 2), 0.5),
    "drawing": lambda field, path: field.draw(torch.zeros(2, 2), 0.5, seed=0),
    "sampling": lambda field, path: fmwc.sample(field, 3, steps=2),
    "fitting": lambda field, path: fmwc.fit_noise(field, torch.randn(8, 2), 1),
    "saving": lambda field, path: fmwc.save(field, path),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "change", [lambda old: nn.Linear(2, 8), wrapped, copy.deepcopy], ids=["new", "wrapped", "copy"]
)
def test_a_layer_replaced_after_attach_is_named(use, change, tmp_path):
    net = Net(nn.Linear(2, 8))
    field = fmwc.attach(net, space=2)
    USES[use](field, tmp_path / "before")
    net.first = change(net.first)
    with pytest.raises(UsageError, match=r"layer 'first' was replaced .* attach the network again"):
        USES[use](field, tmp_path / "after")
    again = fmwc.attach(field.detach(), space=2)
    assert (again.moments(torch.ones(2, 2), 0.5).var > 0).all()


def test_a_projection_of_an_attention_and_a_whole_network_are_missed_too():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, t):
            return self.attention(x, x, x, need_weights=False)[0]

    field = fmwc.attach(Attending())
    x = torch.randn(2, 3, 4)
    field.moments(x, 0.5)
    field.network.attention = nn.MultiheadAttention(4, 2, batch_first=True)
    with pytest.raises(UsageError, match=r"'attention\.q_proj' was replaced"):
        field.moments(x, 0.5)
    field.network = Attending()
    with pytest.raises(UsageError, match="network was replaced"):
        field.moments(x, 0.5)


def test_a_wrapper_around_the_network_and_a_copy_of_the_field_are_no_replacement():
    field = fmwc.attach(MLP(dim=2, hidden=8, depth=1), space=2)
    x = torch.randn(3, 2)
    wanted = field.moments(x, 0.5).var
    assert torch.equal(copy.deepcopy(field).moments(x, 0.5).var, wanted)
    field.network = type("Outer", (nn.Module,), {"forward": lambda self, x, t: self.inner(x, t)})()
    field.network.inner = field.noise._network[0]
    assert torch.equal(field.moments(x, 0.5).var, wanted)


class Equalised(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 0.1, self.bias) * 0.5


class LowRank(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(self.drop(x), self.a), self.b)


class Same(nn.Linear):
    def forward(self, x):
        return super().forward(x)


EFFECTIVE = {
    Equalised: lambda layer: layer.weight * 0.05,
    LowRank: lambda layer: layer.weight + layer.b @ layer.a,
    Same: lambda layer: layer.weight,
}


@pytest.mark.parametrize("kind", EFFECTIVE)
def test_overridden_linear_layers_use_their_effective_weight(kind):
    """Every estimator agrees with a network that has the same weight in a plain layer."""
    torch.manual_seed(0)
    net, plain = Net(kind(2, 8)).eval(), Net(nn.Linear(2, 8))
    plain.load_state_dict(net.state_dict(), strict=False)
    with torch.no_grad():
        plain.first.weight.copy_(EFFECTIVE[kind](net.first))
        plain.first.bias.copy_(net.first(torch.zeros(1, 2))[0])
    own, wanted = fmwc.attach(net, space=2), fmwc.attach(plain, space=2)
    x = torch.randn(5, 2)
    # Diagonal propagation treats the two parts of a low-rank layer as independent.
    for estimator in ("linearised", "tangent", *([] if kind is LowRank else ["diagonal"])):
        a, b = (field.moments(x, 0.5, estimator, seed=0) for field in (own, wanted))
        torch.testing.assert_close(a.var, b.var, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(own.draw(x, 0.5, seed=1), wanted.draw(x, 0.5, seed=1))
    ends = (fmwc.sample(field, 4, steps=3).score("endpoint") for field in (own, wanted))
    torch.testing.assert_close(*ends)


class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x * x)


class Standardised(nn.Conv1d):
    def forward(self, x):
        w = self.weight
        return self._conv_forward(x, (w - w.mean((1, 2), True)) / w.std((1, 2), keepdim=True), self.bias)


class More(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale


@pytest.mark.parametrize("layer", [Squared(2, 8), More(2, 8), Standardised(2, 8, 3)], ids=lambda n: type(n).__name__)
def test_other_functions_are_refused_by_name(layer):
    net = Net(layer)
    with pytest.raises(UsageError, match=rf"'first' \({type(layer).__name__}\).*exclude=\['first'\].*KINDS"):
        fmwc.attach(net)
    assert fmwc.attach(net, exclude=["first"]).noise.names == ["last"]


def test_table_rows_may_define_the_weight(monkeypatch):
    row = KINDS[nn.Conv1d]
    standard = lambda m: (m.weight - m.weight.mean((1, 2), True)) / m.weight.std((1, 2), keepdim=True)  # noqa: E731
    monkeypatch.setitem(KINDS, Standardised, LayerKind(row.apply, row.channels, row.spatial, standard))

    class Wave(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, t):
            return self.layer(x)

    layer, plain = Standardised(2, 3, 3), nn.Conv1d(2, 3, 3)
    with torch.no_grad():
        plain.weight.copy_(standard(layer))
        plain.bias.copy_(layer.bias)
    x = torch.randn(2, 2, 6)
    var = [fmwc.attach(Wave(m)).moments(x, 0.5).var for m in (layer, plain)]
    torch.testing.assert_close(*var)


def test_constant_scores_give_no_rank():
    for constant in (torch.zeros(5), torch.full((5,), 3.0), torch.full((5,), 1e-20)):
        with pytest.raises(UsageError, match="for all of 5 samples, so it cannot rank them"):
            require_varied(constant)
    for score in (torch.tensor([1.0]), torch.tensor([1e-20, 2e-20]), torch.tensor([])):
        assert require_varied(score) is score
