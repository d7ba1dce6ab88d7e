"""Going on: samples of a run integrated anew from the middle of their way, along the times the run took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.flow import Space, euclidean
from fmwc.propagate import as_estimator
from fmwc.randomness import derive
from fmwc.sampling import Sampler, Trajectory, default_estimator
from fmwc.state import State, channels, each

__all__ = ["Along", "ended_elsewhere", "one_a_sample", "resume", "snapped", "space_of", "states_of"]

SLACK = 1e-6  # a time this little before a step's start is the step's start: times pass through float32
ASTRAY = 1e-2  # a run that is made again ends within this of itself, for most samples, or was made otherwise


def states_of(field: Any, run: Trajectory, **options: Any) -> tuple[Trajectory, int]:
    """The run with its states, made again from `x0` as it was, and the evaluations of the network that took."""
    first = torch.zeros(len(run), dtype=torch.long, device=run.grid.device)
    again, spent = resume(
        field, replace(run, states=None), run.x0, first, together=True, **{**options, "confidence": False}, keep=True
    )
    space = space_of(field, run, options)
    offs = [
        (m.manifold.logmap(channels(run.x)[n], channels(again.x)[n])).flatten(1).abs().amax(1)
        for n, m in space.channels.items()
    ]
    if float(torch.stack(offs).amax(0).median()) > ASTRAY:
        raise UsageError(
            "made again from x0, the run ends elsewhere: give its stepper, decoder, anneal and conditions, "
            "or sample with keep_states=True"
        )
    return replace(run, states=again.states), spent


def resume(
    field: Any,
    run: Trajectory,
    states: State,
    first: Tensor,
    *,
    together: bool = False,
    seed: int = 0,
    keep: bool = False,
    **options: Any,
) -> tuple[Trajectory, int]:
    """The run with each sample going on from its state at the start of its step `first`, along its own grid.

    Also the evaluations of the network this took, over all samples. Readings before `first` are the run's own.
    """
    space = space_of(field, run, options)
    way = {k: options.pop(k) for k in ("stepper", "decoder", "anneal") if k in options}
    batch, confidence = options.pop("batch", 16384), options.pop("confidence", True)
    for known in ("space", "schedule"):
        options.pop(known, None)
    for name in ("steps", "times", "evaluations", "x0", "start", "transport", "keep_states", "record"):
        if name in options:
            raise UsageError(f"the run says its own {name}; leave it out")
    if len(run.grid) < 2:
        raise UsageError("this run kept its scores alone, not its times; sample with record='full'")
    steps = len(run.grid) - 1
    read = list(range(steps))
    if len(run.times) < steps:
        read = [int((run.grid[:-1, 0] - t).abs().argmin()) for t in run.times[:, 0]]
    estimator = None
    if len(run.times) and confidence is not False:
        estimator = default_estimator(space) if confidence is True else as_estimator(confidence)
    narrow = any(m.shape[2:] != run_x.shape[1:] for m, run_x in _pairs(run.mean, run.x))
    total = not narrow and all(v[0, 0].numel() == 1 for v in channels(run.var).values()) if len(run.times) else False
    keep = keep or run.states is not None
    kept = {n: each(Tensor.clone, getattr(run, n)) for n in ("x", "times", "mean", "var", "grid")}
    passed: list[Any] | None = None
    if keep:
        passed = [each(Tensor.clone, s) for s in run.states or [states] * (steps + 1)]
    cond, spent = {**run.cond, **options}, 0
    for number, rows in enumerate(_chunks(first, batch, together)):
        begin = int(first[rows].min())
        own = [step - begin for step in read if step >= begin] if estimator else []
        sampler = Sampler(
            field,
            space,
            Along(run.grid[begin:, rows]),
            estimator=estimator,
            schedule=frozenset(own),
            record="total" if total else "full",
            batch=len(rows),
            keep_states=keep,
            **way,
        )
        here = {k: v[rows] if one_a_sample(v, len(run)) else v for k, v in cond.items()}
        start = run.grid[first[rows], rows]
        chosen = each(lambda c: c[rows], states)  # noqa: B023
        part = sampler(chosen, start=start, seed=derive(seed, "resume", number), **here)
        spent += part.evaluations * len(rows)
        _put(kept["x"], rows, part.x)
        part_states = part.states or []
        part = part.compact() if narrow and own else part
        for row, step in enumerate(read):
            if step - begin in own:
                late = first[rows] <= step
                for name in ("times", "mean", "var"):
                    value = each(lambda c: c[own.index(step - begin), late], getattr(part, name))  # noqa: B023
                    _put(each(lambda c: c[row], kept[name]), rows[late], value)  # noqa: B023
        for offset, state in enumerate(part_states if passed is not None else []):
            late = first[rows] <= begin + offset
            assert passed is not None
            _put(passed[begin + offset], rows[late], each(lambda c: c[late], state))  # noqa: B023
    return ended_elsewhere(replace(run, **kept, states=passed)), spent


def ended_elsewhere(run: Trajectory) -> Trajectory:
    """The run without all that was read of the ends that its samples had before."""
    return replace(run, transported=None, evidence={}, scores=None)


@dataclass(frozen=True)
class Along:
    """Creates steps along each sample's own times; a sample that starts later waits where it starts.

    Arguments:
        grid: The times, `(steps + 1, B)`.
    """

    grid: Tensor

    @property
    def steps(self) -> int:
        return len(self.grid) - 1

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return torch.maximum(start, self.grid[step + 1])


def snapped(run: Trajectory, at: Tensor) -> Tensor:  # (B,) -> (B,)
    """The number of the step that each time falls in."""
    return (run.grid[:-1] <= at + SLACK).sum(0).sub(1).clamp_min(0)


# ---- parts -------------------------------------------------------------------------------------------------------


def space_of(field: Any, run: Trajectory, options: Mapping[str, Any]) -> Space:
    """Where a run's states live: as the options say, or the field, or flat."""
    space = options.get("space")
    if space is not None and not isinstance(space, Space):
        space = euclidean(space)
    space = space or getattr(field, "space", None)
    if space is None:
        if isinstance(run.x, dict):
            raise UsageError("the space of these channels is not known; give space=...")
        space = euclidean(run.x.shape[1:])
    return space


def _pairs(a: State, b: State) -> Iterator[tuple[Tensor, Tensor]]:
    return ((value, channels(b)[name]) for name, value in channels(a).items())


def _chunks(first: Tensor, batch: int, together: bool) -> Iterator[Tensor]:
    if together:
        yield from torch.arange(len(first), device=first.device).split(batch)
        return
    for step in first.unique().tolist():
        yield from (first == step).nonzero()[:, 0].split(batch)


def _put(target: Any, rows: Tensor, value: Any) -> None:
    each(lambda t, v: t.index_copy_(0, rows, v), target, value)


def one_a_sample(value: Any, count: int) -> bool:
    """Whether a condition has a row for each sample."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count
