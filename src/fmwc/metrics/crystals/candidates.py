"""Structures to judge, as plain arrays, whatever they came from; one that cannot be used says why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fmwc.data.crystals import ELEMENTS, Crystals
from fmwc.data.parsers import SYMBOLS
from fmwc.errors import DataError
from fmwc.metrics.crystals.extras import need, quiet

__all__ = ["SYMBOLS", "Candidate", "Key", "candidates", "cell_matrix", "key_of", "plain"]

Key = tuple[tuple[int, int], ...]  # a reduced composition: (Z, how many), by Z


def key_of(numbers: Sequence[int] | np.ndarray) -> Key:
    """The reduced composition of some atoms.

    >>> key_of([11, 17, 11, 17])
    ((11, 1), (17, 1))
    """
    counts = Counter(int(z) for z in numbers)
    shared = math.gcd(*counts.values()) if counts else 1
    return tuple((z, counts[z] // shared) for z in sorted(counts))


def cell_matrix(lengths: np.ndarray, angles: np.ndarray) -> np.ndarray:  # (3,), (3,) -> (3, 3)
    """Rows a, b, c of the cell; NaN where the angles close no cell."""
    cosine, sine = np.cos(np.radians(angles)), np.sin(np.radians(angles))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        y = (cosine[0] - cosine[1] * cosine[2]) / sine[2]
        z = np.sqrt(1 - cosine[1] ** 2 - y**2)
        unit = np.array([[1.0, 0, 0], [cosine[2], sine[2], 0], [cosine[1], y, z]])
        return lengths[:, None] * unit


@dataclass(frozen=True)
class Candidate:
    """Creates a structure to judge.

    Attributes:
        name: What it is called.
        numbers: Atomic numbers, `(A,)`.
        coords: Fractional coordinates, `(A, 3)`.
        cell: a, b, c in ångström, one a row, `(3, 3)`.
        problem: Why it cannot be judged; empty if it can.
    """

    name: str
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    coords: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    cell: np.ndarray = field(default_factory=lambda: np.full((3, 3), np.nan))
    problem: str = ""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def known(self) -> bool:
        """Whether it has atoms, all of them of one of the 118 elements."""
        return len(self) > 0 and bool(((self.numbers >= 1) & (self.numbers <= ELEMENTS)).all())

    @property
    def key(self) -> Key:
        return key_of(self.numbers)

    @property
    def volume(self) -> float:
        return float(abs(np.linalg.det(self.cell)))

    @property
    def formula(self) -> str:
        """The reduced formula, as chemists order it; empty where an element is none."""
        if not self.known:
            return ""
        with quiet():  # pymatgen warns of noble gases, which have no electronegativity
            composition = need("pymatgen.core").Composition({SYMBOLS[z - 1]: count for z, count in self.key})
            return str(composition.reduced_formula)

    def structure(self) -> Any:
        """It as a pymatgen structure."""
        core = need("pymatgen.core")
        return core.Structure(core.Lattice(self.cell), self.numbers.tolist(), self.coords)

    def atoms(self) -> Any:
        """It as ASE's atoms."""
        return need("ase").Atoms(numbers=self.numbers, scaled_positions=self.coords, cell=self.cell, pbc=True)


def plain(structure: Any, name: str) -> Candidate:
    """The candidate of a pymatgen structure or of ASE's atoms."""
    if hasattr(structure, "get_scaled_positions"):
        if abs(np.linalg.det(structure.cell[:])) < 1e-9:
            return Candidate(name, problem="it has no cell, so it is no crystal")
        numbers, coords, cell = structure.numbers, structure.get_scaled_positions(wrap=False), structure.cell[:]
    elif hasattr(structure, "is_ordered"):
        if not structure.is_ordered:
            return Candidate(name, problem="sites are shared by several elements or partly empty; give an ordered one")
        numbers, coords, cell = [s.specie.Z for s in structure], structure.frac_coords, structure.lattice.matrix
    else:
        raise DataError(f"a structure is of pymatgen or ASE, or a row of Crystals, not {type(structure).__name__}")
    return Candidate(name, np.array(numbers, int), np.array(coords, float).reshape(-1, 3), np.array(cell, float))


def candidates(structures: Crystals | Sequence[Any]) -> list[Candidate]:
    """The candidates of crystals, pymatgen structures, ASE's atoms, or candidates already."""
    if isinstance(structures, Crystals):
        lengths, angles = structures.lengths.double().numpy(), structures.angles.double().numpy()
        coords, numbers = structures.coords.double().numpy(), structures.numbers.numpy()
        return [
            Candidate(name, numbers[i, :count], coords[i, :count], cell_matrix(lengths[i], angles[i]))
            for i, (name, count) in enumerate(zip(structures.names, structures.atoms.tolist(), strict=True))
        ]
    width = max(5, len(str(len(structures))))
    return [s if isinstance(s, Candidate) else plain(s, f"{i:0{width}d}") for i, s in enumerate(structures)]
