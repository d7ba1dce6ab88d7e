"""Figures of points in the plane."""

import numpy as np

from fmwc.report.reports import history_section
from fmwc.report.run import RunArrays
from tests.report.shared import texts


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
