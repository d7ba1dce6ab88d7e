"""The trajectory: confidence, filtering, and files that round-trip."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fmwc.errors import CheckpointError, UsageError
from fmwc.field import attach
from fmwc.flow import Space
from fmwc.identity import SEAL, digest_tensors
from fmwc.sampling import (
    SCORES,
    Reference,
    SamplingConfig,
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
    for name in ("integrated@0.2", "peak@0.2-0.6"):
        with pytest.raises(UsageError):
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


def test_truncated_files_are_refused(full, tmp_path):
    path = full.save(tmp_path / "run.safetensors")
    path.write_bytes(path.read_bytes()[:-50])
    other = tmp_path / "other.safetensors"
    other.write_text("not a tensor")
    for wrong in (path, other, tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match=r"truncated|cannot be read") as raised:
            Trajectory.load(wrong)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("share", [0.2, 0.999])
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
    "falling reference": lambda t: t.update(reference=torch.tensor([1.0, 0.0])),
    "fewer times": lambda t: t.update(times=t["times"][:, :1]),
    "no noise": lambda t: t.pop("x0"),
    "a late time": lambda t: t["grid"].add_(1),
    "wide variance": lambda t: t.update(var=t["var"].repeat(1, 1, 2)),
    "half a standard": lambda t: t.update({"standard.centre": torch.zeros(2)}),
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
    with pytest.raises(CheckpointError, match="samples") as raised:
        Trajectory.load(tmp_path / "run.safetensors")
    assert "\n" not in str(raised.value)


# ---- where it is, and how it was made -------------------------------------------------------------------------------


def test_round_trip_of_the_settings_of_a_run(mlp, tmp_path):
    made = {"checkpoint": "mine", "guide": 0.5, "window": [0.0, 1.0]}
    run = dataclasses.replace(sample(mlp, 6, steps=10), made=made)
    assert Trajectory.load(run.save(tmp_path / "run.safetensors")).made == made
    assert run.surest(0.5).made == made
