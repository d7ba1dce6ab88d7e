"""The Checkerboard: a uniform density on eight cells of a 4×4 board on [−2, 2]² (App. dataset-metrics)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CELL", "HALF", "density", "inside", "sample"]

HALF = 2.0  # the board is [−HALF, HALF]²
CELL = 1.0
DENSITY = 1 / 8  # eight cells of unit area


def sample(count: int, seed: int) -> Tensor:  # -> (count, 2)
    """Draw points uniformly on the support.

    >>> bool(inside(sample(1000, seed=0)).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, 4, (count,), generator=generator)
    column = 2 * torch.randint(0, 2, (count,), generator=generator) + row % 2
    corner = torch.stack([row, column], 1) * CELL - HALF
    return corner + torch.rand(count, 2, generator=generator) * CELL


def inside(x: Tensor) -> Tensor:  # (B, 2) -> (B,)
    """Return whether each point lies in one of the eight cells."""
    cell = ((x + HALF) / CELL).floor()
    on_board = ((x >= -HALF) & (x < HALF)).all(-1)
    return on_board & (cell.sum(-1).remainder(2) == 0)


def density(x: Tensor) -> Tensor:  # (B, 2) -> (B,)
    """Return the target density."""
    return inside(x).to(x.dtype) * DENSITY
