r"""The convex hull of reference energies, which gives the energy of the best mixture of known phases.

The hull energy at a composition x is a small linear programme over the reference phases i of its elements,

.. math:: e_{hull}(x) = \min_{w ≥ 0} \sum_i w_i e_i \quad\text{with}\quad \sum_i w_i x_i = x,

where x and all x_i are fractions of atoms, and the e_i are energies per atom. A structure that is better than every
mixture has a negative energy above the hull. `scipy.optimize.linprog` solves the programme.

References are those of the package, those of a data folder, or energies that are computed once and cached. The file
`chgnet_hull.npz` holds CHGNet 0.3.0 energies of the Materials Project structures of MP-20 (train, val and test), the
lowest of each composition: of the structures as they are, and after at most 100 steps of relaxation by CHGNet for all
within 0.1 eV/atom of the hull (`benchmarks/references.py`). It holds no structures. The materials are those of the
Materials Project (A. Jain et al., APL Materials 1, 011002, 2013), whose data are licensed under CC BY 4.0.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock

from fmwc.crystals import mp20
from fmwc.crystals.energy import Calculator, Progress, calculator, energies, version
from fmwc.crystals.relaxation import identity_of, relax_all
from fmwc.crystals.structures import (
    ELEMENTS,
    Candidate,
    Crystals,
    Key,
    balanced,
    candidates,
    formula_of,
    key_of,
    need,
    symbol,
)
from fmwc.errors import DataError, ShapeError, UsageError
from fmwc.files import cache_folder, write_bytes
from fmwc.readers import read_arrays

__all__ = [
    "Hull",
    "Mixture",
    "composition",
    "folder_hull",
    "hull_for",
    "make_shipped",
    "reference_hull",
    "shipped_hull",
]

ABSENT = 1e4  # eV/atom of an element without a reference, so high that mixtures avoid it if possible
LARGEST = 1 << 28  # maximum bytes of a file of references
SHIPPED = Path(__file__).with_name("chgnet_hull.npz")
NOTES = {
    "source": "CHGNet 0.3.0 energies (eV/atom) of Materials Project structures (MP-20), as given and relaxed",
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


class Mixture(NamedTuple):
    """The mixture of references with the lowest energy at a composition, and the references that it was chosen from.

    Attributes:
        energy: eV/atom; NaN if there is none.
        problem: The reason why there is none; empty if there is one.
        parts: The compositions of the mixture, with their shares of the atoms.
        competing: The number of reference compositions of two or more elements, all of them in the mixture. For a pure
            element, 1 if it has a reference.
        own: How many of these contain all elements of the mixture.
        gap: What the references do not know, so that a low energy proves nothing; usually empty. Either only pure
            elements compete, or one is left over in the mixture although its compounds with another element of the
            composition are missing. The energy of the mixture is then an upper bound.
    """

    energy: float
    problem: str
    parts: tuple[tuple[Key, float], ...]
    competing: int
    own: int
    gap: str

    def __str__(self) -> str:
        """The decomposition, such as `0.67 NaCl + 0.33 Na`."""
        return " + ".join(f"{share:.2g} {formula_of(key)}" for key, share in self.parts)


class Hull:
    """The convex hull of reference structures.

    Arguments:
        compositions: A formula or a reduced composition ((Z, count), …) of each reference.
        energies: eV/atom of each reference, all by one model.
        model: The model's name; energies of another model must not be compared with this hull.
        relaxed: eV/atom of each reference after relaxation by the model; NaN where it is not known.
    """

    def __init__(
        self,
        compositions: Iterable[str | Key],
        energies: Sequence[float] | np.ndarray,
        model: str,
        relaxed: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        keys = [composition(c) if isinstance(c, str) else c for c in compositions]
        values = np.asarray(energies, dtype=float)
        after = np.full(len(keys), np.nan) if relaxed is None else np.asarray(relaxed, dtype=float)
        if values.shape != (len(keys),) or after.shape != (len(keys),):
            raise ShapeError(f"give one energy per reference; got {values.shape} for {len(keys)} compositions")
        if not np.isfinite(values).all() or np.isinf(after).any():
            raise UsageError("a reference energy is NaN or infinite; leave out such references")
        # Only the lowest energies of each composition matter. Relaxation cannot raise an energy.
        lowest: dict[Key, tuple[float, float]] = {}
        for key, *pair in zip(keys, values.tolist(), np.fmin(values, after).tolist(), strict=True):
            before = lowest.get(key, (np.inf, np.inf))
            lowest[key] = min(pair[0], before[0]), min(pair[1], before[1])
        self.model = model
        self.keys = tuple(lowest)
        self.energies, self._relaxed = np.array(list(lowest.values())).reshape(-1, 2).T
        self._amounts = np.zeros((ELEMENTS + 1, len(lowest)))  # atoms of each element in each reference
        for column, key in enumerate(self.keys):
            for z, count in key:
                self._amounts[z, column] = count
        self._atoms = self._amounts.sum(0)
        self._systems: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, list[Key]]] = {}
        self._solved: dict[Key, Mixture] = {}

    def __len__(self) -> int:
        return len(self.keys)

    @functools.cached_property
    def relaxed(self) -> Hull | None:
        """The hull of the relaxed references, for relaxed structures; `None` if no reference was relaxed.

        A reference that was not relaxed has its energy before relaxation, an upper bound.
        """
        return None if (self._relaxed == self.energies).all() else Hull(self.keys, self._relaxed, self.model)

    def _system(self, elements: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, list[Key]]:
        """Return fractions (d, d + M), energies (d + M,) and compositions of the phases of d elements, those first."""
        if elements not in self._systems:
            amounts = self._amounts[list(elements)]
            inside = np.flatnonzero(amounts.sum(0) == self._atoms)
            points, values = amounts[:, inside] / self._atoms[inside], self.energies[inside]
            pure = [values[points[i] == 1] for i in range(len(elements))]
            start = [float(energies.min()) if len(energies) else ABSENT for energies in pure]
            keys = [*(((z, 1),) for z in elements), *(self.keys[i] for i in inside)]
            self._systems[elements] = np.hstack([np.eye(len(elements)), points]), np.concatenate([start, values]), keys
        return self._systems[elements]

    def mixture(self, key: str | Key) -> Mixture:
        """Return the mixture of references with the lowest energy at a composition."""
        key = composition(key) if isinstance(key, str) else key
        if key not in self._solved:
            elements = tuple(z for z, _ in key)
            points, values, keys = self._system(elements)
            amounts = np.array([count for _, count in key], float)
            value, used = _lowest(points, values, amounts / amounts.sum())
            missing = [symbol(elements[i]) for i in used if i < len(elements) and values[i] == ABSENT]
            order = [] if missing else sorted(used, key=lambda i: (-round(used[i], 6), keys[i]))
            parts = tuple((keys[i], used[i]) for i in order)
            inside = points[:, len(elements) :] > 0
            own, competing = (int((inside.sum(0) >= least).sum()) for least in (len(elements), min(2, len(elements))))
            problem, gap = f"no reference for {', '.join(missing)}" if missing else "", ""
            if not missing:
                gap = _gap(keys[len(elements) :], key, parts) if competing else "only elements compete"
            self._solved[key] = Mixture(np.nan if missing else value, problem, parts, competing, own, gap)
        return self._solved[key]

    def energy(self, key: Key) -> tuple[float, str]:
        """Return the energy per atom of the hull at a composition, or NaN and the reason."""
        return self.mixture(key)[:2]

    def above(self, key: str | Key, energy: float) -> tuple[float, str]:
        """Return the energy above the hull in eV/atom, or NaN and the reason."""
        value, problem, *_ = self.mixture(key)
        return energy - value, problem

    def corners(self) -> Hull:
        """Return the same hull without the references above it."""
        on = [value <= self.energy(key)[0] + 1e-9 for key, value in zip(self.keys, self.energies.tolist(), strict=True)]
        return Hull([key for key, kept in zip(self.keys, on, strict=True) if kept], self.energies[on], self.model)

    def with_references(self, other: Hull) -> Hull:
        """Return the hull of the references of both; their energies must be by the same model."""
        if other.model != self.model:
            raise UsageError(f"energies by {other.model} cannot be mixed with energies by {self.model}")
        pairs = [(one.energies, one._relaxed) for one in (self, other)]
        energies, relaxed = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return Hull(self.keys + other.keys, energies, self.model, relaxed)

    def save(self, path: str | Path, notes: Mapping[str, str] | None = None) -> Path:
        """Write compositions and energies to an npz file; structures are not stored."""
        content = io.BytesIO()
        order = sorted(range(len(self)), key=lambda i: self.keys[i])  # compresses better
        keys = [self.keys[i] for i in order]
        arrays: dict[str, Any] = {
            "model": np.array(self.model),
            "elements": np.array([len(key) for key in keys], np.uint8),
            "numbers": np.array([z for key in keys for z, _ in key], np.uint8),
            "counts": np.array([count for key in keys for _, count in key], np.uint16),
            "energies": self.energies[order].astype(np.float32),
            "relaxed": self._relaxed[order].astype(np.float32),
            **{name: np.array(text) for name, text in (notes or {}).items()},
        }
        np.savez_compressed(content, **arrays)
        return write_bytes(Path(path), content.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Hull:
        """Read a file that `save` wrote."""
        arrays = read_arrays(path, LARGEST)
        names = ("model", "elements", "numbers", "counts", "energies", "relaxed")
        if missing := [name for name in names if name not in arrays]:
            raise DataError(f"{path} is not a hull file: it lacks '{missing[0]}'")
        model, elements, numbers, counts, *both = (arrays[name] for name in names)
        integers = (elements, numbers, counts)
        good = all(part.ndim == 1 and part.dtype.kind in "iu" and (part >= 1).all() for part in integers)
        good = good and (numbers <= ELEMENTS).all() and len(numbers) == len(counts) == elements.sum(dtype=np.int64)
        good = good and all(part.shape == elements.shape and part.dtype.kind == "f" for part in both)
        if not good or model.shape != ():
            raise DataError(f"{path} is not a hull file: its arrays do not fit together")
        terms = iter(zip(numbers.tolist(), counts.tolist(), strict=True))
        keys = [tuple(next(terms) for _ in range(count)) for count in elements.tolist()]
        energies, relaxed = both
        return cls(keys, energies, str(model), relaxed)


def _gap(phases: Sequence[Key], key: Key, parts: Sequence[tuple[Key, float]]) -> str:
    """Return a pure element of a mixture and another element whose compound is missing, in words.

    A pair of elements is known if there is a reference of these two; if one of them is a nonmetal, it must be valid by
    SMACT. Gd₃I is no substitute for GdI₃: without that, iodine is left over beside it in every mixture, and whatever
    binds the iodine looks stable.

    Arguments:
        phases: The references of the elements of the composition.
        key: The composition.
        parts: The mixture.
    """
    element = need("pymatgen.core").Element.from_Z
    pairs = [phase for phase in phases if len(phase) == 2]
    for (left, _), *more in (phase for phase, _ in parts):
        for other, _ in key if not more else ():
            two = {left, other}
            salt = any(not element(z).is_metal and not element(z).is_metalloid for z in two)
            found = (phase for phase in pairs if {z for z, _ in phase} == two)
            if other != left and not any(balanced(phase) if salt else True for phase in found):
                return f"no reference for a compound of {symbol(left)} and {symbol(other)}"
    return ""


def _lowest(points: np.ndarray, values: np.ndarray, x: np.ndarray) -> tuple[float, dict[int, float]]:
    """Return the lowest energy of a mixture at x, and the shares of its phases.

    `points` must begin with an identity matrix.
    """
    found = need("scipy.optimize").linprog(values, A_eq=points, b_eq=x, method="highs-ds")
    shares = {i: w for i, w in enumerate(found.x.tolist()) if w > 1e-9}
    return float(found.fun), shares


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
    return _stored_hull(data, {})


def _stored_hull(data: str | Path | None, relaxed: Mapping[str, float]) -> Hull:
    stored = mp20.energies(data)
    if stored is None:
        raise DataError(
            f"{data or 'FMWC_DATA'} contains no {mp20.ENERGIES}; leave out the folder to use the package's hull"
        )
    known, crystals = dict(zip(stored[0], stored[1].tolist(), strict=True)), _references(data)
    rows = [i for i, name in enumerate(crystals.names) if name in known]
    names = [crystals.names[i] for i in rows]
    keys = [key_of(numbers) for numbers in crystals.numbers[rows].tolist()]
    return Hull(keys, [known[name] for name in names], "chgnet", [relaxed.get(name, np.nan) for name in names])


def make_shipped(data: str | Path | None = None, relaxed: str | Path | None = None, path: str | Path = SHIPPED) -> Path:
    """Write the package's file of references.

    Arguments:
        data: The folder of MP-20, with CHGNet energies.
        relaxed: The file that `python -m benchmarks.references` wrote; without it no reference is relaxed.
        path: The file to write.
    """
    after: dict[str, float] = {}
    if relaxed is not None:
        arrays = read_arrays(relaxed, LARGEST)
        after = dict(zip(arrays["material_id"].astype(str).tolist(), arrays["relaxed"].tolist(), strict=True))
    return _stored_hull(data, after).save(path, NOTES)


# ---- references of other models --------------------------------------------------------------------------------------

RELAX_STEPS = 100  # maximum steps of a reference
NEAR = 0.02  # eV/atom; references further above the hull are not relaxed, because they hardly become part of it
WRITE_EVERY = 100  # structures between two writes of the cache
AGREE = 0.005  # eV/atom; largest difference of published energies from the model's own
TRIED = 5  # references on which this is tested


class _Cache:
    """Energies of structures by one model, before and after relaxation, in a file of `FMWC_CACHE`.

    Failures are not kept: after a lack of memory, or an error of the user's own calculator, they are tried again.
    """

    def __init__(self, model: Calculator) -> None:
        label = f"{model.name}-{version(model.name)}".rstrip("-")
        self.path = cache_folder("hulls") / f"{re.sub(r'[^A-Za-z0-9.]+', '-', label)}.npz"

    def read(self, stage: str) -> dict[str, float]:
        """Return the energies of a stage by structure; none if the file cannot be read."""
        try:
            arrays = read_arrays(self.path, LARGEST)
            names, values = arrays[f"{stage} of"].astype("U32").tolist(), arrays[stage]
        except (DataError, KeyError, ValueError):
            return {}
        return dict(zip(names, values.tolist(), strict=True)) if values.shape == (len(names),) else {}

    def add(self, stage: str, values: dict[str, float]) -> None:
        """Write energies, beside those that this or another process wrote before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):  # between reading and writing, another process would lose its energies
            arrays: dict[str, Any] = {}
            for one in STAGES:
                found = self.read(one) | (values if one == stage else {})
                arrays |= {f"{one} of": np.array([*found], "S32"), one: np.array([*found.values()], float)}
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)
            write_bytes(self.path, content.getvalue())

    def filled(
        self,
        stage: str,
        chosen: Mapping[str, Candidate],
        compute: Callable[..., Sequence[float]],
        show: Progress | None,
    ) -> dict[str, float]:
        """Return the energies of structures; compute those that are missing in parts, and write each part."""
        found = self.read(stage)
        missing = [name for name in chosen if name not in found]
        for start in range(0, len(missing), WRITE_EVERY):
            part = missing[start : start + WRITE_EVERY]
            values = dict(zip(part, compute([chosen[name] for name in part]), strict=True))
            self.add(stage, {name: value for name, value in values.items() if np.isfinite(value)})
            found |= values
            if show is not None:
                show(f"reference energies, {stage}", len(chosen) - len(missing) + start + len(part), len(chosen))
        return {name: found[name] for name in chosen}


STAGES = ("given", "relaxed")


def _within(systems: Iterable[Key]) -> Callable[[Key], bool]:
    """Return a function that says whether all elements of a composition occur together in one of the given ones."""
    holders: dict[int, set[int]] = defaultdict(set)  # the systems that hold an element
    for i, elements in enumerate({frozenset(z for z, _ in key) for key in systems}):
        for z in elements:
            holders[z].add(i)
    return lambda key: bool(set.intersection(*(holders.get(z, set()) for z, _ in key)))


def reference_hull(
    crystals: Crystals,
    model: str | Calculator = "chgnet",
    *,
    systems: Iterable[Key] | None = None,
    relax: bool = False,
    published: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Hull:
    """Return the hull of a model's energies of reference crystals.

    Energies are cached in `FMWC_CACHE` (or the user's cache folder) as they are computed, so that an interrupted run
    resumes. References without an energy are left out.

    Arguments:
        crystals: The references.
        model: The model or its name.
        systems: The compositions that the hull is needed for; only references within their chemical systems are used.
        relax: Also relax the references near the hull, for `Hull.relaxed`.
        published: Outputs of the same model (eV/atom) for references by name, without corrections. They are used
            instead of computing if they agree with the model's own energies of a few references; otherwise a warning
            says how far they differ.
        progress: Called with the stage, the number done and the total.
    """
    used = calculator(model) if isinstance(model, str) else model
    needed = None if systems is None else _within(systems)
    chosen = {identity_of([one]): one for one in candidates(crystals) if needed is None or needed(one.key)}
    cache, known = _Cache(used), _fitting(list(chosen.values()), used, published or {})
    values = {name: known[one.name] for name, one in chosen.items() if one.name in known}
    rest = {name: one for name, one in chosen.items() if name not in values}
    values |= cache.filled("given", rest, lambda part: energies(part, used).per_atom.tolist(), progress)
    usable = {name: one for name, one in chosen.items() if np.isfinite(values[name])}
    keys, before = [one.key for one in usable.values()], [values[name] for name in usable]
    hull = Hull(keys, before, used.name)
    if not relax:
        return hull
    near = {name: one for name, one in usable.items() if hull.above(one.key, values[name])[0] <= NEAR}
    after = cache.filled(
        "relaxed", near, lambda part: [one.energy for one in relax_all(part, used, RELAX_STEPS)], progress
    )
    return Hull(keys, before, used.name, [after.get(name, np.nan) for name in usable])


def _fitting(chosen: Sequence[Candidate], model: Calculator, published: Mapping[str, float]) -> Mapping[str, float]:
    """Return published energies, corrected, if they agree with the model's own of a few small references."""
    there = sorted((one for one in chosen if one.name in published), key=len)

    def corrected(some: Sequence[Candidate]) -> dict[str, float]:
        return {one.name: published[one.name] + model.correction(one) for one in some}

    if not (tried := there[:TRIED]):
        return {}
    differences = energies(tried, model).per_atom - [*corrected(tried).values()]
    if (np.abs(differences) <= AGREE).all():  # False for NaN
        return corrected(there)
    warnings.warn(
        f"published energies by {model.name} differ from those of the installed calculator by up to "
        f"{np.abs(differences).max():.3g} eV/atom, so they are not used; reference energies are computed instead",
        stacklevel=2,
    )
    return {}


def hull_for(
    model: str | Calculator = "chgnet",
    data: str | Path | None = None,
    *,
    systems: Iterable[Key] | None = None,
    relax: bool = False,
    progress: Progress | None = None,
) -> Hull:
    """Return the hull with which a model's energies are compared.

    For CHGNet this is the hull of the package, with the references of the data folder if one is given. For another
    model, energies of the references in the folder (or in `FMWC_DATA`) are computed when they are first needed.

    Arguments:
        model: The model or its name.
        data: A folder of references.
        systems: The compositions to judge; energies are computed only within their chemical systems. By default, those
            of all references are.
        relax: Whether relaxed structures are compared with the hull; references are then relaxed too.
        progress: Called with the stage, the number done and the total.
    """
    name = model if isinstance(model, str) else model.name
    if name == "chgnet" and (data is None or mp20.energies(data) is not None):
        return shipped_hull() if data is None else shipped_hull().with_references(folder_hull(data))
    used = calculator(model) if isinstance(model, str) else model  # a missing model is reported before a missing folder
    published = mp20.published_energies(data, name)
    options: dict[str, Any] = {"systems": systems, "relax": relax, "published": published, "progress": progress}
    hull = reference_hull(_references(data), used, **options)
    return shipped_hull().with_references(hull) if name == "chgnet" else hull
