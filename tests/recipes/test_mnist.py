"""The MNIST recipe and its evaluation: options, data and numbers with known values."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import experiments.mnist.evaluate as evaluate
from experiments.common import evaluation
from fmwc.checkpoint import load_network
from fmwc.errors import DataError, UsageError
from fmwc.estimators import Linearised, MonteCarlo
from fmwc.field import attach
from fmwc.metrics.ranking import auprc, retention
from fmwc.mnist.classifier import accuracy
from fmwc.mnist.data import Images, unit
from fmwc.mnist.recipe import PRESETS, Mnist, labels
from fmwc.networks import UNet
from fmwc.sampling import AsReference, SamplingConfig, Schedule, Trajectory
from fmwc.sampling.trajectory import within_groups
from tests.conftest import awaken
from tests.options import arguments
from tests.recipes.conftest import identical, weights

# ---- the recipe -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "jiont"}, "unknown method 'jiont'; did you mean 'joint'"),
        ({"cond": 7}, "cond must be even .* got 7"),
        ({"cond": 0}, "cond must be at least 1, got 0"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"noise_steps": 0}, "noise_steps must be at least 1"),
        ({"references": 0}, "references must be at least 1"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"prior_rate": 1.0}, "prior_rate must lie strictly between 0 and 1"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(change, message):
    with pytest.raises(UsageError, match=message) as raised:
        dataclasses.replace(PRESETS["quick"], **change)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"decay": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "bf61"}, "did you mean 'bf16'"),
    ],
    ids=str,
)
def test_invalid_training_options_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(PRESETS["quick"], **change).plan.iterations  # noqa: B018


def test_channels_must_fill_the_groups():
    with pytest.raises(UsageError, match="multiple of 8"):
        Mnist(base=12).network()


@pytest.mark.parametrize("size", [(6, 8), (8, 10)], ids=str)
def test_sides_must_be_multiples_of_4(size, tmp_path):
    path = tmp_path / "odd.npz"
    np.savez(path, x=np.zeros((20, *size), np.uint8), y=np.arange(20) % 10)
    with pytest.raises(UsageError, match=f"multiples of 4; these are \\({size[0]}, {size[1]}\\)"):
        Mnist(data=str(path), own=True).rows()


def test_labels_outside_the_classes_are_refused(digits):
    with pytest.raises(DataError, match="outside 0 to 8"):
        dataclasses.replace(digits, classes=9).rows()


@pytest.mark.parametrize(("classes", "needed"), [(10, 80), (3, 24)])
def test_too_few_references_are_refused(classes, needed):
    Mnist(references=needed, classes=classes)
    with pytest.raises(UsageError, match=f"at least 8 per class, {needed}; got {needed - 1}"):
        Mnist(references=needed - 1, classes=classes)


def test_a_class_without_images_is_named(digits, tmp_path):
    images = digits.images()
    path = tmp_path / "seven.npz"
    np.savez(path, x=images.x[images.y < 7, 0].numpy(), y=images.y[images.y < 7].numpy())
    with pytest.raises(DataError, match=r"no image is of class 7; .* classes=N"):
        Mnist(data=str(path), own=True).rows()
    _, cond = Mnist(data=str(path), own=True, classes=7).rows()
    assert cond["y"].unique().tolist() == list(range(7))


def test_data_and_labels_must_have_the_same_length(digits):
    x, cond = digits.rows()
    images = digits.images()
    assert torch.equal(x, unit(images.x))
    assert torch.equal(cond["y"], images.y)
    assert x.shape == (len(cond["y"]), *digits.space().channels["x"].shape)
    assert len(digits.images("test").y) == pytest.approx(len(x) / 9, abs=1)


def test_the_network_depends_on_the_seed_only(digits):
    state = torch.get_rng_state()
    first = weights(digits.network())
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert identical(weights(digits.network()), first)
    other = weights(dataclasses.replace(digits, seed=1).network())
    assert not any(torch.equal(other[k], v) for k, v in first.items() if v.ndim > 1)
    two = digits.network(heads=2)
    assert two.out.weight.shape[0] == 2 * first["out.weight"].shape[0]


def test_excluded_layers_have_no_noise(digits):
    field = dataclasses.replace(digits, exclude="first").attach(digits.network())
    assert "first" not in field.noise.names
    assert "first" in digits.attach(digits.network()).noise.names


@pytest.mark.parametrize("classes", [3, 10])
def test_classes_are_drawn_in_turn(classes):
    asked = labels(30, classes)
    assert asked[:classes].tolist() == list(range(classes))
    assert asked.bincount().tolist() == [30 // classes] * classes


# ---- readings -------------------------------------------------------------------------------------------------------


def field_of_few():
    """Images of 16 pixels, whose variance is computed exactly."""
    torch.manual_seed(0)
    return awaken(attach(UNet(base=8, stages=(1, 2), cond=8), space=(1, 4, 4), width=8))


def examiner(judge=None, test=None, **options):
    judge = judge or SimpleNamespace(config={"classes": 10}, parameters=lambda: iter([torch.zeros(1)]))
    return evaluate.Examiner(judge, test, **{"count": 20, "steps": 6, "few": 20, **options})


def test_digits_do_not_depend_on_their_number():
    field, examined = field_of_few(), examiner(seed=4)
    few, many = examined.draw(field, 5), examined.draw(field)
    assert len(many) == 20
    assert torch.equal(few.x0, many.x0[:5])
    torch.testing.assert_close(few.x, many.x[:5])
    assert torch.equal(many.cond["y"], labels(20))
    assert len(few.times) == 0
    assert not torch.equal(examiner(seed=5).draw(field, 5).x0, few.x0)
    assert torch.equal(examined.draw(field, x0=many.x0, confidence=AsReference()).x, many.x)


def test_quality_of_the_test_images_themselves(judge_folder, digits):
    judge, test = load_network(judge_folder), digits.images("test")
    x = unit(test.x)
    none = torch.zeros(0, len(x))
    run = Trajectory(x=x, x0=x, times=none, mean=none, var=none, grid=none, cond={"y": test.y})
    found = examiner(judge, test).quality(run)
    assert found["fid"] == pytest.approx(0, abs=1e-3)
    assert found["failure"] == pytest.approx(1 - accuracy(judge, x, test.y))
    inverted = dataclasses.replace(run, x=1 - x)
    assert examiner(judge, test).quality(inverted)["fid"] > 1


def test_lifts_over_all_digits_and_within_the_class():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 3
    excess = torch.randn(120, generator=generator)
    score, bad = (excess + torch.tensor([0.0, 6.0, -6.0])[y]).exp(), (excess > 1).numpy()
    found = evaluate.lifts({"a": score, "b": -score + score.max() + 1}, y, bad)
    assert found.keys() == {"a", "b"}
    inside = within_groups("y", score, y)
    assert found["a"] == {
        "auprc": auprc(score, bad),
        "auprc_within": auprc(inside, bad),
        "kept": retention(score, bad).at(0.8),
        "kept_within": retention(inside, bad).at(0.8),
    }
    assert found["a"]["auprc_within"] > 0.9 > 0.6 > found["a"]["auprc"]
    assert found["a"]["kept_within"] < found["a"]["kept"]
    curve = evaluate.retained(score, bad)
    assert len(curve) == 100
    assert curve["1"] == pytest.approx(bad.mean())
    assert curve["0.8"] == found["a"]["kept"]


@pytest.mark.parametrize(("steps", "every"), [(6, 5), (10, 5), (7, 2)])
def test_a_thinned_run_has_fewer_readings(steps, every):
    examined, field = examiner(steps=steps), field_of_few()
    full = examined.draw(field, 4, confidence=AsReference())
    seldom = examined.draw(field, 4, confidence=AsReference(), schedule=Schedule.every(every))
    thin = evaluation.thinned(full, every)
    assert torch.equal(thin.times, seldom.times)
    torch.testing.assert_close(thin.var, seldom.var)
    torch.testing.assert_close(thin.score("integrated"), seldom.score("integrated"))


@pytest.mark.parametrize("steps", [5, 6])
def test_variance_and_divergence_are_read_at_the_same_times(steps, monkeypatch):
    times, drawn = [], []

    class Recorded(evaluate.Examiner):
        def draw(self, *args, **options):
            drawn.append(super().draw(*args, **arguments(**options)))
            return drawn[-1]

    def along(field, states, grid, probes, **options):
        times.append(grid[:-1])
        return torch.stack([s.flatten(1).sum(1) for s in states[:-1]])

    monkeypatch.setattr(evaluate, "along", along)
    examined = examiner(steps=steps)
    found = evaluate.universality(field_of_few(), Recorded(examined.classifier, examined.test, 20, steps, few=20))
    assert found.keys() == {"linearised", "diagonal"}
    assert drawn[0].states is not None
    for run in drawn[1:]:
        torch.testing.assert_close(run.times, times[0])


def test_heads_are_evaluated_on_the_other_half():
    """The relation in the first half is the opposite of that in the second half."""
    generator = torch.Generator().manual_seed(0)
    excess = torch.randn(400, generator=generator)
    var = excess.exp()[None, :, None].expand(4, -1, 2) * (0.9 + 0.2 * torch.rand(4, 400, 2, generator=generator))
    times = (torch.arange(4) / 4)[:, None].expand(-1, 400)
    x = torch.zeros(400, 2)
    run = Trajectory(x=x, x0=x, times=times, mean=torch.zeros_like(var), var=var, grid=times, cond={"y": labels(400)})
    bad = (excess > 0.5).numpy()
    honest = evaluate.heads(run, bad)
    assert honest.pop("failure") == pytest.approx(bad[200:].mean())
    assert min(honest.values()) > 0.9
    turned = evaluate.heads(run, np.concatenate([~bad[:200], bad[200:]]))
    assert max(turned["l1"], turned["boosting"]) < 0.5
    assert turned["label_free"] == honest["label_free"]


def test_fidelity_compares_the_variance_with_draws(monkeypatch):
    monkeypatch.setattr(evaluation, "TIMES", (0.0, 0.5))
    field = field_of_few()
    examined = examiner(few=12)
    run = examined.draw(field, 12, config=SamplingConfig(keep_states=True))
    estimators = {"linearised": Linearised(evaluate.PROBES), "diagonal": "diagonal"}
    options = {"draws": 100, "abreast": 20, "seed": examined.seed, "read_seed": examined.seed + 2}
    found = evaluation.fidelity(field, run, estimators, **options, reduce=lambda var: var.flatten(1).mean(1))
    assert found.keys() == {"0.0", "0.5"}
    for row in found.values():
        assert row["ceiling_spearman"] > 0.3
        assert 0.5 < row["linearised_ratio"] < 2
    draws = field.moments(run.states[3], 0.5, MonteCarlo(100, 20), seed=examined.seed, cond=run.cond).var
    own = field.moments(run.states[3], 0.5, Linearised(evaluate.PROBES), seed=examined.seed + 2, cond=run.cond).var
    ratio = (own.flatten(1).mean(1) / draws.flatten(1).mean(1)).quantile(0.5)
    assert found["0.5"]["linearised_ratio"] == pytest.approx(ratio.item(), rel=1e-4)


def test_fid_is_relative_to_the_test_split(judge_folder, digits):
    judge, test = load_network(judge_folder), digits.images("test")
    some = Images(test.x[:50], test.y[:50])
    run = examiner(judge, test, steps=2).draw(digits.network(), config=SamplingConfig(space=digits.space()))
    assert examiner(judge, some).quality(run)["fid"] != examiner(judge, test).quality(run)["fid"]
