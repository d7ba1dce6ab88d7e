"""Keep the surest rows of all blocks, exactly, with memory that does not grow with the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

__all__ = ["cut", "surest"]

BITS = 16  # digits of the selection; each takes one pass over the scores


def _ordered(scores: np.ndarray) -> np.ndarray:
    """Return finite numbers as unsigned integers of the same order."""
    bits = (np.asarray(scores, dtype=np.float64) + 0.0).view(np.uint64)  # + 0.0 makes −0.0 equal to 0.0
    negative = bits >> np.uint64(63) == 1
    return np.where(negative, ~bits, bits | np.uint64(1 << 63))


def _number(key: int) -> float:
    bits = key ^ (1 << 63) if key >> 63 else ~key & ((1 << 64) - 1)
    return float(np.array([bits], dtype=np.uint64).view(np.float64)[0])


def cut(scores: Callable[[], Iterable[np.ndarray]], count: int) -> tuple[float, int]:
    """Return the `count`-th smallest of finite numbers, and how many of those equal to it are among the `count`.

    A radix selection: four passes, each of which finds 16 bits of the number.

    Arguments:
        scores: A function that returns the numbers in pieces; called once per pass.
        count: From 1 to the number of all.

    >>> cut(lambda: [np.array([3.0, 1.0]), np.array([2.0, 2.0])], 2)
    (2.0, 1)
    """
    prefix, left = 0, count
    for shift in range(64 - BITS, -1, -BITS):
        sizes = np.zeros(1 << BITS, dtype=np.int64)
        for piece in scores():
            keys = _ordered(piece)
            if shift < 64 - BITS:
                keys = keys[keys >> np.uint64(shift + BITS) == prefix]
            digits = (keys >> np.uint64(shift)) & np.uint64((1 << BITS) - 1)
            sizes += np.bincount(digits.astype(np.int64), minlength=1 << BITS)
        total = sizes.cumsum()
        digit = int(np.searchsorted(total, left))
        left -= int(total[digit] - sizes[digit])
        prefix = prefix << BITS | digit
    return _number(prefix), left


def surest(scores: Callable[[], Iterable[np.ndarray]], count: int) -> Iterator[np.ndarray]:
    """Yield for each piece which numbers are among the `count` smallest; of equal numbers, the first are taken.

    >>> [mask.tolist() for mask in surest(lambda: [np.array([3.0, 1.0]), np.array([2.0, 2.0])], 2)]
    [[False, True], [True, False]]
    """
    value, ties = cut(scores, count) if count else (-np.inf, 0)
    for piece in scores():
        equal = piece == value
        taken = equal & (equal.cumsum() <= ties)
        ties -= int(taken.sum())
        yield (piece < value) | taken
