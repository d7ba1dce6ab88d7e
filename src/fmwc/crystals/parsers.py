"""Read structure files (CIF, POSCAR, extended XYZ) with pymatgen and ASE, after a limit of bytes and atoms."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.crystals.structures import ANGLES, ELEMENTS, Candidate, Cell, candidate_of, has_volume, need, one_line, quiet
from fmwc.errors import DataError, UsageError
from fmwc.readers import read_bytes

__all__ = ["MOST", "MOST_ATOMS", "cell_of", "cells", "niggli", "read_structures", "read_text_of"]

BYTES = 10_000_000  # maximum per file
CIF_BYTES = 1 << 20  # maximum per structure of training data, which has at most 20 atoms
MOST = 1_000  # maximum atoms per structure: CHGNet and the comparison of structures take seconds for as many
MOST_ATOMS = 20  # per cell of the training data, as in MP-20
SLACK = 0.05  # tolerance of `nearly_niggli`, for ratios of lengths and for cosines
SAME = 0.01  # Å; atoms of a supercell may differ this much from their copies, because files hold rounded numbers
CHUNK = 50  # structures between two reports of progress

UNREADABLE = "no readable CIF"
SEVERAL = "several structures in one CIF"
FORMULA = "atoms that do not add up to the formula of the CIF"
DISORDERED = "disordered sites"
TOO_MANY = f"more than {MOST_ATOMS} atoms in the cell (its primitive cell may have fewer)"
UNKNOWN = "an unknown element"
NO_CELL = f"no Niggli cell with angles between {ANGLES[0]}° and {ANGLES[1]}°"

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_BLOCK = re.compile(r"^\s*data_", re.MULTILINE)  # as pymatgen splits a CIF
_KIND = re.compile(r"([A-Za-z]{1,2})(\d*\.?\d*[+-]?\d*)")  # Na, Na1+, Fe3+


def read_text_of(path: Path, limit: int = BYTES) -> str:
    """Return the text of a structure file. Invalid UTF-8, as in names of authors, is replaced."""
    return read_bytes(path, limit).decode("utf-8-sig", "replace")


# ---- structures ----------------------------------------------------------------------------------------------------


def _require_few(count: int) -> None:
    if not 0 <= count <= MOST:
        raise DataError(f"it has {count:,} atoms; the maximum is {MOST:,}")


def _check_cif(text: str) -> None:
    """Raise if a CIF has too many sites to parse, or what pymatgen would read as another crystal."""
    for block in need("pymatgen.io.cif").CifFile.from_str(text).data.values():
        symbols = block.data.get("_atom_site_type_symbol", [])
        symbols = [symbols] if isinstance(symbols, str) else symbols
        _require_few(len(symbols))
        for symbol in set(symbols):  # pymatgen guesses from their first letters
            match = _KIND.fullmatch(symbol)
            if match is None or not need("pymatgen.core").Element.is_valid_symbol(match[1].title()):
                raise DataError(f"'{symbol[:20]}' is not the symbol of an element")
        for edge in "abc":  # pymatgen takes the absolute volume of a cell of negative edges
            length = block.data.get(f"_cell_length_{edge}")
            if length is not None and not 0 < float(length.partition("(")[0]) < np.inf:
                raise DataError(f"its cell has an invalid length: {edge} = {length[:20]} Å")


def _cif(text: str) -> Iterator[Any]:
    parser = need("pymatgen.io.cif").CifParser
    starts = [match.start() for match in _BLOCK.finditer(text)]
    for begin, end in pairwise([*starts, len(text)]):
        block = text[begin:end]
        if len(starts) == 1 or "_atom_site" in block.lower():  # other blocks contain text
            _check_cif(block)
            yield from parser.from_str(block).parse_structures(primitive=False, on_error="raise")


def _poscar(text: str) -> Iterator[Any]:
    for line in text.splitlines()[5:7]:
        words = line.split("!")[0].split()
        if words and all(re.fullmatch(r"[+-]?\d{1,18}", word) for word in words):
            for count in (*map(int, words), sum(map(int, words))):
                _require_few(count)
    parsed = need("pymatgen.io.vasp.inputs").Poscar.from_str(text)
    if not parsed.true_names:
        raise DataError("it does not name its elements (VASP 4); add a line of symbols before the counts")
    yield parsed.structure


def _xyz(text: str) -> Iterator[Any]:
    for count in re.findall(r"^\s*(\d{4,})\s*$", text, re.MULTILINE):  # ASE reads as many lines, whether they exist
        _require_few(int(count[:18]))
    yield from need("ase.io").iread(io.StringIO(text), index=":", format="extxyz")


FORMATS: dict[str, Callable[[str], Iterator[Any]]] = {"cif": _cif, "poscar": _poscar, "xyz": _xyz}


def _plain(text: str) -> str:
    """Return a text as ASCII; raise if it contains control characters. Parsers would drop either, and read another
    element."""
    if match := _CONTROL.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise DataError(f"line {line} contains a control character ({match[0]!r}), so it is not a text file")
    return text.encode("ascii", "replace").decode()


def read_structures(kind: str, text: str, name: str = "structure") -> list[Candidate]:
    """Return the structures of a text as candidates; the `problem` of the last one says why the rest cannot be read.

    Arguments:
        kind: `"cif"`, `"poscar"` or `"xyz"`.
        text: The content of a file.
        name: The name of the candidate; several are named `name#0`, `name#1`, ….
    """
    found: list[Candidate] = []
    try:
        with quiet():
            for structure in FORMATS[kind](_plain(text)):
                found.append(_bounded(candidate_of(structure, name)))
        if not found:
            raise DataError("it contains no structure")
    except DataError as error:
        found.append(Candidate(name, problem=str(error)))
    except UsageError:  # pymatgen or ASE is missing
        raise
    except Exception as error:  # malformed files fail in many ways
        found.append(Candidate(name, problem=f"it cannot be read: {one_line(error)}"))
    return found if len(found) == 1 else [replace(one, name=f"{name}#{i}") for i, one in enumerate(found)]


def _bounded(candidate: Candidate) -> Candidate:
    if (atoms := len(candidate)) <= MOST:
        return candidate
    return replace(candidate, problem=f"it has {atoms:,} atoms; the maximum is {MOST:,}")


# ---- cells of training data ----------------------------------------------------------------------------------------


def nearly_niggli(lattice: Any, reduced: Any) -> bool:
    """Return whether a lattice is its Niggli cell up to a tolerance: equally short edges, in order, and angles of one
    kind (acute or obtuse).

    A small change of a cell can change its Niggli cell a lot, for example from angles of 60° to angles of 120°.
    """
    a, b, c = lattice.abc
    in_order = a <= b * (1 + SLACK) and b <= c * (1 + SLACK)
    cosines = np.cos(np.radians(lattice.angles))
    return bool(
        in_order
        and sum(lattice.abc) <= (1 + SLACK) * sum(reduced.abc)
        and (cosines.max() <= SLACK or cosines.min() >= -SLACK)
        and _in_range(np.array(lattice.angles))
    )


def _in_range(angles: np.ndarray) -> bool:
    return bool(((angles > ANGLES[0]) & (angles < ANGLES[1])).all() and has_volume(angles))


def primitive(structure: Any) -> tuple[Any, bool]:
    """Return the primitive cell of an ordered pymatgen structure, and whether the crystal has symmetry.

    A cell that is primitive already is returned unchanged. Inversion does not count as symmetry: it fixes no angles.
    """
    import spglib

    cell = (structure.lattice.matrix, structure.frac_coords, structure.atomic_numbers)
    found = spglib.get_symmetry_dataset(cell, symprec=SAME)
    symmetric = found is not None and found.number > 2
    made = spglib.find_primitive(cell, symprec=SAME)
    if made is None or len(made[2]) >= len(structure):
        return structure, symmetric
    lattice, coords, numbers = made
    return type(structure)(lattice, numbers, coords), symmetric


def cell_of(structure: Any, *, keep: bool = False) -> Cell | str:
    """Return the Niggli cell of a pymatgen structure, or the reason why it cannot be used.

    Arguments:
        structure: The structure.
        keep: Whether to make the cell primitive first, and to keep one that is nearly a Niggli cell, as a flow draws
            it. Drawn cells have no symmetry; one with symmetry comes from elsewhere and is reduced.
    """
    if not structure.is_ordered:
        return DISORDERED
    structure, symmetric = primitive(structure) if keep else (structure, False)
    if len(structure) > MOST_ATOMS:
        return TOO_MANY
    if not all(1 <= site.specie.Z <= ELEMENTS for site in structure):  # a dummy species has a large number
        return UNKNOWN
    try:
        reduced = structure.get_reduced_structure()
        lengths, angles = np.array(reduced.lattice.abc), np.array(reduced.lattice.angles)
    except Exception:  # flat and needle-like cells fail in many ways
        return NO_CELL
    if keep and not symmetric and nearly_niggli(structure.lattice, reduced.lattice):
        reduced = structure
        lengths, angles = np.array(reduced.lattice.abc), np.array(reduced.lattice.angles)
    coords = np.asarray(reduced.frac_coords) % 1.0
    fits = np.isfinite(coords).all() and np.isfinite(lengths).all() and (lengths > 0).all()
    if not fits or not _in_range(angles):
        return NO_CELL
    return Cell(np.array([site.specie.Z for site in reduced]), coords, lengths, angles)


def niggli(text: str, *, keep: bool = False) -> Cell | str:
    """Return the Niggli cell of the structure in a CIF, or the reason why it cannot be used.

    Arguments:
        text: The CIF.
        keep: Whether to keep a cell that is nearly a Niggli cell, and the order of the atoms in the file.
    """
    cif = need("pymatgen.io.cif")
    try:
        text = _plain(text)
        _check_cif(text)
        parser = cif.CifParser.from_str(text, check_cif=False)
        structures = parser.parse_structures(primitive=False, on_error="ignore")
        amiss = parser.check(structures[0]) or ""
        labels = next(iter(cif.CifFile.from_str(text).data.values())).data.get("_atom_site_label", []) if keep else []
    except Exception:  # malformed files fail in many ways
        return UNREADABLE
    if len(structures) > 1:
        return SEVERAL
    if amiss.startswith("Incorrect stoichiometry") or "from PMG structure" in amiss:  # such as missing hydrogen
        return FORMULA if structures[0].is_ordered else DISORDERED
    if not keep:
        return cell_of(structures[0])
    place = {label: i for i, label in enumerate(labels)}
    return cell_of(structures[0].from_sites(sorted(structures[0], key=lambda s: place.get(s.label, 0))), keep=True)


def cells(
    texts: Sequence[str], progress: Callable[[int, int], None] | None = None, *, keep: bool = False
) -> list[Cell | str]:
    """Return the Niggli cell of the structure in each CIF, or the reason why it cannot be used.

    Arguments:
        texts: The CIFs.
        progress: Called with the number done and the total.
        keep: Whether to keep cells that are nearly Niggli cells, as a flow draws them, and the order of their atoms.
    """
    outcomes: list[Cell | str] = []
    for text in texts:
        with quiet():  # of rounded coordinates and assumed symmetry; the check of the formula is decisive
            outcomes.append(UNREADABLE if len(text) > CIF_BYTES else niggli(text, keep=keep))
        if progress and (len(outcomes) % CHUNK == 0 or len(outcomes) == len(texts)):
            progress(len(outcomes), len(texts))
    return outcomes
