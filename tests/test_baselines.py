"""Dispersion by hand and over repeated trajectories; MC-dropout against its closed form."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.baselines import ACTIVATIONS, Dropout, dispersion, ensemble_ends, stochastic_ends
from fmwc.errors import UsageError
from fmwc.flow import Channel, FlatTorus, Space, euclidean
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig, sample
from tests.conftest import PRODUCT, TwoChannels, awaken, mlp_field
from tests.experiments.test_comparisons import Labelled
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


def test_dispersion_across_the_border_of_a_torus():
    torus = Space({"x": Channel((1,), FlatTorus(), "uniform")})
    ends = torch.tensor([[[0.99], [0.30]], [[0.01], [0.32]]])  # two runs of two samples, each 0.02 apart
    torch.testing.assert_close(dispersion(ends, torus), torch.full((2,), 0.02 / 2**0.5))
    torch.testing.assert_close(dispersion(ends)[0], torch.tensor(0.98 / 2**0.5))  # far apart along a straight line
    torch.testing.assert_close(dispersion(ends.flip(0), torus), dispersion(ends, torus))
    shifted = (ends + torch.rand(1, 2, 1)) % 1  # the position of the border does not matter
    torch.testing.assert_close(dispersion(shifted, torus), dispersion(ends, torus), atol=1e-5, rtol=0)


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


def test_ensemble_ends_share_their_start():
    members = [mlp_field(seed=s) for s in range(3)]
    x0 = torch.randn(4, 2)
    ends = ensemble_ends(members, x0, steps=4)
    for member, end in zip(members, ends, strict=True):
        assert torch.equal(end, sample(member, x0=x0, steps=4, confidence=None).x)
    plain = ensemble_ends([m.detach() for m in members], x0, steps=4)
    assert torch.equal(plain, ends)


def test_conditions_and_options_are_passed_on():
    torch.manual_seed(0)
    x0, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 2, 1, 0, 2])
    net = Dropout(Labelled())
    ends = stochastic_ends(
        net, x0, 2, steps=3, cond={"y": y}, config=SamplingConfig(batch=2)
    )  # labels follow the batches
    assert ends.shape == (2, 5, 1, 8, 8)
    torch.testing.assert_close(ends, stochastic_ends(net, x0, 2, steps=3, cond={"y": y}))
    assert not torch.allclose(ends, stochastic_ends(net, x0, 2, steps=3, cond={"y": y.flip(0)}))
    members: list[nn.Module] = [Labelled(), Labelled()]
    ends = ensemble_ends(members, x0, steps=3, cond={"y": y}, config=SamplingConfig(stepper="heun"))
    for member, end in zip(members, ends, strict=True):
        assert torch.equal(
            end, sample(member, x0=x0, steps=3, cond={"y": y}, confidence=None, config=SamplingConfig(stepper="heun")).x
        )
    assert not torch.allclose(ends, ensemble_ends(members, x0, steps=3, cond={"y": y}))


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


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.__name__)
def test_dropout_follows_every_activation(activation):
    net = Dropout(OneActivation(activation), 0.5)
    x, t = torch.randn(3, 2), torch.rand(3)
    assert not torch.equal(net.draw(x, t, seed=0), net(x, t))
    assert torch.equal(net.draw(x, t, seed=0), net.draw(x, t, seed=0))


def test_calling_is_the_plain_network():
    inner = MLP(2, 16, 2, 8)
    x, t = torch.randn(3, 2), torch.rand(3)
    expected = inner(x, t)
    net = Dropout(inner, 0.3)
    net.draw(x, t, seed=0)
    assert torch.equal(net(x, t), expected)
    with pytest.raises(RuntimeError):
        net.draw(torch.randn(3, 5), t, seed=0)
    assert torch.equal(net(x, t), expected)


def test_dropout_does_not_depend_on_the_batch():
    net = Dropout(MLP(2, 16, 2, 8), 0.3)
    whole, split = (
        sample(net, 20, steps=3, confidence=None, config=SamplingConfig(space=(2,), decoder="stochastic", batch=b)).x
        for b in (64, 7)
    )
    torch.testing.assert_close(whole, split)


def test_invalid_arguments():
    for rate in (0, 1, -1):
        with pytest.raises(UsageError, match="strictly between 0 and 1"):
            Dropout(OneActivation(), rate)
    with pytest.raises(UsageError, match="no activation module"):
        Dropout(nn.Linear(2, 2))
