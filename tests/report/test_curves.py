"""Figures of curves: few and many samples, and correct labels."""

import numpy as np
import pytest

from fmwc.metrics.ranking import retention
from fmwc.report import curves
from tests.report.shared import draws, texts


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
