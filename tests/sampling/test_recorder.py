"""A field in somebody else's loop gives what ours gives."""

import numpy as np
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
    watched = fmwc.VarianceRecorder(mlp)
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
    assert torch.equal(fmwc.VarianceRecorder(mlp, estimator)(x, 0.3), mlp(x, t))


def test_a_rejected_step_is_not_counted(mlp):
    x, times = torch.randn(6, 2), (0.0, 0.5, 0.25, 0.8, 0.8)
    watched = fmwc.VarianceRecorder(mlp)
    for k, t in enumerate(times):
        watched(x * k, t)
    run = watched.trajectory(x)
    assert run.times[:, 0].tolist() == pytest.approx([0.0, 0.25, 0.8])
    expected = [mlp.moments(x * k, t).var for k, t in ((0, 0.0), (2, 0.25), (4, 0.8))]
    torch.testing.assert_close(run.var, torch.stack(expected))


def adaptive(velocity, x, tolerance):
    """Euler steps controlled by Heun's, halved where they are rejected; the times and states that were accepted."""
    t, dt, times, states, rejected = 0.0, 0.5, [0.0], [x], 0
    while t < 1:
        x = x.detach()
        dt = min(dt, 1 - t)
        first = velocity(x, torch.tensor(t))
        second = velocity(x + first * dt, torch.tensor(t + dt))
        if float((second - first).detach().abs().max()) * dt / 2 > tolerance:
            dt, rejected = dt / 2, rejected + 1
            continue
        x, t, dt = x + (first + second) * (dt / 2), t + dt, dt * 1.5
        times.append(t)
        states.append(x)
    return torch.tensor(times), states, rejected


def test_the_states_an_adaptive_solver_accepts(mlp):
    """The score is the integral along the trajectory, however many steps were tried."""
    x0 = torch.randn(6, 2)
    times, states, rejected = adaptive(mlp, x0, 1e-3)
    assert rejected > 0
    run = fmwc.VarianceRecorder(mlp).read(states, times)
    assert run.x is states[-1]
    assert torch.equal(run.x0, x0)
    assert torch.equal(run.times[:, 0], times[:-1])
    torch.testing.assert_close(run.var[2], mlp.moments(states[2], times[2]).var)
    fine = fmwc.sample(mlp, x0=x0, steps=400)
    torch.testing.assert_close(run.score("integrated"), fine.score("integrated"), rtol=0.1, atol=0)
    watched = fmwc.VarianceRecorder(mlp)
    times, states, _ = adaptive(watched, x0, 1e-3)
    recorded = watched.trajectory(states[-1])
    torch.testing.assert_close(recorded.times[:-1, 0], times[:-1])  # and the end of the last step
    torch.testing.assert_close(recorded.score("integrated"), fine.score("integrated"), rtol=0.1, atol=0)


@pytest.mark.parametrize("times", [[0.0, 0.5], [0.0, 0.5, 0.5, 1.0], [0.0, 1.0]])
def test_states_without_their_times(times, mlp):
    with pytest.raises(UsageError, match="one state for each"):
        fmwc.VarianceRecorder(mlp).read([torch.zeros(2, 2)] * (3 if len(times) < 4 else 4), times)


def test_the_next_run_begins_anew(mlp):
    watched = fmwc.VarianceRecorder(mlp)
    with pytest.raises(UsageError, match="nothing was recorded"):
        watched.trajectory(torch.zeros(1, 2))
    for count in (3, 5):
        x0 = torch.randn(count, 2)
        run = watched.trajectory(euler(watched, x0, 4), default_score="integrated")
        assert torch.equal(run.x0, x0)
        assert run.rank.shape == (count,)


def test_states_of_channels():
    field = dict_field()
    watched = fmwc.VarianceRecorder(field)
    x = {"place": torch.rand(3, 2), "shape": torch.randn(3, 3)}
    for t in (0.0, 0.5):
        watched(x, t)
    assert watched.trajectory(x).score("integrated").shape == (3,)


def test_a_network_in_training_mode_is_watched_in_evaluation_mode():
    field = mlp_field()
    field.train()
    fmwc.VarianceRecorder(field)(torch.randn(3, 2), 0.5)
    assert field.network.training


X = torch.linspace(-1, 1, 12).reshape(6, 2)


@pytest.mark.parametrize(
    "t", [0.25, np.float64(0.25), np.float32(0.25), torch.tensor(0.25).double(), [0.25] * 6], ids=str
)
@pytest.mark.parametrize("x", [X, X.double(), X.numpy(), X.tolist()], ids=["x", "double", "array", "list"])
def test_states_and_times_of_other_kinds(x, t, mlp):
    watched = fmwc.VarianceRecorder(mlp)
    expected = mlp.moments(X, 0.25)
    assert torch.equal(watched(x, t), mlp(X, torch.full((6,), 0.25)))
    run = watched.trajectory(X)
    assert torch.equal(run.var[0], expected.var)
    assert torch.equal(run.x0, X)


def test_a_field_in_double_precision():
    field = mlp_field().double()
    assert fmwc.VarianceRecorder(field)(X, 0.25).dtype == torch.float64


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_arrays_are_read(kind, mlp):
    times = np.linspace(0, 1, 5)
    states = torch.stack([X * (1 + t) for t in times.tolist()])
    expected = fmwc.VarianceRecorder(mlp).read(states, torch.linspace(0, 1, 5))
    run = fmwc.VarianceRecorder(mlp).read(states.double().numpy(), kind(times.tolist()))
    for name in ("x", "x0", "times", "var", "mean"):
        assert torch.equal(getattr(run, name), getattr(expected, name))


REFUSED = {
    "nothing": (None, None),
    "no states": (None, [0.0, 1.0]),
    "no times": ([X, X], None),
    "words": ([X, X], ["a", "b"]),
    "a number": (torch.tensor(1.0), [0.0, 1.0]),
    "another shape": ([X, torch.zeros(6, 3)], [0.0, 1.0]),
    "states of nothing": ([None, None], [0.0, 1.0]),
    "text": ("ab", [0.0, 1.0]),
    "channels": ({"x": X, "y": X}, [0.0, 1.0]),
}


@pytest.mark.parametrize(("states", "times"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read(states, times, mlp):
    with pytest.raises(UsageError):
        fmwc.VarianceRecorder(mlp).read(states, times)
    if isinstance(states, list):
        with pytest.raises(UsageError):
            fmwc.VarianceRecorder(mlp)(states[-1], times and times[-1])


def test_a_call_does_not_look_at_former_readings(mlp, monkeypatch):
    looks = []
    watched, look = fmwc.VarianceRecorder(mlp), torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda t: looks.append(t) or look(t))
    counts = []
    for k in range(12):
        looks.clear()
        watched(X, k / 12)
        counts.append(len(looks))
    assert len(set(counts)) == 1
