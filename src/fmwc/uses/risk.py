r"""Risk control: a score threshold at which the failure rate is bounded with a given probability.

A certificate is computed from labelled samples (s_i, y_i), drawn independently from the sampler; y = 1 is a failure.
The risk of a threshold λ is the failure rate of new samples, R(λ) = P(y = 1 | s ≤ λ). :func:`risk_control` returns λ̂
with

    P( R(λ̂) ≤ max_risk ) ≥ probability,

where the probability is over the draw of the labelled samples. No assumption is made about the score: a poor score
leads to few kept samples or to no certificate, but never to an invalid certificate.

**Why it holds.** Fixed-sequence testing (Angelopoulos et al.).

1. The thresholds λ_1 ≤ λ_2 ≤ … are quantiles of the scores of *other* samples: unlabelled samples, or labelled samples
   that are set aside and not used otherwise. Relative to the labelled samples, they are constants. Each sample at or
   below λ_j fails independently with probability R(λ_j). Given the number n_j of these samples, the number of failures
   K_j is *exactly* binomial(n_j, R(λ_j)).
2. Therefore, if R(λ_j) > max_risk, the Clopper–Pearson upper bound at level a is at most max_risk with probability at
   most a. Call such a threshold *bad*.
3. The level δ = 1 − probability is divided: every threshold j has a share a_j ≥ 0, with Σ a_j = δ. Thresholds are
   tested in increasing order, each at the level of its own share plus what the previous one passed on. A threshold that
   passes its test passes its whole level on; one that fails passes on nothing. The certificate is the last threshold
   that passed (the fallback procedure; with a single positive share, fixed-sequence testing).
4. A certificate is wrong only if some bad threshold passed. Consider the *first* bad threshold j that passes, and the
   bad threshold i before it, if there is one. By the choice of j, i failed, so j was tested at a level of at most
   c_j = a_{i+1} + … + a_j, which does not depend on the labelled samples. By step 2, this has probability at most c_j,
   and the sum over all bad j is at most Σ a_j = δ. This holds for any number of thresholds, any dependence between
   their tests, and any risk R, also one that rises and falls again.

**Where the tests start.** Equal shares go to the thresholds that keep about 1/2, 1/4, 1/8, … of the labelled samples,
down to :data:`SLACK` times the number without which nothing can be certified; the other shares are 0. Shares therefore
depend only on the number of labels, which step 4 requires. With a single start that keeps a fixed *number* of samples,
more labels would not help: the first test would keep its size, and one failure more than usual among the few surest
samples would end the sequence. At a fixed *share*, the number of samples grows with the labels, and so does the
probability to pass wherever R < max_risk; the price, δ divided by the logarithm of the number of labels, grows much
more slowly.

*Why not use quantiles of the labelled scores?* Given all scores, labels are independent but not identically
distributed: the number of failures among the kept samples is a sum of Bernoulli(P(y = 1 | s_i)). A bound on it concerns
the mean of P(y = 1 | s_i) over *these* s_i, not R. Given a single order statistic, the samples strictly below it are
independent, so one test is exact. But which thresholds are bad then depends on the scores, and step 4 fails unless R
crosses max_risk only once. Setting samples aside costs a few labels and needs no such condition.

A certificate bounds a *rate*: among a hundred kept samples, the share of failures varies around this rate. It holds for
samples that are drawn and scored like the labelled samples: with the same checkpoint, steps, conditions and score. The
score must depend on the sample alone (it must not be standardised within a run), and the choice of the labelled samples
must not depend on the score. Where samples without a label are given as well, this is tested.

References:
    | Angelopoulos, Bates, Candès, Jordan, Lei: Learn then Test: Calibrating Predictive Algorithms to Achieve Risk
      Control. arXiv:2110.01052 (fixed-sequence and fallback testing; selective classification).
    | Bates, Angelopoulos, Lei, Malik, Jordan: Distribution-Free, Risk-Controlling Prediction Sets. J. ACM 68 (2021).
    | Clopper, Pearson: The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial.
      Biometrika 26 (1934).
    | Wiens: A Fixed Sequence Bonferroni Procedure for Testing Multiple Endpoints. Pharm. Stat. 2 (2003) (the fallback
      procedure).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import beta, ks_2samp

from fmwc.errors import ShapeError, UsageError
from fmwc.readers import check, number, record, whole
from fmwc.state import as_labels

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
# Each starting threshold is expected to keep at least this many times the required labels, unless there are too few
# labels; with only the required number, a single failure would end the sequence.
SLACK = 3
CHANCE = 1e-3  # how often labels of a random choice may be refused


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
    at_random: bool = False,
) -> RiskCertificate:
    """Return the largest threshold with a certified failure rate; see the module docstring for the proof.

    Arguments:
        score: The scores of the samples, high = doubtful.
        bad: Whether each sample failed: 1 or `True` if it did, 0 or `False` if not, NaN or `None` without a label. If
            some have no label, those with one must be a random choice. Their scores are compared by a
            Kolmogorov–Smirnov test, which refuses one random choice in a thousand.
        max_risk: The maximum failure rate among kept samples.
        probability: The probability that the certificate holds.
        others: Scores of unlabelled samples, whose quantiles are the thresholds. By default those of the samples
            without a label; if there are fewer than 20, some labelled samples are set aside instead.
        grid: The levels of the tested quantiles, increasing in (0, 1].
        seed: Seeds the choice of the samples to set aside.
        at_random: States that the labelled samples are a random choice, whatever the test of their scores says.

    >>> score, others = np.random.default_rng(0).random((2, 400))
    >>> certificate = risk_control(score, score > 0.8, max_risk=0.05, others=others)
    >>> 0.75 < certificate.threshold < 0.85, certificate.bound <= 0.05
    (True, True)
    """
    values, labels, unlabelled = _arrays(score, bad)
    required = required_labels(max_risk, probability)
    levels = np.asarray(grid, dtype=float)
    if not len(levels) or not (np.diff(levels) > 0).all() or not 0 < levels[0] <= levels[-1] <= 1:
        raise UsageError(f"grid must hold increasing levels in (0, 1], got {list(grid)}")
    if not at_random:
        _require_random(values, labels, unlabelled)
    if others is None and len(unlabelled) >= FEWEST:
        others = unlabelled
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
    expected, miss = len(values) * levels, 1 - probability
    starts = {int(np.argmax(expected >= min(size, expected[-1]))) for size in _starts(len(values), required)}
    begin = min(starts)
    thresholds = np.quantile(rest, levels, method="inverted_cdf")
    kept = values[:, None] <= thresholds  # (B, G)
    size, failed = kept.sum(0), (kept & labels[:, None]).sum(0)
    last, bound, level = -1, 1.0, 0.0
    for j in range(begin, len(levels)):
        level += miss / len(starts) * (j in starts)
        if level and (at := float(upper_bound(failed[j], size[j], level))) <= max_risk:
            last, bound = j, at
        else:
            level = 0.0  # what was passed on is lost
    if last < 0:
        rate = float(upper_bound(failed[begin], size[begin], miss / len(starts)))
        raise UsageError(
            f"a failure rate of at most {max_risk:.4g} cannot be certified with probability {probability:.4g}: "
            f"{failed[begin]} of the {size[begin]} surest of {len(values)} labelled samples failed, so the rate may be "
            f"{rate:.3f}; allow a higher risk, or label more samples"
        )
    return RiskCertificate(
        threshold=float(thresholds[last]),
        max_risk=max_risk,
        probability=probability,
        share=float(size[last] / len(values)),
        bound=bound,
        labelled=len(values),
    )


def _starts(total: int, required: int) -> list[float]:
    """Return how many of the labelled samples the starting thresholds are expected to keep: 1/2 of them, 1/4, 1/8, …"""
    if total < 2 * SLACK * required:
        return [max(total / 2, required)]
    return [total / 2**k for k in range(1, 1 + int(math.log2(total / (SLACK * required))))]


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
        bad: Whether each sample failed; those without a label (NaN or `None`) are left out.
        bins: The number of bins.
        probability: The coverage of each interval.

    >>> reliability([0.1, 0.2, 0.9, 0.8], [True, True, False, False], bins=2).success.tolist()
    [0.0, 1.0]
    """
    values, labels, _ = _arrays(confidence, bad)
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


def _arrays(score: ArrayLike, bad: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scores and labels of labelled samples, and the scores of those without a label."""
    values, labels = np.asarray(score, dtype=float).ravel(), as_labels(bad, "bad").ravel()
    if len(values) != len(labels):
        raise ShapeError(f"give one label per sample; got {len(labels)} labels for {len(values)} samples")
    if not np.isfinite(values).all():
        raise UsageError("scores must be finite, got NaN or infinity")
    known = ~np.isnan(labels)
    return values[known], labels[known] == 1, values[~known]


def _require_random(values: np.ndarray, labels: np.ndarray, unlabelled: np.ndarray) -> None:
    """Raise if the labelled samples differ from those without a label as a random choice would not."""
    if not len(values) or not len(unlabelled):
        return
    if labels.all():
        raise UsageError(
            "every label is a failure and the other samples have none: such one-sided labels guarantee nothing; also "
            "label good samples"
        )
    chance = float(ks_2samp(values, unlabelled).pvalue)
    if chance < CHANCE:
        raise UsageError(
            f"the {len(values)} labelled samples are no random choice: their scores (median {np.median(values):.4g}) "
            f"differ from those of the {len(unlabelled)} without a label (median {np.median(unlabelled):.4g}), which "
            f"happens by chance with p = {chance:.1g}; label a random choice, or state that they are one with "
            "at_random=True (--at-random)"
        )


def _aside(total: int) -> int:
    """Return the number of labelled samples to set aside for thresholds."""
    return min(MOST_ASIDE, max(FEWEST, round(ASIDE * total)))
