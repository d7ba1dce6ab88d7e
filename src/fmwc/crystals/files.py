"""Read CIF, POSCAR and extended XYZ files; write these, ASE databases and tables (CSV, Parquet)."""

from __future__ import annotations

import io
import os
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from fmwc.crystals.parsers import read_structures, read_text_of
from fmwc.crystals.structures import (
    CHANNELS,
    Candidate,
    candidates,
    crystals_of,
    need,
    one_line,
    quiet,
)
from fmwc.errors import DataError, FmwcError, pick
from fmwc.files import write_bytes, write_text
from fmwc.readers import shown
from fmwc.sampling import Trajectory

__all__ = [
    "FORMATS",
    "SYMMETRISED",
    "Format",
    "cif_text",
    "copy_database",
    "extxyz_text",
    "formats_of",
    "kind_of",
    "links_to",
    "poscar_text",
    "read",
    "symmetrised_cif_text",
    "write_cifs",
    "write_database",
    "write_each",
    "write_extxyz",
    "write_structures",
    "write_table",
]

SUFFIXES = {".cif": "cif", ".xyz": "xyz", ".extxyz": "xyz", ".vasp": "poscar", ".poscar": "poscar"}
NAMES = ("POSCAR", "CONTCAR")
SAMPLES = "samples.safetensors"
KNOWN = ", ".join([*SUFFIXES, *(f"{name}*" for name in NAMES)])
EXACT = 1e-3  # Å; symmetry of a refined structure, whose atoms obey it up to rounding
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
    return read_structures(kind, text, name)


def read(paths: str | Path | Iterable[str | Path]) -> list[Candidate]:
    """Read structures to judge.

    A file with several structures gives one candidate per structure, named `file#0`, `file#1`, …. A file that cannot be
    read within the limits of `fmwc.crystals.parsers` gives a candidate whose `problem` says why.

    Arguments:
        paths: Files, or folders whose files of a known format are read in the order of their names. Of a folder that
            `fmwc sample crystals` wrote, all samples are read.
    """
    given = [Path(os.path.expanduser(one)) for one in ([paths] if isinstance(paths, str | Path) else paths)]
    files: list[Path] = []
    drawn: list[Candidate] = []
    for path in given:
        inside = [path]
        if (samples := path / SAMPLES).is_file():
            prefix = f"{shown(path)}/" if len(given) > 1 else ""
            drawn += [replace(one, name=prefix + one.name) for one in _samples(samples)]
            inside = []
        elif os.path.isdir(path):
            inside = sorted(f for f in path.iterdir() if not f.is_dir() and not f.name.startswith(".") and kind_of(f))
            if not inside:
                raise DataError(f"{shown(path)} contains no CIF, extended XYZ or POSCAR file")
        files += inside
    if not given:
        raise DataError("no structures to read; give at least one file or folder")
    count = Counter(file.name for file in files)  # files in two folders may share a name
    return drawn + [one for f in files for one in _read_file(f, shown(f.name if count[f.name] == 1 else f))]


def _samples(path: Path) -> list[Candidate]:
    """Return the samples of a run; those that have no CIF file are among them."""
    run = Trajectory.load(path)
    if not (isinstance(run.x, dict) and {*CHANNELS} <= run.x.keys() and "atoms" in run.cond):
        raise DataError(f"{shown(path)} contains samples of another domain, not crystals")
    return candidates(crystals_of(run))


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
    """Return a structure as CIF without symmetry, with notes as comments at the top.

    Numbers among the notes are also data items, such as `_fmwc_confidence`. If the structure has a doubt per atom, the
    atoms have the column `_fmwc_atom_doubt`.
    """
    _require_writable(candidate)
    return _cif(candidate.structure(), candidate, notes or {})


def _cif(structure: Any, candidate: Candidate, notes: Mapping[str, Any], symprec: float | None = None) -> str:
    with quiet():
        (block,) = need("pymatgen.io.cif").CifWriter(structure, symprec=symprec).cif_file.data.values()
    block.header = OTHERS.sub("_", candidate.name)[:74] or "structure"
    numbers = {name: value for name, value in notes.items() if isinstance(value, float)}
    block.data = {f"_fmwc_{OTHERS.sub('_', name)}": f"{value:.8g}" for name, value in numbers.items()} | block.data
    if candidate.doubt is not None and symprec is None:  # equivalent atoms become one site
        block.data["_fmwc_atom_doubt"] = [f"{value:.8g}" for value in candidate.doubt]
        block.loops[-1].append("_fmwc_atom_doubt")
    return "\n".join([*(f"# {name}: {value}" for name, value in notes.items()), str(block), ""])


def symmetrised_cif_text(candidate: Candidate, notes: Mapping[str, Any] | None = None, *, symprec: float) -> str:
    """Return a structure as CIF with the symmetry that spglib finds, in its conventional cell; empty if it finds none.

    The text is read back: if it holds another crystal, the structure is written without symmetry, and a comment says
    so. Equivalent atoms become one site, so there is no doubt per atom.

    Arguments:
        candidate: The structure.
        notes: Comments at the top.
        symprec: How far atoms may lie from their symmetric positions, in Å; 0.01 to 0.1 are usual.
    """
    _require_writable(candidate)
    structure = replace(candidate, doubt=None).structure()
    try:
        with quiet():
            refined = need("pymatgen.symmetry.analyzer").SpacegroupAnalyzer(structure, symprec).get_refined_structure()
            # With `symprec` again, it would find operations that the refined atoms do not obey, and readers would
            # complete the sites to more atoms than there are.
            text = _cif(refined, candidate, notes or {}, symprec=min(symprec, EXACT))
    except Exception:  # collapsed cells fail in many ways
        return ""
    if not _reads_back(text, structure, symprec):
        return cif_text(candidate, {**(notes or {}), "symmetry": "not written, because it gives another crystal"})
    return text


def _reads_back(text: str, structure: Any, symprec: float) -> bool:
    """Return whether a CIF holds a structure whose atoms have moved by at most twice `symprec`, in Å."""
    matcher = need("pymatgen.analysis.structure_matcher").StructureMatcher(scale=False)
    try:
        with quiet():
            (found,) = need("pymatgen.io.cif").CifParser.from_str(text).parse_structures(primitive=False)
            if found.composition.reduced_formula != structure.composition.reduced_formula:
                return False
            moved = matcher.get_rms_dist(structure, found)  # in units of the edge of a cube with one atom's volume
    except Exception:
        return False
    return moved is not None and moved[1] * (structure.volume / len(structure)) ** (1 / 3) <= 2 * symprec


def poscar_text(candidate: Candidate, notes: Mapping[str, Any] | None = None) -> str:
    """Return a structure as POSCAR, with atoms sorted by element, and its name and notes in the first line."""
    _require_writable(candidate)
    comment = " ".join([candidate.name, *(f"{name}={value}" for name, value in (notes or {}).items())])
    poscar = need("pymatgen.io.vasp.inputs").Poscar
    with quiet():
        made = poscar(replace(candidate, doubt=None).structure(), comment=comment[:200], sort_structure=True)
        return str(made.get_str(significant_figures=12))


def _require_writable(candidate: Candidate) -> None:
    if not _writable(candidate):
        raise DataError(f"{candidate.name} cannot be written: it has no atoms, an unknown element, or no finite cell")


def write_each(
    folder: str | Path,
    candidates: Sequence[Candidate],
    columns: Columns | None = None,
    *,
    text: Callable[..., str] = cif_text,
    suffix: str = ".cif",
) -> list[Path | None]:
    """Write one file per structure, named after it; return the paths, with `None` for structures without a file.

    Arguments:
        folder: The folder.
        candidates: The structures.
        columns: Values to note in each file, one per structure.
        text: A function of a structure and its notes that returns the content of its file, such as :func:`cif_text`; if
            empty, there is no file.
        suffix: The suffix of the files.
    """
    paths: list[Path | None] = []
    used: set[str] = set()
    for i, candidate in enumerate(candidates):
        if not _writable(candidate):
            paths.append(None)
            continue
        stem = OTHERS.sub("_", candidate.name).removesuffix(".cif").strip(".") or "structure"
        while stem.lower() in used:
            stem = f"{stem}-{i}"
        used.add(stem.lower())
        paths.append(Path(folder) / f"{stem}{suffix}")
    for i, (path, candidate) in enumerate(zip(paths, candidates, strict=True)):
        if path:
            content = text(candidate, _row(columns, i))
            paths[i] = write_text(path, content) if content else None
    return paths


def write_cifs(
    folder: str | Path, candidates: Sequence[Candidate], columns: Columns | None = None
) -> list[Path | None]:
    """Write one CIF per structure, named after it; return the paths, with `None` for structures without a file."""
    return write_each(folder, candidates, columns)


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


# ---- ASE databases ---------------------------------------------------------------------------------------------------


def write_database(path: str | Path, candidates: Sequence[Candidate], columns: Columns | None = None) -> Path:
    """Write structures to an ASE database (SQLite).

    Numbers and words of the columns are keys that can be selected by, such as `confidence>0.9`. The name, the doubt per
    atom, and values that cannot be keys are in the `data` of each row.
    """
    rows = [(c.atoms(), {"name": c.name, **_row(columns, i)}) for i, c in enumerate(candidates) if _writable(c)]

    def fill(database: Any) -> None:
        for atoms, values in rows:
            keys = {name: value for name, value in values.items() if _is_key(name, value)}
            data = {name: value for name, value in values.items() if name not in keys}
            doubt = {"doubt": atoms.arrays["doubt"]} if "doubt" in atoms.arrays else {}
            database.write(atoms, key_value_pairs=keys, data={**data, **doubt})

    return _new_database(Path(path), fill)


def copy_database(source: str | Path, path: str | Path, names: Sequence[str]) -> Path:
    """Copy the rows of an ASE database with these names to a new database."""
    wanted = set(names)

    def fill(database: Any) -> None:
        try:
            for row in need("ase.db").connect(source, type="db").select():
                if row.data.get("name", row.key_value_pairs.get("name")) in wanted:
                    database.write(row, key_value_pairs=row.key_value_pairs, data=row.data)
        except (sqlite3.Error, KeyError, ValueError, OSError) as error:
            raise DataError(f"{shown(source)} is not an ASE database of samples: {one_line(error)}") from error

    return _new_database(Path(path), fill)


def _new_database(path: Path, fill: Callable[[Any], None]) -> Path:
    with tempfile.TemporaryDirectory() as folder, quiet():
        file = Path(folder) / "structures.db"
        with need("ase.db").connect(file, type="db") as database:
            fill(database)
        content = file.read_bytes()
    return write_bytes(path, content)


def _is_key(name: str, value: Any) -> bool:
    """Return whether ASE accepts a key and its value. Names such as `00012` are not accepted, because they can be
    read as numbers."""
    try:
        need("ase.db.core").check({name: value})
    except ValueError:
        return False
    return True


# ---- formats ---------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """How the structures of a run are written.

    Attributes:
        place: The file or folder beside the table.
        write: A function of that path, the structures and their columns.
        suffix: The suffix of the files in a folder; empty for a single file.
    """

    place: str
    write: Callable[[Path, Sequence[Candidate], Columns | None], Any]
    suffix: str = ""


FORMATS = {
    "cif": Format("cif", write_cifs, ".cif"),
    "extxyz": Format("samples.xyz", write_extxyz),
    "poscar": Format("poscar", partial(write_each, text=poscar_text, suffix=".vasp"), ".vasp"),
    "db": Format("samples.db", write_database),
}
SYMMETRISED = "symmetrised"  # a folder of CIF files


def links_to(folder: Path, page: Path, names: Sequence[str]) -> list[str]:
    """Return the address of a file of each structure in a folder, relative to the folder of a page; `""` for none."""
    kinds = [kind for kind in FORMATS.values() if kind.suffix]

    def link(name: str) -> str:
        files = (folder / kind.place / f"{OTHERS.sub('_', name)}{kind.suffix}" for kind in kinds)
        found = next((file for file in files if file.is_file()), None)
        return "" if found is None else quote(Path(os.path.relpath(found, page)).as_posix())

    return [link(name) for name in names]


def formats_of(names: str) -> list[str]:
    """Return the formats in a comma-separated list; `cif` if it is empty."""
    formats = [name.strip() for name in names.split(",") if name.strip()] or ["cif"]
    for name in formats:
        pick(FORMATS, name, "format")
    return list(dict.fromkeys(formats))


def write_structures(
    out: Path, candidates: Sequence[Candidate], columns: Columns | None = None, formats: str = "", symprec: float = 0.0
) -> list[Path]:
    """Write structures in several formats; return the files and folders.

    Arguments:
        out: The folder.
        candidates, columns: The structures, and values to note with each.
        formats: A comma-separated list of `cif`, `extxyz`, `poscar` and `db`; `cif` if empty.
        symprec: If positive, also write CIF files with the symmetry that spglib finds with this tolerance in Å.
    """
    written = []
    for name in formats_of(formats):
        FORMATS[name].write(out / FORMATS[name].place, candidates, columns)
        written.append(out / FORMATS[name].place)
    if symprec > 0:
        write_each(out / SYMMETRISED, candidates, columns, text=partial(symmetrised_cif_text, symprec=symprec))
        written.append(out / SYMMETRISED)
    return written
