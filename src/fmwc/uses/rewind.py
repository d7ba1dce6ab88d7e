"""Rewind doubtful samples to before their critical time, draw new branches, and keep the surest.

Evaluations count network calls for velocities, summed over samples. They do not include the cost of reading the
variance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError
from fmwc.randomness import derive
from fmwc.sampling import Trajectory, noise
from fmwc.sampling.trajectory import of_variance
from fmwc.state import as_conditions, select_conditions, tree_map
from fmwc.uses.best_of import Score, Selection, evaluations_per_step, read_score
from fmwc.uses.continuation import continue_from, step_at, with_states, without_endpoint
from fmwc.uses.edit import critical_time, edit

__all__ = ["resample", "rewind"]


def rewind(
    field: Any,
    run: Trajectory,
    which: Tensor,
    *,
    before: float = 0.2,
    scale: float = 0.2,
    branches: int = 2,
    score: Score = None,
    channel: str | None = None,
    kind: str = "variance",
    seed: int = 0,
    cond: Mapping[str, Any] | None = None,
    **options: Any,
) -> Selection:
    """Rewind samples to before their critical time, and keep the surest of several branches.

    The original sample is one of the branches, so no score increases.

    Arguments:
        field, run: The field and its run. If the run did not keep its states, they are recomputed; this counts as
            evaluations.
        which: The doubtful samples: indices, or a mask.
        before: How long before the critical time the noise is added.
        scale: The scale of the noise, as in :func:`edit`.
        branches: The number of branches per sample, including the original sample.
        score: The name of the score to compare, or a function of a trajectory (`head.score`). The
            default is the run's default score.
        channel, kind: As in :func:`~fmwc.uses.edit.critical_time`. The noise is added to the same channel.
        seed: Seeds the noise.
        cond, options: As in :func:`edit`.
    """
    index = _indices(which, len(run))
    _require_variance_score(run, score)
    if branches < 2:
        raise UsageError(f"branches must be at least 2, including the original sample, got {branches}")
    if not before >= 0:
        raise UsageError(f"before must be at least 0, got {before}")
    if not len(index):
        return Selection(run, 0, _zeros(run))
    options["cond"] = select_conditions(as_conditions(cond), index, len(run))
    origin, spent = run.take(index), 0
    if origin.states is None:
        origin, spent = with_states(field, origin, **options)
    start = torch.maximum(critical_time(origin, channel, kind) - before, origin.grid[0])
    options |= {"at": start, "scale": scale, "seed": seed, "replicates": branches - 1, "together": False}
    tried = edit(field, origin, channel, **options)
    steps_left = len(run.grid) - 1 - step_at(origin, start)
    spent += int(steps_left.sum()) * (branches - 1) * evaluations_per_step(options.get("config"))
    return _surest(run, index, origin, tried, score, spent)


def resample(
    field: Any,
    run: Trajectory,
    budget: int,
    *,
    share: float = 0.1,
    before: float = 0.2,
    scale: float = 0.2,
    score: Score = None,
    channel: str | None = None,
    kind: str = "variance",
    fresh: bool = False,
    seed: int = 0,
    cond: Mapping[str, Any] | None = None,
    **options: Any,
) -> Selection:
    """Spend a budget of network evaluations on the most doubtful samples, in rounds.

    Each round rewinds the samples that are currently the most doubtful, draws one new branch for each, and keeps the
    surer trajectory. It stops when no further sample fits in the budget.

    Arguments:
        field, run: As in :func:`rewind`.
        budget: The maximum number of evaluations over all samples. The result holds the number spent.
        share: The share of samples to rewind per round.
        before, scale, score, channel, kind, cond, options: As in :func:`rewind`.
        fresh: Whether to restart from new noise at t = 0 instead of rewinding, as a baseline.
        seed: Seeds the noise of all rounds.
    """
    if budget < 1:
        raise UsageError(f"budget must be at least 1 evaluation, got {budget}")
    if not 0 < share <= 1:
        raise UsageError(f"share must be in (0, 1], got {share}")
    _require_variance_score(run, score)
    options["cond"] = as_conditions(cond)
    per_step, steps = evaluations_per_step(options.get("config")), len(run.grid) - 1
    spent, current, branch = 0, run, _zeros(run)
    if run.states is None and not fresh:
        cost = len(run) * steps * per_step
        if cost > budget:
            raise UsageError(
                f"the run has no states, and recomputing them takes {cost} evaluations of {budget}; sample with "
                "keep_states=True, or give a larger budget"
            )
        current, spent = with_states(field, run, **options)
    for turn in count(1):
        index = _read(current, score).argsort(descending=True, stable=True)[: max(1, round(share * len(run)))]
        first = torch.zeros_like(index)
        if not fresh:
            doubtful = current.take(index)
            first = step_at(doubtful, critical_time(doubtful, channel, kind) - before)
        costs = (steps - first) * per_step
        index = index[spent + costs.cumsum(0) <= budget]
        if not len(index):
            break
        if fresh:
            done = _start_over(field, current, index, score, derive(seed, "fresh", turn), options)
        else:
            options |= {"before": before, "scale": scale, "channel": channel, "kind": kind}
            done = rewind(field, current, index, score=score, seed=derive(seed, "round", turn), **options)
        current, spent = done.run, spent + done.evaluations
        branch = torch.where(done.branch > 0, turn, branch)
    return Selection(current if run.states is not None else replace(current, states=None), spent, branch)


def _start_over(
    field: Any, run: Trajectory, index: Tensor, score: Score, seed: int, options: dict[str, Any]
) -> Selection:
    """Draw samples from new noise, and keep those that are surer than the originals."""
    options = {**options, "cond": select_conditions(options["cond"], index, len(run))}
    origin = run.take(index)
    x0 = noise(field.space, len(index), seed, run.grid.device, cond=origin.cond)
    x0 = tree_map(lambda new, old: new.to(old), x0, origin.x0)
    tried, spent = continue_from(field, replace(origin, x0=x0), x0, torch.zeros_like(index), seed=seed, **options)
    return _surest(run, index, origin, tried, score, spent)


def _surest(
    run: Trajectory, index: Tensor, origin: Trajectory, tried: Trajectory, score: Score, spent: int
) -> Selection:
    """Return the run with the surest trajectory of each sample in `index`: the original, or one of `tried`."""
    tries = len(tried) // len(index)
    scores = torch.cat([_read(origin, score)[:, None], _read(tried, score).reshape(len(index), tries)], 1)
    best = scores.argmin(1)  # ties keep the original
    better = best > 0
    rows = torch.arange(len(index), device=index.device) * tries + best - 1
    return Selection(
        _replaced(run, index[better], tried.take(rows[better])), spent, _zeros(run).index_copy(0, index, best)
    )


def _zeros(run: Trajectory) -> Tensor:
    return torch.zeros(len(run), dtype=torch.long, device=run.grid.device)


def _read(run: Trajectory, score: Score) -> Tensor:
    """Return one score per sample, by default the run's default score, standardised by condition."""
    return run.score() if score is None else read_score(run, score)


def _require_variance_score(run: Trajectory, score: Score) -> None:
    """Raise an error unless it is a variance score: new trajectories have no other readings."""
    if not callable(score) and not of_variance(name := score or run.default_score):
        raise UsageError(f"{name} is not available for rewound samples; give a variance score, such as score='peak'")


def _indices(which: Tensor, count: int) -> Tensor:
    which = torch.as_tensor(which)
    if which.dtype == torch.bool:
        if which.shape != (count,):
            raise ShapeError(f"a mask must have one entry per sample ({count}), got shape {tuple(which.shape)}")
        return which.nonzero()[:, 0]
    if which.ndim != 1 or (len(which) and not 0 <= int(which.min()) <= int(which.max()) < count):
        raise UsageError(f"which must hold sample indices from 0 to {count - 1}, or be a mask")
    if len(which.unique()) < len(which):
        raise UsageError("which holds an index twice; give each index once")
    return which.long()


def _replaced(run: Trajectory, index: Tensor, others: Trajectory) -> Trajectory:
    """Return the run with the trajectories of some samples replaced."""
    if not len(index):
        return replace(run, transported=None) if run.transported is not None else run

    def put(old: Any, new: Any, dim: int) -> Any:
        return tree_map(lambda o, n: o.index_copy(dim, index, n), old, new)

    changes: dict[str, Any] = {n: put(getattr(run, n), getattr(others, n), 0) for n in ("x", "x0")}
    changes |= {n: put(getattr(run, n), getattr(others, n), 1) for n in ("times", "mean", "var", "grid")}
    if run.states is not None and others.states is not None:
        changes["states"] = [put(o, n, 0) for o, n in zip(run.states, others.states, strict=True)]
    return without_endpoint(replace(run, **changes))
