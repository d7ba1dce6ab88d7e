"""The stages of a campaign: draw, check, keep, judge, relax.

A stage is a small picklable description. `open` loads what it needs (weights, an energy model) once per worker and
returns a function of the rows of one batch. The result depends on that batch alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fmwc.checkpoint import identity
from fmwc.crystals import mp20
from fmwc.crystals.energy import calculator
from fmwc.crystals.judge import Judgement, judge, validity
from fmwc.crystals.matching import Known
from fmwc.crystals.structures import refusal
from fmwc.domains import Domain, ShippedDomain
from fmwc.entry import source_of
from fmwc.errors import CheckpointError, MismatchError
from fmwc.provenance import pick_device
from fmwc.registry import domain_of, open_checkpoint
from fmwc.sampling import Trajectory
from fmwc.screening.rows import CRYSTALS, INDEX, SCORE, candidates_of, flat, rows_of, run_of

__all__ = ["Check", "Draw", "Judge", "Keep", "Stage"]

Compute = Callable[[pa.Table], pa.Table]  # the rows of one batch


class Stage(Protocol):
    """A stage.

    Attributes:
        name: Its name in the funnel.
        device: `cuda` if it needs a GPU, else `cpu`.
        evaluations: Network evaluations per row.
    """

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def evaluations(self) -> int: ...

    def open(self) -> Compute:
        """Load what the stage needs; return the function that it applies to each batch."""


@dataclass(frozen=True)
class Draw:
    """Draw samples. Batches are drawn whole, whatever number of rows is asked for, so that rows never depend on it.

    Attributes:
        checkpoint: A shipped name or a folder.
        identity: Its content hash.
        kind: The name of its domain.
        network: `module:function` that builds the network, if it is your own.
        device: The device.
        seed: The seed of the campaign.
        batch: The number of samples drawn together.
        label: The class of all samples; `None`: all classes in turn.
        controls: Restrictions of crystals, by name.
        score: The score to rank by, if it is not the checkpoint's.
        how: Options of :meth:`fmwc.domains.Domain.draw`.
        evaluations: Network evaluations per sample.
    """

    checkpoint: str
    identity: str
    kind: str
    network: str
    device: str
    seed: int
    batch: int
    label: int | None
    controls: Mapping[str, str]
    score: str
    how: Mapping[str, Any]
    evaluations: int
    name: str = field(default="draw", init=False)

    def open(self) -> Compute:
        if identity(self.checkpoint) != self.identity:
            raise MismatchError(f"{self.checkpoint} is not the checkpoint that this campaign began with; restore it")
        domain, loaded = open_checkpoint(self.checkpoint, pick_device(self.device), network=self.network)
        return partial(self._draw, domain.with_controls(self.controls) if self.controls else domain, loaded)

    def _draw(self, domain: Domain, loaded: Any, rows: pa.Table) -> pa.Table:
        run = self.run(domain, loaded, rows[INDEX][0].as_py(), self.batch)
        return rows_of(run, self.kind).slice(0, len(rows))

    def run(self, domain: Domain, loaded: Any, first: int, count: int) -> Trajectory:
        """Draw `count` samples from index `first`."""
        cond = domain.conditions(loaded, count, self.label, self.seed, first)
        config = replace(self.how["config"], first=first, batch=count)
        how = {**self.how, "cond": {k: v.to(loaded.device) for k, v in cond.items()}, "config": config}
        with warnings.catch_warnings():  # a batch that is halved has other rounding errors
            warnings.filterwarnings("error", ".*samples together do not fit in memory")
            run = domain.draw(loaded, count, self.seed, None, self.label, **how)
        return run.ranked_by(self.score) if self.score else run


@dataclass(frozen=True)
class Check:
    """Discard samples without a finite score, and crystals that cannot be judged or whose atoms overlap.

    Attributes:
        kind: The name of the domain.
    """

    kind: str
    name: str = field(default="check", init=False)
    device: str = field(default="cpu", init=False)
    evaluations: int = field(default=0, init=False)

    def open(self) -> Compute:
        return self._check

    def _check(self, rows: pa.Table) -> pa.Table:
        good = np.isfinite(rows[SCORE].to_numpy())
        if self.kind == CRYSTALS:
            good &= np.array([not refusal(one) and validity(one).distances for one in candidates_of(rows)], bool)
        return rows.filter(pa.array(good))


@dataclass(frozen=True)
class Keep:
    """Keep the rows with a score of at most `threshold`, the promise of a certificate."""

    threshold: float
    name: str = field(default="keep", init=False)
    device: str = field(default="cpu", init=False)
    evaluations: int = field(default=0, init=False)

    def open(self) -> Compute:
        return lambda rows: rows.filter(pc.less_equal(rows[SCORE], self.threshold))


JUDGED = {  # columns of judged crystals; those that compare structures of a set with one another are left out
    "formula": pa.string(),
    "energy_per_atom": pa.float64(),
    "e_above_hull": pa.float64(),
    **dict.fromkeys(("distances_ok", "apart_ok", "charge_ok", "density_ok", "valid"), pa.bool_()),
    **dict.fromkeys(("novel", "stable", "metastable"), pa.bool_()),
    "competing_phases": pa.int64(),
    "own_phases": pa.int64(),
    "decomposition": pa.string(),
    "sparse_hull": pa.string(),
    "twin": pa.string(),
    "twin_split": pa.string(),
    "problem": pa.string(),
}
LISTS = pa.list_(pa.float64())
RELAXED = {
    "energy_raw": pa.float64(),
    "e_above_hull_raw": pa.float64(),
    "rmsd": pa.float64(),
    "relax_steps": pa.int64(),
    "converged": pa.bool_(),
}


@dataclass(frozen=True)
class Judge:
    """Judge samples with the judge of their domain.

    Attributes:
        checkpoint: The checkpoint of the samples.
        kind: The name of its domain.
        judge: The judge as for `fmwc sample --judge`; empty for the default.
        shapes: The shape of a sample, by channel.
        device: The device of the judge.
        relax: For crystals, the maximum number of steps to relax each structure with first; 0 for no relaxation.
        data: For crystals, a folder of known structures.
        cut: For crystals, the largest energy above the hull of metastable structures, eV/atom.
    """

    checkpoint: str
    kind: str
    judge: str
    shapes: Mapping[str, tuple[int, ...]]
    device: str = "cpu"
    relax: int = 0
    data: str = ""
    cut: float = 0.1
    evaluations: int = field(default=0, init=False)

    @property
    def name(self) -> str:
        return "relax" if self.relax else "judge"

    def settings(self) -> dict[str, Any]:
        """Return what determines the results of the judge."""
        judge = self.judge or getattr(domain_of(self.checkpoint), "calculator", "default")
        with suppress(CheckpointError):  # the name of an energy model
            judge = identity(self.judge) if self.judge else judge
        return {
            "judge": judge,
            "judge_source": source_of(judge),
            "judge_device": self.device,
            "relax": self.relax,
            "data": mp20.content(self.data) if self.data else "",
            "cut": self.cut,
        }

    def open(self) -> Compute:
        domain = domain_of(self.checkpoint, self.judge)
        if self.kind != CRYSTALS:
            return partial(self._samples, domain)
        return partial(self._crystals, calculator(domain.calculator, self.device))  # type: ignore[attr-defined]

    def _samples(self, domain: ShippedDomain, rows: pa.Table) -> pa.Table:
        good = ~domain.judge(run_of(rows, self.shapes, self.device)) if len(rows) else np.zeros(0, bool)
        return with_columns(rows, {"good": pa.array(good)})

    def _crystals(self, model: Any, rows: pa.Table) -> pa.Table:
        given = candidates_of(rows)
        known = _known(self.data) if self.data else None
        found = judge(given, calculator=model, data=self.data or None, known=known, relax=self.relax, cut=self.cut)
        kinds = {**JUDGED, **(RELAXED if self.relax else {})}
        columns = {name: _column(found, name, kind) for name, kind in kinds.items()}
        if self.relax:
            columns["relaxed_coords"] = pa.array([one.coords.ravel() for one in found.candidates], LISTS)
            columns["relaxed_cell"] = flat(np.array([one.cell for one in found.candidates]).reshape(-1, 9))
        return with_columns(rows, columns)


def _column(found: Judgement, name: str, kind: pa.DataType) -> pa.Array:
    return pa.array(found[name], kind)


@lru_cache(maxsize=1)
def _known(data: str) -> Known:
    return Known(mp20.load_all(data))


def with_columns(rows: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Return rows with more columns; columns of the same name are replaced."""
    for name, values in columns.items():
        place = rows.schema.get_field_index(name)
        rows = rows.append_column(name, values) if place < 0 else rows.set_column(place, name, values)
    return rows
