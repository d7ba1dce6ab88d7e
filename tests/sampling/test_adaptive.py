"""Adaptive controllers of the paper and of this library, and grids fitted to a pilot run."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.errors import UsageError
from fmwc.flow import Channel, Space, euclidean
from fmwc.moments import Moments
from fmwc.sampling import (
    Damped,
    Ema,
    Extrapolated,
    Grid,
    SamplingConfig,
    Trajectory,
    Uniform,
    fit_grid,
    sample,
)
from fmwc.sampling.adaptive import std_norm
from tests.conftest import mlp_field
from tests.options import arguments

PLANE = euclidean((2,))


def read(*sigmas):
    """Return moments of samples in the plane with these σ."""
    var = torch.tensor(sigmas).square()[:, None] * torch.tensor([0.75, 0.25])
    return Moments(torch.ones_like(var), var)


def walk(controller, readings, start=0.0):
    """Return the times of a controller for given readings."""
    controller = controller.begin(PLANE)
    t = start = torch.full((len(readings[0].mean),), start)
    grid = [t]
    for step, moments in enumerate(readings):
        t = controller.next_time(step, t, start, moments)
        grid.append(t)
    return torch.stack(grid)


def pilot(times, std):
    """Return a run with these σ, `(R, P)`, at these times."""
    times = torch.as_tensor(times)[:, None].expand(-1, std.shape[1])
    var = std.square()[..., None]
    x = torch.zeros(std.shape[1], 1)
    return Trajectory(x=x, x0=x, times=times, mean=torch.zeros_like(var), var=var, grid=torch.cat([times, times[:1]]))


def everyone(steps=6):
    """Every adaptive controller, by name."""
    return {
        "ema": Ema(steps, 0.4),
        "damped": Damped(steps, 0.3, 0.4, 0.5),
        "extrapolated": Extrapolated(Uniform(steps)),
        "extrapolated, ema": Extrapolated(Ema(steps, 0.4), 0.7),
        "extrapolated, damped": Extrapolated(Damped(steps, 0.3, 0.4, 0.5)),
    }


# ---- σ ---------------------------------------------------------------------------------------------------------------


def test_the_spread_is_that_of_the_trajectory(mlp, product):
    for field in (mlp, product):
        run = sample(field, 4, steps=1)
        moments = field.moments(run.x0, run.times[0])
        torch.testing.assert_close(std_norm(field.space, moments), run.std[0])


def test_channels_count_in_their_units():
    space = Space({"a": Channel((2,), weight=4.0), "b": Channel((3,))})
    mean = {"a": torch.zeros(1, 2), "b": torch.zeros(1, 3)}
    var = {"a": torch.ones(1, 1), "b": torch.full((1, 3), 2.0)}  # one number for both coordinates of a
    assert std_norm(space, Moments(mean, var)).item() == pytest.approx(math.sqrt(4 * 2 + 3 * 2))


# ---- Ema -------------------------------------------------------------------------------------------------------------


def test_the_step_of_ema_by_hand():
    """λ = ½, N = 4. σ̄ starts at σ(0) and averages σ; the remaining time is divided among the remaining steps."""
    sigmas = [(1.0, 2.0), (2.0, 2.0), (1.0, 1.0), (5.0, 1.0)]
    grid = walk(Ema(4, 0.5), [read(*s) for s in sigmas])
    for sample_ in range(2):
        t, mean = 0.0, sigmas[0][sample_]
        for step, row in enumerate(sigmas):
            mean = row[sample_] if step == 0 else (mean + row[sample_]) / 2
            dt = (1 - t) / (4 - step) * (mean / row[sample_]) ** 0.5
            t = 1.0 if step == 3 else min(t + max(dt, 0.01 / 4), 1.0)
            assert grid[step + 1, sample_].item() == pytest.approx(t, rel=1e-5)


@given(st.integers(1, 20), st.floats(0, 0.9), st.floats(0, 9, width=32))
def test_ema_of_a_constant_variance_is_uniform(steps, start, sigma):
    grid = walk(Ema(steps, 0.3), [read(sigma)] * steps, start)
    torch.testing.assert_close(grid[:, 0], torch.linspace(start, 1, steps + 1), atol=1e-5, rtol=0)
    assert grid[-1, 0] == 1


def test_zero_variance_gives_equal_steps():
    assert walk(Ema(2, 0.3), [read(0.0), read(0.0)])[:, 0].tolist() == [0, 0.5, 1]
    kept = Damped(2, 0.0).begin(PLANE).follow(torch.ones(1, 2), torch.zeros(1), read(0.0), {})
    assert kept.tolist() == [[1, 1]]


# ---- Damped ----------------------------------------------------------------------------------------------------------


def follow_twice(controller, space, first, second, v, t=0.8, speeds=None):
    """Return the followed velocity after two readings of the variance."""
    controller = controller.begin(space)
    zeros = {n: torch.zeros_like(c) for n, c in v.items()} if isinstance(v, dict) else torch.zeros_like(v)
    controller.follow(zeros, torch.zeros(1), Moments(v, first), speeds or {})
    return controller.follow(v, torch.full((1,), t), Moments(v, second), speeds or {})


def test_damping_by_hand():
    """λ = ½: σ rises from 1 to 3 in the first coordinate (σ̄ = 2, r = ½), and falls in the second."""
    var = torch.tensor([[1.0, 1.0]]), torch.tensor([[9.0, 0.25]])
    v = torch.tensor([[2.0, 2.0]])
    assert follow_twice(Damped(5, 0.7, 0.5, 0.6), PLANE, *var, v).tolist() == [[pytest.approx(2 * (1 - 0.6 * 0.5)), 2]]
    assert follow_twice(Damped(5, 0.7, 0.5, 9.0), PLANE, *var, v).tolist() == [[0, 2]]  # never backwards
    assert follow_twice(Damped(5, 0.9, 0.5, 9.0), PLANE, *var, v).tolist() == [[2, 2]]  # not yet late


def test_an_annealed_channel_has_its_slope_damped():
    """v includes the factor 1 + s t, which damping changes to 1 + s (1 − κ r)₊ t."""
    space = Space({"a": Channel((2,), anneal=5.0), "b": Channel((2,))})
    one = {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
    more = {"a": torch.full((1, 2), 9.0), "b": torch.full((1, 2), 9.0)}
    v = {"a": torch.full((1, 2), 1 + 5 * 0.8), "b": torch.ones(1, 2)}
    speeds = {"a": torch.tensor([5.0])}
    kept = follow_twice(Damped(5, 0.7, 0.5, 0.6), space, one, more, v, speeds=speeds)
    assert kept["a"][0, 0].item() == pytest.approx(1 + 5 * 0.7 * 0.8)
    assert kept["b"][0, 0].item() == pytest.approx(0.7)
    only = follow_twice(Damped(5, 0.7, 0.5, {"b": 9.0}), space, one, more, v, speeds=speeds)
    assert (only["a"][0, 0].item(), only["b"][0, 0].item()) == (5, 0)


def test_an_image_is_damped_by_channel_and_a_long_vector_as_a_whole():
    image, vector = euclidean((2, 4, 4)), euclidean((17,))
    first, second = torch.ones(1, 2, 4, 4), torch.ones(1, 2, 4, 4)
    second[:, 0, 0] = 33.0  # the mean over channel 0 rises from 1 to 9, so σ triples
    kept = follow_twice(Damped(5, 0.0, 0.5, 0.6), image, first, second, torch.ones(1, 2, 4, 4))
    torch.testing.assert_close(kept, torch.tensor([0.7, 1.0])[None, :, None, None].expand(1, 2, 4, 4))
    second = torch.ones(1, 17)
    second[:, 3] = 1 + 8 * 17
    kept = follow_twice(Damped(5, 0.0, 0.5, 0.6), vector, torch.ones(1, 17), second, torch.ones(1, 17))
    torch.testing.assert_close(kept, torch.full((1, 17), 0.7))


def test_damping_without_gain_changes_nothing(mlp, conv, product):
    for field in (mlp, conv, product):
        options = {"anneal": {"place": 5.0}} if field is product else {}
        plain = sample(field, 5, **arguments(steps=6, **options))
        run = sample(field, 5, **arguments(controller=Damped(6, 0.0, 0.4, 0.0), **options))
        for name, value in plain.x.items() if isinstance(plain.x, dict) else [("x", plain.x)]:
            assert torch.equal(run.x[name] if isinstance(run.x, dict) else run.x, value)


# ---- fitted grids ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.floats(0, 8))
def test_a_constant_profile_gives_equal_steps(steps, power):
    grid = fit_grid(None, steps, pilot=pilot(torch.arange(7) / 7, torch.full((7, 3), 0.2)), power=power)
    assert grid.times == pytest.approx([n / steps for n in range(steps + 1)], abs=1e-6)


def test_quantiles_of_a_known_profile():
    """σ² = t: the share below t is t²."""
    times = torch.arange(200) / 200
    rising = pilot(times, (times + 1 / 400).sqrt()[:, None].expand(-1, 3))
    assert fit_grid(None, 5, pilot=rising).times == pytest.approx([math.sqrt(n / 5) for n in range(6)], abs=2e-3)
    steep = pilot([0.0, 0.8], torch.tensor([[1.0, 1.0], [3.0, 1.0]]))  # densities 1 and 5
    assert fit_grid(None, 2, pilot=steep).times == pytest.approx((0, 0.8 + 0.1 / 5, 1))


def test_a_grid_from_a_field(mlp):
    grid = fit_grid(mlp, 5, pilot=20)
    assert sample(mlp, 3, config=SamplingConfig(controller=grid)).evaluations == 5
    run = sample(mlp, 20, steps=50)
    assert fit_grid(mlp, 5, pilot=run) == grid
    assert fit_grid(mlp, 5, pilot=run, power=0.0).times == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1], abs=1e-6)


# ---- extrapolation ---------------------------------------------------------------------------------------------------


def test_extrapolation_is_second_order():
    """v = x ends at e·x0. Half the step size halves the error of Euler, and quarters that of the two-step rule."""

    def error(controller):
        end = sample(
            lambda x, t: x.double(),
            x0=torch.ones(1, 1).double(),
            confidence=None,
            config=SamplingConfig(controller=controller),
        ).x
        return abs(end.item() - math.e)

    assert error(Uniform(40)) / error(Uniform(80)) == pytest.approx(2, rel=0.05)
    assert error(Extrapolated(Uniform(40))) / error(Extrapolated(Uniform(80))) == pytest.approx(4, rel=0.1)
    warped = [tuple((n / k) ** 1.5 for n in range(k + 1)) for k in (40, 80)]
    assert error(Extrapolated(Grid(warped[0]))) / error(Extrapolated(Grid(warped[1]))) == pytest.approx(4, rel=0.15)


# ---- laws of every controller ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", everyone())
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_every_sample_arrives_in_exactly_n_evaluations(name, steps, mlp, conv, product):
    for field in (mlp, conv, product):
        calls = []
        sample(field, 5, steps=1)  # the first reading of a batch of this size also proves whose rows layers see
        handle = field.network.register_forward_hook(lambda *a, calls=calls: calls.append(1))
        run = sample(field, 5, config=SamplingConfig(controller=everyone(steps)[name]))
        handle.remove()
        assert run.evaluations == steps == len(calls)  # the forward pass of the reading also gives the velocity
        assert run.grid.shape == (steps + 1, 5)
        assert bool((run.grid[-1] == 1).all())
        assert bool((run.grid.diff(dim=0) >= 0).all())


@pytest.mark.parametrize("name", everyone())
def test_a_late_start_ends_at_one(name, mlp):
    start = torch.tensor([0.0, 0.4, 0.9])
    run = sample(mlp, 3, config=SamplingConfig(controller=everyone()[name], start=start))
    assert torch.equal(run.grid[0], start)
    assert bool((run.grid[-1] == 1).all())


@pytest.mark.parametrize("name", everyone())
def test_results_do_not_depend_on_batches(name):
    field, controller = mlp_field().double(), everyone()[name]
    x0 = torch.randn(7, 2, dtype=torch.float64)
    whole, split = (sample(field, x0=x0, config=SamplingConfig(controller=controller, batch=b)) for b in (7, 3))
    torch.testing.assert_close(split.x, whole.x)
    torch.testing.assert_close(split.grid, whole.grid)


@pytest.mark.parametrize("name", everyone())
def test_controllers_keep_no_state_between_runs(name, mlp):
    controller = everyone()[name]
    fresh = sample(mlp, 5, config=SamplingConfig(controller=everyone()[name]))
    sample(mlp, 9, seed=4, config=SamplingConfig(controller=controller))
    again = sample(mlp, 5, config=SamplingConfig(controller=controller))
    assert torch.equal(again.x, fresh.x)
    assert all(getattr(controller, state, None) is None for state in ("mean", "last", "dt"))


# ---- refusals --------------------------------------------------------------------------------------------------------


REFUSED = {
    "no confidence": ({"controller": Ema(3), "confidence": None}, "variance"),
    "heun": ({"controller": Damped(3), "stepper": "heun"}, "euler"),
    "transport": ({"controller": Extrapolated(Uniform(3)), "transport": True}, "transport"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, mlp):
    options, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        sample(mlp, 3, **arguments(**options))
