"""Variances read outside the sampler: in another loop, and again along a finished run."""

import pytest
import torch
from torch import nn

import fmwc
from fmwc.errors import UsageError
from fmwc.estimators import Linearised
from fmwc.networks import MLP
from fmwc.sampling import SamplingConfig, reread, sample
from tests.options import reader, when


def euler(velocity, x, steps):
    for k in range(steps):
        x = x + velocity(x, torch.tensor(k / steps)) / steps
    return x


def test_recorded_loop_equals_the_sampler(mlp):
    x0 = torch.randn(6, 2)
    recorder = fmwc.VarianceRecorder(mlp)
    run, ours = recorder.trajectory(euler(recorder, x0, 20)), fmwc.sample(mlp, x0=x0, steps=20)
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
    recorder = fmwc.VarianceRecorder(mlp)
    for k, t in enumerate(times):
        recorder(x * k, t)
    run = recorder.trajectory(x)
    assert run.times[:, 0].tolist() == pytest.approx([0.0, 0.25, 0.8])
    expected = [mlp.moments(x * k, t).var for k, t in ((0, 0.0), (2, 0.25), (4, 0.8))]
    torch.testing.assert_close(run.var, torch.stack(expected))


def adaptive(velocity, x, tolerance):
    """Integrate by Euler steps controlled by Heun's error, halved if rejected; return the accepted times and states."""
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
    fine = fmwc.sample(mlp, x0=x0, steps=100)
    torch.testing.assert_close(run.score("integrated"), fine.score("integrated"), rtol=0.1, atol=0)
    recorder = fmwc.VarianceRecorder(mlp)
    times, states, _ = adaptive(recorder, x0, 1e-3)
    recorded = recorder.trajectory(states[-1])
    torch.testing.assert_close(recorded.times[:-1, 0], times[:-1])  # also the end of the last step
    torch.testing.assert_close(recorded.score("integrated"), fine.score("integrated"), rtol=0.1, atol=0)


X = torch.linspace(-1, 1, 12).reshape(6, 2)


REFUSED = {
    "no times": ([X, X], None),
    "words": ([X, X], ["a", "b"]),
    "another shape": ([X, torch.zeros(6, 3)], [0.0, 1.0]),
}


@pytest.mark.parametrize(("states", "times"), REFUSED.values(), ids=REFUSED)
def test_invalid_states(states, times, mlp):
    with pytest.raises(UsageError):
        fmwc.VarianceRecorder(mlp).read(states, times)
    if isinstance(states, list):
        with pytest.raises(UsageError):
            fmwc.VarianceRecorder(mlp)(states[-1], times and times[-1])


# ---- rereading -------------------------------------------------------------------------------------------------------


def fields():
    torch.manual_seed(0)
    network = MLP(2, 8, 2)
    return [fmwc.attach(network, space=(2,)) for _ in range(2)]


@pytest.mark.parametrize("schedule", [1, 3, (0.25, 0.6)])
def test_rereading_with_the_same_noise_gives_the_same_variance(schedule):
    field, _ = fields()
    run = sample(
        field, 7, steps=10, schedule=when(schedule), confidence=Linearised(), config=SamplingConfig(keep_states=True)
    )
    again = reread(field, run, reader("linearised"), schedule=when(schedule), batch=3)
    torch.testing.assert_close(again.times, run.times)
    torch.testing.assert_close(again.var, run.var)
    torch.testing.assert_close(again.mean, run.mean)
    assert torch.equal(again.x, run.x)


def test_rereading_with_another_noise_changes_the_variance_alone():
    field, other = fields()
    run = sample(field, 5, steps=6, config=SamplingConfig(keep_states=True))
    with torch.no_grad():
        for layer in other.noise.layers:
            layer.inference.out.bias += 1.0  # log α, one higher everywhere
    again = reread(other, run, reader("linearised"))
    assert torch.equal(again.x, run.x)
    torch.testing.assert_close(again.var, run.var * torch.e)


def test_rereading_does_not_depend_on_batches():
    field, _ = fields()
    run = sample(field, 9, steps=4, confidence=None, config=SamplingConfig(keep_states=True))
    one, some = (reread(field, run, Linearised(2), batch=size) for size in (9, 2))
    torch.testing.assert_close(one.var, some.var)


def test_networks_in_training_mode_are_reread_in_evaluation_mode():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    net.forward = lambda x, t: nn.Sequential.forward(net, x)
    field = fmwc.attach(net, space=(2,)).train()
    run = sample(field, 4, steps=3, config=SamplingConfig(keep_states=True))
    torch.testing.assert_close(reread(field, run, reader("linearised")).var, run.var)
    assert net.training
