"""A set of structures judged: validity, uniqueness, novelty and stability, one row a structure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fmwc.data.crystals import Crystals
from fmwc.errors import UsageError
from fmwc.metrics.crystals.candidates import Candidate, candidates
from fmwc.metrics.crystals.energy import Calculator, Progress, calculator, energies
from fmwc.metrics.crystals.geometry import refusal
from fmwc.metrics.crystals.hull import Hull
from fmwc.metrics.crystals.matching import Known, unique
from fmwc.metrics.crystals.references import hull_for
from fmwc.metrics.crystals.relaxing import relax as relax_one
from fmwc.metrics.crystals.validity import validity

__all__ = ["METASTABLE", "STABLE", "Judgement", "judge"]

STABLE = 1e-5  # eV/atom above the hull: none, but for the rounding of single precision (4e-6 was seen)
METASTABLE = 0.1
SHARES = (
    "distances_ok", "apart_ok", "charge_ok", "density_ok", "valid", "unique", "novel", "stable", "metastable", "sun",
    "msun",
)  # fmt: skip


@dataclass(frozen=True)
class Judgement:
    """What was found.

    Attributes:
        columns: One list for each column, one entry a structure, in the order given. A number that there is none of is
            NaN; what was not asked for (novelty without a training set) is None.
        candidates: The structures judged: after relaxation, if there was one.
    """

    columns: dict[str, list[Any]]
    candidates: tuple[Candidate, ...]

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def rows(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True)]

    def summary(self) -> dict[str, Any]:
        """Counts and shares, all of them over all structures, and the mean energy above the hull of those judged."""
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


def _both(first: list[Any], *others: list[Any]) -> list[Any]:
    """And, where None is not known: False beats it."""
    rows = zip(first, *others, strict=True)
    return [False if any(v is False for v in row) else None if None in row else True for row in rows]


def _relaxed(
    those: list[Candidate], problems: list[str], used: Calculator, steps: int, progress: Progress | None
) -> tuple[list[Candidate], list[float], list[float]]:
    """The structures, energies and displacements after relaxation; reasons are added to `problems`."""
    energy, rmsd, after = [math.nan] * len(those), [math.nan] * len(those), list(those)
    ase = used.ase()
    for i, candidate in enumerate(those):
        if not problems[i]:
            result = relax_one(candidate, used, steps, ase=ase)
            after[i], energy[i], rmsd[i], problems[i] = result.candidate, result.energy, result.rmsd, result.problem
        if progress is not None:
            progress("relaxation", i + 1, len(those))
    return after, energy, rmsd


def judge(
    structures: Crystals | Sequence[Any],
    *,
    calculator: str | Calculator = "chgnet",
    hull: Hull | None = None,
    training: Crystals | Sequence[Any] | Known | None = None,
    relax: int = 0,
    progress: Progress | None = None,
) -> Judgement:
    """Judges a set of structures.

    A structure is `stable` on or below the hull, `metastable` up to 0.1 eV/atom above it, `unique` if it is the first
    of its kind in the set, `novel` if it is not in the training set; `sun` and `msun` are all three, valid or not. What
    cannot be judged has a `problem`, and is none of these.

    Arguments:
        structures: Crystals, pymatgen structures, ASE's atoms, or what `read` gives.
        calculator: The energy model, or its name.
        hull: The hull of the same model's energies; else the one that `hull_for` finds.
        training: The structures trained on; without them novelty is not judged.
        relax: By how many steps to relax each structure first.
        progress: Called with the stage, how many are done, and of how many.
    """
    if relax < 0:
        raise UsageError(f"relax is a number of steps, 0 for none, not {relax}")
    used = _load(calculator) if isinstance(calculator, str) else calculator
    hull = hull_for(used.name, progress=progress) if hull is None else hull
    if hull.model != used.name:
        raise UsageError(f"energies by {used.name} cannot be held against a hull of energies by {hull.model}")
    those = candidates(structures)
    computed = energies(those, used, progress=progress)
    energy, problems = computed.per_atom.tolist(), list(computed.problems)
    extra: dict[str, list[Any]] = {}
    if relax:
        extra["energy_raw"] = energy
        those, energy, extra["rmsd"] = _relaxed(those, problems, used, relax, progress)

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
        "sun": _both(stable, first, novel),
        "msun": _both(metastable, first, novel),
        **extra,
        "problem": problems,
    }
    return Judgement(columns, tuple(those))


_load = calculator  # whose name the argument of `judge` takes
