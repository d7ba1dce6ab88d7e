"""Which structures are the same: within a set (uniqueness), and as those of a training set (novelty)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmwc.crystals.structures import Candidate, Crystals, Key, candidates, key_of, need, quiet
from fmwc.errors import ShapeError, pick

__all__ = ["MODES", "MOVED", "Known", "Mode", "chemistry_changed", "coordinate_rmsd", "success", "unique"]


# ---- matching --------------------------------------------------------------------------------------------------------


class _Matcher:
    """pymatgen's `StructureMatcher` with its default tolerances, on cells that are reduced once."""

    def __init__(self) -> None:
        self._matcher = need("pymatgen.analysis.structure_matcher").StructureMatcher()

    def reduced(self, candidate: Candidate) -> Any:
        structure = candidate.structure()
        try:
            with quiet():
                return structure.get_reduced_structure(reduction_algo="niggli").get_primitive_structure()
        except Exception:  # odd cells fail in many ways; the matcher accepts them unreduced, but is slower
            return structure

    def same(self, first: Any, second: Any) -> bool:
        try:
            with quiet():
                return bool(self._matcher.fit(first, second, skip_structure_reduction=True))
        except Exception:  # structures that cannot be compared are not the same
            return False


def unique(
    structures: Crystals | Sequence[Any],
    usable: Sequence[bool] | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[bool]:
    """Return whether each structure is the first of its kind.

    Arguments:
        structures: The structures; only those of the same reduced formula are compared.
        usable: Which can be compared; the others are not unique.
        progress: Called with the number done.
    """
    those, matcher = candidates(structures), _Matcher()
    able = [True] * len(those) if usable is None else list(usable)
    counts = Counter(candidate.key for candidate, good in zip(those, able, strict=True) if good)
    kinds: dict[Key, list[Any]] = defaultdict(list)
    found = []
    for candidate, good in zip(those, able, strict=True):
        first = bool(good)
        if first and counts[candidate.key] > 1:
            reduced, others = matcher.reduced(candidate), kinds[candidate.key]
            first = not any(matcher.same(other, reduced) for other in others)
            if first:
                others.append(reduced)
        found.append(first)
        if progress is not None:
            progress(len(found))
    return found


class Known:
    """An index of known structures by reduced formula. Cells are reduced at the first request.

    Arguments:
        structures: Usually the training set.
    """

    def __init__(self, structures: Crystals | Sequence[Any]) -> None:
        self._structures = structures if isinstance(structures, Crystals) else candidates(structures)
        self._matcher = _Matcher()
        self._places: dict[Key, list[int]] = defaultdict(list)
        self._reduced: dict[Key, list[Any]] = {}
        if isinstance(self._structures, Crystals):  # whose candidates are made for one formula at a time
            keys = [key_of(row) for row in self._structures.numbers.tolist()]
        else:
            keys = [candidate.key for candidate in self._structures]
        for place, key in enumerate(keys):
            self._places[key].append(place)

    def __len__(self) -> int:
        return len(self._structures)

    def _of(self, key: Key) -> list[Any]:
        if key not in self._reduced:
            places = self._places.get(key, [])
            if isinstance(self._structures, Crystals):
                those = candidates(self._structures.take(places)) if places else []
            else:
                those = [self._structures[place] for place in places]
            self._reduced[key] = [self._matcher.reduced(candidate) for candidate in those]
        return self._reduced[key]

    def holds(self, candidate: Candidate) -> bool:
        """Return whether one of them is the same structure."""
        if not (others := self._of(candidate.key)):
            return False
        reduced = self._matcher.reduced(candidate)
        return any(self._matcher.same(other, reduced) for other in others)


# ---- edits -----------------------------------------------------------------------------------------------------------
# Whether an edit of a crystal is a success (paper, editing).

MOVED = 0.10  # the RMSD of fractional coordinates above which a structure has moved (paper)


class Mode(NamedTuple):
    """The channel that gets the noise, and whether the chemistry must change (`None`: either)."""

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

    Atoms are matched by index. The common shift is removed first, because a translated crystal is the same crystal:
    the circular mean of Δ along each axis, then the mean of the remainder.
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
        seed, edited: One seed per edit, in the same order.
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
