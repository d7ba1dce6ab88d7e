r"""The convex hull of reference energies: how far above the best mixture of known phases a structure lies.

The hull energy at a composition x is a small linear programme over the reference phases i of its elements,

.. math:: e_{hull}(x) = \min_{w ≥ 0} \sum_i w_i e_i \quad\text{with}\quad \sum_i w_i x_i = x,

where x and all x_i are fractions of atoms and e_i energies per atom. It is solved by the simplex method, starting from
the elements. A structure that is better than every mixture has a negative energy above the hull.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.data.crystals import ELEMENTS
from fmwc.errors import DataError, ShapeError, UsageError
from fmwc.files import write_bytes
from fmwc.metrics.crystals.candidates import SYMBOLS, Key, key_of
from fmwc.readers import read_arrays

__all__ = ["Hull", "composition"]

ABSENT = 1e4  # eV/atom of an element without a reference: no mixture uses it if it can do without
LARGEST = 1 << 28  # bytes of a file of references
STEPS = 500  # of the simplex method; it takes about 3 an element
TERM = re.compile(r"([A-Z][a-z]?)(\d*)")


def composition(formula: str) -> Key:
    """The reduced composition of a formula without brackets.

    >>> composition("Fe4O6")
    ((8, 3), (26, 2))
    """
    terms = TERM.findall(formula)
    if not terms or "".join(symbol + count for symbol, count in terms) != formula:
        raise UsageError(f"a formula is elements and whole numbers, such as Fe2O3, not '{formula}'")
    if strange := [symbol for symbol, _ in terms if symbol not in SYMBOLS]:
        raise UsageError(f"'{strange[0]}' in {formula} is no element")
    numbers = [SYMBOLS.index(symbol) + 1 for symbol, count in terms for _ in range(int(count or 1))]
    if not numbers:
        raise UsageError(f"{formula} has no atoms")
    return key_of(numbers)


class Hull:
    """Creates the hull of reference structures.

    Arguments:
        compositions: Of each reference: a formula, or its reduced composition ((Z, how many), …).
        energies: eV/atom of each, all by one model.
        model: Which; energies of another must not be held against this hull.
    """

    def __init__(self, compositions: Iterable[str | Key], energies: Sequence[float] | np.ndarray, model: str) -> None:
        keys = [composition(c) if isinstance(c, str) else c for c in compositions]
        values = np.asarray(energies, dtype=float)
        if values.shape != (len(keys),):
            raise ShapeError(f"one energy a reference: got {values.shape} for {len(keys)} compositions")
        if not np.isfinite(values).all():
            raise UsageError("a reference energy is NaN or infinite")
        lowest: dict[Key, float] = {}
        for key, value in zip(keys, values.tolist(), strict=True):  # only the best of each composition can matter
            lowest[key] = min(value, lowest.get(key, np.inf))
        self.model = model
        self.keys = tuple(lowest)
        self.energies = np.array(list(lowest.values()))
        self._fractions = np.zeros((len(lowest), ELEMENTS + 1))
        for row, key in zip(self._fractions, self.keys, strict=True):
            for z, count in key:
                row[z] = count
        self._fractions /= self._fractions.sum(1, keepdims=True)
        self._masks = np.array([_mask(z for z, _ in key) for key in self.keys], np.uint64).reshape(-1, 2).T.copy()
        self._systems: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._solved: dict[Key, tuple[float, str]] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def _system(self, elements: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:  # (d, d + M), (d + M,)
        """The phases of some elements, after the pure elements themselves."""
        if elements not in self._systems:
            (low, high), (other_low, other_high) = self._masks, ~np.array(_mask(elements), np.uint64)
            inside = np.flatnonzero(((low & other_low) | (high & other_high)) == 0)
            points, values = self._fractions[np.ix_(inside, np.array(elements))].T, self.energies[inside]
            pure = [values[points[i] == 1] for i in range(len(elements))]
            start = [float(found.min()) if len(found) else ABSENT for found in pure]
            self._systems[elements] = np.hstack([np.eye(len(elements)), points]), np.concatenate([start, values])
        return self._systems[elements]

    def energy(self, key: Key) -> tuple[float, str]:
        """The hull's energy per atom at a composition, or NaN and why there is none."""
        if key not in self._solved:
            elements = tuple(z for z, _ in key)
            points, values = self._system(elements)
            amounts = np.array([count for _, count in key], float)
            value, used = _lowest(points, values, amounts / amounts.sum())
            missing = [SYMBOLS[elements[i] - 1] for i in used if i < len(elements) and values[i] == ABSENT]
            self._solved[key] = (np.nan, f"no reference for {', '.join(missing)}") if missing else (value, "")
        return self._solved[key]

    def above(self, key: str | Key, energy: float) -> tuple[float, str]:
        """The energy above the hull of a structure, eV/atom, or NaN and why there is none."""
        value, problem = self.energy(composition(key) if isinstance(key, str) else key)
        return energy - value, problem

    def corners(self) -> Hull:
        """The references that lie on the hull: these alone give the same hull."""
        on = [value <= self.energy(key)[0] + 1e-9 for key, value in zip(self.keys, self.energies.tolist(), strict=True)]
        return Hull([key for key, kept in zip(self.keys, on, strict=True) if kept], self.energies[on], self.model)

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> Path:
        """Writes compositions and energies, and nothing of the structures, as an npz file without pickle."""
        content = io.BytesIO()
        arrays: dict[str, Any] = {
            "model": np.array(self.model),
            "elements": np.array([len(key) for key in self.keys], np.uint8),
            "numbers": np.array([z for key in self.keys for z, _ in key], np.uint8),
            "counts": np.array([count for key in self.keys for _, count in key], np.uint16),
            "energies": self.energies.astype(np.float32),
            **{name: np.array(text) for name, text in (notes or {}).items()},
        }
        np.savez_compressed(content, **arrays)
        return write_bytes(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Hull:
        """Reads what `save` wrote."""
        found = read_arrays(path, LARGEST)
        if missing := [name for name in ("model", "elements", "numbers", "counts", "energies") if name not in found]:
            raise DataError(f"{path} is no hull: it lacks '{missing[0]}'")
        model, elements, numbers, counts, energies = (
            found[name] for name in ("model", "elements", "numbers", "counts", "energies")
        )
        whole = all(part.ndim == 1 and part.dtype.kind in "iu" for part in (elements, numbers, counts))
        good = whole and bool((elements >= 1).all() and (numbers >= 1).all() and (numbers <= ELEMENTS).all())
        good = good and bool((counts >= 1).all()) and len(numbers) == len(counts) == int(elements.sum(dtype=np.int64))
        if not good or energies.shape != elements.shape or energies.dtype.kind != "f" or model.shape != ():
            raise DataError(f"{path} is no hull: its arrays do not fit together")
        terms = iter(zip(numbers.tolist(), counts.tolist(), strict=True))
        keys = [tuple(next(terms) for _ in range(count)) for count in elements.tolist()]
        return cls(keys, energies, str(model))


def _mask(elements: Iterable[int]) -> tuple[int, int]:
    bits = sum(1 << z for z in set(elements))
    return bits & (1 << 64) - 1, bits >> 64


def _lowest(points: np.ndarray, values: np.ndarray, x: np.ndarray) -> tuple[float, list[int]]:
    """The least energy of a mixture at x, and the phases it is made of. The first columns of `points` are a unit."""
    basis = list(range(len(x)))
    for step in range(STEPS):
        corner = points[:, basis]
        potentials = np.linalg.solve(corner.T, values[basis])
        gain = values - potentials @ points
        gain[basis] = 0.0
        better = np.flatnonzero(gain < -1e-10)
        weights = np.linalg.solve(corner, x)
        if not len(better):
            return float(potentials @ x), [i for i, w in zip(basis, weights, strict=True) if w > 1e-9]
        # The steepest first; after a while the first (Bland's rule), which cannot go in circles.
        enters = int(better[0]) if step > STEPS // 2 else int(gain.argmin())
        rate = np.linalg.solve(corner, points[:, enters])
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = np.where(rate > 1e-12, weights.clip(0) / rate, np.inf)
        ties = np.flatnonzero(reach <= reach.min() + 1e-14)
        basis[min(ties, key=lambda i: basis[i])] = enters
    raise AssertionError("the simplex method has not ended")  # it ends for every feasible programme
