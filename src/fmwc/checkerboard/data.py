"""The Checkerboard: its data, its density, and which samples are misplaced."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "CELL",
    "HALF",
    "density",
    "inside",
    "misplaced",
    "misplacement",
    "sample",
    "squares",
]

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


def misplaced(x: Tensor) -> np.ndarray:  # (B, 2) -> (B,)
    """Return `True` for each sample outside the eight cells."""
    return (~inside(x)).cpu().numpy()


def misplacement(x: Tensor) -> float:
    """Return the fraction of samples outside the eight cells."""
    return float(misplaced(x).mean())


def squares(x: Tensor) -> list[str]:  # (B, 2)
    """Return the chessboard name of each point's square, with a1 at the lower left; `""` outside the board.

    >>> squares(torch.tensor([[-1.5, -1.5], [1.5, -0.5], [3.0, 0.0]]))
    ['a1', 'd2', '']
    """
    places = ((x + HALF) / CELL).floor().long().tolist()
    files = "abcd"
    return [f"{files[a]}{b + 1}" if 0 <= a < len(files) and 0 <= b < len(files) else "" for a, b in places]
