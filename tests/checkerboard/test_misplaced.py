"""The metrics of the Checkerboard on samples whose quality is known."""

import pytest
import torch

from experiments.checkerboard.evaluate import symmetric_kl
from fmwc import checkerboard
from fmwc.checkerboard.data import misplaced, misplacement


def uniform(count, seed=0):
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 4 - 2


def test_data_is_never_misplaced_and_half_of_the_board_is_empty():
    assert misplacement(checkerboard.sample(5000, 0)) == 0
    assert misplacement(uniform(10_000)) == pytest.approx(0.5, abs=6 * (0.25 / 10_000) ** 0.5)
    assert misplacement(torch.full((3, 2), 9.0)) == 1


def test_misplaced_by_hand():
    x = torch.tensor([[-1.5, -1.5], [-1.5, -0.5], [7.0, 0.0]])
    assert misplaced(x).tolist() == [False, True, True]
    assert misplacement(x) == pytest.approx(2 / 3)


def test_the_divergence_orders_samples_by_quality():
    data = checkerboard.sample(2000, 0)
    found = {
        "data": symmetric_kl(data, cells=40),
        "blurred": symmetric_kl(data + 0.5 * torch.randn(2000, 2), cells=40),
        "uniform": symmetric_kl(uniform(2000), cells=40),
        "one cell": symmetric_kl(torch.rand(2000, 2) * 0.2, cells=40),
    }
    assert found["data"] < found["blurred"] < found["one cell"]
    assert found["data"] < found["uniform"] < found["one cell"]
    assert all(v > 0 for v in found.values())
