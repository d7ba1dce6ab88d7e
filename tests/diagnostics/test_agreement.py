"""Agreement: correlations of what is known to agree, to disagree, and of numbers by hand."""

import pytest
import torch

from fmwc.diagnostics.agreement import agreement


def test_a_variance_that_follows_the_magnitude_agrees_perfectly():
    divergence = torch.randn(5, 100)
    found = agreement(3 * divergence.abs(), divergence)
    assert found.pearson_step == pytest.approx(1)
    assert found.spearman_step == pytest.approx(1)
    assert found.spearman_step_std == pytest.approx(0, abs=1e-9)
    assert found.pearson == pytest.approx(1)
    assert found.spearman == pytest.approx(1)
    monotone = agreement(divergence.abs() ** 3, divergence)
    assert monotone.spearman_step == pytest.approx(1)
    assert monotone.pearson_step < 0.99
    assert agreement(-divergence.abs(), divergence).spearman == pytest.approx(-1)


def test_by_hand():
    var = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    divergence = torch.tensor([[-1.0, 2.0, -3.0], [6.0, -4.0, 2.0]])
    found = agreement(var, divergence)
    assert found.pearson_step == pytest.approx(0, abs=1e-12)  # 1 and −1
    assert found.pearson_step_std == pytest.approx(1)
    var = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 1.0]])
    divergence = torch.tensor([[-1.0, 2.0, -3.0], [0.0, 1.0, 2.0]])
    assert agreement(var, divergence).spearman == pytest.approx(1)  # of (1, 2, 4) and (1, 3, 5)
