"""Which structures are the same: among those generated (unique), and as those trained on (novel)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from fmwc.data.crystals import Crystals
from fmwc.metrics.crystals.candidates import Candidate, Key, candidates, key_of
from fmwc.metrics.crystals.extras import need, quiet

__all__ = ["Known", "unique"]


class _Matcher:
    """pymatgen's `StructureMatcher` with its default tolerances, on cells reduced once."""

    def __init__(self) -> None:
        self._matcher = need("pymatgen.analysis.structure_matcher").StructureMatcher()

    def reduced(self, candidate: Candidate) -> Any:
        structure = candidate.structure()
        try:
            with quiet():
                return structure.get_reduced_structure(reduction_algo="niggli").get_primitive_structure()
        except Exception:  # odd cells fail in many ways; the matcher can do without, only slower
            return structure

    def same(self, first: Any, second: Any) -> bool:
        try:
            with quiet():
                return bool(self._matcher.fit(first, second, skip_structure_reduction=True))
        except Exception:  # a structure that cannot be laid over another is not the same
            return False


def unique(
    structures: Crystals | Sequence[Any],
    usable: Sequence[bool] | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[bool]:
    """Whether each is the first of its kind, so that as many are True as there are kinds.

    Arguments:
        structures: What to compare; only those of the same reduced formula are.
        usable: Which can be compared at all; the others are False.
        progress: Called with how many are done.
    """
    those, matcher = candidates(structures), _Matcher()
    kinds: dict[Key, list[Any]] = defaultdict(list)
    alone = _alone(those, usable)
    found = []
    for i, candidate in enumerate(those):
        first = usable is None or usable[i]
        if first and not alone(candidate):
            reduced, others = matcher.reduced(candidate), kinds[candidate.key]
            first = not any(matcher.same(other, reduced) for other in others)
            if first:
                others.append(reduced)
        found.append(bool(first))
        if progress is not None:
            progress(i + 1)
    return found


def _alone(those: Sequence[Candidate], usable: Sequence[bool] | None) -> Callable[[Candidate], bool]:
    """Whether no other has the formula, so that nothing need be compared."""
    counts: dict[Key, int] = defaultdict(int)
    for i, candidate in enumerate(those):
        counts[candidate.key] += usable is None or bool(usable[i])
    return lambda candidate: counts[candidate.key] < 2


class Known:
    """Creates an index of known structures, by reduced formula; a cell is reduced when it is first asked for.

    Arguments:
        structures: Those trained on.
    """

    def __init__(self, structures: Crystals | Sequence[Any]) -> None:
        self._structures = structures if isinstance(structures, Crystals) else candidates(structures)
        self._matcher = _Matcher()
        self._places: dict[Key, list[int]] = defaultdict(list)
        self._reduced: dict[Key, list[Any]] = {}
        if isinstance(self._structures, Crystals):
            rows = self._structures.numbers.tolist()
            keys = [key_of([z for z in row if z > 0]) for row in rows]
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
        """Whether one of them is the same structure."""
        others = self._of(candidate.key)
        if not others:
            return False
        reduced = self._matcher.reduced(candidate)
        return any(self._matcher.same(other, reduced) for other in others)
