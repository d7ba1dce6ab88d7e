"""The table beside samples, and labels of which of them failed."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fmwc.errors import DataError, ShapeError

__all__ = ["Table", "read_labels", "read_table", "read_text"]

BAD, GOOD = "bad", "good"  # columns of a file of labels
FAILED = (BAD, "misplaced")  # columns of a samples' table that are true of what failed; others are of what is good
VALUES = {"1": True, "true": True, "0": False, "false": False, "1.0": True, "0.0": False, "": None, "nan": None}


@dataclass(frozen=True)
class Table:
    """A CSV as it is: text in rows."""

    head: list[str]
    rows: list[list[str]]

    def column(self, name: str) -> list[str]:
        return [row[self.head.index(name)] for row in self.rows]


def _rows(text: str) -> list[list[str]]:
    try:
        return [row or [""] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise DataError(f"a table cannot be read as CSV ({error})") from error


def read_text(path: Path) -> str:
    """A file of UTF-8, with or without a mark in front."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text ({error})") from error


def read_table(path: Path, count: int) -> Table:
    """The table of so many samples."""
    head, *rows = _rows(read_text(path)) or [[]]
    if len(rows) != count or any(len(row) != len(head) for row in rows):
        raise DataError(f"{path} is not the table of the {count} samples beside it: it has {len(rows)} rows")
    return Table(head, rows)


def read_labels(source: str, count: int, table: Table | None) -> np.ndarray:  # (B,), 1 failed, 0 good, NaN not labelled
    """Which samples failed: from a file, or from a column of their own table where no such file is."""
    path = Path(source)
    if path.is_file():
        rows = _rows(read_text(path))
        head = [cell.strip().lower() for cell in rows[0]] if rows else []
        named = [name for name in (BAD, GOOD) if name in head]
        if len(named) == 2:
            raise DataError(f"{path} has a column '{BAD}' and a column '{GOOD}'; give one of them")
        if named:
            place = head.index(named[0])
            cells = [row[place] if place < len(row) else "" for row in rows[1:]]
        elif all(len(row) == 1 for row in rows):
            cells = [row[0] for row in rows]
        else:
            raise DataError(f"{path} has no column '{BAD}' or '{GOOD}', but {', '.join(rows[0])}")
        while len(cells) > count and not cells[-1].strip():  # empty lines at the end of a file say nothing
            cells.pop()
        return _values(cells, count, str(path), bad=named != [GOOD])
    columns = table.head if table else []
    if table is None or source not in columns:
        choice = f", nor a column of the samples' table ({', '.join(columns)})" if columns else ""
        raise DataError(f"--labels {source} is no file{choice}")
    return _values(table.column(source), count, f"the table's column '{source}'", bad=source in FAILED)


def _values(cells: Sequence[str], count: int, where: str, *, bad: bool) -> np.ndarray:
    if len(cells) != count:
        raise ShapeError(f"one label a sample: {where} has {len(cells)} labels, and there are {count} samples")
    found = []
    for i, cell in enumerate(cells):
        if cell.strip().lower() not in VALUES:
            raise DataError(f"label {i + 1} in {where} is '{cell}'; labels are 0, 1, true, false, or empty for none")
        found.append(VALUES[cell.strip().lower()])
    values = np.array([np.nan if v is None else float(v) for v in found])
    return values if bad else 1 - values
