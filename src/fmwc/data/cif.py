"""CIF files as Niggli cells: the parsing behind `fmwc.data.mp20`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from fmwc.data.crystals import ANGLES, ELEMENTS, pymatgen_needed
from fmwc.errors import DataError

__all__ = ["MOST_ATOMS", "Cell", "cell_of", "has_volume", "read", "read_all"]

MOST_ATOMS = 20  # in a cell; MP-20's bound
UNREADABLE = "no readable CIF"
SEVERAL = "several structures in one CIF"
FORMULA = "atoms that do not add up to the formula of the CIF"
DISORDERED = "disordered sites"
TOO_MANY = f"more than {MOST_ATOMS} atoms in the cell (its primitive cell may have fewer)"
STRANGE = f"an element that is none of the {ELEMENTS}"
NO_CELL = f"no Niggli cell with angles between {ANGLES[0]}° and {ANGLES[1]}°"
PAYS = 500  # structures, at 2 ms each, from which on a second process is worth its start
CHUNK = 50


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


def read(text: str) -> Cell | str:
    """The Niggli cell of the structure in a CIF, or why it cannot be used."""
    with pymatgen_needed(), warnings.catch_warnings():
        # Rounded coordinates, assumed symmetry, quoting: the formula below says whether the outcome is right.
        warnings.simplefilter("ignore")
        from pymatgen.io.cif import CifParser

        try:
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


def read_all(texts: Sequence[str], progress: Callable[[int, int], None] | None = None) -> list[Cell | str]:
    """`read` of each, in several processes where it pays."""
    with pymatgen_needed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pymatgen.io.cif  # noqa: F401  once, before the processes part
    found = []
    for outcome in _outcomes(texts):
        found.append(outcome)
        if progress and (len(found) % CHUNK == 0 or len(found) == len(texts)):
            progress(len(found), len(texts))
    return found


def _outcomes(texts: Sequence[str]) -> Iterator[Cell | str]:
    # By fork alone: other ways of starting run the user's script a second time, where it has no main guard.
    workers = min(len(os.sched_getaffinity(0)), 8) if sys.platform == "linux" else 1
    if workers == 1 or len(texts) < PAYS:
        yield from map(read, texts)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; torch's are idle, and no worker calls torch.
            warnings.simplefilter("ignore", DeprecationWarning)
            outcomes = pool.map(read, texts, chunksize=CHUNK)
        yield from outcomes
    except BrokenProcessPool as error:
        raise DataError("a process that reads CIFs was ended from outside; free some memory and try again") from error
    finally:
        pool.shutdown(cancel_futures=True)
