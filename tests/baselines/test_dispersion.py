"""Dispersion by hand, and the runs it is taken over."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.baselines import Dropout, dispersion, ensemble_ends, stochastic_ends
from fmwc.errors import UsageError
from fmwc.flow import Channel, FlatTorus, Space, euclidean
from fmwc.sampling import SamplingConfig, sample
from tests.baselines.test_rivals import Labelled
from tests.conftest import PRODUCT, TwoChannels, awaken, mlp_field
from tests.options import arguments


def test_by_hand():
    ends = torch.tensor([[[0.0, 0.0], [1.0, 1.0]], [[2.0, 4.0], [1.0, 1.0]]])  # two runs of two samples
    # variances (2, 8) and (0, 0), so √10 and 0
    torch.testing.assert_close(dispersion(ends), torch.tensor([10.0**0.5, 0.0]))
    k = torch.randn(6, 3, 1, 2, 2)
    torch.testing.assert_close(dispersion(k), k.var(0, unbiased=True).flatten(1).sum(1).sqrt())
    with pytest.raises(UsageError, match="at least 2"):
        dispersion(ends[:1])


def test_two_sides_of_a_border_are_near():
    torus = Space({"x": Channel((1,), FlatTorus(), "uniform")})
    ends = torch.tensor([[[0.99], [0.30]], [[0.01], [0.32]]])  # two runs of two samples, each 0.02 apart
    torch.testing.assert_close(dispersion(ends, torus), torch.full((2,), 0.02 / 2**0.5))
    torch.testing.assert_close(dispersion(ends)[0], torch.tensor(0.98 / 2**0.5))  # as the crow flies it is far
    torch.testing.assert_close(dispersion(ends.flip(0), torus), dispersion(ends, torus))
    shifted = (ends + torch.rand(1, 2, 1)) % 1  # wherever the border is
    torch.testing.assert_close(dispersion(shifted, torus), dispersion(ends, torus), atol=1e-5, rtol=0)


def test_channels_are_added_up_each_on_its_own_manifold():
    ends = {
        "place": torch.tensor([[[0.99, 0.5]], [[0.01, 0.5]]]),
        "shape": torch.tensor([[[0.99, 0.0, 1.0]], [[0.01, 0.0, 1.0]]]),
    }
    expected = ((0.02**2 + 0.98**2) / 2) ** 0.5
    torch.testing.assert_close(dispersion(ends, PRODUCT), torch.tensor([expected]))
    flat = torch.randn(4, 3, 2)
    torch.testing.assert_close(dispersion(flat, euclidean((2,))), dispersion(flat))


def test_stochastic_runs_share_their_start_and_nothing_else(mlp):
    x0 = torch.randn(4, 2)
    ends = stochastic_ends(mlp, x0, 3, steps=4)
    assert ends.shape == (3, 4, 2)
    assert dispersion(ends).min() > 0
    assert torch.equal(ends, stochastic_ends(mlp, x0, 3, steps=4))
    assert not torch.equal(ends, stochastic_ends(mlp, x0, 3, steps=4, seed=1))
    distinct = {tuple(e.flatten().tolist()) for e in torch.cat([ends, stochastic_ends(mlp, x0, 3, steps=4, seed=1)])}
    assert len(distinct) == 6


def test_an_ensemble_runs_each_member_from_the_same_start():
    members = [mlp_field(seed=s) for s in range(3)]
    x0 = torch.randn(4, 2)
    ends = ensemble_ends(members, x0, steps=4)
    for member, end in zip(members, ends, strict=True):
        assert torch.equal(end, sample(member, x0=x0, steps=4, confidence=None).x)
    plain = ensemble_ends([m.detach() for m in members], x0, steps=4)
    assert torch.equal(plain, ends)


def test_labels_and_options_reach_the_network_and_the_sampler():
    torch.manual_seed(0)
    x0, y = torch.randn(5, 1, 8, 8), torch.tensor([0, 2, 1, 0, 2])
    net = Dropout(Labelled())
    ends = stochastic_ends(
        net, x0, 2, steps=3, cond={"y": y}, config=SamplingConfig(batch=2)
    )  # labels are split with the batches
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
def test_transported_dispersion_is_the_limit_of_many_trajectories_where_channels_have_weights(projections):
    """Two channels, one of which counts nine times as much: both dispersions add them up alike."""
    torch.manual_seed(0)
    space = Space({"place": Channel((2,), weight=9.0), "shape": Channel((3,))})
    field = awaken(fmwc.attach(TwoChannels(), space=space, width=8, initial_log_alpha=-6.0), 0.1)
    x0 = {"place": torch.randn(4, 2), "shape": torch.randn(4, 3)}
    run = fmwc.sample(field, x0=x0, steps=5, **arguments(confidence=None, transport=projections))
    ends = stochastic_ends(field, x0, 400, steps=5)
    torch.testing.assert_close(run.score("dispersion"), dispersion(ends, space), rtol=0.15, atol=0)
    assert bool((dispersion(ends, space) > 1.5 * dispersion(ends)).all())
