"""Variance curves made ready to draw: on common times, and the two ends of the ranking."""

from __future__ import annotations

import numpy as np

__all__ = ["EXTREME", "extremes", "on_common_times"]

EXTREME = 0.1  # the share of samples called the surest, and the most doubtful


def on_common_times(
    times: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # (R, B), (R, B) -> (R,), (R, B)
    """The curves at times that all samples share; linear in between where each sample had its own.

    >>> t, s = on_common_times(np.array([[0.0, 0.0], [0.4, 0.6]]), np.array([[1.0, 1.0], [2.0, 4.0]]))
    >>> t.tolist(), s[1].tolist()
    ([0.0, 0.5], [2.0, 3.5])
    """
    if times.ndim == 1:
        return times, std
    if (times == times[:, :1]).all():
        return times[:, 0], std
    shared = times.mean(1)
    own = [np.interp(shared, t, s) for t, s in zip(times.T, std.T, strict=True)]
    return shared, np.stack(own, 1)


def extremes(confidence: np.ndarray, share: float = EXTREME) -> tuple[np.ndarray, np.ndarray]:  # (B,)
    """Which samples are the surest share, and which the most doubtful.

    >>> [which.tolist() for which in extremes(np.array([0.2, 0.9, 0.1, 0.8]), 0.25)]
    [[1], [2]]
    """
    order = np.argsort(-confidence, kind="stable")
    count = max(1, round(share * len(order)))
    return order[:count], order[-count:]
