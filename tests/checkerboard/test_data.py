"""The Checkerboard: eight cells, filled evenly."""

import pytest
import torch

from fmwc import checkerboard


def test_points_lie_inside_and_fill_the_cells_evenly():
    count = 16_000
    x = checkerboard.sample(count, seed=0)
    assert x.shape == (count, 2)
    assert bool(checkerboard.inside(x).all())
    cells = ((x + 2).floor() @ torch.tensor([4.0, 1.0])).long()
    counts = torch.bincount(cells, minlength=16)
    assert (counts > 0).sum() == 8
    filled = counts[counts > 0]
    error = (count / 8 * 7 / 8) ** 0.5
    assert float((filled - count / 8).abs().max()) < 6 * error
    within = x - x.floor()
    assert float((within.mean(0) - 0.5).abs().max()) < 6 * (1 / 12 / count) ** 0.5


@pytest.mark.parametrize(
    ("point", "is_inside"),
    [
        ((-1.5, -1.5), 1),
        ((-1.5, -0.5), 0),
        ((-0.5, -0.5), 1),
        ((1.5, 1.5), 1),
        ((1.5, 0.5), 0),
        ((2.5, 0.5), 0),
        ((0.5, 9), 0),
    ],
)
def test_inside(point, is_inside):
    assert checkerboard.inside(torch.tensor([point])).item() == is_inside


def test_the_density_integrates_to_one():
    centres = (torch.arange(120) + 0.5) / 120 * 6 - 3
    grid = torch.cartesian_prod(centres, centres)
    assert (checkerboard.density(grid).sum() * (6 / 120) ** 2).item() == pytest.approx(1, rel=1e-5)
