"""Critical times computed by hand, and edits of fields with known answers and of small crystals."""

import dataclasses

import pytest
import torch

import fmwc
from fmwc.errors import UsageError
from fmwc.estimators import Linearised, Transported
from fmwc.flow import Channel, FlatTorus, Space
from fmwc.sampling import Grid, Sampler, SamplingConfig, Trajectory
from fmwc.uses.continuation import OwnTimes, some_with_states, step_at, with_states
from fmwc.uses.edit import critical_time, edit, random_times
from tests import cells
from tests.options import arguments, when

STEPS = 10


def constant(x, t, **cond):
    return torch.ones_like(x)


def plain_run(count=6, **options):
    return fmwc.sample(constant, count, **arguments(space=(2,), steps=STEPS, confidence=None, seed=0, **options))


def hand_made(var, units=None):
    """Return a run of three times with given variances, `(R, B, 2)`."""
    times = torch.tensor([0.0, 0.25, 0.5])[:, None].expand(-1, 2)
    grid = torch.tensor([0.0, 0.25, 0.5, 1.0])[:, None].expand(-1, 2)
    x = {"a": torch.zeros(2, 1), "b": torch.zeros(2, 1)}
    split = {"a": var[..., :1], "b": var[..., 1:]}
    mean = {name: torch.zeros_like(value) for name, value in split.items()}
    return Trajectory(x=x, x0=x, times=times, mean=mean, var=split, grid=grid, units=units or {})


VAR = torch.tensor([[[9.0, 1.0], [0.0, 0.0]], [[1.0, 2.0], [3.0, 5.0]], [[1.0, 3.0], [4.0, 1.0]]])


def test_critical_time_is_at_the_peak_of_the_variance():
    run = hand_made(VAR)
    assert critical_time(run, "a").tolist() == [0.0, 0.5]
    assert critical_time(run, "b").tolist() == [0.5, 0.25]
    assert critical_time(run).tolist() == [0.0, 0.25]
    assert critical_time(hand_made(VAR, {"b": 10.0})).tolist() == [0.5, 0.25]  # channels add up in their units


def test_transported_critical_time_is_at_the_peak_per_squared_step():
    profile = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]], [[3.0, 9.0], [4.0, 1.0]]])
    run = dataclasses.replace(hand_made(VAR), transported=Transported(torch.zeros(2, 1), profile, ("l", "m")))
    # Sums over layers: 2, 1, 7 and 0, 2, 10. The last step is twice as long, so it counts a quarter.
    assert critical_time(run, kind="transported").tolist() == [0.0, 0.5]


def test_random_times_are_uniform_on_the_grid():
    run = fmwc.sample(constant, 4000, steps=STEPS, confidence=None, config=SamplingConfig(space=(2,)))
    times = random_times(run, seed=1)
    assert set(times.tolist()) == set(run.grid[:-1, 0].tolist())
    counts = torch.bincount(step_at(run, times), minlength=STEPS)
    assert counts.min() > 320
    assert counts.max() < 480
    assert random_times(run, seed=1, replicates=3).shape == (4000, 3)
    assert (times != random_times(run, seed=2)).any()


def test_step_at_rounds_down():
    run = plain_run(4)
    at = torch.tensor([0.0, 0.29, 0.3, 0.9999])
    assert step_at(run, at).tolist() == [0, 2, 3, 9]


@pytest.mark.parametrize("at", [0.0, 0.3, 0.95])
def test_in_a_constant_field_the_end_moves_by_the_noise(at):
    run = plain_run(4000)
    edited = edit(constant, run, None, at=at, scale=0.7, seed=3)
    moved = edited.x - run.x
    assert moved.std().item() == pytest.approx(0.7, rel=0.05)
    assert moved.mean().abs().item() < 0.05
    again = edit(constant, run, "x", at=0.5, scale=1.4, seed=3)
    torch.testing.assert_close(again.x - run.x, 2 * moved, atol=1e-5, rtol=1e-5)  # the same noise, twice as large


@pytest.mark.parametrize("stepper", ["euler", "midpoint", "heun"])
@pytest.mark.parametrize(("keep_states", "schedule"), [(True, 1), (False, (0.2, 0.6))])
def test_scale_zero_reproduces_the_run(mlp, stepper, keep_states, schedule):
    run = fmwc.sample(
        mlp, 20, steps=STEPS, schedule=when(schedule), config=SamplingConfig(keep_states=keep_states, stepper=stepper)
    )
    edited = edit(mlp, run, None, at=random_times(run, 5), scale=0.0, config=SamplingConfig(stepper=stepper))
    assert torch.equal(edited.x, run.x)
    for name in ("times", "mean", "var", "grid"):
        torch.testing.assert_close(getattr(edited, name), getattr(run, name))
    assert (edited.states is None) == (run.states is None)
    apart = edit(
        mlp, run, None, at=random_times(run, 5), scale=0.0, together=False, config=SamplingConfig(stepper=stepper)
    )
    torch.testing.assert_close(apart.x, run.x, atol=1e-5, rtol=1e-5)


def test_scale_zero_reproduces_a_run_with_given_times(mlp):
    times = [0.0, 0.5, 0.7, 0.8, 1.0]
    run = fmwc.sample(mlp, 8, config=SamplingConfig(controller=Grid(times)))
    assert torch.equal(edit(mlp, run, None, at=0.75, scale=0.0).x, run.x)
    small = edit(mlp, run.compact(), None, at=0.75, scale=0.0)
    assert torch.equal(small.x, run.x)
    torch.testing.assert_close(small.score(), run.score())


def test_edit_keeps_separate_times_per_sample(mlp):
    generator = torch.Generator().manual_seed(0)
    inner = torch.rand(5, 8, generator=generator).sort(0).values * 0.98 + 0.01
    grid = torch.cat([torch.zeros(1, 8), inner, torch.ones(1, 8)])
    run = Sampler(mlp, SamplingConfig(controller=OwnTimes(grid)), Linearised())(torch.randn(8, 2, generator=generator))
    assert torch.equal(run.grid, grid)
    edited = edit(mlp, run, None, at=random_times(run, 2), scale=0.0)
    assert torch.equal(edited.x, run.x)
    assert torch.equal(edited.var, run.var)
    assert torch.equal(edit(mlp, run, None, at=0.5, scale=0.3, together=False).grid, grid)


def test_readings_before_an_edit_are_kept(mlp):
    run = fmwc.sample(mlp, 8, steps=STEPS, config=SamplingConfig(keep_states=True))
    at = torch.linspace(0.05, 0.95, 8)
    edited, first = edit(mlp, run, None, at=at, scale=1.0), step_at(run, at)
    for step in range(STEPS):
        same = (edited.var[step] == run.var[step]).all(1)
        assert same.tolist() == (step < first).tolist()
        kept = (edited.states[step] == run.states[step]).all(1)
        assert kept.tolist() == (step < first).tolist()
    torch.testing.assert_close(edited.states[-1], edited.x)
    assert edited.score().shape == (8,)
    unread = edit(mlp, run, None, at=at, scale=1.0, confidence=None)
    assert torch.equal(unread.x, edited.x)
    assert unread.times.shape == (0, 8)


def test_replicates_are_adjacent_rows(mlp):
    run = fmwc.sample(mlp, 5, steps=STEPS)
    edited = edit(mlp, run, None, at=random_times(run, 1, 3), scale=0.1, replicates=3)
    assert len(edited) == 15
    assert torch.equal(edited.x0, run.x0.repeat_interleave(3, 0))
    assert len(edited.x[:3].unique(dim=0)) == 3


def test_noise_is_added_to_the_chosen_channel_only(product):
    run = fmwc.sample(product, 6, steps=STEPS, config=SamplingConfig(keep_states=True))
    edited = edit(product, run, "place", at=0.4, scale=0.3)
    assert torch.equal(edited.states[4]["shape"], run.states[4]["shape"])
    assert (edited.states[4]["place"] != run.states[4]["place"]).all()
    assert ((edited.states[4]["place"] >= 0) & (edited.states[4]["place"] < 1)).all()
    assert (edited.x["shape"] != run.x["shape"]).any()  # afterwards all channels are free
    named = edit(product, run, None, at=0.4, scale={"shape": 0.3})
    assert torch.equal(named.states[4]["place"], run.states[4]["place"])


def test_noise_in_all_channels_is_scaled_by_their_weights():
    space = Space({"a": Channel((1,), weight=100.0), "b": Channel((1,))})

    def still(x, t):
        return {name: torch.zeros_like(value) for name, value in x.items()}

    run = fmwc.sample(still, 4000, steps=2, confidence=None, config=SamplingConfig(space=space))
    edited = edit(still, run, None, at=0.5, scale=2.0, config=SamplingConfig(space=space))
    assert (edited.x["a"] - run.x["a"]).std().item() == pytest.approx(0.2, rel=0.05)
    assert (edited.x["b"] - run.x["b"]).std().item() == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("channel", ["type", "coord", "lattice", None])
def test_edited_crystals_keep_absent_atoms_at_zero_and_do_not_drift(channel):
    field = cells.field(torch.float32)
    atoms = torch.tensor([2, 5, 3, 1])
    run = fmwc.sample(field, 4, steps=4, cond={"atoms": atoms}, config=SamplingConfig(keep_states=True))
    edited = edit(field, run, channel, at=critical_time(run, channel), scale=0.05)
    absent = ~cells.present(atoms)
    for state in [edited.x, *edited.states]:
        assert (state["type"][absent] == 0).all()
        assert (state["coord"][absent] == 0).all()
    first = step_at(run, critical_time(run, channel))
    for i, step in enumerate(first.tolist()):
        for name in ("type", "coord", "lattice"):
            same = torch.equal(edited.states[step][name][i], run.states[step][name][i])
            centred_alone = name == "coord" and atoms[i] == 1  # a single atom does not move
            assert same == (channel not in (None, name) or centred_alone)
        moved = FlatTorus().logmap(run.states[step]["coord"][i], edited.states[step]["coord"][i])
        assert moved.sum(0).abs().max() < 1e-5
    again = edit(field, run, channel, at=critical_time(run, channel), scale=0.0)
    for name, value in run.x.items():
        assert torch.equal(again.x[name], value)


def test_states_are_recomputed_and_compared_with_the_run(mlp):
    run = fmwc.sample(mlp, 8, steps=3, seed=1, config=SamplingConfig(stepper="heun"))
    again, spent = with_states(mlp, run, config=SamplingConfig(stepper="heun"))
    assert spent == 8 * 3 * 2
    assert torch.equal(again.states[-1], run.x)
    stray = dataclasses.replace(run, x=run.x + 0.1)
    with pytest.raises(UsageError, match="keep_states=True"):
        edit(mlp, stray, None, at=0.5, scale=0.1, config=SamplingConfig(stepper="heun"))


def by_batch(x, t, **cond):
    """Return a velocity that depends on the batch, as rounding does."""
    return x.sum() * torch.ones_like(x)


def test_states_of_some_samples_are_recomputed_in_the_batches_of_the_run():
    config = SamplingConfig(space=(2,), batch=4)
    run = fmwc.sample(by_batch, 10, steps=3, seed=1, confidence=None, config=config)
    with pytest.raises(UsageError, match="different samples"):
        with_states(by_batch, run.take(torch.tensor([1, 9])), config=config)
    some = some_with_states(by_batch, run, torch.tensor([1, 9]), config=config)
    assert torch.equal(some.states[-1], run.x[[1, 9]])


class ByClass(torch.nn.Module):
    """A velocity that equals the class everywhere."""

    def forward(self, x, t, y):
        return torch.ones_like(x) * y[:, None]


def test_a_replaced_condition_holds_from_the_edit_on():
    y = torch.tensor([1.0, 2.0])
    run = fmwc.sample(ByClass(), 2, steps=STEPS, confidence=None, cond={"y": y}, config=SamplingConfig(space=(2,)))
    new = torch.tensor([5.0, 5.0])
    done = edit(
        ByClass(), run, None, at=0.4, scale=0.0, replicates=2, cond={"y": new}, config=SamplingConfig(space=(2,))
    )
    travelled = (done.x - done.x0)[:, 0]
    torch.testing.assert_close(travelled, torch.tensor([0.4, 0.4, 0.8, 0.8]) + 0.6 * 5)
    assert done.cond["y"].tolist() == [5.0] * 4
    assert run.cond["y"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("channel", "change"),
    [
        ("plaice", {}),
        (None, {"scale": {"plaice": 0.1}}),
        ("place", {"scale": -0.1}),
        ("place", {"at": 1.0}),
        ("place", {"at": torch.tensor([0.1, 0.2])}),
        ("place", {"replicates": 0}),
    ],
    ids=str,
)
def test_invalid_arguments(channel, change, product):
    run = fmwc.sample(product, 3, steps=4, config=SamplingConfig(keep_states=True))
    with pytest.raises(UsageError):
        edit(product, run, channel, **{"at": 0.5, "scale": 0.1, **change})
