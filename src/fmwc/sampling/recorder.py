"""Readings outside the sampler: along another library's solver, or along the states of a finished run."""

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
from fmwc.sampling.confidence import EVERY_STEP, Schedule, is_due
from fmwc.sampling.trajectory import Trajectory
from fmwc.state import as_conditions, batch_size, blame_conditions, select, tree_map


class VarianceRecorder(nn.Module):
    """Velocity function `(x, t, **cond)` for any solver, which records the variance of each velocity.

    The recorder returns the velocity of the plain network. It records every evaluation, because a solver does not
    report which states it accepts. An evaluation at an earlier or equal time discards everything recorded from that
    time on, such as rejected steps and the predictor of a two-stage solver. Evaluations inside an accepted step remain.
    To read only the accepted states, give the solver the field, and call :meth:`read` with the states that it returns:

    >>> times = torch.linspace(0, 1, 21)
    >>> states = odeint(lambda t, x: field(x, t), x0, times)  # doctest: +SKIP
    >>> run = VarianceRecorder(field).read(states, times)  # doctest: +SKIP

    Use one recorder per run and thread.

    Arguments:
        field: A field.
        estimator: The estimator of the variance, by name or as an object (`Linearised(probes=2)` for images).
        seed: The seed of estimators that need randomness.
    """

    def __init__(self, field: Any, estimator: str | Estimator = "linearised", seed: int = 0) -> None:
        super().__init__()
        self.field = field
        self.estimator = as_estimator(estimator)
        self.randomness = as_randomness(seed, field.device)
        self.readings: list[tuple[float, Tensor, Any, Any]] = []  # time of the first sample, times, velocity, variance
        self.x0: Any = None

    def forward(self, x: Any, t: Any, **cond: Any) -> Any:
        """Return the velocity and record its variance."""
        x, times = checked(self.field, x, t)

        def read() -> tuple[Any, Any]:
            with torch.no_grad():
                moments = self.estimator(self.field, x, times, cond, self.randomness)
                return (moments.mean if self.estimator.plain_mean else self.field(x, times, **cond)), moments.var

        try:
            v, var = evaluating(self.field).call(read)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            blame_conditions(error, cond, batch_size(x))
            raise
        when = float(times[0])
        while self.readings and self.readings[-1][0] >= when:
            self.readings.pop()
        if not self.readings:
            self.x0 = tree_map(Tensor.clone, x)
        self.readings.append((when, times, v, var))
        return v

    def read(self, states: Any, times: Any, *, cond: Mapping[str, Any] | None = None) -> Trajectory:
        """Return the run through the given states, such as those that a solver accepted.

        Arguments:
            states: One state per time, in order: a list, or one tensor or array `(T, B, *)`. The last state is the
                sample.
            times: The times, rising from the start to 1.
            cond: The conditions of the network, by name.
        """
        cond = as_conditions(cond)
        try:
            when = torch.as_tensor(times).reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"times must be numbers that rise to 1, got {times!r:.60}") from error
        if not isinstance(states, (Tensor, np.ndarray, Sequence)) or getattr(states, "ndim", 1) == 0:
            raise UsageError(f"states must be a list or one tensor (T, B, *), got {type(states).__name__}")
        if len(when) != len(states) or len(when) < 2 or not bool((when.diff() > 0).all()):
            raise UsageError(
                f"give at least 2 rising times and one state for each; got {len(states)} states and {len(when)} times"
            )
        last, _ = checked(self.field, states[-1], when[-1])
        self.readings = []
        for x, t in zip(states, when[:-1], strict=False):
            self(x, t, **cond)
        return self.trajectory(last, cond={n: c for n, c in cond.items() if isinstance(c, Tensor) and c.ndim})

    def trajectory(self, x: Any, **options: Any) -> Trajectory:
        """Return the run that ended at `x`, with its scores, and start a new recording.

        Arguments:
            x: The samples.
            options: Attributes of the trajectory, such as `default_score="integrated"` or `cond={"y": labels}`.
        """
        if not self.readings:
            raise UsageError("nothing was recorded; run a solver with this recorder as its velocity first")
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


def reread(
    field: Any,
    run: Trajectory,
    confidence: Estimator,
    *,
    schedule: Schedule = EVERY_STEP,
    seed: int = 0,
    batch: int = 1024,
) -> Trajectory:
    """Return the same samples, with the variance read again at the run's states by another noise model or estimator.

    Nothing is integrated, so the samples are bit for bit the same.

    Arguments:
        field: The field with the noise model.
        run: A run with its states (`SamplingConfig(keep_states=True)`).
        confidence: The estimator.
        schedule: When to read the variance.
        seed: The seed of random probes.
        batch: The number of samples read together.
    """
    if run.states is None:
        raise UsageError("the run kept no states; sample with config=SamplingConfig(keep_states=True)")
    states = run.states
    steps, count = len(run.grid) - 1, len(run)
    read = [k for k in range(steps) if is_due(schedule, k, steps, run.grid[k - 1] if k else None, run.grid[k])]

    def moments(step: int, first: int) -> tuple[Any, Any]:
        rows = slice(first, min(first + batch, count))
        x, cond = select(states[step], rows), {name: value[rows] for name, value in run.cond.items()}
        randomness = Blocks(derive(seed, "reread", step), first, batch_size(x))
        velocity = confidence(field, x, run.grid[step, rows], cond, randomness)
        return velocity.mean, velocity.var

    def read_all() -> Any:
        return [[moments(step, first) for first in range(0, count, batch)] for step in read]

    readings = evaluating(field).call(field.constant_weights().call, read_all)
    mean, var = (
        tree_map(
            lambda *c: torch.stack(c),
            *(tree_map(lambda *c: torch.cat(c), *(part[which] for part in parts)) for parts in readings),
        )
        for which in (0, 1)
    )
    return replace(run, times=run.grid[read], mean=mean, var=var, transported=None, reference=None, standard=None)
