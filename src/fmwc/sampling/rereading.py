"""Reading again: the variance along the way that samples took, by another noise or another estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fmwc.errors import UsageError
from fmwc.modes import evaluating
from fmwc.propagate import Estimator, as_estimator
from fmwc.randomness import Blocks, derive
from fmwc.sampling.controllers import due
from fmwc.sampling.trajectory import Trajectory
from fmwc.state import batch_size, each

__all__ = ["reread"]


def reread(
    field: Any,
    run: Trajectory,
    confidence: str | Estimator,
    *,
    schedule: int | Sequence[float] = 1,
    seed: int = 0,
    batch: int = 1024,
) -> Trajectory:
    """The same samples on the same way, with the variance read anew at the states the run kept.

    What a field would say of samples that another drew, or drew before its noise was fitted: nothing is integrated, so
    that the samples are the same to the bit, and two readings differ by what reads them alone.

    Arguments:
        field: Whose noise is read.
        run: A run with its states (`sample(..., keep_states=True)`).
        confidence: The estimator, by name or with options.
        schedule: Read at every k-th step, counted from the last, or at a list of times.
        seed: Of the random probes.
        batch: Samples read together.
    """
    if run.states is None:
        raise UsageError("the run kept no states; sample with keep_states=True")
    if schedule < 1 if isinstance(schedule, int) else not schedule:
        raise UsageError(f"the schedule is every k-th step with k ≥ 1, or a list of times; got {schedule}")
    states = run.states
    estimator, steps, count = as_estimator(confidence), len(run.grid) - 1, len(run)
    read = [k for k in range(steps) if due(schedule, k, steps, run.grid[k - 1] if k else None, run.grid[k])]
    means, vars_ = [], []

    def read_all() -> None:
        for step in read:
            parts = []
            for first in range(0, count, batch):
                rows = slice(first, min(first + batch, count))
                x = each(lambda c: c[rows], states[step])  # noqa: B023
                cond = {name: value[rows] for name, value in run.cond.items()}
                randomness = Blocks(derive(seed, "reread", step), first, batch_size(x))
                parts.append(estimator(field, x, run.grid[step, rows], cond, randomness))
            means.append(each(lambda *c: torch.cat(c), *(part.mean for part in parts)))
            vars_.append(each(lambda *c: torch.cat(c), *(part.var for part in parts)))

    evaluating(field).call(field.steady().call, read_all)
    return replace(
        run,
        times=run.grid[read],
        mean=each(lambda *c: torch.stack(c), *means),
        var=each(lambda *c: torch.stack(c), *vars_),
        transported=None,
        reference=None,
        standard=None,
    )
