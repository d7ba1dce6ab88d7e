"""The energy per atom of structures by a model chosen by name, a reason in place of each that has none."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fmwc.data.crystals import ELEMENTS, Crystals
from fmwc.errors import DataError, UnknownNameError, UsageError, nearest
from fmwc.metrics.crystals.candidates import Candidate, candidates
from fmwc.metrics.crystals.extras import need, quiet
from fmwc.metrics.crystals.geometry import refusal
from fmwc.metrics.crystals.graphs import graph

__all__ = ["CALCULATORS", "Calculator", "Energies", "Progress", "calculator", "energies"]

Progress = Callable[[str, int, int], None]  # stage, how many are done, of how many
BATCH = {"cpu": 10_000, "cuda": 300_000}  # bonds and angles that go through the network together
WEIGHTS = "pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar"


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


def _said(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:200]}"


class _Ase:
    """A model that is an ASE calculator, asked for one structure after another."""

    highest = ELEMENTS

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name, self._load = name, load
        with quiet():
            self._calculator = load()

    def ase(self) -> Any:
        return self._calculator

    def batches(self, those: Sequence[Candidate]) -> Iterator[list[float | str]]:
        for candidate in those:
            try:
                with quiet():
                    atoms = candidate.atoms()
                    yield [float(self._calculator.get_potential_energy(atoms)) / len(candidate)]
            except Exception as error:  # whatever a model may raise is about this structure alone
                yield [f"{self.name} failed: {_said(error)}"]


class _Chgnet:
    """CHGNet by its own batches: energies alone, without forces. Its output needs no correction."""

    name = "chgnet"
    highest = 94

    def __init__(self, device: str) -> None:
        package = need("chgnet")
        with quiet():
            # What `CHGNet.load()` does, but without unpickling.
            state = torch.load(Path(package.__file__).parent / WEIGHTS, map_location="cpu", weights_only=True)
            model = need("chgnet.model.model").CHGNet.from_dict(state["model"], mlp_out_bias=False, version="0.3.0")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self._cutoffs = model.graph_converter.atom_graph_cutoff, model.graph_converter.bond_graph_cutoff

    def ase(self) -> Any:
        with quiet():
            make = need("chgnet.model.dynamics").CHGNetCalculator
            return make(self.model, use_device=self.device, on_isolated_atoms="error")

    def batches(self, those: Sequence[Candidate]) -> Iterator[list[float | str]]:
        found: list[float | str] = []
        waiting: list[tuple[int, Any]] = []  # place in `found`, graph
        size = 0
        for candidate in those:
            try:
                made = graph(candidate, *self._cutoffs)
            except (DataError, ValueError, MemoryError) as error:
                found.append(str(error) if isinstance(error, DataError) else f"no graph: {_said(error)}")
                continue
            cost = len(made.atom_graph) + len(made.bond_graph)
            if waiting and size + cost > BATCH["cuda" if self.device.startswith("cuda") else "cpu"]:
                self._fill(found, waiting)
                yield found
                found, waiting, size = [], [], 0
            waiting.append((len(found), made))
            found.append("")
            size += cost
        self._fill(found, waiting)
        yield found

    def _fill(self, found: list[float | str], waiting: list[tuple[int, Any]]) -> None:
        if not waiting:
            return
        try:
            with torch.no_grad():
                values = self.model([made.to(self.device) for _, made in waiting], task="e")["e"].cpu().tolist()
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            if len(waiting) == 1:
                found[waiting[0][0]] = f"chgnet failed: {_said(error)}"
                return
            for one in waiting:  # so that only the culprit goes without
                self._fill(found, [one])
            return
        for (place, _), value in zip(waiting, values, strict=True):
            found[place] = value


def _mace(device: str) -> Any:
    return need("mace.calculators", "mace-torch").mace_mp(model="medium-mpa-0", device=device, default_dtype="float64")


def _orb(device: str) -> Any:
    force_field = need("orb_models.forcefield.pretrained", "orb-models").orb_v3_conservative_inf_mpa(device=device)
    return need("orb_models.forcefield.calculator", "orb-models").ORBCalculator(force_field, device=device)


def _uma(device: str) -> Any:
    core = need("fairchem.core", "fairchem-core")
    unit = core.pretrained_mlip.get_predict_unit("uma-s-1p1", device=device)
    return core.FAIRChemCalculator(unit, task_name="omat")


def _mattersim(device: str) -> Any:
    return need("mattersim.forcefield", "mattersim").MatterSimCalculator(device=device)


CALCULATORS: dict[str, Callable[[str], Calculator]] = {
    "chgnet": _Chgnet,
    "mace": lambda device: _Ase("mace", lambda: _mace(device)),
    "orb": lambda device: _Ase("orb", lambda: _orb(device)),
    "uma": lambda device: _Ase("uma", lambda: _uma(device)),
    "mattersim": lambda device: _Ase("mattersim", lambda: _mattersim(device)),
}


def _own(name: str) -> Calculator:
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"calculator '{name}' cannot be found ({error}); give module:function of a function that returns "
            "an ASE calculator"
        ) from error
    made = _Ase(name, make)
    if not hasattr(made.ase(), "get_potential_energy"):
        raise UsageError(f"calculator '{name}' returned a {type(made.ase()).__name__}, which is no ASE calculator")
    return made


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
