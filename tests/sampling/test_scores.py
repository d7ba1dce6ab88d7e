"""Every score against values worked out by hand on a trajectory small enough to do so."""

import pytest
import torch

from fmwc.errors import UnknownNameError, UsageError
from fmwc.propagate import Transported
from fmwc.sampling import EARLY, LATE, SCORES, Trajectory, sample
from fmwc.sampling.scores import score


def tiny(times=(0.0, 0.2, 0.7, 0.9), stds=((3, 4, 1, 2), (1, 1, 5, 7))):
    """Two samples, each with two coordinates that share the variance equally."""
    std = torch.tensor(stds, dtype=torch.float64).T  # (R, B)
    var = (std.square() / 2)[..., None].expand(-1, -1, 2)
    t = torch.tensor(times, dtype=torch.float64)[:, None].expand(-1, std.shape[1])
    x = torch.zeros(std.shape[1], 2, dtype=torch.float64)
    grid = torch.cat([t, torch.ones_like(t[:1])])
    return Trajectory(x=x, x0=x, times=t, mean=torch.zeros_like(var), var=var, grid=grid)


BY_HAND = {  # weights are 0.2, 0.5, 0.2, 0.1
    "endpoint": [2, 7],
    "integrated": [3 * 0.2 + 4 * 0.5 + 1 * 0.2 + 2 * 0.1, 1 * 0.2 + 1 * 0.5 + 5 * 0.2 + 7 * 0.1],
    "temporal_ratio": [
        ((1 * 0.2 + 2 * 0.1) / 0.3) / ((3 * 0.2 + 4 * 0.5) / 0.7),
        ((5 * 0.2 + 7 * 0.1) / 0.3) / ((1 * 0.2 + 1 * 0.5) / 0.7),
    ],
    "peak": [4, 7],
}


def test_every_score_is_worked_out():
    assert BY_HAND.keys() == SCORES.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_scores_by_hand(name):
    torch.testing.assert_close(tiny().score(name), torch.tensor(BY_HAND[name], dtype=torch.float64))


def test_the_parts_a_score_is_made_of():
    run = tiny()
    torch.testing.assert_close(run.std[:, 0], torch.tensor([3.0, 4, 1, 2], dtype=torch.float64))
    torch.testing.assert_close(run.weights[:, 0], torch.tensor([0.2, 0.5, 0.2, 0.1], dtype=torch.float64))
    assert run.default_score == "temporal_ratio"
    torch.testing.assert_close(run.score(), run.score("temporal_ratio"))


def test_windows_of_the_ratio_are_options():
    found = tiny().score("temporal_ratio", early=0.1, late=0.9)
    torch.testing.assert_close(found, torch.tensor([2 / 3, 7 / 1], dtype=torch.float64))
    assert (EARLY, LATE) == (0.3, 0.7)


def test_an_irregular_schedule_weighs_each_reading_by_its_time(mlp):
    """A steady variance has the same integral however often it is read, and the ratio 1."""
    for times in ((0.0, 0.1, 0.15, 0.8), (0.0, 0.25, 0.5, 0.75), (0.0, 0.01, 0.02, 0.98)):
        run = tiny(times, ((2, 2, 2, 2),))
        assert run.score("integrated").item() == pytest.approx(2 * (1 - times[0]))
        assert run.score("temporal_ratio").item() == pytest.approx(1)
    run = sample(mlp, 3, steps=10, schedule=[0.0, 0.2, 0.75])
    torch.testing.assert_close(run.weights[:, 0], torch.tensor([0.2, 0.6, 0.2]))


def test_one_number_a_sample_stands_for_every_coordinate():
    run = tiny()
    total = Trajectory(
        x=run.x, x0=run.x0, times=run.times, mean=run.mean, var=run.var.mean(2, keepdim=True), grid=run.grid
    )
    torch.testing.assert_close(total.std, run.std)


def test_a_channel_alone():
    run = tiny()
    both = Trajectory(
        x={"a": run.x, "b": run.x},
        x0={"a": run.x, "b": run.x},
        times=run.times,
        mean={"a": run.mean, "b": run.mean},
        var={"a": run.var, "b": 3 * run.var},
        grid=run.grid,
    )
    torch.testing.assert_close(both.score("peak", channel="a"), run.score("peak"))
    torch.testing.assert_close(both.score("peak", channel="b"), run.score("peak") * 3**0.5)
    torch.testing.assert_close(both.score("peak"), run.score("peak") * 2)
    with pytest.raises(UsageError, match="unknown channel 'c'"):
        both.score("peak", channel="c")


def test_dispersion_is_the_norm_of_the_transported_deviation():
    run = tiny()
    moved = Transported(torch.tensor([[9.0, 16.0], [0.0, 4.0]]), torch.zeros(4, 1, 2), ("out",))
    run = Trajectory(x=run.x, x0=run.x0, times=run.times, mean=run.mean, var=run.var, grid=run.grid, transported=moved)
    assert run.score("dispersion").tolist() == [5, 2]


ERRORS = {
    "unknown": ({"name": "peek"}, "did you mean 'peak'"),
    "dispersion without transport": ({"name": "dispersion"}, "transport=True"),
    "no such channel": ({"name": "peak", "channel": "coord"}, "unknown channel 'coord'"),
    "empty late window": ({"name": "temporal_ratio", "late": 0.95}, "late .t ≥ 0.95. window"),
    "empty early window": ({"name": "temporal_ratio", "early": 0.0}, "early .t < 0.0. window"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, message = ERRORS[name]
    with pytest.raises(UsageError, match=message) as raised:
        tiny().score(**options)
    assert "\n" not in str(raised.value)


def test_a_run_without_variance_has_no_score(mlp):
    run = sample(mlp, 3, steps=2, confidence=False)
    for name in SCORES:
        with pytest.raises(UsageError, match="confidence=True"):
            run.score(name)


def test_the_table_is_asked_by_name():
    run = tiny()
    with pytest.raises(UnknownNameError, match="Known: endpoint"):
        score("nothing", run.std, run.times, run.weights)
