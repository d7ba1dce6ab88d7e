"""The Checkerboard: data, figures, the training recipe, and the domain that the commands use."""

from fmwc.checkerboard.data import CELL, DENSITY, HALF, density, inside, misplaced, misplacement, sample, squares

__all__ = ["CELL", "DENSITY", "HALF", "density", "inside", "misplaced", "misplacement", "sample", "squares"]
