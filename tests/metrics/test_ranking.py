"""Ranking against values by hand, a twin, and scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from fmwc.errors import ShapeError, UsageError
from fmwc.metrics.ranking import auprc, ranking, retention
from tests.reference import average_precision

labelled = st.lists(st.tuples(st.integers(0, 6).map(float), st.booleans()), min_size=1, max_size=30).filter(
    lambda rows: any(p for _, p in rows)
)


def test_auprc_by_hand():
    # in order of score: yes, no, yes, no: precision 1 at recall ½, 2/3 at recall 1
    assert auprc([4, 3, 2, 1], [True, False, True, False]) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert auprc([2, 1], [True, False]) == 1
    assert auprc([1, 2], [True, False]) == 0.5
    assert auprc([1, 1, 1, 1], [True, False, False, False]) == 0.25


@given(labelled)
def test_auprc_is_the_twins_and_sklearns(rows):
    score, positive = zip(*rows, strict=True)
    assert auprc(score, positive) == pytest.approx(average_precision(score, positive))
    assert auprc(score, positive) == pytest.approx(average_precision_score(positive, score))


@given(labelled)
def test_a_perfect_score_is_one_and_the_prevalence_is_the_floor(rows):
    _, positive = zip(*rows, strict=True)
    assert auprc(np.asarray(positive, float), positive) == 1
    constant = ranking(np.zeros(len(positive)), positive)
    assert constant.auprc == pytest.approx(constant.prevalence)
    assert constant.lift == pytest.approx(1)
    assert constant.prevalence == pytest.approx(np.mean(positive))


@given(labelled)
def test_retention_is_the_rate_among_the_surest(rows):
    score, positive = (np.asarray(v) for v in zip(*rows, strict=True))
    curve = retention(score, positive)
    order = np.argsort(score, kind="stable")
    for n in range(1, len(score) + 1):
        assert curve.kept[n - 1] == pytest.approx(n / len(score))
        assert curve.rate[n - 1] == pytest.approx(positive[order][:n].mean())
    assert curve.at(1.0) == pytest.approx(positive.mean())


def test_retention_by_hand():
    curve = retention([0.1, 0.4, 0.2, 0.3], [True, True, False, False])
    assert curve.rate.tolist() == pytest.approx([1, 0.5, 1 / 3, 0.5])
    assert [curve.at(f) for f in (0.0, 0.25, 0.5, 1)] == pytest.approx([1, 1, 0.5, 0.5])


def test_tensors_will_do():
    assert auprc(torch.tensor([2.0, 1.0]), torch.tensor([True, False])) == 1


def test_refusals():
    with pytest.raises(ShapeError, match="got 2 labels for 3 scores"):
        auprc([1, 2, 3], [True, False])
    with pytest.raises(UsageError, match="NaN or infinite"):
        auprc([1, float("nan")], [True, False])
    with pytest.raises(UsageError, match="no sample is positive"):
        auprc([1, 2], [False, False])
