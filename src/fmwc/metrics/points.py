"""Metrics of the Checkerboard (App. dataset-metrics)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from fmwc.data import checkerboard

__all__ = ["misplaced", "misplacement", "squares"]


def misplaced(x: Tensor) -> np.ndarray:  # (B, 2) -> (B,)
    """Return `True` for each sample outside the eight cells."""
    return (~checkerboard.inside(x)).cpu().numpy()


def misplacement(x: Tensor) -> float:
    """Return the fraction of samples outside the eight cells."""
    return float(misplaced(x).mean())


def squares(x: Tensor) -> list[str]:  # (B, 2)
    """Return the chessboard name of each point's square, with a1 at the lower left; `""` outside the board.

    >>> squares(torch.tensor([[-1.5, -1.5], [1.5, -0.5], [3.0, 0.0]]))
    ['a1', 'd2', '']
    """
    places = ((x + checkerboard.HALF) / checkerboard.CELL).floor().long().tolist()
    files = "abcd"
    return [f"{files[a]}{b + 1}" if 0 <= a < len(files) and 0 <= b < len(files) else "" for a, b in places]
