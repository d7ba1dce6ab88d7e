"""Dispersion by hand and over repeated trajectories; MC-dropout against its closed form."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.baselines import Dropout, dispersion, stochastic_ends
from fmwc.errors import UsageError
from fmwc.flow import Channel, Space, euclidean
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig, sample
from tests.conftest import PRODUCT, TwoChannels, awaken
from tests.options import arguments
from tests.reference import assert_within, statistics

# ---- dispersion --------------------------------------------------------------------------------------------------


def test_dispersion_by_hand():
    ends = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[2.0, 4.0], [1.0, 1.0]]])  # two runs of two samples
    # variances (2, 8) and (0, 0), so √10 and 0
    torch.testing.assert_close(dispersion(ends), torch.tensor([10.0**0.5, 0.0]))
    k = torch.randn(6, 3, 1, 2, 2)
    torch.testing.assert_close(dispersion(k), k.var(0, unbiased=True).flatten(1).sum(1).sqrt())
    with pytest.raises(UsageError, match="at least 2"):
        dispersion(ends[:1])


def test_dispersion_adds_channels_on_their_manifolds():
    ends = {
        "place": torch.tensor([[[0.99, 0.5]], [[0.01, 0.5]]]),
        "shape": torch.tensor([[[0.99, 0.0, 1.0]], [[0.01, 0.0, 1.0]]]),
    }
    expected = ((0.02**2 + 0.98**2) / 2) ** 0.5
    torch.testing.assert_close(dispersion(ends, PRODUCT), torch.tensor([expected]))
    flat = torch.randn(4, 3, 2)
    torch.testing.assert_close(dispersion(flat, euclidean((2,))), dispersion(flat))


def test_stochastic_ends_share_only_their_start(mlp):
    x0 = torch.randn(4, 2)
    ends = stochastic_ends(mlp, x0, 3, steps=4)
    assert ends.shape == (3, 4, 2)
    assert dispersion(ends).min() > 0
    assert torch.equal(ends, stochastic_ends(mlp, x0, 3, steps=4))
    assert not torch.equal(ends, stochastic_ends(mlp, x0, 3, steps=4, seed=1))
    distinct = {tuple(e.flatten().tolist()) for e in torch.cat([ends, stochastic_ends(mlp, x0, 3, steps=4, seed=1)])}
    assert len(distinct) == 6


@pytest.mark.parametrize("projections", [True, 400])
def test_transported_dispersion_is_the_limit_of_many_trajectories(projections):
    """Both dispersions weight two channels, one of them by nine, in the same way."""
    torch.manual_seed(0)
    space = Space({"place": Channel((2,), weight=9.0), "shape": Channel((3,))})
    field = awaken(fmwc.attach(TwoChannels(), space=space, width=8, initial_log_alpha=-6.0), 0.1)
    x0 = {"place": torch.randn(4, 2), "shape": torch.randn(4, 3)}
    run = fmwc.sample(field, x0=x0, steps=5, **arguments(confidence=None, transport=projections))
    ends = stochastic_ends(field, x0, 400, steps=5)
    torch.testing.assert_close(run.score("dispersion"), dispersion(ends, space), rtol=0.15, atol=0)
    assert bool((dispersion(ends, space) > 1.5 * dispersion(ends)).all())


# ---- dropout -----------------------------------------------------------------------------------------------------


class OneActivation(nn.Module):
    def __init__(self, activation=nn.SiLU):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(2, 8), activation(), nn.Linear(8, 2)

    def forward(self, x, t):
        return self.b(self.act(self.a(x)))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_draws_have_the_plain_mean_and_the_closed_form_variance(rate):
    """h/(1 − p) with probability 1 − p, else 0, has variance h² p/(1 − p); the next layer is linear."""
    net, count = Dropout(OneActivation(), rate).double(), 20_000
    x = torch.randn(1, 2, dtype=torch.float64)
    with torch.no_grad():
        drawn = net.draw(x.expand(count, 2), torch.zeros(count), seed=0)
        hidden = net.network.act(net.network.a(x))
        mean, var, mean_error, var_error = statistics(drawn)
        assert_within(mean, net(x, torch.zeros(1))[0], mean_error)
        expected = hidden.square() * rate / (1 - rate) @ net.network.b.weight.square().T
        assert_within(var, expected[0], var_error)


def test_dropout_does_not_depend_on_the_batch():
    net = Dropout(MLP(2, 16, 2, 8), 0.3)
    whole, split = (
        sample(net, 20, steps=3, confidence=None, config=SamplingConfig(space=(2,), decoder="stochastic", batch=b)).x
        for b in (64, 7)
    )
    torch.testing.assert_close(whole, split)
