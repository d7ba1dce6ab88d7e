"""Certificates hold with their stated probability for any score, on synthetic risks and on a real run."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

import fmwc
from fmwc.checkerboard.data import misplaced
from fmwc.errors import ShapeError, UsageError
from fmwc.uses.risk import (
    GRID,
    RiskCertificate,
    lower_bound,
    reliability,
    required_labels,
    risk_control,
    upper_bound,
)

REPETITIONS = 1_000
FINE = np.linspace(0, 1, 4_001)

# The risk of a sample, by its score in [0, 1].
LOCAL = {
    "good": lambda s: 0.004 + 0.8 / (1 + np.exp(-40 * (s - 0.9))),
    "sloping": lambda s: 0.01 + 0.35 * s**3,
    "poor": lambda s: np.full_like(s, 0.051),  # slightly too high at every threshold
    "misleading": lambda s: np.where(s < 0.3, 0.12, 0.01),  # the risk decreases as more are kept
    "wavy": lambda s: np.where((s > 0.35) & (s < 0.55), 0.16, 0.02) + 0.1 * (s > 0.8),  # above, below, and above again
}


def wrong_certificates(local, labels, others, repetitions=REPETITIONS, max_risk=0.05, probability=0.9):
    """Return how often a certificate was wrong, and the mean share kept, for uniform scores."""
    rng = np.random.default_rng(0)
    failures, kept = 0, 0.0
    risks = np.cumsum(local(FINE)) / np.arange(1, len(FINE) + 1)  # R(λ): the mean of the local risk up to it
    for i in range(repetitions):
        score = rng.random(labels)
        bad = rng.random(labels) < local(score)
        given = None if others is None else rng.random(others)
        try:
            made = risk_control(score, bad, max_risk, probability, others=given, seed=i)
        except UsageError:
            continue  # nothing is certified
        failures += risks[int(made.threshold * (len(FINE) - 1))] > max_risk
        kept += made.threshold
    return failures, kept / repetitions


@pytest.mark.parametrize("others", [None, 200], ids=["set aside", "unlabelled"])
@pytest.mark.parametrize("name", LOCAL)
def test_certificates_are_wrong_no_more_often_than_stated(name, others):
    failures, kept = wrong_certificates(LOCAL[name], 300, others)
    assert failures <= binom.ppf(0.999, REPETITIONS, 0.1)
    if name == "good":  # 93 % could be kept with known risks
        assert kept > 0.75
    if name == "poor":
        assert failures > 0.02 * REPETITIONS  # on the border it does happen, so the test has power


def test_choosing_the_threshold_by_its_bound_would_not_be_valid():
    """The procedure without a fixed sequence: the loosest threshold whose bound passes."""
    rng, local, failures = np.random.default_rng(0), LOCAL["poor"], 0
    for _ in range(400):
        score = rng.random(300)
        bad = rng.random(300) < local(score)
        kept = score[:, None] <= np.asarray(GRID)
        bounds = upper_bound((kept & bad[:, None]).sum(0), kept.sum(0), 0.1)
        failures += bool((bounds <= 0.05).any())
    assert failures > binom.ppf(0.999, 400, 0.1)


def test_certificates_hold_on_repeated_splits_of_a_real_run():
    """The shipped Checkerboard: thousands of samples are the population, a few hundred of them are labelled."""
    run = fmwc.sample(fmwc.load("checkerboard"), 2_000, steps=15, seed=5)
    score, bad = run.score().double().numpy(), misplaced(run.x)
    rng, failures, shares = np.random.default_rng(0), 0, []
    repetitions, risk = 500, 0.6 * bad.mean()
    for _ in range(repetitions):
        index = rng.choice(len(score), 600)  # with replacement, so that the run is the population
        try:
            made = risk_control(score[index[:500]], bad[index[:500]], risk, 0.9, others=score[index[500:]])
        except UsageError:
            shares.append(0.0)
            continue
        kept = made.keeps(score)
        failures += bad[kept].mean() > risk
        shares.append(kept.mean())
    assert failures <= binom.ppf(0.999, repetitions, 0.1)
    assert np.mean(shares) > 0.3


# ---- the bounds --------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0.01, 0.3))
def test_upper_bound_inverts_the_binomial_distribution(count, failed, miss):
    failed = min(failed, count)
    rate = float(upper_bound(failed, count, miss))
    if failed == count:
        assert rate == 1
    else:
        assert binom.cdf(failed, count, rate) == pytest.approx(miss, rel=1e-6)
    assert float(lower_bound(count - failed, count, miss)) == pytest.approx(1 - rate)
    assert float(lower_bound(failed, count, miss)) <= failed / count <= rate


@given(st.floats(0.01, 0.5), st.floats(0.5, 0.99))
def test_required_labels_is_the_smallest_number(max_risk, probability):
    count = required_labels(max_risk, probability)
    assert float(upper_bound(0, count, 1 - probability)) <= max_risk * (1 + 1e-6)
    assert count == 1 or float(upper_bound(0, count - 1, 1 - probability)) > max_risk * (1 - 1e-6)


def test_required_labels_by_hand():
    assert required_labels(0.05, 0.9) == math.ceil(math.log(0.1) / math.log(0.95)) == 45
    assert required_labels(0.01, 0.95) == 299
    assert required_labels(0.5, 0.5) == 1


# ---- one certificate -------------------------------------------------------------------------------------------------


def test_attributes_of_a_certificate():
    rng = np.random.default_rng(0)
    score, others = rng.random(500), rng.random(300)
    made = risk_control(score, score > 0.7, 0.05, others=others)
    assert 0.6 < made.threshold < 0.76
    assert made.labelled == 500
    assert made.share == pytest.approx((score <= made.threshold).mean())
    assert made.share == made.keeps(score).mean()
    assert made.bound <= made.max_risk == 0.05
    kept = made.keeps(score)
    assert made.bound == pytest.approx(float(upper_bound((score[kept] > 0.7).sum(), kept.sum(), 0.1)))
    assert made.threshold in others  # not among the labelled
    assert risk_control(score, score > 0.7, 0.05).labelled == 400  # a fifth is set aside
    assert risk_control(np.tile(score, 4), np.tile(score > 0.7, 4), 0.05).labelled == 1_900


def test_certificate_round_trip_through_json():
    made = risk_control(np.linspace(0, 1, 300), np.zeros(300), 0.05)
    assert RiskCertificate.from_dict({"score": "peak", **json.loads(json.dumps(made.as_dict()))}) == made
    wrong = {"threshold": None, "bound": "low", "max_risk": float("nan"), "probability": -1, "labelled": 0, "share": 2}
    for change in ({}, *({name: value} for name, value in wrong.items()), {"threshold": float("inf")}, {"bound": 0.9}):
        with pytest.raises(UsageError, match="certificate"):
            RiskCertificate.from_dict({**made.as_dict(), **change} if change else {})


def test_all_samples_are_kept_if_none_fails():
    made = risk_control(np.linspace(0, 1, 200), np.zeros(200), 0.05, others=np.linspace(0, 1, 50))
    assert (made.share, made.threshold) == (1, 1)


def test_a_score_without_information_cannot_be_certified():
    score = np.linspace(0, 1, 400)
    with pytest.raises(UsageError, match="certified"):
        risk_control(score, score < 0.5, 0.05)


def test_invalid_arguments():
    good = np.linspace(0, 1, 100)
    with pytest.raises(ShapeError, match="labels"):
        risk_control(good, [0, 1, 0], 0.05)
    with pytest.raises(UsageError, match="finite"):
        risk_control([*good[1:], np.nan], np.zeros(100), 0.05)
    with pytest.raises(UsageError, match="others"):
        risk_control(good, np.zeros(100), 0.05, others=[1, 2, 3])
    with pytest.raises(UsageError, match="too few"):
        risk_control([0.5] * 2, [False] * 2, 0.05)


# ---- reliability -------------------------------------------------------------------------------------------------


def test_reliability_by_hand():
    found = reliability([0.0, 0.2, 0.9, 1.0, 0.95], [True, False, False, False, True], bins=4)
    assert found.size.tolist() == [2, 3]
    assert found.confidence.tolist() == pytest.approx([0.1, 0.95])
    assert found.success.tolist() == pytest.approx([0.5, 2 / 3])
    assert found.high[0] == pytest.approx(float(upper_bound(1, 2, 0.05)))
    assert reliability([0.5], [False]).high.tolist() == [1]


def test_reliability_intervals_have_their_coverage():
    rng, inside, total = np.random.default_rng(0), 0, 0
    for _ in range(200):
        confidence = rng.random(300)
        found = reliability(confidence, rng.random(300) > confidence, bins=5)  # right as often as it says
        inside += int(((found.low <= found.confidence) & (found.confidence <= found.high)).sum())
        total += 5
    assert inside >= binom.ppf(0.001, total, 0.9)
