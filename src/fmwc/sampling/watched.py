"""A field in somebody else's loop: their solver takes the steps, and the confidence is read on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import UsageError
from fmwc.modes import evaluating
from fmwc.propagate import Estimator, as_estimator
from fmwc.randomness import as_randomness
from fmwc.sampling.trajectory import Trajectory
from fmwc.state import batch_size, each

__all__ = ["Watched"]


class Watched(nn.Module):
    """Creates a velocity `(x, t, **cond)` for any solver: that of the plain network, whose variance is kept as it goes.

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
        self.readings: list[tuple[Tensor, Any, Any]] = []  # times, velocity, variance
        self.x0: Any = None

    def forward(self, x: Any, t: Any, **cond: Any) -> Any:
        count = batch_size(x)
        times = torch.as_tensor(t, device=self.field.device).reshape(-1).expand(count)
        with evaluating(self.field), torch.no_grad():
            found = self.estimator(self.field, x, times, cond, self.randomness)
            v = found.mean if self.estimator.plain_mean else self.field(x, times, **cond)
        if not self.readings:
            self.x0 = each(Tensor.clone, x)
        self.readings.append((times, v, found.var))
        return v

    def trajectory(self, x: Any, **options: Any) -> Trajectory:
        """The run that ended at `x`, with its scores and confidence; the next call begins another run.

        Arguments:
            x: The samples.
            options: Attributes of the trajectory, such as `default_score="integrated"` or `cond={"y": labels}`.
        """
        if not self.readings:
            raise UsageError("nothing was watched; give this to a solver as its velocity first")
        readings, self.readings = sorted(self.readings, key=lambda reading: float(reading[0][0])), []
        times, mean, var = zip(*readings, strict=True)
        when = torch.stack(times)
        return Trajectory(
            x=x,
            x0=self.x0,
            times=when,
            mean=each(lambda *c: torch.stack(c), *mean),
            var=each(lambda *c: torch.stack(c), *var),
            grid=torch.cat([when, torch.ones_like(when[:1])]),
            evaluations=len(readings),
            **options,
        )
