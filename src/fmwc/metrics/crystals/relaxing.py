"""A few steps downhill in energy: positions and cell together, by FIRE."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fmwc.errors import DataError
from fmwc.metrics.crystals.candidates import Candidate
from fmwc.metrics.crystals.energy import Calculator
from fmwc.metrics.crystals.extras import need, quiet, said
from fmwc.metrics.crystals.geometry import refusal

__all__ = ["Relaxed", "relax"]


@dataclass(frozen=True)
class Relaxed:
    """A structure after its relaxation.

    Attributes:
        candidate: The structure that was reached; the one given, if that failed.
        energy: eV/atom; NaN if it failed.
        rmsd: How far the atoms went in Å, root mean square, without the drift of all of them and the cell's change.
        steps: How many were made.
        problem: Why it failed; empty if it did not.
    """

    candidate: Candidate
    energy: float
    rmsd: float
    steps: int
    problem: str = ""


def relax(candidate: Candidate, model: Calculator, steps: int, *, ase: Any = None, fmax: float = 0.05) -> Relaxed:
    """Relaxes one structure, by so many steps at most.

    Arguments:
        candidate: The structure.
        model: The energy model.
        steps: How many steps at most.
        ase: Its ASE calculator, if made already.
        fmax: The largest force in eV/Å at which it is done.
    """
    if reason := refusal(candidate, model.highest):
        return Relaxed(candidate, np.nan, np.nan, 0, reason)
    made = 0
    try:
        with quiet():
            atoms = candidate.atoms()
            atoms.calc = model.ase() if ase is None else ase
            both = need("ase.filters").FrechetCellFilter(atoms)
            optimizer = need("ase.optimize").FIRE(both, logfile=None)

            def check() -> None:  # before a cell that collapses takes all time and memory
                nonlocal made
                made = optimizer.nsteps
                if reason := refusal(_moved(candidate, atoms), model.highest):
                    raise DataError(f"on the way, {reason}")

            optimizer.attach(check, interval=1)
            optimizer.run(fmax=fmax, steps=steps)
            energy = float(atoms.get_potential_energy()) / len(candidate)
    except Exception as error:  # whatever a model may raise is about this structure alone
        reason = str(error) if isinstance(error, DataError) else said(error)
        return Relaxed(candidate, np.nan, np.nan, made, f"relaxation failed after {made} steps: {reason}")
    if not np.isfinite(energy):
        return Relaxed(candidate, np.nan, np.nan, made, f"relaxation ended at an energy of {energy}")
    reached = _moved(candidate, atoms)
    away = reached.coords - candidate.coords  # the atoms are never folded back, so no image can be mistaken
    away = (away - away.mean(0)) @ reached.cell
    folded = replace(reached, coords=reached.coords % 1.0)
    return Relaxed(folded, energy, float(np.sqrt((away**2).sum(1).mean())), made)


def _moved(candidate: Candidate, atoms: Any) -> Candidate:
    return replace(candidate, coords=atoms.get_scaled_positions(wrap=False), cell=np.array(atoms.cell[:]))
