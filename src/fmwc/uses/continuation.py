"""Continue the samples of a run from intermediate states, along the time grid of the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.estimators import Estimator
from fmwc.flow import Space, as_space, euclidean
from fmwc.randomness import derive
from fmwc.sampling import AsReference, Sampler, SamplingConfig, Schedule, Trajectory, default_estimator
from fmwc.sampling.config import AS_REFERENCE, BATCH
from fmwc.state import State, as_conditions, channels, select, select_conditions, tree_map

__all__ = ["OwnTimes", "continue_from", "some_with_states", "space_of", "step_at", "with_states", "without_endpoint"]

CONFIGURABLE = (
    "stepper",
    "decoder",
    "anneal",
    "space",
    "batch",
    "on_step",
)  # every other setting is determined by the run
ROUNDING = 1e-6  # tolerance for times just below the start of a step, because times are rounded to float32
TOLERANCE = 1e-2  # maximum median distance between a run and its recomputation


@dataclass(frozen=True)
class OwnTimes:
    """A controller with separate times for each sample. A sample that starts later waits at its start time.

    Arguments:
        grid: The times, `(steps + 1, B)`.
    """

    grid: Tensor

    @property
    def steps(self) -> int:
        return len(self.grid) - 1

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return torch.maximum(start, self.grid[step + 1])


def with_states(
    field: Any, run: Trajectory, *, cond: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Trajectory, int]:
    """Recompute the states of a run from `x0`; return the run with states, and the number of network evaluations."""
    first = torch.zeros(len(run), dtype=torch.long, device=run.grid.device)
    options |= {"together": True, "keep_states": True, "cond": cond, "confidence": None}
    again, spent = continue_from(field, replace(run, states=None), run.x0, first, **options)
    distances = [
        channel.manifold.logmap(channels(run.x)[name], channels(again.x)[name]).flatten(1).abs().amax(1)
        for name, channel in space_of(field, run, options.get("config")).channels.items()
    ]
    if float(torch.stack(distances).amax(0).median()) > TOLERANCE:
        raise UsageError(
            "recomputing the run from x0 gives different samples; give the stepper, decoder, anneal and conditions of "
            "the run, or sample with config=SamplingConfig(keep_states=True)"
        )
    return replace(run, states=again.states), spent


def some_with_states(field: Any, run: Trajectory, index: Tensor, **options: Any) -> Trajectory:
    """Return some samples of a run with their states, recomputed in the batches in which they were drawn.

    Rounding depends on the batch, and chaotic flows (crystals) amplify it, so other batches give other trajectories.

    Arguments:
        field, run, options: As in :func:`with_states`. `config.batch` must be that of the run.
        index: The samples, in rising order.
    """
    config = options.get("config") or SamplingConfig()
    batch, rows = config.batch or BATCH, torch.arange(len(run), device=index.device)
    rows = rows[torch.isin(rows // batch, index // batch)]
    whole, _ = with_states(field, run.take(rows), **options)
    return whole.take(torch.searchsorted(rows, index))


def continue_from(
    field: Any,
    run: Trajectory,
    states: State,
    first: Tensor,
    *,
    together: bool = False,
    seed: int = 0,
    keep_states: bool = False,
    cond: Mapping[str, Any] | None = None,
    confidence: Estimator | None = AS_REFERENCE,
    config: SamplingConfig | None = None,
    **others: Any,
) -> tuple[Trajectory, int]:
    """Integrate each sample from a state at the start of step `first`, along the times of the run.

    Readings before that step are copied from the run.

    Arguments:
        field, run: The field, and the run to continue.
        states: One state per sample.
        first: The first step of each sample, `(B,)`.
        together: Whether samples with different first steps share a batch, in which later samples wait.
        seed: Seeds a stochastic decoder and random probes.
        keep_states: Whether to keep the states. They are always kept if the run has them.
        cond: Conditions that replace or extend those of the run.
        confidence: As in :func:`fmwc.sample`.
        config: The stepper, decoder, anneal, space and batch of the run. The run determines all other settings.

    Returns:
        The run with the new trajectories, and the number of network evaluations over all samples.
    """
    config = config or SamplingConfig()
    _require_undetermined(config, others)
    if len(run.grid) < 2:
        raise UsageError("the run has scores but no times; use sample instead of stream")
    space, read, compact = space_of(field, run, config), _steps_read(run), _is_compact(run)
    estimator = default_estimator(space) if isinstance(confidence, AsReference) else confidence
    keep_states = keep_states or run.states is not None
    merged = _Merged(run, states, keep_states)
    cond, spent = {**run.cond, **as_conditions(cond)}, 0
    for number, rows in enumerate(_batches(first, config.batch or BATCH, together)):
        begin = int(first[rows].min())
        later = {step: index for index, step in enumerate(read) if step >= begin and estimator is not None}
        settings = replace(
            config,
            space=space,
            controller=OwnTimes(run.grid[begin:, rows]),
            start=run.grid[first[rows], rows],
            batch=len(rows),
            keep_states=keep_states,
        )
        schedule = Schedule.steps([step - begin for step in later])
        part = Sampler(field, settings, estimator if read else None, schedule)(
            select(states, rows), seed=derive(seed, "resume", number), cond=select_conditions(cond, rows, len(run))
        )
        spent += part.evaluations * len(rows)
        merged.put(part.compact() if compact and later else part, part.states, rows, first[rows], begin, later)
    return merged.run, spent


class _Merged:
    """A copy of a run into which new parts of trajectories are written."""

    def __init__(self, run: Trajectory, states: State, keep_states: bool) -> None:
        changes = {name: tree_map(Tensor.clone, getattr(run, name)) for name in ("x", "times", "mean", "var")}
        old_states = (run.states or [states] * len(run.grid)) if keep_states else []
        changes["states"] = [tree_map(Tensor.clone, state) for state in old_states] or None
        self.run = without_endpoint(replace(run, **changes))

    def put(
        self, part: Trajectory, states: Any, rows: Tensor, first: Tensor, begin: int, later: Mapping[int, int]
    ) -> None:
        """Write the trajectories of some samples, each from its first step on.

        Arguments:
            part, states: The trajectories of these samples from step `begin` on, and their states.
            rows, first: The indices of the samples, and their first steps.
            begin: The smallest first step.
            later: The steps of the readings of `part`, and the index of each reading in the run.
        """
        _put(self.run.x, rows, part.x)
        for step, state in enumerate(states or [], begin):
            assert self.run.states is not None
            _put(self.run.states[step], rows[first <= step], select(state, first <= step))
        for number, (step, index) in enumerate(later.items()):
            for name in ("times", "mean", "var"):
                value = select(select(getattr(part, name), number), first <= step)
                _put(select(getattr(self.run, name), index), rows[first <= step], value)


def _is_compact(run: Trajectory) -> bool:
    """Return whether the readings of a run are summed over coordinates (:meth:`Trajectory.compact`)."""
    return any(m.shape[2:] != channels(run.x)[n].shape[1:] for n, m in channels(run.mean).items())


def _require_undetermined(config: SamplingConfig, others: Mapping[str, Any]) -> None:
    """Raise an error if an option is already determined by the run."""
    for name in others:
        if name not in {"steps", "x0", "schedule", "transport"}:
            raise TypeError(f"continue_from() got an unexpected keyword argument '{name}'")
    given = {f.name: (getattr(config, f.name), f.default) for f in fields(config)}
    set_fields = [n for n, (value, default) in given.items() if isinstance(value, Tensor) or value != default]
    for name in [*others, *set_fields]:
        if name not in CONFIGURABLE:
            raise UsageError(f"{name} is determined by the run; leave it out")


def without_endpoint(run: Trajectory) -> Trajectory:
    """Return the run without readings that depend on its previous endpoints."""
    return replace(run, transported=None, evidence={}, scores=None)


def step_at(run: Trajectory, at: Tensor) -> Tensor:  # (B,) -> (B,)
    """Return the index of the step that contains the time of each sample."""
    return (run.grid[:-1] <= at + ROUNDING).sum(0).sub(1).clamp_min(0)


def space_of(field: Any, run: Trajectory, config: SamplingConfig | None = None) -> Space:
    """Return the space of a run: that of the configuration, else that of the field, else Euclidean space."""
    space = config.space if config is not None and config.space is not None else getattr(field, "space", None)
    if space is None:
        if isinstance(run.x, dict):
            raise UsageError("the space of these channels is not known; give config=SamplingConfig(space=...)")
        return euclidean(run.x.shape[1:])
    return as_space(space)


def _steps_read(run: Trajectory) -> list[int]:
    """Return the steps at which the variance was read."""
    steps = len(run.grid) - 1
    if len(run.times) == steps:
        return list(range(steps))
    return [int((run.grid[:-1, 0] - t).abs().argmin()) for t in run.times[:, 0]]


def _batches(first: Tensor, batch: int, together: bool) -> Iterator[Tensor]:
    if together:
        yield from torch.arange(len(first), device=first.device).split(batch)
        return
    for step in first.unique().tolist():
        yield from (first == step).nonzero()[:, 0].split(batch)


def _put(target: Any, rows: Tensor, value: Any) -> None:
    tree_map(lambda t, v: t.index_copy_(0, rows, v), target, value)
