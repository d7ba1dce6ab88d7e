"""Format numbers as cells of a :class:`fmwc.report.table.Table`, and write tables to files."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from fmwc.files import write_json, write_text
from fmwc.report.table import MISSING, Table

Numbers = Mapping[str, Any]
Rows = list[dict[str, str]]

PERCENT = 100.0
NONE = MISSING
METHODS = {"retrofit": "FM + retrofit", "joint": "FMwC, joint"}


def dig(numbers: Any, path: str) -> Any:
    """Return the value at a slash-separated path of nested mappings, or `None`."""
    for key in path.strip("/").split("/"):
        numbers = numbers.get(key) if isinstance(numbers, dict) else None
    return numbers


def number(value: Any, digits: int = 3, factor: float = 1.0) -> str:
    """Return a number as text, or a dash for anything else.

    >>> number(0.21), number(0.034, 1, 100.0), number(None), number(float("nan"))
    ('0.210', '3.4', '—', '—')
    """
    known = isinstance(value, int | float) and isfinite(value)
    return f"{factor * value:.{digits}f}" if known else NONE


def with_interval(value: Any, interval: Any, digits: int, factor: float = 1.0) -> str:
    """Return a number as text with its interval, if it has one.

    >>> with_interval(0.5, [0.25, 0.75], 2)
    '0.50 [0.25, 0.75]'
    """
    middle = number(value, digits, factor)
    if middle == NONE or not isinstance(interval, list | tuple) or len(interval) != 2:
        return middle
    return f"{middle} [{', '.join(number(end, digits, factor) for end in interval)}]"


def ratio_text(row: Mapping[str, Any]) -> str:
    """Return a cost ratio with its range, as text.

    >>> ratio_text({"ratio": 1.5, "lowest": 1.25, "highest": 2})
    '1.50× (1.25–2.00)'
    """
    between = f" ({row['lowest']:.2f}–{row['highest']:.2f})" if "lowest" in row else ""
    return f"{row['ratio']:.2f}×{between}"


def write_tables(
    out: Path,
    heading: str,
    tables: Mapping[str, Table],
    provenance: Any,
    *,
    origins: Mapping[str, str] | None = None,
    summary: Any = None,
) -> list[Path]:
    """Write `tables.md` and `summary.json`.

    Arguments:
        heading: The title and the paragraph below it.
        origins: A line below each table that states the source of its numbers.
        summary: The contents of the summary, if not the rows of the tables.
    """
    parts = [heading]
    for name, table in tables.items():
        parts += [table.section(), *([origins[name]] if origins else [])]
    rows = {name: table.rows for name, table in tables.items()}
    return [
        write_json(out / "summary.json", {"provenance": provenance, "tables": rows if summary is None else summary}),
        write_text(out / "tables.md", "\n\n".join(parts) + "\n"),
    ]
