"""Compute energies, forces and stresses of structures with an energy model."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import numpy as np
import torch

from fmwc.crystals.structures import (
    ELEMENTS,
    Candidate,
    Crystals,
    Neighbours,
    candidates,
    need,
    neighbours,
    one_line,
    quiet,
    refusal,
    symbol,
)
from fmwc.entry import call_entry
from fmwc.errors import DataError, UnknownNameError, UsageError, nearest

__all__ = [
    "CALCULATORS",
    "Calculator",
    "Chgnet",
    "Energies",
    "Forces",
    "Progress",
    "calculator",
    "energies",
    "graph",
    "mp2020_correction",
    "version",
]


# ---- graphs of CHGNet ------------------------------------------------------------------------------------------------
# CHGNet in batches, without forces. The weights come with the chgnet package.
#
# The package's own converter creates a Python object for every bond: 1.5 ms per structure instead of the 0.4 ms of
# `graph`, which uses whole arrays. When it fails, it also writes a file into the working directory.

BATCH = {"cpu": 10_000, "cuda": 300_000}  # bonds and angles per batch
WEIGHTS = "pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar"


def _reversed(pairs: Neighbours, atoms: int) -> np.ndarray:  # (E,)
    """Return the index of the reversed pair of each pair; −1 if it is missing."""
    reach = int(abs(pairs.image).max()) + 1
    base = 2 * reach + 1

    def code(centre: np.ndarray, other: np.ndarray, image: np.ndarray) -> np.ndarray:
        x, y, z = (image.astype(np.int64) + reach).T
        return (((centre * atoms + other) * base + x) * base + y) * base + z

    forward = code(pairs.centre, pairs.other, pairs.image)
    backward = code(pairs.other, pairs.centre, -pairs.image)
    order = np.argsort(forward)
    place = order[np.searchsorted(forward[order], backward).clip(max=len(order) - 1)]
    return np.where(forward[place] == backward, place, -1)


def _angles(centre: np.ndarray, short: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all ordered pairs of distinct short bonds at the same atom."""
    short = short[np.argsort(centre[short], kind="stable")]
    _, start, counts = np.unique(centre[short], return_index=True, return_counts=True)
    per_bond = np.repeat(counts, counts)  # the number of short bonds of this bond's atom
    first = np.repeat(np.arange(len(short)), per_bond)
    offset = np.arange(len(first)) - np.repeat(np.cumsum(per_bond) - per_bond, per_bond)
    second = np.repeat(np.repeat(start, counts), per_bond) + offset
    different = first != second
    return short[first[different]], short[second[different]]


def graph(candidate: Candidate, cutoff: float, bond_cutoff: float) -> Any:
    """Return the `CrystalGraph` of a structure, which `refusal` must accept."""
    pairs = neighbours(candidate, cutoff)
    if len(pairs.centre):
        back = _reversed(pairs, len(candidate))
        if (back < 0).any():  # due to rounding, a bond may be within the cutoff in one direction only
            pairs = Neighbours(*(part[back >= 0] for part in pairs))
            back = _reversed(pairs, len(candidate))
    alone = np.setdiff1d(np.arange(len(candidate)), pairs.centre)
    if len(alone):
        element = symbol(candidate.numbers[alone[0]])
        raise DataError(f"{element} (atom {alone[0]}) is isolated: no neighbour within {cutoff:g} Å")
    once = np.flatnonzero(np.arange(len(back)) < back)
    undirected = np.empty(len(back), np.int64)
    undirected[once] = undirected[back[once]] = np.arange(len(once))
    first, second = _angles(pairs.centre, np.flatnonzero(pairs.distance < bond_cutoff))
    bonds = np.stack([pairs.centre[first], undirected[first], first, undirected[second], second], 1)

    def integers(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))

    return need("chgnet.graph.crystalgraph").CrystalGraph(
        atomic_number=integers(candidate.numbers),
        atom_frac_coord=torch.from_numpy((candidate.coords % 1.0).astype(np.float32)),
        atom_graph=integers(np.stack([pairs.centre, pairs.other], 1)),
        atom_graph_cutoff=cutoff,
        neighbor_image=torch.from_numpy(pairs.image.astype(np.float32)),
        directed2undirected=integers(undirected),
        undirected2directed=integers(once),
        bond_graph=integers(bonds),
        bond_graph_cutoff=bond_cutoff,
        lattice=torch.from_numpy(candidate.cell.astype(np.float32)),
    )


class Forces(NamedTuple):
    """The energy of a structure and its derivatives.

    Attributes:
        energy: eV/atom.
        forces: eV/Å, `(A, 3)`.
        stress: eV/Å³, `(3, 3)`, positive under tension.
    """

    energy: float
    forces: np.ndarray
    stress: np.ndarray


# ---- CHGNet ----------------------------------------------------------------------------------------------------------


class Chgnet:
    """CHGNet, evaluated in batches. Its energies need no correction."""

    name = "chgnet"
    highest = 94

    def __init__(self, device: str) -> None:
        package = need("chgnet")
        with quiet():
            # Like `CHGNet.load()`, but without unpickling.
            state = torch.load(Path(package.__file__).parent / WEIGHTS, map_location="cpu", weights_only=True)
            model = need("chgnet.model.model").CHGNet.from_dict(state["model"], mlp_out_bias=False, version="0.3.0")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self._cutoffs = model.graph_converter.atom_graph_cutoff, model.graph_converter.bond_graph_cutoff

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[list[float | str]]:
        return self._batches(candidates, self._energies)

    def correction(self, candidate: Candidate) -> float:
        return 0.0  # it was trained on corrected energies

    def forces(self, candidates: Sequence[Candidate]) -> list[Forces | str]:
        return [outcome for batch in self._batches(candidates, self._forces) for outcome in batch]

    def _batches(self, candidates: Sequence[Candidate], compute: Callable[[list[Any]], list[Any]]) -> Iterator[Any]:
        batch: list[Any] = []  # the graph of each structure, or the reason why there is none
        size, most = 0, BATCH["cuda" if self.device.startswith("cuda") else "cpu"]
        for candidate in candidates:
            cost, entry = 0, None
            try:
                entry = graph(candidate, *self._cutoffs)
                cost = len(entry.atom_graph) + len(entry.bond_graph)
            except DataError as error:
                entry = str(error)
            except (ValueError, MemoryError) as error:
                entry = f"no graph: {one_line(error)}"
            if size and size + cost > most:
                yield self._outcomes(batch, compute)
                batch, size = [], 0
            batch.append(entry)
            size += cost
        yield self._outcomes(batch, compute)

    def _outcomes(self, batch: list[Any], compute: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Return the results of a batch. If it fails, try each structure alone, so that only the faulty one fails."""
        graphs = [entry.to(self.device) for entry in batch if not isinstance(entry, str)]
        try:
            values = compute(graphs) if graphs else []
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            if len(batch) == 1:
                return [f"chgnet failed: {one_line(error)}"]
            return [self._outcomes([entry], compute)[0] for entry in batch]
        rest = iter(values)
        return [entry if isinstance(entry, str) else next(rest) for entry in batch]

    @torch.no_grad()
    def _energies(self, graphs: list[Any]) -> list[float]:
        values: list[float] = self.model(graphs, task="e")["e"].tolist()
        return values

    def _forces(self, graphs: list[Any]) -> list[Forces]:
        """Return forces and stresses from a single backward pass.

        CHGNet's own task `efs` does two backward passes, each of which builds a graph for second derivatives.
        """
        cells = [g.lattice for g in graphs]
        strains = [torch.zeros_like(cell, requires_grad=True) for cell in cells]
        places = [g.atom_frac_coord.detach().requires_grad_() for g in graphs]  # fractional, so independent of strain
        for g, cell, strain, place in zip(graphs, cells, strains, places, strict=True):
            g.lattice, g.atom_frac_coord = cell + cell @ strain, place
        with quiet():  # CHGNet computes volumes that are not needed here, and torch warns of their gradients
            energies = self.model(graphs, task="e")["e"]
        atoms = torch.tensor([len(place) for place in places], device=energies.device)
        found = torch.autograd.grad((energies * atoms).sum(), [*places, *strains])
        slopes, virials = found[: len(graphs)], found[len(graphs) :]
        return [
            Forces(
                energy,
                -np.linalg.solve(cell, slope.T).T,  # ∂E/∂fractional = ∂E/∂r · cellᵀ
                virial / abs(np.linalg.det(cell)),
            )
            for energy, *arrays in zip(energies.tolist(), cells, slopes, virials, strict=True)
            for cell, slope, virial in [[array.double().cpu().numpy() for array in arrays]]
        ]


# ---- energies --------------------------------------------------------------------------------------------------------

Progress = Callable[[str, int, int], None]  # stage, number done, total
PACKAGES = {  # names for pip
    "chgnet": "chgnet",
    "mace": "mace-torch",
    "orb": "orb-models",
    "uma": "fairchem-core",
    "mattersim": "mattersim",
    "sevennet": "sevenn",
}


class Calculator(Protocol):
    """An energy model."""

    name: str
    highest: int  # largest atomic number that the model supports

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[list[float | str]]:
        """Yield batches with the energy per atom of each structure, or the reason why there is none."""

    def forces(self, candidates: Sequence[Candidate]) -> list[Forces | str]:
        """Return energy, forces and stress of each structure, or the reason why there are none."""

    def correction(self, candidate: Candidate) -> float:
        """Return what the energy per atom of a structure contains besides the model's output."""
        return 0.0


@functools.cache
def _mp2020() -> Any:
    return need("pymatgen.entries.compatibility").MaterialsProject2020Compatibility(check_potcar=False)


def mp2020_correction(candidate: Candidate) -> float:
    """Return the correction of the Materials Project (MP2020) of a computed energy, in eV/atom.

    The Materials Project computes oxides and fluorides of some transition metals with GGA+U and all else with GGA, and
    fits the energies of anions to experiments (A. Wang et al., Sci. Rep. 11, 15496, 2021). Models trained on its
    uncorrected energies need the correction; otherwise oxides are about 1 eV/atom too high relative to the metals.
    """
    structure = candidate.structure()
    strongest = max(structure.composition.elements, key=lambda element: element.X).symbol
    usual = _mp2020().u_settings.get(strongest, {})
    hubbards = {e.symbol: usual[e.symbol] for e in structure.composition.elements if usual.get(e.symbol)}
    settings = {"run_type": "GGA+U" if hubbards else "GGA", "hubbards": hubbards, "software": "none"}
    entry = need("pymatgen.entries.computed_entries").ComputedStructureEntry(structure, 0.0, parameters=settings)
    with quiet():  # pymatgen warns of compositions without oxidation states
        return float(sum(part.value for part in _mp2020().get_adjustments(entry))) / len(candidate)


class _Ase:
    """An ASE calculator, which evaluates one structure at a time.

    Arguments:
        name: Its name.
        load: A function that returns it.
        corrected: Whether its energies need `mp2020_correction`.
    """

    highest = ELEMENTS

    def __init__(self, name: str, load: Callable[[], Any], *, corrected: bool = False) -> None:
        self.name, self.corrected = name, corrected
        with quiet():
            self._calculator = load()

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[list[float | str]]:
        for candidate in candidates:
            yield [self._outcome(candidate, self._energy)]

    def forces(self, candidates: Sequence[Candidate]) -> list[Forces | str]:
        def compute(candidate: Candidate, atoms: Any) -> Forces:
            return Forces(self._energy(candidate, atoms), atoms.get_forces(), atoms.get_stress(voigt=False))

        return [self._outcome(candidate, compute) for candidate in candidates]

    def correction(self, candidate: Candidate) -> float:
        return mp2020_correction(candidate) if self.corrected else 0.0

    def _energy(self, candidate: Candidate, atoms: Any) -> float:
        return float(atoms.get_potential_energy()) / len(atoms) + self.correction(candidate)

    def _outcome(self, candidate: Candidate, compute: Callable[[Candidate, Any], Any]) -> Any:
        try:
            with quiet():
                atoms = candidate.atoms()
                atoms.calc = self._calculator
                return compute(candidate, atoms)
        except Exception as error:  # affects only this structure
            return f"{self.name} failed: {one_line(error)}"


def _mace(device: str) -> Any:
    make = need("mace.calculators", PACKAGES["mace"]).mace_mp
    return make(model="medium-mpa-0", device=device, default_dtype="float64")


def _orb(device: str) -> Any:
    force_field = need("orb_models.forcefield.pretrained", PACKAGES["orb"]).orb_v3_conservative_inf_mpa(device=device)
    return need("orb_models.forcefield.calculator", PACKAGES["orb"]).ORBCalculator(force_field, device=device)


def _sevennet(device: str) -> Any:
    """Return SevenNet-0, whose weights come with the package; they are read without unpickling."""
    make, module = need("sevenn.calculator", PACKAGES["sevennet"]).SevenNetCalculator, need("sevenn.checkpoint")
    arrays = [np.ndarray, np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType, np.dtypes.Int64DType]
    rebuild: Any = np.zeros(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"  # its name in numpy 1

    def load(path: str, **_: Any) -> Any:
        return torch.load(path, weights_only=True, map_location="cpu")

    with patch.object(module, "torch_load", load), torch.serialization.safe_globals([*arrays, rebuild]):
        return make("7net-0", device=device)


def _uma(device: str) -> Any:
    core = need("fairchem.core", PACKAGES["uma"])
    unit = core.pretrained_mlip.get_predict_unit("uma-s-1p1", device=device)
    return core.FAIRChemCalculator(unit, task_name="omat")


def _mattersim(device: str) -> Any:
    return need("mattersim.forcefield", PACKAGES["mattersim"]).MatterSimCalculator(device=device)


CALCULATORS: dict[str, Callable[[str], Calculator]] = {
    "chgnet": Chgnet,
    # MACE, ORB, MatterSim and SevenNet were trained on uncorrected energies with the settings of the Materials Project.
    "mace": lambda device: _Ase("mace", lambda: _mace(device), corrected=True),
    "orb": lambda device: _Ase("orb", lambda: _orb(device), corrected=True),
    "uma": lambda device: _Ase("uma", lambda: _uma(device)),
    "mattersim": lambda device: _Ase("mattersim", lambda: _mattersim(device), corrected=True),
    "sevennet": lambda device: _Ase("sevennet", lambda: _sevennet(device), corrected=True),
}


def version(name: str) -> str:
    """Return the version of a calculator's package; empty for a calculator given as `module:function`."""
    try:
        return importlib.metadata.version(PACKAGES[name])
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return ""


@functools.lru_cache(maxsize=4)
def calculator(name: str = "chgnet", device: str = "") -> Calculator:
    """Return an energy model.

    Arguments:
        name: A name in `CALCULATORS`, or `module:function` for a function that returns an ASE calculator.
        device: The device of the model; by default a GPU if there is one.
    """
    if name in CALCULATORS:
        return CALCULATORS[name](device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if ":" not in name:
        raise UnknownNameError(nearest(name, [*CALCULATORS, "module:function"], "calculator"))
    with quiet():
        ase = call_entry(name, "an ASE calculator")
    if not hasattr(ase, "get_potential_energy"):
        raise UsageError(f"calculator '{name}' must return an ASE calculator, not {type(ase).__name__}")
    return _Ase(name, lambda: ase)


@dataclass(frozen=True)
class Energies:
    """Energies of structures in eV/atom. Structures without an energy have NaN and a problem."""

    per_atom: np.ndarray  # (N,)
    problems: tuple[str, ...]


def energies(
    structures: Crystals | Sequence[Any],
    model: str | Calculator = "chgnet",
    *,
    progress: Progress | None = None,
) -> Energies:
    """Return the energy per atom of each structure without relaxation.

    Arguments:
        structures: Crystals, or pymatgen structures, ASE atoms or candidates.
        model: A calculator or its name.
        progress: Called with the stage, the number done and the total.
    """
    given, used = candidates(structures), calculator(model) if isinstance(model, str) else model
    problems = [refusal(candidate, used.highest) for candidate in given]
    values = np.full(len(given), np.nan)
    indices = [i for i, problem in enumerate(problems) if not problem]
    outcomes: list[float | str] = []
    for batch in used.batches([given[i] for i in indices]):
        outcomes += batch
        if progress is not None:
            progress("energies", len(given) - len(indices) + len(outcomes), len(given))
    for i, outcome in zip(indices, outcomes, strict=True):
        if isinstance(outcome, str):
            problems[i] = outcome
        elif np.isfinite(outcome):
            values[i] = outcome
        else:
            problems[i] = f"the energy by {used.name} is {outcome}"
    return Energies(values, tuple(problems))
