"""The table of a judgement as CSV, and back."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fmwc.errors import ShapeError

__all__ = ["Columns", "checked", "csv_text", "plain"]

Columns = Mapping[str, Sequence[Any]]


def plain(value: Any) -> Any:
    """A value as Python has it; None for NaN, which is what an empty cell means."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def checked(columns: Columns) -> dict[str, list[Any]]:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(f"one entry a row in every column, got {lengths}")
    return {name: [plain(value) for value in values] for name, values in columns.items()}


def csv_text(columns: Columns) -> str:
    """The table as CSV: true and false in small letters, nothing where there is no value."""
    table, out = checked(columns), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table)
    for row in zip(*table.values(), strict=True):
        writer.writerow([str(value).lower() if isinstance(value, bool) else value for value in row])
    return out.getvalue()
