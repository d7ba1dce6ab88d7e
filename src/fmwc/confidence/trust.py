r"""Trust, with a guarantee: a threshold below which at most a stated share of samples fails, and how sure that is.

A *promise* is made from labelled samples (s_i, y_i), drawn independently from the sampler; y = 1 is a failure. Its
risk at a threshold λ is that of fresh samples, R(λ) = P(y = 1 | s ≤ λ). :func:`promise` finds λ̂ with

    P( R(λ̂) ≤ max_risk ) ≥ probability,

where the probability is over the draw of the labelled samples. Nothing is assumed of the score: a poor one leads to
few samples kept, or to no promise, not to a broken one.

**Why it holds.** Fixed-sequence testing (Angelopoulos et al.).

1. The thresholds λ_1 < λ_2 < … are quantiles of scores of *other* samples: unlabelled ones, or some of the labelled
   that are set aside and counted nowhere else. So they are constants as far as the labelled samples go. Each sample
   at or below λ_j fails with probability R(λ_j), independently: of the n_j that are there, K_j fail, and K_j is
   binomial(n_j, R(λ_j)), *exactly*, given n_j.
2. So the upper end of Clopper and Pearson's interval lies below max_risk with probability at most δ = 1 − probability
   whenever R(λ_j) > max_risk.
3. Thresholds are tried from the strictest on, and the first whose bound is above max_risk ends it. A false promise
   means that the *first* threshold of the sequence with R > max_risk has passed. That is one threshold, and which one
   it is does not depend on the labelled samples: the chance is at most δ, for however many thresholds. Where the
   sequence begins depends on the number of labels alone.

*Why not the quantiles of the labelled scores themselves?* Given all scores, labels are independent but not alike: the
failures among those kept are a sum of Bernoulli(P(y = 1 | s_i)), and a bound on them is one on the mean of
P(y = 1 | s_i) over *these* s_i, not on R. Given one order statistic alone, the samples strictly below it are again
independent draws below it, which makes one test exact; but which threshold is the first bad one then depends on the
scores, and step 3 fails, unless R crosses max_risk only once (it holds again if it does). Setting aside a part costs
a few labels and needs no such condition.

What is promised is a *rate*. Among a hundred kept samples the share that fails scatters about it. It holds for samples
drawn and scored like the labelled ones: the same checkpoint, steps, conditions and score, which must be a number of
the sample alone (not standardised within its own run). The labelled ones must be chosen without looking at the score.

References:
    | Angelopoulos, Bates, Candès, Jordan, Lei: Learn then Test: Calibrating Predictive Algorithms to Achieve Risk
      Control. arXiv:2110.01052 (fixed-sequence testing; selective classification).
    | Bates, Angelopoulos, Lei, Malik, Jordan: Distribution-Free, Risk-Controlling Prediction Sets. J. ACM 68 (2021).
    | Clopper, Pearson: The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial.
      Biometrika 26 (1934).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta

from fmwc.errors import ShapeError, UsageError
from fmwc.readers import check, number, record, whole

__all__ = ["GRID", "Promise", "Reliability", "needed", "promise", "reliability"]

GRID = tuple(round(0.05 * i, 2) for i in range(1, 21))  # shares of the other samples that are at or below a threshold
FEWEST = 20  # other samples that thresholds are taken from
# Labelled samples that only choose thresholds, where there are no others: twenty levels need no more than that.
ASIDE, MOST_ASIDE = 0.2, 100
# The sequence begins where this many times the fewest labels are expected: with the fewest alone, a single failure
# among them would end it.
SLACK = 3


def upper(failed: ArrayLike, count: ArrayLike, miss: float) -> np.ndarray:
    """Clopper and Pearson's upper bound of a rate, exceeded by the true one with probability at most `miss`.

    >>> round(float(upper(0, 45, 0.1)), 4)  # 1 − 0.1^(1/45)
    0.0499
    """
    k, n = np.asarray(failed, dtype=float), np.asarray(count, dtype=float)
    return np.where(k >= n, 1.0, beta.ppf(1 - miss, k + 1, np.where(k >= n, 1.0, n - k)))


def lower(failed: ArrayLike, count: ArrayLike, miss: float) -> np.ndarray:
    """The lower bound, by counting the others."""
    k, n = np.asarray(failed), np.asarray(count)
    return 1 - upper(n - k, n, miss)


def needed(max_risk: float, probability: float = 0.9) -> int:
    """The fewest labelled samples a promise can rest on, all of them kept and good: log δ / log(1 − max_risk).

    >>> needed(0.05, 0.9)
    45
    """
    for name, value in (("the risk", max_risk), ("the probability", probability)):
        if not 0 < value < 1 or 1 - value == 1:
            raise UsageError(f"{name} lies between 0 and 1, and is neither; got {value}")
    return math.ceil(round(math.log(1 - probability) / math.log(1 - max_risk), 9))


_RATE = number(0, 1, open_low=True, open_high=True)
_PROMISE = record(
    {
        "threshold": number(),
        "max_risk": _RATE,
        "probability": _RATE,
        "share": number(0, 1),
        "bound": number(0, 1),
        "labelled": whole(1),
    }
)


@dataclass(frozen=True)
class Promise:
    """At most `max_risk` of the samples with a score of at most `threshold` fail; that holds with `probability`.

    Attributes:
        threshold: Keep a sample whose score is not above it.
        max_risk: The rate of failures that is not exceeded,
        probability: with this probability over the draw of the labelled samples.
        share: The share of labelled samples that are kept.
        bound: The upper bound of the failure rate among the kept, which is not above `max_risk`.
        labelled: How many labelled samples it rests on; those that only chose thresholds do not count.
    """

    threshold: float
    max_risk: float
    probability: float
    share: float
    bound: float
    labelled: int

    def __post_init__(self) -> None:
        check(asdict(self), _PROMISE, "a promise", UsageError)
        if self.bound > self.max_risk:
            raise UsageError(f"a promise of at most {self.max_risk:.4g} cannot rest on a bound of {self.bound:.4g}")

    def keeps(self, score: ArrayLike) -> np.ndarray:  # (B,) -> (B,)
        """Which samples the promise is about."""
        return np.asarray(score, dtype=float) <= self.threshold

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Promise:
        """What :meth:`as_dict` gave; other entries are left alone."""
        return cls(**{f.name: found.get(f.name) for f in fields(cls)})  # type: ignore[arg-type]


def _arrays(score: ArrayLike, bad: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    values, labels = np.asarray(score, dtype=float).ravel(), np.asarray(bad).astype(bool).ravel()
    if len(values) != len(labels):
        raise ShapeError(f"one label a sample: got {len(labels)} labels for {len(values)} samples")
    if not np.isfinite(values).all():
        raise UsageError("a score is NaN or infinite, so samples cannot be kept by it")
    return values, labels


def _aside(total: int) -> int:
    """How many of the labelled samples only choose thresholds."""
    return min(MOST_ASIDE, max(FEWEST, round(ASIDE * total)))


def promise(
    score: ArrayLike,  # (B,)
    bad: ArrayLike,  # (B,)
    max_risk: float,
    probability: float = 0.9,
    *,
    others: ArrayLike | None = None,
    grid: Sequence[float] = GRID,
    seed: int = 0,
) -> Promise:
    """The loosest threshold for which at most `max_risk` failures can be promised; the module says why it holds.

    Arguments:
        score: Of labelled samples, high = doubtful.
        bad: Which of them failed.
        max_risk: The failure rate that is not to be exceeded.
        probability: How sure that is to be.
        others: Scores of samples without labels, which thresholds are taken from; without any, some of the labelled
            are set aside for that.
        grid: The levels of those scores that are tried, increasing in (0, 1].
        seed: Chooses those set aside.

    >>> score, others = np.random.default_rng(0).random((2, 400))
    >>> found = promise(score, score > 0.8, max_risk=0.05, others=others)
    >>> 0.75 < found.threshold < 0.85, found.bound <= 0.05
    (True, True)
    """
    values, labels = _arrays(score, bad)
    fewest = needed(max_risk, probability)
    levels = np.asarray(grid, dtype=float)
    if not len(levels) or not (np.diff(levels) > 0).all() or not 0 < levels[0] <= levels[-1] <= 1:
        raise UsageError(f"the grid is of increasing levels in (0, 1], got {list(grid)}")
    total = len(values)
    if others is None:
        aside = _aside(total)
        order = np.random.default_rng(seed).permutation(total)
        rest, values, labels = values[order[:aside]], values[order[aside:]], labels[order[aside:]]
    else:
        rest = np.asarray(others, dtype=float).ravel()
        if len(rest) < FEWEST or not np.isfinite(rest).all():
            raise UsageError(f"thresholds are taken from at least {FEWEST} other scores, all finite; got {len(rest)}")
    if len(values) < fewest:
        more = next(n for n in count(fewest) if n - _aside(n) >= fewest) - fewest if others is None else 0
        aside_too = f", and {more} that thresholds are taken from" if more else ""
        raise UsageError(
            f"{total} labelled samples are too few to promise a failure rate of at most {max_risk:.4g} with "
            f"probability {probability:.4g}: at least {fewest + more} are needed, "
            f"{fewest} that are kept and good{aside_too}"
        )
    expected = len(values) * levels
    begin = int(np.argmax(expected >= min(SLACK * fewest, max(len(values) / 2, fewest), expected[-1])))
    thresholds = np.quantile(rest, levels[begin:], method="inverted_cdf")
    kept = values[:, None] <= thresholds  # (B, G)
    size, failed = kept.sum(0), (kept & labels[:, None]).sum(0)
    bounds = upper(failed, size, 1 - probability)
    passed = int(np.argmin(np.append(bounds <= max_risk, False)))  # how many, before the first that fails
    if not passed:
        raise UsageError(
            f"a failure rate of at most {max_risk:.4g} cannot be promised with probability {probability:.4g}: of the "
            f"{size[0]} surest of {len(values)} labelled samples {failed[0]} failed, so it may be {bounds[0]:.3f}; "
            "allow a higher risk, or label more samples"
        )
    last = passed - 1
    return Promise(
        threshold=float(thresholds[last]),
        max_risk=max_risk,
        probability=probability,
        share=float(size[last] / len(values)),
        bound=float(bounds[last]),
        labelled=len(values),
    )


class Reliability(NamedTuple):
    """What became of samples by how sure the model was, one entry a bin that holds any.

    Attributes:
        confidence: Their mean confidence.
        success: The share that did not fail, and
        low, high: its Clopper–Pearson interval.
        size: How many they are.
    """

    confidence: np.ndarray
    success: np.ndarray
    low: np.ndarray
    high: np.ndarray
    size: np.ndarray


def reliability(confidence: ArrayLike, bad: ArrayLike, bins: int = 10, probability: float = 0.9) -> Reliability:
    """Observed success against confidence, in bins of equal width, each with an exact interval.

    Arguments:
        confidence: In [0, 1], high = trust it. It is a place in a ranking, so success should rise with it; only a
            confidence that is a probability lies on the diagonal.
        bad: Which samples failed.
        bins: How many.
        probability: Of each interval.

    >>> reliability([0.1, 0.2, 0.9, 0.8], [True, True, False, False], bins=2).success.tolist()
    [0.0, 1.0]
    """
    values, labels = _arrays(confidence, bad)
    if not len(values) or values.min() < 0 or values.max() > 1:
        raise UsageError("a confidence lies in [0, 1], one a sample")
    if bins < 1 or not 0 < probability < 1:
        raise UsageError(f"there is at least one bin, and the probability lies in (0, 1); got {bins} and {probability}")
    which = np.minimum((values * bins).astype(int), bins - 1)
    size = np.bincount(which, minlength=bins)
    there = size > 0
    size = size[there]
    good = np.bincount(which, ~labels, minlength=bins)[there]
    mean = np.bincount(which, values, minlength=bins)[there] / size
    miss = (1 - probability) / 2
    return Reliability(mean, good / size, lower(good, size, miss), upper(good, size, miss), size)
