"""Editing samples and redrawing doubtful ones: what `fmwc edit` and `fmwc rewind` do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fmwc.commands.inputs import (
    Outcome,
    open_samples,
    ranked_by_variance,
    require_between,
    within_condition,
    write_rows,
)
from fmwc.errors import UsageError, nearest, pick
from fmwc.files import claimed, write_bytes
from fmwc.progress import say_on_stderr
from fmwc.provenance import pick_device
from fmwc.report.page import png
from fmwc.sampling import Trajectory
from fmwc.uses.continuation import step_at
from fmwc.uses.edit import critical_time, edit, random_times
from fmwc.uses.rewind import resample

__all__ = ["edit_samples", "rewind_samples"]

CRITICAL = {"critical": "variance", "transported": "transported"}  # and the kind of each critical time
RANDOM = "random"
MOST = 100_000  # replicates, and extra evaluations per sample


def edit_samples(
    samples: Path,
    out: Path,
    *,
    device: str | torch.device = "auto",
    channel: str = "",
    at: str = "critical",
    before: float = 0.0,
    scale: float = 0.2,
    replicates: int = 1,
    label: int | None = None,
    only: str = "",
    surest: int | None = None,
    doubtful: int | None = None,
    checkpoint: str = "",
    judge: str = "",
    seed: int = 0,
    force: bool = False,
) -> Outcome:
    """Add noise to samples at a time of their trajectory, integrate from there, and write the results.

    Arguments:
        samples: A folder that `fmwc sample` wrote, or its samples.safetensors.
        out: The folder to write to.
        device: Where to compute.
        channel: The channel that gets the noise; empty: all channels.
        at: `critical`, `transported`, `random`, or a time in [0, 1).
        before: How long before a critical time the noise is added.
        scale: The standard deviation of the noise, in the channel's unit.
        replicates: Edits per sample.
        label: The class after the edit; by default, the sample's own.
        only, surest, doubtful: Which samples to edit: numbers separated by commas, or how many of the most or least
            confident. By default, all.
        checkpoint: What drew the samples; by default, the one recorded in their file.
        judge: Your own judge.
        seed: Seeds the noise.
        force: Write into a folder that is not empty.
    """
    time = _time(at)
    if not before >= 0:
        raise UsageError(f"--before must be at least 0; got {before}")
    if before and at not in CRITICAL:
        raise UsageError(f"--before is relative to a critical time; leave it out with --at {at}")
    if not 0 <= scale < math.inf:
        raise UsageError(f"--scale must be a standard deviation of at least 0; got {scale}")
    require_between("--replicates", replicates, 1, MOST)
    opened = open_samples(samples, out, pick_device(device), checkpoint, judge)
    setting, field, options = opened.setting, opened.field, opened.options
    if channel and field.space is not None:
        pick(field.space.channels, channel, "channel")
    which = _chosen(opened.run, only, surest, doubtful)
    run = ranked_by_variance(opened.run.take(which), field, setting)
    asked = {} if label is None else setting.conditions(field, len(run), label)
    options = {**options, "cond": {name: value.to(field.device) for name, value in asked.items()}}
    into = channel or None
    later = opened.reads_again(run) and time == "critical"  # the variance is still to be computed
    when = None if later else _times(run, time, into, before, seed, replicates)
    with claimed(out, "edit", force=force):
        say_on_stderr(f"recomputing {len(run)} trajectories for {len(run) * replicates} edits")
        origin = opened.with_states(run)[0]
        when = _times(origin, time, into, before, seed, replicates) if when is None else when
        done = edit(field, origin, into, at=when, scale=scale, seed=seed, replicates=replicates, **options)
        done = replace(done, made=replace(opened.record_of(run), by="edit").record())
        index = torch.arange(len(run), device=which.device).repeat_interleave(replicates)
        seeds = origin.take(index)
        starts = seeds.grid.gather(0, step_at(seeds, when.reshape(-1))[None])[0]
        table = {"edit": list(range(len(done))), "sample": which[index].tolist(), "time": starts.tolist()}
        table |= setting.compare_edits(seeds, done, into)
        written = setting.write_samples(done, out)
        written.append(write_rows(out / "edits.csv", table))
        written.append(write_bytes(out / "edits.png", png(setting.draw_edits(seeds, done, table))))
    rows = [
        {"": "edits", "value": f"{len(done)}, of {len(run)} samples"},
        {"": "time", "value": f"{starts.mean():.2f} on average ({starts.min():.2f} to {starts.max():.2f})"},
        {"": "noise", "value": f"{scale:g} in {channel or 'all channels'}"},
        *setting.summarise_edits(table),
    ]
    return Outcome(rows, written)


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


def _times(
    run: Trajectory, time: str | float, channel: str | None, before: float, seed: int, replicates: int
) -> Tensor:  # (B, replicates)
    """Return the time of each edit of each sample."""
    if isinstance(time, float):
        return torch.full((len(run), replicates), time, dtype=run.grid.dtype, device=run.grid.device)
    if time == RANDOM:
        return random_times(run, seed, replicates).reshape(len(run), replicates)
    # The transported profile is of the whole state, whichever channel gets the noise.
    critical = critical_time(run, channel if time == "critical" else None, CRITICAL[time])
    return torch.maximum(critical - before, run.grid[0])[:, None].expand(-1, replicates)


def _chosen(run: Trajectory, only: str, surest: int | None, doubtful: int | None) -> Tensor:  # (n,)
    """Return the numbers of the samples to edit."""
    options = {"--only": only or None, "--surest": surest, "--doubtful": doubtful}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} contradict each other; give only one")
    every = torch.arange(len(run), device=run.grid.device)
    if not given:
        return every
    if only:
        try:
            numbers = [int(part) for part in only.split(",")]
        except ValueError as error:
            raise UsageError(f"--only takes sample numbers separated by commas; got '{only}'") from error
        if not all(0 <= n < len(run) for n in numbers) or len({*numbers}) < len(numbers):
            raise UsageError(f"--only takes distinct sample numbers from 0 to {len(run) - 1}; got '{only}'")
        return every[torch.tensor(numbers, device=every.device)]
    count = (surest or 0) if surest is not None else (doubtful or 0)
    require_between(given[0], count, 1, len(run))
    return run.score().argsort(stable=True, descending=surest is None)[:count]


def rewind_samples(
    samples: Path,
    out: Path,
    *,
    extra: int,
    device: str | torch.device = "auto",
    share: float = 0.1,
    before: float = 0.2,
    scale: float = 0.2,
    fresh: bool = False,
    checkpoint: str = "",
    judge: str = "",
    seed: int = 0,
    force: bool = False,
) -> Outcome:
    """Redraw the least confident samples from before their critical time, in rounds; keep the more confident versions.

    Arguments:
        samples: A folder that `fmwc sample` wrote, or its samples.safetensors.
        out: The folder to write to.
        extra: Network evaluations to spend per sample, averaged over all samples. Recomputing the trajectories, which
            files do not hold, is not included.
        device: Where to compute.
        share: The share of samples redrawn per round.
        before: How long before the critical time to start.
        scale: The standard deviation of the noise, in each channel's training unit.
        fresh: Start over from new noise instead: the baseline.
        checkpoint, judge, seed, force: As for :func:`edit_samples`.
    """
    require_between("--extra", extra, 1, MOST)
    if not 0 < share <= 1:
        raise UsageError(f"--share must be in (0, 1]; got {share}")
    if not before >= 0 or not 0 <= scale < math.inf:
        raise UsageError(f"--before and --scale must be at least 0; got {before} and {scale}")
    opened = open_samples(samples, out, pick_device(device), checkpoint, judge)
    setting, field = opened.setting, opened.field
    run = ranked_by_variance(opened.run, field, setting)
    read_again = opened.reads_again(run) and not (fresh and len(run.times))
    if not read_again and not len(run.times):
        raise UsageError("these samples were drawn without their variance; draw them without --propagation none")
    run.score()  # raises before anything is computed if the score cannot be read
    origin, again = run, 0
    with claimed(out, "rewind", force=force):
        if read_again or not fresh:
            say_on_stderr(f"recomputing {len(run)} trajectories")
            origin, again = opened.with_states(run)
        origin = within_condition(origin, field)
        doubt = origin.score()
        say_on_stderr(f"rewinding with {extra * len(run)} evaluations")
        how = {"share": share, "before": before, "scale": scale, "fresh": fresh, "seed": seed, **opened.options}
        found = resample(field, origin, extra * len(run), **how)
        record = opened.record_of(run) if read_again else opened.way
        made = replace(record, by="sample" if fresh else "rewind", selected="rewind").record()
        done = replace(found.run, states=None, made=made)
        branch, after = found.branch.cpu(), done.score()
        table = {
            "sample": list(range(len(run))),
            "branch": branch.tolist(),
            "score_before": doubt.tolist(),
            "score_after": after.tolist(),
        }
        rows = [
            {"": "evaluations per sample", "value": f"{found.evaluations / len(run):.2f} of {extra}"},
            {"": "replaced", "value": f"{(branch > 0).double().mean():.1%} of {len(run)} samples"},
            {"": f"mean {origin.default_score}", "value": f"{doubt.mean():.4g} before, {after.mean():.4g} after"},
        ]
        if again:
            rows.insert(1, {"": "… to recompute the trajectories", "value": f"{again / len(run):.0f}"})
        if setting.has_judge:
            bad = {name: np.asarray(setting.judge(one)) for name, one in (("before", run), ("after", done))}
            table |= {f"bad_{name}": judged.tolist() for name, judged in bad.items()}
            value = ", ".join(f"{judged.mean():.1%} {name}" for name, judged in bad.items())
            rows.append({"": setting.bad, "value": value})
        written = setting.write_samples(done, out)
        written.append(write_rows(out / "rewound.csv", table))
    return Outcome(rows, written)
