"""Edit samples (`fmwc edit`)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.checkpoint import identity, load
from fmwc.cli.sample import RunRecord, write_rows
from fmwc.cli.verbs import Edit
from fmwc.domains import Domain, EditDefault, Rows, ShippedDomain
from fmwc.errors import CheckpointError, DataError, MismatchError, OutputError, UsageError, nearest, pick
from fmwc.field import Field
from fmwc.files import fresh, moved, write_bytes
from fmwc.progress import say_on_stderr
from fmwc.provenance import pick_device
from fmwc.registry import domain_of
from fmwc.report.page import png
from fmwc.sampling import SamplingConfig, Schedule, Trajectory, compared, read_with, reread
from fmwc.sampling.trajectory import of_variance
from fmwc.uses.continuation import some_with_states, step_at
from fmwc.uses.edit import critical_time, edit, random_times
from fmwc.uses.guidance import Guidance

__all__ = [
    "edit_samples",
    "find_samples",
    "integration",
    "load_checkpoint",
    "ranked_by_variance",
]

CRITICAL = {"critical": "variance", "transported": "transported"}  # values of --at: kinds of critical time
RANDOM = "random"
BATCH = 1024  # maximum number of samples whose activations are in memory at once


# ---- opening samples -------------------------------------------------------------------------------------------------


def find_samples(samples: Path, out: Path) -> Path:
    """Return the samples file of a folder; raise if `out` is or contains the same folder."""
    file = samples / "samples.safetensors" if samples.is_dir() else samples
    if not file.is_file():
        raise DataError(f"{file} does not exist; give a folder that fmwc sample wrote, or its samples.safetensors")
    if file.resolve().is_relative_to(out.resolve()):
        raise OutputError(f"{out} is the folder of the samples and was not changed; choose another --out")
    return file


class Opened(NamedTuple):
    """Samples with the field and the options to integrate them again.

    Attributes:
        run: The samples.
        domain, field: The domain and the field of their checkpoint.
        record: The settings with which they were drawn.
        options: These settings as options of :func:`fmwc.uses.edit.edit`.
    """

    run: Trajectory
    domain: ShippedDomain
    field: Field
    record: RunRecord
    options: dict[str, Any]

    def needs_variance(self, run: Trajectory) -> bool:
        """Return whether the variance must be recomputed, because it was computed at few times or not at all."""
        return (self.record.few or not len(run.times)) and self.options["confidence"] is not None

    def with_states(self, run: Trajectory, chosen: Tensor) -> Trajectory:
        """Recompute the states of some samples, which files do not hold.

        If the variance was computed at few times, recompute it along the whole trajectory.

        Arguments:
            run: All samples of the file.
            chosen: The indices of the samples to return.
        """
        rising = chosen.sort()
        try:
            recomputed = some_with_states(self.field, run, rising.values, **self.options)
        except UsageError as error:
            raise UsageError(
                f"these samples cannot be recomputed from their noise: {self.record.checkpoint} did not draw them, or "
                "was trained again since; give the right --checkpoint"
            ) from error
        recomputed = recomputed.take(rising.indices.argsort())
        return self._with_variance(recomputed) if self.needs_variance(run) else recomputed

    def record_of(self, run: Trajectory) -> RunRecord:
        """Return the settings of the run, after its variance is recomputed if needed."""
        if not self.needs_variance(run):
            return self.record
        propagation = self.record.propagation or "linearised"
        return replace(self.record, propagation=propagation, few=False, read_at=self.domain.every)

    def _with_variance(self, run: Trajectory) -> Trajectory:
        estimator, reference = self.options["confidence"], self.field.reference
        schedule = Schedule.every(self.domain.every)
        batch = min(BATCH, self.options["config"].batch)
        run = reread(self.field, run, estimator, schedule=schedule, seed=run.seed, batch=batch)
        if reference is None or not of_variance(reference.score):
            return ranked_by_variance(run, self.field, self.domain)
        made = read_with(estimator, len(run.grid) - 1, self.record.stepper, schedule)
        differs = reference.read_with.differs(made) if reference.read_with else ""
        return compared(run, reference, f"the reference was made with {differs}" if differs else "")


def open_samples(options: Edit) -> Opened:
    """Read samples and load the checkpoint that drew them."""
    device, checkpoint, judge = pick_device(options.device), options.checkpoint, options.judge
    file = find_samples(options.samples, options.out)
    run = Trajectory.load(file)
    if len(run.grid) < 2:
        raise UsageError(f"{file} holds scores but no trajectories, as every large run does; draw fewer samples")
    record = RunRecord.read(run.made, checkpoint)
    if not record.checkpoint:
        raise UsageError(
            f"{file} does not record which checkpoint drew its samples; give --checkpoint, or, for a network of your "
            "own, use Python (fmwc.uses.edit)"
        )
    try:
        domain = domain_of(record.checkpoint, judge)
        field = load_checkpoint(record, file, device)
    except CheckpointError as error:
        if checkpoint:
            raise
        raise CheckpointError(
            f"{error} ({file} was drawn with this checkpoint; if it moved, give --checkpoint)"
        ) from error
    if field.space is not None:
        field.space.check(run.x, f"{file} does not fit {record.checkpoint}: ")
    if judge or domain.judges:
        domain.require_judge(field)
    return Opened(run.to(device), domain, field, record, integration(record, domain, field))


def load_checkpoint(record: RunRecord, file: Path, device: torch.device) -> Field:
    """Load the checkpoint that drew samples; raise if it has changed since."""
    content, field = identity(record.checkpoint), load(record.checkpoint, device=device)
    if record.identity and content != record.identity:
        raise MismatchError(
            f"{record.checkpoint} did not draw {file}, or was trained again since (hash {content[:12]} instead of "
            f"{record.identity[:12]}); give the right --checkpoint"
        )
    return field


def integration(record: RunRecord, domain: Domain, field: Field) -> dict[str, Any]:
    """Return the options that reproduce recorded trajectories; raise if they cannot be reproduced."""
    if record.by != "sample":
        raise UsageError(
            f"these samples come from fmwc {record.by} and cannot be recomputed from their noise; give the original "
            "samples of fmwc sample"
        )
    if record.kind.changes_velocity:
        raise UsageError(
            f"--controller {record.controller} changed the velocity of these samples, so their trajectories cannot be "
            "recomputed; draw them with another controller"
        )
    decoder = record.decoder(field)
    if isinstance(decoder, Guidance) and decoder.probes is not None:
        raise UsageError(
            "these samples were guided with random probes, so their trajectories cannot be recomputed; draw them "
            "without --guide"
        )
    default = domain.estimator(field)
    return {
        "confidence": record.estimator(default) if record.propagation else default,
        "config": SamplingConfig(stepper=record.stepper, decoder=decoder, batch=domain.batch(field.device)),
    }


def ranked_by_variance(run: Trajectory, field: Field, domain: ShippedDomain) -> Trajectory:
    """Return the run ranked by a score of the variance, because edits have no transported variance and no checks."""
    if of_variance(run.default_score) or not len(run.times):
        return run
    reference = field.reference
    return run.ranked_by(reference.score if reference and of_variance(reference.score) else domain.variance)


# ---- edit ------------------------------------------------------------------------------------------------------------


def edit_samples(options: Edit) -> tuple[Rows, list[Path]]:
    """Add noise to samples at a time of their trajectory and integrate from there; return a summary and the files."""
    given = _time(options.at) if options.at else None
    if options.scale is not None:
        _require_scale(options.scale)
    _require_before(options.before)
    if options.before and given not in (None, *CRITICAL):
        raise UsageError(f"--before is relative to a critical time; leave it out with --at {options.at}")
    opened = open_samples(options)
    domain, field, channel = opened.domain, opened.field, options.channel or None
    if channel and field.space is not None:
        pick(field.space.channels, channel, "channel")
    default = domain.edits.get(channel, EditDefault())
    time = given if given is not None else "critical" if options.before else default.at
    paper = EditDefault() if time in CRITICAL else default
    scale = paper.scale if options.scale is None else options.scale
    chosen = _chosen(opened.run, options)
    whole = ranked_by_variance(opened.run, field, domain)
    run = whole.take(chosen)
    cond = {} if options.label is None else domain.conditions(field, len(run), options.label)
    how = {**opened.options, "cond": {name: value.to(field.device) for name, value in cond.items()}}
    later = opened.needs_variance(run) and time == "critical"  # the variance must be computed first
    times = None if later else _times(run, time, options)
    with fresh(options.out, force=options.force) as folder:
        say_on_stderr(f"recomputing {len(run)} trajectories for {len(run) * options.replicates} edits")
        origin = opened.with_states(whole, chosen)
        times = _times(origin, time, options) if times is None else times
        how |= {"at": times, "scale": scale, "seed": options.seed, "replicates": options.replicates}
        edited = edit(field, origin, channel, **how)
        edited = replace(edited, made=replace(opened.record_of(run), by="edit").made())
        index = torch.arange(len(run), device=chosen.device).repeat_interleave(options.replicates)
        before = origin.take(index)
        starts = before.grid.gather(0, step_at(before, times.reshape(-1))[None])[0]
        table = {"edit": list(range(len(edited))), "sample": chosen[index].tolist(), "time": starts.tolist()}
        table |= domain.compare_edits(before, edited, channel)
        written = domain.write_samples(edited, folder)
        written.append(write_rows(folder / "edits.csv", table))
        written.append(write_bytes(folder / "edits.png", png(domain.draw_edits(before, edited, table))))
    rows = [
        {"": "edits", "value": f"{len(edited)}, of {len(run)} samples"},
        {"": "time", "value": f"{starts.mean():.2f} on average ({starts.min():.2f} to {starts.max():.2f})"},
        {"": "noise", "value": f"{scale:g} in {channel or 'all channels'}"},
        *domain.summarise_edits(table),
    ]
    return rows, moved(written, folder, options.out)


def _require_before(before: float) -> None:
    if not before >= 0:
        raise UsageError(f"--before must be at least 0; got {before}")


def _require_scale(scale: float) -> None:
    if not 0 <= scale < math.inf:
        raise UsageError(f"--scale must be a standard deviation of at least 0; got {scale}")


def _time(at: str) -> str | float:
    """Return the time of an edit: a kind of time or a number."""
    if at in (*CRITICAL, RANDOM):
        return at
    try:
        time = float(at)
    except ValueError as error:
        raise UsageError(f"{nearest(at, [*CRITICAL, RANDOM], 'time')}; or a number in [0, 1)") from error
    if not 0 <= time < 1:
        raise UsageError(f"--at must be in [0, 1); got {at}")
    return time


def _times(run: Trajectory, time: str | float, options: Edit) -> Tensor:  # (B, replicates)
    """Return the time of each edit of each sample."""
    replicates = options.replicates
    if isinstance(time, float):
        return torch.full((len(run), replicates), time, dtype=run.grid.dtype, device=run.grid.device)
    if time == RANDOM:
        return random_times(run, options.seed, replicates).reshape(len(run), replicates)
    # The transported profile covers the whole state, whichever channel gets the noise.
    channel = options.channel or None if time == "critical" else None
    critical = critical_time(run, channel, CRITICAL[time])
    return torch.maximum(critical - options.before, run.grid[0])[:, None].expand(-1, replicates)


def _chosen(run: Trajectory, options: Edit) -> Tensor:  # (n,)
    """Return the indices of the samples to edit."""
    choices = {"--only": options.only or None, "--surest": options.surest, "--doubtful": options.doubtful}
    given = {name: value for name, value in choices.items() if value is not None}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} contradict each other; give only one")
    every = torch.arange(len(run), device=run.grid.device)
    if not given:
        return every
    if options.only:
        try:
            chosen = [int(part) for part in options.only.split(",")]
        except ValueError as error:
            raise UsageError(f"--only takes comma-separated indices of samples; got '{options.only}'") from error
        if not all(0 <= n < len(run) for n in chosen) or len({*chosen}) < len(chosen):
            raise UsageError(f"--only takes distinct indices from 0 to {len(run) - 1}; got '{options.only}'")
        return every[torch.tensor(chosen, device=every.device)]
    option, count = ("--doubtful", options.doubtful or 0) if options.surest is None else ("--surest", options.surest)
    if not 1 <= count <= len(run):
        raise UsageError(f"{option} must be between 1 and the number of samples, {len(run)}; got {count}")
    return run.score().argsort(stable=True, descending=option == "--doubtful")[:count]
