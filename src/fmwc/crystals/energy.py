"""Compute energies of structures with an energy model."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import torch

from fmwc.crystals.structures import (
    ELEMENTS,
    Candidate,
    Crystals,
    candidates,
    need,
    one_line,
    quiet,
    refusal,
)
from fmwc.entry import call_entry
from fmwc.errors import UnknownNameError, UsageError, nearest

__all__ = [
    "CALCULATORS",
    "Calculator",
    "Energies",
    "Progress",
    "calculator",
    "energies",
    "mp2020_correction",
    "version",
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
    ase: Any  # the ASE calculator

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[list[float | str]]:
        """Yield batches with the energy per atom of each structure, or the reason why there is none."""

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
            self.ase = load()

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[list[float | str]]:
        for candidate in candidates:
            yield [self._outcome(candidate)]

    def correction(self, candidate: Candidate) -> float:
        return mp2020_correction(candidate) if self.corrected else 0.0

    def _outcome(self, candidate: Candidate) -> float | str:
        try:
            with quiet():
                atoms = candidate.atoms()
                atoms.calc = self.ase
                return float(atoms.get_potential_energy()) / len(atoms) + self.correction(candidate)
        except Exception as error:  # affects only this structure
            return f"{self.name} failed: {one_line(error)}"


WEIGHTS = "pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar"
BATCH = {"cpu": 128, "cuda": 4096}  # atoms per batch


class _Chgnet(_Ase):
    """CHGNet, whose energies are computed in batches. They need no correction: it was trained on corrected energies."""

    highest = 94

    def __init__(self, device: str) -> None:
        super().__init__("chgnet", lambda: _chgnet(device))
        self.model, self._device = self.ase.model.eval().requires_grad_(False), device

    def batches(self, candidates: Sequence[Candidate]) -> Iterator[list[float | str]]:
        batch: list[Candidate] = []
        for candidate in candidates:
            if batch and sum(map(len, batch)) + len(candidate) > BATCH[self._device.partition(":")[0]]:
                yield self._energies(batch)
                batch = []
            batch.append(candidate)
        yield self._energies(batch)

    def _energies(self, batch: list[Candidate]) -> list[float | str]:
        """Return the energies of a batch. If it fails, try each structure alone, so that only the faulty one fails."""
        if not batch:
            return []
        try:
            with quiet(), torch.no_grad():
                graphs = [self.model.graph_converter(one.structure()).to(self._device) for one in batch]
                values: list[float | str] = self.model(graphs, task="e")["e"].tolist()
                return values
        except Exception as error:
            if len(batch) == 1:
                return [f"chgnet failed: {one_line(error)}"]
            return [self._energies([one])[0] for one in batch]


def _chgnet(device: str) -> Any:
    dynamics = need("chgnet.model.dynamics")

    class OnePass(dynamics.CHGNetCalculator):  # type: ignore[name-defined]
        """CHGNet's calculator with one backward pass. Its own takes two that prepare second derivatives."""

        def calculate(self, atoms: Any = None, *_: Any, **__: Any) -> None:
            self.atoms = atoms.copy()
            graph = self.model.graph_converter(dynamics.AseAtomsAdaptor.get_structure(atoms)).to(self.device)
            cell, place = graph.lattice.detach(), graph.atom_frac_coord.detach().requires_grad_()
            strain = torch.zeros_like(cell, requires_grad=True)
            graph.lattice, graph.atom_frac_coord = cell + cell @ strain, place  # fractions do not depend on strain
            energy = len(atoms) * self.model([graph], task="e")["e"].sum()
            slope, virial = (part.double().cpu().numpy() for part in torch.autograd.grad(energy, [place, strain]))
            forces = -np.linalg.solve(cell.double().cpu().numpy(), slope.T).T
            self.results = {"forces": forces, "stress": virial / atoms.get_volume()}
            self.results |= dict.fromkeys(("energy", "free_energy"), float(energy.detach()))

    # Like `CHGNet.load()`, but without unpickling.
    state = torch.load(Path(need("chgnet").__file__).parent / WEIGHTS, map_location="cpu", weights_only=True)
    model = need("chgnet.model.model").CHGNet.from_dict(state["model"], mlp_out_bias=False, version="0.3.0")
    return OnePass(model, use_device=device, on_isolated_atoms="error")


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
    "chgnet": _Chgnet,
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
