"""Relax the positions and the cells of structures by ASE's FIRE, one by one; results are kept as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.crystals.energy import Calculator, Progress, version
from fmwc.crystals.structures import Candidate, Crystals, candidates, need, one_line, quiet, refusal
from fmwc.errors import DataError
from fmwc.files import write_json
from fmwc.readers import anything, array, number, read_json, record, text, whole

__all__ = ["LARGEST_FORCE", "Relaxed", "identity_of", "relax", "relax_all"]

LARGEST_FORCE = 0.05  # eV/Å; a relaxation ends when all forces are smaller
LARGEST = 1 << 24  # maximum bytes of a result


@dataclass(frozen=True)
class Relaxed:
    """A structure after relaxation.

    Attributes:
        candidate: The relaxed structure; the original one if the relaxation failed.
        energy: eV/atom; NaN if the relaxation failed.
        rmsd: Root mean square displacement of the atoms in Å, without their common drift and the change of the cell.
        steps: The number of steps.
        problem: The reason for a failure; empty on success.
        converged: Whether all forces are below `LARGEST_FORCE`.
    """

    candidate: Candidate
    energy: float
    rmsd: float
    steps: int
    problem: str = ""
    converged: bool = False


# ---- relaxation ------------------------------------------------------------------------------------------------------


def relax(candidate: Candidate, model: Calculator, steps: int) -> Relaxed:
    """Relax the positions and the cell of one structure by FIRE.

    Arguments:
        candidate: The structure.
        model: The energy model.
        steps: The maximum number of steps.
    """
    if reason := refusal(candidate, model.highest):
        return Relaxed(candidate, np.nan, np.nan, 0, reason)
    atoms = candidate.atoms()
    atoms.calc = model.ase
    cell = need("ase.filters").FrechetCellFilter(atoms)
    fire = need("ase.optimize").FIRE(cell, logfile=None)
    move = cell.set_positions

    def moved() -> Candidate:  # coordinates are not wrapped, so periodic images are not confused
        return replace(candidate, coords=atoms.get_scaled_positions(wrap=False), cell=np.array(atoms.cell[:]))

    def guarded(positions: Any, **options: Any) -> None:
        """Move the atoms; raise if the cell collapses, before the model takes all time and memory."""
        move(positions, **options)
        if reason := refusal(moved(), model.highest):
            raise DataError(f"during the relaxation, {reason}")

    cell.set_positions = guarded
    try:
        with quiet():
            converged = bool(fire.run(fmax=LARGEST_FORCE, steps=steps))
            energy = float(atoms.get_potential_energy()) / len(atoms) + model.correction(candidate)
            if not (np.isfinite(energy) and np.isfinite(cell.get_forces()).all()):
                raise DataError("energy or forces are not finite")
            after = moved()
    except Exception as error:  # affects only this structure
        problem = str(error) if isinstance(error, DataError) else one_line(error)
        return Relaxed(
            candidate, np.nan, np.nan, fire.nsteps, f"relaxation failed after {fire.nsteps} steps: {problem}"
        )
    shift = after.coords - candidate.coords
    shift = (shift - shift.mean(0)) @ after.cell
    rmsd = float(np.sqrt((shift**2).sum(1).mean()))
    return Relaxed(replace(after, coords=after.coords % 1.0), energy, rmsd, fire.nsteps, converged=converged)


def relax_all(
    structures: Crystals | Sequence[Any],
    model: Calculator,
    steps: int,
    *,
    kept: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Relaxed]:
    """Relax structures one by one; see `relax`.

    Arguments:
        structures: Crystals, pymatgen structures, ASE atoms or candidates.
        model: The energy model.
        steps: The maximum number of steps.
        kept: A folder for the result of each structure. Structures whose results are there are not relaxed again, so
            that an interrupted run resumes.
        progress: Called with the stage, the number done and the total.
    """
    given, found = candidates(structures), []
    settings = f"{model.name} {version(model.name)} {steps} {LARGEST_FORCE}"
    for one in given:
        path = Path(kept) / f"{identity_of([one], settings)}.json" if kept is not None else None
        if path is not None and path.exists():
            found.append(_read(path, one))
        else:
            found.append(done := relax(one, model, steps))
            if path is not None:
                write_json(path, _content(done))
        if progress is not None:
            progress("relaxation", len(found), len(given))
    return found


# ---- results on disk -------------------------------------------------------------------------------------------------

_ROWS = array(array(number(), 3, 3), 0, 10_000)
_RELAXED = {"coords": _ROWS, "cell": _ROWS, "energy": number(), "rmsd": number(), "converged": anything}
_RESULT = record({"steps": whole(), "problem": text()}, _RELAXED)


def identity_of(batch: Sequence[Candidate], settings: str = "") -> str:
    """Return a hash of structures and settings; names do not matter."""
    digest = hashlib.sha256(settings.encode())
    for candidate in batch:
        for part in (candidate.numbers.astype(np.int64), candidate.coords, candidate.cell):
            digest.update(f"{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:32]


def _content(one: Relaxed) -> dict[str, Any]:
    after = {"coords": one.candidate.coords.tolist(), "cell": one.candidate.cell.tolist(), "energy": one.energy}
    after |= {"rmsd": one.rmsd, "converged": one.converged}
    return {"steps": one.steps, "problem": one.problem, **({} if one.problem else after)}


def _read(path: Path, candidate: Candidate) -> Relaxed:
    """Return the result of a structure from its file."""
    row = read_json(path, _RESULT, LARGEST)
    if row["problem"]:
        return Relaxed(candidate, np.nan, np.nan, row["steps"], row["problem"])
    if not _RELAXED.keys() <= row.keys() or len(row["coords"]) != len(candidate):
        raise DataError(f"{path} does not fit the structure it is named after; delete it")
    after = replace(candidate, coords=np.array(row["coords"]), cell=np.array(row["cell"]))
    return Relaxed(after, row["energy"], row["rmsd"], row["steps"], converged=bool(row["converged"]))
