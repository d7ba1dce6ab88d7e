"""The MNIST recipe and its evaluation: options, data and numbers with known values."""

import dataclasses

import numpy as np
import pytest
import torch

from fmwc.errors import DataError, UsageError
from fmwc.mnist.data import unit
from fmwc.mnist.recipe import PRESETS, Mnist, labels
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
