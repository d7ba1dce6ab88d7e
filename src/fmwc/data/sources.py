"""Where crystals are found: a folder of npz arrays, of the public CSV files of MP-20, or of CIF files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fmwc.data.structures import CIF_BYTES, read_text_of
from fmwc.errors import DataError
from fmwc.readers import read_csv

__all__ = ["HELD", "LABELS", "OTHERS", "SOURCES", "SPLITS", "Entry", "dealt", "entries_of", "home_of", "place_of"]

SPLITS = {"train": range(8), "val": range(8, 9), "test": range(9, 10)}  # tenths, of a set that has no split
COLUMNS = ("material_id", "cif")
LABELS = {  # field: column of the public CSV files, type
    "formation_energy_per_atom": ("formation_energy_per_atom", np.float32),
    "e_above_hull": ("e_above_hull", np.float32),
    "band_gap": ("band_gap", np.float32),
    "spacegroup": ("spacegroup.number", np.uint8),
}
SOURCES = "MP-20's train.csv, val.csv and test.csv (or CIF files of your own, as *.cif or in train/, val/ and test/)"
OTHERS = f"give a folder with train.npz, val.npz and test.npz, or with {SOURCES}; or 'prototypes' for a first look"


class Entry(NamedTuple):
    """One structure as it was found."""

    name: str
    text: str  # a CIF
    labels: dict[str, float]


def place_of(where: str | Path | None) -> Path:
    """The folder that was named, or that `FMWC_DATA` names."""
    given = where if where is not None else os.environ.get("FMWC_DATA") or None
    if given is None:
        raise DataError(f"say where the crystals are, by --data or FMWC_DATA; {OTHERS}")
    place = Path(os.path.expanduser(given))
    if not place.is_dir():
        raise DataError(f"{place} {'is a file' if place.exists() else 'does not exist'}; {OTHERS}")
    return place


def home_of(place: Path, kinds: dict[str, Callable[[Path, str], Any]]) -> tuple[str, Path]:
    """All splits are read from one place in one form, so that no two data sets are mixed."""
    try:
        for kind, held in kinds.items():
            for home in (place, place / "mp20"):
                if any(held(home, split) for split in SPLITS):
                    return kind, home
    except OSError as error:
        raise DataError(f"{error.filename or place} cannot be read ({error.strerror or error})") from error
    raise DataError(f"{place} holds no crystals; {OTHERS if 'npz' in kinds else 'give ' + SOURCES}")


def dealt(name: str) -> str:
    """The split of a structure in a set that has none: by its name, so that it stays when others come or go."""
    tenth = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 10
    return next(split for split, tenths in SPLITS.items() if tenth in tenths)


def _name(file: Path) -> str:
    return file.stem.encode("utf-8", "replace").decode()  # a name need not be Unicode


def _cifs(folder: Path, split: str) -> list[Path]:
    found: dict[str, list[Path]] = {part: [] for part in (*SPLITS, ".")}
    for part, files in found.items():
        if (folder / part).is_dir():
            inside = sorted((folder / part).iterdir(), key=lambda file: file.name)
            files += [f for f in inside if f.suffix.lower() == ".cif" and not f.name.startswith(".") and f.is_file()]
    if any(found[part] for part in SPLITS):
        return found[split]
    return [file for file in found["."] if dealt(_name(file)) == split]


HELD: dict[str, Callable[[Path, str], Any]] = {  # in the order of choice
    "npz": lambda home, split: (home / f"{split}.npz").is_file(),
    "csv": lambda home, split: (home / f"{split}.csv").is_file(),
    "cif": _cifs,
}


def entries_of(kind: str, home: Path, split: str) -> list[Entry]:
    """All structures of a split, from a CSV file or from CIF files."""
    if kind == "csv":
        return _rows(home / f"{split}.csv")
    return [Entry(_name(file), _text(file), {}) for file in _cifs(home, split)]


def _text(file: Path) -> str:
    """A CIF's text; that of one that cannot be read is empty, and is left out by its reason like others."""
    try:
        return read_text_of(file, CIF_BYTES)
    except DataError:
        return ""


def _rows(file: Path) -> list[Entry]:
    rows = read_csv(file)
    held = next(rows, [])
    if missing := [column for column in COLUMNS if column not in held]:
        raise DataError(
            f"{file} has the columns {', '.join(held)[:200] or 'none'}, and needs {' and '.join(missing)}; "
            "get MP-20's own CSV files"
        )
    places = {name: held.index(name) for name in held}
    labels = [(field, places[column]) for field, (column, _) in LABELS.items() if column in held]

    def cell(row: list[str], place: int) -> str:
        return row[place] if place < len(row) else ""

    name, text = (places[column] for column in COLUMNS)
    return [Entry(cell(r, name), cell(r, text), {f: _number(cell(r, at)) for f, at in labels}) for r in rows if r]


def _number(text: str) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")
