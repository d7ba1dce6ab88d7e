"""Learned heads on synthetic runs with known outcomes, and their features."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from fmwc.errors import DataError, MismatchError, ShapeError, UnknownNameError, UsageError
from fmwc.files import write_text
from fmwc.identity import seal
from fmwc.metrics.ranking import auprc
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import within_groups
from fmwc.uses.heads import (
    HEADS,
    EvidenceHead,
    cross_validated,
    evidence_of,
    features,
    fit_evidence_head,
    fit_head,
)

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


def test_large_channels_are_read_as_their_mean():
    run = toy(0, dims=(1, 6, 6))
    found = features(run)
    assert found.shape == (200, 4)
    np.testing.assert_allclose(found, run.var.flatten(2).mean(2).log().T.numpy(), rtol=1e-4, atol=1e-5)


def test_features_of_channels_are_concatenated():
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


def test_missing_condition_is_refused():
    run, labels = asked(0)
    for call in (lambda: fit_head(run, labels, within="label"), lambda: features(toy(0), "label")):
        with pytest.raises(UsageError, match="no condition 'label'"):
            call()
    head = fit_head(run, labels, "l1", within="y")
    with pytest.raises(UsageError, match="no condition 'y'"):
        head.score(dataclasses.replace(run, cond={}))
    with pytest.raises(UsageError, match=r"^3 samples with y = 0 are too few"):
        head.score(run.take(torch.arange(9)))


def test_invalid_arguments():
    run = toy(0)
    with pytest.raises(ShapeError, match="3 labels for 200 samples"):
        fit_head(run, [True, False, True])
    with pytest.raises(UsageError, match="at least 3 labelled samples of each class"):
        fit_head(run, torch.arange(200) < 2)
    with pytest.raises(UnknownNameError, match="did you mean 'boosting'"):
        fit_head(run, BAD, "boost")
    with pytest.raises(ShapeError, match="fitted to 8 features, but the run has 6"):
        fit_head(run, BAD).score(toy(0, reads=3))


# ---- heads of all evidence, which are saved --------------------------------------------------------------------------


def crystals(seed, count=200):
    """A run of two channels of up to four rows; failures have more variance in `coord` and a larger echo."""
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.arange(count) % 4 + 1
    bad = torch.rand(count, generator=generator) < 0.4
    present = (torch.arange(4) < atoms[:, None]).double()[..., None]
    x = {"coord": torch.rand(count, 4, 3, generator=generator) * present, "cell": torch.rand(count, 6).double()}
    var = {name: torch.rand(3, *value.shape, generator=generator) + 0.5 for name, value in x.items()}
    var["coord"] *= torch.where(bad, 3.0, 1.0)[:, None, None] * present
    times = torch.tensor([0.2, 0.5, 0.8])[:, None].expand(3, count)
    echo = torch.rand(count, generator=generator) + torch.where(bad, 0.4, 0.0) - 2  # a logarithm
    guess = torch.rand(count, 2, generator=generator) + 0.1
    run = Trajectory(
        x=x,
        x0={name: value.clone() for name, value in x.items()},
        times=times,
        mean={name: torch.zeros_like(value) for name, value in var.items()},
        var=var,
        grid=torch.cat([times, torch.ones(1, count)]),
        cond={"atoms": atoms},
        rows={"coord": ("atoms", 1)},
        evidence={"echo": echo, "guess": guess, "guess_t": torch.tensor([0.1, 0.6]).expand(count, 2)},
        default_score="echo",
        seed=seed,
    )
    return run, bad.numpy()


def test_evidence_of_a_run():
    run, _ = crystals(0)
    found = evidence_of(run)
    assert [*found] == [
        *(f"{channel} σ@{t}" for channel in ("coord", "cell") for t in (0.2, 0.5, 0.8)),
        *("echo", "guess@0.1", "guess@0.6", "atoms"),
    ]
    np.testing.assert_allclose(found["echo"], run.evidence["echo"])
    np.testing.assert_allclose(found["guess@0.6"], run.evidence["guess"][:, 1].log())
    np.testing.assert_allclose(found["atoms"], run.cond["atoms"])
    single = run.cond["atoms"].numpy() == 1  # its position is not free
    assert np.isnan(found["coord σ@0.5"][single]).all()
    free = 3 * (run.cond["atoms"] - 1)
    expected = (run.var["coord"][1].flatten(1).sum(1) / free).sqrt().log()
    np.testing.assert_allclose(found["coord σ@0.5"][~single], expected[~single])
    compact = evidence_of(run.compact())  # files keep one variance per channel
    for name, values in found.items():
        np.testing.assert_allclose(compact[name], values)


def test_head_of_evidence_ranks_new_samples_better_than_one_check(tmp_path):
    (known, labels), (fresh, truth) = crystals(0), crystals(1)
    head = fit_evidence_head(known, labels, {"steps": 3})
    assert (head.labelled, head.failed, head.seed) == (200, labels.sum(), 0)
    score = head.score(fresh).numpy()
    assert auprc(score, truth) > auprc(fresh.evidence["echo"], truth) + 0.1
    assert auprc(cross_validated(known, labels), labels) > auprc(known.evidence["echo"], labels) + 0.1
    rate = 1 / (1 + np.exp(-head.score(known).numpy()))
    assert abs(rate.mean() - labels.mean()) < 0.02  # the score is a logarithm of odds
    loaded = EvidenceHead.load(head.save(tmp_path))
    assert loaded == head
    assert loaded.identity == head.identity
    np.testing.assert_array_equal(loaded.score(fresh), score)
    ranked = loaded.ranked(fresh)
    np.testing.assert_allclose(ranked.score(), score, rtol=1e-6)
    assert ranked.default_score == "head"
    again = Trajectory.load(ranked.save(tmp_path))
    np.testing.assert_array_equal(again.score(), ranked.score())
    assert "head" not in evidence_of(again)  # a head is never fitted to the score of another


def test_cross_validation_does_not_see_the_labels_that_it_predicts():
    run, _ = crystals(0)
    labels = np.random.default_rng(0).random(200) < 0.4
    assert abs(auprc(cross_validated(run, labels), labels) - labels.mean()) < 0.12


def test_saved_heads_are_checked(tmp_path):
    run, labels = crystals(0)
    path = fit_evidence_head(run, labels).save(tmp_path)
    content = json.loads(path.read_text())
    write_text(path, json.dumps({**content, "intercept": 5.0}))
    with pytest.raises(DataError, match="was changed after it was written"):
        EvidenceHead.load(tmp_path)
    for change in ({"columns": {"echo": [0.0, 1.0]}}, {"format": 2}, {"intercept": "0"}, {"columns": None}):
        write_text(path, json.dumps(seal({**content, **change})))
        with pytest.raises(DataError, match=r"head\.json"):
            EvidenceHead.load(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        EvidenceHead.load(tmp_path / "nothing")


def test_heads_of_evidence_refuse_too_few_labels_and_other_evidence():
    run, labels = crystals(0)
    for wrong in (np.zeros(200), np.ones(200), np.arange(200) < 9):
        with pytest.raises(UsageError, match="at least 10 failed and 10 good labelled samples, got"):
            fit_evidence_head(run, wrong)
    with pytest.raises(ShapeError, match="3 labels for 200 samples"):
        cross_validated(run, [True, False, True])
    head = fit_evidence_head(run, labels)
    with pytest.raises(MismatchError, match="the head was fitted to echo, which these samples lack"):
        head.score(dataclasses.replace(run, evidence={}))
