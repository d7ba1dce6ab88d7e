"""Structures as arrays: compositions, cells, neighbours, and checks before slow computations."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import DataError, ShapeError, UsageError
from fmwc.sampling import Trajectory

__all__ = [
    "ANGLES",
    "BITS",
    "CHANNELS",
    "CLOSEST",
    "DOUBT",
    "ELEMENTS",
    "Candidate",
    "Cell",
    "Crystals",
    "Key",
    "Neighbours",
    "arrays_of",
    "balanced",
    "candidate_of",
    "candidates",
    "cell_matrix",
    "crystals_of",
    "decode",
    "encode",
    "fold",
    "formula_of",
    "from_cells",
    "from_flat",
    "has_volume",
    "key_of",
    "need",
    "needle",
    "neighbours",
    "one_line",
    "pad",
    "quiet",
    "refusal",
    "symbol",
    "unmeasurable",
]


# ---- extras ----------------------------------------------------------------------------------------------------------
# Optional packages, imported on first use.


def need(module: str, install: str = "'fmwc[crystals]'") -> Any:
    """Import a module of an optional package; if it is missing, raise an error with the install command."""
    if (loaded := sys.modules.get(module)) is not None:
        return loaded
    try:
        with quiet():
            return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        if getattr(error, "name", None) and not str(error.name).startswith(package):
            raise UsageError(
                f"{package} cannot be imported ({error}); reinstall it with: pip install {install}"
            ) from error
        raise UsageError(f"{package} is not installed; install it with: pip install {install}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and standard output of other packages."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def one_line(error: Exception) -> str:
    """Return the message of an exception as one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


# ---- states ----------------------------------------------------------------------------------------------------------
# Crystals as tensors, padded with atoms of number 0, and as states of a flow.

ELEMENTS = 118
ANGLES = (59.9, 120.1)  # degrees; the angles of a Niggli cell lie between 60 and 120
BITS = 7  # bits of Z − 1, enough for 118 elements
CHANNELS = ("type", "coord", "lattice")  # channels of a state
DOUBT = "atom_doubt"  # evidence with one value per atom


@dataclass(frozen=True)
class Crystals:
    """A set of crystals.

    Attributes:
        numbers: Atomic numbers, `(N, A)` integers, padded with 0.
        coords: Fractional coordinates in [0, 1), `(N, A, 3)`, padded with 0.
        lengths: a, b, c in ångström, `(N, 3)`.
        angles: α, β, γ in degrees, `(N, 3)`.
        names: N strings.
    """

    numbers: Tensor
    coords: Tensor
    lengths: Tensor
    angles: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        rows = {f.name: len(getattr(self, f.name)) for f in fields(self)}
        if len(set(rows.values())) > 1:
            raise ShapeError(f"every field must have one row per crystal, got {rows}")

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def atoms(self) -> Tensor:  # (N,)
        """The number of atoms of each crystal."""
        return (self.numbers > 0).sum(1)

    def take(self, index: Tensor | Sequence[int]) -> Crystals:
        """Return the crystals at some indices, in that order, or where a mask is true."""
        rows = torch.as_tensor(index)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        tensors = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "names"}
        return Crystals(**tensors, names=tuple(self.names[i] for i in rows.tolist()))


class Cell(NamedTuple):
    """A structure whose lattice is given by lengths and angles, as in CDVAE's preprocessing."""

    numbers: np.ndarray  # (A,)
    coords: np.ndarray  # (A, 3) in [0, 1]
    lengths: np.ndarray  # (3,) Å
    angles: np.ndarray  # (3,) degrees


def has_volume(angles: np.ndarray) -> np.ndarray:  # (*, 3) -> (*)
    """Return whether three angles form a cell: (V/abc)² = 1 + 2 cos α cos β cos γ − Σ cos² must be positive."""
    cosines = np.cos(np.radians(np.asarray(angles, np.float64)))
    return 1 + 2 * cosines.prod(-1) - (cosines**2).sum(-1) > 1e-6


def pad(counts: Tensor, flat: Tensor, width: int) -> Tensor:  # (N,), (ΣA, *) -> (N, width, *)
    """Split concatenated rows into rows of one width, padded with zeros."""
    padded = flat.new_zeros(len(counts), width, *flat.shape[1:])
    padded[torch.arange(width) < counts[:, None]] = flat
    return padded


def fold(coords: Tensor) -> Tensor:
    """Map fractional coordinates to [0, 1). Tiny negative ones, whose remainder rounds to 1, are mapped to 0.

    >>> fold(torch.tensor([-0.25, -1e-9, 1.0, 2.5]))
    tensor([0.7500, 0.0000, 0.0000, 0.5000])
    """
    inside = coords.remainder(1.0)
    return inside * (inside < 1)


def from_flat(
    counts: np.ndarray,
    numbers: np.ndarray,
    coords: np.ndarray,
    lengths: np.ndarray,
    angles: np.ndarray,
    names: tuple[str, ...],
    width: int,
) -> Crystals:
    """Return crystals, padded to `width` atoms, from arrays with the concatenated atoms of all crystals."""
    atoms = torch.from_numpy(counts.astype(np.int64))
    z = torch.from_numpy(numbers.astype(np.int64))
    places, edges, corners = (torch.from_numpy(part.astype(np.float32)) for part in (coords, lengths, angles))
    return Crystals(pad(atoms, z, width), pad(atoms, fold(places), width), edges, corners, names)


def from_cells(cells: Mapping[str, Cell], width: int) -> Crystals:
    """Return named cells (at least one) as crystals, padded to `width` atoms."""
    numbers, coords, lengths, angles = zip(*cells.values(), strict=True)
    counts, atoms = np.array([len(part) for part in numbers]), (np.concatenate(numbers), np.concatenate(coords))
    return from_flat(counts, *atoms, np.array(lengths), np.array(angles), tuple(cells), width)


def encode(crystals: Crystals) -> tuple[dict[str, Tensor], Tensor]:
    """Return crystals as states of a flow, and the number of atoms of each crystal.

    A state has the channels `type` `(N, A, 7)`, the bits of Z − 1 as ±1; `coord` `(N, A, 3)`; and `lattice` `(N, 6)`,
    the lengths in ångström and the logits of the angles scaled from (59.9°, 120.1°) to (0, 1). Padding is zero.
    """
    present = crystals.numbers > 0
    if bool(((crystals.numbers < 0) | (crystals.numbers > 1 << BITS)).any()):
        raise DataError(f"atomic numbers must be 1 to {ELEMENTS}, or 0 for no atom; got {crystals.numbers.max()}")
    bits = (crystals.numbers - 1).clamp_min(0)[..., None] >> torch.arange(BITS) & 1
    place = (crystals.angles - ANGLES[0]) / (ANGLES[1] - ANGLES[0])
    if bool(((place <= 0) | (place >= 1)).any()):
        raise DataError(f"cell angles must lie between {ANGLES[0]}° and {ANGLES[1]}°; reduce the cells (Niggli) first")
    state = {
        "type": (bits * 2.0 - 1) * present[..., None],
        "coord": crystals.coords * present[..., None],
        "lattice": torch.cat([crystals.lengths, place.logit()], 1),
    }
    return {name: value.float() for name, value in state.items()}, present.sum(1)


def decode(state: dict[str, Tensor], atoms: Tensor, names: Sequence[str] | None = None) -> Crystals:
    """Return states of a flow as crystals. Atomic numbers above 118 are possible; the judge rejects them."""
    types, coords, lattice = (state[name].detach().cpu() for name in CHANNELS)
    present = torch.arange(types.shape[1]) < atoms.cpu()[:, None]
    numbers = 1 + ((types > 0) << torch.arange(BITS)).sum(-1)
    low, high = ANGLES
    angles = low + (high - low) * lattice[:, 3:].sigmoid()
    width = max(5, math.ceil(math.log10(max(len(atoms), 1))))
    return Crystals(
        numbers * present,
        fold(coords) * present[..., None],
        lattice[:, :3],
        angles,
        tuple(names or (f"{i:0{width}d}" for i in range(len(atoms)))),
    )


def crystals_of(run: Trajectory) -> Crystals:
    """Return the structures of a run, named as its samples. Edits of one sample are numbered instead."""
    names = run.names
    return decode(run.x, run.cond["atoms"], names if len({*names}) == len(names) else None)


# ---- structures ------------------------------------------------------------------------------------------------------

DENSEST = 2.0  # Å³ per atom; the smallest in MP-20 is 5.8, and the number of neighbours grows with the inverse
EMPTIEST = 5000.0  # Å³ per atom; the largest in MP-20 is 202
THINNEST = 0.5  # Å between opposite faces; the number of images to search grows with the inverse
NEEDLE = 50.0  # ratio of the longest to the shortest edge; the largest in MP-20 is 15
CLOSEST = 0.5  # Å between atoms; the shortest known bond, H₂, has 0.74

MIXED = 9  # elements; structures of MP-20 have at most 7, and SMACT takes up to 0.5 s for 9 and 50 s for 11
OXIDATION = "smact14"  # SMACT's set of oxidation states when CDVAE was published; its default has changed since

Key = tuple[tuple[int, int], ...]  # a reduced composition: (atomic number, count), by atomic number


def symbol(z: int) -> str:
    """Return the symbol of an element; a question mark if there is no such element."""
    return str(need("ase.data").chemical_symbols[z]) if 1 <= z <= ELEMENTS else "?"


def key_of(numbers: Sequence[int] | np.ndarray) -> Key:
    """Return the reduced composition of atomic numbers. Zeros are padding and are ignored.

    >>> key_of([11, 17, 11, 17, 0])
    ((11, 1), (17, 1))
    """
    counts = Counter(int(z) for z in numbers if z)
    shared = math.gcd(*counts.values()) if counts else 1
    return tuple((z, counts[z] // shared) for z in sorted(counts))


def formula_of(key: Key) -> str:
    """Return the reduced formula of a composition from pymatgen, metals first."""
    with quiet():  # pymatgen warns of noble gases, which have no electronegativity
        return str(need("pymatgen.core").Composition({symbol(z): count for z, count in key}).reduced_formula)


@functools.lru_cache(maxsize=100_000)
def balanced(key: Key) -> bool:
    """Return whether a composition is valid by SMACT: charges balance, and anions are the more electronegative.

    Pure elements and alloys of metals are valid. With the oxidation states that CDVAE used, 91.0 % of the structures of
    MP-20's test split are valid; with SMACT's present default, 92.7 %. SMACT tries all combinations of states, so
    compositions with more elements than `MIXED` are not evaluated, and count as not valid.
    """
    if len(key) > MIXED:
        return False
    core, screening = need("pymatgen.core"), need("smact.screening")
    try:
        with quiet():
            composition = core.Composition({symbol(z): count for z, count in key})
            return bool(screening.smact_validity(composition, oxidation_states_set=OXIDATION))
    except (KeyError, NameError, TypeError, ValueError):  # elements without data
        return False


def cell_matrix(lengths: np.ndarray, angles: np.ndarray) -> np.ndarray:  # (3,), (3,) -> (3, 3)
    """Return the cell vectors a, b and c as rows; NaN if the angles do not form a cell."""
    cosine, sine = np.cos(np.radians(angles)), np.sin(np.radians(angles))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        y = (cosine[0] - cosine[1] * cosine[2]) / sine[2]
        z = np.sqrt(1 - cosine[1] ** 2 - y**2)
        unit = np.array([[1.0, 0, 0], [cosine[2], sine[2], 0], [cosine[1], y, z]])
        return lengths[:, None] * unit


def arrays_of(crystals: Crystals) -> dict[str, np.ndarray]:
    """Return crystals as the arrays of an interactive gallery.

    Returns:
        `lattice`, `(N, 3, 3)` in ångström with the cell vectors as rows; `species` and `coord`, the atomic numbers and
        fractional coordinates of all atoms; and `first`, `(N + 1,)`, the index of each crystal's first atom.
    """
    edges, corners = (part.double().numpy() for part in (crystals.lengths, crystals.angles))
    lattice = [cell_matrix(*pair) for pair in zip(edges, corners, strict=True)]
    present = crystals.numbers > 0
    return {
        "lattice": np.array(lattice, dtype=np.float32).reshape(-1, 3, 3),
        "first": np.concatenate([[0], crystals.atoms.cumsum(0).numpy()]),
        "species": crystals.numbers[present].clamp(max=255).numpy().astype(np.uint8),
        "coord": crystals.coords[present].float().numpy(),
    }


@dataclass(frozen=True)
class Candidate:
    """A structure to judge.

    Attributes:
        name: Its name.
        numbers: Atomic numbers, `(A,)`.
        coords: Fractional coordinates, `(A, 3)`.
        cell: The cell vectors a, b and c in ångström as rows, `(3, 3)`.
        problem: The reason why it cannot be judged; empty if it can.
        doubt: The doubt of each atom, `(A,)`, high = doubtful; `None` if it was not computed.
    """

    name: str
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    coords: np.ndarray = field(default_factory=lambda: np.zeros((0, 3)))
    cell: np.ndarray = field(default_factory=lambda: np.full((3, 3), np.nan))
    problem: str = ""
    doubt: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def known(self) -> bool:
        """Whether there are atoms and all of their elements are known."""
        return len(self) > 0 and bool(((self.numbers >= 1) & (self.numbers <= ELEMENTS)).all())

    @property
    def finite(self) -> bool:
        """Whether the cell and all coordinates are finite."""
        return bool(np.isfinite(self.cell).all() and np.isfinite(self.coords).all())

    @property
    def key(self) -> Key:
        return key_of(self.numbers)

    @property
    def volume(self) -> float:
        return float(abs(np.linalg.det(self.cell)))

    @property
    def formula(self) -> str:
        """The reduced formula from pymatgen, metals first; empty if an element is unknown."""
        return formula_of(self.key) if self.known else ""

    def structure(self) -> Any:
        """Return a pymatgen structure, with the site property `doubt` if it was computed."""
        core, sites = need("pymatgen.core"), None if self.doubt is None else {"doubt": self.doubt.tolist()}
        return core.Structure(core.Lattice(self.cell), self.numbers.tolist(), self.coords, site_properties=sites)

    def atoms(self) -> Any:
        """Return ASE atoms, with the array `doubt` if it was computed."""
        atoms = need("ase").Atoms(numbers=self.numbers, scaled_positions=self.coords, cell=self.cell, pbc=True)
        if self.doubt is not None:
            atoms.set_array("doubt", self.doubt, float)
        return atoms


def candidate_of(structure: Any, name: str) -> Candidate:
    """Return the candidate of a pymatgen structure or of ASE atoms."""
    if hasattr(structure, "get_scaled_positions"):
        cell, numbers = np.array(structure.cell[:]), structure.numbers
        if not np.isfinite(cell).all() or abs(np.linalg.det(cell)) < 1e-9:
            return Candidate(name, problem="it has no cell, so it is not a crystal")
        return Candidate(name, np.array(numbers), structure.get_scaled_positions(wrap=False), cell)
    if not hasattr(structure, "is_ordered"):
        raise DataError(
            f"a structure must be a pymatgen structure, ASE atoms or a row of Crystals, not {type(structure).__name__}"
        )
    if not structure.is_ordered:
        problem = "sites are partially occupied or shared by several elements; give an ordered structure"
        return Candidate(name, problem=problem)
    numbers = np.array([int(site.specie.Z) for site in structure], int)
    return Candidate(name, numbers, np.array(structure.frac_coords, float), np.array(structure.lattice.matrix, float))


def candidates(structures: Crystals | Sequence[Any]) -> list[Candidate]:
    """Return the candidates of crystals, pymatgen structures or ASE atoms; candidates are returned unchanged."""
    if isinstance(structures, Crystals):
        lengths, angles = structures.lengths.double().numpy(), structures.angles.double().numpy()
        coords, numbers = structures.coords.double().numpy(), structures.numbers.numpy()
        return [
            Candidate(name, numbers[i, :count], coords[i, :count], cell_matrix(lengths[i], angles[i]))
            for i, (name, count) in enumerate(zip(structures.names, structures.atoms.tolist(), strict=True))
        ]
    width = max(5, len(str(len(structures))))
    return [s if isinstance(s, Candidate) else candidate_of(s, f"{i:0{width}d}") for i, s in enumerate(structures)]


# ---- distances ---------------------------------------------------------------------------------------------------


class Neighbours(NamedTuple):
    """Ordered pairs of atoms within a cutoff. Each pair occurs in both directions."""

    centre: np.ndarray  # (E,)
    other: np.ndarray  # (E,)
    image: np.ndarray  # (E, 3), the cell of the other atom
    distance: np.ndarray  # (E,) Å


def neighbours(candidate: Candidate, cutoff: float) -> Neighbours:
    """Return all pairs within the cutoff. For an `unmeasurable` cell, the search may take all memory."""
    search = need("pymatgen.optimization.neighbors").find_points_in_spheres
    cell = np.ascontiguousarray(candidate.cell, dtype=float)
    places = np.ascontiguousarray((candidate.coords % 1.0) @ cell)
    pairs = search(places, places, r=float(cutoff), pbc=np.ones(3, np.int64), lattice=cell, tol=1e-8)
    centre, other, image, distance = (np.asarray(part) for part in pairs)
    itself = (centre == other) & (image == 0).all(
        -1
    )  # compared by index, because two atoms at the same position are a pair
    return Neighbours(*(part[~itself] for part in (centre, other, image, distance)))


def unmeasurable(candidate: Candidate) -> str:
    """Return the reason why distances in this cell cannot be measured at a bounded cost; empty if they can."""
    if candidate.problem:
        return candidate.problem
    if not len(candidate):
        return "it has no atoms"
    if not candidate.finite:
        return "its cell or coordinates are not finite, or its angles do not form a cell"
    per_atom = candidate.volume / len(candidate)
    if per_atom < DENSEST:
        return f"its cell has collapsed: {per_atom:.3g} Å³ per atom"
    if per_atom > EMPTIEST:
        return f"its cell is nearly empty: {per_atom:.3g} Å³ per atom"
    height = 1 / np.linalg.norm(np.linalg.inv(candidate.cell), axis=0).max()
    return f"its cell is flat: only {height:.3g} Å high" if height < THINNEST else ""


def needle(candidate: Candidate) -> str:
    """Return the reason if the cell is so long that an energy or a fingerprint takes minutes; empty if it is not."""
    edges = np.linalg.norm(candidate.cell, axis=1)
    too_long = edges.max() > NEEDLE * edges.min()
    return f"its cell is needle-shaped: edges of {edges.min():.3g} and {edges.max():.3g} Å" if too_long else ""


def refusal(candidate: Candidate, highest: int = ELEMENTS) -> str:
    """Return the reason why no energy can be computed, or "". `highest` is the model's largest atomic number."""
    if reason := unmeasurable(candidate):
        return reason
    if not candidate.known:
        unknown = next(int(z) for z in candidate.numbers if not 1 <= z <= ELEMENTS)
        return f"atomic number {unknown} is not one of the {ELEMENTS} elements"
    if (last := int(candidate.numbers.max())) > highest:
        return f"the model does not support {symbol(last)}"
    if reason := needle(candidate):
        return reason
    close = neighbours(candidate, CLOSEST)
    if not len(close.distance):
        return ""
    first = int(close.distance.argmin())
    i, j = int(close.centre[first]), int(close.other[first])
    both = f"{symbol(candidate.numbers[i])} and {symbol(candidate.numbers[j])} (atoms {i} and {j})"
    return f"{both} coincide: {close.distance[first]:.3g} Å apart"
