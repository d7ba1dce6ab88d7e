"""The MNIST recipe and its evaluation: options, data and numbers with known values."""

import dataclasses

import numpy as np
import pytest
import torch

from fmwc.errors import DataError
from fmwc.mnist.data import unit
from fmwc.mnist.recipe import Mnist, labels
from tests.recipes.conftest import identical, weights

# ---- the recipe -----------------------------------------------------------------------------------------------------


def test_a_class_without_images_is_named(digits, tmp_path):
    images = digits.images()
    path = tmp_path / "seven.npz"
    np.savez(path, x=images.x[images.y < 7, 0].numpy(), y=images.y[images.y < 7].numpy())
    with pytest.raises(DataError, match="class"):
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


@pytest.mark.parametrize("classes", [3, 10])
def test_classes_are_drawn_in_turn(classes):
    asked = labels(30, classes)
    assert asked[:classes].tolist() == list(range(classes))
    assert asked.bincount().tolist() == [30 // classes] * classes
