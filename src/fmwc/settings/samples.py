"""Samples that `fmwc sample` wrote, opened to go on from: the run, and the field that drew it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fmwc.checkpoint import identity, load
from fmwc.confidence.resuming import states_of
from fmwc.errors import CheckpointError, DataError, MismatchError, OutputError, UsageError
from fmwc.field import Field, Reference, Schedule
from fmwc.files import write_text
from fmwc.metrics.crystals.table import csv_text
from fmwc.sampling import Trajectory, compared, read_with, reread
from fmwc.sampling.scores import of_variance
from fmwc.settings import Setting, setting_of
from fmwc.settings.setting import Rows
from fmwc.settings.way import Way

__all__ = ["Opened", "Outcome", "find_samples", "open_samples", "ranked_by_variance", "within_condition", "write_rows"]

READ_TOGETHER = 1024  # samples whose activations are held at a time


class Outcome(NamedTuple):
    """What a verb came to.

    Attributes:
        rows: In words.
        written: Files and folders.
    """

    rows: Rows
    written: list[Path]


class Opened(NamedTuple):
    """Samples, and what it takes to integrate them again.

    Attributes:
        run: The samples.
        setting, field: What they are of, and what drew them.
        way: How they were made.
        options: The same, as `confidence.editing.edit` takes it.
    """

    run: Trajectory
    setting: Setting
    field: Field
    way: Way
    options: dict[str, Any]

    def with_states(self, run: Trajectory) -> tuple[Trajectory, int]:
        """Some of the run with its states, which files do not hold, and the evaluations that took.

        With many readings, too: few tell a score, and not when a sample was decided.
        """
        try:
            found, spent = states_of(self.field, run, **self.options)
        except UsageError as error:
            raise UsageError(
                f"made again from their noise, these samples end elsewhere, so {self.way.checkpoint} is not what drew "
                "them, or was trained again since; give --checkpoint"
            ) from error
        return self._read_often(found) if self.reads_again(run) else found, spent

    def reads_again(self, run: Trajectory) -> bool:
        """Whether the variance is read anew along the trajectories: it was read seldom, or not at all."""
        return (self.way.few or not len(run.times)) and self.options["confidence"] is not False

    @property
    def way_read_again(self) -> Way:
        """How the samples were made, once their variance is read anew."""
        propagation = self.way.propagation or "linearised"
        return replace(self.way, propagation=propagation, few=False, read_at=self.setting.every)

    def _read_often(self, run: Trajectory) -> Trajectory:
        estimator, every, reference = self.options["confidence"], self.setting.every, self.field.reference
        found = reread(
            self.field, run, estimator, schedule=every, seed=run.seed, batch=min(READ_TOGETHER, self.options["batch"])
        )
        if reference is None or not of_variance(reference.score):
            return ranked_by_variance(found, self.field, self.setting)
        made = read_with(estimator, len(run.grid) - 1, self.way.stepper, every)
        differs = reference.read_with.differs(made) if reference.read_with else ""
        return compared(found, reference, f"the reference was made with {differs}" if differs else "")


def write_rows(path: Path, table: dict[str, list[Any]]) -> Path:
    """Writes a table as CSV, numbers to six digits."""
    short = {n: [float(f"{v:.6g}") if isinstance(v, float) else v for v in column] for n, column in table.items()}
    return write_text(path, csv_text(short))


def find_samples(samples: Path, out: Path) -> Path:
    """The samples file: itself, or in its folder, which is not the one to write to."""
    file = samples / "samples.safetensors" if samples.is_dir() else samples
    if not file.is_file():
        raise DataError(f"{file} does not exist; give a folder that fmwc sample wrote, or its samples.safetensors")
    if out.resolve() == file.parent.resolve():
        raise OutputError(f"{out} holds the samples themselves, and nothing in it was touched; choose another --out")
    return file


def open_samples(samples: Path, out: Path, device: torch.device, checkpoint: str = "", judge: str = "") -> Opened:
    """Reads samples and loads what drew them.

    Arguments:
        samples: What `fmwc sample` wrote: the folder, or the file.
        out: Where something is to be written: not where the samples are.
        checkpoint: What drew them; as the file says if not given.
        judge: A judge of the user's own.
    """
    file = find_samples(samples, out)
    run = Trajectory.load(file)
    if len(run.grid) < 2:
        raise UsageError(f"{file} holds very many samples with their scores alone, not their way; draw fewer")
    way = Way.read(run.made, checkpoint)
    if not way.checkpoint:
        raise UsageError(
            f"{file} does not say which checkpoint drew its samples; give --checkpoint, or, for a network of your own, "
            "go on from Python: fmwc.confidence.editing, fmwc.confidence.rewinding"
        )
    try:
        setting = setting_of(way.checkpoint, judge)
        found, field = identity(way.checkpoint), load(way.checkpoint, device=device)
    except CheckpointError as error:
        if checkpoint:
            raise
        raise CheckpointError(f"{error} ({file} was drawn by it; if it moved, say where to: --checkpoint)") from error
    if way.identity and found != way.identity:
        raise MismatchError(
            f"{way.checkpoint} is not what drew {file}, or was trained again since (content {found[:12]}, not "
            f"{way.identity[:12]}); give --checkpoint"
        )
    if field.space is not None:
        field.space.check(run.x, f"{file} is not of {way.checkpoint}: ")
    if judge or setting.judges:
        setting.require_judge(field)
    options = {**way.again(field, setting.estimator(field)), "batch": setting.batch(device)}
    return Opened(run.to(device), setting, field, way, options)


def ranked_by_variance(run: Trajectory, field: Field, setting: Setting) -> Trajectory:
    """The run by a score that can be read on a new way: an edit carries neither transported variance nor checks."""
    if of_variance(run.default_score) or not len(run.times):
        return run
    return run.ranked_by(next((own.score for own in _of_variance(field)), setting.variance))


def within_condition(run: Trajectory, field: Field) -> Trajectory:
    """The run by the same score, comparable between conditions where the checkpoint's is and samples are enough."""
    known = [own.standard.cond for own in _of_variance(field) if own.standard and own.score == run.default_score]
    if not known or run.standard is not None or not run.withheld:
        return run
    with suppress(UsageError):  # too few of a condition
        return run.ranked_by(run.default_score, within=known[0])
    return run


def _of_variance(field: Field) -> list[Reference]:
    """What the field knows of scores of the variance."""
    owns = [one.reference if isinstance(one, Schedule) else one for one in (field.reference, field.schedule)]
    return [own for own in owns if own is not None and of_variance(own.score)]
