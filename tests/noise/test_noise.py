"""The noise model: choice of layers, an unchanged network, removal, copies and pickles."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError
from fmwc.estimators import MonteCarlo
from fmwc.field import attach
from fmwc.networks import MLP
from fmwc.noise import LOG_ALPHA_RANGE, InferenceNetwork, Pass, time_features
from fmwc.noise.layers import layer_kind
from tests.conftest import TinyConv, awaken, conv_field, mlp_field


def hooks(network: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules())


@pytest.mark.parametrize(
    ("build", "shape"), [(lambda: MLP(2, 16, 2, 8), (2,)), (TinyConv, (1, 4, 4))], ids=["mlp", "conv"]
)
def test_attach_and_detach_do_not_change_the_network(build, shape):
    torch.manual_seed(0)
    network = build()
    x, t = torch.randn(5, *shape), torch.rand(5)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    modules, output = [type(m) for m in network.modules()], network(x, t)
    forwards = [m.forward.__func__ for m in network.modules()]

    field = attach(network, space=shape)
    assert list(network.state_dict()) == list(before)
    assert torch.equal(field(x, t), output)
    assert torch.equal(network(x, t), output)
    for estimator in ("linearised", "monte_carlo", "tangent", "diagonal"):
        field.moments(x, t, estimator, seed=0)
    field.draw(x, t, seed=0)
    assert torch.equal(network(x, t), output)
    assert hooks(network) == 0  # hooks exist only during a pass

    assert field.detach() is network
    with pytest.raises(UsageError, match="was detached"):
        field.draw(x, t)
    assert [type(m) for m in network.modules()] == modules
    assert [m.forward.__func__ for m in network.modules()] == forwards
    assert all("forward" not in vars(m) for m in network.modules())
    assert torch.equal(network(x, t), output)
    assert {k: v.tolist() for k, v in network.state_dict().items()} == {k: v.tolist() for k, v in before.items()}
    assert all(p.grad is None and p.requires_grad for p in network.parameters())


def test_a_backbones_checkpoint_loads_into_an_attached_network():
    plain, other = MLP(2, 16, 2, 8), MLP(2, 16, 2, 8)
    field = attach(other, space=(2,))
    field.network.load_state_dict(plain.state_dict())
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(field(x, t), plain(x, t))


NAMES = ["layers.0", "layers.1", "out"]
PATTERNS = {
    "all": ({}, NAMES),
    "output only": ({"include": ["out"]}, ["out"]),
    "glob": ({"include": ["layers.*"]}, ["layers.0", "layers.1"]),
    "two": ({"include": ["layers.0", "out"]}, ["layers.0", "out"]),
    "exclude": ({"exclude": ["out"]}, ["layers.0", "layers.1"]),
    "both": ({"include": ["layers.*"], "exclude": ["*.1"]}, ["layers.0"]),
    "class": ({"include": ["layers.[12]"]}, ["layers.1"]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_choose_the_layers(name):
    options, expected = PATTERNS[name]
    field = attach(MLP(2, 16, 2, 8), **options)
    assert field.noise.names == expected
    assert len(field.noise.layers) == len(expected)
    seen = []

    class Count(Pass):
        def after(self, noisy, layer, h, y):
            seen.append((noisy.name, hooks(field.network)))
            return y

    field.run(Count(), torch.randn(3, 2), torch.rand(3))
    assert seen == [(name, 2 * len(expected)) for name in expected]
    assert hooks(field.network) == 0


REFUSED = {
    "matches nothing": ({"include": ["head.*"]}, r"pattern 'head\.\*' matches no layer.*layers\.0.*out"),
    "one matches nothing": ({"include": ["out", "head"]}, "pattern 'head' matches no layer"),
    "exclude matches nothing": ({"exclude": ["head"]}, "pattern 'head' matches no layer"),
    "everything excluded": ({"exclude": ["*"]}, "exclude removes every layer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_patterns_that_cannot_be_meant(name):
    options, message = REFUSED[name]
    network = MLP(2, 16, 2, 8)
    with pytest.raises(UsageError, match=message):
        attach(network, **options)
    assert hooks(network) == 0


def test_a_network_without_a_layer_for_the_noise():
    field = attach(nn.Bilinear(2, 1, 2), space=2)  # confidence may come from checks
    with pytest.raises(UsageError, match="no linear or convolution layer"):
        field.moments(torch.zeros(3, 2), 0.5)


def test_output_only_noise_leaves_the_hidden_layers_sure():
    field = mlp_field(include=["out"])
    x, t = torch.randn(3, 2), torch.rand(3)
    field.check_rows(x, t)  # evaluates the network
    seen = []
    handle = field.network.layers[1].register_forward_hook(lambda m, a, y: seen.append(y))
    drawn = [field.draw(x, t, seed=s) for s in (0, 1)]
    handle.remove()
    assert torch.equal(*seen)
    assert not torch.equal(*drawn)


def test_a_failing_network_does_not_leave_the_noise_on(mlp):
    x, t = torch.randn(3, 2), torch.rand(3)
    with pytest.raises(RuntimeError):
        mlp.draw_with_kl(torch.randn(3, 5), t, seed=0)
    assert mlp.noise.running.state.current is None
    assert hooks(mlp.network) == 0
    assert torch.equal(mlp(x, t), mlp.detach()(x, t))


def test_two_fields_on_one_network_do_not_disturb_each_other():
    torch.manual_seed(0)
    network = MLP(2, 16, 2, 8)
    x, t = torch.randn(3, 2), torch.rand(3)
    first, alone = attach(network, space=(2,)), None
    alone = first.moments(x, t).var
    second = attach(network, space=(2,), initial_log_alpha=0.0)
    assert torch.equal(first.moments(x, t).var, alone)
    assert bool((second.moments(x, t).var > 2 * alone).all())
    second.detach()
    assert torch.equal(first.moments(x, t).var, alone)


@pytest.mark.parametrize("build", [mlp_field, conv_field], ids=["mlp", "conv"])
def test_deep_copies_are_independent(build):
    field = build()
    x, t = torch.randn(3, *field.space.channels["x"].shape), torch.rand(3)
    var, mean = field.moments(x, t).var, field(x, t)
    twin = copy.deepcopy(field)
    assert torch.equal(twin.moments(x, t).var, var)
    assert torch.equal(twin.draw(x, t, seed=3), field.draw(x, t, seed=3))
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.1)
    assert not torch.equal(twin.moments(x, t).var, var)
    assert torch.equal(field.moments(x, t).var, var)
    assert torch.equal(field(x, t), mean)
    twin.detach()
    with pytest.raises(UsageError, match="detached"):
        twin.moments(x, t)
    assert torch.equal(field.moments(x, t).var, var)
    second = copy.deepcopy(field)
    field.detach()
    assert torch.equal(second.moments(x, t).var, var)


class Tokens(nn.Module):
    """A network that flattens (B, N, C) to (B·N, C)."""

    def __init__(self, transpose: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.transpose = transpose

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        if self.transpose:
            return self.layer(x[:, :, :2].repeat(1, 1, 2)[:, :, :3].flatten(0, 1)[:-1])
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_a_layer_may_see_a_sample_as_several_rows():
    torch.manual_seed(0)
    field = awaken(attach(Tokens(), space=(4, 3), width=8))
    x, t = torch.randn(2, 4, 3), torch.tensor([0.1, 0.9])
    whole = field.moments(x, t).var
    apart = torch.cat([field.moments(x[i : i + 1], t[i : i + 1]).var for i in range(2)])
    torch.testing.assert_close(whole, apart)
    assert field.draw(x, t, seed=0).shape == x.shape


def test_rows_that_belong_to_no_sample_are_refused():
    field = attach(Tokens(transpose=True), width=8)
    with pytest.raises(ShapeError, match="7 rows"):
        field.draw(torch.randn(2, 4, 3), 0.5, seed=0)


def test_the_inference_network_starts_constant_and_stays_in_range():
    net = InferenceNetwork(3, width=8, initial_log_alpha=-2.0)
    features = time_features(torch.rand(5))
    assert torch.equal(net(torch.randn(5, 3), features), torch.full((5, 3), -2.0))
    with torch.no_grad():
        net.out.weight.normal_(std=100)
    found = net(torch.randn(5, 3), features)
    assert found.min() >= LOG_ALPHA_RANGE[0]
    assert found.max() <= LOG_ALPHA_RANGE[1]
    assert found.unique().numel() > 1


def test_time_features_are_cosines_and_sines():
    t = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    found = time_features(t)
    k = torch.arange(8)
    torch.testing.assert_close(found[1, :8], torch.cos(torch.pi * 0.3 * k).double(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found[1, 8:], torch.sin(torch.pi * 0.3 * (k + 1)).double(), atol=1e-6, rtol=1e-6)


def test_alpha_is_shared_over_space_and_depends_on_the_time(conv):
    seen = []

    class Peek:
        def before(self, noisy, layer, h):
            return h

        def after(self, noisy, layer, h, y):
            seen.append((noisy.log_alpha(h), h))
            return y

    x = torch.randn(1, 1, 4, 4).expand(2, 1, 4, 4)
    conv.run(Peek(), x, torch.tensor([0.1, 0.9]))
    log_alpha, h = seen[0]
    assert log_alpha.shape == (2, 1, 1, 1)
    assert h.shape == (2, 1, 4, 4)
    assert not torch.equal(log_alpha[0], log_alpha[1])


class Shared(nn.Module):
    """One layer on two paths, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.other = nn.Linear(2, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.other(torch.tanh(self.first(x)) + self.second(torch.tanh(self.first(-x))))


def test_a_layer_on_two_paths_is_one_layer_with_noise_at_each_use():
    torch.manual_seed(0)
    field = awaken(attach(Shared(), space=(2,), width=8, initial_log_alpha=-7.0))
    assert field.noise.names == ["first", "other"]
    x, t = torch.randn(8, 2), torch.rand(8)
    drawn = field.moments(x, t, MonteCarlo(4096, 64), seed=0).var
    torch.testing.assert_close(field.moments(x, t).var, drawn, rtol=0.15, atol=0)


def test_shared_layers_match_either_name():
    assert attach(Shared(), include=["second"]).noise.names == ["first"]
    assert attach(Shared(), exclude=["second"]).noise.names == ["other"]


def test_a_layer_that_does_not_know_its_size_yet():
    network = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(UsageError, match="'0' is not initialised; run the network once on data"):
        attach(network)
    network(torch.zeros(1, 3))
    assert attach(network).noise.names == ["0"]


def test_layers_of_other_libraries_are_found_by_class_name():
    own = type("Linear", (nn.Module,), {"__module__": "torch_geometric.nn.dense.linear"})
    assert layer_kind(own()).channels == "in_channels"
    assert layer_kind(type("Linear", (nn.Module,), {"__module__": "elsewhere"})()) is None
