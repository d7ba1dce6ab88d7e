r"""Risk control: a score threshold at which the failure rate is bounded with a given probability.

A certificate is computed from labelled samples (s_i, y_i), drawn independently from the sampler; y = 1 is a failure.
The risk of a threshold λ is the failure rate of new samples, R(λ) = P(y = 1 | s ≤ λ). :func:`risk_control` returns λ̂
with

    P( R(λ̂) ≤ max_risk ) ≥ probability,

where the probability is over the draw of the labelled samples. No assumption is made about the score: a poor score
leads to few kept samples or to no certificate, but never to an invalid certificate.

**Why it holds.** Fixed-sequence testing (Angelopoulos et al.).

1. The thresholds λ_1 < λ_2 < … are quantiles of the scores of *other* samples: unlabelled samples, or labelled samples
   that are set aside and not used otherwise. Relative to the labelled samples, they are constants. Each sample at or
   below λ_j fails independently with probability R(λ_j). Given the number n_j of these samples, the number of failures
   K_j is *exactly* binomial(n_j, R(λ_j)).
2. Therefore, if R(λ_j) > max_risk, the Clopper–Pearson upper bound is at most max_risk with probability at most
   δ = 1 − probability.
3. Thresholds are tested in increasing order, until the first bound above max_risk. A certificate is wrong only if the
   *first* threshold with R > max_risk has passed its test. This is a single threshold, and it does not depend on the
   labelled samples. The probability of a wrong certificate is therefore at most δ, for any number of thresholds. The
   start of the sequence depends only on the number of labels.

*Why not use quantiles of the labelled scores?* Given all scores, labels are independent but not identically
distributed: the number of failures among the kept samples is a sum of Bernoulli(P(y = 1 | s_i)). A bound on it concerns
the mean of P(y = 1 | s_i) over *these* s_i, not R. Given a single order statistic, the samples strictly below it are
independent, so one test is exact. But the first threshold with R > max_risk then depends on the scores, and step 3
fails unless R crosses max_risk only once. Setting samples aside costs a few labels and needs no such condition.

A certificate bounds a *rate*: among a hundred kept samples, the share of failures varies around this rate. It holds for
samples that are drawn and scored like the labelled samples: with the same checkpoint, steps, conditions and score. The
score must depend on the sample alone (it must not be standardised within a run), and the choice of the labelled samples
must not depend on the score.

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

__all__ = [
    "GRID",
    "Reliability",
    "RiskCertificate",
    "lower_bound",
    "reliability",
    "required_labels",
    "risk_control",
    "upper_bound",
]

GRID = tuple(round(0.05 * i, 2) for i in range(1, 21))  # levels of the tested quantiles
FEWEST = 20  # minimum number of scores for computing thresholds
# Share of labelled samples to set aside for thresholds; twenty levels need at most MOST_ASIDE.
ASIDE, MOST_ASIDE = 0.2, 100
# The first threshold is expected to keep this many times the required labels; with only the required number, a single
# failure would end the sequence.
SLACK = 3


def upper_bound(failed: ArrayLike, count: ArrayLike, miss: float) -> np.ndarray:
    """Return the Clopper–Pearson upper bound of a rate; the rate exceeds it with probability at most `miss`.

    >>> round(float(upper_bound(0, 45, 0.1)), 4)  # 1 − 0.1^(1/45)
    0.0499
    """
    k, n = np.asarray(failed, dtype=float), np.asarray(count, dtype=float)
    return np.where(k >= n, 1.0, beta.ppf(1 - miss, k + 1, np.where(k >= n, 1.0, n - k)))


def lower_bound(failed: ArrayLike, count: ArrayLike, miss: float) -> np.ndarray:
    """Return the Clopper–Pearson lower bound of a rate; the rate is below it with probability at most `miss`."""
    k, n = np.asarray(failed), np.asarray(count)
    return 1 - upper_bound(n - k, n, miss)


def required_labels(max_risk: float, probability: float = 0.9) -> int:
    """Return the number of labelled samples needed for a certificate if all are kept and none fails.

    This is log δ / log(1 − max_risk), rounded up.

    >>> required_labels(0.05, 0.9)
    45
    """
    for name, value in (("max_risk", max_risk), ("probability", probability)):
        if not 0 < value < 1 or 1 - value == 1:
            raise UsageError(f"{name} must be strictly between 0 and 1, got {value}")
    return math.ceil(round(math.log(1 - probability) / math.log(1 - max_risk), 9))


_RATE = number(0, 1, open_low=True, open_high=True)
_SCHEMA = record(
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
class RiskCertificate:
    """A statement that the failure rate of samples with a score of at most `threshold` is at most `max_risk`.

    Attributes:
        threshold: The largest score of a sample to keep.
        max_risk: The bound on the failure rate.
        probability: The probability that the statement holds, over the draw of the labelled samples.
        share: The share of labelled samples that are kept.
        bound: The upper bound of the failure rate among the kept samples, at most `max_risk`.
        labelled: The number of labelled samples, excluding those set aside for thresholds.
    """

    threshold: float
    max_risk: float
    probability: float
    share: float
    bound: float
    labelled: int

    def __post_init__(self) -> None:
        check(asdict(self), _SCHEMA, "the risk certificate", UsageError)
        if self.bound > self.max_risk:
            raise UsageError(
                f"the risk certificate has a bound of {self.bound:.4g}, which is above its max_risk of "
                f"{self.max_risk:.4g}; compute it again with risk_control"
            )

    def keeps(self, score: ArrayLike) -> np.ndarray:  # (B,) -> (B,)
        """Return `True` for each sample to keep: those with a score of at most `threshold`."""
        return np.asarray(score, dtype=float) <= self.threshold

    def as_dict(self) -> dict[str, Any]:
        """Return the certificate as a dict of JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> RiskCertificate:
        """Create a certificate from :meth:`as_dict`; other entries are ignored."""
        return cls(**{f.name: entries.get(f.name) for f in fields(cls)})  # type: ignore[arg-type]


def risk_control(
    score: ArrayLike,  # (B,)
    bad: ArrayLike,  # (B,)
    max_risk: float,
    probability: float = 0.9,
    *,
    others: ArrayLike | None = None,
    grid: Sequence[float] = GRID,
    seed: int = 0,
) -> RiskCertificate:
    """Return the largest threshold with a certified failure rate; see the module docstring for the proof.

    Arguments:
        score: The scores of labelled samples, high = doubtful.
        bad: Whether each labelled sample failed.
        max_risk: The maximum failure rate among kept samples.
        probability: The probability that the certificate holds.
        others: Scores of unlabelled samples, whose quantiles are the thresholds. By default, some labelled samples are
            set aside instead.
        grid: The levels of the tested quantiles, increasing in (0, 1].
        seed: Seeds the choice of the samples to set aside.

    >>> score, others = np.random.default_rng(0).random((2, 400))
    >>> certificate = risk_control(score, score > 0.8, max_risk=0.05, others=others)
    >>> 0.75 < certificate.threshold < 0.85, certificate.bound <= 0.05
    (True, True)
    """
    values, labels = _arrays(score, bad)
    required = required_labels(max_risk, probability)
    levels = np.asarray(grid, dtype=float)
    if not len(levels) or not (np.diff(levels) > 0).all() or not 0 < levels[0] <= levels[-1] <= 1:
        raise UsageError(f"grid must hold increasing levels in (0, 1], got {list(grid)}")
    total = len(values)
    if others is None:
        order, aside = np.random.default_rng(seed).permutation(total), _aside(total)
        rest, values, labels = values[order[:aside]], values[order[aside:]], labels[order[aside:]]
    else:
        rest = np.asarray(others, dtype=float).ravel()
        if len(rest) < FEWEST or not np.isfinite(rest).all():
            raise UsageError(f"others must hold at least {FEWEST} finite scores, got {len(rest)}")
    if len(values) < required:
        more = next(n for n in count(required) if n - _aside(n) >= required) - required if others is None else 0
        set_aside = f", and {more} to set aside for thresholds" if more else ""
        raise UsageError(
            f"{total} labelled samples are too few to certify a failure rate of at most {max_risk:.4g} with "
            f"probability {probability:.4g}; label at least {required + more} "
            f"({required} to keep, if none fails{set_aside})"
        )
    expected = len(values) * levels
    begin = int(np.argmax(expected >= min(SLACK * required, max(len(values) / 2, required), expected[-1])))
    thresholds = np.quantile(rest, levels[begin:], method="inverted_cdf")
    kept = values[:, None] <= thresholds  # (B, G)
    size, failed = kept.sum(0), (kept & labels[:, None]).sum(0)
    bounds = upper_bound(failed, size, 1 - probability)
    passed = int(np.argmin(np.append(bounds <= max_risk, False)))  # number of tests passed before the first failure
    if not passed:
        raise UsageError(
            f"a failure rate of at most {max_risk:.4g} cannot be certified with probability {probability:.4g}: "
            f"{failed[0]} of the {size[0]} surest of {len(values)} labelled samples failed, so the rate may be "
            f"{bounds[0]:.3f}; allow a higher risk, or label more samples"
        )
    last = passed - 1
    return RiskCertificate(
        threshold=float(thresholds[last]),
        max_risk=max_risk,
        probability=probability,
        share=float(size[last] / len(values)),
        bound=float(bounds[last]),
        labelled=len(values),
    )


class Reliability(NamedTuple):
    """Success rates by confidence, with one entry per non-empty bin.

    Attributes:
        confidence: The mean confidence.
        success: The share of samples that did not fail.
        low, high: The Clopper–Pearson interval of `success`.
        size: The number of samples.
    """

    confidence: np.ndarray
    success: np.ndarray
    low: np.ndarray
    high: np.ndarray
    size: np.ndarray


def reliability(confidence: ArrayLike, bad: ArrayLike, bins: int = 10, probability: float = 0.9) -> Reliability:
    """Return success rates in equal-width bins of confidence, with exact intervals.

    Arguments:
        confidence: In [0, 1], high = trust. Confidence is a position in a ranking, so success should increase with it
            but need not equal it.
        bad: Whether each sample failed.
        bins: The number of bins.
        probability: The coverage of each interval.

    >>> reliability([0.1, 0.2, 0.9, 0.8], [True, True, False, False], bins=2).success.tolist()
    [0.0, 1.0]
    """
    values, labels = _arrays(confidence, bad)
    if not len(values) or values.min() < 0 or values.max() > 1:
        raise UsageError("confidence must be in [0, 1], for at least one sample")
    if bins < 1 or not 0 < probability < 1:
        raise UsageError(f"bins must be at least 1 and probability in (0, 1), got {bins} and {probability}")
    which = np.minimum((values * bins).astype(int), bins - 1)
    size = np.bincount(which, minlength=bins)
    filled = size > 0
    size = size[filled]
    good = np.bincount(which, ~labels, minlength=bins)[filled]
    mean = np.bincount(which, values, minlength=bins)[filled] / size
    miss = (1 - probability) / 2
    return Reliability(mean, good / size, lower_bound(good, size, miss), upper_bound(good, size, miss), size)


def _arrays(score: ArrayLike, bad: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    values, labels = np.asarray(score, dtype=float).ravel(), np.asarray(bad).astype(bool).ravel()
    if len(values) != len(labels):
        raise ShapeError(f"give one label per sample; got {len(labels)} labels for {len(values)} samples")
    if not np.isfinite(values).all():
        raise UsageError("scores must be finite, got NaN or infinity")
    return values, labels


def _aside(total: int) -> int:
    """Return the number of labelled samples to set aside for thresholds."""
    return min(MOST_ASIDE, max(FEWEST, round(ASIDE * total)))
