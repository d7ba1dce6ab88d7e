"""Promises hold as often as they say, whatever the score; repeated splits of known risks and of a real run."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

import fmwc
from fmwc.confidence.trust import FEWEST, GRID, Promise, lower, needed, promise, reliability, upper
from fmwc.errors import ShapeError, UsageError
from fmwc.metrics.points import misplaced

REPETITIONS = 2_000
FINE = np.linspace(0, 1, 4_001)

# The risk of a sample, by its score in [0, 1].
LOCAL = {
    "good": lambda s: 0.004 + 0.8 / (1 + np.exp(-40 * (s - 0.9))),
    "sloping": lambda s: 0.01 + 0.35 * s**3,
    "poor": lambda s: np.full_like(s, 0.051),  # at no threshold is it good enough, and at every one nearly
    "misleading": lambda s: np.where(s < 0.3, 0.12, 0.01),  # sure of the wrong ones: the risk falls as more are kept
    "wavy": lambda s: np.where((s > 0.35) & (s < 0.55), 0.16, 0.02) + 0.1 * (s > 0.8),  # above, below, and above again
}


def broken(local, labels, others, repetitions=REPETITIONS, max_risk=0.05, probability=0.9):
    """How often a promise was broken, and the mean share kept, of scores that are uniform."""
    rng = np.random.default_rng(0)
    failures, kept = 0, 0.0
    risks = np.cumsum(local(FINE)) / np.arange(1, len(FINE) + 1)  # R(λ): the mean of the local risk up to it
    for i in range(repetitions):
        score = rng.random(labels)
        bad = rng.random(labels) < local(score)
        given = None if others is None else rng.random(others)
        try:
            made = promise(score, bad, max_risk, probability, others=given, seed=i)
        except UsageError:
            continue  # nothing is kept, and nothing promised
        failures += risks[int(made.threshold * (len(FINE) - 1))] > max_risk
        kept += made.threshold
    return failures, kept / repetitions


@pytest.mark.parametrize("others", [None, 200], ids=["set aside", "unlabelled"])
@pytest.mark.parametrize("name", LOCAL)
def test_the_promise_is_broken_no_more_often_than_it_says(name, others):
    failures, kept = broken(LOCAL[name], 300, others)
    assert failures <= binom.ppf(0.999, REPETITIONS, 0.1)
    if name == "good":  # it is worth something, too: 93 % could be kept by one who knows
        assert kept > 0.75
    if name == "poor":
        assert failures > 0.02 * REPETITIONS  # the test can tell: on the border it does happen


def test_a_promise_that_looks_at_labels_to_choose_would_be_broken():
    """The twin that the sequence protects from: the loosest threshold whose own bound passes, of many."""
    rng, local, failures = np.random.default_rng(0), LOCAL["poor"], 0
    for _ in range(400):
        score = rng.random(300)
        bad = rng.random(300) < local(score)
        kept = score[:, None] <= np.asarray(GRID)
        bounds = upper((kept & bad[:, None]).sum(0), kept.sum(0), 0.1)
        failures += bool((bounds <= 0.05).any())
    assert failures > binom.ppf(0.999, 400, 0.1)


def test_repeated_splits_of_a_run_with_its_truth():
    """The shipped Checkerboard: thousands of samples are the population, a few hundred of them are labelled."""
    run = fmwc.sample(fmwc.load("checkerboard"), 2_000, steps=15, seed=5)
    score, bad = run.score().double().numpy(), misplaced(run.x)
    rng, failures, shares = np.random.default_rng(0), 0, []
    repetitions, risk = 1_000, 0.6 * bad.mean()
    for _ in range(repetitions):
        index = rng.choice(len(score), 600)  # drawn with return, so that the run is the population itself
        try:
            made = promise(score[index[:500]], bad[index[:500]], risk, 0.9, others=score[index[500:]])
        except UsageError:
            shares.append(0.0)
            continue
        kept = made.keeps(score)
        failures += bad[kept].mean() > risk
        shares.append(kept.mean())
    assert failures <= binom.ppf(0.999, repetitions, 0.1)
    assert np.mean(shares) > 0.3


@pytest.mark.parametrize("probability", [0.5, 0.99])
def test_other_probabilities(probability):
    local = LOCAL["poor"]
    failures, _ = broken(local, 700, 100, repetitions=600, probability=probability)
    assert failures <= binom.ppf(0.999, 600, 1 - probability)


# ---- the bounds --------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0.01, 0.3))
def test_the_upper_bound_is_the_binomials(count, failed, miss):
    failed = min(failed, count)
    rate = float(upper(failed, count, miss))
    if failed == count:
        assert rate == 1
    else:
        assert binom.cdf(failed, count, rate) == pytest.approx(miss, rel=1e-6)
    assert float(lower(count - failed, count, miss)) == pytest.approx(1 - rate)
    assert float(lower(failed, count, miss)) <= failed / count <= rate


@given(st.floats(0.01, 0.5), st.floats(0.5, 0.99))
def test_needed_is_the_fewest(max_risk, probability):
    count = needed(max_risk, probability)
    assert float(upper(0, count, 1 - probability)) <= max_risk * (1 + 1e-6)
    assert count == 1 or float(upper(0, count - 1, 1 - probability)) > max_risk * (1 - 1e-6)


def test_needed_by_hand():
    assert needed(0.05, 0.9) == math.ceil(math.log(0.1) / math.log(0.95)) == 45
    assert needed(0.01, 0.95) == 299
    assert needed(0.5, 0.5) == 1
    for risk, probability in ((0, 0.9), (1, 0.9), (0.05, 0), (0.05, 1), (float("nan"), 0.9)):
        with pytest.raises(UsageError, match="between 0 and 1"):
            needed(risk, probability)


# ---- one promise -------------------------------------------------------------------------------------------------


def test_as_many_labels_as_the_message_asks_for_are_enough():
    for risk, probability in ((0.05, 0.9), (0.02, 0.9), (0.01, 0.95), (0.3, 0.8), (0.0049, 0.9)):
        for others in (None, np.linspace(0, 1, FEWEST)):
            with pytest.raises(UsageError, match="too few to promise") as stop:
                promise([0.5] * 2, [False] * 2, risk, probability, others=others)
            total = int(str(stop.value).split("at least ")[1].split(" are needed")[0])
            assert f"{needed(risk, probability)} that are kept and good" in str(stop.value)
            made = promise(np.zeros(total), np.zeros(total), risk, probability, others=others)
            assert made.bound <= risk * (1 + 1e-9)
            with pytest.raises(UsageError, match="too few to promise"):
                promise(np.zeros(total - 1), np.zeros(total - 1), risk, probability, others=others)


def test_what_a_promise_says():
    rng = np.random.default_rng(0)
    score, others = rng.random(500), rng.random(300)
    made = promise(score, score > 0.7, 0.05, others=others)
    assert 0.6 < made.threshold < 0.76
    assert made.labelled == 500
    assert made.share == pytest.approx((score <= made.threshold).mean())
    assert made.share == made.keeps(score).mean()
    assert made.bound <= made.max_risk == 0.05
    kept = made.keeps(score)
    assert made.bound == pytest.approx(float(upper((score[kept] > 0.7).sum(), kept.sum(), 0.1)))
    assert made.threshold in others  # not among the labelled
    assert promise(score, score > 0.7, 0.05).labelled == 400  # a fifth is set aside
    assert promise(np.tile(score, 4), np.tile(score > 0.7, 4), 0.05).labelled == 1_900  # and never more than needed


def test_a_promise_goes_through_json():
    made = promise(np.linspace(0, 1, 300), np.zeros(300), 0.05)
    assert Promise.from_dict({"score": "peak", **json.loads(json.dumps(made.as_dict()))}) == made
    wrong = {"threshold": None, "bound": "low", "max_risk": float("nan"), "probability": -1, "labelled": 0, "share": 2}
    for change in ({}, *({name: value} for name, value in wrong.items()), {"threshold": float("inf")}, {"bound": 0.9}):
        with pytest.raises(UsageError, match="a promise"):
            Promise.from_dict({**made.as_dict(), **change} if change else {})


def test_all_are_kept_where_none_fails():
    made = promise(np.linspace(0, 1, 200), np.zeros(200), 0.05, others=np.linspace(0, 1, 50))
    assert (made.share, made.threshold) == (1, 1)


def test_a_set_that_can_hold_no_promise_says_so():
    score = np.linspace(0, 1, 400)
    with pytest.raises(UsageError, match=r"0\.05 cannot be promised with probability 0\.9: of the \d+ surest of 320"):
        promise(score, score < 0.5, 0.05)


def test_refusals():
    good = np.linspace(0, 1, 100)
    with pytest.raises(ShapeError, match="3 labels for 100 samples"):
        promise(good, [0, 1, 0], 0.05)
    with pytest.raises(UsageError, match="NaN or infinite"):
        promise([*good[1:], np.nan], np.zeros(100), 0.05)
    with pytest.raises(UsageError, match="at least 20 other scores, all finite; got 3"):
        promise(good, np.zeros(100), 0.05, others=[1, 2, 3])
    for grid in ((), (0.5, 0.5), (0.0, 0.5), (0.5, 1.1)):
        with pytest.raises(UsageError, match="increasing levels"):
            promise(good, np.zeros(100), 0.05, grid=grid)
    with pytest.raises(UsageError, match="between 0 and 1"):
        promise(good, np.zeros(100), 1.5)


# ---- reliability -------------------------------------------------------------------------------------------------


def test_reliability_by_hand():
    found = reliability([0.0, 0.2, 0.9, 1.0, 0.95], [True, False, False, False, True], bins=4)
    assert found.size.tolist() == [2, 3]
    assert found.confidence.tolist() == pytest.approx([0.1, 0.95])
    assert found.success.tolist() == pytest.approx([0.5, 2 / 3])
    assert found.high[0] == pytest.approx(float(upper(1, 2, 0.05)))
    assert reliability([0.5], [False]).high.tolist() == [1]


def test_the_intervals_of_reliability_hold():
    rng, inside, total = np.random.default_rng(0), 0, 0
    for _ in range(200):
        confidence = rng.random(300)
        found = reliability(confidence, rng.random(300) > confidence, bins=5)  # right as often as it says
        inside += int(((found.low <= found.confidence) & (found.confidence <= found.high)).sum())
        total += 5
    assert inside >= binom.ppf(0.001, total, 0.9)


def test_reliability_refuses():
    for wrong in ([1.2], [-0.1], []):
        with pytest.raises(UsageError, match=r"lies in \[0, 1\]"):
            reliability(wrong, [False] * len(wrong))
    with pytest.raises(UsageError, match="at least one bin"):
        reliability([0.5], [False], bins=0)
    with pytest.raises(ShapeError, match="1 labels for 2 samples"):
        reliability([0.5, 0.5], [False])
