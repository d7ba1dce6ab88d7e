"""Validity, uniqueness, novelty and stability of a set of structures, one row per structure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fmwc.crystals.energy import Calculator, Progress, calculator, energies
from fmwc.crystals.energy import relax as relax_one
from fmwc.crystals.hull import Hull, hull_for
from fmwc.crystals.matching import Known, unique
from fmwc.crystals.structures import (
    CLOSEST,
    ELEMENTS,
    Candidate,
    Crystals,
    Key,
    candidates,
    need,
    neighbours,
    quiet,
    refusal,
    unmeasurable,
)
from fmwc.errors import UsageError

__all__ = ["METASTABLE", "STABLE", "Judgement", "Validity", "balanced", "judge", "validity"]


# ---- validity --------------------------------------------------------------------------------------------------------
# Rules that a physically plausible structure keeps: distances, charges and density.

OVERLAP = 0.5  # of the sum of two radii: atoms that are closer overlap
RADIUS = 1.5  # Å, of heavy elements whose radius is unknown
DENSITY = (0.01, 25.0)  # g/cm³; osmium has 22.6
SMALLEST = 0.1  # Å³, the least volume of a cell by CDVAE's rule
GRAMS = 1.66053907  # atomic mass units per Å³ in g/cm³


class Validity(NamedTuple):
    """The rules that a structure keeps. A rule that cannot be evaluated is not kept.

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


@functools.lru_cache(maxsize=ELEMENTS)
def _element(z: int) -> _Element:
    with quiet():  # pymatgen warns of every unknown property
        e = need("pymatgen.core").Element.from_Z(z)
        return _Element(
            float(e.atomic_radius or e.atomic_radius_calculated or RADIUS),
            float(e.atomic_mass),
            bool(e.is_metal),
            tuple(int(state) for state in {*e.common_oxidation_states, *e.oxidation_states}),
        )


def balanced(key: Key) -> bool:
    """Return whether oxidation states, one of all known ones per element, can sum to zero.

    Pure elements and alloys of metals count as balanced; electronegativities are ignored. The common states alone would
    refuse a third of the real crystals of MP-20; all known ones refuse a tenth.
    """
    if len(key) == 1 or all(_element(z).metal for z, _ in key):
        return True
    sums = {0}
    for z, count in key:
        sums = {total + count * state for total in sums for state in _element(z).states}
    return 0 in sums


def validity(candidate: Candidate) -> Validity:
    """Return the rules that a structure keeps."""
    if candidate.problem or not candidate.known:
        return Validity(False, False, False, False)
    charge = balanced(candidate.key)
    if not candidate.finite:
        return Validity(False, False, charge, False)
    those = [_element(int(z)) for z in candidate.numbers]
    mass, volume = sum(one.mass for one in those), candidate.volume
    density = volume > 0 and DENSITY[0] <= GRAMS * mass / volume <= DENSITY[1]
    if unmeasurable(candidate):
        return Validity(False, False, charge, density)
    radii = np.array([one.radius for one in those])
    pairs = neighbours(candidate, max(CLOSEST, 2 * OVERLAP * radii.max()) + 1e-6)
    overlap = pairs.distance <= OVERLAP * (radii[pairs.centre] + radii[pairs.other])
    apart = volume >= SMALLEST and not bool((pairs.distance <= CLOSEST).any())
    return Validity(not bool(overlap.any()), apart, charge, density)


# ---- judge -----------------------------------------------------------------------------------------------------------

STABLE = 1e-5  # eV/atom above the hull: 0, but for the rounding of single precision (up to 4e-6)
METASTABLE = 0.1
SHARES = (
    "distances_ok", "apart_ok", "charge_ok", "density_ok", "valid", "unique", "novel", "stable", "metastable", "sun",
    "msun",
)  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """The judgement of a set of structures.

    Attributes:
        columns: One list per column, one entry per structure, in the given order. A missing number is NaN; what was
            not asked for (novelty without a training set) is None.
        candidates: The structures, relaxed if that was asked for.
    """

    columns: dict[str, list[Any]]
    candidates: tuple[Candidate, ...]

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    @property
    def good(self) -> np.ndarray:
        """Which structures are metastable, the paper's success; those that could not be judged are not."""
        return np.array(self["metastable"], bool)

    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def summary(self) -> dict[str, Any]:
        """Return counts and shares over all structures, and mean energies above the hull over those that have one."""
        total = len(self)
        above = np.array(self["e_above_hull"], float)
        judged = above[np.isfinite(above)]
        found: dict[str, Any] = {
            "structures": total,
            "problems": sum(bool(problem) for problem in self["problem"]),
            "judged": len(judged),
            "mean_e_above_hull": float(judged.mean()) if len(judged) else math.nan,
            "median_e_above_hull": float(np.median(judged)) if len(judged) else math.nan,
        }
        for name in SHARES:
            known = [value for value in self[name] if value is not None]
            count = sum(known) if len(known) == total else None
            found[name] = count
            found[f"{name}_share"] = None if count is None else count / total if total else math.nan
        return found


def _all(*columns: list[Any]) -> list[bool | None]:
    """Combine columns by "and"; None is unknown, and False decides in any case."""
    rows = zip(*columns, strict=True)
    return [False if any(v is False for v in row) else None if None in row else True for row in rows]


def judge(
    structures: Crystals | Sequence[Any],
    *,
    calculator: str | Calculator = "chgnet",
    hull: Hull | None = None,
    training: Crystals | Sequence[Any] | Known | None = None,
    relax: int = 0,
    progress: Progress | None = None,
) -> Judgement:
    """Judge a set of structures.

    A structure is `stable` on or below the hull, `metastable` up to 0.1 eV/atom above it, `unique` if it is the first
    of its kind in the set, `novel` if it is not in the training set. `sun` combines stable, unique and novel, and
    `msun` metastable, unique and novel; neither requires validity. Structures that cannot be judged have a `problem`
    and are none of these.

    Arguments:
        structures: Crystals, pymatgen structures, ASE atoms or candidates.
        calculator: The energy model or its name.
        hull: The hull of energies by the same model; by default that of `hull_for`.
        training: The training set; without it novelty is not judged.
        relax: The number of steps by which each structure is relaxed first.
        progress: Called with the stage, the number done and the total.
    """
    if relax < 0:
        raise UsageError(f"relax is the number of steps, 0 for no relaxation, not {relax}")
    used = _load(calculator) if isinstance(calculator, str) else calculator
    hull = hull_for(used.name, progress=progress) if hull is None else hull
    if hull.model != used.name:
        raise UsageError(f"energies by {used.name} cannot be compared with a hull of energies by {hull.model}")
    those = candidates(structures)
    computed = energies(those, used, progress=progress)
    energy, problems = computed.per_atom.tolist(), list(computed.problems)
    extra: dict[str, list[Any]] = {}
    if relax:
        extra = {"energy_raw": energy, "rmsd": [math.nan] * len(those)}
        energy, ase = [math.nan] * len(those), used.ase()
        for i, candidate in enumerate(those):
            if not problems[i]:
                after = relax_one(candidate, used, relax, ase=ase)
                those[i], energy[i], extra["rmsd"][i] = after.candidate, after.energy, after.rmsd
                problems[i] = after.problem
            if progress is not None:
                progress("relaxation", i + 1, len(those))
    above = [math.nan] * len(those)
    for i, candidate in enumerate(those):
        if not problems[i]:
            above[i], problems[i] = hull.above(candidate.key, energy[i])
    rules = [validity(candidate) for candidate in those]
    sound = [not refusal(candidate) for candidate in those]
    show = None if progress is None else lambda done: progress("matching", done, len(those))
    first = unique(those, sound, progress=show)
    known = training if isinstance(training, Known) or training is None else Known(training)
    novel = [None if known is None else ok and not known.holds(c) for ok, c in zip(sound, those, strict=True)]
    stable, metastable = [a <= STABLE for a in above], [a <= METASTABLE for a in above]
    columns: dict[str, list[Any]] = {
        "name": [candidate.name for candidate in those],
        "formula": [candidate.formula for candidate in those],
        "atoms": [len(candidate) for candidate in those],
        "energy_per_atom": energy,
        "e_above_hull": above,
        "distances_ok": [rule.distances for rule in rules],
        "apart_ok": [rule.apart for rule in rules],
        "charge_ok": [rule.charge for rule in rules],
        "density_ok": [rule.density for rule in rules],
        "valid": [rule.valid for rule in rules],
        "unique": first,
        "novel": novel,
        "stable": stable,
        "metastable": metastable,
        "sun": _all(stable, first, novel),
        "msun": _all(metastable, first, novel),
        **extra,
        "problem": problems,
    }
    return Judgement(columns, tuple(those))


_load = calculator  # whose name is also an argument of `judge`
