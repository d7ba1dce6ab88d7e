"""The energy per atom of structures by a model chosen by name, a reason in place of each that has none."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from fmwc.data.crystals import ELEMENTS, Crystals
from fmwc.entry import called
from fmwc.errors import UnknownNameError, UsageError, nearest
from fmwc.metrics.crystals.candidates import Candidate, candidates
from fmwc.metrics.crystals.chgnet import Chgnet
from fmwc.metrics.crystals.extras import need, quiet, said
from fmwc.metrics.crystals.geometry import refusal

__all__ = ["CALCULATORS", "Calculator", "Energies", "Progress", "calculator", "energies", "version"]

Progress = Callable[[str, int, int], None]  # stage, how many are done, of how many
PACKAGES = {  # what pip calls them
    "chgnet": "chgnet",
    "mace": "mace-torch",
    "orb": "orb-models",
    "uma": "fairchem-core",
    "mattersim": "mattersim",
}


@dataclass(frozen=True)
class Energies:
    """One entry a structure: eV/atom, NaN where there is none, and then why."""

    per_atom: np.ndarray  # (N,)
    problems: tuple[str, ...]


class Calculator(Protocol):
    """An energy model."""

    name: str
    highest: int  # the last element that it knows

    def batches(self, those: Sequence[Candidate]) -> Iterator[list[float | str]]:
        """Energies per atom, or why there is none, of the structures in order, some at a time."""

    def ase(self) -> Any:
        """The model as an ASE calculator."""


class _Ase:
    """A model that is an ASE calculator, asked for one structure after another."""

    highest = ELEMENTS

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name = name
        with quiet():
            self._calculator = load()

    def ase(self) -> Any:
        return self._calculator

    def batches(self, those: Sequence[Candidate]) -> Iterator[list[float | str]]:
        for candidate in those:
            outcome: float | str
            try:
                with quiet():
                    outcome = float(self._calculator.get_potential_energy(candidate.atoms())) / len(candidate)
            except Exception as error:  # whatever a model may raise is about this structure alone
                outcome = f"{self.name} failed: {said(error)}"
            yield [outcome]


def _mace(device: str) -> Any:
    make = need("mace.calculators", PACKAGES["mace"]).mace_mp
    return make(model="medium-mpa-0", device=device, default_dtype="float64")


def _orb(device: str) -> Any:
    force_field = need("orb_models.forcefield.pretrained", PACKAGES["orb"]).orb_v3_conservative_inf_mpa(device=device)
    return need("orb_models.forcefield.calculator", PACKAGES["orb"]).ORBCalculator(force_field, device=device)


def _uma(device: str) -> Any:
    core = need("fairchem.core", PACKAGES["uma"])
    unit = core.pretrained_mlip.get_predict_unit("uma-s-1p1", device=device)
    return core.FAIRChemCalculator(unit, task_name="omat")


def _mattersim(device: str) -> Any:
    return need("mattersim.forcefield", PACKAGES["mattersim"]).MatterSimCalculator(device=device)


CALCULATORS: dict[str, Callable[[str], Calculator]] = {
    "chgnet": Chgnet,
    "mace": lambda device: _Ase("mace", lambda: _mace(device)),
    "orb": lambda device: _Ase("orb", lambda: _orb(device)),
    "uma": lambda device: _Ase("uma", lambda: _uma(device)),
    "mattersim": lambda device: _Ase("mattersim", lambda: _mattersim(device)),
}


def _own(name: str) -> Calculator:
    with quiet():
        made = called(name, "an ASE calculator")
    if not hasattr(made, "get_potential_energy"):
        raise UsageError(f"calculator '{name}' returned a {type(made).__name__}, which is no ASE calculator")
    return _Ase(name, lambda: made)


def version(name: str) -> str:
    """The version of the package that a calculator in the table is from; empty for one of the user's own."""
    try:
        return importlib.metadata.version(PACKAGES[name])
    except (KeyError, importlib.metadata.PackageNotFoundError):
        return ""


@functools.lru_cache(maxsize=2)
def calculator(name: str = "chgnet", device: str = "") -> Calculator:
    """An energy model by its name in `CALCULATORS`, or `module:function` of one that returns an ASE calculator.

    Arguments:
        name: The name.
        device: Where it runs; a GPU if there is one, unless given.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name in CALCULATORS:
        return CALCULATORS[name](where)
    if ":" in name:
        return _own(name)
    raise UnknownNameError(nearest(name, [*CALCULATORS, "module:function"], "calculator"))


def energies(
    structures: Crystals | Sequence[Any],
    model: str | Calculator = "chgnet",
    *,
    progress: Progress | None = None,
    stage: str = "energies",
) -> Energies:
    """The energy per atom of each structure, as it is.

    Arguments:
        structures: Crystals, or pymatgen structures, ASE's atoms or candidates.
        model: A calculator or its name.
        progress: Called with the stage, how many are done, and of how many.
        stage: What to call this work there.
    """
    those, used = candidates(structures), calculator(model) if isinstance(model, str) else model
    problems = [refusal(candidate, used.highest) for candidate in those]
    values = np.full(len(those), np.nan)
    places = [i for i, problem in enumerate(problems) if not problem]
    rest = iter(places)
    done = len(those) - len(places)
    for batch in used.batches([those[i] for i in places]):
        for outcome, i in zip(batch, rest, strict=False):
            if isinstance(outcome, str):
                problems[i] = outcome
            elif np.isfinite(outcome):
                values[i] = outcome
            else:
                problems[i] = f"the energy by {used.name} is {outcome}"
        done += len(batch)
        if progress is not None:
            progress(stage, done, len(those))
    return Energies(values, tuple(problems))
