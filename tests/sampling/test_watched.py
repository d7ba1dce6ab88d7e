"""A field in somebody else's loop gives what ours gives."""

import pytest
import torch

import fmwc
from fmwc.errors import UsageError
from tests.conftest import dict_field, mlp_field


def euler(velocity, x, steps):
    for k in range(steps):
        x = x + velocity(x, torch.tensor(k / steps)) / steps
    return x


def test_a_loop_of_ones_own_is_our_loop(mlp):
    x0 = torch.randn(6, 2)
    watched = fmwc.Watched(mlp)
    run, ours = watched.trajectory(euler(watched, x0, 20)), fmwc.sample(mlp, x0=x0, steps=20)
    torch.testing.assert_close(run.x, ours.x)
    torch.testing.assert_close(run.var, ours.var)
    torch.testing.assert_close(run.times, ours.times)
    torch.testing.assert_close(run.score(), ours.score(), rtol=1e-4, atol=0)
    assert torch.equal(run.x0, x0)
    assert (run.evaluations, len(run)) == (20, 6)


@pytest.mark.parametrize("estimator", ["linearised", "tangent", "diagonal", "monte_carlo"])
def test_the_velocity_is_the_plain_networks(estimator, mlp):
    x, t = torch.randn(6, 2), torch.full((6,), 0.3)
    assert torch.equal(fmwc.Watched(mlp, estimator)(x, 0.3), mlp(x, t))


def test_solvers_may_go_back_and_forth_in_time(mlp):
    x, times = torch.randn(6, 2), (0.0, 0.5, 0.25, 0.8)
    watched = fmwc.Watched(mlp)
    for t in times:
        watched(x, t)
    assert watched.trajectory(x).times[:, 0].tolist() == pytest.approx(sorted(times))


def test_the_next_run_begins_anew(mlp):
    watched = fmwc.Watched(mlp)
    with pytest.raises(UsageError, match="nothing was watched"):
        watched.trajectory(torch.zeros(1, 2))
    for count in (3, 5):
        x0 = torch.randn(count, 2)
        run = watched.trajectory(euler(watched, x0, 4), default_score="integrated")
        assert torch.equal(run.x0, x0)
        assert run.confidence.shape == (count,)


def test_states_of_channels():
    field = dict_field()
    watched = fmwc.Watched(field)
    x = {"place": torch.rand(3, 2), "shape": torch.randn(3, 3)}
    for t in (0.0, 0.5):
        watched(x, t)
    assert watched.trajectory(x).score("integrated").shape == (3,)


def test_a_network_in_training_mode_is_watched_in_evaluation_mode():
    field = mlp_field()
    field.train()
    fmwc.Watched(field)(torch.randn(3, 2), 0.5)
    assert field.network.training
