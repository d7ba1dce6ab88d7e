"""Validity, uniqueness, novelty and stability of a set of structures, one row per structure."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fmwc.crystals import energy as models
from fmwc.crystals.energy import Calculator, Energies, Progress
from fmwc.crystals.hull import Hull, hull_for
from fmwc.crystals.matching import Known, unique
from fmwc.crystals.relaxation import Relaxed, relax_all
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

__all__ = ["METASTABLE", "STABLE", "Judgement", "Validity", "above_hull", "balanced", "density_of", "judge", "validity"]


# ---- validity --------------------------------------------------------------------------------------------------------
# Rules for physically plausible structures: distances, charges and density.

OVERLAP = 0.5  # atoms overlap if they are closer than this share of the sum of their radii
RADIUS = 1.5  # Å, for heavy elements without a known radius
DENSITY = (0.01, 25.0)  # g/cm³; osmium has 22.6
SMALLEST = 0.1  # Å³, minimum volume of a cell by CDVAE's rule
GRAMS = 1.66053907  # atomic mass units per Å³ in g/cm³


class Validity(NamedTuple):
    """The rules that a structure satisfies. A rule that cannot be evaluated counts as violated.

    Attributes:
        distances: The distance of any two atoms is larger than half the sum of their radii.
        apart: CDVAE's rule: all atoms are more than 0.5 Å apart in a cell of at least 0.1 Å³.
        charge: Oxidation states can sum to zero.
        density: The density is between 0.01 and 25 g/cm³.
    """

    distances: bool
    apart: bool
    charge: bool
    density: bool

    @property
    def valid(self) -> bool:
        """Whether the rules of distances, charge and density are all satisfied."""
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
    """Return whether the charges can balance with one known oxidation state per element.

    Pure elements and alloys of metals count as balanced; electronegativities are ignored. The common oxidation states
    alone would reject a third of the real crystals of MP-20; all known states reject a tenth.
    """
    if len(key) == 1 or all(_element(z).metal for z, _ in key):
        return True
    sums = {0}
    for z, count in key:
        sums = {total + count * state for total in sums for state in _element(z).states}
    return 0 in sums


def density_of(candidate: Candidate) -> float:
    """Return the density in g/cm³; NaN if an element is unknown or the cell has no finite volume."""
    if not candidate.known or not candidate.finite or not (volume := candidate.volume) > 0:
        return math.nan
    return GRAMS * sum(_element(int(z)).mass for z in candidate.numbers) / volume


def validity(candidate: Candidate) -> Validity:
    """Evaluate all rules for a structure."""
    if candidate.problem or not candidate.known:
        return Validity(False, False, False, False)
    charge = balanced(candidate.key)
    if not candidate.finite:
        return Validity(False, False, charge, False)
    density = DENSITY[0] <= density_of(candidate) <= DENSITY[1]
    if unmeasurable(candidate):
        return Validity(False, False, charge, density)
    radii = np.array([_element(int(z)).radius for z in candidate.numbers])
    pairs = neighbours(candidate, max(CLOSEST, 2 * OVERLAP * radii.max()) + 1e-6)
    overlap = pairs.distance <= OVERLAP * (radii[pairs.centre] + radii[pairs.other])
    apart = candidate.volume >= SMALLEST and not bool((pairs.distance <= CLOSEST).any())
    return Validity(not bool(overlap.any()), apart, charge, density)


# ---- judge -----------------------------------------------------------------------------------------------------------

STABLE = 1e-5  # eV/atom above the hull: 0 up to single-precision rounding (4e-6)
METASTABLE = 0.1
SHARES = (
    "distances_ok", "apart_ok", "charge_ok", "density_ok", "valid", "unique", "novel", "stable", "metastable", "sun",
    "msun",
)  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """The judgement of a set of structures.

    Attributes:
        columns: One list per column, with one entry per structure in their order. A missing number is NaN; without a
            training set, novelty is None.
        candidates: The structures, after relaxation if requested.
    """

    columns: dict[str, list[Any]]
    candidates: tuple[Candidate, ...]

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    @property
    def good(self) -> np.ndarray:
        """Which structures are metastable, the paper's criterion of success; False if they could not be judged."""
        return np.array(self["metastable"], bool)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per structure, as a dict by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def summary(self) -> dict[str, Any]:
        """Return counts and shares of all structures, and the mean and median of the known energies above the hull."""
        total = len(self)
        above = np.array(self["e_above_hull"], float)
        judged = above[np.isfinite(above)]
        summary: dict[str, Any] = {
            "structures": total,
            "problems": sum(bool(problem) for problem in self["problem"]),
            "judged": len(judged),
            "mean_e_above_hull": float(judged.mean()) if len(judged) else math.nan,
            "median_e_above_hull": float(np.median(judged)) if len(judged) else math.nan,
        }
        for name in SHARES:
            known = [value for value in self[name] if value is not None]
            count = sum(known) if len(known) == total else None
            summary[name] = count
            summary[f"{name}_share"] = None if count is None else count / total if total else math.nan
        return summary


def judge(
    structures: Crystals | Sequence[Any],
    *,
    calculator: str | Calculator = "chgnet",
    hull: Hull | None = None,
    training: Crystals | Sequence[Any] | Known | None = None,
    relax: int = 0,
    kept: Path | None = None,
    progress: Progress | None = None,
) -> Judgement:
    """Judge a set of structures.

    A structure is `stable` on or below the hull, `metastable` up to 0.1 eV/atom above it, `unique` if it is the first
    of its kind in the set, `novel` if it is not in the training set. `sun` combines stable, unique and novel, and
    `msun` metastable, unique and novel; neither requires validity. Structures that cannot be judged have a `problem`
    and none of these properties.

    Arguments:
        structures: Crystals, pymatgen structures, ASE atoms or candidates.
        calculator: The energy model or its name.
        hull: The hull of energies by the same model; by default that of `hull_for`.
        training: The training set; without it novelty is not judged.
        relax: The maximum number of steps to relax each structure first; 0 for no relaxation.
        kept: A folder that keeps the relaxed structures as they come, so that an interrupted run resumes.
        progress: Called with the stage, the number done and the total.
    """
    if relax < 0:
        raise UsageError(f"relax must be a number of steps, or 0 for no relaxation; got {relax}")
    model = models.calculator(calculator) if isinstance(calculator, str) else calculator
    hull = hull_for(model.name, progress=progress) if hull is None else hull
    if hull.model != model.name:
        raise UsageError(f"energies by {model.name} cannot be compared with a hull of energies by {hull.model}")
    judged = candidates(structures)
    computed = models.energies(judged, model, progress=progress)
    relaxation: dict[str, list[Any]] = {}
    if relax:
        judged, computed, relaxation = _relax(judged, computed, model, hull, relax, kept, progress)
    above, problems = above_hull(judged, computed, hull)
    stable, metastable = [value <= STABLE for value in above], [value <= METASTABLE for value in above]
    first, novel = _compare(judged, training, progress)
    columns: dict[str, list[Any]] = {
        "name": [candidate.name for candidate in judged],
        "formula": [candidate.formula for candidate in judged],
        "atoms": [len(candidate) for candidate in judged],
        "energy_per_atom": computed.per_atom.tolist(),
        "e_above_hull": above,
        **_rules(judged),
        "unique": first,
        "novel": novel,
        "stable": stable,
        "metastable": metastable,
        "sun": _all(stable, first, novel),
        "msun": _all(metastable, first, novel),
        **relaxation,
        "problem": problems,
    }
    return Judgement(columns, tuple(judged))


def _relax(
    given: list[Candidate],
    computed: Energies,
    model: Calculator,
    hull: Hull,
    steps: int,
    kept: Path | None,
    progress: Progress | None,
) -> tuple[list[Candidate], Energies, dict[str, list[Any]]]:
    """Return the relaxed structures, their energies, and the columns that describe the relaxation."""
    able = [i for i, problem in enumerate(computed.problems) if not problem]
    found = dict(
        zip(able, relax_all([given[i] for i in able], model, steps, kept=kept, progress=progress), strict=True)
    )
    rest = [
        found.get(i) or Relaxed(candidate, math.nan, math.nan, 0, problem)
        for i, (candidate, problem) in enumerate(zip(given, computed.problems, strict=True))
    ]
    columns: dict[str, list[Any]] = {
        "energy_raw": computed.per_atom.tolist(),
        "e_above_hull_raw": above_hull(given, computed, hull)[0],
        "rmsd": [one.rmsd for one in rest],
        "relax_steps": [one.steps for one in rest],
        "converged": [one.converged for one in rest],
    }
    after = Energies(np.array([one.energy for one in rest]), tuple(one.problem for one in rest))
    return [one.candidate for one in rest], after, columns


def above_hull(structures: Sequence[Candidate], computed: Energies, hull: Hull) -> tuple[list[float], list[str]]:
    """Return the energy above the hull (or NaN) and the problem of each structure."""
    rows = [
        (math.nan, problem) if problem else hull.above(candidate.key, energy)
        for candidate, energy, problem in zip(structures, computed.per_atom.tolist(), computed.problems, strict=True)
    ]
    return [value for value, _ in rows], [problem for _, problem in rows]


def _rules(judged: list[Candidate]) -> dict[str, list[Any]]:
    rules = [validity(candidate) for candidate in judged]
    columns: dict[str, list[Any]] = {f"{name}_ok": [getattr(rule, name) for rule in rules] for name in Validity._fields}
    return {**columns, "valid": [rule.valid for rule in rules]}


def _compare(
    judged: list[Candidate], training: Crystals | Sequence[Any] | Known | None, progress: Progress | None
) -> tuple[list[bool], list[bool | None]]:
    """Return which structures are unique and which are novel."""
    usable = [not refusal(candidate) for candidate in judged]
    show = None if progress is None else lambda done: progress("matching", done, len(judged))
    first = unique(judged, usable, progress=show)
    if training is None:
        return first, [None] * len(judged)
    known = training if isinstance(training, Known) else Known(training)
    return first, [ok and not known.holds(candidate) for ok, candidate in zip(usable, judged, strict=True)]


def _all(*columns: list[Any]) -> list[bool | None]:
    """Combine columns by "and". None means unknown; any False makes the result False."""
    rows = zip(*columns, strict=True)
    return [False if any(v is False for v in row) else None if None in row else True for row in rows]
