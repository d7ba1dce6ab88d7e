"""Figures of points in the plane."""

import numpy as np
import pytest

from fmwc.checkerboard import figures as points
from fmwc.checkerboard.figures import EditedPaths, samples_by_confidence
from fmwc.report.reports import history_section
from fmwc.report.run import RunArrays
from tests.report.shared import draws, texts


def run_of(x, score, bad, **options):
    times = np.linspace(0, 0.9, 4)[:, None].repeat(len(score), 1)
    std = np.ones_like(times)
    return RunArrays(x, {"a score": score}, 1 - score / max(score), bad, times, std, times, None, (), **options)


def test_curves_of_some_samples_have_the_failure_rates_of_all():
    score = np.arange(200.0)
    every = run_of(None, score, score >= 190)  # half of the most doubtful tenth
    some = run_of(None, score[::40], np.ones(5, bool))
    (section,) = history_section(every, "misplaced", some)
    assert texts(section.pictures[0].figure) == [
        "most doubtful 10% of samples (50.0% misplaced)",
        "surest 10% of samples (0.0% misplaced)",
    ]
    assert "5 of the 200 samples" in section.caption


@pytest.mark.parametrize("count", [1, 100])
def test_edited_paths(count):
    rng = np.random.default_rng(0)
    before = rng.normal(size=(6, count, 2))
    after, grid = before + 0.1, np.linspace(0, 1, 6)[:, None].repeat(count, 1)
    turned = np.arange(count) % 2 == 0
    figure = points.edited_paths({"": EditedPaths(before, after, grid, np.full(count, 0.4), turned)})
    paths = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 4]  # from t = 0.4 on, old and new
    assert len(paths) == 2 * min(count, points.PATHS)
    assert f"({turned.mean():.0%} of {count})" in figure.axes[0].get_legend().get_texts()[-1].get_text()


@pytest.mark.parametrize("count", [1, 2])
def test_each_score_has_its_own_board(count):
    x, levels = np.random.default_rng(0).normal(size=(9, 2)), {str(i): np.linspace(0, 1, 9) for i in range(count)}
    figure = samples_by_confidence(x, levels, np.arange(9) < 3)
    assert sum(len(axes.patches) == 8 for axes in figure.axes) == count
    assert draws(figure)
