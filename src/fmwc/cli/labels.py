"""Read the table of samples and the labels of failed samples. Both are matched to the samples by name."""

from __future__ import annotations

import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from fmwc.cli.verbs import Filter
from fmwc.crystals.structures import need
from fmwc.errors import DataError, ShapeError, UsageError
from fmwc.readers import read_csv, read_parquet, shown

__all__ = ["NAME", "Labels", "Table", "labels_given", "read_labels", "read_table"]

NAME = "name"  # the column that rows are matched by
BAD, GOOD = "bad", "good"  # columns of a file of labels
METASTABLE, PROBLEM, FORMULA = "metastable", "problem", "formula"  # columns of a judge's table
NOVEL, NEED_NOVELTY = "novel", ("novel", "sun", "msun")  # columns that are unknown if novelty was not judged
FAILED = (BAD, "misplaced")  # columns that are true for failed samples; other columns are true for good ones
TABLES = ("judged.csv", "judged.parquet", "samples.csv")  # of a folder, in order of preference
VALUES = {"1": 1.0, "true": 1.0, "1.0": 1.0, "0": 0.0, "false": 0.0, "0.0": 0.0, "": np.nan, "nan": np.nan}
SUFFIXES = (".cif", ".extxyz", ".xyz", ".vasp", ".poscar")  # judged structures are named after their files
SHOWN = 3  # names in a message
COMPARISONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*(?P<column>[^<>]*?)\s*(?:(?P<comparison><=|>=|<|>)\s*(?P<number>[^<>=\s]+)\s*)?")


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
    """Return the rows of a CSV or Parquet file as text, the header first."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return [row or [""] for row in read_csv(path)]


def _parquet_rows(path: Path) -> list[list[str]]:
    need("pyarrow")
    table = read_parquet(path)
    named = zip(table.column_names, table.columns, strict=True)
    columns = [_texts(column, f"column '{shown(name)[:60]}' of {shown(path)}") for name, column in named]
    return [table.column_names, *map(list, zip(*columns, strict=True))]


def _texts(column: Any, what: str) -> list[str]:
    """Return the cells of a column as text; raise if Python has no such values: dates may be out of its range."""
    try:
        return ["" if value is None else str(value) for value in column.to_pylist()]
    except (need("pyarrow").ArrowException, LookupError, OverflowError, ValueError) as error:
        raise DataError(f"{what} cannot be read as text ({str(error)[:100]}); leave it out") from error


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
        note: A remark on how labels were read and matched, or empty.
    """

    bad: np.ndarray
    note: str = ""


class Criterion(NamedTuple):
    """Which rows of a table failed.

    Attributes:
        column: The column with the labels; empty if it is not given.
        comparison, number: The values that satisfy the criterion; without a comparison, those that are true.
        bad: Whether rows that satisfy it failed (`True`) or are good (`False`); `None` if the name of the column tells.
    """

    column: str = ""
    comparison: str = ""
    number: float = 0.0
    bad: bool | None = None

    def failed(self, table: Table, where: str) -> np.ndarray:
        """Return 1 for failed rows, 0 for good ones, and NaN for those without a value.

        Structures without a value that could not be judged, whose `problem` says why, have failed.
        """
        cells = [cell.strip() for cell in table[self.column]]
        _require_novelty(self.column, cells, table, where)
        fulfilled = _numbers(cells, where) if self.comparison else _truths(cells, where)
        if self.comparison:
            compared = COMPARISONS[self.comparison](fulfilled, self.number).astype(float)
            fulfilled = np.where(np.isnan(fulfilled), np.nan, compared)
        bad = self.column.lower() in FAILED if self.bad is None else self.bad
        failed = fulfilled if bad else 1 - fulfilled
        problems = np.array([bool(cell.strip()) for cell in table.get(PROBLEM, [""] * len(cells))], bool)
        return np.where(np.isnan(failed) & problems, 1.0, failed)


def _require_novelty(column: str, cells: Sequence[str], table: Table, where: str) -> None:
    """Raise if a column of the judge has no true value and lacks some, because novelty was not judged."""
    unknown = not any(VALUES.get(cell.lower()) == 1 for cell in cells) and not all(cells)
    if column.lower() in NEED_NOVELTY and unknown and not any(cell.strip() for cell in table.get(NOVEL, [])):
        raise UsageError(
            f"'{column}' is unknown in {where}, because novelty was not judged; judge again with fmwc judge --data "
            "FOLDER, or with FMWC_DATA set to the folder of MP-20"
        )


def labels_given(options: Filter) -> bool:
    """Return whether any option of the labels is given."""
    return bool(options.labels or options.column or options.good or options.bad)


def read_labels(options: Filter, names: Sequence[str], table: Table | None) -> Labels:
    """Read which samples failed from a file, or from a column of the samples' table.

    A file with a column `name` is matched by name; samples that it does not name have no label. A file without names
    has one label per sample, in the order of the samples.

    Arguments:
        options: `labels` is a CSV, Parquet or text file, a folder that `fmwc judge` wrote, or a column of the table;
            `column`, `good` and `bad` say which column holds the labels and which of its values are good or failed.
        names: The names of the samples.
        table: The samples' table.
    """
    criterion, source = _criterion(options), options.labels
    if source and os.path.exists(source):
        return _from_file(_file_of(Path(source)), names, table, criterion)
    if source and criterion.column:
        raise DataError(f"--labels {shown(source)[:100]} is not a file")
    columns = [*table] if table else []
    column = source or criterion.column
    if table is None or column not in columns:
        choice = f", nor a column of the samples' table ({_listed(columns)})" if columns else ""
        raise DataError(f"--labels {shown(column)[:100]} is not a file{choice}")
    return Labels(criterion._replace(column=column).failed(table, f"the table's column '{column}'"))


def _criterion(options: Filter) -> Criterion:
    """Return the criterion of the options `column`, `good` and `bad`."""
    if options.good and options.bad:
        raise UsageError("labels come from one column: give --good or --bad, not both")
    option, given = ("--bad", options.bad) if options.bad else ("--good", options.good)
    found = _CONDITION.fullmatch(given)
    if found is None:
        raise UsageError(f"{option} must be a column, or a condition such as 'e_above_hull <= 0.05'; got '{given}'")
    column, comparison = found["column"], found["comparison"] or ""
    if column and options.column:
        raise UsageError(f"--column {options.column} and {option} '{given}' both name a column; give one of them")
    try:
        number = float(found["number"]) if comparison else 0.0
    except ValueError as error:
        raise UsageError(f"{option} '{given}' needs a number after {comparison}") from error
    return Criterion(column or options.column, comparison, number, bool(options.bad) if given else None)


def _file_of(path: Path) -> Path:
    """Return the table in a folder that `fmwc judge` or `fmwc sample` wrote, or the file itself."""
    if not path.is_dir():
        return path
    if found := [path / name for name in TABLES if (path / name).is_file()]:
        return found[0]
    raise DataError(f"{shown(path)} holds no table of labels; give a file, or a folder that fmwc judge --out wrote")


def _from_file(path: Path, names: Sequence[str], own: Table | None, criterion: Criterion) -> Labels:
    rows = _rows(path)
    head = [cell.strip() for cell in rows[0]] if rows else []
    lower = [cell.lower() for cell in head]
    if criterion == Criterion() and all(len(row) == 1 for row in rows) and not {BAD, GOOD, NAME} & {*lower}:
        table = {BAD: [row[0] for row in rows]}  # labels without a header
        return Labels(_in_order(table, Criterion(BAD), names, str(path)))
    criterion, note = _with_column(path, head, criterion)
    if longer := [i for i, row in enumerate(rows, 1) if len(row) > len(head)]:
        raise DataError(f"{path} has {len(rows[longer[0] - 1])} cells in row {longer[0]} but {len(head)} columns")
    for column in (criterion.column.lower(), NAME):
        if lower.count(column) > 1:
            raise DataError(f"{path} has more than one column '{shown(column)[:60]}'; keep one of them")
    table = {name: [row[i] if i < len(row) else "" for row in rows[1:]] for i, name in enumerate(head)}
    if NAME not in lower:
        return Labels(_in_order(table, criterion, names, str(path)), note)
    named = [cell.strip() for cell in table.pop(head[lower.index(NAME)])]
    used = [i for i, name in enumerate(named) if name or table[criterion.column][i].strip()]
    table = {column: [cells[i] for i in used] for column, cells in table.items()}
    place, others = _places([named[i] for i in used], names, str(path))
    if own is not None and FORMULA in own and FORMULA in table:
        _require_same_formulas(own[FORMULA], table[FORMULA], place, f"{path} is of other samples")
    bad, failed = np.full(len(names), np.nan), criterion.failed(table, str(path))
    known = place >= 0
    bad[place[known]] = failed[known]
    return Labels(bad, "; ".join(filter(None, [note, others])))


def _with_column(path: Path, head: list[str], criterion: Criterion) -> tuple[Criterion, str]:
    """Return the criterion with the name of its column in a table, and a note if the column is a judge's verdict."""
    if column := criterion.column:
        if column not in head:
            raise DataError(f"{path} has no column '{shown(column)[:60]}'; its columns are {_listed(head)}")
        return criterion._replace(column=column), ""
    lower = [cell.lower() for cell in head]
    known = [name for name in (BAD, GOOD) if name in lower and not criterion.comparison]
    if len(known) == 2:
        raise DataError(f"{path} has both a column '{BAD}' and a column '{GOOD}'; choose one with --bad or --good")
    if known:
        return Criterion(head[lower.index(known[0])]), ""
    if METASTABLE in lower and not criterion.comparison:
        return Criterion(head[lower.index(METASTABLE)]), f"good samples are those with {METASTABLE} in {path.name}"
    raise DataError(
        f"{path} has the columns {_listed(head)}; name the one with the labels with --good or --bad, or give a "
        "condition such as --good 'e_above_hull <= 0.05'"
    )


def _places(labelled: Sequence[str], names: Sequence[str], where: str) -> tuple[np.ndarray, str]:
    """Return the index of the sample of each name, -1 for unknown names, and a note about these."""
    known = {name: i for i, name in enumerate(names)}
    if len(known) < len(names):
        _require_unique(names, "the folder of samples")

    def sample(name: str) -> str:
        suffix = PurePath(name).suffix.lower()
        name = name if name in known or suffix not in SUFFIXES else name[: -len(suffix)]
        return name if name in known or not name.isdecimal() else f"{int(name):05d}"  # spreadsheets drop leading zeros

    found = [sample(name) for name in labelled]
    _require_unique(found, where)
    unknown = [name for name in found if name not in known]
    if found and len(unknown) == len(found):
        raise DataError(
            f"{where} names none of the samples: it has {_some(unknown)}; the samples are {_some(list(names))}"
        )
    note = f"{len(unknown)} labels are for names that are not among the samples ({_some(unknown)})" if unknown else ""
    return np.array([known.get(name, -1) for name in found], int), note


def _require_same_formulas(own: Sequence[str], labelled: Sequence[str], place: np.ndarray, what: str) -> None:
    """Raise if the labels belong to crystals of other formulas: samples of two runs have the same names."""
    for formula, i in zip(labelled, place, strict=True):
        if i >= 0 and formula != own[i]:
            parts = [_composition(one) for one in (formula, own[i])]
            if all(parts) and parts[0] != parts[1]:
                raise DataError(f"{what}: sample {i} is {shown(own[i])[:60]} here and {shown(formula)[:60]} there")


def _composition(formula: str) -> dict[str, int] | None:
    """Return the reduced composition of a formula; `None` if it cannot be read."""
    try:
        return dict(need("ase.formula").Formula(formula.replace(" ", "")).reduce()[0].count())
    except (ValueError, ZeroDivisionError):
        return None


def _in_order(table: Table, criterion: Criterion, names: Sequence[str], where: str) -> np.ndarray:
    count = len(table[criterion.column])
    while count > len(names) and not any(cells[count - 1].strip() for cells in table.values()):
        count -= 1  # an empty line at the end of the file
    if count != len(names):
        raise ShapeError(
            f"{where} has {count} labels and no column '{NAME}', but there are {len(names)} samples; give one label "
            f"per sample, or a column '{NAME}'"
        )
    return criterion.failed({name: cells[:count] for name, cells in table.items()}, where)


def _truths(cells: Sequence[str], where: str) -> np.ndarray:
    cells = [cell.lower() for cell in cells]
    if wrong := [i for i, cell in enumerate(cells) if cell not in VALUES]:
        raise DataError(
            f"label {wrong[0] + 1} in {where} is '{shown(cells[wrong[0]])[:40]}'; labels must be 0, 1, true, false, or "
            "empty; for numbers, give a condition such as --good '<= 0.05'"
        )
    return np.array([VALUES[cell] for cell in cells])


def _numbers(cells: Sequence[str], where: str) -> np.ndarray:
    values = np.full(len(cells), np.nan)
    for i, cell in enumerate(cells):
        try:
            values[i] = float(cell or "nan")
        except ValueError as error:
            raise DataError(f"value {i + 1} in {where} is '{shown(cell)[:40]}', not a number") from error
    return values
