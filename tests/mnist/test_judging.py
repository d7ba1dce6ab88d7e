"""The metrics of images with a transparent classifier, and Fréchet distances in closed form."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import nn

import fmwc.mnist.classifier
from experiments.mnist.evaluate import frechet
from fmwc.mnist.classifier import accuracy, activations, failed, predictions
from fmwc.networks import LeNet


class Brightness(nn.Module):
    """A classifier: 0 for dark images, 1 for grey ones, 2 for white ones; its features are mean and peak."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.Sequential(nn.Identity(), nn.Dropout(0.5))
        self.inner[0].eval()
        self.seen = []

    def features(self, x):
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append(x)
        x = self.inner(x.flatten(1)) * self.scale
        return torch.stack([x.mean(1), x.amax(1)], 1)

    def forward(self, x):
        mean = self.features(x)[:, :1]
        return -(mean - torch.tensor([[0.0, 0.5, 1.0]])).abs()


def images(*levels):
    return torch.tensor(levels)[:, None, None, None].expand(-1, 1, 4, 4)


def test_predictions_by_hand():
    judge, x = Brightness(), images(0.1, 0.6, 0.9, 0.4)
    assert predictions(judge, x).tolist() == [0, 1, 2, 1]
    y = torch.tensor([0, 2, 2, 1])
    assert failed(judge, x, y).tolist() == [False, True, False, False]
    assert accuracy(judge, x, y) == pytest.approx(0.75)
    assert accuracy(judge, x, torch.tensor([1, 0, 0, 0])) == 0


@pytest.mark.parametrize("read", [predictions, activations])
def test_many_images_are_classified_in_batches(read, monkeypatch):
    judge, x = Brightness(), torch.rand(11, 1, 4, 4)
    whole = read(judge, x)
    monkeypatch.setattr(fmwc.mnist.classifier, "CHUNK", 4)
    judge.seen.clear()
    parts = read(judge, x)
    assert [len(part) for part in judge.seen] == [4, 4, 3]
    assert (parts == whole).all()


def test_classification_does_not_change_running_statistics():
    judge = LeNet(side=8).train()
    before = {k: v.clone() for k, v in judge.state_dict().items()}
    activations(judge, torch.rand(6, 1, 8, 8))
    assert all(torch.equal(v, before[k]) for k, v in judge.state_dict().items())
    assert judge.training


# ---- the Fréchet distance -------------------------------------------------------------------------------------------


def exactly(mean, deviations):
    """Return a set with this sample mean and these deviations: the ends of a cross, with one axis per feature."""
    deviations = np.asarray(deviations, float)
    count = 2 * len(deviations)
    arms = np.diag(deviations) * np.sqrt((count - 1) / 2)
    return np.asarray(mean) + np.concatenate([arms, -arms])


def test_diagonal_gaussians_in_closed_form():
    """‖μ_a − μ_b‖² + Σ (σ_a − σ_b)²."""
    a, b = exactly([0.0, 1.0, 2.0], [1.0, 0.5, 3.0]), exactly([1.0, 1.0, 0.0], [2.0, 0.5, 0.0])
    np.testing.assert_allclose(np.cov(a, rowvar=False), np.diag([1.0, 0.25, 9.0]), atol=1e-12)
    assert frechet(a, b) == pytest.approx((1 + 0 + 4) + (1 + 0 + 9))


def mixed(count, features, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, features)) @ rng.normal(size=(features, features)) + rng.normal(size=features)


@pytest.mark.parametrize(("count", "features"), [(50, 3), (200, 12), (300, 40)])
def test_correlated_gaussians_against_the_matrix_square_root(count, features):
    a, b = mixed(count, features, 0), mixed(count + 20, features, 1)
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    shift = a.mean(0) - b.mean(0)
    expected = shift @ shift + np.trace(first + second - 2 * sqrtm(first @ second).real)
    assert frechet(a, b) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("count", [100, 5], ids=["enough", "fewer than features"])
def test_frechet_distance_is_zero_to_itself_and_symmetric(count):
    a, b = mixed(count, 8, 0), mixed(count, 8, 1)
    scale = np.trace(np.cov(a, rowvar=False))
    assert abs(frechet(a, a)) < 1e-6 * scale
    assert abs(frechet(a, a[::-1])) < 1e-6 * scale
    assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-6)
    assert frechet(a, b) > 0.1 * scale


def test_frechet_distance_under_shifts_rotations_and_scales():
    a, b = mixed(60, 5, 0), mixed(60, 5, 1)
    b = b - b.mean(0) + a.mean(0)
    shift = np.array([1.0, -2.0, 0.0, 0.5, 3.0])
    assert frechet(a, b + shift) == pytest.approx(frechet(a, b) + shift @ shift)
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(5, 5)))[0]
    assert frechet(a @ turn, b @ turn) == pytest.approx(frechet(a, b))
    assert frechet(3 * a, 3 * b) == pytest.approx(9 * frechet(a, b))
