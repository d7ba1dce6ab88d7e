"""Headline numbers as text, each with a 90 % interval, or with the reason why there is too little to tell."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from fmwc.metrics.ranking import compare, retention

__all__ = ["FEWEST", "INTERVALS", "ranking_text", "rate", "rate_kept", "too_few", "wilson"]

FEWEST = 10  # of the rarer kind of sample: an order of fewer is read from noise
NORMAL = 1.6448536269514722  # quantile of a two-sided 90 % interval
INTERVALS = "90 % intervals"


def wilson(count: int, total: int) -> tuple[float, float]:
    """The 90 % Wilson interval of a rate; unlike a bootstrap it is right where nothing, or everything, was found.

    >>> [round(v, 3) for v in wilson(2, 100)]
    [0.007, 0.059]
    >>> [round(v, 3) for v in wilson(0, 80)]
    [0.0, 0.033]
    """
    share, square = count / total, NORMAL**2 / total
    middle, half = share + square / 2, NORMAL * math.sqrt(share * (1 - share) / total + square / (4 * total))
    low, high = (middle - half) / (1 + square), (middle + half) / (1 + square)
    return max(0.0, low) if count else 0.0, min(1.0, high) if count < total else 1.0


def rate(positive: ArrayLike) -> str:
    """The share of positive samples.

    >>> rate([True, False, False, False])
    '25.0% [5.8%, 64.4%]'
    """
    found = np.asarray(positive, dtype=bool)
    low, high = wilson(int(found.sum()), len(found))
    return f"{found.mean():.1%} [{low:.1%}, {high:.1%}]"


def rate_kept(score: ArrayLike, positive: ArrayLike, share: float) -> str:
    """The share of positive samples among the `share` of lowest score."""
    found = np.asarray(positive, dtype=bool)
    count = max(1, round(share * len(found)))
    value = retention(score, found).at(share)
    low, high = wilson(round(value * count), count)
    return f"{value:.1%} [{low:.1%}, {high:.1%}]"


def too_few(positive: ArrayLike, what: str) -> str:
    """Why a ranking cannot be told from so few samples of one kind; empty where it can.

    >>> too_few([True] * 2 + [False] * 98, "failed")
    'too few to tell (2 failed)'
    """
    found = np.asarray(positive, dtype=bool)
    count = int(found.sum())
    if min(count, len(found) - count) >= FEWEST:
        return ""
    rare = f"{count} {what}" if count < FEWEST else f"{len(found) - count} not {what}"
    return f"too few to tell ({rare})"


def ranking_text(score: ArrayLike, positive: ArrayLike, what: str, number: str = "auprc") -> str:
    """AUPRC or lift with its interval, or why it cannot be told.

    Arguments:
        score: High where a sample is thought positive.
        positive: Which samples are.
        what: The word for those.
        number: `auprc` or `lift`.
    """
    if said := too_few(positive, what):
        return said
    found = compare({"": score}, positive, top=(), kept=())[""][number]
    low, high = found["interval"]
    return f"{found['value']:.2f} [{low:.2f}, {high:.2f}]"
