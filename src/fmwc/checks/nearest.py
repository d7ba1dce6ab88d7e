"""The distance to the nearest training points: separate evidence where the training data are available.

It is hard to beat on states of a few numbers. It does not use the flow, and it rewards copies of the training data: a
sample that is new and good counts as doubtful.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmwc.checks.residuals import Evidence, required_condition
from fmwc.errors import UsageError, require_finite
from fmwc.flow import FlatTorus, Space
from fmwc.state import batch_size, channels

__all__ = ["NEIGHBOURS", "Nearest", "embedded", "missing_features", "vectors"]

NEIGHBOURS = 10  # the distance to a single point is mostly chance
DISTANCES = 1 << 24  # computed together
MISSING = (
    "the reference compares features of samples, and a checkpoint cannot hold the function that computes them; call "
    "fmwc.fit_confidence(field, data, features=...) again"
)


def embedded(space: Space, x: Any) -> Tensor:  # -> (B, D)
    """Return states as vectors whose distances are those of the space: an angle becomes a point on a circle."""
    parts = []
    for name, channel in space.channels.items():
        if channel.rows:
            raise UsageError(
                f"samples differ in their number of rows of '{name}', so distances between them are not defined; give "
                "features=, a function of states"
            )
        flat = channels(x)[name].flatten(1)
        if isinstance(channel.manifold, FlatTorus):
            angle = 2 * math.pi * flat
            flat = torch.cat([angle.sin(), angle.cos()], 1) / (2 * math.pi)
        parts.append(flat * math.sqrt(channel.weight))
    return torch.cat(parts, 1)


def vectors(space: Space, x: Any, features: Callable[[Any], Tensor] | None = None) -> Tensor:  # -> (B, D)
    """Return one vector per sample: its features, or the embedded state if `features` is `None`."""
    if features is None:
        return embedded(space, x)
    found, count = features(x), batch_size(x)
    if not isinstance(found, Tensor) or found.ndim < 2 or len(found) != count or not found.is_floating_point():
        came = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(f"features returns a tensor of real numbers with one row per sample ({count}, D), got {came}")
    require_finite(found, "features of samples")
    return found.detach().flatten(1)


def missing_features(x: Any) -> Tensor:
    """Raise: the placeholder for the features of a reference that was loaded from a checkpoint."""
    raise UsageError(MISSING)


@dataclass(frozen=True, eq=False)
class Nearest:
    """The logarithm of the mean distance to the ten nearest training points, of the same class if they have labels.

    With labels, this logarithm counts twice, and that of the nearest points of other classes is subtracted: a sample
    should be nearer to the points of its own class.

    Arguments:
        points: Training points, `(N, D)`, as `features` returns them.
        labels: Their class, `(N,)`, if they have one.
        cond: The name of the condition that holds the class.
        features: A function of states that returns one vector per sample, in which similar samples are near one
            another. `None` for the numbers of the state.
    """

    points: Tensor
    labels: Tensor | None = None
    cond: str = ""
    features: Callable[[Any], Tensor] | None = None
    name = "nearest"
    evaluations = 0

    def describe(self) -> dict[str, Any]:
        """Return the options as a checkpoint records them; it holds the points as tensors, and no features."""
        return {"points": len(self.points), "cond": self.cond, **({} if self.features is None else {"features": True})}

    @property
    def missing(self) -> str:
        """The reason why samples cannot be compared, if the features did not come with the checkpoint; else empty."""
        return MISSING if self.features is missing_features else ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Nearest) or (self.cond, self.features) != (other.cond, other.features):
            return False
        pairs = ((self.points, other.points), (self.labels, other.labels))
        return all(a is b or (a is not None and b is not None and torch.equal(a.cpu(), b.cpu())) for a, b in pairs)

    def __call__(self, network: Any, space: Space, x1: Any, cond: Mapping[str, Any], seed: int, first: int) -> Evidence:
        own = vectors(space, x1, self.features)
        points = self.points.to(own)
        if own.shape[1] != points.shape[1]:
            raise UsageError(f"samples have {own.shape[1]} numbers and the training points {points.shape[1]}")
        labels = None if self.labels is None else self.labels.to(own.device)
        found = []
        for rows in torch.arange(len(own), device=own.device).split(max(1, DISTANCES // len(points))):
            distance = torch.cdist(own[rows], points)
            if labels is None:
                found.append(_log_mean(distance))
                continue
            alike = required_condition(cond, self.cond, self.name)[rows][:, None] == labels[None]
            mine, others = (_log_mean(distance.masked_fill(mask, torch.inf)) for mask in (~alike, alike))
            found.append(2 * mine - others)
        score = torch.cat(found)
        if not bool(score.isfinite().all()):
            raise UsageError(
                f"the training points hold fewer than {NEIGHBOURS} of some '{self.cond}', or of all others"
            )
        return Evidence(score)


def _log_mean(distance: Tensor) -> Tensor:  # (B, N) -> (B,)
    """Return the logarithm of the mean distance to the nearest neighbours."""
    few = distance.topk(min(NEIGHBOURS, distance.shape[1]), 1, largest=False).values
    return few.mean(1).clamp_min(torch.finfo(distance.dtype).tiny).log()
