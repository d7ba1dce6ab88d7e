"""Finished samples from any source: files of fmwc, arrays, images in folders named by class, CIF files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.checkpoint import identity, load
from fmwc.commands.config import RunRecord
from fmwc.crystals.sandbox import CIF_BYTES, cells, read_text_of
from fmwc.crystals.structures import encode, from_cells
from fmwc.data import arrays, mnist
from fmwc.domains import domain_of
from fmwc.domains.domain import Rows, ShippedDomain
from fmwc.errors import CheckpointError, DataError, FmwcError, MismatchError, OutputError, UsageError
from fmwc.field import Field
from fmwc.files import write_text
from fmwc.readers import shown
from fmwc.references import Reference, Schedule
from fmwc.report.table import Table
from fmwc.sampling import Trajectory, compared, read_with, reread
from fmwc.sampling.scores import of_variance
from fmwc.state import State, batch_size
from fmwc.uses.continuation import with_states

__all__ = [
    "KINDS",
    "Inputs",
    "Opened",
    "Outcome",
    "find_samples",
    "kind_of",
    "open_samples",
    "ranked_by_variance",
    "read_inputs",
    "require_between",
    "within_condition",
    "write_rows",
]


# ---- inputs ----------------------------------------------------------------------------------------------------------

OURS = "samples.safetensors"
KINDS = (
    "a folder that fmwc sample wrote or its samples.safetensors, an array file (.npz, .npy, .safetensors, .pt), a "
    "folder of images with one subfolder per class, or CIF files"
)
RUN = {"x0", "grid", "times"}  # tensors of a samples file of fmwc, beside the samples
OTHER_NAMES = {"images": "x", "labels": "y"}  # names used by image data sets


class Inputs(NamedTuple):
    """Samples to check.

    Attributes:
        x: The samples.
        cond: Their conditions.
        names: The name of each sample.
        problems: Why a sample cannot be checked, by name.
    """

    x: State
    cond: dict[str, Tensor]
    names: list[str]
    problems: dict[str, str]


def kind_of(path: Path) -> str:
    """Return what a path holds: `run`, `arrays`, `images` or `cif`."""
    if not path.exists():
        raise DataError(f"{shown(path)} does not exist; give {KINDS}")
    if path.is_dir():
        inside = [p for p in path.iterdir() if not p.name.startswith(".")]
        if (path / OURS).is_file():
            return "run"
        if any(p.suffix.lower() == ".cif" for p in inside):
            return "cif"
        if any(p.is_dir() for p in inside):
            return "images"
        raise DataError(f"{shown(path)} holds no samples; give {KINDS}")
    if path.suffix.lower() == ".cif":
        return "cif"
    if path.suffix not in arrays.READERS:
        raise DataError(f"{shown(path)} is not a supported kind of file; give {KINDS}")
    return "run" if path.suffix == ".safetensors" and arrays.read(path).keys() >= RUN else "arrays"


def read_inputs(path: Path, *, classes: int = 10, pixels: bool = False, rows: int = 0) -> Inputs:
    """Read samples.

    Arguments:
        path: A file or a folder.
        classes: The number of classes of images in folders named by class.
        pixels: Whether the network was trained on images with values from 0 to 1; whole numbers are then pixels from
            0 to 255.
        rows: The largest number of atoms that the network supports; 0 if it is not a network of crystals.
    """
    kind = kind_of(path)
    if kind == "run":
        run = Trajectory.load(path)
        return Inputs(run.x, run.cond, run.names, {})
    if kind == "arrays":
        return _arrays(path, pixels)
    if kind == "images":
        if not pixels:
            raise UsageError(f"{shown(path)} holds image files, but the network was not trained on such images")
        found, names = mnist.pictures(path, classes)
        return Inputs(mnist.unit(found.x), {"y": found.y}, list(names), {})
    if not rows:
        raise UsageError(f"{shown(path)} holds crystals, but the network is not one of crystals")
    return _crystals(path, rows)


def _arrays(path: Path, pixels: bool) -> Inputs:
    found = arrays.read(path)
    if "x" not in found:
        found = {OTHER_NAMES.get(name, name): value for name, value in found.items()}
    whole = "x" in found and not found["x"].is_floating_point()
    x, cond = arrays.samples_of(found, path)
    if x is None:
        raise DataError(f"{shown(path)} holds {', '.join(found)[:200]} but no samples; name them x, or x.channel")
    if pixels and isinstance(x, Tensor):
        x = x[:, None] if x.ndim == 3 else x
        x = x / 255 if whole else x
    return Inputs(x, cond, [f"{i:05d}" for i in range(batch_size(x))], {})


def _crystals(path: Path, rows: int) -> Inputs:
    """Read CIF files as Niggli cells, like the training data; record why a file cannot be used."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() == ".cif" and not p.name.startswith("."))
    texts: list[str] = []
    problems: dict[str, str] = {}
    read: list[Path] = []
    for file in files:
        try:
            texts.append(read_text_of(file, CIF_BYTES))
            read.append(file)
        except FmwcError as error:
            problems[shown(file.name)] = str(error)
    kept = {}
    for file, cell in zip(read, cells(texts), strict=True):
        name = shown(file.name)
        if isinstance(cell, str):
            problems[name] = cell
        elif len(cell.numbers) > rows:
            problems[name] = f"{len(cell.numbers)} atoms; the network supports at most {rows}"
        else:
            kept[name] = cell
    if not kept:
        name, why = next(iter(problems.items()))
        raise DataError(f"none of {len(files)} structures in {shown(path)} can be checked; {name}: {why}")
    x, atoms = encode(from_cells(kept, rows))
    return Inputs(x, {"atoms": atoms}, list(kept), problems)


# ---- samples ---------------------------------------------------------------------------------------------------------
# Samples that `fmwc sample` wrote, opened to go on from: the run, and the field that drew it.

READ_TOGETHER = 1024  # samples whose activations are held at a time


def require_between(option: str, value: float, least: int, most: int) -> None:
    """Raise if the value of an option is out of range."""
    if not least <= value <= most:
        raise UsageError(f"{option} must be between {least} and {most:,}; got {value}")


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
    setting: ShippedDomain
    field: Field
    way: RunRecord
    options: dict[str, Any]

    def with_states(self, run: Trajectory) -> tuple[Trajectory, int]:
        """Some of the run with its states, which files do not hold, and the evaluations that took.

        With many readings, too: few tell a score, and not when a sample was decided.
        """
        try:
            found, spent = with_states(self.field, run, **self.options)
        except UsageError as error:
            raise UsageError(
                f"made again from their noise, these samples end elsewhere, so {self.way.checkpoint} is not what drew "
                "them, or was trained again since; give --checkpoint"
            ) from error
        return self._read_often(found) if self.reads_again(run) else found, spent

    def reads_again(self, run: Trajectory) -> bool:
        """Whether the variance is read anew along the trajectories: it was read seldom, or not at all."""
        return (self.way.few or not len(run.times)) and self.options["confidence"] is not None

    def record_of(self, run: Trajectory) -> RunRecord:
        """Return how the samples were drawn, once their variance is computed again if that is needed."""
        if not self.reads_again(run):
            return self.way
        propagation = self.way.propagation or "linearised"
        return replace(self.way, propagation=propagation, few=False, read_at=self.setting.every)

    def _read_often(self, run: Trajectory) -> Trajectory:
        estimator, every, reference = (
            self.options["confidence"],
            Schedule.every(self.setting.every),
            self.field.reference,
        )
        found = reread(
            self.field,
            run,
            estimator,
            schedule=every,
            seed=run.seed,
            batch=min(READ_TOGETHER, self.options["config"].batch),
        )
        if reference is None or not of_variance(reference.score):
            return ranked_by_variance(found, self.field, self.setting)
        made = read_with(estimator, len(run.grid) - 1, self.way.stepper, every)
        differs = reference.read_with.differs(made) if reference.read_with else ""
        return compared(found, reference, f"the reference was made with {differs}" if differs else "")


def write_rows(path: Path, table: dict[str, list[Any]]) -> Path:
    """Writes a table as CSV, numbers to six digits."""
    short = {n: [float(f"{v:.6g}") if isinstance(v, float) else v for v in column] for n, column in table.items()}
    return write_text(path, Table.from_columns(short).csv())


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
    way = RunRecord.read(run.made, checkpoint)
    if not way.checkpoint:
        raise UsageError(
            f"{file} does not say which checkpoint drew its samples; give --checkpoint, or, for a network of your own, "
            "go on from Python: fmwc.uses.edit, fmwc.uses.rewind"
        )
    try:
        setting = domain_of(way.checkpoint, judge)
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
    options = way.again(field, setting.estimator(field))
    options["config"] = replace(options["config"], batch=setting.batch(device))
    return Opened(run.to(device), setting, field, way, options)


def ranked_by_variance(run: Trajectory, field: Field, setting: ShippedDomain) -> Trajectory:
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
    owns = [field.reference, None if field.schedule is None else field.schedule.reference]
    return [own for own in owns if own is not None and of_variance(own.score)]
