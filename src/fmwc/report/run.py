"""A run made ready to report on: a trajectory in numpy, read once, with the labels of its scores."""

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
from fmwc.sampling.scores import names_of, parsed
from fmwc.sampling.trajectory import DISPERSION

__all__ = ["NAMES", "Level", "Run", "explained", "level_of", "made_from", "note_of"]

NAMES = {
    "temporal_ratio": "late over early uncertainty",
    "endpoint": "uncertainty at the end",
    "integrated": "uncertainty over the whole way",
    "peak": "highest uncertainty on the way",
    DISPERSION: "spread of the endpoint",
    "spread": "spread of the predicted endpoint",
    "detour": "length of the way over its distance",
    "contest": "how well another condition explains the sample",
    "echo": "how badly the flow explains the sample",
    "nearest": "distance to the nearest training samples",
}


EXPLAINED = {
    "nearest": "the distance from a sample to the nearest training samples (the network is not asked)",
    "contest": "how much better the flow explains a sample under another condition than under the one asked for",
    "echo": "how badly the flow's velocity explains a sample that is mixed with fresh noise",
    "spread": "how much the predicted endpoint changes along the trajectory",
    "temporal_ratio": "the standard deviation of the velocity late in the trajectory, divided by that early in it",
    DISPERSION: "the standard deviation of the endpoint, to first order in the noise of the weights",
}


def explained(score: str, words: Mapping[str, str] = EXPLAINED) -> str:
    """What a score, or each part of it, is in words: `EXPLAINED`, or `NAMES` for a few of them.

    >>> explained("nearest + echo", NAMES)
    'distance to the nearest training samples, and how badly the flow explains the sample'
    """
    names = dict.fromkeys(parsed(name)[1] for name in names_of(score))
    return ", and ".join(words.get(name, NAMES.get(name, name)) for name in names)


def made_from(reference: Any) -> str:
    """What the confidence of a checkpoint is made from and why, or why it is withheld, in one sentence.

    >>> made_from({"score": "echo", "reason": "it notices a disturbance"})
    'confidence is made from echo, because it notices a disturbance'

    Arguments:
        reference: A :class:`fmwc.field.Reference`, its record in a checkpoint, or `None`.
    """
    if reference is None:
        return "confidence is withheld, because the checkpoint has no reference; fmwc.fit_confidence makes one"
    get = reference.get if isinstance(reference, Mapping) else lambda name: getattr(reference, name)
    if withheld := get("withheld"):
        return f"confidence is withheld, because {withheld}"
    reason = get("reason")
    return f"confidence is made from {get('score')}{f', because {reason}' if reason else ''}"


class Level(NamedTuple):
    """How sure a model is of each sample, in [0, 1].

    Attributes:
        values: The confidence, or the rank within the run where that is withheld, `(B,)`.
        called: `confidence` or `rank`.
        note: Why it is a rank, in words; empty for a confidence.
    """

    values: Tensor
    called: str
    note: str


def level_of(run: Trajectory) -> Level:
    """What the samples of a run are ordered and coloured by."""
    return Level(run.rank, "rank", note) if (note := note_of(run)) else Level(run.confidence, "confidence", "")


def note_of(run: Trajectory) -> str:
    """Why samples are ordered by their rank, in words; empty where they have a confidence."""
    return f"rank within this run; {run.withheld.partition('; rank')[0]}" if run.withheld else ""


@dataclass(frozen=True)
class Run:
    """Creates the arrays of a run.

    Arguments:
        x: Samples, `(B, *)`.
        scores: From a reader's name to the score, `(B,)` each; the run's own choice comes first.
        confidence: In [0, 1], `(B,)`: the rank within the run where confidence is withheld.
        bad: The samples to discard, `(B,)`.
        times, std: When the variance was read, and ‖σ_t‖ there, `(R, B)`.
        grid: Every time of the run, `(steps + 1, B)`.
        profile: The endpoint's variance, summed over coordinates and split over steps and layers, `(steps, L, B)`.
        layers: The names of the layers.
        called, note: What `confidence` is, and why, as :class:`Level` has it.
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
    called: str = "confidence"
    note: str = ""

    @classmethod
    def read(cls, trajectory: Trajectory, bad: ArrayLike, also: Iterable[str] = ()) -> Run:
        """Reads a trajectory.

        Arguments:
            trajectory: The run.
            bad: The samples to discard, `(B,)`.
            also: Scores to read beside the run's own, as far as the run has what they are read from.
        """

        def array(tensor: Any) -> np.ndarray:
            return tensor.detach().cpu().numpy()

        own = NAMES.get(trajectory.default_score, trajectory.default_score)
        own += ", for its class" if trajectory.standard is not None else ""
        scores = {own: array(trajectory.score())}
        for name in also:
            with suppress(UsageError):
                scores.setdefault(NAMES.get(name, name), array(trajectory.score(name)))
        level = level_of(trajectory)
        profile, layers = None, tuple[str, ...]()
        if (transported := trajectory.transported) is not None:
            # Random projections are a few of all coordinates; scaled up they estimate the sum over all.
            scale = trajectory.x[0].numel() / transported.var.shape[1]
            profile, layers = array(transported.profile) * scale, transported.layers
        return cls(
            array(trajectory.x),
            scores,
            array(level.values),
            np.asarray(bad, dtype=bool),
            array(trajectory.times),
            array(trajectory.std),
            array(trajectory.grid),
            profile,
            layers,
            level.called,
            level.note,
        )

    @property
    def score(self) -> np.ndarray:
        """The run's own choice, high = doubtful."""
        return next(iter(self.scores.values()))
