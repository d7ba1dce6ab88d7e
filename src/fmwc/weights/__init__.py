"""Shipped weights: one folder a checkpoint, found by name (`fmwc.load("checkerboard")`)."""

from pathlib import Path

__all__ = ["FOLDER", "shipped"]

FOLDER = Path(__file__).parent


def shipped() -> dict[str, Path]:
    """The shipped checkpoints by name."""
    return {p.parent.name: p.parent for p in sorted(FOLDER.glob("*/recipe.json"))}
