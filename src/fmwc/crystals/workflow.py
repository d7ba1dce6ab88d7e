"""Workflows of jobflow: draw crystals, keep the surest, relax them, and pass them on to other makers.

>>> from fmwc.crystals.workflow import DrawMaker, GenerateMaker
>>> draw = DrawMaker(count=200, controls={"system": "Li-Fe-P-O"})
>>> flow = GenerateMaker(draw_maker=draw, budget=20).make()
>>> [job.name for job in flow.jobs]
['draw crystals', 'keep the surest crystals', 'relax crystals']

`jobflow.run_locally(flow)` runs it here; jobflow-remote and FireWorks run it elsewhere. With `each_maker`, a maker of
atomate2, a job of quacc, or your own continues with each relaxed structure. Install jobflow with `pip install
'fmwc[workflows]'`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jobflow import Flow, Job, Maker, Response, job
from pydantic import BaseModel
from pymatgen.core import Structure

from fmwc.checkpoint import load
from fmwc.crystals import mp20
from fmwc.crystals.domain import CrystalDomain
from fmwc.crystals.judge import judge
from fmwc.crystals.structures import candidates, crystals_of
from fmwc.errors import UsageError
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.uses.filter import choose

__all__ = ["CrystalSet", "DrawMaker", "GenerateMaker", "RelaxMaker", "for_each", "keep_surest"]


class CrystalSet(BaseModel):
    """The output of a job: structures and their table, surest first after :func:`keep_surest`.

    Attributes:
        structures: The structures.
        table: Columns with one entry per structure: `name`, `score` (high = doubtful), `rank`, `confidence` (unless it
            is withheld) and, after :class:`RelaxMaker`, the columns of `fmwc judge`.
        about: How the structures were drawn, and by which code.
    """

    structures: list[Structure]
    table: dict[str, list[Any]]
    about: dict[str, Any]


@dataclass
class DrawMaker(Maker):
    """Make a job that draws crystals with their confidence. Crystals without a valid cell are left out.

    Arguments:
        name: The name of the job.
        checkpoint: A shipped name, or a folder that the machine of the job can read.
        count: The number of crystals.
        steps: The number of steps.
        seed: The seed.
        controls: Restrictions as for :class:`fmwc.crystals.Controls`, such as `{"formula": "LiFePO4"}`.
        device: `auto`, `cpu` or `cuda`.
    """

    name: str = "draw crystals"
    checkpoint: str = "crystals"
    count: int = 100
    steps: int = 50
    seed: int = 0
    controls: dict[str, str] = field(default_factory=dict)
    device: str = "auto"

    @job(output_schema=CrystalSet)
    def make(self) -> CrystalSet:
        """Return the job."""
        clock = Clock(device := pick_device(self.device))
        network, domain = load(self.checkpoint, device=device), CrystalDomain().with_controls(self.controls)
        run = domain.draw(network, self.count, self.seed, None, steps=self.steps)
        drawn, columns = candidates(crystals_of(run)), {"name": run.names, **domain.confidence_columns(run)}
        usable = [i for i, one in enumerate(drawn) if one.known and one.finite]
        if not usable:
            raise UsageError(f"none of the {self.count} crystals has known elements and a valid cell; draw more")
        about = {
            "checkpoint": self.checkpoint,
            "steps": self.steps,
            "controls": self.controls,
            "withheld": run.withheld,
        }
        return CrystalSet(
            structures=[drawn[i].structure() for i in usable],
            table={name: [column[i] for i in usable] for name, column in columns.items()},
            about={**about, **provenance(device, clock.seconds, seed=self.seed)},
        )


@job(name="keep the surest crystals", output_schema=CrystalSet)
def keep_surest(crystals: CrystalSet, keep: float | None = None, budget: int | None = None) -> CrystalSet:
    """Return the surest crystals, surest first.

    Arguments:
        crystals: The output of :class:`DrawMaker`.
        keep: The share of crystals to keep.
        budget: The number of crystals to keep, instead of a share.
    """
    score = torch.tensor(crystals.table["score"])
    chosen = choose(score, keep, budget if budget is None else min(budget, len(score)))
    index = chosen[score[chosen].argsort(stable=True)].tolist()
    return CrystalSet(
        structures=[crystals.structures[i] for i in index],
        table={name: [column[i] for i in index] for name, column in crystals.table.items()},
        about=crystals.about,
    )


@dataclass
class RelaxMaker(Maker):
    """Make a job that relaxes and judges crystals together, which is faster than one job per structure.

    Arguments:
        name: The name of the job.
        calculator: The energy model, as for `fmwc judge --calculator`.
        steps: The maximum number of steps.
    """

    name: str = "relax crystals"
    calculator: str = "chgnet"
    steps: int = 200

    @job(output_schema=CrystalSet)
    def make(self, crystals: CrystalSet) -> CrystalSet:
        """Return the job. A structure that cannot be relaxed is returned unchanged, with its `problem` in the table."""
        data = mp20.folder_given()
        judged = judge(crystals.structures, calculator=self.calculator, data=data, relax=self.steps)
        table = {**judged.columns, **crystals.table}  # with the names of the run
        structures = [one.structure() for one in judged.candidates]
        return CrystalSet(structures=structures, table=table, about={**crystals.about, "relaxed": self.calculator})


@job(name="for each crystal")
def for_each(maker: Maker | Callable[[Structure], Job | Flow], structures: list[Structure]) -> Response:
    """Replace this job by the jobs of a maker, or of a function that returns a job, one per structure."""
    make: Callable[..., Job | Flow] = maker.make if isinstance(maker, Maker) else maker
    jobs = [make(structure) for structure in structures]
    return Response(replace=Flow(jobs, output=[one.output for one in jobs]))


@dataclass
class GenerateMaker(Maker):
    """Make a flow that draws crystals, keeps the surest, and relaxes them.

    Arguments:
        name: The name of the flow.
        draw_maker: Draws.
        keep: The share of crystals to keep, the surest.
        budget: The number of crystals to keep, instead of a share.
        relax_maker: Relaxes the crystals kept; `None` to leave them as drawn.
        each_maker: Continues with each structure: a maker whose `make` takes a pymatgen structure, as those of atomate2
            do, or a function of your own module that takes one and returns a job, such as a job of quacc for
            `structure.to_ase_atoms()`.
    """

    name: str = "generate crystals"
    draw_maker: DrawMaker = field(default_factory=DrawMaker)
    keep: float = 0.1
    budget: int | None = None
    relax_maker: RelaxMaker | None = field(default_factory=RelaxMaker)
    each_maker: Maker | Callable[[Structure], Job | Flow] | None = None

    def make(self) -> Flow:
        """Return the flow. Its output is that of the last job."""
        jobs: list[Job | Flow] = [self.draw_maker.make()]
        kept = {"keep": self.keep} if self.budget is None else {"budget": self.budget}
        jobs.append(keep_surest(jobs[-1].output, **kept))
        if self.relax_maker is not None:
            jobs.append(self.relax_maker.make(jobs[-1].output))
        if self.each_maker is not None:
            jobs.append(for_each(self.each_maker, jobs[-1].output.structures))
        return Flow(jobs, output=jobs[-1].output, name=self.name)
