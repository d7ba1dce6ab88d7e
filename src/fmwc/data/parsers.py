"""Parsers of structure files. They run in a process of their own, which `fmwc.data.structures` starts and bounds.

This file imports nothing of fmwc: it is run as a program, which must start quickly and take little memory.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np

__all__ = ["ANGLES", "ELEMENTS", "MOST_ATOMS", "SYMBOLS", "Cell", "cell_of", "has_volume", "niggli", "parse"]

PERIODIC = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au "
    "Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts "
    "Og"
)
SYMBOLS = tuple(PERIODIC.split())  # of Z − 1
ELEMENTS = len(SYMBOLS)
ISOTOPES = ("D", "T")  # of hydrogen, which CIFs name
ANGLES = (59.9, 120.1)  # degrees; a Niggli cell's lie between 60 and 120
MOST_ATOMS = 20  # of a cell to train on; MP-20's bound
LONGEST = 10_000.0  # Å of an edge
STRUCTURES = 1_000_000  # of one file

OUT_OF_MEMORY = "reading it takes more memory than one file may"
MEMORY_CODE = 77  # the exit code of a process that has none left
UNREADABLE = "no readable CIF"
SEVERAL = "several structures in one CIF"
FORMULA = "atoms that do not add up to the formula of the CIF"
DISORDERED = "disordered sites"
TOO_MANY = f"more than {MOST_ATOMS} atoms in the cell (its primitive cell may have fewer)"
STRANGE = f"an element that is none of the {ELEMENTS}"
NO_CELL = f"no Niggli cell with angles between {ANGLES[0]}° and {ANGLES[1]}°"

Row = dict[str, Any]  # numbers, coords and cell of a structure; or the problem with it


class Unusable(ValueError):
    """A structure that was read and cannot be used; the message says why."""


# ---- what any file must hold -------------------------------------------------------------------------------------

_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
_BLOCK = re.compile(r"^\s*data_", re.MULTILINE)  # as pymatgen splits a CIF
_EDGE = re.compile(r"^\s*_cell_length_([abc])\s+(\S+)", re.MULTILINE | re.IGNORECASE)
_KIND = re.compile(r"([A-Za-z]{1,2})(\d*\.?\d*[+-]?\d*)")  # Na, Na1+, Fe3+


def check_text(text: str) -> None:
    """Raise where text holds control characters: parsers skip them, and read another element."""
    if found := _CONTROL.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise Unusable(f"line {line} holds a control character ({found[0]!r}), so it is not a text file")


def check_symbol(symbol: str) -> None:
    """Raise where a symbol, with its charge, is not an element's."""
    found = _KIND.fullmatch(symbol)
    if found is None or found[1].title() not in SYMBOLS + ISOTOPES:
        raise Unusable(f"'{symbol[:20]}' is not the symbol of an element")


def check_row(row: Row, most: int) -> Row:
    """Raise where a structure has too many atoms, or no finite cell of positive volume."""
    if len(row["numbers"]) > most:
        raise Unusable(f"it has {len(row['numbers']):,} atoms; at most {most:,} are read")
    cell = np.asarray(row["cell"], float).reshape(3, 3)
    coords = np.asarray(row["coords"], float)
    if not np.isfinite(cell).all() or not np.isfinite(coords).all() or np.abs(coords).max(initial=0) > 1e6:
        raise Unusable("its cell or coordinates are not finite numbers, or its angles close no cell")
    edges = np.linalg.norm(cell, axis=1)
    if not (edges > 0).all() or edges.max() > LONGEST:
        raise Unusable(f"its cell has edges of {edges.min():.3g} to {edges.max():.3g} Å")
    if abs(np.linalg.det(cell)) < 1e-9:
        raise Unusable("it has no cell of positive volume, so it is no crystal")
    return row


def row_of(structure: Any) -> Row:
    """The arrays of a pymatgen structure or of ASE's atoms."""
    if hasattr(structure, "get_scaled_positions"):
        cell = structure.cell[:]
        if abs(np.linalg.det(cell)) < 1e-9:
            raise Unusable("it has no cell, so it is no crystal")
        numbers, coords = structure.numbers.tolist(), structure.get_scaled_positions(wrap=False)
    else:
        if not structure.is_ordered:
            raise Unusable("sites are shared by several elements or partly empty; give an ordered one")
        numbers = [int(site.specie.Z) for site in structure]
        coords, cell = structure.frac_coords, structure.lattice.matrix
    return {"numbers": numbers, "coords": np.asarray(coords).tolist(), "cell": np.asarray(cell).tolist()}


# ---- formats -----------------------------------------------------------------------------------------------------


def check_cif(text: str, most: int) -> None:
    """Raise where a block of a CIF has too many sites to parse, or a cell without a length."""
    sites, count = False, 0
    for line in text.splitlines():
        words = line.strip().lower()
        if words.startswith(("_", "loop_", "data_")):
            sites, count = words.startswith("_atom_site_"), 0
        elif sites and words:
            count += 1
            if count > most:
                raise Unusable(f"it has more than {most:,} sites; structures of as many atoms are read")
            if not line.isascii():
                raise Unusable(f"'{line.strip()[:20]}' does not name an element")
    for edge, value in _EDGE.findall(text):
        try:
            length = float(value.partition("(")[0])
        except ValueError:
            continue  # the parser will say what is wrong with it
        if not 0 < length <= LONGEST:
            raise Unusable(f"its cell has the length {edge} = {value[:20]} Å")


def cif(text: str, most: int) -> Iterator[Any]:
    from pymatgen.io.cif import CifFile, CifParser

    starts = [found.start() for found in _BLOCK.finditer(text)]
    for begin, end in pairwise([*starts, len(text)]):
        block = text[begin:end]
        check_cif(block, most)
        for found in CifFile.from_str(block).data.values():
            kinds = found.data.get("_atom_site_type_symbol", [])
            for symbol in {kinds} if isinstance(kinds, str) else set(kinds):
                check_symbol(symbol)
        if len(starts) == 1 or "_atom_site" in block.lower():  # other blocks hold text
            yield from CifParser.from_str(block).parse_structures(primitive=False, on_error="raise")


def poscar(text: str, most: int) -> Iterator[Any]:
    from pymatgen.io.vasp.inputs import Poscar

    lines = text.splitlines()
    for line in lines[5:7]:
        words = line.split("!")[0].split()
        if words and all(re.fullmatch(r"[+-]?\d+", word) for word in words):
            counts = [int(word) if len(word) < 10 else 10**10 for word in words]
            if min(counts) < 0 or sum(counts) > most:
                raise Unusable(f"it announces {' '.join(words)[:40]} atoms; 1 to {most:,} are read")
            if sum(counts) > len(lines):
                raise Unusable(f"cut off: {sum(counts)} atoms are announced, and it has {len(lines)} lines")
            break
    found = Poscar.from_str(text)
    if not found.true_names:
        raise Unusable("it does not name its elements (VASP 4); add a line of symbols before the counts")
    yield found.structure


def xyz(text: str, most: int) -> Iterator[Any]:
    """Frame by frame, so that a broken one leaves those before it."""
    from ase.io import read

    lines = text.splitlines(keepends=True)
    start = 0
    while start < len(lines):
        first = lines[start].strip()
        if not first:
            start += 1
            continue
        if not re.fullmatch(r"\d{1,9}", first):
            raise Unusable(f"line {start + 1} is '{first[:20]}' in place of a number of atoms")
        if (count := int(first)) > most:
            raise Unusable(f"line {start + 1} announces {count:,} atoms; at most {most:,} are read")
        end = start + 2 + count
        if end > len(lines):
            raise Unusable(f"cut off: {count} atoms are announced, {max(0, len(lines) - start - 2)} are there")
        yield read(io.StringIO("".join(lines[start:end])), format="extxyz")
        start = end


FORMATS: dict[str, Callable[[str, int], Iterator[Any]]] = {"cif": cif, "poscar": poscar, "xyz": xyz}


def parse(kind: str, text: str, most: int) -> Iterator[Row]:
    """Each structure of a text; the last row may be a problem, after which nothing could be read."""
    count = 0
    try:
        check_text(text)
        for structure in FORMATS[kind](text, most):
            if count == STRUCTURES:
                raise Unusable(f"it holds more than {STRUCTURES:,} structures; split it")
            count += 1
            try:
                yield check_row(row_of(structure), most)
            except Unusable as error:  # this one alone
                yield {"problem": str(error)}
    except ImportError:
        raise
    except MemoryError:
        yield {"problem": OUT_OF_MEMORY}
    except Unusable as error:
        yield {"problem": str(error)}
    except Exception as error:  # parsers fail in many ways
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
        yield {"problem": f"it cannot be read: {words}"}
    else:
        if not count:
            yield {"problem": "there is no structure in it"}


# ---- cells to train on -------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One structure, its lattice by lengths and angles alone, as CDVAE's preprocessing has it."""

    numbers: np.ndarray  # (A,)
    coords: np.ndarray  # (A, 3) in [0, 1]
    lengths: np.ndarray  # (3,) Å
    angles: np.ndarray  # (3,) degrees


def has_volume(angles: np.ndarray) -> np.ndarray:  # (*, 3) -> (*)
    """Whether three angles can meet in a corner: (V/abc)² = 1 + 2 cos α cos β cos γ − Σ cos² is above 0."""
    cosines = np.cos(np.radians(np.asarray(angles, np.float64)))
    return 1 + 2 * cosines.prod(-1) - (cosines**2).sum(-1) > 1e-6


def cell_of(structure: Any) -> Cell | str:
    """The Niggli cell of a pymatgen structure, or why it cannot be used."""
    if not structure.is_ordered:
        return DISORDERED
    if len(structure) > MOST_ATOMS:
        return TOO_MANY
    if not all(1 <= site.specie.Z <= ELEMENTS for site in structure):  # a dummy has some large number
        return STRANGE
    try:
        reduced = structure.get_reduced_structure()
        lengths, angles = np.array(reduced.lattice.abc), np.array(reduced.lattice.angles)
    except Exception:  # flat and needle-like cells fail in ways of their own
        return NO_CELL
    coords = np.asarray(reduced.frac_coords) % 1.0
    fits = np.isfinite(coords).all() and np.isfinite(lengths).all() and (lengths > 0).all()
    if not fits or not ((angles > ANGLES[0]) & (angles < ANGLES[1])).all() or not has_volume(angles):
        return NO_CELL
    return Cell(np.array([site.specie.Z for site in reduced]), coords, lengths, angles)


def niggli(text: str) -> Cell | str:
    """The Niggli cell of the structure in a CIF, or why it cannot be used."""
    from pymatgen.io.cif import CifParser

    with warnings.catch_warnings():
        # Rounded coordinates, assumed symmetry, quoting: the formula below says whether the outcome is right.
        warnings.simplefilter("ignore")
        try:
            check_text(text)
            check_cif(text, 50 * MOST_ATOMS)
            parser = CifParser.from_str(text, check_cif=False)
            structures = parser.parse_structures(primitive=False, on_error="ignore")
            amiss = parser.check(structures[0]) or ""
        except Exception:  # every malformed file fails in its own way
            return UNREADABLE
        if len(structures) > 1:
            return SEVERAL
        if amiss.startswith("Incorrect stoichiometry") or "from PMG structure" in amiss:  # such as missing hydrogen
            return FORMULA if structures[0].is_ordered else DISORDERED
        return cell_of(structures[0])


# ---- the program -------------------------------------------------------------------------------------------------


def send(stream: BinaryIO, message: Any) -> None:
    content = json.dumps(message).encode()
    stream.write(len(content).to_bytes(8, "little") + content)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message; None at the end."""
    head = stream.read(8)
    content = stream.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    return json.loads(content) if content else None


def bound_memory(more: int) -> None:
    """Limit what this process may take beyond what it has, where the platform can."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = held + more
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    except (ImportError, OSError, ValueError):
        return


LIBRARIES = {
    "niggli": "pymatgen.io.cif",
    "cif": "pymatgen.io.cif",
    "poscar": "pymatgen.io.vasp.inputs",
    "xyz": "ase.io.extxyz",
}


def serve(requests: BinaryIO, answers: BinaryIO, memory: int) -> None:
    """Answer requests until there are no more: rows as they are read, then an end."""
    warnings.simplefilter("ignore")
    ready: set[str] = set()
    while (request := receive(requests)) is not None:
        kind, text, most = request["kind"], request["text"], request["most"]
        try:
            if kind not in ready:
                importlib.import_module(LIBRARIES[kind])
                bound_memory(memory)  # beyond what the libraries take
                ready.add(kind)
            if kind == "niggli":
                found = niggli(text)
                send(answers, found if isinstance(found, str) else [part.tolist() for part in found])
            else:
                for row in parse(kind, text, most):
                    send(answers, row)
            send(answers, {"end": ""})
        except ImportError as error:
            send(answers, {"end": str(error) or type(error).__name__})


if __name__ == "__main__":
    import os

    own = os.fdopen(os.dup(1), "wb")  # what libraries print goes nowhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        serve(sys.stdin.buffer, own, int(sys.argv[1]))
    except MemoryError:  # while a request was read
        os._exit(MEMORY_CODE)
