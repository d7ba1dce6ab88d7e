"""Read the table of samples and the labels of failed samples. Both are matched to the samples by name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from fmwc.cli.verbs import Filter
from fmwc.errors import DataError, ShapeError, UsageError
from fmwc.readers import read_csv, shown

__all__ = ["NAME", "Labels", "Table", "read_labels", "read_table"]

NAME = "name"  # the column that rows are matched by
BAD, GOOD = "bad", "good"  # columns of a file of labels
FAILED = (
    BAD,
    "misplaced",
)  # columns of a samples' table that are true for failed samples; other columns are true for good ones
VALUES = {"1": 1.0, "true": 1.0, "1.0": 1.0, "0": 0.0, "false": 0.0, "0.0": 0.0, "": np.nan, "nan": np.nan}
SUFFIXES = (".cif", ".extxyz", ".xyz", ".vasp", ".poscar")  # judged structures are named after their files
RENAMED = {"taken_for": "predicted", "as_asked": "correct"}  # columns of tables that older versions wrote
SHOWN = 3  # names in a message


# ---- the table of samples --------------------------------------------------------------------------------------------


Table = dict[str, list[str]]  # the text of a CSV file by columns


def read_table(path: Path, names: Sequence[str], *, numbered: bool = True) -> Table:
    """Read the table of samples, and sort it in the order of the samples.

    Arguments:
        path: The CSV file beside the samples.
        names: The names of the samples.
        numbered: Whether the samples are numbered, so that rows are matched by name; otherwise they are in order.
    """
    head, *rows = _rows(path) or [[]]
    if len(rows) != len(names) or any(len(row) != len(head) for row in rows) or len({*head}) < len(head):
        raise DataError(f"{path} is not a table of the {len(names)} samples in its folder: it has {len(rows)} rows")
    table = {name: [row[i] for row in rows] for i, name in enumerate(head)}
    if NAME not in head:
        return table
    named = table[NAME]
    _require_unique(named, str(path))
    if invalid := [name for name in named if not name or PurePath(name).name != name or "\\" in name or "\0" in name]:
        raise DataError(f"{path} has a name that is not a valid file name: '{shown(invalid[0])[:60]}'")
    if not numbered:
        return table
    place = {name: i for i, name in enumerate(named)}
    if missing := [name for name in names if name not in place]:
        raise DataError(f"{path} is not the table of the samples in its folder: it lacks {_some(missing)}")
    return {name: [column[place[sample]] for sample in names] for name, column in table.items()}


def _rows(path: Path) -> list[list[str]]:
    return [row or [""] for row in read_csv(path)]


def _require_unique(names: Sequence[str], where: str) -> None:
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise DataError(f"{where} names {_some(repeated)} more than once; give each sample one row")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(shown(name)[:40] for name in names[:SHOWN]) + more


def _listed(columns: Sequence[str]) -> str:
    return shown(", ".join(columns))[:200]


# ---- labels ----------------------------------------------------------------------------------------------------------


class Labels(NamedTuple):
    """Which samples failed.

    Attributes:
        bad: 1 for failed, 0 for good, NaN for unlabelled; one value per sample.
        note: A remark on how labels were matched, or empty.
    """

    bad: np.ndarray
    note: str = ""


def read_labels(options: Filter, names: Sequence[str], table: Table | None) -> Labels:
    """Read which samples failed from a file, or from a column of the samples' table.

    A file with a column `name` is matched by name; samples that it does not name have no label. A file without names
    has one label per sample, in the order of the samples.

    Arguments:
        options: `labels` is a CSV or text file, or a column of the table; `good` or `bad` names the column that is true
            for good or for failed samples.
        names: The names of the samples.
        table: The samples' table.
    """
    source, good, bad = options.labels, options.good, options.bad
    if good and bad:
        raise UsageError("labels come from one column: give --good or --bad, not both")
    if source and os.path.exists(source):
        return _from_file(Path(source), names, good, bad)
    if source and (good or bad):
        raise DataError(f"--labels {shown(source)[:100]} is not a file")
    columns = [*table] if table else []
    column = _current(source or good or bad, columns)
    if table is None or column not in columns:
        choice = f", nor a column of the samples' table ({_listed(columns)})" if columns else ""
        raise DataError(f"--labels {shown(column)[:100]} is not a file{choice}")
    failed = bool(bad) or (not good and column in FAILED)
    return Labels(_values(table[column], f"the table's column '{column}'", bad=failed))


def _current(name: str, columns: Sequence[str]) -> str:
    """Return the name of a column in a table. The name or the table may be from an older version."""
    others = [old if name == new else new for old, new in RENAMED.items() if name in (old, new)]
    return next((other for other in others if name not in columns and other in columns), name)


def _from_file(path: Path, names: Sequence[str], good: str, bad: str) -> Labels:
    rows = _rows(path)
    head = [cell.strip() for cell in rows[0]] if rows else []
    lower = [cell.lower() for cell in head]
    alone = all(len(row) == 1 for row in rows) and not {BAD, GOOD, NAME} & {*lower}  # labels without a header
    if alone and not (good or bad):
        return Labels(_in_order([row[0] for row in rows], names, str(path), bad=True))
    place, failed = _label_column(path, head, good, bad)
    if longer := [i for i, row in enumerate(rows, 1) if len(row) > len(head)]:
        raise DataError(f"{path} has {len(rows[longer[0] - 1])} cells in row {longer[0]} but {len(head)} columns")
    for column in (lower[place], NAME):
        if lower.count(column) > 1:
            raise DataError(f"{path} has more than one column '{shown(column)[:60]}'; keep one of them")
    cells = [row[place] if place < len(row) else "" for row in rows[1:]]
    if NAME not in lower:
        return Labels(_in_order(cells, names, str(path), bad=failed))
    key = lower.index(NAME)
    labelled = [row[key].strip() if key < len(row) else "" for row in rows[1:]]
    return _by_name(labelled, cells, names, str(path), bad=failed)


def _label_column(path: Path, head: list[str], good: str, bad: str) -> tuple[int, bool]:
    """Return the position of the column with the labels, and whether it is true for failed samples."""
    lower = [cell.lower() for cell in head]
    if column := _current(good or bad, head):
        if column not in head:
            raise DataError(f"{path} has no column '{shown(column)[:60]}'; its columns are {_listed(head)}")
        return head.index(column), bool(bad)
    known = [name for name in (BAD, GOOD) if name in lower]
    if len(known) == 2:
        raise DataError(f"{path} has both a column '{BAD}' and a column '{GOOD}'; choose one with --bad or --good")
    if not known:
        raise DataError(f"{path} has the columns {_listed(head)}; name the one with the labels with --good or --bad")
    return lower.index(known[0]), known[0] == BAD


def _by_name(labelled: list[str], cells: list[str], names: Sequence[str], where: str, *, bad: bool) -> Labels:
    known = {name: i for i, name in enumerate(names)}

    def sample(name: str) -> str:
        suffix = PurePath(name).suffix.lower()
        name = name if name in known or suffix not in SUFFIXES else name[: -len(suffix)]
        return name if name in known or not name.isdecimal() else f"{int(name):05d}"  # spreadsheets drop leading zeros

    rows = [(sample(name), cell) for name, cell in zip(labelled, cells, strict=True) if name or cell.strip()]
    _require_unique([name for name, _ in rows], where)
    unknown = [name for name, _ in rows if name not in known]
    if rows and len(unknown) == len(rows):
        raise DataError(
            f"{where} names none of the samples: it has {_some(unknown)}; the samples are {_some(list(names))}"
        )
    result = np.full(len(names), np.nan)
    for (name, _), value in zip(rows, _values([cell for _, cell in rows], where, bad=bad), strict=True):
        if name in known:
            result[known[name]] = value
    note = f"{len(unknown)} labels are for names that are not among the samples ({_some(unknown)})" if unknown else ""
    return Labels(result, note)


def _in_order(cells: list[str], names: Sequence[str], where: str, *, bad: bool) -> np.ndarray:
    while len(cells) > len(names) and not cells[-1].strip():  # empty lines at the end of a file
        cells.pop()
    if len(cells) != len(names):
        raise ShapeError(
            f"{where} has {len(cells)} labels and no column '{NAME}', but there are {len(names)} samples; give one "
            f"label per sample, or a column '{NAME}'"
        )
    return _values(cells, where, bad=bad)


def _values(cells: Sequence[str], where: str, *, bad: bool) -> np.ndarray:
    cells = [cell.strip().lower() for cell in cells]
    if wrong := [i for i, cell in enumerate(cells) if cell not in VALUES]:
        raise DataError(
            f"label {wrong[0] + 1} in {where} is '{shown(cells[wrong[0]])[:40]}'; labels must be 0, 1, true, false, or "
            "empty"
        )
    values = np.array([VALUES[cell] for cell in cells])
    return values if bad else 1 - values
