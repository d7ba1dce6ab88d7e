"""Edit samples: add noise at a given time of a trajectory, and integrate all channels from there.

An edit is applied at the start of the step that contains its time. Only the steps after the edit are integrated again.
An edit of scale 0 reproduces the run: exactly if the batches are the same, else up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError, nearest, pick
from fmwc.flow import Space
from fmwc.randomness import Blocks, Randomness, derive
from fmwc.sampling import Trajectory
from fmwc.state import SINGLE, as_conditions, channels, select_conditions, tree_map
from fmwc.uses.continuation import continue_from, space_of, step_at, with_states

__all__ = ["KINDS", "critical_time", "edit", "random_times"]

KINDS = ("variance", "transported")


def critical_time(run: Trajectory, channel: str | None = None, kind: str = "variance") -> Tensor:  # (B,)
    """Return the time at which each trajectory is most uncertain: the first maximum of its variance.

    Arguments:
        run: A run that kept its variance.
        channel: The channel whose variance is read; `None` for the sum over channels.
        kind: `variance` for the paper's argmax of σ_t² over the times of the readings, or `transported` for the time
            whose noise moves the endpoint most: the maximum of the transported profile, summed over layers and divided
            by the squared length of each step.
    """
    if kind not in KINDS:
        raise UsageError(nearest(kind, KINDS, "kind of critical time"))
    if channel is not None and channel not in channels(run.x):
        raise UsageError(nearest(channel, channels(run.x), "channel"))
    if kind == "transported":
        if run.transported is None:
            raise UsageError("the run has no transported profile; sample with transport=True")
        if channel is not None:
            raise UsageError("the transported profile is not available per channel; leave out channel")
        lengths = run.grid[1:] - run.grid[:-1]
        profile = run.transported.profile.sum(1) / lengths.square()
        return run.grid.gather(0, profile.argmax(0, keepdim=True))[0]
    if not len(run.times):
        raise UsageError("this run kept no variance; sample with confidence=Linearised()")
    if channel is None:
        doubt = run.std
    else:
        doubt = channels(run.var)[channel].expand_as(channels(run.mean)[channel]).flatten(2).sum(2)
    return run.times.gather(0, doubt.argmax(0, keepdim=True))[0]


def random_times(run: Trajectory, seed: int = 0, replicates: int = 1) -> Tensor:  # (B,) or (B, replicates)
    """Return uniform random times, rounded down to the start of a step: the baseline for critical times."""
    drawn = Blocks(derive(seed, "random times"), 0, len(run)).uniform(run.grid.new_empty(len(run), replicates))
    start = run.grid[0][:, None]
    times = start + (1 - start) * drawn
    index = torch.stack([step_at(run, column) for column in times.T], 1)
    rounded = run.grid.T.gather(1, index)
    return rounded[:, 0] if replicates == 1 else rounded


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
    cond: Mapping[str, Any] | None = None,
    **options: Any,
) -> Trajectory:
    """Add Gaussian noise at a given time, then follow the deterministic flow to t = 1 (paper, editing).

    The result holds complete trajectories, with the readings of the run before the edit and new readings after it, so
    all variance scores are available. If the run kept its states, the result holds the edited states.

    Arguments:
        field, run: The field, and the run to edit. If the run did not keep its states, they are recomputed from `x0`.
        channel: The channel to add noise to; `None` for all channels.
        at: The time in [0, 1): one number, one per sample `(B,)`, or one per replicate `(B, replicates)`.
        scale: The standard deviation of the noise, in the unit of the channel. With `channel=None`, a number is divided
            by the square root of each channel's training weight; a dict gives one value per channel. The noise is
            tangent to the manifold, zero in absent rows, and has zero mean in centred channels.
        seed: Seeds the noise.
        replicates: The number of edits per sample. Those of sample i start at row i·replicates.
        together: Whether to integrate all samples in one batch, in which later samples wait. This needs the fewest
            network calls. Otherwise, only samples with the same time share a batch, and none waits.
        cond: Conditions that the run does not hold because they were not tensors. A condition that the run holds is
            replaced from the edit on; for example, `{"y": …}` requests another class.
        options: The options of `sample` with which the run was drawn: `confidence` and `config` (its stepper, decoder,
            anneal, space and batch). With `confidence=None`, the result has no readings. The times are those of the
            run. A controller's changes to the velocity are not repeated.
    """
    space = space_of(field, run, options.get("config"))
    scales = _scales(space, channel, scale)
    if replicates < 1:
        raise UsageError(f"replicates must be at least 1, got {replicates}")
    when = _times(run, at, replicates)
    cond = as_conditions(cond)
    renewed = run.cond.keys() & cond.keys()
    before = {name: value for name, value in cond.items() if name not in renewed}
    origin = run if run.states is not None else with_states(field, run, cond=before, **options)[0]
    index = torch.arange(len(run), device=run.grid.device).repeat_interleave(replicates)
    repeated = origin.take(index)
    if options.get("confidence", run) is None:  # the variance after the edit is not known
        repeated = replace(
            repeated, **{n: tree_map(lambda c: c[:0], getattr(repeated, n)) for n in ("times", "mean", "var")}
        )
    first = step_at(repeated, when)
    rows = torch.arange(len(first), device=first.device)
    assert repeated.states is not None
    x = tree_map(lambda *c: torch.stack(c)[first, rows], *repeated.states)
    x = _disturbed(space.given(repeated.cond), x, scales, Blocks(derive(seed, "edit"), 0, len(repeated)))
    cond = select_conditions(cond, index, len(run))
    done, _ = continue_from(field, repeated, x, first, together=together, seed=seed, cond=cond, **options)
    done = replace(done, cond={**done.cond, **{name: cond[name] for name in renewed}})
    return done if run.states is not None else replace(done, states=None)


def _scales(space: Space, channel: str | None, scale: float | Mapping[str, float]) -> dict[str, float]:
    """Return the standard deviation of each channel that gets noise."""
    if isinstance(scale, Mapping):
        if channel is not None:
            raise UsageError("scale must be a number if channel is given; for a dict of scales, leave out channel")
        scales = {name: float(value) for name, value in scale.items()}
    elif channel is not None:
        scales = {channel: float(scale)}
    else:
        scales = {name: float(scale) / c.weight**0.5 for name, c in space.channels.items()}
    for name in scales:
        pick(space.channels, name, "channel")
    if not all(0 <= value < float("inf") for value in scales.values()):
        raise UsageError(f"scale must be finite and at least 0, got {scale}")
    return scales


def _times(run: Trajectory, at: float | Tensor, replicates: int) -> Tensor:  # -> (B·replicates,)
    times = torch.as_tensor(at, dtype=run.grid.dtype, device=run.grid.device)
    if times.ndim == 1:
        times = times[:, None]
    if times.ndim and times.shape not in ((len(run), 1), (len(run), replicates)):
        raise ShapeError(
            f"at must be one time, one per sample ({len(run)}), or one per replicate, got {tuple(times.shape)}"
        )
    if not bool(((times >= 0) & (times < 1)).all()):
        raise UsageError("at must be in [0, 1)")
    return times.expand(len(run), replicates).reshape(-1)


def _disturbed(space: Space, x: Any, scales: Mapping[str, float], randomness: Randomness) -> Any:
    """Return exp_x of Gaussian noise in the chosen channels, and the other channels unchanged."""
    state = channels(x)
    noise = {n: randomness.normal(c) * scales[n] if n in scales else torch.zeros_like(c) for n, c in state.items()}
    one = torch.ones_like(next(iter(noise.values())).flatten(1)[:, 0])
    moved = channels(space.advance(x, noise[SINGLE] if space.single else noise, one))
    result = {name: moved[name] if name in scales else value for name, value in state.items()}
    return result[SINGLE] if space.single else result
