"""Compare structures: uniqueness in a set, novelty with respect to a training set, and success of edits."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmwc.crystals.structures import Candidate, Crystals, Key, candidates, key_of, need, quiet, refusal
from fmwc.errors import ShapeError, pick

__all__ = [
    "MODES",
    "MOVED",
    "USEFUL",
    "Change",
    "Known",
    "Mode",
    "Twin",
    "alike",
    "change_of",
    "changes",
    "chemistry_changed",
    "coordinate_rmsd",
    "success",
    "unique",
    "useful",
]


# ---- matching --------------------------------------------------------------------------------------------------------
# pymatgen's `StructureMatcher` with its default tolerances. Each cell is reduced only once.


@functools.cache
def _matcher() -> Any:
    return need("pymatgen.analysis.structure_matcher").StructureMatcher()


def _reduced(candidate: Candidate) -> Any:
    """Return the primitive cell as a pymatgen structure."""
    structure = candidate.structure()
    try:
        with quiet():
            return structure.get_reduced_structure(reduction_algo="niggli").get_primitive_structure()
    except Exception:  # odd cells fail in many ways; the matcher accepts them unreduced but is slower
        return structure


def _match(structure: Any, others: Sequence[Any]) -> int | None:
    """Return the index of the first of the others that is the same as a reduced structure."""
    for i, other in enumerate(others):
        try:
            with quiet():
                if _matcher().fit(other, structure, skip_structure_reduction=True):
                    return i
        except Exception:  # structures that cannot be compared count as different
            continue
    return None


def alike(
    structures: Crystals | Sequence[Any],
    usable: Sequence[bool] | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[int]:
    """Return for each structure the index of the first one of its kind; −1 if it cannot be compared.

    Arguments:
        structures: The structures; only those of the same reduced formula are compared.
        usable: Which structures can be compared.
        progress: Called with the number done.
    """
    compared = candidates(structures)
    able = [True] * len(compared) if usable is None else list(usable)
    counts = Counter(candidate.key for candidate, good in zip(compared, able, strict=True) if good)
    kinds: dict[Key, list[tuple[int, Any]]] = defaultdict(list)
    first = []
    for i, (candidate, good) in enumerate(zip(compared, able, strict=True)):
        kind = i if good else -1
        if good and counts[candidate.key] > 1:
            reduced, others = _reduced(candidate), kinds[candidate.key]
            match = _match(reduced, [other for _, other in others])
            if match is None:
                others.append((i, reduced))
            else:
                kind = others[match][0]
        first.append(kind)
        if progress is not None:
            progress(len(first))
    return first


def unique(
    structures: Crystals | Sequence[Any],
    usable: Sequence[bool] | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[bool]:
    """Return whether each structure is the first of its kind; see `alike`. Those not compared are not unique."""
    return [i == kind for i, kind in enumerate(alike(structures, usable, progress=progress))]


class Twin(NamedTuple):
    """A known structure that is the same as a given one.

    Attributes:
        name: Its name, for MP-20 the identifier of the Materials Project.
        split: The part of the data set that holds it; empty if the structures were given as one set.
    """

    name: str
    split: str


class Known:
    """An index of known structures by reduced formula. Cells are reduced on their first comparison.

    Arguments:
        structures: The structures as one set, or sets by the name of their split.
    """

    def __init__(self, structures: Crystals | Sequence[Any] | Mapping[str, Crystals | Sequence[Any]]) -> None:
        self._candidates: dict[Key, list[tuple[Candidate, Twin]]] = defaultdict(list)
        self._reduced: dict[Key, list[Any]] = {}
        splits = structures if isinstance(structures, Mapping) else {"": structures}
        for split, part in splits.items():
            for candidate in candidates(part):
                self._candidates[candidate.key].append((candidate, Twin(candidate.name, split)))

    def __len__(self) -> int:
        return sum(map(len, self._candidates.values()))

    def twin(self, candidate: Candidate) -> Twin | None:
        """Return the first known structure that is the same, or `None` if there is none."""
        key = candidate.key
        if key not in self._candidates:
            return None
        if key not in self._reduced:
            self._reduced[key] = [_reduced(one) for one, _ in self._candidates[key]]
        match = _match(_reduced(candidate), self._reduced[key])
        return None if match is None else self._candidates[key][match][1]

    def holds(self, candidate: Candidate) -> bool:
        """Return whether the index contains the same structure."""
        return self.twin(candidate) is not None


# ---- edits, by structure ---------------------------------------------------------------------------------------------

USEFUL = ("polymorph", "substitution")  # changes that a chemist looks for, if the result is metastable
MOST_ELEMENTS = 6  # in a comparison of prototypes, which tries all assignments of elements


class Change(NamedTuple):
    """What an edit did to a crystal.

    Attributes:
        kind: `same` (the same crystal), `polymorph` (another crystal of the same formula), `substitution` (another
            formula on the same prototype), or `other` (another formula and prototype). Empty if the structures cannot
            be compared.
        rmsd: For `same` and `substitution`, the root mean square distance between matched atoms in Å, after both cells
            are scaled to the same volume per atom. NaN otherwise.
    """

    kind: str
    rmsd: float


def change_of(seed: Candidate, edited: Candidate) -> Change:
    """Compare a crystal with its edit by pymatgen's `StructureMatcher`, which matches atoms by position.

    Prototypes are compared by its anonymous match, which may exchange elements.
    """
    if refusal(seed) or refusal(edited):
        return Change("", math.nan)
    same_formula = seed.key == edited.key
    counts = [sorted(count for _, count in one.key) for one in (seed, edited)]
    found = None
    if counts[0] == counts[1] and (same_formula or len(counts[0]) <= MOST_ELEMENTS):
        compare = _matcher().get_rms_dist if same_formula else _matcher().get_rms_anonymous
        with quiet(), contextlib.suppress(Exception):  # structures that cannot be compared count as different
            found = (compare(seed.structure(), edited.structure()) or (None,))[0]
    kind = {(True, True): "same", (True, False): "polymorph", (False, True): "substitution", (False, False): "other"}
    edge = (seed.volume / len(seed) * edited.volume / len(edited)) ** (1 / 6)  # the matcher's unit of length
    return Change(kind[same_formula, found is not None], math.nan if found is None else float(found) * edge)


def changes(seeds: Crystals | Sequence[Any], edits: Crystals | Sequence[Any]) -> list[Change]:
    """Compare each crystal with its edit."""
    return [change_of(*pair) for pair in zip(candidates(seeds), candidates(edits), strict=True)]


def useful(found: Sequence[Change], metastable: ArrayLike) -> np.ndarray:  # (N,)
    """Return whether each edit is what a chemist looks for.

    The result must be metastable, and either another crystal of the same formula or another formula on the same
    prototype.
    """
    return np.isin([change.kind for change in found], USEFUL) & np.asarray(metastable, bool)


# ---- edits, by the paper's rules -------------------------------------------------------------------------------------

MOVED = 0.10  # minimum RMSD of fractional coordinates of a moved structure (paper)


class Mode(NamedTuple):
    """The channel that receives the noise, and whether the chemistry must change (`None`: both are accepted)."""

    channel: str | None
    changed: bool | None


MODES = {
    "chem-swap": Mode("type", True),
    "polymorph": Mode("coord", False),
    "all-channels": Mode(None, None),
}


def chemistry_changed(seed: Crystals, edited: Crystals) -> Tensor:  # (N,)
    """Return whether the reduced formula has changed."""
    _check_pairs(seed, edited)
    pairs = zip(seed.numbers.tolist(), edited.numbers.tolist(), strict=True)
    return torch.tensor([key_of(before) != key_of(after) for before, after in pairs])


def coordinate_rmsd(seed: Crystals, edited: Crystals) -> Tensor:  # (N,)
    """Return √(mean over atoms of ‖Δ‖²) in fractional coordinates, where Δ is the displacement to the nearest image.

    Atoms are matched by index. The common shift is removed first, because a translated crystal is the same crystal: the
    circular mean of Δ along each axis, then the mean of the remainder.
    """
    _check_pairs(seed, edited)
    present = (seed.numbers > 0)[..., None].double()
    atoms = present.sum(1, keepdim=True).clamp_min(1)
    delta = (edited.coords.double() - seed.coords.double()) * 2 * math.pi
    shift = torch.atan2((delta.sin() * present).sum(1, keepdim=True), (delta.cos() * present).sum(1, keepdim=True))
    left = _wrapped((delta - shift) / (2 * math.pi)) * present
    left = _wrapped(left - left.sum(1, keepdim=True) / atoms) * present
    return (left.square().sum((1, 2)) / atoms[:, 0, 0]).sqrt()


def success(
    mode: str,
    seed: Crystals,
    edited: Crystals,
    seed_energy: ArrayLike | Tensor,
    edited_energy: ArrayLike | Tensor,
) -> Tensor:  # (N,)
    """Return whether each edit has the intended chemistry, an RMSD above 0.1, and a lower energy above the hull.

    An edit whose energy is missing (NaN) is not a success.

    Arguments:
        mode: `chem-swap`, `polymorph` or `all-channels`.
        seed, edited: The original and the edited structures, in the same order.
        seed_energy, edited_energy: Energies above the hull, eV/atom.
    """
    intent = pick(MODES, mode, "mode").changed
    before, after = (torch.as_tensor(e, dtype=torch.float64) for e in (seed_energy, edited_energy))
    if before.shape != (len(seed),) or after.shape != (len(seed),):
        raise ShapeError(
            f"one energy per crystal is needed: {len(seed)} edits, got {tuple(before.shape)} and {tuple(after.shape)}"
        )
    good = (coordinate_rmsd(seed, edited) > MOVED) & (after < before)
    return good if intent is None else good & (chemistry_changed(seed, edited) == intent)


def _wrapped(fraction: Tensor) -> Tensor:
    return fraction - fraction.round()


def _check_pairs(seed: Crystals, edited: Crystals) -> None:
    if len(seed) != len(edited):
        raise ShapeError(f"one seed per edit is needed, in the same order: {len(seed)} seeds and {len(edited)} edits")
    if seed.numbers.shape != edited.numbers.shape or not torch.equal(seed.atoms, edited.atoms):
        raise ShapeError("a seed and its edit must have the same number of atoms, which are matched by index")
