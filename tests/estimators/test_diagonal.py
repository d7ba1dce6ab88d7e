"""The diagonal estimator: exact if no correlation is lost, first order otherwise; errors."""

import pytest
import torch
from torch import nn

from fmwc.errors import NoRuleError
from fmwc.estimators import Diagonal
from fmwc.field import attach
from fmwc.moments import CLOSURES
from fmwc.networks import UNet
from tests.conftest import awaken, conv_field, mlp_field
from tests.reference import integral, noise_var


class Alone(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, t):
        return self.layer(x)


def log_alphas(field, x, t):
    """Return log α of every noisy layer on the activations of the plain network, with the layer and its input."""
    seen = []

    class Peek:
        def before(self, noisy, layer, h):
            return h

        def after(self, noisy, layer, h, y):
            seen.append((layer, h.detach(), noisy.log_alpha(h).detach()))
            return y

    field.run(Peek(), x, t)
    return seen


@pytest.mark.parametrize("closure", CLOSURES)
@pytest.mark.parametrize(
    ("layer", "shape"), [(lambda: nn.Linear(4, 3), (4,)), (lambda: nn.Conv2d(2, 2, 3, stride=2, padding=1), (2, 4, 4))]
)
def test_one_linear_layer_is_exact(layer, shape, closure):
    field = awaken(attach(Alone(layer()), width=8)).double()
    x, t = torch.randn(3, *shape, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    found = field.moments(x, t, Diagonal(closure))
    ((module, h, log_alpha),) = log_alphas(field, x, t)
    torch.testing.assert_close(found.mean, field(x, t))
    torch.testing.assert_close(found.var, noise_var(module, h, log_alpha.exp()))
    torch.testing.assert_close(found.var, field.moments(x, t).var)


@pytest.mark.parametrize("build", [mlp_field, conv_field], ids=["mlp", "conv"])
def test_noise_in_the_output_layer_only_is_exact(build):
    field = build(include=["out"]).double()
    x = torch.randn(3, *field.space.channels["x"].shape, dtype=torch.float64)
    t = torch.rand(3, dtype=torch.float64)
    found, exact = field.moments(x, t, "diagonal"), field.moments(x, t)
    torch.testing.assert_close(found.mean, exact.mean)
    torch.testing.assert_close(found.var, exact.var)


@pytest.mark.parametrize("closure", CLOSURES)
def test_two_layers_by_hand(closure):
    """eq:layerprop written out: θ²(α h²) in, the activation by the closure, θ²(α μ² + (1 + α) σ²) out."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x, t):
            return self.b(torch.tanh(self.a(x)))

    field = attach(Two(), width=8, initial_log_alpha=-2.0).double()  # α is constant before training
    x, t = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    a, b = field.network.a, field.network.b
    alpha = torch.tensor(-2.0, dtype=torch.float64).exp()
    hidden_mean = a(x)
    hidden_var = (alpha * x.square()) @ a.weight.square().T
    mean, var = (
        integral(torch.tanh, hidden_mean, hidden_var)
        if closure == "gauss_hermite"
        else CLOSURES[closure](torch.tanh, hidden_mean, hidden_var)
    )
    expected = (alpha * mean.square() + (1 + alpha) * var) @ b.weight.square().T
    found = field.moments(x, t, Diagonal(closure))
    tolerance = 1e-4 if closure == "gauss_hermite" else 1e-9
    torch.testing.assert_close(found.mean, b(mean).detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.var, expected.detach(), rtol=tolerance, atol=tolerance)


def test_taylor1_keeps_the_plain_mean_through_norms():
    field = attach(UNet(1, 8, (1, 2), 1, 8, 3), space=(1, 8, 8))
    x, t, y = torch.randn(3, 1, 8, 8), torch.rand(3), torch.arange(3)
    found = field.moments(x, t, Diagonal("taylor1"), cond={"y": y})
    assert torch.equal(found.mean, field(x, t, y=y))
    assert (found.var > 0).all()


def test_taylor1_keeps_the_plain_mean(mlp):
    x, t = torch.randn(3, 2), torch.rand(3)
    torch.testing.assert_close(mlp.moments(x, t, Diagonal("taylor1")).mean, mlp(x, t))
    assert not torch.allclose(mlp.moments(x, t, Diagonal("taylor2")).mean, mlp(x, t), rtol=1e-5)


def test_inference_mode(mlp):
    x, t = torch.randn(3, 2), torch.rand(3)
    expected = mlp.moments(x, t, "diagonal")
    with torch.inference_mode():
        found = mlp.moments(x + 0, t + 0, "diagonal")
    assert torch.equal(found.var, expected.var)


# ---- refusals say where ---------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.act = {
            "softmin": nn.Softmin(-1),
            "dropout": nn.Dropout(0.5),
            "inplace": nn.ReLU(inplace=True),
        }.get(kind, nn.Identity())
        self.kind = kind

    def forward(self, x):
        h = self.act(self.fc(x))
        if self.kind == "written":
            y = torch.zeros(len(h), 2)
            y += h
            h = y
        if self.kind == "sort":
            h = h.sort().values
        return h


class Outer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), Inner(kind)])

    def forward(self, x, t):
        for block in self.blocks:
            x = block(x)
        return x


REFUSED = {  # kind: a part of the message, and the module that it names
    "softmin": ("softmin", "blocks.1.act (Softmin)"),
    "sort": ("sort", "blocks.1 (Inner)"),
    "written": ("in place", "blocks.1 (Inner)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_names_the_operation_and_the_place_in_the_users_network(kind):
    field = attach(Outer(kind), space=(2,))
    says, place = REFUSED[kind]
    with pytest.raises(NoRuleError) as raised:
        field.moments(torch.randn(3, 2), 0.5, "diagonal")
    message = str(raised.value)
    assert says in message
    assert place in message
    assert "\n" not in message
    assert "linearised" in message
    if kind != "written":
        assert "Gaussian[3, 2]" in message
    hooks = sum(len(m._forward_hooks) for m in field.network.modules())
    assert hooks == 0  # neither the hooks that locate the operation nor those of the noise remain


@pytest.mark.parametrize("kind", REFUSED)
def test_linearised_handles_networks_without_rules(kind):
    field = attach(Outer(kind), space=(2,))
    field.network.eval()
    var = field.moments(torch.randn(3, 2), 0.5).var
    assert bool((var > 0).all()) or kind == "softmin"
    assert torch.isfinite(var).all()


@pytest.mark.parametrize("kind", ["dropout", "inplace"])
def test_linearised_handles_unusual_networks(kind):
    field = attach(Outer(kind), space=(2,))
    field.network.eval()
    with torch.no_grad():
        field.network.blocks[1].fc.bias.fill_(3.0)  # otherwise the output of the ReLU is zero with certainty
    assert bool((field.moments(torch.randn(3, 2), 0.5, "diagonal").var > 0).all())
