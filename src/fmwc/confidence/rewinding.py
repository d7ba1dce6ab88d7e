"""Rewinding: doubtful samples go back to before they were undecided and try again; the surest try is kept.

Evaluations are those of the network for velocities, summed over samples, and none is spent on waiting. What reading the
variance costs comes on top, as it does for every sample that has a score.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.confidence.best import Score, price, read
from fmwc.confidence.editing import critical_time, edit
from fmwc.confidence.resuming import ended_elsewhere, one_a_sample, resume, snapped, states_of
from fmwc.errors import ShapeError, UsageError
from fmwc.randomness import derive
from fmwc.sampling import Trajectory, noise
from fmwc.sampling.scores import of_variance
from fmwc.state import each

__all__ = ["Rewound", "resample", "rewind"]


class Rewound(NamedTuple):
    """What rewinding gives.

    Attributes:
        run: The samples kept, with their readings.
        evaluations: Evaluations of the network that this took over all samples, on top of those of the run given.
        branch: Which branch each sample is, `(B,)`: 0 is the original.
    """

    run: Trajectory
    evaluations: int
    branch: Tensor


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
    **options: Any,
) -> Rewound:
    """Takes some samples back to just before their critical time and keeps the surest of m branches.

    The original is among the branches, so no sample's score gets worse.

    Arguments:
        field, run: The field and its run. States that it did not keep are made again, which is counted.
        which: The doubtful samples: indices, or a mask.
        before: How long before the critical time the noise comes.
        scale: Of the noise, as :func:`edit` takes it.
        branches: m, the original included.
        score: By which the surest is chosen: a name, a function of a trajectory (`head.score`), or the run's own.
        channel, kind: Of the critical time; the noise goes into the same channel.
        seed: Seeds the noise.
        options: As :func:`edit` takes them.
    """
    index = _indices(which, len(run))
    _require_carried(run, score)
    if branches < 2:
        raise UsageError(f"there are at least 2 branches, the original and another; got {branches}")
    if not before >= 0:
        raise UsageError(f"before is a time to go back, at least 0; got {before}")
    branch = torch.zeros(len(run), dtype=torch.long, device=run.grid.device)
    if not len(index):
        return Rewound(run, 0, branch)
    options = {k: v[index] if one_a_sample(v, len(run)) else v for k, v in options.items()}
    origin, spent = run.take(index), 0
    if origin.states is None:
        origin, spent = states_of(field, origin, **options)
    start = torch.maximum(critical_time(origin, channel, kind) - before, origin.grid[0])
    tries = branches - 1
    tried = edit(field, origin, channel, at=start, scale=scale, seed=seed, replicates=tries, together=False, **options)
    left = len(run.grid) - 1 - snapped(origin, start)
    spent += int(left.sum()) * tries * price(options)
    scores = torch.cat([_read(origin, score)[:, None], _read(tried, score).reshape(len(index), tries)], 1)
    best = scores.argmin(1)  # of equal ones the first: the original
    branch[index] = best
    better = best > 0
    rows = torch.arange(len(index), device=index.device) * tries + best - 1
    return Rewound(_replaced(run, index[better], tried.take(rows[better])), spent, branch)


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
    **options: Any,
) -> Rewound:
    """Spends a number of evaluations of the network on the most doubtful samples.

    In rounds: the most doubtful are rewound, one new branch each, and what is surer is kept; then the samples that are
    now the most doubtful, until the next would not fit in the budget.

    Arguments:
        budget: Evaluations to spend over all samples; what is spent is in the answer, and never more.
        share: The share of samples that are rewound in a round.
        before, scale, score, channel, kind, options: As :func:`rewind` takes them.
        fresh: Start over from new noise at t = 0 in place of rewinding: the selective baseline.
        seed: Seeds the noise of every round.
    """
    if budget < 1:
        raise UsageError(f"a budget is at least 1 evaluation, got {budget}")
    if not 0 < share <= 1:
        raise UsageError(f"the share of a round lies in (0, 1], got {share}")
    _require_carried(run, score)
    spent, turn, kept = 0, 0, run
    branch = torch.zeros(len(run), dtype=torch.long, device=run.grid.device)
    if run.states is None and not fresh:
        cost = len(run) * (len(run.grid) - 1) * price(options)
        if cost > budget:
            raise UsageError(f"the run kept no states, and making them again takes {cost} of {budget} evaluations")
        kept, spent = states_of(field, run, **options)
    while True:
        turn += 1
        doubt = _read(kept, score)
        most = doubt.argsort(descending=True, stable=True)[: max(1, round(share * len(run)))]
        first = torch.zeros_like(most)
        if not fresh:
            some = kept.take(most)
            first = snapped(some, critical_time(some, channel, kind) - before)
        cost_each = (len(run.grid) - 1 - first) * price(options)
        most = most[spent + cost_each.cumsum(0) <= budget]
        if not len(most):
            break
        if fresh:
            done = _anew(field, kept, most, score, derive(seed, "fresh", turn), options)
        else:
            done = rewind(
                field,
                kept,
                most,
                before=before,
                scale=scale,
                score=score,
                channel=channel,
                kind=kind,
                seed=derive(seed, "round", turn),
                **options,
            )
        kept, spent = done.run, spent + done.evaluations
        branch = torch.where(done.branch > 0, turn, branch)
    return Rewound(kept if run.states is not None else replace(kept, states=None), spent, branch)


# ---- parts ------------------------------------------------------------------------------------------------------


def _anew(field: Any, run: Trajectory, index: Tensor, score: Score, seed: int, options: dict[str, Any]) -> Rewound:
    """Some samples started over from new noise, where that is surer."""
    options = {k: v[index] if one_a_sample(v, len(run)) else v for k, v in options.items()}
    origin = run.take(index)
    x0 = noise(field.space, len(index), seed, run.grid.device, **origin.cond)  # type: ignore[arg-type]
    x0 = each(lambda new, old: new.to(old), x0, origin.x0)
    first = torch.zeros_like(index)
    tried, spent = resume(field, replace(origin, x0=x0), x0, first, seed=seed, **options)
    better = _read(tried, score) < _read(origin, score)
    branch = torch.zeros(len(run), dtype=torch.long, device=index.device)
    branch[index] = better.long()
    return Rewound(_replaced(run, index[better], tried.take(better.nonzero()[:, 0])), spent, branch)


def _read(run: Trajectory, score: Score) -> Tensor:
    """A score of each sample; the run's own comparable between conditions."""
    return run.score() if score is None else read(run, score)


def _require_carried(run: Trajectory, score: Score) -> None:
    """Raise where a score cannot be read of a sample that ends elsewhere: only the variance is read on its new way."""
    if not callable(score) and not of_variance(name := score or run.default_score):
        raise UsageError(f"{name} is not read when samples are rewound; give a score of the variance: score='peak'")


def _indices(which: Tensor, count: int) -> Tensor:
    which = torch.as_tensor(which)
    if which.dtype == torch.bool:
        if which.shape != (count,):
            raise ShapeError(f"a mask has one entry a sample ({count}), got shape {tuple(which.shape)}")
        return which.nonzero()[:, 0]
    if which.ndim != 1 or (len(which) and not 0 <= int(which.min()) <= int(which.max()) < count):
        raise UsageError(f"which are numbers of samples, 0 to {count - 1}, or a mask")
    if len(which.unique()) < len(which):
        raise UsageError("which names a sample twice")
    return which.long()


def _replaced(run: Trajectory, index: Tensor, others: Trajectory) -> Trajectory:
    """The run with some samples' ways in place of their own."""
    if not len(index):
        return replace(run, transported=None) if run.transported is not None else run

    def put(old: Any, new: Any, dim: int) -> Any:
        return each(lambda o, n: o.index_copy(dim, index, n), old, new)

    changes: dict[str, Any] = {n: put(getattr(run, n), getattr(others, n), 0) for n in ("x", "x0")}
    changes |= {n: put(getattr(run, n), getattr(others, n), 1) for n in ("times", "mean", "var", "grid")}
    if run.states is not None and others.states is not None:
        changes["states"] = [put(o, n, 0) for o, n in zip(run.states, others.states, strict=True)]
    return ended_elsewhere(replace(run, **changes))
