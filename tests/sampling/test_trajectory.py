"""The trajectory: confidence, filtering, and files that round-trip."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fmwc.errors import CheckpointError, UsageError
from fmwc.estimators import Diagonal, Linearised, Tangent
from fmwc.field import attach
from fmwc.flow import Space
from fmwc.identity import SEAL, digest_tensors
from fmwc.sampling import (
    SCORES,
    Parts,
    Reference,
    SamplingConfig,
    Schedule,
    Standard,
    Trajectory,
    read_with,
    sample,
    standard_of,
)
from fmwc.sampling.trajectory import within_groups
from fmwc.state import channels
from tests.conftest import PRODUCT, awaken
from tests.options import arguments

TENSORS = ("x", "x0", "times", "mean", "var", "grid")


def same(a, b):
    if isinstance(a, dict) != isinstance(b, dict):
        return False
    a, b = channels(a), channels(b)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- confidence -----------------------------------------------------------------------------------------------------


def test_rank_is_the_reversed_position_within_the_run(mlp):
    run = sample(mlp, 40, steps=10)
    own, found = run.score(), run.rank
    for i in range(40):
        assert found[i].item() == pytest.approx((own > own[i]).double().mean().item(), abs=1e-6)
    assert found.min() >= 0
    assert found.max() < 1


def test_a_run_is_shown_in_three_lines_and_compared_without_an_error(mlp, product):
    for field in (mlp, product):
        run = sample(field, 4, steps=3)
        text = repr(run).splitlines()
        assert len(text) == 3
        assert "4 samples" in text[0]
        assert "confidence is withheld" in text[2]
        assert run == run
        assert run != sample(field, 4, steps=3)
    mlp.reference = Reference("peak", read_with("linearised", 3, "euler"), torch.linspace(0, 2, 11))
    assert "confidence in [0, 1]" in repr(sample(mlp, 4, steps=3))


def test_confidence_against_a_reference(mlp):
    run = sample(mlp, 40, steps=10)
    mlp.reference = Reference("peak", read_with("linearised", 10, "euler"), torch.linspace(0, 1, 101) * 2)
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
        {"steps": 10, "schedule": Schedule.every(2)},
        {"steps": 10, "confidence": Diagonal()},
        {"steps": 10, "confidence": Tangent()},
    ],
    ids=str,
)
def test_a_reference_read_differently_is_not_used(options, mlp):
    mlp.reference = Reference("peak", read_with("linearised", 10, "euler"), torch.linspace(0, 1, 101))
    run = sample(mlp, 4, **arguments(**options))
    assert run.reference is None
    assert run.default_score == "peak"
    assert run.withheld
    assert sorted(run.rank.tolist()) == pytest.approx([0, 0.25, 0.5, 0.75])


def test_read_with_distinguishes_estimators_and_options():
    settings = [read_with(e, 10, "euler") for e in ("linearised", "diagonal", Diagonal("taylor1"), None)]
    assert len(set(settings)) == 4
    assert read_with("diagonal", 10, "euler") == read_with(Diagonal(), 10, "euler")


# ---- within a condition ---------------------------------------------------------------------------------------------


class Asked(nn.Module):
    """A velocity network for points of three classes; the class scales the effect of the noise."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(3, 12), nn.Linear(12, 2)

    def forward(self, x, t, y, scale=1.0):
        h = torch.tanh(self.hidden(torch.cat([x, t.to(x.dtype).expand(len(x))[:, None]], 1)))
        return self.out(h) * (scale * 4.0 ** y.to(x.dtype)).reshape(-1, 1) / 10


@pytest.fixture
def asked():
    return awaken(attach(Asked(), space=(2,), width=8))


Y = torch.arange(36) % 3


def referenced(field, steps=10):
    """Return the field with a reference within y, from another seed."""
    run = sample(field, 60, steps=steps, seed=1, cond={"y": torch.arange(60) % 3})
    raw = run.score("peak")
    standard = standard_of("y", raw, run.cond["y"])
    levels = torch.linspace(0, 1, 31)
    quantiles = standard(raw, run.cond["y"]).quantile(levels)
    field.reference = Reference("peak", read_with("linearised", steps, "euler"), quantiles, standard)
    return field


def test_a_run_keeps_its_conditions(asked):
    run = sample(asked, 36, steps=4, cond={"y": Y, "scale": torch.tensor(0.5)}, config=SamplingConfig(batch=7))
    assert run.cond.keys() == {"y", "scale"}
    assert torch.equal(run.cond["y"], Y)
    assert torch.equal(run.cond["scale"], torch.full((36,), 0.5))  # given once for all samples, kept per sample
    assert sample(asked, 36, steps=4, confidence=None, cond={"y": Y}).cond.keys() == {"y"}


@pytest.mark.parametrize("name", ["peak", "integrated", "temporal_ratio", "dispersion", None])
def test_a_score_within_a_class_is_standardised_among_its_samples(name, asked):
    run = sample(asked, 36, steps=10, transport=True, cond={"y": Y})
    found = run.score(name, within="y")
    torch.testing.assert_close(found, within_groups("y", run.score(name), Y))
    for label in range(3):
        assert found[label == Y].median().abs() < 1  # the lower of the two middle values
        assert torch.equal(found[label == Y].argsort(), run.score(name)[label == Y].argsort())


def test_the_level_of_a_class_is_removed(asked):
    run = sample(asked, 36, steps=10, cond={"y": Y})
    raw, inside = run.score("peak"), run.score("peak", within="y")
    assert raw[Y == 2].min() > raw[Y == 0].max()
    assert inside[Y == 2].min() < inside[Y == 0].max()
    torch.testing.assert_close(
        run.score("integrated", within="y", early=0.5), within_groups("y", run.score("integrated", early=0.5), Y)
    )


def test_conditions_that_are_not_classes_are_refused(asked, mlp):
    run = sample(asked, 36, steps=4, cond={"y": Y})
    for call, message in (
        (lambda: run.score("peak", within="Y"), "unknown condition 'Y'.* Known: y"),
        (lambda: sample(mlp, 9, steps=4).score("peak", within="y"), "this run had no conditions"),
        (
            lambda: sample(asked, 9, steps=4, cond={"y": Y[:9]}).score("peak", within="y"),
            "^3 samples with y = 0 are too few",
        ),
        (
            lambda: sample(asked, 9, steps=4, cond={"y": Y[:9] / 2}).score("peak", within="y"),
            "must hold one integer per sample",
        ),
    ):
        with pytest.raises(UsageError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_confidence_uses_a_reference_within_classes(asked):
    reference = referenced(asked).reference
    run = sample(asked, 36, steps=10, cond={"y": Y})
    expected = reference.standard(run.score("peak"), Y)
    assert torch.equal(run.score(), expected)
    share = torch.stack([(reference.quantiles > s).float().mean() for s in expected])
    torch.testing.assert_close(run.confidence, share, rtol=0, atol=1e-6)
    one = sample(asked, 1, steps=10, cond={"y": Y[:1]})
    torch.testing.assert_close(one.confidence, run.confidence[:1])
    assert not torch.equal(run.score(), run.score("peak"))  # a score by name is not standardised


def test_confidence_has_the_same_distribution_in_every_class(asked):
    referenced(asked)
    y = torch.arange(150) % 3
    run = sample(asked, 150, steps=10, seed=5, cond={"y": y})
    means = torch.stack([run.confidence[y == label].mean() for label in range(3)])
    assert float((means - 0.5).abs().max()) < 0.2
    raw = run.ranked_by("integrated")
    assert raw.rank[y == 0].mean() > 0.8 > 0.2 > raw.rank[y == 2].mean()


@pytest.mark.parametrize("options", [{"steps": 11}, {"steps": 10, "confidence": Diagonal()}], ids=str)
def test_a_run_read_differently_is_ranked_within_itself(options, asked):
    field = referenced(asked)
    run = sample(field, 36, **arguments(cond={"y": Y}, **options))
    assert run.reference is None
    assert not torch.equal(run.standard.centre, field.reference.standard.centre)
    torch.testing.assert_close(run.score(), run.score("peak", within="y"))
    few = sample(field, 12, **arguments(cond={"y": Y[:12]}, **options))  # four per class
    assert few.standard is None
    assert torch.equal(few.score(), few.score("peak"))
    assert sorted(few.rank.tolist()) == pytest.approx([i / 12 for i in range(12)])


def test_ranking_by_another_score_drops_the_reference(asked):
    run = sample(referenced(asked), 36, steps=10, cond={"y": Y})
    raw = run.ranked_by("peak")  # the reference of the checkpoint, which is standardised between classes
    assert (raw.reference, raw.standard) == (None, None)
    assert torch.equal(raw.score(), run.score("peak"))
    assert raw.ranked_by("peak") is raw
    other = run.ranked_by("integrated")
    assert (other.default_score, other.reference, other.standard) == ("integrated", None, None)
    assert torch.equal(other.score(), run.score("integrated"))
    own = other.score()
    assert other.confidence is None
    assert "integrated" in other.withheld
    torch.testing.assert_close(other.rank, torch.stack([(own > s).float().mean() for s in own]))
    assert torch.equal(other.x, run.x)
    assert run.default_score == "peak"


@pytest.mark.parametrize("y", [torch.tensor(2), torch.tensor([2])], ids=["a number", "one row"])
def test_one_class_applies_to_all_samples(y, asked):
    referenced(asked)
    run = sample(asked, 5, steps=10, cond={"y": y})
    torch.testing.assert_close(run.confidence, sample(asked, 5, steps=10, cond={"y": torch.full((5,), 2)}).confidence)


# ---- channels -------------------------------------------------------------------------------------------------------


def test_a_score_of_one_channel_by_its_name(product):
    run = sample(product, 8, steps=10)
    for channel in ("place", "shape"):
        for name in SCORES:
            assert torch.equal(run.score(f"{channel}/{name}"), run.score(name, channel=channel))
        by_hand = run.var[channel].flatten(2).sum(2).sqrt()  # (R, B)
        torch.testing.assert_close(run.score(f"{channel}/integrated"), by_hand.mean(0))
        torch.testing.assert_close(run.score(f"{channel}/peak"), by_hand.max(0).values)
    assert not torch.equal(run.score("place/peak"), run.score("shape/peak"))
    ranked = run.ranked_by("shape/integrated")
    assert torch.equal(ranked.score(), run.score("integrated", channel="shape"))
    assert torch.equal(ranked.rank.argsort(), run.score("shape/integrated").argsort(descending=True))
    assert torch.equal(run.surest(0.5, "shape/peak").x["place"], run.ranked_by("shape/peak").surest(0.5).x["place"])


def test_a_window_of_time_by_its_name(product):
    run = sample(product, 6, steps=10)
    for name in ("integrated", "temporal_ratio", "shape/integrated"):
        found = run.score(f"{name}@0.2-0.65")
        assert torch.equal(found, run.score(name, early=0.2, late=0.65))
        assert not torch.equal(found, run.score(name))
    inside = run.var["shape"].flatten(2).sum(2).sqrt()[2:7]  # t = 0.2, …, 0.6
    torch.testing.assert_close(run.score("shape/integrated@0.2-0.65"), inside.sum(0) / 10)
    for name, message in (("integrated@0.2", "a time window needs two times"), ("peak@0.2-0.6", "takes no options")):
        with pytest.raises(UsageError, match=message):
            run.score(name)


def test_channels_are_added_up_in_their_units(product, tmp_path):
    heavy = dataclasses.replace(PRODUCT.channels["place"], weight=9.0)
    weighted = Space({**PRODUCT.channels, "place": heavy})
    run = sample(product, 6, steps=10, config=SamplingConfig(space=weighted))
    plain = sample(product, 6, steps=10)
    assert (run.units, plain.units) == ({"place": 9}, {})
    place, shape = (run.var[c].flatten(2).sum(2) for c in ("place", "shape"))
    torch.testing.assert_close(run.std, (9 * place + shape).sqrt())
    torch.testing.assert_close(plain.std, (place + shape).sqrt())
    assert torch.equal(run.score("place/peak"), plain.score("place/peak"))  # a single channel is not weighted
    for other in (run.compact(), run.take(torch.arange(6)), round_trip(run, tmp_path / "run.safetensors")):
        torch.testing.assert_close(other.score("peak"), run.score("peak"))


def test_unknown_names_are_named(product, mlp):
    run = sample(product, 3, steps=10)
    for name, message in (
        ("plase/peak", "unknown channel 'plase'; did you mean 'place'. Known: place, shape"),
        ("place/peek", "unknown score 'peek'; did you mean 'peak'"),
    ):
        with pytest.raises(UsageError, match=message):
            run.score(name)
    with pytest.raises(UsageError, match="unknown channel 'form'"):
        run.score("peak", channel="form")
    with pytest.raises(UsageError, match="unknown channel 'place'"):
        sample(mlp, 3, steps=10).score("place/peak")


@pytest.mark.parametrize("transport", [False, 2])
def test_a_compact_run_keeps_every_score(transport, product, mlp):
    for field in (product, mlp):
        run = sample(field, 7, **arguments(steps=10, transport=transport, keep_states=True))
        small = run.compact()
        names = [*SCORES, *(f"{c}/{s}" for c in channels(run.var) if isinstance(run.var, dict) for s in SCORES)]
        for name in [*names, *(["dispersion"] if transport else [])]:
            torch.testing.assert_close(small.score(name), run.score(name))
        torch.testing.assert_close(small.std, run.std)
        assert torch.equal(small.rank.argsort(), run.rank.argsort())
        assert all(value.shape == (10, 7, 1) for value in channels(small.var).values())
        assert small.states is None
        assert same(small.x, run.x)
        assert same(small.compact().var, small.var)


def test_compact_run_with_one_number_per_channel_is_the_same(product):
    """With random probes, the variance is one mean per channel, which applies to all coordinates."""
    run = sample(product, 5, steps=10, confidence=Linearised(3))
    torch.testing.assert_close(run.compact().score("shape/integrated"), run.score("shape/integrated"))
    torch.testing.assert_close(run.compact().var["shape"], 3 * run.var["shape"].reshape(10, 5, 1))


def test_round_trip_of_a_compact_run(product, tmp_path):
    run = sample(product, 5, steps=10)
    again = round_trip(run.compact(), tmp_path / "small.safetensors")
    torch.testing.assert_close(again.score("place/peak"), run.score("place/peak"))
    assert (tmp_path / "small.safetensors").stat().st_size < run.save(tmp_path / "run.safetensors").stat().st_size


# ---- as it goes -----------------------------------------------------------------------------------------------------


def test_stored_batches_are_not_drawn_again(asked, tmp_path):
    parts, done = Parts(tmp_path / "parts"), []
    options = {"steps": 4, "seed": 3, "batch": 4, "cond": {"y": Y[:10]}}
    plain = sample(asked, 10, **arguments(**options))
    run = sample(asked, 10, **arguments(parts=parts, progress=done.append, **options))
    assert done == [4, 4, 2]
    files = sorted((tmp_path / "parts").iterdir())
    assert [path.name for path in files] == [f"{first:09d}.safetensors" for first in (0, 4, 8)]
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-1])  # a batch that cannot be read is drawn again
    again = sample(asked, 10, **arguments(parts=parts, progress=done.append, **options))
    assert done == [4, 4, 2] * 2
    for name in ("x", "x0", "times", "grid", "mean", "var", "index"):
        assert torch.equal(getattr(run, name), getattr(plain, name))
        assert torch.equal(getattr(again, name), getattr(plain, name))
    assert torch.equal(again.rank, plain.rank)
    assert torch.equal(again.cond["y"], Y[:10])
    first = Trajectory.load(files[0])
    assert sample(asked, 3, **arguments(parts=parts, **{**options, "cond": {"y": Y[:3]}})).x.shape == (
        3,
        2,
    )  # there are four, which is too many
    torch.testing.assert_close(Trajectory.load(files[0]).x, first.x[:3])


def test_stored_batches_do_not_hold_states(asked, tmp_path):
    with pytest.raises(UsageError, match="leave out keep_states or parts"):
        sample(asked, 4, steps=2, cond={"y": Y[:4]}, config=SamplingConfig(parts=Parts(tmp_path), keep_states=True))


# ---- filtering ------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(mlp):
    return sample(mlp, 12, steps=10, transport=True, config=SamplingConfig(keep_states=True))


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
    run = sample(product, 6, steps=4, transport=True, config=SamplingConfig(projections=2))
    found = run.take(torch.tensor([5, 1]))
    assert torch.equal(found.x["place"], run.x["place"][[5, 1]])
    assert torch.equal(found.var["shape"], run.var["shape"][:, [5, 1]])


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "its own"])
def test_taken_samples_keep_their_conditions_confidence_and_rank(reference, asked):
    run = sample(referenced(asked) if reference else asked, 36, steps=10, cond={"y": Y})
    names = ["rank", *(["confidence"] if reference else [])]
    index = torch.tensor([8, 3, 35])
    found = run.take(index)
    assert torch.equal(found.cond["y"], Y[index])
    place = 1.01 / 36  # the last bit of a score depends on the batch, which can shift a sample by one position
    surest = run.surest(0.25)
    assert len(surest) == 9
    for name in names:
        whole = getattr(run, name)
        torch.testing.assert_close(getattr(found, name), whole[index], rtol=0, atol=place)
        torch.testing.assert_close(getattr(found.take(torch.tensor([2])), name), whole[35:], rtol=0, atol=place)
        assert getattr(surest, name).min() >= whole.sort().values[-9] - place
    places = [(run.x == x).all(1).nonzero().item() for x in surest.x]
    assert torch.equal(surest.cond["y"], Y[places])


@pytest.mark.parametrize("score", [None, "peak", "dispersion"])
@pytest.mark.parametrize(("fraction", "kept"), [(1.0, 12), (0.5, 6), (0.25, 3), (0.001, 1)])
def test_surest_keeps_the_lowest_scores_in_their_order(fraction, kept, score, full):
    found = full.surest(fraction, score)
    assert len(found) == kept
    own = full.score(score)
    lowest = own.argsort()[:kept].sort().values
    assert torch.equal(found.x, full.x[lowest])


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, float("nan")])
def test_invalid_fractions(fraction, full):
    with pytest.raises(UsageError, match="must lie in"):
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
    assert (again.standard is None) == (run.standard is None)
    if run.standard is not None:
        assert isinstance(again.standard, Standard)
        assert again.standard.cond == run.standard.cond
        assert torch.equal(again.standard.centre, run.standard.centre)
        assert torch.equal(again.standard.spread, run.standard.spread)
    assert again.cond.keys() == run.cond.keys()
    assert all(torch.equal(again.cond[k], run.cond[k]) and again.cond[k].dtype == run.cond[k].dtype for k in run.cond)
    return again


def test_round_trip(full, tmp_path):
    full = dataclasses.replace(full, reference=torch.linspace(0, 3, 11), default_score="peak", seed=9)
    again = round_trip(full, tmp_path / "run.safetensors")
    assert torch.equal(again.confidence, full.confidence)
    assert torch.equal(again.surest(0.5).x, full.surest(0.5).x)


def test_round_trip_with_conditions_and_a_standard(asked, tmp_path):
    run = sample(referenced(asked), 36, steps=10, cond={"y": Y, "scale": torch.rand(36)})
    assert run.cond.keys() == {"y", "scale"}
    again = round_trip(run, tmp_path / "run.safetensors")
    assert torch.equal(again.confidence, run.confidence)
    assert torch.equal(again.score("integrated", within="y"), run.score("integrated", within="y"))
    some = round_trip(run.take(torch.tensor([4, 2])), tmp_path / "some.safetensors")
    torch.testing.assert_close(some.confidence, run.confidence[[4, 2]], rtol=0, atol=1.01 / 31)
    bare = round_trip(run.ranked_by("integrated"), tmp_path / "bare.safetensors")
    assert bare.standard is None


def test_round_trip_of_channels(product, tmp_path):
    run = sample(product, 6, steps=10, transport=True)
    again = round_trip(run, tmp_path / "run.safetensors")
    assert isinstance(again.x, dict)
    assert torch.equal(again.score("peak", channel="place"), run.score("peak", channel="place"))


def test_round_trip_without_variance_into_a_folder(mlp, tmp_path):
    run = sample(mlp, 6, steps=10, confidence=None)
    assert run.save(tmp_path).name == "samples.safetensors"
    round_trip(run, tmp_path)


def test_round_trip_of_a_run_too_short_for_its_score(mlp, tmp_path):
    round_trip(sample(mlp, 6, steps=2), tmp_path / "short.safetensors")
    round_trip(sample(mlp, 6, steps=10, config=SamplingConfig(start=0.5)), tmp_path / "late.safetensors")


def test_truncated_files_are_refused(full, tmp_path):
    path = full.save(tmp_path / "run.safetensors")
    path.write_bytes(path.read_bytes()[:-50])
    other = tmp_path / "other.safetensors"
    other.write_text("not a tensor")
    for wrong in (path, other, tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match=r"truncated|cannot be read") as raised:
            Trajectory.load(wrong)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_changed_files_are_refused(full, tmp_path, share):
    path = full.save(tmp_path / "run.safetensors")
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 0x08
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"modified|truncated") as raised:
        Trajectory.load(path)
    assert "\n" not in str(raised.value)


BROKEN = {
    "NaN samples": lambda t: t["x"].fill_(torch.nan),
    "infinite reference": lambda t: t.update(reference=torch.full((5,), torch.inf)),
    "falling reference": lambda t: t.update(reference=torch.tensor([1.0, 0.0])),
    "fewer times": lambda t: t.update(times=t["times"][:, :1]),
    "negative variance": lambda t: t["var"].neg_(),
    "whole numbers": lambda t: t.update(x=t["x"].long()),
    "no noise": lambda t: t.pop("x0"),
    "odd scores": lambda t: t.update(scores=torch.zeros(1)),
    "negative index": lambda t: t.update(index=-1 - torch.arange(len(t["x"]))),
    "odd condition": lambda t: t.update({"cond.y": torch.zeros(1)}),
    "no row": lambda t: t.update(x=torch.zeros(())),
    "no samples": lambda t: t.update({name: value[..., :0] for name, value in t.items()}),
    "a late time": lambda t: t["grid"].add_(1),
    "other channels": lambda t: t.update({"mean.place": t.pop("mean")}),
    "wide variance": lambda t: t.update(var=t["var"].repeat(1, 1, 2)),
    "half a standard": lambda t: t.update({"standard.centre": torch.zeros(2)}),
    "an unknown standard": lambda t: t.update({"standard.height": torch.zeros(2)}),
    "evidence without a name": lambda t: t.update(evidence=torch.zeros(len(t["x"]))),
    "short evidence": lambda t: t.update({"evidence.echo": torch.zeros(1)}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_tensors_are_refused(full, tmp_path, name):
    """With the correct hash, as in a deliberate forgery."""
    tensors, about = full.tensors(), full.about()
    BROKEN[name](tensors)
    tensors = {key: value.contiguous().clone() for key, value in tensors.items()}
    metadata = {"fmwc": json.dumps({**about, SEAL: digest_tensors(tensors, about)})}
    save_file(tensors, tmp_path / "run.safetensors", metadata)
    with pytest.raises(CheckpointError, match="not a samples file") as raised:
        Trajectory.load(tmp_path / "run.safetensors")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["seed", "default_score", "evaluations", "units", "made", "without", "states"])
def test_tensors_do_not_replace_the_description(full, tmp_path, name):
    tensors, about = {**full.tensors(), name: torch.ones(2)}, full.about()
    metadata = {"fmwc": json.dumps({**about, SEAL: digest_tensors(tensors, about)})}
    save_file(tensors, tmp_path / "run.safetensors", metadata)
    loaded = Trajectory.load(tmp_path / "run.safetensors")
    assert loaded.about() == full.about()
    assert loaded.states is None


@pytest.mark.parametrize(
    "name", ["scores", "index", "cond", "evidence", "reference", "standard", "transported", "ranks"]
)
def test_the_description_does_not_replace_tensors(full, tmp_path, name):
    tensors = {key: value for key, value in full.tensors().items() if key.partition(".")[0] != name}
    about = {**full.about(), name: 3}
    metadata = {"fmwc": json.dumps({**about, SEAL: digest_tensors(tensors, about)})}
    save_file(tensors, tmp_path / "run.safetensors", metadata)
    loaded = Trajectory.load(tmp_path / "run.safetensors")
    assert len(loaded.score()) == len(loaded.rank) == len(loaded)


# ---- where it is, and how it was made -------------------------------------------------------------------------------


def test_a_run_moves_between_devices(asked):
    run = sample(
        referenced(asked), 36, steps=10, cond={"y": Y}, transport=True, config=SamplingConfig(keep_states=True)
    )
    moved = run.to("meta")
    for name in TENSORS:
        assert getattr(moved, name).is_meta, name
    standard, transported = moved.standard, moved.transported
    others = [moved.cond["y"], moved.reference, standard.centre, standard.spread, transported.var, transported.profile]
    assert all(value.is_meta for value in [*others, *moved.states])
    assert same(run.to("cpu").x, run.x)


def test_round_trip_of_the_settings_of_a_run(mlp, tmp_path):
    made = {"checkpoint": "mine", "guide": 0.5, "window": [0.0, 1.0]}
    run = dataclasses.replace(sample(mlp, 6, steps=10), made=made)
    assert Trajectory.load(run.save(tmp_path / "run.safetensors")).made == made
    assert run.surest(0.5).made == made
