"""The recipe of the digit classifier: distortions of its training images, and its accuracy."""

import pytest
import torch

from fmwc.checkpoint import about, load_network
from fmwc.data.arrays import fingerprint
from fmwc.mnist.classifier import Classifier, accuracy, distort, fit_classifier
from fmwc.mnist.data import unit
from fmwc.randomness import Stream
from tests.recipes.conftest import CPU, identical, weights

STILL = {"turn": 0.0, "scale": 0.0, "shift": 0.0}


class Always:
    """Randomness that returns its largest or smallest value."""

    def __init__(self, value):
        self.value = value

    def uniform(self, like):
        return torch.full_like(like, self.value)


def stream(seed=0):
    return Stream(torch.Generator().manual_seed(seed))


def blobs(count=4, side=12):
    """Smooth images with a dark border, so that interpolation errors are small."""
    at = torch.linspace(-1, 1, side)
    centres = torch.rand(count, 2, generator=torch.Generator().manual_seed(1)) * 0.6 - 0.3
    square = (at - centres[:, :1])[:, None, :] ** 2 + (at - centres[:, 1:])[:, :, None] ** 2
    return torch.exp(-8 * square)[:, None]


def test_no_jitter_is_the_identity():
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(distort(x, Classifier(**STILL), stream()), x, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("side", "pixels"), [(1.0, 2), (0.0, -2)])
def test_a_shift_is_a_share_of_the_side(side, pixels):
    x = blobs()
    found = distort(x, Classifier(**{**STILL, "shift": 2 / 12}), Always(side))
    moved = torch.zeros_like(x)
    here, there = (slice(None, -2), slice(2, None)) if pixels > 0 else (slice(2, None), slice(None, -2))
    moved[..., here, here] = x[..., there, there]
    torch.testing.assert_close(found, moved, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("side", "quarters"), [(1.0, 1), (0.0, -1)])
def test_a_turn_is_in_degrees(side, quarters):
    x = blobs()
    found = distort(x, Classifier(**{**STILL, "turn": 90.0}), Always(side))
    torch.testing.assert_close(found, torch.rot90(x, quarters, (2, 3)), atol=1e-4, rtol=0)


def test_every_image_is_distorted_by_a_bounded_amount():
    x = blobs(1).expand(300, -1, -1, -1)
    recipe = Classifier(**{**STILL, "shift": 0.08})
    found = distort(x, recipe, stream())
    assert torch.equal(found, distort(x, recipe, stream()))
    assert not torch.equal(found, distort(x, recipe, stream(1)))
    at = torch.linspace(0.5, 11.5, 12)
    shares = found / found.sum((2, 3), keepdim=True)
    places = torch.stack([(shares.sum(3) * at).sum(2), (shares.sum(2) * at).sum(2)])[..., 0] / 12
    moved = places - places.mean(1, keepdim=True)
    assert 0.06 < float(moved.abs().max()) < 0.09
    assert abs(float(torch.corrcoef(moved)[0, 1])) < 0.25
    assert moved[0].unique().numel() == 300


# ---- training -------------------------------------------------------------------------------------------------------


def test_a_classifier_of_small_digits_is_accurate_and_records_its_accuracy(judge_folder, digits):
    judge, test = load_network(judge_folder), digits.images("test")
    found = accuracy(judge, unit(test.x), test.y)
    record = about(judge_folder)
    assert found > 0.9
    assert record["metrics"]["accuracy"] == pytest.approx(found)
    assert judge.config == {"classes": 10, "side": 8}
    train = digits.images()
    assert record["data"]["fingerprint"] == fingerprint(train.x, train.y)
    assert record["recipe"]["iterations"] == 150
    assert str(digits.data) not in (judge_folder / "recipe.json").read_text()


def test_the_test_split_does_not_change_the_weights(digits, tmp_path):
    recipe, train, test = Classifier(iterations=5, batch=8), digits.images(), digits.images("test")
    state = torch.get_rng_state()
    first = fit_classifier(recipe, train, test, tmp_path / "a", CPU)
    threes = type(test)(test.x[test.y == 3], test.y[test.y == 3])
    second = fit_classifier(recipe, train, threes, tmp_path / "b", CPU)
    assert identical(weights(first), weights(second))
    assert not first.training
    assert about(tmp_path / "a")["metrics"] != about(tmp_path / "b")["metrics"]
    assert torch.equal(torch.get_rng_state(), state)
    other = fit_classifier(Classifier(seed=1, iterations=5, batch=8), train, test, tmp_path / "c", CPU)
    assert not identical(weights(first), weights(other))
