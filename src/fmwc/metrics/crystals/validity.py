"""Whether a structure could be one at all: distances, charges and density, each on its own."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from fmwc.data.crystals import ELEMENTS
from fmwc.metrics.crystals.candidates import Candidate, Key
from fmwc.metrics.crystals.extras import need, quiet
from fmwc.metrics.crystals.geometry import CLOSEST, neighbours, unmeasurable

__all__ = ["Validity", "balanced", "validity"]

OVERLAP = 0.5  # of the sum of two radii: nearer than that, atoms are inside one another
RADIUS = 1.5  # Å, of the heavy elements for which none is known
DENSITY = (0.01, 25.0)  # g/cm³; osmium has 22.6
SMALLEST = 0.1  # Å³, the least volume of a cell by CDVAE's rule
GRAMS = 1.66053907  # atomic mass units per Å³ in g/cm³


class Validity(NamedTuple):
    """The rules that a structure keeps. What cannot be measured is not kept.

    Attributes:
        distances: All atoms are further apart than half the sum of their radii.
        apart: CDVAE's rule: all atoms are more than 0.5 Å apart in a cell of at least 0.1 Å³.
        charge: Oxidation states can balance.
        density: Between 0.01 and 25 g/cm³.
    """

    distances: bool
    apart: bool
    charge: bool
    density: bool

    @property
    def valid(self) -> bool:
        """Distances, charge and density together."""
        return self.distances and self.charge and self.density


class _Element(NamedTuple):
    radius: float
    mass: float
    metal: bool
    states: tuple[int, ...]


@functools.lru_cache(maxsize=1)
def _table() -> tuple[_Element, ...]:
    """Of all elements, by Z; the first entry stands for none."""
    element = need("pymatgen.core").Element
    with quiet():  # pymatgen warns of every property that is not known
        rows = [element.from_Z(z) for z in range(1, ELEMENTS + 1)]
        return (
            _Element(0.0, 0.0, False, ()),
            *(
                _Element(
                    float(e.atomic_radius or e.atomic_radius_calculated or RADIUS),
                    float(e.atomic_mass),
                    bool(e.is_metal),
                    tuple(int(state) for state in {*e.common_oxidation_states, *e.oxidation_states}),
                )
                for e in rows
            ),
        )


def balanced(key: Key) -> bool:
    """Whether oxidation states, one an element of all that it is known in, can sum to zero.

    An element alone and an alloy of metals count as balanced; which element is the more electronegative is not looked
    at. The common states alone would refuse a third of the
    real crystals of MP-20; all known ones refuse a tenth.
    """
    table = _table()
    if len(key) == 1 or all(table[z].metal for z, _ in key):
        return True
    sums = {0}
    for z, count in key:
        sums = {total + count * state for total in sums for state in table[z].states}
    return 0 in sums


def validity(candidate: Candidate) -> Validity:
    """The rules that a structure keeps."""
    if candidate.problem or not candidate.known:
        return Validity(False, False, False, False)
    table, charge = _table(), balanced(candidate.key)
    if not (np.isfinite(candidate.cell).all() and np.isfinite(candidate.coords).all()):
        return Validity(False, False, charge, False)
    mass, volume = sum(table[z].mass for z in candidate.numbers), candidate.volume
    density = volume > 0 and DENSITY[0] <= GRAMS * mass / volume <= DENSITY[1]
    if unmeasurable(candidate):
        return Validity(False, False, charge, density)
    radii = np.array([table[z].radius for z in candidate.numbers])
    pairs = neighbours(candidate, max(CLOSEST, 2 * OVERLAP * radii.max()) + 1e-6)
    overlap = pairs.distance <= OVERLAP * (radii[pairs.centre] + radii[pairs.other])
    apart = volume >= SMALLEST and not bool((pairs.distance <= CLOSEST).any())
    return Validity(not bool(overlap.any()), apart, charge, density)
