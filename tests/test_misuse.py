"""Mistakes that users may make, and unusual uses: they raise one line, or work."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import fmwc
from fmwc.errors import NotFiniteError, ShapeError, UsageError
from fmwc.estimators import Diagonal
from fmwc.sampling import Grid, Reference, SamplingConfig, Schedule, read_with
from tests.conftest import mlp_field
from tests.options import arguments, reader

TINY = ["hidden=8", "time_features=4", "batch=8", "points=100", "noise_steps=2", "iterations=2"]


class Narrow(nn.Module):
    """A network that returns one number instead of two."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x, t):
        return self.layer(torch.cat([x, t[:, None]], 1))


class Idle(nn.Module):
    """A network with a layer that never runs."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, t):
        return self.used(x)


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, t):
        return self.layer(input=x)


@pytest.mark.parametrize("propagation", ["linearised", "diagonal", "monte_carlo"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_inference_network_is_named_when_sampling(propagation, bad):
    field = mlp_field()
    with torch.no_grad():
        field.noise.layers[0].inference.hidden.weight[0, 0] = bad
    with pytest.raises(NotFiniteError, match=r"noise\.layers\.0\.inference\.hidden\.weight"):
        fmwc.sample(field, 4, steps=2, confidence=reader(propagation))


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
    with pytest.raises(ShapeError, match="does not run on data of shape"):
        fmwc.fit_noise(field, torch.randn(16, 3), steps=1)
    fmwc.fit_noise(field, torch.randn(16, 2), steps=1)


def test_samples_keep_their_rank_when_others_are_dropped():
    run = fmwc.sample(mlp_field(), 40, steps=10)
    kept = run.score().argsort(stable=True)[:10].sort().values
    # Up to one rank: sums over fewer samples may round differently, so a score may change order with its own copy.
    torch.testing.assert_close(run.surest(0.25).rank, run.rank[kept], rtol=0, atol=1.01 / 40)


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


def test_numpy_seeds_are_seeds():
    field = mlp_field()
    assert torch.equal(fmwc.sample(field, 3, steps=2, seed=np.int64(5)).x, fmwc.sample(field, 3, steps=2, seed=5).x)
    x, t = torch.randn(3, 2), torch.rand(3)
    assert torch.equal(field.draw(x, t, seed=np.int64(5)), field.draw(x, t, seed=5))


def test_a_layer_that_never_runs_does_not_stop_a_resume(tmp_path):
    field, data = fmwc.attach(Idle(), space=(2,)), torch.randn(16, 2)
    fmwc.fit_noise(field, data, steps=3, resume=str(tmp_path / "point"))
    fmwc.fit_noise(field, data, steps=3, resume=str(tmp_path / "point"))


def test_a_layer_called_by_keyword_is_named():
    with pytest.raises(UsageError, match="'layer' is called by keyword"):
        fmwc.attach(ByKeyword(), space=(2,)).moments(torch.randn(3, 2), 0.5)


def test_a_detached_field_and_a_plain_network_have_no_confidence():
    field = mlp_field()
    network = field.detach()
    with pytest.raises(UsageError, match="detached"):
        field.moments(torch.randn(3, 2), 0.5)
    with pytest.raises(UsageError, match="first, or give confidence=None"):
        fmwc.sample(network, 3, config=SamplingConfig(space=(2,)))
    assert fmwc.sample(network, 3, confidence=None, config=SamplingConfig(space=(2,))).x.shape == (3, 2)


def test_a_mean_of_five_draws_costs_five_evaluations():
    field = mlp_field()
    assert (
        fmwc.sample(field, 3, confidence=None, config=SamplingConfig(evaluations=10, decoder="mean5")).evaluations == 10
    )
    with pytest.raises(UsageError, match="give a multiple, not 11"):
        fmwc.sample(field, 3, confidence=None, config=SamplingConfig(evaluations=11, decoder="mean5"))


def test_options_of_another_score_are_refused():
    run = fmwc.sample(mlp_field(), 3, steps=10)
    with pytest.raises(UsageError, match="takes no options"):
        run.score("peak", early=0.2)
    with pytest.raises(UsageError, match="early and late"):
        run.score("temporal_ratio", erly=0.2)


def test_attaching_is_seeded_and_does_not_use_the_global_generator():
    before = torch.random.get_rng_state()
    first, second = (fmwc.attach(Idle(), space=(2,)).noise.state_dict() for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)
    torch.random.set_rng_state(before)
    network = Idle()
    after = torch.random.get_rng_state()
    fmwc.attach(network)
    assert torch.equal(torch.random.get_rng_state(), after)


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


def test_a_run_is_filtered_within_its_conditions():
    torch.manual_seed(0)
    field = mlp_field()
    run = fmwc.sample(field, 40, steps=10, seed=0)
    run = dataclasses.replace(run, cond={"y": torch.arange(40) % 2})
    ranked = run.ranked_by("integrated", within="y")
    own = run.score("integrated", within="y")
    assert torch.equal(ranked.score(), own)
    assert torch.equal(ranked.surest(0.5).x, run.surest(0.5, "integrated", within="y").x)
    assert torch.equal(ranked.surest(0.5).x, run.x[own.argsort(stable=True)[:20].sort().values])
    with pytest.raises(UsageError, match="'z'"):
        run.ranked_by("integrated", within="z")
