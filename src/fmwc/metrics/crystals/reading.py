"""Structures from CIF, extended XYZ and POSCAR files; one that cannot be read becomes a candidate that says so."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.data.structures import KNOWN, kind_of, read_structures, read_text_of
from fmwc.errors import DataError, FmwcError
from fmwc.metrics.crystals.candidates import Candidate
from fmwc.readers import shown

__all__ = ["read"]


def _file(path: Path, name: str) -> list[Candidate]:
    kind = kind_of(path)
    if kind is None:
        return [Candidate(name, problem=f"of no known kind; known: {KNOWN}")]
    if not os.path.lexists(path):
        return [Candidate(name, problem="there is no such file")]
    try:
        text = read_text_of(path)
    except FmwcError as error:
        return [Candidate(name, problem=str(error).removeprefix(f"{shown(path)} "))]
    rows = read_structures(kind, text)
    return [_candidate(name if len(rows) == 1 else f"{name}#{i}", row) for i, row in enumerate(rows)]


def _candidate(name: str, row: dict[str, Any]) -> Candidate:
    if "problem" in row:
        return Candidate(name, problem=row["problem"])
    coords, cell = np.array(row["coords"], float).reshape(-1, 3), np.array(row["cell"], float)
    return Candidate(name, np.array(row["numbers"], int), coords, cell)


def read(paths: str | Path | Iterable[str | Path]) -> list[Candidate]:
    """Reads structures to judge.

    Arguments:
        paths: Files, or folders whose files of a known kind are read in the order of their names.

    A file of several structures gives one candidate each, named `file#0`, `file#1`, …; one that cannot be read, or not
    within the limits of `fmwc.data.structures`, gives a candidate whose `problem` says why.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    files: list[Path] = []
    for path in (Path(os.path.expanduser(one)) for one in given):
        inside = [path]
        if os.path.isdir(path):
            inside = sorted(f for f in path.iterdir() if not f.is_dir() and not f.name.startswith(".") and kind_of(f))
            if not inside:
                raise DataError(f"{shown(path)} holds no CIF, extended XYZ or POSCAR file")
        files += inside
    often = Counter(file.name for file in files)  # files of two folders may share a name
    found = [one for f in files for one in _file(f, shown(f.name if often[f.name] == 1 else f))]
    if not found:
        raise DataError("no structure was given to read")
    return found
