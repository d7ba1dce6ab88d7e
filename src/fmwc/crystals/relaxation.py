"""Relax the positions and the cells of structures, many together; results are kept as they come.

Each step evaluates the model once for all structures that are still moving, and moves each of them by its own FIRE.
A structure that fails, or that has converged, leaves the batch; the others are not affected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.crystals.energy import Calculator, Forces, Progress, version
from fmwc.crystals.structures import Candidate, Crystals, candidates, need, one_line, quiet, refusal
from fmwc.errors import DataError
from fmwc.files import write_json
from fmwc.readers import anything, array, number, read_json, record, text, whole

__all__ = ["LARGEST_FORCE", "Relaxed", "identity_of", "relax", "relax_all"]

LARGEST_FORCE = 0.05  # eV/Å; a relaxation ends when all forces are smaller
TOGETHER = 16  # structures relaxed together on a CPU, and the most that a kill loses
TOGETHER_ON_GPU = 512
LARGEST = 1 << 26  # maximum bytes of the results of a batch


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


# ---- one structure ---------------------------------------------------------------------------------------------------


class _Moving:
    """A structure that moves by FIRE (Bitzek et al., Phys. Rev. Lett. 97, 170201, 2006), with the constants of ASE.

    The state is that of ASE's `FrechetCellFilter`: positions, and the logarithm of the deformation of the cell.
    """

    START, LONGEST, FARTHEST = 0.1, 1.0, 0.2  # first and largest time step; largest displacement, Å
    MIXING, WAIT = 0.1, 5

    def __init__(self, candidate: Candidate) -> None:
        self.given, self.atoms = candidate, candidate.atoms()
        self.filter = need("ase.filters").FrechetCellFilter(self.atoms)
        self.velocity = np.zeros((len(candidate) + 3, 3))
        self.dt, self.mixing, self.downhill, self.steps = self.START, self.MIXING, 0, 0

    @property
    def candidate(self) -> Candidate:
        """The current structure; coordinates are not wrapped, so periodic images are not confused."""
        coords = self.atoms.get_scaled_positions(wrap=False)
        return replace(self.given, coords=coords, cell=np.array(self.atoms.cell[:]))

    def gradient(self, found: Forces) -> np.ndarray:  # (A + 3, 3)
        """Return the forces on the atoms, and on the cell as three more rows."""
        known = need("ase.calculators.singlepoint").SinglePointCalculator
        self.atoms.calc = known(self.atoms, forces=found.forces, stress=found.stress)
        return np.asarray(self.filter.get_forces())

    def step(self, force: np.ndarray) -> None:
        if self.steps:
            if (self.velocity * force).sum() > 0:
                along = force / np.linalg.norm(force) * np.linalg.norm(self.velocity)
                self.velocity = (1 - self.mixing) * self.velocity + self.mixing * along
                if self.downhill > self.WAIT:
                    self.dt, self.mixing = min(1.1 * self.dt, self.LONGEST), 0.99 * self.mixing
                self.downhill += 1
            else:
                self.velocity[:] = 0.0
                self.dt, self.mixing, self.downhill = 0.5 * self.dt, self.MIXING, 0
        self.velocity += self.dt * force
        move = self.dt * self.velocity
        self.filter.set_positions(self.filter.get_positions() + move * min(1.0, self.FARTHEST / np.linalg.norm(move)))
        self.steps += 1

    def failed(self, problem: str) -> Relaxed:
        return Relaxed(self.given, np.nan, np.nan, self.steps, problem)

    def finished(self, energy: float, converged: bool) -> Relaxed:
        after = self.candidate
        moved = after.coords - self.given.coords
        moved = (moved - moved.mean(0)) @ after.cell
        rmsd = float(np.sqrt((moved**2).sum(1).mean()))
        return Relaxed(replace(after, coords=after.coords % 1.0), energy, rmsd, self.steps, converged=converged)

    def advance(self, found: Forces | str, most: int, highest: int) -> Relaxed | None:
        """Use the model's result at the current structure; return the outcome, or `None` to continue."""
        if isinstance(found, str):
            return self.failed(f"relaxation failed after {self.steps} steps: {found}")
        if not (np.isfinite(found.energy) and np.isfinite(found.forces).all() and np.isfinite(found.stress).all()):
            return self.failed(f"relaxation failed after {self.steps} steps: energy or forces are not finite")
        try:
            with quiet():
                force = self.gradient(found)
                converged = bool((np.linalg.norm(force, axis=1) < LARGEST_FORCE).all())
                if converged or self.steps == most:
                    return self.finished(found.energy, converged)
                self.step(force)
        except Exception as error:  # affects only this structure
            return self.failed(f"relaxation failed after {self.steps} steps: {one_line(error)}")
        if reason := refusal(self.candidate, highest):  # stops a collapsing cell before it takes all time and memory
            return self.failed(f"relaxation failed after {self.steps} steps: during the relaxation, {reason}")
        return None


# ---- many structures -------------------------------------------------------------------------------------------------


def relax(candidate: Candidate, model: Calculator, steps: int) -> Relaxed:
    """Relax one structure; see `relax_all`."""
    return relax_all([candidate], model, steps)[0]


def relax_all(
    structures: Crystals | Sequence[Any],
    model: Calculator,
    steps: int,
    *,
    kept: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Relaxed]:
    """Relax the positions and the cells of structures by FIRE, many together.

    Arguments:
        structures: Crystals, pymatgen structures, ASE atoms or candidates.
        model: The energy model.
        steps: The maximum number of steps.
        kept: A folder for the results of each batch. Batches whose results are there are not relaxed again, so that an
            interrupted run resumes.
        progress: Called with the stage, the number done and the total.
    """
    given, found = candidates(structures), []
    together = TOGETHER_ON_GPU if str(getattr(model, "device", "cpu")).startswith("cuda") else TOGETHER
    settings = f"{model.name} {version(model.name)} {steps} {LARGEST_FORCE}"
    for start in range(0, len(given), together):
        batch = given[start : start + together]
        path = Path(kept) / f"{identity_of(batch, settings)}.json" if kept is not None else None
        if path is not None and path.exists():
            found += _read(path, batch)
        else:
            found += (done := _together(batch, model, steps))
            if path is not None:
                write_json(path, [_content(one) for one in done])
        if progress is not None:
            progress("relaxation", len(found), len(given))
    return found


def _together(given: list[Candidate], model: Calculator, steps: int) -> list[Relaxed]:
    outcomes: dict[int, Relaxed] = {}
    moving: dict[int, _Moving] = {}
    for i, candidate in enumerate(given):
        if reason := refusal(candidate, model.highest):
            outcomes[i] = Relaxed(candidate, np.nan, np.nan, 0, reason)
        else:
            moving[i] = _Moving(candidate)
    while moving:
        found = model.forces([one.candidate for one in moving.values()])
        for (i, one), forces in zip([*moving.items()], found, strict=True):
            if outcome := one.advance(forces, steps, model.highest):
                outcomes[i] = outcome
                del moving[i]
    return [outcomes[i] for i in range(len(given))]


# ---- results on disk -------------------------------------------------------------------------------------------------

_ROWS = array(array(number(), 3, 3), 0, 10_000)
_RELAXED = {"coords": _ROWS, "cell": _ROWS, "energy": number(), "rmsd": number(), "converged": anything}
_RESULTS = array(record({"steps": whole(), "problem": text()}, _RELAXED))


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


def _read(path: Path, batch: Sequence[Candidate]) -> list[Relaxed]:
    """Return the results of a batch from its file."""
    rows = read_json(path, _RESULTS, LARGEST)
    fits = len(rows) == len(batch) and all(
        row["problem"] or (_RELAXED.keys() <= row.keys() and len(row["coords"]) == len(candidate))
        for row, candidate in zip(rows, batch, strict=True)
    )
    if not fits:
        raise DataError(f"{path} does not fit the structures it is named after; delete it")
    return [
        Relaxed(candidate, np.nan, np.nan, row["steps"], row["problem"])
        if row["problem"]
        else Relaxed(
            replace(candidate, coords=np.array(row["coords"]), cell=np.array(row["cell"])),
            row["energy"],
            row["rmsd"],
            row["steps"],
            converged=bool(row["converged"]),
        )
        for row, candidate in zip(rows, batch, strict=True)
    ]
