"""How an entry of the tables of crystals is written: a number, its interval, a lift; a dash where there is none."""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

from fmwc.report.paper.crystals_rows import SHARES, Quality
from fmwc.report.paper.table import NONE, PERCENT, dig

__all__ = ["Table", "entry_at", "lift_text", "number", "precisions", "quality_text"]


class Table(NamedTuple):
    """A table: its title with the paper's label, how to read it, its rows, and the pieces of the cell it is from."""

    title: str
    note: str
    rows: list[dict[str, str]]
    pieces: tuple[str, ...]


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
    """What stands at a path, whose last two parts may be one key: `linearised/all/integrated`."""
    found = dig(numbers, path)
    first, _, key = path.partition("/")
    return found if found is not None or not key else (dig(numbers, first) or {}).get(key)


def lift_text(entry: Any) -> str:
    return with_interval(dig(entry, "lift"), dig(entry, "lift_interval"), 2)


def precisions(entry: Any) -> dict[str, str]:
    return {f"metastable % of the surest {s}": number(dig(entry, f"precision_{s}"), 1, PERCENT) for s in SHARES}


def quality_text(entry: Any, row: Quality) -> str:
    _, key, factor, digits = row
    return with_interval(dig(entry, key), dig(entry, f"intervals/{key}"), digits, factor)
