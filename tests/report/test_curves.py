"""Figures of curves: with one sample and with many, with the right labels."""

import numpy as np
import pytest

from fmwc.errors import UnknownNameError, UsageError
from fmwc.metrics.ranking import compare, retention
from fmwc.report import curves
from fmwc.report.curves import Sweep, comparison_plot, reliability_plot
from fmwc.uses.risk import reliability
from tests.report.shared import draws, texts


def legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


@pytest.fixture
def run():
    rng = np.random.default_rng(0)
    score = rng.random(400)
    return score, rng.random(400) < 0.5 * score, rng.random(400)


@pytest.mark.parametrize("bad", [[False], [True], [True, False]], ids=["one good", "one bad", "one of each"])
def test_reliability_of_the_fewest(bad):
    assert draws(reliability_plot(reliability(np.linspace(0, 1, len(bad)), bad)))


def test_reliability_plot(run):
    score, bad, other = run
    one = reliability(1 - score, bad)
    figure = reliability_plot(one, "on the board")
    assert draws(figure)
    assert legend(figure) == [f"{(~bad).mean():.1%} of all 400 are on the board"]
    assert figure.axes[0].get_ylabel() == "on the board, observed"
    many = reliability_plot({"own": one, "other": reliability(other, bad)}, probability=True)
    assert draws(many)
    assert "calibrated" in legend(many)
    assert len(legend(many)) == 3
    with pytest.raises(UsageError, match="at least one reliability"):
        reliability_plot({})


@pytest.mark.parametrize("metric", ["auprc", "lift", "precision_5%", "retention_80%"])
def test_comparison_plot(run, metric):
    score, bad, other = run
    compared = compare({"own": score, "other": other}, bad)
    figure = comparison_plot(compared, metric)
    assert draws(figure)
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["own", "other"]
    assert right.get_xlabel() == "paired difference to the first score"
    dots = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "o"]
    assert dots == [compared[name][metric]["value"] for name in ("own", "other")]
    assert draws(comparison_plot(compare({"own": score}, bad), metric))


def test_comparison_refuses(run):
    score, bad, _ = run
    with pytest.raises(UnknownNameError, match="did you mean 'auprc'"):
        comparison_plot(compare({"own": score}, bad), "auprcs")
    with pytest.raises(UsageError, match="at least one score"):
        comparison_plot({})


def test_quality_against_steps():
    one = {"all": {50: 2.0, 5: 3.0}}
    figure = curves.quality_against_steps(Sweep(one, {"all": {5: 0.03, 50: 0.01}}))
    assert draws(figure)
    fid = figure.axes[0]
    assert fid.lines[0].get_xdata().tolist() == [5, 50]
    assert fid.get_yscale() == "linear"
    wide = {"all": {"5": 100.0, "50": 2.0}, "surest": {"50": 1.5}}  # keys that have been through JSON
    figure = curves.quality_against_steps(Sweep(wide, {}))
    assert figure.axes[0].get_yscale() == "log"
    assert draws(figure)


@pytest.mark.parametrize("word", ["misplaced", "failed"])
@pytest.mark.parametrize("bad", [[True, False], [False] * 30, [True] * 30, [True, False, False] * 90])
def test_curves_of_a_run(word, bad):
    confidence, bad = np.random.default_rng(0).random(len(bad)), np.array(bad)
    found = {"a score": retention(-confidence, bad)}
    figure = curves.retention_curve(found, float(bad.mean()), word)
    assert figure.axes[0].get_ylabel() == f"{word} among the kept"
    std = np.random.default_rng(1).random((5, len(bad)))
    figure = curves.variance_trajectories(np.linspace(0, 0.9, 5), std, confidence, (0.01, 0.25), word)
    assert texts(figure) == [
        f"most doubtful 10% of samples (25.0% {word})",
        f"surest 10% of samples (1.0% {word})",
    ]
    assert draws(figure)
