r"""The convex hull of reference energies, which gives the energy of the best mixture of known phases.

The hull energy at a composition x is a small linear programme over the reference phases i of its elements,

.. math:: e_{hull}(x) = \min_{w ≥ 0} \sum_i w_i e_i \quad\text{with}\quad \sum_i w_i x_i = x,

where x and all x_i are fractions of atoms, and the e_i are energies per atom. A structure that is better than every
mixture has a negative energy above the hull. `_lowest` solves the programme by the simplex method, starting from the
elements. It takes 0.19 ms per composition of the package's hull; `scipy.optimize.linprog` (HiGHS) takes 1.4 ms.

References are those of the package, those of a data folder, or energies that are computed once and cached. The file
`chgnet_hull.npz` holds the corners of the hull of CHGNet 0.3.0 energies of the Materials Project structures of
MP-20 (all splits): compositions and computed energies, no structures. The materials are those of the Materials Project
(A. Jain et al., APL Materials 1, 011002, 2013), whose data are licensed under CC BY 4.0.
"""

from __future__ import annotations

import functools
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fmwc.crystals import mp20
from fmwc.crystals.energy import Progress, calculator, energies, version
from fmwc.crystals.structures import ELEMENTS, Crystals, Key, key_of, need, symbol
from fmwc.data.arrays import fingerprint
from fmwc.errors import DataError, ShapeError, UsageError
from fmwc.files import write_bytes
from fmwc.readers import read_arrays

__all__ = ["Hull", "composition", "folder_hull", "hull_for", "make_shipped", "reference_hull", "shipped_hull"]

ABSENT = 1e4  # eV/atom of an element without a reference, so high that mixtures avoid it if possible
LARGEST = 1 << 28  # maximum bytes of a file of references
STEPS = 500  # limit of the simplex method, which takes about 3 steps per element
CACHE_EVERY = 1000  # energies between two writes of the cache
SHIPPED = Path(__file__).with_name("chgnet_hull.npz")
NOTES = {
    "source": "Corners of the convex hull of CHGNet 0.3.0 energies (eV/atom) of Materials Project structures (MP-20)",
    "attribution": "Materials Project, A. Jain et al., APL Materials 1, 011002 (2013), https://materialsproject.org",
    "licence": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
}


def composition(formula: str) -> Key:
    """Return the reduced composition of a formula.

    >>> composition("Fe4O6"), composition("Mg(OH)2")
    (((8, 3), (26, 2)), ((1, 2), (8, 2), (12, 1)))
    """
    numbers = need("ase.data").atomic_numbers
    try:
        counts = need("ase.formula").Formula(formula).count()
        key = key_of([numbers[name] for name, count in counts.items() for _ in range(count)])
    except (ValueError, KeyError) as error:
        raise UsageError(f"'{formula}' is not a formula of elements and whole numbers, such as Fe2O3") from error
    if not key:
        raise UsageError(f"'{formula}' is a formula without atoms")
    return key


class Hull:
    """The convex hull of reference structures.

    Arguments:
        compositions: A formula or a reduced composition ((Z, count), …) of each reference.
        energies: eV/atom of each reference, all by one model.
        model: The model's name; energies of another model must not be compared with this hull.
    """

    def __init__(self, compositions: Iterable[str | Key], energies: Sequence[float] | np.ndarray, model: str) -> None:
        keys = [composition(c) if isinstance(c, str) else c for c in compositions]
        values = np.asarray(energies, dtype=float)
        if values.shape != (len(keys),):
            raise ShapeError(f"give one energy per reference; got {values.shape} for {len(keys)} compositions")
        if not np.isfinite(values).all():
            raise UsageError("a reference energy is NaN or infinite; leave out such references")
        lowest: dict[Key, float] = {}
        for key, value in zip(keys, values.tolist(), strict=True):  # only the lowest energy of each composition matters
            lowest[key] = min(value, lowest.get(key, np.inf))
        self.model = model
        self.keys = tuple(lowest)
        self.energies = np.array(list(lowest.values()))
        self._amounts = np.zeros((ELEMENTS + 1, len(lowest)))  # atoms of each element in each reference
        for column, key in enumerate(self.keys):
            for z, count in key:
                self._amounts[z, column] = count
        self._atoms = self._amounts.sum(0)
        self._systems: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        self._solved: dict[Key, tuple[float, str]] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def _system(self, elements: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:  # (d, d + M), (d + M,)
        """Return the fractions and energies of all phases of some elements, the pure elements first."""
        if elements not in self._systems:
            amounts = self._amounts[list(elements)]
            inside = np.flatnonzero(amounts.sum(0) == self._atoms)
            points, values = amounts[:, inside] / self._atoms[inside], self.energies[inside]
            pure = [values[points[i] == 1] for i in range(len(elements))]
            start = [float(energies.min()) if len(energies) else ABSENT for energies in pure]
            self._systems[elements] = np.hstack([np.eye(len(elements)), points]), np.concatenate([start, values])
        return self._systems[elements]

    def energy(self, key: Key) -> tuple[float, str]:
        """Return the energy per atom of the hull at a composition, or NaN and the reason."""
        if key not in self._solved:
            elements = tuple(z for z, _ in key)
            points, values = self._system(elements)
            amounts = np.array([count for _, count in key], float)
            value, used = _lowest(points, values, amounts / amounts.sum())
            missing = [symbol(elements[i]) for i in used if i < len(elements) and values[i] == ABSENT]
            self._solved[key] = (np.nan, f"no reference for {', '.join(missing)}") if missing else (value, "")
        return self._solved[key]

    def above(self, key: str | Key, energy: float) -> tuple[float, str]:
        """Return the energy above the hull in eV/atom, or NaN and the reason."""
        value, problem = self.energy(composition(key) if isinstance(key, str) else key)
        return energy - value, problem

    def corners(self) -> Hull:
        """Return the same hull without the references above it."""
        on = [value <= self.energy(key)[0] + 1e-9 for key, value in zip(self.keys, self.energies.tolist(), strict=True)]
        return Hull([key for key, kept in zip(self.keys, on, strict=True) if kept], self.energies[on], self.model)

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> Path:
        """Write compositions and energies to an npz file; structures are not stored."""
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
        """Read a file that `save` wrote."""
        arrays = read_arrays(path, LARGEST)
        names = ("model", "elements", "numbers", "counts", "energies")
        if missing := [name for name in names if name not in arrays]:
            raise DataError(f"{path} is not a hull file: it lacks '{missing[0]}'")
        model, elements, numbers, counts, energies = (arrays[name] for name in names)
        integers = (elements, numbers, counts)
        good = all(part.ndim == 1 and part.dtype.kind in "iu" and (part >= 1).all() for part in integers)
        good = good and (numbers <= ELEMENTS).all() and len(numbers) == len(counts) == elements.sum(dtype=np.int64)
        if not good or energies.shape != elements.shape or energies.dtype.kind != "f" or model.shape != ():
            raise DataError(f"{path} is not a hull file: its arrays do not fit together")
        terms = iter(zip(numbers.tolist(), counts.tolist(), strict=True))
        keys = [tuple(next(terms) for _ in range(count)) for count in elements.tolist()]
        return cls(keys, energies, str(model))


def _lowest(points: np.ndarray, values: np.ndarray, x: np.ndarray) -> tuple[float, list[int]]:
    """Return the lowest energy of a mixture at x, and its phases. `points` must begin with an identity matrix."""
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
        # Steepest descent first; after half of the steps Bland's rule, which cannot cycle.
        enters = int(better[0]) if step > STEPS // 2 else int(gain.argmin())
        rate = np.linalg.solve(corner, points[:, enters])
        with np.errstate(divide="ignore", invalid="ignore"):
            reach = np.where(rate > 1e-12, weights.clip(0) / rate, np.inf)
        ties = np.flatnonzero(reach <= reach.min() + 1e-14)
        basis[min(ties, key=lambda i: basis[i])] = enters
    raise AssertionError("the simplex method did not converge")  # it converges for every feasible programme


# ---- references --------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def shipped_hull() -> Hull:
    """Return the hull of CHGNet energies that comes with the package."""
    return Hull.load(SHIPPED)


def _references(data: str | Path | None) -> Crystals:
    """Return all splits of a folder as one set."""
    splits = mp20.load_all(data).values()
    fields = ("numbers", "coords", "lengths", "angles")
    tensors = {field: torch.cat([getattr(part, field) for part in splits]) for field in fields}
    return Crystals(**tensors, names=tuple(name for part in splits for name in part.names))


def folder_hull(data: str | Path | None = None) -> Hull:
    """Return the hull of the CHGNet energies stored beside the data (in `FMWC_DATA` if no folder is given)."""
    stored = mp20.energies(data)
    if stored is None:
        raise DataError(
            f"{data or 'FMWC_DATA'} contains no {mp20.ENERGIES}; leave out the folder to use the package's hull"
        )
    known, crystals = dict(zip(stored[0], stored[1].tolist(), strict=True)), _references(data)
    rows = [i for i, name in enumerate(crystals.names) if name in known]
    keys = [key_of(numbers) for numbers in crystals.numbers[rows].tolist()]
    return Hull(keys, [known[crystals.names[i]] for i in rows], "chgnet")


def make_shipped(data: str | Path | None = None, path: str | Path = SHIPPED) -> Path:
    """Write the package's hull file from a data folder: the corners of the hull, their source and licence."""
    return folder_hull(data).corners().save(path, NOTES)


def _cached(path: Path, count: int) -> np.ndarray:
    """Return the cached energies, those of the first references; none if the file cannot be read."""
    try:
        arrays = read_arrays(path, LARGEST)
        values, done = arrays["energies"], arrays["done"]
        kinds = (values.dtype, done.dtype) == (np.float64, bool)
        if kinds and values.ndim == 1 and values.shape == done.shape and len(values) <= count:
            return values[done]
    except (DataError, KeyError):
        pass
    return np.zeros(0)


def reference_hull(crystals: Crystals, model: str = "chgnet", *, progress: Progress | None = None) -> Hull:
    """Return the hull of a model's energies of reference crystals.

    Energies are cached in `FMWC_CACHE` (or the user's cache folder) as they are computed, so that an interrupted run
    resumes. References without an energy are left out.
    """
    mark = fingerprint(crystals.numbers, crystals.coords, crystals.lengths, crystals.angles)
    label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model}-{version(model)}" if version(model) else model)
    cache = os.environ.get("FMWC_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fmwc")
    path = Path(os.path.expanduser(cache)) / "hulls" / f"{label}-{mark}.npz"
    values = _cached(path, len(crystals))
    while len(values) < len(crystals):
        rows = range(len(values), min(len(values) + CACHE_EVERY, len(crystals)))
        values = np.concatenate([values, energies(crystals.take(rows), model).per_atom])
        content = io.BytesIO()
        np.savez_compressed(content, energies=values, done=np.ones(len(values), bool))
        write_bytes(path, content.getvalue())
        if progress is not None:
            progress("reference energies", len(values), len(crystals))
    usable = np.flatnonzero(np.isfinite(values))
    if not len(usable):
        raise UsageError(f"{model} has no energy for any of the {len(crystals)} reference structures")
    return Hull([key_of(numbers) for numbers in crystals.numbers[usable].tolist()], values[usable], model)


def hull_for(model: str = "chgnet", data: str | Path | None = None, *, progress: Progress | None = None) -> Hull:
    """Return the hull with which a model's energies are compared.

    For CHGNet this is the hull of the package, or of the data folder if one is given. For another model the energies
    of the references in the folder (or in `FMWC_DATA`) are computed once.
    """
    if model == "chgnet" and data is None:
        return shipped_hull()
    if model == "chgnet" and mp20.energies(data) is not None:
        return folder_hull(data)
    calculator(model)  # a missing model is reported before a missing folder
    return reference_hull(_references(data), model, progress=progress)
