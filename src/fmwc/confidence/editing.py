"""Editing: a sample is disturbed where its way is undecided, and goes on from there with all channels free.

Times are snapped to the run's own grid, so that nothing is integrated anew but what comes after the edit: an edit acts
at the start of the step that its time falls in. An edit of scale 0 is then the run itself, bit for bit where the
samples are integrated in the same batches, else to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmwc.confidence.resuming import one_a_sample, resume, snapped, space_of, states_of
from fmwc.errors import ShapeError, UsageError, nearest, pick
from fmwc.flow import Space
from fmwc.randomness import Blocks, Randomness, derive
from fmwc.sampling import Trajectory
from fmwc.state import SINGLE, State, channels, each

__all__ = ["KINDS", "critical_time", "edit", "random_times"]

KINDS = ("variance", "transported")


# ---- when -------------------------------------------------------------------------------------------------------


def critical_time(run: Trajectory, channel: str | None = None, kind: str = "variance") -> Tensor:  # (B,)
    """When each sample's way is least decided: where the variance peaks; of equal peaks the first.

    Arguments:
        channel: Read one channel's variance; if not given, all of them, each in its unit.
        kind: `variance`, the paper's argmax of σ_t² over the times it was read; or `transported`, the time whose noise
            most moves the endpoint: the peak of the transported profile summed over layers, a step's share divided by
            its length squared, as which it grows.
    """
    if kind not in KINDS:
        raise UsageError(nearest(kind, KINDS, "kind of critical time"))
    if channel is not None and channel not in channels(run.x):
        raise UsageError(nearest(channel, channels(run.x), "channel"))
    if kind == "transported":
        if run.transported is None:
            raise UsageError("the transported profile was not read: sample(..., transport=True)")
        if channel is not None:
            raise UsageError("the transported profile is of the whole state at its end; leave out channel")
        lengths = run.grid[1:] - run.grid[:-1]
        profile = run.transported.profile.sum(1) / lengths.square()
        return run.grid.gather(0, profile.argmax(0, keepdim=True))[0]
    if not len(run.times):
        raise UsageError("this run kept no variance; sample with confidence='linearised'")
    if channel is None:
        doubt = run.std
    else:
        doubt = channels(run.var)[channel].expand_as(channels(run.mean)[channel]).flatten(2).sum(2)
    return run.times.gather(0, doubt.argmax(0, keepdim=True))[0]


def random_times(run: Trajectory, seed: int = 0, replicates: int = 1) -> Tensor:  # (B,) or (B, replicates)
    """The baseline: a time uniform over each sample's run, at the start of the step it falls in."""
    drawn = Blocks(derive(seed, "random times"), 0, len(run)).uniform(run.grid.new_empty(len(run), replicates))
    start = run.grid[0][:, None]
    times = start + (1 - start) * drawn
    index = torch.stack([snapped(run, column) for column in times.T], 1)
    found = run.grid.T.gather(1, index)
    return found[:, 0] if replicates == 1 else found


# ---- how --------------------------------------------------------------------------------------------------------


def edit(
    field: Any,
    run: Trajectory,
    channel: str | None,
    *,
    at: float | Tensor,
    scale: float | Mapping[str, float],
    seed: int = 0,
    replicates: int = 1,
    together: bool = True,
    **options: Any,
) -> Trajectory:
    """Gaussian noise in one channel at a time, and the deterministic flow from there to t = 1 (paper, editing).

    What comes back is the whole way: the run's own readings before the edit, new ones after it, so that every score
    can be read. Its `states`, if the run kept them, are those of the edited way.

    Arguments:
        field, run: The field, and the run to edit. States that the run did not keep are made again from `x0`.
        channel: Which channel gets the noise; `None` is all of them.
        at: When, in [0, 1): a number, one a sample `(B,)`, or one a replicate `(B, replicates)`.
        scale: The standard deviation, in the channel's own unit. With `channel=None` a number is divided by the root of
            each channel's training weight (its unit in `Trajectory.units`); a dict names each channel's own. Noise is
            tangent to the manifold, zero in absent rows, and without mean in centred channels.
        seed: Seeds the noise.
        replicates: Edits of each sample; those of sample i are rows i·replicates, …
        together: Integrate all samples in one batch, the later ones waiting for their time: fewest calls. Otherwise
            those of one time together, so that no evaluation is spent on waiting.
        options: How the run was made, as given to `sample`: `stepper`, `decoder`, `anneal`, `confidence`, `space`,
            `batch`, and conditions that were not tensors. A condition that the run has is given anew (`y=…`) to hold
            from the edit on: another class while what is decided stays. With `confidence=False` the edit has no
            readings. The run's times are taken along, but not what a controller did to the velocity.
    """
    space = space_of(field, run, options)
    scales = _scales(space, channel, scale)
    if replicates < 1:
        raise UsageError(f"an edit is replicated at least once, got {replicates}")
    when = _when(run, at, replicates)
    renewed = {name: options[name] for name in run.cond.keys() & options.keys()}
    way = {name: value for name, value in options.items() if name not in renewed}
    origin = run if run.states is not None else states_of(field, run, **way)[0]
    index = torch.arange(len(run), device=run.grid.device).repeat_interleave(replicates)
    repeated = origin.take(index)
    if options.get("confidence") is False:  # then nothing is known of the variance after the edit
        repeated = replace(
            repeated, **{n: each(lambda c: c[:0], getattr(repeated, n)) for n in ("times", "mean", "var")}
        )
    first = snapped(repeated, when)
    here = _disturbed(
        space.given(repeated.cond),
        _gathered(repeated, first),
        scales,
        Blocks(derive(seed, "edit"), 0, len(repeated)),
    )
    options = {k: v[index] if one_a_sample(v, len(run)) else v for k, v in options.items()}
    done, _ = resume(field, repeated, here, first, together=together, seed=seed, **options)
    done = replace(done, cond={**done.cond, **{name: options[name] for name in renewed}})
    return done if run.states is not None else replace(done, states=None)


# ---- parts ------------------------------------------------------------------------------------------------------


def _scales(space: Space, channel: str | None, scale: float | Mapping[str, float]) -> dict[str, float]:
    """The standard deviation of each channel that is disturbed."""
    if channel is not None:
        pick(space.channels, channel, "channel")
    if isinstance(scale, Mapping):
        if channel is not None:
            raise UsageError("a scale for each channel is for channel=None; for one channel give one number")
        for name in scale:
            pick(space.channels, name, "channel")
        scales = {name: float(value) for name, value in scale.items()}
    elif channel is not None:
        scales = {channel: float(scale)}
    else:
        scales = {name: float(scale) / c.weight**0.5 for name, c in space.channels.items()}
    if not all(0 <= value < float("inf") for value in scales.values()):
        raise UsageError(f"a scale is a standard deviation, at least 0; got {scale}")
    return scales


def _when(run: Trajectory, at: float | Tensor, replicates: int) -> Tensor:  # -> (B·replicates,)
    times = torch.as_tensor(at, dtype=run.grid.dtype, device=run.grid.device)
    if times.ndim == 1:
        times = times[:, None]
    if times.ndim and times.shape not in ((len(run), 1), (len(run), replicates)):
        raise ShapeError(f"at is one time, one a sample ({len(run)}), or one a replicate; got {tuple(times.shape)}")
    if not bool(((times >= 0) & (times < 1)).all()):
        raise UsageError("an edit's time lies in [0, 1)")
    return times.expand(len(run), replicates).reshape(-1)


def _gathered(run: Trajectory, first: Tensor) -> Any:
    """Each sample's state at the start of its own step."""
    assert run.states is not None
    rows = torch.arange(len(first), device=first.device)
    return each(lambda *c: torch.stack(c)[first, rows], *run.states)


def _disturbed(space: Space, x: Any, scales: Mapping[str, float], randomness: Randomness) -> Any:
    """exp_x of Gaussian noise in the chosen channels; the others as they are."""
    drawn = {n: randomness.normal(c) * scales[n] if n in scales else torch.zeros_like(c) for n, c in _named(x)}
    noise = drawn[SINGLE] if space.single else drawn
    one = torch.ones_like(next(iter(drawn.values())).flatten(1)[:, 0])
    moved = channels(space.advance(x, noise, one))
    result = {name: moved[name] if name in scales else value for name, value in _named(x)}
    return result[SINGLE] if space.single else result


def _named(x: State) -> list[tuple[str, Tensor]]:
    return list(channels(x).items())
