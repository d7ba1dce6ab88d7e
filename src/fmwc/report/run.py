"""Data of a run for a report: arrays, confidence or rank, and readable score names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import DISPERSION, names_of, parsed

__all__ = ["NAMES", "Ordering", "RunArrays", "array", "confidence_source", "describe", "note_of", "ordering_of"]

NAMES = {
    "temporal_ratio": "late / early uncertainty",
    "endpoint": "uncertainty at the end",
    "integrated": "uncertainty integrated over time",
    "peak": "peak uncertainty",
    DISPERSION: "spread of the endpoint",
    "spread": "spread of the predicted endpoint",
    "detour": "path length / distance",
    "contest": "evidence for another condition",
    "echo": "residual of the flow at the noised sample",
    "nearest": "distance to the nearest training samples",
}


def describe(score: str) -> str:
    """Return the readable name of a score; for a sum, the names of its terms.

    >>> describe("nearest + echo")
    'distance to the nearest training samples + residual of the flow at the noised sample'
    """
    parts = dict.fromkeys(parsed(name)[1] for name in names_of(score))
    return " + ".join(NAMES.get(name, name) for name in parts)


def confidence_source(reference: Any) -> str:
    """Return a phrase that names the score behind a checkpoint's confidence, or the reason why it is withheld.

    >>> confidence_source({"score": "echo", "reason": "it detects a disturbance"})
    'confidence is based on echo, because it detects a disturbance'

    Arguments:
        reference: A :class:`fmwc.sampling.Reference`, its record in a checkpoint, or `None`.
    """
    if reference is None:
        return "confidence is withheld, because the checkpoint has no reference; add one with fmwc.fit_confidence"
    get = reference.get if isinstance(reference, Mapping) else lambda name: getattr(reference, name)
    if withheld := get("withheld"):
        return f"confidence is withheld, because {withheld}"
    reason = get("reason")
    return f"confidence is based on {get('score')}{f', because {reason}' if reason else ''}"


class Ordering(NamedTuple):
    """The values by which the samples of a run are ordered and coloured.

    Attributes:
        values: The confidence in [0, 1], or the rank within the run if the confidence is withheld, `(B,)`.
        label: `confidence` or `rank`.
        note: Why the rank is used; empty for `confidence`.
    """

    values: Tensor
    label: str
    note: str


def ordering_of(run: Trajectory) -> Ordering:
    """Return the confidence of a run, or its rank if the confidence is withheld."""
    confidence = run.confidence
    return Ordering(run.rank, "rank", note_of(run)) if confidence is None else Ordering(confidence, "confidence", "")


def note_of(run: Trajectory) -> str:
    """Return why samples have a rank instead of a confidence, or `""` if they have a confidence."""
    return f"rank within this run; {run.withheld.partition('; rank')[0]}" if run.withheld else ""


def array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array."""
    values: np.ndarray = tensor.detach().cpu().numpy()
    return values


@dataclass(frozen=True)
class RunArrays:
    """The arrays of a run.

    Arguments:
        x: Samples, `(B, *)`, or a dict of them by channel.
        scores: Scores by readable name, `(B,)` each, with the default score of the run first.
        confidence: In [0, 1], `(B,)`, or the rank within the run if the confidence is withheld.
        bad: Whether each sample is bad, `(B,)`; all `False` if samples were not judged.
        times, std: Times of the readings and ‖σ_t‖, `(R, B)`.
        grid: Times of the run, `(steps + 1, B)`.
        profile: Endpoint variance by step and layer, summed over coordinates, `(steps, L, B)`.
        layers: Names of the layers.
        label, note: As in :class:`Ordering`.
    """

    x: Any
    scores: dict[str, np.ndarray]
    confidence: np.ndarray
    bad: np.ndarray
    times: np.ndarray
    std: np.ndarray
    grid: np.ndarray
    profile: np.ndarray | None
    layers: tuple[str, ...]
    label: str = "confidence"
    note: str = ""

    @classmethod
    def read(cls, trajectory: Trajectory, bad: ArrayLike | None = None, also: Iterable[str] = ()) -> RunArrays:
        """Create the arrays of a trajectory.

        Arguments:
            trajectory: The run.
            bad: Whether each sample is bad, `(B,)`, if samples were judged.
            also: Additional scores; those that the run cannot compute are omitted.
        """
        default = NAMES.get(trajectory.default_score, trajectory.default_score)
        default += ", within its class" if trajectory.standard is not None else ""
        scores = {default: array(trajectory.score())}
        for name in also:
            with suppress(UsageError):
                scores.setdefault(NAMES.get(name, name), array(trajectory.score(name)))
        profile, layers = None, tuple[str, ...]()
        if (transported := trajectory.transported) is not None:
            # The scaled sum over a few random projections estimates the sum over all coordinates.
            scale = trajectory.x[0].numel() / transported.var.shape[1]
            profile, layers = array(transported.profile) * scale, transported.layers
        ordering = ordering_of(trajectory)
        return cls(
            x={n: array(v) for n, v in trajectory.x.items()} if isinstance(trajectory.x, dict) else array(trajectory.x),
            scores=scores,
            confidence=array(ordering.values),
            bad=np.zeros(len(trajectory), bool) if bad is None else np.asarray(bad, dtype=bool),
            times=array(trajectory.times),
            std=array(trajectory.std),
            grid=array(trajectory.grid),
            profile=profile,
            layers=layers,
            label=ordering.label,
            note=ordering.note,
        )

    @property
    def score(self) -> np.ndarray:
        """The run's default score, high = doubtful."""
        return next(iter(self.scores.values()))
