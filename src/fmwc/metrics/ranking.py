"""How well a score finds the bad samples. The positive class is named at every call: the samples to discard."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score

from fmwc.errors import ShapeError, UsageError

__all__ = ["Ranking", "Retention", "auprc", "ranking", "retention"]


def _arrays(score: ArrayLike, positive: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    values, labels = np.asarray(score, dtype=float).ravel(), np.asarray(positive).astype(bool).ravel()
    if values.shape != labels.shape:
        raise ShapeError(f"one label a score: got {len(labels)} labels for {len(values)} scores")
    if not np.isfinite(values).all():
        raise UsageError("a score is NaN or infinite, so samples cannot be ranked by it")
    return values, labels


def auprc(score: ArrayLike, positive: ArrayLike) -> float:
    """Area under the precision-recall curve; the score is high where a sample is thought positive."""
    values, labels = _arrays(score, positive)
    if not labels.any():
        raise UsageError("no sample is positive, so precision and recall are not defined")
    return float(average_precision_score(labels, values))


class Ranking(NamedTuple):
    """AUPRC beside its floor, the prevalence of the positive class (what a random order reaches)."""

    auprc: float
    prevalence: float

    @property
    def lift(self) -> float:
        return self.auprc / self.prevalence


def ranking(score: ArrayLike, positive: ArrayLike) -> Ranking:
    return Ranking(auprc(score, positive), float(np.mean(np.asarray(positive, dtype=float))))


class Retention(NamedTuple):
    """The share of positives among the surest samples, for every share kept."""

    kept: np.ndarray
    rate: np.ndarray

    def at(self, fraction: float) -> float:
        """The rate among the surest `fraction`."""
        return float(self.rate[max(1, round(fraction * len(self.rate))) - 1])


def retention(score: ArrayLike, positive: ArrayLike) -> Retention:
    """The retention curve: keep the samples of lowest score.

    >>> retention([0.1, 0.2, 0.9, 0.8], [False, False, True, False]).rate.tolist()
    [0.0, 0.0, 0.0, 0.25]
    """
    values, labels = _arrays(score, positive)
    kept = np.arange(1, len(values) + 1)
    return Retention(kept / len(values), np.cumsum(labels[np.argsort(values, kind="stable")]) / kept)
