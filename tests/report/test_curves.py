"""Figures of curves, and figures shared by the experiments: few and many samples, and correct labels."""

import numpy as np
import pytest

from experiments.common.plots import comparison_plot, reliability_plot
from experiments.mnist.figures import quality_against_steps
from fmwc.metrics.ranking import compare, retention
from fmwc.report import curves
from fmwc.uses.risk import reliability
from tests.report.shared import draws, texts


@pytest.mark.parametrize("bad", [[False], [True], [True, False]], ids=["one good", "one bad", "one of each"])
def test_reliability_of_the_fewest(bad):
    assert draws(reliability_plot(reliability(np.linspace(0, 1, len(bad)), bad), "good"))


def test_scores_are_compared_with_the_first():
    rng = np.random.default_rng(0)
    score = rng.random(400)
    bad = rng.random(400) < 0.5 * score
    figure = reliability_plot(reliability(1 - score, bad), "on the board")
    assert draws(figure)
    assert texts(figure) == [f"{(~bad).mean():.1%} of all 400 are on the board"]
    compared = compare({"own": score, "other": rng.random(400)}, bad)
    figure = comparison_plot(compared)
    assert draws(figure)
    left, _ = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["own", "other"]
    dots = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "o"]
    assert dots == [compared[name]["auprc"]["value"] for name in ("own", "other")]
    assert draws(comparison_plot(compare({"own": score}, bad)))


@pytest.mark.parametrize(("highest", "scale"), [(3.0, "linear"), (100.0, "log")])
def test_quality_against_steps(highest, scale):
    sweep = {
        "50": {"fid": 2.0, "failure": 0.01},
        "5": {"fid": highest, "failure": 0.03},
    }  # JSON turns keys into strings
    figure = quality_against_steps({"FM": sweep, "joint": {"50": {"fid": 2.5, "failure": 0.0}}})
    assert draws(figure)
    assert figure.axes[0].lines[0].get_xdata().tolist() == [5, 50]
    assert figure.axes[0].get_yscale() == scale


@pytest.mark.parametrize("bad", [[True, False], [False] * 30, [True] * 30, [True, False, False] * 90])
def test_curves_of_a_run(bad):
    confidence, bad = np.random.default_rng(0).random(len(bad)), np.array(bad)
    found = {"a score": retention(-confidence, bad)}
    figure = curves.retention_curve(found, float(bad.mean()), "failed")
    assert figure.axes[0].get_ylabel() == "failed among the kept"
    std = np.random.default_rng(1).random((5, len(bad)))
    figure = curves.variance_trajectories(np.linspace(0, 0.9, 5), std, confidence, (0.01, 0.25), "failed")
    assert texts(figure) == ["most doubtful 10% of samples (25.0% failed)", "surest 10% of samples (1.0% failed)"]
    assert draws(figure)
