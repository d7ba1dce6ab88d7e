"""The trajectory: confidence, filtering, and a file that gives back what was put in."""

import dataclasses

import pytest
import torch

from fmwc.errors import CheckpointError, UsageError
from fmwc.field import Reference
from fmwc.propagate import Diagonal
from fmwc.sampling import Trajectory, sample, setting
from fmwc.state import channels

TENSORS = ("x", "x0", "times", "mean", "var", "grid")


def same(a, b):
    if isinstance(a, dict) != isinstance(b, dict):
        return False
    a, b = channels(a), channels(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- confidence -----------------------------------------------------------------------------------------------------


def test_confidence_is_the_place_among_the_run_reversed(mlp):
    run = sample(mlp, 40, steps=10)
    own, found = run.score(), run.confidence
    for i in range(40):
        assert found[i].item() == pytest.approx((own > own[i]).double().mean().item(), abs=1e-6)
    assert found.min() >= 0
    assert found.max() < 1


def test_confidence_against_a_reference(mlp):
    run = sample(mlp, 40, steps=10)
    mlp.reference = Reference("peak", setting("linearised", 10, "euler", 1), torch.linspace(0, 1, 101) * 2)
    same_setting = sample(mlp, 5, steps=10)
    assert same_setting.default_score == "peak"
    own = same_setting.score("peak")
    expected = torch.stack([(mlp.reference.quantiles > s).float().mean() for s in own])
    torch.testing.assert_close(same_setting.confidence, expected)
    assert torch.equal(same_setting.x, run.x[:5])
    one = sample(mlp, 1, steps=10)
    assert one.confidence.shape == (1,)
    assert one.confidence.item() == pytest.approx(expected[0].item(), abs=0.011)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 11},
        {"steps": 10, "stepper": "heun"},
        {"steps": 10, "schedule": 2},
        {"steps": 10, "confidence": "diagonal"},
        {"steps": 10, "confidence": "tangent"},
    ],
    ids=str,
)
def test_a_reference_read_otherwise_is_not_used(options, mlp):
    mlp.reference = Reference("peak", setting("linearised", 10, "euler", 1), torch.linspace(0, 1, 101))
    run = sample(mlp, 4, **options)
    assert run.reference is None
    assert run.default_score == "peak"
    assert sorted(run.confidence.tolist()) == pytest.approx([0, 0.25, 0.5, 0.75])


def test_settings_tell_estimators_and_their_options_apart():
    settings = [setting(e, 10, "euler", 1) for e in ("linearised", "diagonal", Diagonal("taylor1"), None)]
    assert len(set(settings)) == 4
    assert setting("diagonal", 10, "euler", 1) == setting(Diagonal(), 10, "euler", 1)


# ---- filtering ------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(mlp):
    return sample(mlp, 12, steps=10, transport=True, keep_states=True)


def test_take_picks_the_same_samples_everywhere(full):
    index = torch.tensor([7, 0, 3])
    found = full.take(index)
    assert len(found) == 3
    for name in ("x", "x0"):
        assert torch.equal(getattr(found, name), getattr(full, name)[index])
    for name in ("times", "mean", "var", "grid"):
        assert torch.equal(getattr(found, name), getattr(full, name)[:, index])
    assert torch.equal(found.transported.var, full.transported.var[index])
    assert torch.equal(found.transported.profile, full.transported.profile[:, :, index])
    assert all(torch.equal(a, b[index]) for a, b in zip(found.states, full.states, strict=True))
    for score in ("peak", "temporal_ratio", "dispersion"):
        assert torch.equal(found.score(score), full.score(score)[index])


def test_take_by_mask_and_of_channels(full, product):
    mask = full.score("peak") < full.score("peak").median()
    assert torch.equal(full.take(mask).x, full.x[mask])
    run = sample(product, 6, steps=4, transport=2)
    found = run.take(torch.tensor([5, 1]))
    assert torch.equal(found.x["place"], run.x["place"][[5, 1]])
    assert torch.equal(found.var["shape"], run.var["shape"][:, [5, 1]])


@pytest.mark.parametrize("score", [None, "peak", "dispersion"])
@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 12), (0.5, 6), (0.25, 3), (0.001, 1)])
def test_surest_keeps_the_lowest_scores_in_their_order(fraction, kept, score, full):
    found = full.surest(fraction, score)
    assert len(found) == kept
    own = full.score(score)
    lowest = own.argsort()[:kept].sort().values
    assert torch.equal(found.x, full.x[lowest])


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_a_fraction_is_one(fraction, full):
    with pytest.raises(UsageError, match="lies in"):
        full.surest(fraction)


# ---- files ----------------------------------------------------------------------------------------------------------


def round_trip(run, path):
    again = Trajectory.load(run.save(path))
    for name in TENSORS:
        assert same(getattr(again, name), getattr(run, name)), name
    for name in ("seed", "default_score", "evaluations"):
        assert getattr(again, name) == getattr(run, name)
    assert (again.transported is None) == (run.transported is None)
    if run.transported is not None:
        assert torch.equal(again.transported.var, run.transported.var)
        assert torch.equal(again.transported.profile, run.transported.profile)
    assert (again.reference is None) == (run.reference is None)
    if run.reference is not None:
        assert torch.equal(again.reference, run.reference)
    return again


def test_round_trip(full, tmp_path):
    full = dataclasses.replace(full, reference=torch.linspace(0, 3, 11), default_score="peak", seed=9)
    again = round_trip(full, tmp_path / "run.safetensors")
    assert torch.equal(again.confidence, full.confidence)
    assert torch.equal(again.surest(0.5).x, full.surest(0.5).x)


def test_round_trip_of_channels(product, tmp_path):
    run = sample(product, 6, steps=10, transport=True)
    again = round_trip(run, tmp_path / "run.safetensors")
    assert isinstance(again.x, dict)
    assert torch.equal(again.score("peak", channel="place"), run.score("peak", channel="place"))


def test_round_trip_without_variance_into_a_folder(mlp, tmp_path):
    run = sample(mlp, 6, steps=10, confidence=False)
    assert run.save(tmp_path).name == "samples.safetensors"
    round_trip(run, tmp_path)


def test_a_run_too_short_for_its_score_is_kept_all_the_same(mlp, tmp_path):
    round_trip(sample(mlp, 6, steps=2), tmp_path / "short.safetensors")
    round_trip(sample(mlp, 6, steps=10, start=0.5), tmp_path / "late.safetensors")


def test_a_file_that_is_cut_off_or_is_none(full, tmp_path):
    path = full.save(tmp_path / "run.safetensors")
    path.write_bytes(path.read_bytes()[:-50])
    other = tmp_path / "other.safetensors"
    other.write_text("not a tensor")
    for wrong in (path, other, tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="cut off") as raised:
            Trajectory.load(wrong)
        assert "\n" not in str(raised.value)
