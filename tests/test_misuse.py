"""Mistakes that users may make, and unusual uses: they raise one line, or work."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.errors import ShapeError, UsageError
from fmwc.estimators import Diagonal
from fmwc.sampling import Grid, Reference, SamplingConfig, Schedule, read_with
from tests.conftest import mlp_field
from tests.options import arguments


class Narrow(nn.Module):
    """A network that returns one number instead of two."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, t):
        return self.layer(torch.cat([x, t[:, None]], 1))


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t):
        return self.layer(input=x)


def test_a_velocity_of_another_shape_is_not_broadcast():
    field = fmwc.attach(Narrow(), space=(2,))
    data = torch.randn(16, 2)
    for call in (
        lambda: fmwc.sample(field, 4, steps=2),
        lambda: fmwc.elbo_loss(field, data),
        lambda: fmwc.fit_noise(field, data, steps=1),
    ):
        with pytest.raises(ShapeError):
            call()


def test_wrong_data_does_not_change_the_field():
    field = fmwc.attach(mlp_field().detach())
    with pytest.raises(ShapeError, match="shape"):
        fmwc.fit_noise(field, torch.randn(16, 3), steps=1)
    fmwc.fit_noise(field, torch.randn(16, 2), steps=1)


def test_a_reference_read_in_another_setting_is_not_used():
    field = fmwc.load("checkerboard")
    made = read_with("linearised", 50, "euler")
    field.reference = Reference("temporal_ratio", made, torch.linspace(0, 1, 101))
    assert fmwc.sample(field, 3, steps=50).reference is not None
    for options in (
        {"start": 0.1},
        {"decoder": "stochastic"},
        {"schedule": Schedule.every(5)},
        {"confidence": Diagonal()},
    ):
        assert fmwc.sample(field, 3, **arguments(steps=50, **options)).reference is None
    assert fmwc.sample(field, 3, config=SamplingConfig(controller=Grid([0.0, 0.5, 1.0]))).reference is None


def test_a_layer_called_by_keyword_is_named():
    with pytest.raises(UsageError, match="keyword"):
        fmwc.attach(ByKeyword(), space=(2,)).moments(torch.randn(3, 2), 0.5)


def test_a_detached_field_and_a_plain_network_have_no_confidence():
    field = mlp_field()
    network = field.detach()
    with pytest.raises(UsageError, match="detached"):
        field.moments(torch.randn(3, 2), 0.5)
    with pytest.raises(UsageError, match="confidence"):
        fmwc.sample(network, 3, config=SamplingConfig(space=(2,)))
    assert fmwc.sample(network, 3, confidence=None, config=SamplingConfig(space=(2,))).x.shape == (3, 2)


class InTraining(torch.nn.Module):
    """A network in training mode with dropout and batch norm."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = torch.nn.Linear(3, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5)
        self.out = torch.nn.Linear(16, 2)

    def forward(self, x, t):
        return self.out(self.drop(self.norm(self.layer(torch.cat([x, t.expand(len(x))[:, None]], 1)))))


def test_networks_in_training_mode_are_sampled_in_evaluation_mode():
    torch.manual_seed(0)
    field = fmwc.attach(InTraining(), space=(2,))
    before = {k: v.clone() for k, v in field.network.state_dict().items()}
    plain = fmwc.sample(field, 12, steps=5, seed=1, confidence=None).x
    assert torch.equal(fmwc.sample(field, 12, steps=5, seed=1).x, plain)
    torch.testing.assert_close(fmwc.sample(field, 12, steps=5, seed=1, config=SamplingConfig(batch=5)).x, plain)
    torch.testing.assert_close(
        fmwc.sample(field.network, 12, steps=5, seed=1, confidence=None, config=SamplingConfig(space=(2,))).x, plain
    )
    field.moments(torch.zeros(3, 2), 0.5)
    assert all(torch.equal(v, before[k]) for k, v in field.network.state_dict().items())
    assert all(m.training for m in field.network.modules())
