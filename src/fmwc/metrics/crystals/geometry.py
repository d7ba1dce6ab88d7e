"""Distances in a periodic cell, and the cells that are refused before anything slow is tried on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fmwc.data.crystals import ELEMENTS
from fmwc.metrics.crystals.candidates import SYMBOLS, Candidate
from fmwc.metrics.crystals.extras import need

__all__ = ["CLOSEST", "Neighbours", "neighbours", "refusal", "unmeasurable"]

DENSEST = 2.0  # Å³ an atom; MP-20 begins at 5.8, and the number of neighbours grows with the inverse
EMPTIEST = 5000.0  # Å³ an atom; MP-20 ends at 202
THINNEST = 0.5  # Å between opposite faces; the number of images to look through grows with the inverse
NEEDLE = 50.0  # longest by shortest edge; MP-20 ends at 15
CLOSEST = 0.5  # Å; the bond of H₂, the shortest there is, has 0.74


class Neighbours(NamedTuple):
    """Ordered pairs of atoms within a distance: one entry a pair, each pair both ways."""

    centre: np.ndarray  # (E,)
    other: np.ndarray  # (E,)
    image: np.ndarray  # (E, 3) the cell that the other is in
    distance: np.ndarray  # (E,) Å


def neighbours(candidate: Candidate, cutoff: float) -> Neighbours:
    """All pairs within the cutoff. The cell must be measurable, else this may take all memory."""
    search = need("pymatgen.optimization.neighbors").find_points_in_spheres
    cell = np.ascontiguousarray(candidate.cell, dtype=float)
    places = np.ascontiguousarray((candidate.coords % 1.0) @ cell)
    found = search(places, places, r=float(cutoff), pbc=np.ones(3, np.int64), lattice=cell, tol=1e-8)
    centre, other, image, distance = (np.asarray(part) for part in found)
    itself = (centre == other) & (image == 0).all(-1)  # by index: a coincident pair of two atoms must stay
    return Neighbours(*(part[~itself] for part in (centre, other, image, distance)))


def unmeasurable(candidate: Candidate) -> str:
    """Why no distance can be measured in this cell at a bounded cost; empty if it can."""
    if candidate.problem:
        return candidate.problem
    if not len(candidate):
        return "it has no atoms"
    if not (np.isfinite(candidate.cell).all() and np.isfinite(candidate.coords).all()):
        return "its cell or coordinates are not finite, or its angles close no cell"
    each = candidate.volume / len(candidate)
    if each < DENSEST:
        return f"its cell has collapsed: {each:.3g} Å³ an atom"
    if each > EMPTIEST:
        return f"its cell is nearly empty: {each:.3g} Å³ an atom"
    height = 1 / np.linalg.norm(np.linalg.inv(candidate.cell), axis=0).max()
    if height < THINNEST:
        return f"its cell is flat: {height:.3g} Å thin"
    return ""


def refusal(candidate: Candidate, highest: int = ELEMENTS) -> str:
    """Why no energy can be asked for; empty if it can. `highest` is the last element that the model knows."""
    if reason := unmeasurable(candidate):
        return reason
    if not candidate.known:
        strange = next(int(z) for z in candidate.numbers if not 1 <= z <= ELEMENTS)
        return f"atomic number {strange} is none of the {ELEMENTS} elements"
    if (last := int(candidate.numbers.max())) > highest:
        return f"the model does not know {SYMBOLS[last - 1]}"
    edges = np.linalg.norm(candidate.cell, axis=1)
    if edges.max() > NEEDLE * edges.min():
        return f"its cell is a needle: edges of {edges.min():.3g} and {edges.max():.3g} Å"
    close = neighbours(candidate, CLOSEST)
    if len(close.distance):
        first = int(close.distance.argmin())
        i, j = int(close.centre[first]), int(close.other[first])
        both = f"{SYMBOLS[candidate.numbers[i] - 1]} and {SYMBOLS[candidate.numbers[j] - 1]} (atoms {i} and {j})"
        return f"{both} coincide: {close.distance[first]:.3g} Å apart"
    return ""
