"""How an entry of the tables of crystals is written: a number, its interval, a lift; a dash where there is none."""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

from fmwc.report.paper.crystals_rows import SHARES, Quality
from fmwc.report.paper.table import NONE, PERCENT, dig

__all__ = ["Table", "entry_at", "lift_text", "number", "precisions", "quality_text"]


class Table(NamedTuple):
    """A table.

    Attributes:
        title: What it is, with the paper's label.
        note: How to read it.
        rows: Each from column to cell.
        pieces: Words in the names of the cell's pieces that it is made of.
        structures: Which entry of their provenance says how many; empty where the rows say that and the steps.
    """

    title: str
    note: str
    rows: list[dict[str, str]]
    pieces: tuple[str, ...]
    structures: str = "samples"


def number(value: Any, digits: int = 3, factor: float = 1.0) -> str:
    """
    >>> number(0.21), number(0.034, 1, 100.0), number(None), number(float("nan"))
    ('0.210', '3.4', '—', '—')
    """
    known = isinstance(value, int | float) and isfinite(value)
    return f"{factor * value:.{digits}f}" if known else NONE


def with_interval(value: Any, interval: Any, digits: int, factor: float = 1.0) -> str:
    middle = number(value, digits, factor)
    if middle == NONE or not isinstance(interval, list | tuple) or len(interval) != 2:
        return middle
    return f"{middle} [{', '.join(number(end, digits, factor) for end in interval)}]"


def entry_at(numbers: Any, path: str) -> Any:
    """What stands at a path such as `linearised/type/integrated`, where a score's name is one key.

    >>> entry_at({"diagonal": {"peak": 1, "type/peak": 2}}, "diagonal/all/peak")
    1
    """
    first, _, key = path.partition("/")
    found = dig(numbers, first)
    if not key or not isinstance(found, dict):
        return found if not key else None
    return found.get(key, found.get(key.removeprefix("all/")))  # all channels need not be named


def lift_text(entry: Any) -> str:
    return with_interval(dig(entry, "lift"), dig(entry, "lift_interval"), 2)


def precisions(entry: Any) -> dict[str, str]:
    return {f"metastable % of the surest {s}": number(dig(entry, f"precision_{s}"), 1, PERCENT) for s in SHARES}


def quality_text(entry: Any, row: Quality) -> str:
    _, key, factor, digits = row
    return with_interval(dig(entry, key), dig(entry, f"intervals/{key}"), digits, factor)
