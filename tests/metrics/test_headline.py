"""Headline numbers: intervals that hold what they promise, and silence where there is too little to tell."""

import numpy as np
import pytest

from fmwc.metrics.headline import FEWEST, ranking_text, rate, rate_kept, too_few, wilson
from fmwc.metrics.ranking import auprc


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_wilson_covers_the_true_rate(share):
    counts = np.random.default_rng(0).binomial(300, share, 4000)
    covered = [low <= share <= high for low, high in (wilson(int(c), 300) for c in counts)]
    assert 0.86 < np.mean(covered) < 0.95


def test_rates_of_nothing_and_of_everything_are_not_certain():
    assert rate([False] * 20) == f"0.0% [0.0%, {wilson(0, 20)[1]:.1%}]"
    assert wilson(0, 20)[1] > 0.1
    assert wilson(20, 20)[0] < 0.9


def test_the_kept_are_those_of_lowest_score():
    bad = [False] * 8 + [True] * 2
    assert rate_kept(range(10), bad, 0.8).startswith("0.0% [0.0%, ")
    assert rate_kept(range(10), bad, 1.0).startswith("20.0% [")


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
