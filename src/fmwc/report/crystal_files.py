"""Files of judged crystals: the table as CSV and Parquet, each structure as CIF, all of them as extended XYZ."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.errors import DataError
from fmwc.files import note, write_bytes, write_text
from fmwc.metrics.crystals.candidates import SYMBOLS, Candidate
from fmwc.metrics.crystals.extras import need
from fmwc.metrics.crystals.table import Columns, checked, csv_text, plain

__all__ = ["cif_text", "csv_text", "extxyz_text", "parquet_bytes", "write_cifs", "write_extxyz", "write_table"]


def parquet_bytes(columns: Columns) -> bytes:
    """The table as Parquet."""
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    out = io.BytesIO()
    parquet.write_table(arrow.table({name: arrow.array(values) for name, values in checked(columns).items()}), out)
    return out.getvalue()


def write_table(path: str | Path, columns: Columns) -> tuple[Path, Path]:
    """Writes `path.csv` and `path.parquet`; the CSV first, which needs no package."""
    place = Path(path)
    table = write_text(place.with_name(place.name + ".csv"), csv_text(columns))
    return table, write_bytes(place.with_name(place.name + ".parquet"), parquet_bytes(columns))


def _parameters(cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.linalg.norm(cell, axis=1)
    unit = cell / lengths[:, None]
    cosines = [unit[1] @ unit[2], unit[0] @ unit[2], unit[0] @ unit[1]]
    return lengths, np.degrees(np.arccos(np.clip(cosines, -1, 1)))


def _writable(candidate: Candidate) -> bool:
    finite = np.isfinite(candidate.cell).all() and np.isfinite(candidate.coords).all()
    return candidate.known and bool(finite) and bool((np.linalg.norm(candidate.cell, axis=1) > 0).all())


def cif_text(candidate: Candidate, notes: Mapping[str, Any] | None = None) -> str:
    """One structure as CIF without symmetry; the notes go into its first lines as comments."""
    if not _writable(candidate):
        raise DataError(f"{candidate.name} cannot be written: it has no atoms, or no finite cell, or no known element")
    lengths, angles = _parameters(candidate.cell)
    said = {name: " ".join(str(value).split()) for name, value in (notes or {}).items() if value is not None}
    lines = [f"# {name}: {value}" for name, value in said.items() if value]
    lines += [f"data_{re.sub(r'[^A-Za-z0-9_.+-]', '_', candidate.name) or 'structure'}"]
    lines += [f"_cell_length_{name} {value:.8f}" for name, value in zip("abc", lengths, strict=True)]
    names = ("alpha", "beta", "gamma")
    lines += [f"_cell_angle_{name} {value:.8f}" for name, value in zip(names, angles, strict=True)]
    lines += ["_symmetry_space_group_name_H-M 'P 1'", "_symmetry_Int_Tables_number 1"]
    lines += ["loop_", "_symmetry_equiv_pos_as_xyz", "'x, y, z'", "loop_", "_atom_site_label", "_atom_site_type_symbol"]
    lines += ["_atom_site_fract_x", "_atom_site_fract_y", "_atom_site_fract_z", "_atom_site_occupancy"]
    for i, (z, place) in enumerate(zip(candidate.numbers, candidate.coords, strict=True)):
        symbol = SYMBOLS[z - 1]
        lines.append(f"{symbol}{i} {symbol} {place[0]:.8f} {place[1]:.8f} {place[2]:.8f} 1")
    return "\n".join(lines) + "\n"


def write_cifs(
    folder: str | Path, candidates: Sequence[Candidate], columns: Columns | None = None
) -> list[Path | None]:
    """Write one CIF per structure, named after it; return `None` in place of one that cannot be written."""
    paths: list[Path | None] = []
    taken: set[str] = set()
    for i, candidate in enumerate(candidates):
        if not _writable(candidate):
            paths.append(None)
            continue
        stem = re.sub(r"[^A-Za-z0-9_.+-]", "_", candidate.name).removesuffix(".cif").strip(".") or "structure"
        name = stem if stem.lower() not in taken else f"{stem}-{i}"
        taken.add(name.lower())
        paths.append(Path(folder) / f"{name}.cif")
    note(*(path for path in paths if path))  # all at once: the manifest is synced for each call
    for i, (path, candidate) in enumerate(zip(paths, candidates, strict=True)):
        if path:
            write_text(path, cif_text(candidate, {key: plain(values[i]) for key, values in (columns or {}).items()}))
    return paths


def _quoted(value: Any) -> str:
    if isinstance(value, bool):
        return "T" if value else "F"
    if isinstance(value, int | float):
        return f"{value!r}"
    return json.dumps(" ".join(str(value).split()), ensure_ascii=False)


def extxyz_text(candidates: Sequence[Candidate], columns: Columns | None = None) -> str:
    """All structures as extended XYZ, one frame each, with the columns (`confidence`, `e_above_hull`, …) in its
    comment line. Those that cannot be written are left out; the name tells which are there."""
    frames = []
    for i, candidate in enumerate(candidates):
        if not _writable(candidate):
            continue
        cell = " ".join(f"{value:.8f}" for value in candidate.cell.ravel())
        notes = {"name": candidate.name, **{key: plain(values[i]) for key, values in (columns or {}).items()}}
        said = " ".join(f"{key}={_quoted(value)}" for key, value in notes.items() if value not in (None, ""))
        frames.append(f'{len(candidate)}\nLattice="{cell}" Properties=species:S:1:pos:R:3 {said} pbc="T T T"\n')
        for z, place in zip(candidate.numbers, candidate.coords @ candidate.cell, strict=True):
            frames.append(f"{SYMBOLS[z - 1]} {place[0]:.8f} {place[1]:.8f} {place[2]:.8f}\n")
    return "".join(frames)


def write_extxyz(path: str | Path, candidates: Sequence[Candidate], columns: Columns | None = None) -> Path:
    return write_text(Path(path), extxyz_text(candidates, columns))
