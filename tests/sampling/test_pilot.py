"""Adaptive schedules: the readings that matter for a score, and a separate reference."""

import pytest
import torch

import fmwc
from fmwc.checkerboard.data import misplaced
from fmwc.errors import UsageError
from fmwc.estimators import Linearised
from fmwc.metrics.ranking import auprc
from fmwc.sampling import SamplingConfig, Schedule, Trajectory, fit_schedule, sample
from tests.conftest import mlp_field
from tests.options import arguments

STEPS = 20


def made(std, score, **options):  # (R,), (R, B)
    """Return a run of one channel with given σ."""
    steps, count = std.shape
    times = (torch.arange(steps) / steps)[:, None].expand(steps, count)
    x = torch.zeros(count, 1)
    grid = torch.cat([times, torch.ones(1, count)])
    var = std.square()[..., None]
    return Trajectory(x, x, times, torch.zeros_like(var), var, grid, default_score=score, **options)


WINDOWS = {
    ("geometric@0.4-0.6", 1): ((0.4, 0.6),),
    ("geometric@0.7-1", 4): ((0.7, 1),),
    ("temporal_ratio", 4): ((0, 0.3), (0.7, 1)),
}


@pytest.mark.parametrize(("score", "readings"), WINDOWS)
def test_nothing_is_read_outside_the_windows_of_the_score(score, readings):
    run = made(torch.rand(STEPS, 50, generator=torch.Generator().manual_seed(0)) + 0.1, score)
    found = fit_schedule(mlp_field(), readings, pilot=run, steps=STEPS)
    assert len(found.times) == readings
    assert all(any(early <= t < late for early, late in WINDOWS[score, readings]) for t in found.times)


def test_fit_schedule_finds_the_readings_that_determine_the_score():
    """Samples differ in σ at two times only, so readings at these times determine the score."""
    random = torch.Generator().manual_seed(0)
    std = torch.ones(STEPS, 64)
    std[3] += torch.rand(64, generator=random)
    std[15] += 5 * torch.rand(64, generator=random)
    found = fit_schedule(mlp_field(), 1, pilot=made(std, "peak"), steps=STEPS)
    assert found.times == (0.75,)
    # A reading counts until the next one, so another one must follow directly after 0.15 to give it the right weight.
    integrated = fit_schedule(mlp_field(), 4, pilot=made(std, "integrated"), steps=STEPS)
    assert {0.15, 0.75} < set(integrated.times)
    assert integrated.agreement == pytest.approx(1, abs=1e-3)


def test_all_readings_give_the_score_itself():
    run = sample(mlp_field(), 40, steps=STEPS)
    found = fit_schedule(mlp_field(), STEPS, pilot=run, steps=STEPS)
    assert found.agreement == pytest.approx(1)
    torch.testing.assert_close(found.reference.quantiles[[0, -1]], run.score().sort().values[[0, -1]])


def test_fitted_times_are_locally_optimal():
    run = sample(mlp_field(), 60, steps=STEPS)
    found = fit_schedule(mlp_field(), 3, pilot=run, steps=STEPS)
    steps = [round(t * STEPS) for t in found.times]

    def alike(steps):
        try:
            return float(torch.corrcoef(torch.stack([run.read_at(sorted(steps)).score(), run.score()]))[0, 1])
        except UsageError:
            return -1.0

    assert found.agreement == pytest.approx(alike(steps), abs=1e-5)
    others = [[*(s for s in steps if s != old), new] for old in steps for new in range(STEPS) if new not in steps]
    assert max(map(alike, others)) <= found.agreement + 1e-5


def test_a_run_by_a_schedule_has_the_confidence_of_its_pilot():
    field = mlp_field()
    field.schedule = fit_schedule(field, 2, pilot=200, steps=STEPS, seed=1)
    run = sample(field, 200, steps=STEPS, seed=1, schedule=Schedule.adaptive())  # the samples of the pilot run
    assert run.times[:, 0].tolist() == pytest.approx(field.schedule.times)
    torch.testing.assert_close(run.reference, field.schedule.reference.quantiles)
    torch.testing.assert_close(run.confidence.sort().values, torch.linspace(0, 1, 200), atol=0.02, rtol=0)
    one = sample(field, 1, steps=STEPS, seed=1, schedule=field.schedule)
    torch.testing.assert_close(one.confidence, run.confidence[:1])
    assert sample(field, 5, steps=STEPS + 1, schedule=Schedule.adaptive()).reference is None  # read with other settings
    torch.testing.assert_close(run.x, sample(field, 200, steps=STEPS, seed=1, confidence=None).x, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [12, 24, 30, 60, 128])
def test_a_schedule_reads_the_steps_it_was_chosen_for(steps):
    """Also for times without a finite decimal representation."""
    field = mlp_field()
    field.schedule = fit_schedule(field, pilot=20, steps=steps)
    run = sample(field, 3, steps=steps, schedule=Schedule.adaptive())
    assert run.reference is not None
    assert run.times[:, 0].tolist() == torch.tensor(field.schedule.times).tolist()
    assert len(run.times) == 3


def test_reference_of_a_schedule_is_standardised_within_classes():
    field = mlp_field()
    y = torch.arange(60) % 3
    score = torch.rand(STEPS, 60, generator=torch.Generator().manual_seed(0)) + 1 + 10 * y
    run = made(score, "integrated", cond={"y": y}).ranked_by("integrated", within="y")
    found = fit_schedule(field, 5, pilot=run, steps=STEPS)
    assert found.reference.standard.cond == "y"
    assert found.reference.quantiles.abs().max() < 5  # in units of the spread of a class
    assert float(found.reference.quantiles.median()) == pytest.approx(0, abs=0.2)


def test_a_schedule_is_saved_with_its_field(tmp_path):
    field = mlp_field()
    field.schedule = fit_schedule(field, 2, pilot=50, steps=STEPS)
    fmwc.save(field, tmp_path)
    back = fmwc.load(tmp_path).schedule
    assert isinstance(back, Schedule)
    assert (back.times, back.reference.read_with) == (field.schedule.times, field.schedule.reference.read_with)
    torch.testing.assert_close(back.reference.quantiles, field.schedule.reference.quantiles, rtol=1e-5, atol=0)
    field.schedule = None
    fmwc.save(field, tmp_path)
    assert fmwc.load(tmp_path).schedule is None


def test_the_shipped_schedule_detects_misplaced_points():
    field = fmwc.load("checkerboard")
    assert len(field.schedule.times) == 3
    reads = {"confidence": Linearised(), "check": False}
    every, few = (sample(field, 500, **arguments(seed=7, schedule=schedule, **reads)) for schedule in (1, "adaptive"))
    bad, score = misplaced(every.x), field.schedule.reference.score
    assert auprc(few.score(), bad) > auprc(every.score(score), bad) - 0.05  # about fifteen; the stated number is larger
    torch.testing.assert_close(few.confidence, every.ranked_by(score).rank, atol=0.25, rtol=0)


@pytest.mark.parametrize("readings", [0, STEPS + 1])
def test_invalid_numbers_of_readings(readings):
    with pytest.raises(UsageError, match=f"between 1 and {STEPS}"):
        fit_schedule(mlp_field(), readings, pilot=20, steps=STEPS)


def test_invalid_schedules():
    field = mlp_field()
    with pytest.raises(UsageError, match="fit_schedule"):
        sample(field, 3, schedule=Schedule.adaptive())
    for old in ("adaptive", 5, [0.5]):
        with pytest.raises(UsageError, match=r"Schedule\.every\(5\)"):
            sample(field, 3, schedule=old)
    with pytest.raises(UsageError, match="cannot be computed from 1 readings"):
        fit_schedule(field, 1, pilot=20, steps=STEPS)  # a ratio needs two readings
    with pytest.raises(UsageError, match="same times"):
        fit_schedule(
            field,
            pilot=sample(field, 2, steps=STEPS, config=SamplingConfig(start=torch.tensor([0.0, 0.1]))),
            steps=STEPS,
        )
    with pytest.raises(UsageError, match="the pilot took 7 steps; give steps=7"):
        fit_schedule(field, pilot=sample(field, 5, steps=7))
