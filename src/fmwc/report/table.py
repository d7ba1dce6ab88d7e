"""Tables of results, written as Markdown, HTML, CSV or Parquet."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fmwc.errors import ShapeError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MISSING", "Table"]

MISSING = "—"  # the cell of a missing number
_NUMBER = re.compile(r"[-−+<>≤≥~×]?\s*\d")


def _plain(value: Any) -> Any:
    """Return a value as a Python scalar, and `None` for NaN."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def _text(value: Any) -> str:
    value = _plain(value)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Table:
    """A table of results.

    Arguments:
        rows: One mapping per row, from column name to cell. Columns may be missing. Text is written unchanged. Numbers
            have four significant digits in Markdown and HTML, and full precision in CSV and Parquet.
        title: Heading of the table, plain text.
        note: How to read the table, plain text.
        columns: Column names; by default, those of the rows in order of first use.
    """

    rows: Sequence[Mapping[str, Any]]
    title: str = ""
    note: str = ""
    columns: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.columns:
            object.__setattr__(self, "columns", tuple(dict.fromkeys(name for row in self.rows for name in row)))

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]], title: str = "", note: str = "") -> Table:
        """Create a table from columns of equal length.

        >>> Table.from_columns({"name": ["a", "b"], "score": [0.5, None]}).rows[0]
        {'name': 'a', 'score': 0.5}
        """
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ShapeError(f"columns must have equal lengths, got {lengths}")
        return cls.from_rows(tuple(columns), zip(*columns.values(), strict=True), title, note)

    @classmethod
    def from_rows(cls, columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "", note: str = "") -> Table:
        """Create a table from column names and the cells of each row.

        >>> Table.from_rows(("name", "score"), [("a", 0.5), ("b", None)]).rows[1]
        {'name': 'b', 'score': None}
        """
        return cls([dict(zip(columns, row, strict=True)) for row in rows], title, note, tuple(columns))

    def cells(self) -> list[list[str]]:
        """Return the cells of each row as text."""
        return [[_text(row.get(name)) for name in self.columns] for row in self.rows]

    def numeric(self) -> list[bool]:
        """Return whether each column is numeric (and right-aligned), ignoring missing cells."""
        columns = [[cell for row in self.cells() if (cell := row[i].strip())] for i in range(len(self.columns))]
        known = [[cell for cell in column if cell not in ("–", MISSING)] for column in columns]
        return [bool(column) and all(map(_NUMBER.match, column)) for column in known]

    def markdown(self) -> str:
        """Return the table as Markdown with aligned source text.

        >>> print(Table([{"score": "peak", "AUPRC": "0.78"}, {"score": "ratio", "AUPRC": "0.7"}]).markdown())
        | score | AUPRC |
        | ----- | ----: |
        | peak  |  0.78 |
        | ratio |   0.7 |
        """
        cells = [[c.replace("|", "\\|").replace("\n", " ") for c in line] for line in [self.columns, *self.cells()]]
        widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(self.columns))]
        right = self.numeric()
        rule = ["-" * (width - 1) + (":" if r else "-") for width, r in zip(widths, right, strict=True)]
        lines = [
            [c.rjust(width) if r else c.ljust(width) for c, width, r in zip(line, widths, right, strict=True)]
            for line in [cells[0], rule, *cells[1:]]
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def section(self, heading: str = "##") -> str:
        """Return the title as a Markdown heading, followed by the note and the table.

        >>> print(Table([{"a": "1"}], "Title", "Note.").section())
        ## Title
        <BLANKLINE>
        Note.
        <BLANKLINE>
        |   a |
        | --: |
        |   1 |
        """
        return "\n\n".join([f"{heading} {self.title}", *([self.note] if self.note else []), self.markdown()])

    def frame(self, *, lower: bool = False) -> pd.DataFrame:
        """Return the table as a `pandas.DataFrame` of Python objects, with `None` for missing values and NaN.

        Arguments:
            lower: Replace booleans by `"true"` and `"false"`.
        """
        import pandas as pd

        rows = [[_plain(row.get(name)) for name in self.columns] for row in self.rows]
        if lower:
            rows = [[str(value).lower() if isinstance(value, bool) else value for value in row] for row in rows]
        return pd.DataFrame(rows, columns=list(self.columns), dtype=object)

    def csv(self) -> str:
        """Return the table as CSV, with lower-case booleans and empty cells for missing values.

        >>> print(Table([{"good": True, "energy": float("nan")}]).csv(), end="")
        good,energy
        true,
        """
        return self.frame(lower=True).to_csv(index=False, lineterminator="\n")

    def parquet(self) -> bytes:
        """Return the table as a Parquet file (requires `pyarrow`)."""
        out = io.BytesIO()
        self.frame().to_parquet(out, index=False)
        return out.getvalue()
