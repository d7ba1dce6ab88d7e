"""Read CIF, POSCAR and extended XYZ files; write CIF, extended XYZ and tables (CSV, Parquet)."""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.crystals.sandbox import read_structures, read_text_of
from fmwc.crystals.structures import Candidate, from_row, need, symbol
from fmwc.errors import DataError, FmwcError
from fmwc.files import note, write_bytes, write_text
from fmwc.readers import shown

__all__ = ["cif_text", "extxyz_text", "kind_of", "read", "write_cifs", "write_extxyz", "write_table"]

SUFFIXES = {".cif": "cif", ".xyz": "xyz", ".extxyz": "xyz", ".vasp": "poscar", ".poscar": "poscar"}
NAMES = ("POSCAR", "CONTCAR")
KNOWN = ", ".join([*SUFFIXES, *(f"{name}*" for name in NAMES)])
OTHERS = re.compile(r"[^A-Za-z0-9_.+-]")  # characters that are replaced in the names of files and CIF blocks

Columns = Mapping[str, Sequence[Any]]


# ---- reading -----------------------------------------------------------------------------------------------------


def kind_of(path: Path) -> str | None:
    """Return the format of a file according to its name, or `None` if it is unknown."""
    return "poscar" if path.name.upper().startswith(NAMES) else SUFFIXES.get(path.suffix.lower())


def _read_file(path: Path, name: str) -> list[Candidate]:
    kind = kind_of(path)
    if kind is None:
        return [Candidate(name, problem=f"unknown format; known: {KNOWN}")]
    if not os.path.lexists(path):
        return [Candidate(name, problem="no such file")]
    try:
        text = read_text_of(path)
    except FmwcError as error:
        return [Candidate(name, problem=str(error).removeprefix(f"{shown(path)} "))]
    rows = read_structures(kind, text)
    return [from_row(name if len(rows) == 1 else f"{name}#{i}", row) for i, row in enumerate(rows)]


def read(paths: str | Path | Iterable[str | Path]) -> list[Candidate]:
    """Read structures to judge.

    A file with several structures gives one candidate per structure, named `file#0`, `file#1`, …. A file that cannot be
    read within the limits of `fmwc.crystals.sandbox` gives a candidate whose `problem` says why.

    Arguments:
        paths: Files, or folders whose files of a known format are read in the order of their names.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    files: list[Path] = []
    for path in (Path(os.path.expanduser(one)) for one in given):
        inside = [path]
        if os.path.isdir(path):
            inside = sorted(f for f in path.iterdir() if not f.is_dir() and not f.name.startswith(".") and kind_of(f))
            if not inside:
                raise DataError(f"{shown(path)} contains no CIF, extended XYZ or POSCAR file")
        files += inside
    if not files:
        raise DataError("no structures to read; give at least one file or folder")
    count = Counter(file.name for file in files)  # files in two folders may share a name
    return [one for f in files for one in _read_file(f, shown(f.name if count[f.name] == 1 else f))]


# ---- writing -----------------------------------------------------------------------------------------------------


def write_table(path: str | Path, columns: Columns) -> tuple[Path, Path]:
    """Write `path.csv` and `path.parquet`. The CSV file comes first because it does not require pyarrow."""
    from fmwc.report.table import Table  # imports matplotlib

    path, table = Path(path), Table.from_columns(columns)
    csv = write_text(path.with_name(path.name + ".csv"), table.csv())
    need("pyarrow")
    return csv, write_bytes(path.with_name(path.name + ".parquet"), table.parquet())


def _writable(candidate: Candidate) -> bool:
    return candidate.known and candidate.finite and bool((np.linalg.norm(candidate.cell, axis=1) > 0).all())


def _row(columns: Columns | None, index: int) -> dict[str, Any]:
    """Return one row as Python scalars, with text on one line. Empty entries are left out."""
    row = {name: values[index] for name, values in (columns or {}).items()}
    row = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
    row = {name: " ".join(value.split()) if isinstance(value, str) else value for name, value in row.items()}
    return {name: value for name, value in row.items() if value is not None and value != "" and value == value}


def cif_text(candidate: Candidate, notes: Mapping[str, Any] | None = None) -> str:
    """Return a structure as CIF without symmetry, with notes as comments at the top."""
    if not _writable(candidate):
        raise DataError(f"{candidate.name} cannot be written: it has no atoms, an unknown element, or no finite cell")
    parameters = need("ase.geometry.cell").cell_to_cellpar(candidate.cell)
    lines = [f"# {name}: {value}" for name, value in (notes or {}).items()]
    lines += [f"data_{OTHERS.sub('_', candidate.name) or 'structure'}"]
    names = [*(f"length_{name}" for name in "abc"), "angle_alpha", "angle_beta", "angle_gamma"]
    lines += [f"_cell_{name} {value:.8f}" for name, value in zip(names, parameters, strict=True)]
    lines += ["_symmetry_space_group_name_H-M 'P 1'", "_symmetry_Int_Tables_number 1"]
    lines += ["loop_", "_symmetry_equiv_pos_as_xyz", "'x, y, z'", "loop_", "_atom_site_label", "_atom_site_type_symbol"]
    lines += ["_atom_site_fract_x", "_atom_site_fract_y", "_atom_site_fract_z", "_atom_site_occupancy"]
    for i, (z, (x, y, w)) in enumerate(zip(candidate.numbers, candidate.coords, strict=True)):
        lines.append(f"{symbol(z)}{i} {symbol(z)} {x:.8f} {y:.8f} {w:.8f} 1")
    return "\n".join(lines) + "\n"


def write_cifs(
    folder: str | Path, candidates: Sequence[Candidate], columns: Columns | None = None
) -> list[Path | None]:
    """Write one CIF per structure, named after it; return the paths, with `None` for structures without a file."""
    paths: list[Path | None] = []
    used: set[str] = set()
    for i, candidate in enumerate(candidates):
        if not _writable(candidate):
            paths.append(None)
            continue
        stem = OTHERS.sub("_", candidate.name).removesuffix(".cif").strip(".") or "structure"
        name = stem if stem.lower() not in used else f"{stem}-{i}"
        used.add(name.lower())
        paths.append(Path(folder) / f"{name}.cif")
    note(*(path for path in paths if path))  # in one call, because each call syncs the manifest
    for i, (path, candidate) in enumerate(zip(paths, candidates, strict=True)):
        if path:
            write_text(path, cif_text(candidate, _row(columns, i)))
    return paths


def extxyz_text(candidates: Sequence[Candidate], columns: Columns | None = None) -> str:
    """Return structures as extended XYZ, one frame each, with name and columns in the comment line.

    Structures that cannot be written are left out.
    """
    frames = []
    for i, candidate in enumerate(candidates):
        if _writable(candidate):
            frames.append(candidate.atoms())
            frames[-1].info |= {"name": candidate.name, **_row(columns, i)}
    file = io.StringIO()
    need("ase.io").write(file, frames, format="extxyz")
    return file.getvalue()


def write_extxyz(path: str | Path, candidates: Sequence[Candidate], columns: Columns | None = None) -> Path:
    """Write structures to one extended XYZ file."""
    return write_text(Path(path), extxyz_text(candidates, columns))
