"""A field in somebody else's loop: their solver takes the steps, and the confidence is read on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.errors import UsageError
from fmwc.estimators import Estimator, as_estimator
from fmwc.field import checked
from fmwc.modes import evaluating
from fmwc.randomness import Blocks, as_randomness, derive
from fmwc.references import EVERY_STEP, Schedule
from fmwc.sampling.controllers import due
from fmwc.sampling.trajectory import Trajectory
from fmwc.state import as_conditions, batch_size, blame_conditions, tree_map

__all__ = ["VarianceRecorder", "reread"]


# ---- recorder --------------------------------------------------------------------------------------------------------


class VarianceRecorder(nn.Module):
    """Creates a velocity `(x, t, **cond)` for any solver: that of the plain network, whose variance is recorded.

    Every evaluation is recorded, and a solver does not say which states it accepts. One whose time does not come after
    the one before it replaces what was recorded from that time on, so that rejected steps of an adaptive solver, and
    the predictor of a two-stage one, are not counted. What a solver evaluates inside a step that it accepts cannot be
    told from steps, and stays. To read the accepted states alone, give the solver the field itself, and :meth:`read`
    the states that it returns:

    >>> times = torch.linspace(0, 1, 21)
    >>> states = odeint(lambda t, x: field(x, t), x0, times)  # doctest: +SKIP
    >>> run = VarianceRecorder(field).read(states, times)  # doctest: +SKIP

    Use one for each run and thread: it holds what the run has recorded so far.

    Arguments:
        field: A field.
        estimator: Reads the variance: a name, or an estimator with options (`Linearised(probes=2)` for images).
        seed: Randomness for the estimators that need it.
    """

    def __init__(self, field: Any, estimator: str | Estimator = "linearised", seed: int = 0) -> None:
        super().__init__()
        self.field = field
        self.estimator = as_estimator(estimator)
        self.randomness = as_randomness(seed, field.device)
        self.readings: list[tuple[float, Tensor, Any, Any]] = []  # time of the first sample, times, velocity, variance
        self.x0: Any = None

    def forward(self, x: Any, t: Any, **cond: Any) -> Any:
        """Return the velocity, and record its variance."""
        x, times = checked(self.field, x, t)

        def read() -> tuple[Any, Any]:
            with torch.no_grad():
                found = self.estimator(self.field, x, times, cond, self.randomness)
                return (found.mean if self.estimator.plain_mean else self.field(x, times, **cond)), found.var

        try:
            v, var = evaluating(self.field).call(read)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            blame_conditions(error, cond, batch_size(x))
            raise
        when = float(times[0])
        while self.readings and self.readings[-1][0] >= when:  # their times rise
            self.readings.pop()
        if not self.readings:
            self.x0 = tree_map(Tensor.clone, x)
        self.readings.append((when, times, v, var))
        return v

    def read(self, states: Any, times: Any, *, cond: Mapping[str, Any] | None = None) -> Trajectory:
        """Return the run through these states: those that a solver accepted, or was asked for.

        Arguments:
            states: A state for each time, in order: a list, or one tensor or array `(T, B, *)`. The last is the sample.
            times: The times, rising from the start to 1.
            cond: The conditions, by name; given to the network.
        """
        cond = as_conditions(cond)
        try:
            when = torch.as_tensor(times).reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the times of the states are numbers rising to 1, got {times!r:.60}") from error
        if not isinstance(states, (Tensor, np.ndarray, Sequence)) or getattr(states, "ndim", 1) == 0:
            raise UsageError(f"states is a list, or one tensor (T, B, *), got {type(states).__name__}")
        if len(when) != len(states) or len(when) < 2 or not bool((when.diff() > 0).all()):
            raise UsageError(
                f"one state for each of at least 2 rising times: got {len(states)} states and {len(when)} times"
            )
        last, _ = checked(self.field, states[-1], when[-1])
        self.readings = []
        for x, t in zip(states, when[:-1], strict=False):
            self(x, t, **cond)
        options = {"cond": {n: c for n, c in cond.items() if isinstance(c, Tensor) and c.ndim}}
        return self.trajectory(last, **options)

    def trajectory(self, x: Any, **options: Any) -> Trajectory:
        """The run that ended at `x`, with its scores and confidence; the next call begins another run.

        Arguments:
            x: The samples.
            options: Attributes of the trajectory, such as `default_score="integrated"` or `cond={"y": labels}`.
        """
        if not self.readings:
            raise UsageError("nothing was watched; give this to a solver as its velocity first")
        readings, self.readings = self.readings, []
        _, times, mean, var = zip(*readings, strict=True)
        when = torch.stack(times)
        return Trajectory(
            x=x,
            x0=self.x0,
            times=when,
            mean=tree_map(lambda *c: torch.stack(c), *mean),
            var=tree_map(lambda *c: torch.stack(c), *var),
            grid=torch.cat([when, torch.ones_like(when[:1])]),
            evaluations=len(readings),
            **options,
        )


# ---- rereading -------------------------------------------------------------------------------------------------------
# Reading again: the variance along the way that samples took, by another noise or another estimator.


def reread(
    field: Any,
    run: Trajectory,
    confidence: Estimator,
    *,
    schedule: Schedule = EVERY_STEP,
    seed: int = 0,
    batch: int = 1024,
) -> Trajectory:
    """The same samples on the same way, with the variance read anew at the states the run kept.

    What a field would say of samples that another drew, or drew before its noise was fitted: nothing is integrated, so
    that the samples are the same to the bit, and two readings differ by what reads them alone.

    Arguments:
        field: Whose noise is read.
        run: A run with its states (`SamplingConfig(keep_states=True)`).
        confidence: The estimator.
        schedule: When to read.
        seed: Of the random probes.
        batch: Samples read together.
    """
    if run.states is None:
        raise UsageError("the run kept no states; sample with config=SamplingConfig(keep_states=True)")
    states = run.states
    steps, count = len(run.grid) - 1, len(run)
    read = [k for k in range(steps) if due(schedule, k, steps, run.grid[k - 1] if k else None, run.grid[k])]
    means, vars_ = [], []

    def read_all() -> None:
        for step in read:
            parts = []
            for first in range(0, count, batch):
                rows = slice(first, min(first + batch, count))
                x = tree_map(lambda c: c[rows], states[step])  # noqa: B023
                cond = {name: value[rows] for name, value in run.cond.items()}
                randomness = Blocks(derive(seed, "reread", step), first, batch_size(x))
                parts.append(confidence(field, x, run.grid[step, rows], cond, randomness))
            means.append(tree_map(lambda *c: torch.cat(c), *(part.mean for part in parts)))
            vars_.append(tree_map(lambda *c: torch.cat(c), *(part.var for part in parts)))

    evaluating(field).call(field.constant_weights().call, read_all)
    return replace(
        run,
        times=run.grid[read],
        mean=tree_map(lambda *c: torch.stack(c), *means),
        var=tree_map(lambda *c: torch.stack(c), *vars_),
        transported=None,
        reference=None,
        standard=None,
    )
