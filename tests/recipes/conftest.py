"""Recipes at a size that trains in seconds: a small board, and scikit-learn's digits, 8×8."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fmwc.checkerboard.recipe import Checkerboard
from fmwc.mnist.classifier import Classifier, fit_classifier
from fmwc.mnist.recipe import Mnist

CPU = torch.device("cpu")
BOARD = Checkerboard(
    points=200, hidden=8, depth=1, time_features=4, iterations=4, batch=8, width=4, noise_steps=2, save_every=2
)


@pytest.fixture(scope="package")
def digits_file(tmp_path_factory):
    digits = load_digits()
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    np.savez(path, x=(digits.images * 15).astype(np.uint8), y=digits.target)
    return path


@pytest.fixture(scope="package")
def digits(digits_file):
    return Mnist(
        base=8, cond=8, iterations=4, batch=8, noise_steps=2, width=8, references=80, save_every=2,
        data=str(digits_file), own=True,
    )  # fmt: skip


@pytest.fixture(scope="package")
def judge_folder(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge") / "judge"
    recipe = Classifier(iterations=150, batch=64, data=digits.data, own=True)
    fit_classifier(recipe, digits.images(), digits.images("test"), folder, CPU)
    return folder


@pytest.fixture(params=["checkerboard", "mnist"])
def recipe(request, digits):
    return {"checkerboard": BOARD, "mnist": digits}[request.param]


def weights(module):
    return {k: v.clone() for k, v in module.state_dict().items()}


def identical(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
