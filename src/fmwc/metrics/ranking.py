"""How well a score finds the bad samples. The positive class is named at every call: the samples to discard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score

from fmwc.errors import ShapeError, UsageError

__all__ = ["Ranking", "Retention", "auprc", "bootstrap", "compare", "precisions", "ranking", "retention"]

LEVELS = (5.0, 95.0)  # percentiles of a bootstrap interval
RESAMPLES = 1_000
TOP = (0.01, 0.05, 0.10)  # shares of those most thought positive
KEPT = (0.5, 0.8, 0.9)  # shares of the others that are kept


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


def _count(share: float, total: int) -> int:
    """How many samples a share is, at least one."""
    if not 0 < share <= 1:
        raise UsageError(f"a share of the samples lies in (0, 1], got {share}")
    return max(1, round(share * total))


def precisions(score: ArrayLike, positive: ArrayLike, shares: Sequence[float] = TOP) -> dict[float, float]:
    """The share of positives among the samples of highest score, for each share of all samples.

    >>> precisions([4, 3, 2, 1], [True, False, False, True], [0.25, 0.5])
    {0.25: 1.0, 0.5: 0.5}
    """
    values, labels = _arrays(score, positive)
    ranked = labels[np.argsort(-values, kind="stable")]
    return {share: float(ranked[: _count(share, len(ranked))].mean()) for share in shares}


# ---- intervals ---------------------------------------------------------------------------------------------------


def _resamples(count: int, seed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    for _ in range(RESAMPLES):
        yield generator.integers(0, count, count)


def _interval(found: np.ndarray) -> list[float]:
    found = found[np.isfinite(found)]  # a draw may hold nothing to read
    return [float(v) for v in np.percentile(found, LEVELS)] if len(found) else [math.nan, math.nan]


def bootstrap(read: Callable[[np.ndarray], float], count: int, seed: int = 0) -> list[float]:
    """A 90 % interval of what is read from `count` samples, by drawing them again.

    Arguments:
        read: The number of the samples at some indices, which may repeat.
        count: How many samples there are.
        seed: The same seed draws the same samples.
    """
    return _interval(np.array([read(index) for index in _resamples(count, seed)]))


class _Order:
    """A score's order of the samples, sorted once; each resample is how often every sample was drawn."""

    def __init__(self, values: np.ndarray, labels: np.ndarray) -> None:
        self.order = np.argsort(-values, kind="stable")
        self.labels = labels[self.order]
        ranked = values[self.order]
        self.ends = np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1)  # of equal scores

    def read(self, times: np.ndarray, top: Sequence[float], kept: Sequence[float]) -> list[float]:
        """AUPRC, lift, precision at the top and rate among the kept; NaN where no positive was drawn."""
        drawn = times[self.order]
        all_, positives = np.cumsum(drawn), np.cumsum(drawn * self.labels)
        total, found = int(all_[-1]), int(positives[-1])
        if not found:
            return [math.nan] * (2 + len(top) + len(kept))
        hits, seen = positives[self.ends], all_[self.ends]
        area = float(np.sum(np.diff(hits, prepend=0) * hits / np.maximum(seen, 1))) / found

        def among_first(count: int) -> int:  # positives; the sample at the edge may have been drawn several times
            if count == 0:
                return 0
            edge = int(np.searchsorted(all_, count))
            return int(positives[edge] - (all_[edge] - count) * self.labels[edge])

        first = [_count(share, total) for share in top]
        last = [_count(share, total) for share in kept]
        return [
            area,
            area * total / found,
            *(among_first(n) / n for n in first),
            *((found - among_first(total - n)) / n for n in last),
        ]


def compare(
    scores: Mapping[str, ArrayLike],
    positive: ArrayLike,
    *,
    top: Sequence[float] = TOP,
    kept: Sequence[float] = KEPT,
    seed: int = 0,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Scores side by side: each number with a 90 % interval, and by how much it differs from the first score's.

    All are read from the same resamples, so that the interval of a difference is that of a paired comparison: what
    the choice of samples does to both scores alike drops out of it.

    Arguments:
        scores: High where a sample is thought positive, by name; the first is the one the others are held against.
        positive: Which samples are, named by whoever calls: those to discard, or those to find.
        top: Shares of highest score whose precision is read (`precision_5%`).
        kept: Shares of lowest score whose rate of positives is read (`retention_80%`).
        seed: Of the resamples.

    Returns:
        For each score `auprc`, `lift`, `precision_…` and `retention_…`, each a dict of `value` and `interval`, and of
        `difference` and `difference_interval` for all but the first score.
    """
    if not scores:
        raise UsageError("no score was given to compare")
    arrays = {name: _arrays(score, positive) for name, score in scores.items()}
    labels = next(iter(arrays.values()))[1]
    if not labels.any():
        raise UsageError("no sample is positive, so precision and recall are not defined")
    names = ["auprc", "lift", *(f"precision_{100 * s:.3g}%" for s in top), *(f"retention_{100 * s:.3g}%" for s in kept)]
    orders = [_Order(*pair) for pair in arrays.values()]
    count = len(labels)
    values = np.array([order.read(np.ones(count, int), top, kept) for order in orders])  # (S, M)
    draws = np.empty((RESAMPLES, *values.shape))
    for row, index in zip(draws, _resamples(count, seed), strict=True):
        times = np.bincount(index, minlength=count)
        row[:] = [order.read(times, top, kept) for order in orders]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for i, score in enumerate(scores):
        found[score] = {}
        for j, name in enumerate(names):
            entry: dict[str, Any] = {"value": float(values[i, j]), "interval": _interval(draws[:, i, j])}
            if i:
                entry["difference"] = float(values[i, j] - values[0, j])
                entry["difference_interval"] = _interval(draws[:, i, j] - draws[:, 0, j])
            found[score][name] = entry
    return found
