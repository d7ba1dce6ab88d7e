"""A workflow of jobflow: draw crystals, keep the surest, relax them, and pass each on to another maker.

Copy this file and change it. After `pip install 'fmwc[crystals]' jobflow`, `python crystal_workflow.py` runs it here;
jobflow-remote or FireWorks run it elsewhere, where the module must be importable. Its outputs hold pymatgen structures
and their table. `continue_with` takes a maker of atomate2 (`ForceFieldRelaxMaker(force_field_name="CHGNet")`) or a
function of your own that takes a structure and returns a job, such as one of quacc for `structure.to_ase_atoms()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jobflow import Flow, Job, Maker, Response, job, run_locally
from pydantic import BaseModel
from pymatgen.core import Structure

from fmwc.checkpoint import load
from fmwc.crystals import mp20
from fmwc.crystals.domain import CrystalDomain
from fmwc.crystals.judge import judge
from fmwc.crystals.structures import candidates, crystals_of
from fmwc.provenance import pick_device
from fmwc.uses.filter import choose


class CrystalSet(BaseModel):
    """The output of a job: structures and their table, with `name`, `score` (high = doubtful), `rank` and more."""

    structures: list[Structure]
    table: dict[str, list[Any]]


@job(name="draw crystals", output_schema=CrystalSet)
def draw(
    count: int, controls: dict[str, str], checkpoint: str = "crystals", steps: int = 50, seed: int = 0
) -> CrystalSet:
    """Draw crystals with their confidence; those without a valid cell are left out."""
    network, domain = load(checkpoint, device=pick_device("auto")), CrystalDomain().with_controls(controls)
    run = domain.draw(network, count, seed, None, steps=steps)
    drawn, columns = candidates(crystals_of(run)), {"name": run.names, **domain.confidence_columns(run)}
    usable = [i for i, one in enumerate(drawn) if one.known and one.finite]
    return CrystalSet(
        structures=[drawn[i].structure() for i in usable],
        table={name: [column[i] for i in usable] for name, column in columns.items()},
    )


@job(name="keep the surest crystals", output_schema=CrystalSet)
def keep_surest(crystals: CrystalSet, budget: int) -> CrystalSet:
    """Return the surest crystals, surest first."""
    score = torch.tensor(crystals.table["score"])
    chosen = choose(score, None, min(budget, len(score)))
    index = chosen[score[chosen].argsort(stable=True)].tolist()
    return CrystalSet(
        structures=[crystals.structures[i] for i in index],
        table={name: [column[i] for i in index] for name, column in crystals.table.items()},
    )


@job(name="relax crystals", output_schema=CrystalSet)
def relax(crystals: CrystalSet, calculator: str = "chgnet", steps: int = 200) -> CrystalSet:
    """Relax and judge crystals together. One that cannot be relaxed has its `problem` in the table."""
    judged = judge(crystals.structures, calculator=calculator, data=mp20.folder_given(), relax=steps)
    table = {**judged.columns, **crystals.table}  # with the names of the run
    return CrystalSet(structures=[one.structure() for one in judged.candidates], table=table)


@job(name="for each crystal")
def for_each(maker: Maker | Callable[[Structure], Job | Flow], structures: list[Structure]) -> Response:
    """Replace this job by the jobs of a maker, or of a function that returns a job, one per structure."""
    make: Callable[..., Job | Flow] = maker.make if isinstance(maker, Maker) else maker
    jobs = [make(structure) for structure in structures]
    return Response(replace=Flow(jobs, output=[one.output for one in jobs]))


def workflow(
    count: int = 200,
    budget: int = 20,
    controls: dict[str, str] | None = None,
    relax_steps: int = 200,
    continue_with: Maker | Callable[[Structure], Job | Flow] | None = None,
    **options: Any,
) -> Flow:
    """Return a flow that draws, keeps the surest and relaxes; its output is that of the last job."""
    drawn = draw(count, controls or {}, **options)
    kept = keep_surest(drawn.output, budget)
    jobs: list[Job | Flow] = [drawn, kept, relax(kept.output, steps=relax_steps)]
    if continue_with is not None:
        jobs.append(for_each(continue_with, jobs[-1].output.structures))
    return Flow(jobs, output=jobs[-1].output, name="generate crystals")


if __name__ == "__main__":
    flow = workflow(controls={"system": "Li-Fe-P-O"})
    relaxed = run_locally(flow, log=False)[flow.output.uuid][1].output
    print(relaxed.structures[0].composition, relaxed.table["e_above_hull"][0])
