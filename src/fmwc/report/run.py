"""A run made ready to report on: a trajectory in numpy, read once, with the labels of its scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import DISPERSION

__all__ = ["Run"]

NAMES = {
    "temporal_ratio": "late over early uncertainty",
    "endpoint": "uncertainty at the end",
    "integrated": "uncertainty over the whole way",
    "peak": "highest uncertainty on the way",
    DISPERSION: "spread of the endpoint",
}


@dataclass(frozen=True)
class Run:
    """Creates the arrays of a run.

    Arguments:
        x: Samples, `(B, *)`.
        scores: From a reader's name to the score, `(B,)` each; the run's own choice comes first.
        confidence: In [0, 1], `(B,)`.
        bad: The samples to discard, `(B,)`.
        times, std: When the variance was read, and ‖σ_t‖ there, `(R, B)`.
        grid: Every time of the run, `(steps + 1, B)`.
        profile: The endpoint's variance, summed over coordinates and split over steps and layers, `(steps, L, B)`.
        layers: The names of the layers.
    """

    x: np.ndarray
    scores: dict[str, np.ndarray]
    confidence: np.ndarray
    bad: np.ndarray
    times: np.ndarray
    std: np.ndarray
    grid: np.ndarray
    profile: np.ndarray | None
    layers: tuple[str, ...]

    @classmethod
    def read(cls, trajectory: Trajectory, bad: ArrayLike, also: Iterable[str] = ()) -> Run:
        """Reads a trajectory.

        Arguments:
            trajectory: The run.
            bad: The samples to discard, `(B,)`.
            also: Scores to read beside the run's own.
        """

        def array(tensor: Any) -> np.ndarray:
            return tensor.detach().cpu().numpy()

        own = NAMES.get(trajectory.default_score, trajectory.default_score)
        own += ", for its class" if trajectory.standard is not None else ""
        scores = {own: array(trajectory.score())}
        for name in also:
            scores.setdefault(NAMES.get(name, name), array(trajectory.score(name)))
        profile, layers = None, tuple[str, ...]()
        if (transported := trajectory.transported) is not None:
            # Random projections are a few of all coordinates; scaled up they estimate the sum over all.
            scale = trajectory.x[0].numel() / transported.var.shape[1]
            profile, layers = array(transported.profile) * scale, transported.layers
        return cls(
            array(trajectory.x),
            scores,
            array(trajectory.confidence),
            np.asarray(bad, dtype=bool),
            array(trajectory.times),
            array(trajectory.std),
            array(trajectory.grid),
            profile,
            layers,
        )

    @property
    def score(self) -> np.ndarray:
        """The run's own choice, high = doubtful."""
        return next(iter(self.scores.values()))
