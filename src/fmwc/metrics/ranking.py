"""Ranking metrics: how well a score finds bad samples, with 90 % intervals.

The positive class consists of the samples to discard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from sklearn.metrics import average_precision_score

from fmwc.errors import ShapeError, UsageError
from fmwc.state import require_labels

__all__ = [
    "INTERVALS",
    "Ranking",
    "Retention",
    "auprc",
    "bootstrap",
    "bootstrap_all",
    "compare",
    "precisions",
    "ranking",
    "ranking_text",
    "rate",
    "rate_kept",
    "rate_of",
    "retention",
    "too_few",
    "wilson",
]

LEVELS = (5.0, 95.0)  # percentiles of a bootstrap interval
RESAMPLES = 1_000
TOP = (0.01, 0.05, 0.10)  # fractions of samples with the highest scores
KEPT = (0.5, 0.8, 0.9)  # fractions of samples with the lowest scores
FEWEST = 10  # minimum size of the rarer class; below it, ranking metrics are noise
NORMAL = 1.6448536269514722  # quantile of a two-sided 90 % interval
INTERVALS = "90 % intervals"


def _arrays(score: ArrayLike, positive: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    values, labels = np.asarray(score, dtype=float).ravel(), require_labels(positive, "the labels").ravel()
    if values.shape != labels.shape:
        raise ShapeError(f"expected one label per score, got {len(labels)} labels for {len(values)} scores")
    if not np.isfinite(values).all():
        raise UsageError("scores must be finite to rank samples, got NaN or infinity")
    return values, labels


def _require_positive(labels: np.ndarray) -> None:
    if not labels.any():
        raise UsageError("no sample is positive, so precision and recall are not defined")


def auprc(score: ArrayLike, positive: ArrayLike) -> float:
    """Return the area under the precision-recall curve; positive samples should have high scores."""
    values, labels = _arrays(score, positive)
    _require_positive(labels)
    return float(average_precision_score(labels, values))


class Ranking(NamedTuple):
    """AUPRC, and the prevalence of the positive class, which is the AUPRC of a random order."""

    auprc: float
    prevalence: float

    @property
    def lift(self) -> float:
        """The AUPRC divided by that of a random order."""
        return self.auprc / self.prevalence


def ranking(score: ArrayLike, positive: ArrayLike) -> Ranking:
    """Return the AUPRC of a score, and the prevalence of the positive class."""
    return Ranking(auprc(score, positive), float(np.mean(np.asarray(positive, dtype=float))))


class Retention(NamedTuple):
    """The rate of positives among the kept samples, which have the lowest scores, for every fraction kept."""

    kept: np.ndarray
    rate: np.ndarray

    def at(self, fraction: float) -> float:
        """Return the rate of positives when this fraction of samples is kept."""
        return float(self.rate[max(1, round(fraction * len(self.rate))) - 1])


def retention(score: ArrayLike, positive: ArrayLike) -> Retention:
    """Return the rate of positives among the samples with the lowest scores, for every fraction kept.

    >>> retention([0.1, 0.2, 0.9, 0.8], [False, False, True, False]).rate.tolist()
    [0.0, 0.0, 0.0, 0.25]
    """
    values, labels = _arrays(score, positive)
    kept = np.arange(1, len(values) + 1)
    return Retention(kept / len(values), np.cumsum(labels[np.argsort(values, kind="stable")]) / kept)


def _count(fraction: float, total: int) -> int:
    """Return the number of samples in a fraction, at least one."""
    if not 0 < fraction <= 1:
        raise UsageError(f"fractions of samples must be in (0, 1], got {fraction}")
    return max(1, round(fraction * total))


def precisions(score: ArrayLike, positive: ArrayLike, shares: Sequence[float] = TOP) -> dict[float, float]:
    """Return the rate of positives among the samples with the highest scores, for each fraction.

    >>> precisions([4, 3, 2, 1], [True, False, False, True], [0.25, 0.5])
    {0.25: 1.0, 0.5: 0.5}
    """
    values, labels = _arrays(score, positive)
    ranked = labels[np.argsort(-values, kind="stable")]
    return {share: float(ranked[: _count(share, len(ranked))].mean()) for share in shares}


# ---- intervals -------------------------------------------------------------------------------------------------------


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 90 % Wilson interval of a rate. Unlike a bootstrap interval, it is valid for counts of 0 and `total`.

    >>> [round(v, 3) for v in wilson(2, 100)], [round(v, 3) for v in wilson(0, 80)]
    ([0.007, 0.059], [0.0, 0.033])
    """
    share, square = count / total, NORMAL**2 / total
    middle, half = share + square / 2, NORMAL * math.sqrt(share * (1 - share) / total + square / (4 * total))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return max(0.0, low) if count else 0.0, min(1.0, high) if count < total else 1.0


def _resamples(count: int, seed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(seed)
    for _ in range(RESAMPLES):
        yield generator.integers(0, count, count)


def _interval(values: np.ndarray) -> list[float]:
    values = values[np.isfinite(values)]  # a resample may have no positive sample
    return [float(v) for v in np.percentile(values, LEVELS)] if len(values) else [math.nan, math.nan]


def bootstrap(read: Callable[[np.ndarray], float], count: int, seed: int = 0) -> list[float]:
    """Return a 90 % bootstrap interval of a statistic of `count` samples.

    Arguments:
        read: Computes the statistic from the indices of the samples, which may repeat.
        count: The number of samples.
        seed: Seeds the resamples.
    """
    return _interval(np.array([read(index) for index in _resamples(count, seed)]))


def bootstrap_all(read: Callable[[np.ndarray], np.ndarray], count: int, seed: int = 0) -> np.ndarray:  # (2, *)
    """Return the lower and upper ends of the intervals of many statistics, from the same resamples; see `bootstrap`."""
    values = np.array([read(index) for index in _resamples(count, seed)])
    return np.apply_along_axis(_interval, 0, values)


class _Order:
    """Samples sorted by score, once for all resamples."""

    def __init__(self, values: np.ndarray, labels: np.ndarray) -> None:
        self.order = np.argsort(-values, kind="stable")
        self.labels = labels[self.order]
        ranked = values[self.order]
        self.ends = np.append(
            np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1
        )  # last index of each run of equal scores

    def metrics(self, times: np.ndarray, top: Sequence[float], kept: Sequence[float]) -> list[float]:
        """Return AUPRC, lift, precisions and retention rates, or NaN if no positive was drawn.

        Arguments:
            times: How often each sample was drawn, `(B,)`.
            top, kept: Fractions of samples with the highest and with the lowest scores.
        """
        drawn = times[self.order]
        samples, positives = np.cumsum(drawn), np.cumsum(drawn * self.labels)
        total, positive = int(samples[-1]), int(positives[-1])
        if not positive:
            return [math.nan] * (2 + len(top) + len(kept))
        hits, seen = positives[self.ends], samples[self.ends]
        area = float(np.sum(np.diff(hits, prepend=0) * hits / np.maximum(seen, 1))) / positive

        def among_first(count: int) -> int:  # number of positives; the last sample may have been drawn several times
            if count == 0:
                return 0
            edge = int(np.searchsorted(samples, count))
            return int(positives[edge] - (samples[edge] - count) * self.labels[edge])

        first = [_count(share, total) for share in top]
        last = [_count(share, total) for share in kept]
        return [
            area,
            area * total / positive,
            *(among_first(n) / n for n in first),
            *((positive - among_first(total - n)) / n for n in last),
        ]


def compare(
    scores: Mapping[str, ArrayLike],
    positive: ArrayLike,
    *,
    top: Sequence[float] = TOP,
    kept: Sequence[float] = KEPT,
    seed: int = 0,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compare scores on the same samples: metrics with 90 % intervals, and differences from the first score.

    All scores are evaluated on the same resamples, so the intervals of differences are paired.

    Arguments:
        scores: Scores by name, high for samples that are probably positive. The first score is the baseline.
        positive: The labels of the samples.
        top: Fractions with the highest scores, for precision (`precision_5%`).
        kept: Fractions with the lowest scores, for the rate of positives (`retention_80%`).
        seed: Seeds the resamples.

    Returns:
        For each score, `auprc`, `lift`, `precision_…` and `retention_…`. Each is a dict with `value` and `interval`;
        scores after the first also have `difference` and `difference_interval`.
    """
    if not scores:
        raise UsageError("no scores to compare; give at least one")
    arrays = {name: _arrays(score, positive) for name, score in scores.items()}
    labels = next(iter(arrays.values()))[1]
    _require_positive(labels)
    names = ["auprc", "lift", *(f"precision_{100 * s:.3g}%" for s in top), *(f"retention_{100 * s:.3g}%" for s in kept)]
    orders = [_Order(*pair) for pair in arrays.values()]
    count = len(labels)
    values = np.array([order.metrics(np.ones(count, int), top, kept) for order in orders])  # (S, M)
    draws = np.empty((RESAMPLES, *values.shape))
    for row, index in zip(draws, _resamples(count, seed), strict=True):
        times = np.bincount(index, minlength=count)
        row[:] = [order.metrics(times, top, kept) for order in orders]

    def entry(i: int, j: int) -> dict[str, Any]:
        result: dict[str, Any] = {"value": float(values[i, j]), "interval": _interval(draws[:, i, j])}
        if i:
            result["difference"] = float(values[i, j] - values[0, j])
            result["difference_interval"] = _interval(draws[:, i, j] - draws[:, 0, j])
        return result

    return {score: {name: entry(i, j) for j, name in enumerate(names)} for i, score in enumerate(scores)}


# ---- as text ---------------------------------------------------------------------------------------------------------


def _rate_text(share: float, count: int, total: int) -> str:
    low, high = wilson(count, total)
    return f"{share:.1%} [{low:.1%}, {high:.1%}]"


def rate(positive: ArrayLike) -> str:
    """Return the rate of positive samples, with its interval, as text.

    >>> rate([True, False, False, False])
    '25.0% [5.8%, 64.4%]'
    """
    labels = require_labels(positive, "the labels")
    return _rate_text(labels.mean(), int(labels.sum()), len(labels))


def rate_of(count: int, total: int) -> str:
    """Return the rate of `count` positive samples among `total`, with its interval, as text."""
    return _rate_text(count / total, count, total)


def rate_kept(score: ArrayLike, positive: ArrayLike, share: float) -> str:
    """Return the rate of positives among the `share` of samples with the lowest scores, with its interval, as text."""
    labels = require_labels(positive, "the labels")
    count = max(1, round(share * len(labels)))
    value = retention(score, labels).at(share)
    return _rate_text(value, round(value * count), count)


def too_few(positive: ArrayLike, what: str) -> str:
    """Return why one class is too small for ranking metrics, or `""` if both are large enough.

    >>> too_few([True] * 2 + [False] * 98, "failed")
    'too few to tell (2 failed)'
    """
    labels = require_labels(positive, "the labels")
    count = int(labels.sum())
    if min(count, len(labels) - count) >= FEWEST:
        return ""
    rare = f"{count} {what}" if count < FEWEST else f"{len(labels) - count} not {what}"
    return f"too few to tell ({rare})"


def ranking_text(score: ArrayLike, positive: ArrayLike, what: str, number: str = "auprc") -> str:
    """Return AUPRC or lift with its interval as text, or why there are too few samples for it.

    Arguments:
        score: High for samples that are probably positive.
        positive: The labels of the samples.
        what: The word for positive samples.
        number: `auprc` or `lift`.
    """
    if reason := too_few(positive, what):
        return reason
    result = compare({"": score}, positive, top=(), kept=())[""][number]
    low, high = result["interval"]
    return f"{result['value']:.2f} [{low:.2f}, {high:.2f}]"
