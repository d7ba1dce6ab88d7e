"""Ranking metrics against values by hand, a reference implementation, and scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from fmwc.errors import UsageError
from fmwc.metrics.ranking import (
    FEWEST,
    auprc,
    bootstrap,
    compare,
    precisions,
    ranking,
    ranking_text,
    retention,
    too_few,
    wilson,
)
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
def test_auprc_agrees_with_the_reference_and_scikit_learn(rows):
    score, positive = zip(*rows, strict=True)
    assert auprc(score, positive) == pytest.approx(average_precision(score, positive))
    assert auprc(score, positive) == pytest.approx(average_precision_score(positive, score))


@given(labelled)
def test_perfect_score_has_auprc_one_and_constant_score_the_prevalence(rows):
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


# ---- precision at the top, intervals, comparisons ----------------------------------------------------------------


def test_precisions_by_hand():
    score, positive = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [1, 1, 0, 1, 0, 0, 0, 0, 0, 1]
    assert precisions(score, positive, [0.1, 0.2, 0.5, 1.0]) == pytest.approx({0.1: 1, 0.2: 1, 0.5: 0.6, 1.0: 0.4})
    assert list(precisions(score, positive)) == [0.01, 0.05, 0.10]  # each share of ten samples is one sample
    assert set(precisions(score, positive).values()) == {1.0}
    for share in (0.0, 1.1):
        with pytest.raises(UsageError, match="must"):
            precisions(score, positive, [share])


def test_bootstrap_intervals_have_their_coverage():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        values = rng.normal(size=80)
        low, high = bootstrap(lambda index, v=values: float(v[index].mean()), 80)
        hits += low <= 0 <= high
    assert 46 <= hits <= 60  # 54 expected


def toy_scores(count=300, seed=0):
    rng = np.random.default_rng(seed)
    positive = rng.random(count) < 0.2
    good = positive + rng.normal(size=count)
    # rounded, so that some scores are equal
    return {
        "good": good.round(1),
        "worse": (good + rng.normal(size=count)).round(1),
        "none": rng.random(count),
    }, positive


def test_compare_uses_the_resamples_of_bootstrap(monkeypatch):
    monkeypatch.setattr("fmwc.metrics.ranking.RESAMPLES", 100)
    scores, positive = toy_scores(120)
    found = compare(scores, positive, seed=3)
    a, b = scores["worse"], scores["good"]
    own = bootstrap(lambda i: auprc(a[i], positive[i]), 120, 3)
    assert found["worse"]["auprc"]["interval"] == pytest.approx(own)
    paired = bootstrap(lambda i: auprc(a[i], positive[i]) - auprc(b[i], positive[i]), 120, 3)
    assert found["worse"]["auprc"]["difference_interval"] == pytest.approx(paired)
    kept = bootstrap(lambda i: retention(scores["none"][i], positive[i]).at(0.9), 120, 3)
    assert found["none"]["retention_90%"]["interval"] == pytest.approx(kept)
    top = bootstrap(lambda i: precisions(scores["none"][i], positive[i])[0.1], 120, 3)
    assert found["none"]["precision_10%"]["interval"] == pytest.approx(top)


def test_a_paired_difference_is_narrower_than_its_parts():
    rng = np.random.default_rng(1)
    positive = rng.random(400) < 0.3
    score = positive + rng.normal(size=400)
    found = compare({"a": score, "b": score + 0.05 * rng.normal(size=400)}, positive)
    width = {k: np.diff(found["b"]["auprc"][k])[0] for k in ("interval", "difference_interval")}
    assert width["difference_interval"] < 0.3 * width["interval"]
    assert "difference" not in found["a"]["auprc"]
    same = compare({"a": score, "b": score}, positive)["b"]["lift"]
    assert (same["difference"], same["difference_interval"]) == (0, [0, 0])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_wilson_covers_the_true_rate(share):
    counts = np.random.default_rng(0).binomial(300, share, 4000)
    covered = [low <= share <= high for low, high in (wilson(int(c), 300) for c in counts)]
    assert 0.86 < np.mean(covered) < 0.95


@pytest.mark.parametrize("few", [0, 1, FEWEST - 1])
def test_too_few_failures_are_not_ranked(few):
    bad = np.arange(200) < few
    for positive in (bad, ~bad):
        assert too_few(positive, "failed").startswith(f"too few to tell ({few} ")
        assert ranking_text(np.arange(200.0), positive, "failed") == too_few(positive, "failed")


def test_enough_failures_are_ranked_with_an_interval():
    generator = np.random.default_rng(0)
    bad = generator.random(500) < 0.1
    score = bad + generator.normal(size=500)
    value, low, high = ranking_text(score, bad, "failed").replace("[", "").replace("]", "").replace(",", "").split()
    assert float(value) == pytest.approx(auprc(score, bad), abs=0.005)
    assert float(low) < float(value) < float(high)
