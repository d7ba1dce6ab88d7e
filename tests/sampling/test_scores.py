"""Every score against values computed by hand on a small trajectory."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.errors import UsageError
from fmwc.estimators import Transported
from fmwc.sampling import EARLY, LATE, SCORES, Schedule, Standard, Trajectory, sample, standard_of
from fmwc.sampling.trajectory import FEWEST, within_groups


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
    "geometric": [  # of σ/√2 a coordinate
        3**0.2 * 4**0.5 * 1**0.2 * 2**0.1 / 2**0.5,
        1**0.2 * 1**0.5 * 5**0.2 * 7**0.1 / 2**0.5,
    ],
}


def test_every_score_has_a_value_by_hand():
    assert BY_HAND.keys() == SCORES.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_scores_by_hand(name):
    torch.testing.assert_close(tiny().score(name), torch.tensor(BY_HAND[name], dtype=torch.float64))


def test_the_geometric_score_does_not_depend_on_units_or_rows():
    """Two samples with two and three equally uncertain rows in one channel are equally doubtful."""
    times = torch.tensor([[0.0, 0.0], [0.5, 0.5]])
    atoms = torch.tensor([2, 3])
    a = torch.tensor([4.0, 9.0])[:, None, None] * atoms[None, :, None]  # a variance of 4, then 9, per row
    b = torch.tensor([1.0, 16.0])[:, None, None].expand(2, 2, 1)  # one number, in another unit

    def run(unit: float) -> Trajectory:
        x = {"a": torch.zeros(2, 3, 1), "b": torch.zeros(2, 1)}
        var = {"a": a, "b": b * unit**2}
        mean = {name: torch.zeros_like(v) for name, v in var.items()}
        grid = torch.cat([times, torch.ones(1, 2)])
        return Trajectory(
            x=x, x0=x, times=times, mean=mean, var=var, grid=grid, cond={"n": atoms}, rows={"a": ("n", 0)}
        )

    expected = (2 * 3 * 1 * 4) ** 0.25  # σ of a: 2, 3; of b: 1, 4
    torch.testing.assert_close(run(1.0).score("geometric"), torch.full((2,), expected))
    torch.testing.assert_close(run(9.0).score("geometric"), torch.full((2,), expected * 3))  # the unit is a factor
    torch.testing.assert_close(run(1.0).score("a/geometric"), torch.full((2,), 6.0**0.5))
    torch.testing.assert_close(run(1.0).score("geometric@0.5-1.0"), torch.full((2,), 12.0**0.5))
    torch.testing.assert_close(run(1.0).compact().score("geometric"), run(1.0).score("geometric"))


def test_the_geometric_score_leaves_out_channels_that_cannot_vary():
    """In a centred channel, a single row cannot vary, so it is certain for any variance."""
    times, atoms = torch.zeros(1, 2), torch.tensor([1, 3])
    x = {"a": torch.zeros(2, 3, 2), "b": torch.zeros(2, 1)}
    var = {
        "a": torch.tensor([[[0.0], [36.0]]]),
        "b": torch.full((1, 2, 1), 25.0),
    }  # 36 over two free rows of two coordinates
    run = Trajectory(
        x=x,
        x0=x,
        times=times,
        mean={name: torch.zeros_like(v) for name, v in var.items()},
        var=var,
        grid=torch.tensor([[0.0, 0.0], [1.0, 1.0]]),
        cond={"n": atoms},
        rows={"a": ("n", 1)},
    )
    torch.testing.assert_close(run.score("geometric"), torch.tensor([5.0, (3.0 * 5.0) ** 0.5]))
    # A single row is certain, even if an estimator that ignores correlations gives it a variance.
    torch.testing.assert_close(run.score("a/geometric"), torch.tensor([0.0, 3.0]))
    dropped = replace(run, var={**var, "a": torch.tensor([[[7.0], [36.0]]])})
    assert torch.equal(dropped.score("a/geometric"), run.score("a/geometric"))
    assert torch.equal(dropped.score("geometric"), run.score("geometric"))
    alone = replace(run, x={"a": x["a"]}, mean={"a": run.mean["a"]}, var={"a": var["a"]})
    torch.testing.assert_close(alone.score("geometric"), torch.tensor([0.0, 3.0]))


def test_windows_of_the_ratio_are_options():
    found = tiny().score("temporal_ratio", early=0.1, late=0.9)
    torch.testing.assert_close(found, torch.tensor([2 / 3, 7 / 1], dtype=torch.float64))
    assert (EARLY, LATE) == (0.3, 0.7)


def test_the_window_of_integrated_is_an_option():
    found = tiny().score("integrated", early=0.2, late=0.9)  # readings at 0.2 and 0.7
    torch.testing.assert_close(found, torch.tensor([4 * 0.5 + 1 * 0.2, 1 * 0.5 + 5 * 0.2], dtype=torch.float64))
    with pytest.raises(UsageError, match="read"):  # a window without readings has no score
        tiny().score("integrated", early=0.95)


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9])
def test_adjacent_windows_add_up_to_the_whole(cut):
    run = tiny()
    parts = run.score("integrated", late=cut) + run.score("integrated", early=cut)
    torch.testing.assert_close(parts, run.score("integrated"))


def test_an_irregular_schedule_weighs_each_reading_by_its_time(mlp):
    """A constant variance has the same integral for any number of readings, and the ratio 1."""
    for times in ((0.0, 0.1, 0.15, 0.8), (0.0, 0.25, 0.5, 0.75), (0.0, 0.01, 0.02, 0.98)):
        run = tiny(times, ((2, 2, 2, 2),))
        assert run.score("integrated").item() == pytest.approx(2 * (1 - times[0]))
        assert run.score("temporal_ratio").item() == pytest.approx(1)
    run = sample(mlp, 3, steps=10, schedule=Schedule.at([0.0, 0.2, 0.75]))
    torch.testing.assert_close(run.weights[:, 0], torch.tensor([0.2, 0.6, 0.2]))


def test_one_variance_per_sample_applies_to_every_coordinate():
    run = tiny()
    total = Trajectory(
        x=run.x, x0=run.x0, times=run.times, mean=run.mean, var=run.var.mean(2, keepdim=True), grid=run.grid
    )
    torch.testing.assert_close(total.std, run.std)


def test_score_of_one_channel():
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
    with pytest.raises(UsageError, match="channel"):
        both.score("peak", channel="c")


def test_dispersion_is_the_norm_of_the_transported_deviation():
    run = tiny()
    moved = Transported(torch.tensor([[9.0, 16.0], [0.0, 4.0]]), torch.zeros(4, 1, 2), ("out",))
    run = Trajectory(x=run.x, x0=run.x0, times=run.times, mean=run.mean, var=run.var, grid=run.grid, transported=moved)
    assert run.score("dispersion").tolist() == [5, 2]


ERRORS = {
    "unknown": ({"name": "peek"}, "peak"),
    "dispersion without transport": ({"name": "dispersion"}, "transport"),
    "empty late window": ({"name": "temporal_ratio", "late": 0.95}, "late"),
    "a window that falls": (
        {"name": "geometric", "early": 0.6, "late": 0.2},
        "early",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, message = ERRORS[name]
    with pytest.raises(UsageError, match=message) as raised:
        tiny().score(**options)
    assert "\n" not in str(raised.value)


def test_a_run_without_variance_has_no_score(mlp):
    run = sample(mlp, 3, steps=2, confidence=None)
    for name in SCORES:
        with pytest.raises(UsageError, match="variance"):
            run.score(name)


# ---- between conditions ---------------------------------------------------------------------------------------------

LEVELS, SPREADS = (0.0, 3.0, -5.0), (1.0, 0.1, 2.5)


def classes(count=41):
    """Return shuffled scores whose logarithms are `count` even steps from −1 to 1, scaled and shifted by class."""
    z = torch.linspace(-1, 1, count, dtype=torch.float64).repeat(3)
    groups = torch.arange(3).repeat_interleave(count)
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
    level, spread = (torch.tensor(v, dtype=torch.float64)[groups] for v in (LEVELS, SPREADS))
    return (level + spread * z).exp()[order], groups[order], z[order]


def test_a_standard_is_the_median_and_the_inner_two_thirds_of_the_logarithm():
    raw, groups, _ = classes()
    found = standard_of("y", raw, groups)
    assert found.cond == "y"
    torch.testing.assert_close(found.centre, torch.tensor(LEVELS, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.spread, 0.68 * torch.tensor(SPREADS, dtype=torch.float64))


scores = st.lists(st.floats(1e-3, 1e3), min_size=FEWEST, max_size=20)


@given(scores, scores, st.floats(1e-4, 1e4))
def test_multiplying_the_scores_of_one_class_changes_nothing_within_it(a, b, factor):
    raw = torch.tensor(a + b, dtype=torch.float64)
    groups = torch.tensor([0] * len(a) + [1] * len(b))
    plain = within_groups("y", raw, groups)
    moved = within_groups("y", torch.where(groups == 1, factor * raw, raw), groups)
    scale = 1e-12 / standard_of("y", raw, groups).spread.min().item() + 1e-9
    torch.testing.assert_close(moved, plain, rtol=1e-6, atol=scale)


def test_a_standard_applies_to_other_samples():
    standard = Standard("y", torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.5]))
    raw, groups = torch.tensor([1.0, math.e, math.e**2, math.e**3]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(standard(raw, groups), torch.tensor([0.0, 1.0, 0.0, 2.0]))
    many = torch.stack([raw, raw**2])  # one row per reading
    torch.testing.assert_close(standard(many, groups), torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0, 2.0, 4.0, 8.0]]))
    assert standard(raw.double(), groups).dtype == torch.float64


def test_zero_or_equal_scores_stay_finite():
    groups = torch.arange(20) % 2
    zero = torch.rand(20) + 0.5
    zero[3] = 0
    found = within_groups("y", zero, groups)
    assert torch.isfinite(found).all()
    assert found.argmin() == 3
    assert not within_groups("y", torch.full((20,), 2.0), groups).any()


@pytest.mark.parametrize("strange", [1, 3, -1], ids=["not seen", "beyond", "negative"])
def test_unknown_classes_are_refused(strange):
    standard = standard_of("y", torch.rand(16) + 0.1, torch.tensor([0] * 8 + [2] * 8))
    with pytest.raises(UsageError, match="samples"):
        standard(torch.ones(3), torch.tensor([0, strange, 2]))


@pytest.mark.parametrize(
    "groups",
    [torch.zeros(20), torch.zeros(20, 1, dtype=torch.long), torch.arange(20) - 1, torch.arange(20) * 10**6],
    ids=["float", "a column", "negative", "huge"],
)
def test_invalid_classes_are_refused(groups):
    with pytest.raises(UsageError, match="integer"):
        standard_of("y", torch.rand(20), groups)


def test_the_level_and_spread_of_a_class_are_removed():
    raw, groups, z = classes()
    torch.testing.assert_close(within_groups("y", raw, groups), z / 0.68)
