"""Parse structure files, in a separate process that `fmwc.crystals.sandbox` starts and limits.

pymatgen and ASE parse the files. Before parsing, this module checks that a file cannot take all time or memory; after
parsing, that it describes a crystal. It does not import fmwc, so that the process starts quickly.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ANGLES", "ELEMENTS", "MOST_ATOMS", "Cell", "Row", "Unusable", "cell_of", "has_volume", "niggli", "row_of"]

ELEMENTS = 118
ANGLES = (59.9, 120.1)  # degrees; the angles of a Niggli cell lie between 60 and 120
SLACK = 0.05  # tolerance of `nearly_niggli`, for ratios of lengths and for cosines
SAME = 0.01  # Å; atoms of a supercell may differ this much from their copies, because files hold rounded numbers
MOST_ATOMS = 20  # per cell of the training data, as in MP-20
LONGEST = 10_000.0  # maximum length of an edge in Å
STRUCTURES = 1_000_000  # maximum per file

OUT_OF_MEMORY = "reading it takes more memory than the limit per file"
MEMORY_CODE = 77  # exit code of a process that ran out of memory
UNREADABLE = "no readable CIF"
SEVERAL = "several structures in one CIF"
FORMULA = "atoms that do not add up to the formula of the CIF"
DISORDERED = "disordered sites"
TOO_MANY = f"more than {MOST_ATOMS} atoms in the cell (its primitive cell may have fewer)"
UNKNOWN = "an unknown element"
NO_CELL = f"no Niggli cell with angles between {ANGLES[0]}° and {ANGLES[1]}°"

Row = dict[str, Any]  # `numbers`, `coords` and `cell` of a structure, or its `problem`


class Unusable(ValueError):
    """The structure cannot be used, for the reason in the message."""


# ---- checks before and after parsing -----------------------------------------------------------------------------

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_BLOCK = re.compile(r"^\s*data_", re.MULTILINE)  # as pymatgen splits a CIF
_EDGE = re.compile(r"^\s*_cell_length_([abc])\s+(\S+)", re.MULTILINE | re.IGNORECASE)
_KIND = re.compile(r"([A-Za-z]{1,2})(\d*\.?\d*[+-]?\d*)")  # Na, Na1+, Fe3+


def check_text(text: str) -> None:
    """Raise if the text contains control characters. Parsers would skip them and read another element."""
    if match := _CONTROL.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise Unusable(f"line {line} contains a control character ({match[0]!r}), so it is not a text file")


def check_symbol(symbol: str) -> None:
    """Raise unless this is the symbol of an element, or D or T, with or without a charge."""
    from pymatgen.core import Element

    match = _KIND.fullmatch(symbol)
    if match is None or not Element.is_valid_symbol(match[1].title()):
        raise Unusable(f"'{symbol[:20]}' is not the symbol of an element")


def check_row(row: Row, most: int) -> Row:
    """Return the row; raise if it has too many atoms, or its cell is not finite with a positive volume."""
    if len(row["numbers"]) > most:
        raise Unusable(f"it has {len(row['numbers']):,} atoms; the maximum is {most:,}")
    cell = np.asarray(row["cell"], float).reshape(3, 3)
    coords = np.asarray(row["coords"], float)
    if not np.isfinite(cell).all() or not np.isfinite(coords).all() or np.abs(coords).max(initial=0) > 1e6:
        raise Unusable("its cell or coordinates are not finite numbers, or its angles do not form a cell")
    edges = np.linalg.norm(cell, axis=1)
    if not (edges > 0).all() or edges.max() > LONGEST:
        raise Unusable(
            f"its cell has edges of {edges.min():.3g} to {edges.max():.3g} Å; the limits are 0 and {LONGEST:g} Å"
        )
    if abs(np.linalg.det(cell)) < 1e-9:
        raise Unusable("its cell has no volume, so it is not a crystal")
    return row


def row_of(structure: Any) -> Row:
    """Return the arrays of a pymatgen structure or of ASE atoms."""
    if hasattr(structure, "get_scaled_positions"):
        cell = structure.cell[:]
        if abs(np.linalg.det(cell)) < 1e-9:
            raise Unusable("it has no cell, so it is not a crystal")
        numbers, coords = structure.numbers.tolist(), structure.get_scaled_positions(wrap=False)
    else:
        if not structure.is_ordered:
            raise Unusable("sites are partially occupied or shared by several elements; give an ordered structure")
        numbers = [int(site.specie.Z) for site in structure]
        coords, cell = structure.frac_coords, structure.lattice.matrix
    return {"numbers": numbers, "coords": np.asarray(coords).tolist(), "cell": np.asarray(cell).tolist()}


# ---- formats -----------------------------------------------------------------------------------------------------


def check_cif(text: str, most: int) -> None:
    """Raise if a CIF block has too many sites to parse, or a cell edge of invalid length."""
    sites, count = False, 0
    for line in text.splitlines():
        words = line.strip().lower()
        if words.startswith(("_", "loop_", "data_")):
            sites, count = words.startswith("_atom_site_"), 0
        elif sites and words:
            count += 1
            if count > most:
                raise Unusable(f"it has more than {most:,} sites, the maximum")
            if not line.isascii():
                raise Unusable(f"'{line.strip()[:20]}' does not name an element")
    for edge, value in _EDGE.findall(text):
        try:
            length = float(value.partition("(")[0])
        except ValueError:
            continue  # the parser reports it
        if not 0 < length <= LONGEST:
            raise Unusable(f"its cell has an invalid length: {edge} = {value[:20]} Å")


def cif(text: str, most: int) -> Iterator[Any]:
    """Yield the structures of a CIF, one block at a time."""
    from pymatgen.io.cif import CifFile, CifParser

    starts = [match.start() for match in _BLOCK.finditer(text)]
    for begin, end in pairwise([*starts, len(text)]):
        block = text[begin:end]
        check_cif(block, most)
        for part in CifFile.from_str(block).data.values():
            symbols = part.data.get("_atom_site_type_symbol", [])
            for symbol in {symbols} if isinstance(symbols, str) else set(symbols):
                check_symbol(symbol)
        if len(starts) == 1 or "_atom_site" in block.lower():  # other blocks contain text
            yield from CifParser.from_str(block).parse_structures(primitive=False, on_error="raise")


def poscar(text: str, most: int) -> Iterator[Any]:
    """Yield the structure of a POSCAR, after checking the declared numbers of atoms."""
    from pymatgen.io.vasp.inputs import Poscar

    lines = text.splitlines()
    for line in lines[5:7]:
        words = line.split("!")[0].split()
        if words and all(re.fullmatch(r"[+-]?\d+", word) for word in words):
            counts = [int(word) if len(word) < 10 else 10**10 for word in words]
            if min(counts) < 0 or sum(counts) > most:
                raise Unusable(f"it declares {' '.join(words)[:40]} atoms; the total must be 1 to {most:,}")
            if sum(counts) > len(lines):
                raise Unusable(f"truncated: it declares {sum(counts)} atoms, but has {len(lines)} lines")
            break
    parsed = Poscar.from_str(text)
    if not parsed.true_names:
        raise Unusable("it does not name its elements (VASP 4); add a line of symbols before the counts")
    yield parsed.structure


def xyz(text: str, most: int) -> Iterator[Any]:
    """Yield the frames of an extended XYZ file. Frames before a broken one are kept."""
    from ase.io import read

    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines):
        first = lines[start].strip()
        if not first:
            start += 1
            continue
        if not re.fullmatch(r"\d{1,9}", first):
            raise Unusable(f"line {start + 1} must be a number of atoms, not '{first[:20]}'")
        if (count := int(first)) > most:
            raise Unusable(f"line {start + 1} declares {count:,} atoms; the maximum is {most:,}")
        end = start + 2 + count
        if end > len(lines):
            raise Unusable(f"truncated: it declares {count} atoms, but has {max(0, len(lines) - start - 2)}")
        yield read(io.StringIO("".join(lines[start:end])), format="extxyz")
        start = end


FORMATS: dict[str, Callable[[str, int], Iterator[Any]]] = {"cif": cif, "poscar": poscar, "xyz": xyz}


def parse(kind: str, text: str, most: int) -> Iterator[Row]:
    """Yield each structure of a text. A problem with the text itself ends the iteration."""
    count = 0
    try:
        check_text(text)
        for structure in FORMATS[kind](text, most):
            if count == STRUCTURES:
                raise Unusable(f"it contains more than {STRUCTURES:,} structures; split it")
            count += 1
            try:
                yield check_row(row_of(structure), most)
            except Unusable as error:  # affects only this structure
                yield {"problem": str(error)}
    except MemoryError:
        yield {"problem": OUT_OF_MEMORY}
    except Unusable as error:
        yield {"problem": str(error)}
    except Exception as error:  # malformed files fail in many ways
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
        yield {"problem": f"it cannot be read: {words}"}
    else:
        if not count:
            yield {"problem": "it contains no structure"}


# ---- cells of training data --------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A structure whose lattice is given by lengths and angles, as in CDVAE's preprocessing."""

    numbers: np.ndarray  # (A,)
    coords: np.ndarray  # (A, 3) in [0, 1]
    lengths: np.ndarray  # (3,) Å
    angles: np.ndarray  # (3,) degrees


def has_volume(angles: np.ndarray) -> np.ndarray:  # (*, 3) -> (*)
    """Return whether three angles form a cell: (V/abc)² = 1 + 2 cos α cos β cos γ − Σ cos² must be positive."""
    cosines = np.cos(np.radians(np.asarray(angles, np.float64)))
    return 1 + 2 * cosines.prod(-1) - (cosines**2).sum(-1) > 1e-6


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
    from pymatgen.io.cif import CifFile, CifParser

    with warnings.catch_warnings():
        # Warnings concern rounded coordinates, assumed symmetry and quoting; the check of the formula is decisive.
        warnings.simplefilter("ignore")
        try:
            check_text(text)
            check_cif(text, 50 * MOST_ATOMS)
            parser = CifParser.from_str(text, check_cif=False)
            structures = parser.parse_structures(primitive=False, on_error="ignore")
            amiss = parser.check(structures[0]) or ""
            labels = next(iter(CifFile.from_str(text).data.values())).data.get("_atom_site_label", []) if keep else []
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


# ---- the program -------------------------------------------------------------------------------------------------


def bound_memory(more: int) -> None:
    """Limit the memory of this process to `more` bytes beyond its current use, if the platform supports it."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + more
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    except (ImportError, OSError, ValueError):
        return


def answers(kind: str, text: str, most: int) -> Iterator[Any]:
    """Yield the answers to a request: one row per structure, or one cell for the kinds `niggli` and `own cell`."""
    if kind in FORMATS:
        yield from parse(kind, text, most)
        return
    cell = niggli(text, keep=kind == "own cell")
    yield cell if isinstance(cell, str) else [part.tolist() for part in cell]


def main() -> None:
    """Answer requests with JSON lines: one line per structure as it is read, then one with `end`."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what libraries print
    warnings.simplefilter("ignore")
    missing = ""
    try:
        for library in ("ase.io.extxyz", "pymatgen.io.cif", "pymatgen.io.vasp.inputs"):
            importlib.import_module(library)
    except ImportError as error:
        missing = str(error) or type(error).__name__

    def answer(message: Any) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    try:
        bound_memory(int(sys.argv[1]))  # in addition to the libraries
        for line in sys.stdin.buffer:
            for message in () if missing else answers(**json.loads(line)):
                answer(message)
            answer({"end": missing})
    except MemoryError:  # while reading a request
        os._exit(MEMORY_CODE)


if __name__ == "__main__":
    main()
