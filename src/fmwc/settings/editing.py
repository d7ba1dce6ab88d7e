"""Editing samples where their way is undecided: what `fmwc edit` does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fmwc.confidence.editing import critical_time, edit, random_times
from fmwc.confidence.resuming import snapped
from fmwc.errors import UsageError, nearest, pick
from fmwc.files import claimed, write_bytes
from fmwc.report.look import png
from fmwc.sampling import Trajectory
from fmwc.settings.samples import Outcome, open_samples, ranked_by_variance, write_rows
from fmwc.settings.setting import say_on_stderr

__all__ = ["edit_samples"]

WHEN = {"critical": "variance", "transported": "transported"}  # and the kind of critical time each is
RANDOM = "random"
MOST_REPLICATES = 100_000


def edit_samples(
    samples: Path,
    out: Path,
    *,
    device: torch.device,
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
    """Disturbs samples at a time of their way, integrates them from there with all channels free, and writes them.

    Arguments:
        samples: What `fmwc sample` wrote: the folder, or the file.
        out: A folder to write to.
        channel: Which channel gets the noise; empty is all of them.
        at: When: `critical`, `transported`, `random`, or a time in [0, 1).
        before: How long before a critical time.
        scale: The standard deviation of the noise, in the channel's own unit.
        replicates: Edits of each sample.
        label: The class from the edit on; the sample's own if not given.
        only: Numbers of samples, separated by commas; or
        surest: so many, the surest first; or
        doubtful: so many, the most doubtful first; else all of them.
        checkpoint: What drew the samples; as their file says if not given.
        judge: A judge of the user's own.
        seed: Seeds the noise.
        force: Write into a folder that is not empty.
    """
    time = _time(at)
    if not before >= 0:
        raise UsageError(f"--before is a time to go back, at least 0; got {before}")
    if before and at not in WHEN:
        raise UsageError(f"--before goes back from a time that is found; with --at {at} leave it out")
    if not 0 <= scale < math.inf:
        raise UsageError(f"--scale is a standard deviation, at least 0; got {scale}")
    if not 1 <= replicates <= MOST_REPLICATES:
        raise UsageError(f"--replicates lies between 1 and {MOST_REPLICATES:,}, got {replicates}")
    opened = open_samples(samples, out, device, checkpoint, judge)
    setting, field, options = opened.setting, opened.field, opened.options
    if channel and field.space is not None:
        pick(field.space.channels, channel, "channel")
    which = _chosen(opened.run, only, surest, doubtful)
    run = ranked_by_variance(opened.run.take(which), field, setting)
    asked = {} if label is None else setting.conditions(field, len(run), label)
    options = {**options, **{name: value.to(device) for name, value in asked.items()}}
    into = channel or None
    again = opened.reads_again(run)
    if not (again and time == "critical"):  # what is missing is said before anything is computed
        when = _times(run, time, into, before, seed, replicates)
    with claimed(out, "edit", force=force):
        say_on_stderr(f"recomputing {len(run)} trajectories, and {len(run) * replicates} edits of them")
        origin = opened.with_states(run)[0]
        if again and time == "critical":  # now it is known
            when = _times(origin, time, into, before, seed, replicates)
        done = edit(field, origin, into, at=when, scale=scale, seed=seed, replicates=replicates, **options)
        done = replace(done, made=replace(opened.way_read_again if again else opened.way, by="edit").record())
        index = torch.arange(len(run), device=which.device).repeat_interleave(replicates)
        seeds = origin.take(index)
        starts = seeds.grid.gather(0, snapped(seeds, when.reshape(-1))[None])[0]
        table = {"edit": list(range(len(done))), "sample": which[index].tolist(), "time": starts.tolist()}
        table |= setting.changes(seeds, done, into)
        written = setting.write_samples(done, out)
        written.append(write_rows(out / "edits.csv", table))
        written.append(write_bytes(out / "edits.png", png(setting.draw_edits(seeds, done, table))))
    rows = [
        {"": "edits", "value": f"{len(done)}, of {len(run)} samples"},
        {"": "at", "value": f"t = {starts.mean():.2f} on average ({starts.min():.2f} to {starts.max():.2f})"},
        {"": "noise", "value": f"{scale:g} in {channel or 'all channels'}"},
        *setting.changed(table),
    ]
    return Outcome(rows, written)


def _time(at: str) -> str | float:
    if at in (*WHEN, RANDOM):
        return at
    try:
        time = float(at)
    except ValueError as error:
        raise UsageError(f"{nearest(at, [*WHEN, RANDOM], 'time')}; or a number in [0, 1)") from error
    if not 0 <= time < 1:
        raise UsageError(f"--at lies in [0, 1), got {at}")
    return time


def _times(
    run: Trajectory, time: str | float, channel: str | None, before: float, seed: int, replicates: int
) -> Tensor:  # (B, replicates)
    """When each edit of each sample comes."""
    if isinstance(time, float):
        return torch.full((len(run), replicates), time, dtype=run.grid.dtype, device=run.grid.device)
    if time == RANDOM:
        return random_times(run, seed, replicates).reshape(len(run), replicates)
    # The transported profile is of the whole state, whichever channel gets the noise.
    critical = critical_time(run, channel if time == "critical" else None, WHEN[time])
    return torch.maximum(critical - before, run.grid[0])[:, None].expand(-1, replicates)


def _chosen(run: Trajectory, only: str, surest: int | None, doubtful: int | None) -> Tensor:  # (n,)
    """The numbers of the samples to edit."""
    ways = {"--only": only or None, "--surest": surest, "--doubtful": doubtful}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"say in one way which samples to edit; got {' and '.join(given)}")
    every = torch.arange(len(run), device=run.grid.device)
    if not given:
        return every
    if only:
        try:
            numbers = [int(part) for part in only.split(",")]
        except ValueError as error:
            raise UsageError(f"--only takes numbers of samples separated by commas, got '{only}'") from error
        if not all(0 <= n < len(run) for n in numbers) or len({*numbers}) < len(numbers):
            raise UsageError(f"--only names samples from 0 to {len(run) - 1}, each once; got '{only}'")
        return every[torch.tensor(numbers, device=every.device)]
    count = surest if surest is not None else doubtful
    assert count is not None
    if not 1 <= count <= len(run):
        raise UsageError(f"{given[0]} lies between 1 and the {len(run)} samples there are, got {count}")
    return run.score().argsort(stable=True, descending=surest is None)[:count]
