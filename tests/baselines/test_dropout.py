"""MC-dropout: the plain network when called, and unbiased draws where what follows is linear."""

import pytest
import torch
from torch import nn

from fmwc.baselines import ACTIVATIONS, Dropout
from fmwc.errors import UsageError
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig, sample
from tests.reference import assert_within, statistics


class OneActivation(nn.Module):
    def __init__(self, activation=nn.SiLU):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(2, 8), activation(), nn.Linear(8, 2)

    def forward(self, x, t):
        return self.b(self.act(self.a(x)))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_draws_have_the_plain_mean_and_the_closed_form_variance(rate):
    """h/(1 − p) kept with chance 1 − p has variance h² p/(1 − p), and the layer after it is linear."""
    net, count = Dropout(OneActivation(), rate).double(), 20_000
    x = torch.randn(1, 2, dtype=torch.float64)
    with torch.no_grad():
        drawn = net.draw(x.expand(count, 2), torch.zeros(count), seed=0)
        hidden = net.network.act(net.network.a(x))
        mean, var, mean_error, var_error = statistics(drawn)
        assert_within(mean, net(x, torch.zeros(1))[0], mean_error)
        expected = hidden.square() * rate / (1 - rate) @ net.network.b.weight.square().T
        assert_within(var, expected[0], var_error)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_every_activation_is_dropped_after(activation):
    net = Dropout(OneActivation(activation), 0.5)
    x, t = torch.randn(3, 2), torch.rand(3)
    assert not torch.equal(net.draw(x, t, seed=0), net(x, t))
    assert torch.equal(net.draw(x, t, seed=0), net.draw(x, t, seed=0))


def test_called_it_is_the_plain_network():
    inner = MLP(2, 16, 2, 8)
    x, t = torch.randn(3, 2), torch.rand(3)
    expected = inner(x, t)
    net = Dropout(inner, 0.3)
    net.draw(x, t, seed=0)
    assert torch.equal(net(x, t), expected)
    with pytest.raises(RuntimeError):
        net.draw(torch.randn(3, 5), t, seed=0)
    assert torch.equal(net(x, t), expected)


def test_batches_do_not_matter():
    net = Dropout(MLP(2, 16, 2, 8), 0.3)
    whole, split = (
        sample(net, 20, steps=3, confidence=None, config=SamplingConfig(space=(2,), decoder="stochastic", batch=b)).x
        for b in (64, 7)
    )
    torch.testing.assert_close(whole, split)


def test_refusals():
    for rate in (0, 1, -1):
        with pytest.raises(UsageError, match="strictly between 0 and 1"):
            Dropout(OneActivation(), rate)
    with pytest.raises(UsageError, match="no activation module"):
        Dropout(nn.Linear(2, 2))
