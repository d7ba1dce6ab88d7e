"""A table of results, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["NONE", "PERCENT", "Table", "dig"]

PERCENT = 100.0
NONE = "—"


def dig(numbers: Any, path: str) -> Any:
    """What stands at a slash-separated path of a cell's numbers; `None` if nothing does."""
    for key in path.strip("/").split("/"):
        numbers = numbers.get(key) if isinstance(numbers, dict) else None
    return numbers


@dataclass(frozen=True)
class Table:
    """Creates a table of results.

    Arguments:
        title: What it is, with the paper's label.
        note: How to read it.
        columns: Heading to (schedule, prefix of the path in a cell's numbers).
        rows: (label, path, the paper's value).
        scale: What numbers are multiplied by.
        digits: Digits after the point.
    """

    title: str
    note: str
    columns: dict[str, tuple[str, str]]
    rows: tuple[tuple[str, str, str], ...]
    scale: float = 1.0
    digits: int = 2
