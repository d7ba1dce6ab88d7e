"""Learned heads on synthetic runs with known outcomes, and their features."""

import dataclasses

import numpy as np
import pytest
import torch

from fmwc.metrics.ranking import auprc
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import within_groups
from fmwc.uses.heads import HEADS, features, fit_head

BAD = torch.arange(200) % 4 == 0


def toy(seed, reads=4, dims=(2,), bad=BAD):
    """Bad samples have ten times the variance at the second reading."""
    generator = torch.Generator().manual_seed(seed)
    shape = (reads, len(bad), *dims)
    var = torch.rand(shape, generator=generator) + 0.5
    var[1, bad] *= 10
    times = (torch.arange(reads) / reads)[:, None].expand(-1, len(bad))
    x = torch.zeros(len(bad), *dims)
    return Trajectory(x=x, x0=x, times=times, mean=torch.zeros(shape), var=var, grid=torch.cat([times, times[:1]]))


@pytest.mark.parametrize("kind", HEADS)
def test_head_learns_separable_outcomes(kind):
    head = fit_head(toy(0), BAD, kind)
    score = head.score(toy(1))
    assert score.shape == (200,)
    assert ((score >= 0) & (score <= 1)).all()
    assert auprc(score, BAD.numpy()) > 0.98


@pytest.mark.parametrize("kind", HEADS)
def test_head_does_not_learn_random_labels(kind):
    labels = np.random.default_rng(0).permutation(BAD.numpy())
    nothing = torch.zeros(200, dtype=torch.bool)
    head = fit_head(toy(0, bad=nothing), labels, kind)
    assert auprc(head.score(toy(1, bad=nothing)), labels) < 0.6


def test_features_are_log_variances():
    run = toy(0)
    found = features(run)
    assert found.shape == (200, 8)
    expected = run.var.log().movedim(0, 1).flatten(1)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


# ---- within a condition ---------------------------------------------------------------------------------------------


def asked(seed, reads=3):
    """Three classes with very different levels. A sample is bad only if its variance exceeds that of its class."""
    run = toy(seed, reads, bad=torch.zeros(240, dtype=torch.bool))
    generator = torch.Generator().manual_seed(100 + seed)
    y = torch.arange(240) % 3
    excess = torch.randn(240, generator=generator)
    level = torch.tensor([0.0, 4.0, -4.0])[y] + excess
    var = run.var * level.exp()[None, :, None]
    return dataclasses.replace(run, var=var, cond={"y": y}), (excess > 0.8).numpy()


def test_head_within_classes_finds_excess_over_the_class():
    (known, labels), (fresh, truth) = asked(0), asked(1)
    plain = auprc(fit_head(known, labels, "l1").score(fresh), truth)
    within = auprc(fit_head(known, labels, "l1", within="y").score(fresh), truth)
    assert plain < 0.5
    assert within > 0.9


@pytest.mark.parametrize("kind", HEADS)
def test_head_within_classes_ignores_the_level_of_a_class(kind):
    (known, labels), (fresh, _) = asked(0), asked(1)
    head = fit_head(known, labels, kind, within="y")
    assert head.within == "y"
    louder = dataclasses.replace(fresh, var=torch.where((fresh.cond["y"] == 1)[None, :, None], 1e3, 1.0) * fresh.var)
    np.testing.assert_allclose(head.score(louder), head.score(fresh), atol=1e-3)


def test_features_within_classes_are_standardised_separately():
    run, _ = asked(0)
    found = features(run, "y")
    assert found.shape == features(run).shape == (240, 6)
    columns = run.var.movedim(0, 1).flatten(1)
    for i in range(6):
        np.testing.assert_allclose(found[:, i], within_groups("y", columns[:, i], run.cond["y"]), rtol=1e-6)
    assert abs(np.corrcoef(found[:, 0], run.cond["y"] == 1)[0, 1]) < 0.2
    assert np.corrcoef(features(run)[:, 0], run.cond["y"] == 1)[0, 1] > 0.7
