"""The field: accepted inputs, and errors for others."""

import pytest
import torch

from fmwc.errors import NotFiniteError, ShapeError
from fmwc.field import attach
from fmwc.networks import MLP

REFUSED = {
    "a wrong shape": (torch.zeros(3, 3), 0.5, ShapeError, r"\(B, 2\), got \(3, 3\)"),
    "NaN": (torch.full((3, 2), float("nan")), 0.5, NotFiniteError, "the state's channel 'x' holds 6 NaN"),
    "infinity": (torch.full((3, 2), float("inf")), 0.5, NotFiniteError, "NaN or infinite"),
    "times for others": (torch.zeros(3, 2), torch.zeros(2), ShapeError, r"one per sample \(3\), got shape \(2,\)"),
    "a dict": ({"x": torch.zeros(3, 2)}, 0.5, ShapeError, "got a dict"),
}


@pytest.mark.parametrize("method", ["moments", "draw"])
@pytest.mark.parametrize("name", REFUSED)
def test_invalid_states(name, method, mlp):
    x, t, error, message = REFUSED[name]
    with pytest.raises(error, match=message) as raised:
        getattr(mlp, method)(x, t)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("part", ["network.out.bias", "noise.layers.0.inference.out.bias"])
def test_a_broken_weight_is_named(part, mlp):
    with torch.no_grad():
        mlp.get_parameter(part)[0] = float("nan")
    with pytest.raises(NotFiniteError, match=f"weight '{part}'"):
        mlp.check_finite()


def test_a_variance_that_is_not_finite_is_refused_with_its_cause(mlp):
    with torch.no_grad():
        mlp.noise.layers[0].inference.out.bias[0] = float("nan")
    with pytest.raises(NotFiniteError, match=r"noise\.layers\.0\.inference\.out\.bias"):
        mlp.moments(torch.zeros(1, 2), 0.5)


def test_the_noise_has_the_type_of_the_network():
    field = attach(MLP(2, 8, 1, 4).double(), space=(2,))
    assert {p.dtype for p in field.parameters()} == {torch.float64}
    assert field.moments(torch.zeros(1, 2).double(), 0.5).var.dtype == torch.float64
    assert field.device == torch.device("cpu")
