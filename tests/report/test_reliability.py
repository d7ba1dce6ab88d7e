"""Figures of trust build for one sample and for many, and write what they show."""

import numpy as np
import pytest

from fmwc.confidence.trust import reliability
from fmwc.errors import UnknownNameError, UsageError
from fmwc.metrics.ranking import compare
from fmwc.report.figures import png
from fmwc.report.reliability import comparison_plot, reliability_plot


def drawn(figure):
    return png(figure, dpi=40)[:4] == b"\x89PNG"


def legend(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


@pytest.fixture
def run():
    rng = np.random.default_rng(0)
    score = rng.random(400)
    return score, rng.random(400) < 0.5 * score, rng.random(400)


@pytest.mark.parametrize("bad", [[False], [True], [True, False]], ids=["one good", "one bad", "one of each"])
def test_reliability_of_the_fewest(bad):
    assert drawn(reliability_plot(reliability(np.linspace(0, 1, len(bad)), bad)))


def test_reliability_plot(run):
    score, bad, other = run
    one = reliability(1 - score, bad)
    figure = reliability_plot(one, "on the board")
    assert drawn(figure)
    assert legend(figure) == [f"{(~bad).mean():.1%} of all 400 are on the board"]
    assert figure.axes[0].get_ylabel() == "on the board, observed"
    many = reliability_plot({"own": one, "other": reliability(other, bad)}, probability=True)
    assert drawn(many)
    assert "as often as it says" in legend(many)
    assert len(legend(many)) == 3
    with pytest.raises(UsageError, match="no reliability"):
        reliability_plot({})


@pytest.mark.parametrize("metric", ["auprc", "lift", "precision_5%", "retention_80%"])
def test_comparison_plot(run, metric):
    score, bad, other = run
    compared = compare({"own": score, "other": other}, bad)
    figure = comparison_plot(compared, metric)
    assert drawn(figure)
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["own", "other"]
    assert right.get_xlabel() == "difference to the first, paired"
    dots = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "o"]
    assert dots == [compared[name][metric]["value"] for name in ("own", "other")]
    assert drawn(comparison_plot(compare({"own": score}, bad), metric))


def test_comparison_refuses(run):
    score, bad, _ = run
    with pytest.raises(UnknownNameError, match="did you mean 'auprc'"):
        comparison_plot(compare({"own": score}, bad), "auprcs")
    with pytest.raises(UsageError, match="no score"):
        comparison_plot({})
