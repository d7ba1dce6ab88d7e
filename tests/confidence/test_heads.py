"""Learned heads on a toy that can be told apart, and what they are given."""

import numpy as np
import pytest
import torch

from fmwc.confidence.heads import HEADS, features, fit_head
from fmwc.errors import ShapeError, UnknownNameError, UsageError
from fmwc.metrics.ranking import auprc
from fmwc.sampling import Trajectory

BAD = torch.arange(200) % 4 == 0


def toy(seed, reads=4, dims=(2,), bad=BAD):
    """Bad samples carry ten times the variance at the second reading."""
    generator = torch.Generator().manual_seed(seed)
    shape = (reads, len(bad), *dims)
    var = torch.rand(shape, generator=generator) + 0.5
    var[1, bad] *= 10
    times = (torch.arange(reads) / reads)[:, None].expand(-1, len(bad))
    x = torch.zeros(len(bad), *dims)
    return Trajectory(x=x, x0=x, times=times, mean=torch.zeros(shape), var=var, grid=torch.cat([times, times[:1]]))


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_learns_what_can_be_told_apart(kind):
    head = fit_head(toy(0), BAD, kind)
    score = head.score(toy(1))
    assert score.shape == (200,)
    assert ((score >= 0) & (score <= 1)).all()
    assert auprc(score, BAD.numpy()) > 0.98


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_cannot_learn_what_is_not_there(kind):
    labels = np.random.default_rng(0).permutation(BAD.numpy())
    nothing = torch.zeros(200, dtype=torch.bool)
    head = fit_head(toy(0, bad=nothing), labels, kind)
    assert auprc(head.score(toy(1, bad=nothing)), labels) < 0.6


def test_every_head_is_known():
    assert set(HEADS) == {"l1", "boosting"}


def test_features_are_log_variances():
    run = toy(0)
    found = features(run)
    assert found.shape == (200, 8)
    expected = run.var.log().movedim(0, 1).flatten(1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_many_coordinates_are_read_as_their_mean():
    run = toy(0, dims=(1, 6, 6))
    found = features(run)
    assert found.shape == (200, 4)
    np.testing.assert_allclose(found, run.var.flatten(2).mean(2).log().T.numpy(), rtol=1e-4, atol=1e-5)


def test_channels_are_joined():
    a, b = toy(0), toy(1)
    run = Trajectory(
        x={"a": a.x, "b": b.x},
        x0={"a": a.x, "b": b.x},
        times=a.times,
        mean={"a": a.mean, "b": b.mean},
        var={"a": a.var, "b": torch.zeros_like(b.var)},
        grid=a.grid,
    )
    found = features(run)
    assert found.shape == (200, 16)
    assert np.isfinite(found).all()


def test_refusals():
    run = toy(0)
    with pytest.raises(ShapeError, match="3 labels for 200 samples"):
        fit_head(run, [True, False, True])
    with pytest.raises(UsageError, match="at least 3 labelled samples of each class"):
        fit_head(run, torch.arange(200) < 2)
    with pytest.raises(UnknownNameError, match="did you mean 'boosting'"):
        fit_head(run, BAD, "boost")
    with pytest.raises(ShapeError, match="fitted on 8 features and this run has 6"):
        fit_head(run, BAD).score(toy(0, reads=3))
