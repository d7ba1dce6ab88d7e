"""Validity, uniqueness, novelty and stability of a set of structures, one row per structure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fmwc.crystals import energy as models
from fmwc.crystals import mp20
from fmwc.crystals.energy import Calculator, Energies, Progress
from fmwc.crystals.hull import Hull, hull_for
from fmwc.crystals.matching import Known, Twin, unique
from fmwc.crystals.relaxation import Relaxed, relax_all
from fmwc.crystals.structures import (
    CLOSEST,
    ELEMENTS,
    Candidate,
    Crystals,
    balanced,
    candidates,
    need,
    neighbours,
    quiet,
    refusal,
    unmeasurable,
)
from fmwc.errors import UsageError

__all__ = [
    "METASTABLE",
    "STABLE",
    "Judgement",
    "Validity",
    "above_hull",
    "density_of",
    "judge",
    "validity",
    "with_consensus",
]


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
        charge: The composition is valid by SMACT (`fmwc.crystals.structures.balanced`).
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


@functools.lru_cache(maxsize=ELEMENTS)
def _element(z: int) -> _Element:
    with quiet():  # pymatgen warns of every unknown property
        e = need("pymatgen.core").Element.from_Z(z)
        return _Element(
            float(e.atomic_radius or e.atomic_radius_calculated or RADIUS),
            float(e.atomic_mass),
        )


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


NOVELTY = ("novel", "sun", "msun")  # columns that need known structures


@dataclass(frozen=True)
class Judgement:
    """The judgement of a set of structures.

    Attributes:
        columns: One list per column, with one entry per structure in their order. A missing number is NaN; what is not
            known is None.
        candidates: The structures, after relaxation if requested.
        notes: What limits the judgement, one sentence each.
    """

    columns: dict[str, list[Any]]
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    @property
    def good(self) -> np.ndarray:
        """Which structures are known to be metastable, the paper's criterion of success."""
        return np.array([value is True for value in self["metastable"]], bool)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per structure, as a dict by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def summary(self) -> dict[str, Any]:
        """Return counts and shares of all structures, and the mean and median of the known energies above the hull.

        Structures whose `stable`, `metastable`, `sun` or `msun` is unknown are counted as `stable_unknown` and so on,
        not among the stable ones. Without known structures, the counts that need novelty are None.
        """
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
        compared = any(value is not None for value in self["novel"])
        for name in SHARES:
            count = sum(value is True for value in self[name]) if compared or name not in NOVELTY else None
            summary[name] = count
            summary[f"{name}_share"] = None if count is None else count / total if total else math.nan
        for name in ("stable", "metastable", "sun", "msun"):
            summary[f"{name}_unknown"] = None if summary[name] is None else self[name].count(None)
        return summary


def require_cut(cut: float) -> None:
    """Raise if the largest energy above the hull of metastable structures is negative or infinite."""
    if not 0 <= cut < math.inf:
        raise UsageError(f"the cut must be an energy above the hull of at least 0 eV/atom, such as 0.1; got {cut:g}")


def judge(
    structures: Crystals | Sequence[Any],
    *,
    calculator: str | Calculator = "chgnet",
    hull: Hull | None = None,
    known: Crystals | Sequence[Any] | Mapping[str, Crystals | Sequence[Any]] | Known | None = None,
    data: str | Path | None = None,
    relax: int = 0,
    cut: float = METASTABLE,
    kept: Path | None = None,
    progress: Progress | None = None,
) -> Judgement:
    """Judge a set of structures.

    A structure is `stable` on or below the hull, `metastable` up to `cut` above it, `unique` if it is the first of its
    kind in the set, `novel` if it is not among the known structures; `twin` and `twin_split` name the known structure
    that is the same. `sun` combines stable, unique and novel, and `msun` metastable, unique and novel; neither requires
    validity. Structures that cannot be judged have a `problem` and none of these properties.

    The hull is known only as far as there are references. `competing_phases` is the number of reference compositions of
    two or more elements, all of them in the structure, and `own_phases` those with all of its elements; polymorphs
    count once. `decomposition` is the mixture of references with the lowest energy, in shares of atoms. If only pure
    elements compete, or a pure element is left over although its compounds with another element of the structure are
    missing, `sparse_hull` says so. The energy of the mixture is then only an upper bound, so `e_above_hull` is unknown
    (NaN), and so is whether the structure is `stable`, `metastable`, `sun` or `msun` (None), unless it is too high even
    above that bound.

    Arguments:
        structures: Crystals, pymatgen structures, ASE atoms or candidates.
        calculator: The energy model or its name.
        hull: The hull of energies by the same model; by default that of `hull_for`.
        known: The known structures, or a mapping of such sets by the name of their split; by default those of `data`.
            Without both, novelty is not judged.
        data: A folder of references, such as MP-20, for the hull (see `hull_for`) and for novelty.
        relax: The maximum number of steps to relax each structure first; 0 for no relaxation. Relaxed structures are
            compared with relaxed references (`Hull.relaxed`).
        cut: The largest energy above the hull of metastable structures, eV/atom.
        kept: A folder that keeps the relaxed structures as they come, so that an interrupted run resumes.
        progress: Called with the stage, the number done and the total.
    """
    if relax < 0:
        raise UsageError(f"relax must be a number of steps, or 0 for no relaxation; got {relax}")
    require_cut(cut)
    model = models.calculator(calculator) if isinstance(calculator, str) else calculator
    judged = candidates(structures)
    if hull is None:
        systems = [one.key for one in judged if not refusal(one, model.highest)]
        hull = hull_for(model, data, systems=systems, relax=relax > 0, progress=progress)
    if hull.model != model.name:
        raise UsageError(f"energies by {model.name} cannot be compared with a hull of energies by {hull.model}")
    computed = models.energies(judged, model, progress=progress)
    relaxation: dict[str, list[Any]] = {}
    notes: list[str] = []
    if relax:
        relaxation["e_above_hull_raw"] = above_hull(judged, computed, hull)[0]
        judged, computed, columns = _relax(judged, computed, model, relax, kept, progress)
        relaxation |= columns
        if hull.relaxed is None:
            notes.append("relaxed structures are compared with references that are not relaxed, as none are known")
        hull = hull.relaxed or hull
    above, problems = above_hull(judged, computed, hull)
    phases, least = _phases(judged, hull), _above_known(judged, computed, hull)[0]
    stable, metastable = (
        [
            None if value <= limit and gap else value <= limit
            for value, gap in zip(least, phases["sparse_hull"], strict=True)
        ]
        for limit in (STABLE, cut)
    )
    known = mp20.load_all(data) if known is None and data is not None else known
    first, novel, twins = _compare(judged, known, progress)
    columns = {
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
        **phases,
        "twin": [twin.name if twin else "" for twin in twins],
        "twin_split": [twin.split if twin else "" for twin in twins],
        **relaxation,
        "problem": problems,
    }
    return Judgement(columns, tuple(judged), tuple(notes))


def _relax(
    given: list[Candidate],
    computed: Energies,
    model: Calculator,
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
        "rmsd": [one.rmsd for one in rest],
        "relax_steps": [one.steps for one in rest],
        "converged": [one.converged for one in rest],
    }
    after = Energies(np.array([one.energy for one in rest]), tuple(one.problem for one in rest))
    return [one.candidate for one in rest], after, columns


def above_hull(structures: Sequence[Candidate], computed: Energies, hull: Hull) -> tuple[list[float], list[str]]:
    """Return the energy above the hull (NaN if it is unknown) and the problem of each structure."""
    above, problems = _above_known(structures, computed, hull)
    gaps = _phases(structures, hull)["sparse_hull"]
    return [math.nan if gap else value for value, gap in zip(above, gaps, strict=True)], problems


def _above_known(structures: Sequence[Candidate], computed: Energies, hull: Hull) -> tuple[list[float], list[str]]:
    """Return the energy above the known references, a lower bound if some are missing, and the problem."""
    rows = [
        (math.nan, problem) if problem else hull.above(candidate.key, energy)
        for candidate, energy, problem in zip(structures, computed.per_atom.tolist(), computed.problems, strict=True)
    ]
    return [value for value, _ in rows], [problem for _, problem in rows]


def _rules(judged: list[Candidate]) -> dict[str, list[Any]]:
    rules = [validity(candidate) for candidate in judged]
    columns: dict[str, list[Any]] = {f"{name}_ok": [getattr(rule, name) for rule in rules] for name in Validity._fields}
    return {**columns, "valid": [rule.valid for rule in rules]}


def _phases(judged: Sequence[Candidate], hull: Hull) -> dict[str, list[Any]]:
    """Return the columns about the references that each structure competes with."""
    mixtures = [hull.mixture(one.key) if one.known else None for one in judged]
    return {
        "competing_phases": [mixture.competing if mixture else 0 for mixture in mixtures],
        "own_phases": [mixture.own if mixture else 0 for mixture in mixtures],
        "decomposition": [str(mixture or "") for mixture in mixtures],
        "sparse_hull": [mixture.gap if mixture else "" for mixture in mixtures],
    }


def _compare(
    judged: list[Candidate], known: Any, progress: Progress | None
) -> tuple[list[bool], list[bool | None], list[Twin | None]]:
    """Return which structures are unique, which are novel, and the known twins of those that are not."""
    usable = [not refusal(candidate) for candidate in judged]
    show = None if progress is None else lambda done: progress("matching", done, len(judged))
    first = unique(judged, usable, progress=show)
    if known is None:
        return first, [None] * len(judged), [None] * len(judged)
    index = known if isinstance(known, Known) else Known(known)
    twins = [index.twin(candidate) if ok else None for ok, candidate in zip(usable, judged, strict=True)]
    return first, [ok and twin is None for ok, twin in zip(usable, twins, strict=True)], twins


def _all(*columns: list[Any]) -> list[bool | None]:
    """Combine columns by "and". None means unknown; any False makes the result False."""
    rows = zip(*columns, strict=True)
    return [False if any(v is False for v in row) else None if None in row else True for row in rows]


# ---- several judges --------------------------------------------------------------------------------------------------

OPINIONS = ("energy_per_atom", "e_above_hull", "stable", "metastable", "sun", "msun", "problem")
RELAXATION = ("energy_raw", "e_above_hull_raw", "rmsd", "relax_steps", "converged")


def with_consensus(judgements: Mapping[str, Judgement]) -> Judgement:
    """Return the judgement of the first energy model with the opinions of the others, and whether they agree.

    The columns of another model end in its name, such as `e_above_hull_sevennet`. `consensus` is True if all models
    find a structure metastable, False if none does, and None if they disagree or one of them could not judge it.

    Arguments:
        judgements: Judgements of the same structures by the name of the model.
    """
    names, (first, *others) = [*judgements], judgements.values()
    if any(len(other) != len(first) for other in others):
        raise UsageError("judgements to combine must be of the same structures")
    columns = {name: values for name, values in first.columns.items() if name != "problem"}
    for name, other in zip(names[1:], others, strict=True):
        columns |= {f"{key}_{name}": other[key] for key in (*OPINIONS, *RELAXATION) if key in other.columns}
    verdicts = [
        [None if problem else value for value, problem in zip(one["metastable"], one["problem"], strict=True)]
        for one in judgements.values()
    ]
    columns["consensus"] = [row[0] if len({*row}) == 1 else None for row in zip(*verdicts, strict=True)]
    notes = [f"{name}: {note}" for name, one in judgements.items() for note in one.notes]
    return Judgement({**columns, "problem": first["problem"]}, first.candidates, tuple(notes))
