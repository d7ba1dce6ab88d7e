"""Controllers and variance schedules."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.errors import UsageError
from fmwc.estimators import Linearised
from fmwc.sampling import Grid, Sampler, SamplingConfig, Schedule, Uniform, read_times, sample
from fmwc.sampling.confidence import is_due
from tests.conftest import mlp_field
from tests.options import when


@given(st.integers(1, 60), st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=5))
def test_uniform_steps_are_equal_and_end_at_exactly_one(steps, starts):
    start = torch.tensor(starts)
    t, grid, controller = start, [start], Uniform(steps)
    for step in range(controller.steps):
        t = controller.next_time(step, t, start, None)
        grid.append(t)
    assert bool((t == 1).all())
    dt = torch.stack(grid).diff(dim=0)
    torch.testing.assert_close(dt, ((1 - start) / steps).expand_as(dt), atol=3e-7, rtol=0)


def test_a_run_follows_its_grid(mlp):
    times = [0.0, 0.05, 0.5, 0.9, 1.0]
    run = sample(mlp, 3, config=SamplingConfig(controller=Grid(times)))
    torch.testing.assert_close(run.grid, torch.tensor(times)[:, None].expand(5, 3))
    torch.testing.assert_close(run.times, run.grid[:-1])
    later = sample(mlp, 3, config=SamplingConfig(controller=Grid(times[2:])))
    assert later.grid[:, 0].tolist() == pytest.approx(times[2:])


WRONG_GRIDS = {
    "falls": (0, 0.5, 0.4, 1),
    "ends early": (0, 0.5),
    "NaN": (0, float("nan"), 1),
}


@pytest.mark.parametrize("name", WRONG_GRIDS)
def test_invalid_grids(name):
    with pytest.raises(UsageError, match="rise"):
        Grid(WRONG_GRIDS[name])


def test_custom_controllers_receive_the_moments():
    """A controller needs two members only; samples of a batch may have different times."""
    seen = []

    class Halving:
        steps = 4

        def next_time(self, step, t, start, moments):
            seen.append(moments)
            return torch.ones_like(t) if step == self.steps - 1 else (1 + t) / 2

    run = Sampler(mlp_field(), SamplingConfig(controller=Halving(), start=0.2), Linearised(), Schedule.every(2))(
        torch.randn(3, 2)
    )
    assert run.grid[:, 0].tolist() == pytest.approx([0.2, 0.6, 0.8, 0.9, 1.0])
    assert [m is not None for m in seen] == [False, True, False, True]


# ---- schedules ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 50))
def test_every_kth_step_and_always_the_last(k, steps):
    t = torch.zeros(2)
    read = [n for n in range(steps) if is_due(Schedule.every(k), n, steps, None, t)]
    assert read[-1] == steps - 1
    assert all(b - a == k for a, b in pairwise(read))
    assert read[0] < k


EVERY = {1: [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], 3: [0.0, 0.3, 0.6, 0.9], 4: [0.1, 0.5, 0.9], 99: [0.9]}


@pytest.mark.parametrize("k", EVERY)
def test_schedules_by_number(k, mlp):
    run = sample(mlp, 3, steps=10, schedule=when(k))
    torch.testing.assert_close(run.times, torch.tensor(EVERY[k])[:, None].expand(-1, 3))
    full = sample(mlp, 3, steps=10)
    kept = [full.times[:, 0].tolist().index(t) for t in run.times[:, 0].tolist()]
    assert torch.equal(run.x, full.x)
    assert torch.equal(run.var, full.var[kept])
    assert torch.equal(run.mean, full.mean[kept])
    assert run.evaluations == 10


CHOSEN = {
    "on the grid": ([0.0, 0.5], [0.0, 0.5]),
    "between": ([0.25, 0.72], [0.3, 0.8]),
    "two in one step": ([0.21, 0.25], [0.3]),
    "after the last": ([0.1, 0.95], [0.1, 0.9]),
    "the end": ([1.0], [0.9]),
    "any order": ([0.5, 0.0], [0.0, 0.5]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_schedules_by_time(name, mlp):
    times, expected = CHOSEN[name]
    run = sample(mlp, 3, steps=10, schedule=when(times))
    assert run.times.shape == (len(expected), 3)
    torch.testing.assert_close(run.times, torch.tensor(expected)[:, None].expand(-1, 3))


def test_batch_is_read_if_any_sample_is_due(mlp):
    run = sample(mlp, 2, steps=4, schedule=Schedule.at([0.5]), config=SamplingConfig(start=torch.tensor([0.0, 0.6])))
    torch.testing.assert_close(run.times, torch.tensor([[0.0, 0.6], [0.5, 0.8]]))


def test_recorded_times_are_the_steps_they_were_recorded_at():
    for steps in range(1, 120):
        recorded = read_times(steps, Schedule.every(1))  # rounded
        assert read_times(steps, Schedule.at(recorded)) == recorded
