"""Structures from CIF, extended XYZ and POSCAR files; one that cannot be read becomes a candidate that says so."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fmwc.errors import DataError, FmwcError
from fmwc.metrics.crystals.candidates import Candidate, plain
from fmwc.metrics.crystals.extras import need, quiet, said

__all__ = ["read"]

LARGEST = 1 << 28  # bytes to read of a file


def _cif(text: str) -> Iterator[Any]:
    parser = need("pymatgen.io.cif").CifParser.from_str(text)
    yield from parser.parse_structures(primitive=False, on_error="raise")


def _poscar(text: str) -> Iterator[Any]:
    yield need("pymatgen.io.vasp").Poscar.from_str(text).structure


def _xyz(text: str) -> Iterator[Any]:
    """Frame by frame, so that a broken one leaves those before it."""
    reader, lines = need("ase.io"), text.splitlines(keepends=True)
    start = 0
    while start < len(lines):
        if not lines[start].strip():
            start += 1
            continue
        end = start + 2 + int(lines[start])
        if end > len(lines):
            raise ValueError(f"cut off: {lines[start].strip()} atoms are announced, {len(lines) - start - 2} are there")
        yield reader.read(io.StringIO("".join(lines[start:end])), format="extxyz")
        start = end


FORMATS: dict[str, Callable[[str], Iterator[Any]]] = {
    ".cif": _cif,
    ".xyz": _xyz,
    ".extxyz": _xyz,
    ".vasp": _poscar,
    ".poscar": _poscar,
}


def _reader(path: Path) -> Callable[[str], Iterator[Any]] | None:
    if path.name.upper().startswith(("POSCAR", "CONTCAR")):
        return _poscar
    return FORMATS.get(path.suffix.lower())


def _file(path: Path, name: str) -> list[Candidate]:
    reader = _reader(path)
    if reader is None:
        known = ", ".join([*FORMATS, "POSCAR*", "CONTCAR*"])
        return [Candidate(name, problem=f"of no known kind; known: {known}")]
    found: list[Candidate] = []
    problem = ""
    try:
        if path.stat().st_size > LARGEST:
            raise DataError(f"it has more than {LARGEST >> 20} MiB; split it")
        text = path.read_text("utf-8", "replace")
        with quiet():
            for structure in reader(text):
                found.append(plain(structure, f"{name}#{len(found)}"))
        problem = "" if found else "there is no structure in it"
    except FileNotFoundError:
        problem = "there is no such file"
    except FmwcError as error:
        if "pip install" in str(error):  # about the installation, not about this file
            raise
        problem = str(error)
    except Exception as error:  # parsers fail in many ways
        problem = f"it cannot be read: {said(error)}"
    if problem:
        found.append(Candidate(f"{name}#{len(found)}", problem=problem))
    if len(found) == 1:
        only = found[0]
        return [Candidate(name, only.numbers, only.coords, only.cell, only.problem)]
    return found


def read(paths: str | Path | Iterable[str | Path]) -> list[Candidate]:
    """Reads structures to judge.

    Arguments:
        paths: Files, or folders whose files of a known kind are read in the order of their names.

    A file of several structures gives one candidate each, named `file#0`, `file#1`, …; one that cannot be read gives a
    candidate whose `problem` says why.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    files: list[Path] = []
    for path in (Path(os.path.expanduser(one)) for one in given):
        inside = [path]
        if path.is_dir():
            inside = sorted(f for f in path.iterdir() if f.is_file() and not f.name.startswith(".") and _reader(f))
            if not inside:
                raise DataError(f"{path} holds no CIF, extended XYZ or POSCAR file")
        files += inside
    often = Counter(file.name for file in files)  # files of two folders may share a name
    found = [one for file in files for one in _file(file, file.name if often[file.name] == 1 else str(file))]
    if not found:
        raise DataError("no structure was given to read")
    return found
