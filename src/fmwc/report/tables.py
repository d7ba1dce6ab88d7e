"""Tables: rows of text, as Markdown or as HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

__all__ = ["html", "markdown"]

Row = dict[str, str]
_NUMBER = re.compile(r"[-−+<>≤≥~×]?\s*\d")


def _is_numeric(rows: Sequence[Row], column: str) -> bool:
    """Whether a column's cells are numbers, and so are set flush right; a missing one is no objection."""
    cells = [cell for row in rows if (cell := row.get(column, "").strip()) not in ("", "–", "—")]
    return bool(cells) and all(_NUMBER.match(cell) for cell in cells)


def markdown(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A Markdown table whose source is aligned too.

    >>> print(markdown([{"score": "peak", "AUPRC": "0.78"}, {"score": "ratio", "AUPRC": "0.7"}], ["score", "AUPRC"]))
    | score | AUPRC |
    | ----- | ----: |
    | peak  |  0.78 |
    | ratio |   0.7 |
    """
    lines = [columns, *[[row.get(column, "") for column in columns] for row in rows]]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(columns))]
    right = [_is_numeric(rows, column) for column in columns]

    def line_of(line: Sequence[str]) -> str:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)]
    return "\n".join([line_of(cells[0]), line_of(rule), *map(line_of, cells[1:])])


def html(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """An HTML table, escaped.

    >>> "<td>a &lt; b</td>" in html([{"claim": "a < b"}], ["claim"])
    True
    """
    kinds = {c: ' class="number"' if _is_numeric(rows, c) else "" for c in columns}
    head = "".join(f'<th scope="col"{kinds[c]}>{escape(c)}</th>' for c in columns)
    lines = ["".join(f"<td{kinds[c]}>{escape(row.get(c, ''))}</td>" for c in columns) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'
