"""The trajectory of a run, and the scores that are computed from it.

A score is one number per sample, high = doubtful (sec:method-readouts). Its name may contain a channel and a window of
time (`coord/integrated@0.6-0.9`), and a score may be a sum (`contest + 0.3 spread@0.3-0.8`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.errors import UsageError, nearest, pick
from fmwc.estimators import Transported
from fmwc.files import write_tensors
from fmwc.flow import Space
from fmwc.identity import plain
from fmwc.state import SINGLE, batch_size, channels, select, tree_map

TINY = 1e-30


# ---- scores of the variance ------------------------------------------------------------------------------------------
# Each takes (std, times, weights), all (R, B): the norm ‖σ_t‖₂ of the velocity's standard deviation at the R readings
# (the root mean square for `geometric`), their times, and the length of time that each reading represents.

# The windows of the temporal ratio: best and most stable over validation seeds with the linearised variance
# (results/checkerboard, windows).
EARLY, LATE = 0.3, 0.7


def endpoint(std: Tensor, times: Tensor, weights: Tensor) -> Tensor:
    """Return ‖σ_T‖ at the last evaluation (eq:cep)."""
    return std[-1]


def integrated(std: Tensor, times: Tensor, weights: Tensor, early: float = 0.0, late: float = 1.0) -> Tensor:
    """Return Σ ‖σ_t‖ Δt over early ≤ t < late."""
    return (std * weights * _window(times, early, late)).sum(0)


def geometric(std: Tensor, times: Tensor, weights: Tensor, early: float = 0.0, late: float = 1.0) -> Tensor:
    r"""Return the geometric mean, over channels and time, of the root mean square of σ per degree of freedom.

    .. math:: \exp \Bigl\langle \frac1C \sum_c \log \sqrt{\tfrac1{d_c} \sum_i σ_{c,i}^2} \Bigr\rangle_{early ≤ t < late}

    Up to constants this is the entropy of independent channels. It is independent of units, and does not grow with the
    number of coordinates (atoms).
    """
    share = weights * _window(times, early, late)
    logarithm = std.clamp_min(torch.finfo(std.dtype).tiny).log()
    return ((logarithm * share).sum(0) / share.sum(0)).exp()


def temporal_ratio(std: Tensor, times: Tensor, weights: Tensor, early: float = EARLY, late: float = LATE) -> Tensor:
    """Return the mean of ‖σ_t‖ over t ≥ late, divided by its mean over t < early (eq:ctc).

    The paper uses sums. With means, a window that is read more often has no more weight.
    """
    _require_rising(early, late, may_meet=True)

    def mean(window: Tensor, name: str) -> Tensor:
        share = (window * weights).sum(0)
        if not bool((share > 0).all()):
            raise UsageError(
                f"temporal_ratio needs the variance in the {name} window, where it was not read; "
                "start at t = 0 with a finer schedule, or choose another score"
            )
        return (std * weights * window).sum(0) / share

    above = mean((times >= late).to(std.dtype), f"late (t ≥ {late})")
    return above / mean((times < early).to(std.dtype), f"early (t < {early})").clamp_min(TINY)


def peak(std: Tensor, times: Tensor, weights: Tensor) -> Tensor:
    """Return max ‖σ_t‖ over time."""
    return std.amax(0)


SCORES: dict[str, Callable[..., Tensor]] = {
    "endpoint": endpoint,
    "integrated": integrated,
    "temporal_ratio": temporal_ratio,
    "peak": peak,
    "geometric": geometric,
}
TAKES_WINDOW = ("temporal_ratio", "integrated", "geometric")
DISPERSION, SPREAD = "dispersion", "spread"
EVIDENCE = (SPREAD, "detour", "echo", "contest", "nearest")  # scores that need no variance


def _require_rising(early: float, late: float, *, may_meet: bool = False) -> None:
    if not (early < late or (may_meet and early == late)):
        raise UsageError(f"a time window must have early < late, got {early} to {late}")


def _window(times: Tensor, early: float, late: float) -> Tensor:
    _require_rising(early, late)
    window = (times >= early) & (times < late)
    if not bool(window.any(0).all()):
        raise UsageError(
            f"the variance was not read for {early} ≤ t < {late}; use a finer schedule, or choose another score"
        )
    return window


def variance_score(name: str, std: Tensor, times: Tensor, weights: Tensor, **options: float) -> Tensor:
    """Return a score of the variance by name; `early` and `late` are its time window."""
    function = pick(SCORES, name, "score")
    if options and name not in TAKES_WINDOW:
        raise UsageError(f"score '{name}' takes no options; early and late belong to {' and '.join(TAKES_WINDOW)}")
    if unknown := options.keys() - {"early", "late"}:
        raise UsageError(f"a score takes the options early and late, got {', '.join(sorted(unknown))}")
    return function(std, times, weights, **options)


def require_varied(score: Tensor, name: str = "the score") -> Tensor:  # (B,) -> (B,)
    """Return a score; raise if it is the same for two or more samples, so that it cannot rank them.

    >>> require_varied(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    low, high = (float(end) for end in score.aminmax()) if score.numel() else (0.0, 0.0)
    if score.numel() > 1 and high - low <= 4 * torch.finfo(score.dtype).eps * max(abs(low), abs(high)):
        raise UsageError(
            f"{name} is {low:.4g} for all of {score.numel()} samples, so it cannot rank them; choose another score, or "
            "if every variance is 0, check which layers carry noise (include and exclude of attach)"
        )
    return score


# ---- names of scores -------------------------------------------------------------------------------------------------


def parsed(name: str) -> tuple[str | None, str, dict[str, float]]:
    """Return the parts of a score's name: the channel, the score, and the time window.

    >>> parsed("coord/integrated@0.6-0.9")
    ('coord', 'integrated', {'early': 0.6, 'late': 0.9})
    """
    channel, _, rest = name.rpartition("/")
    score, _, window = rest.partition("@")
    if not window:
        return channel or None, score, {}
    try:
        early, late = (float(end) for end in window.split("-"))
    except ValueError as error:
        raise UsageError(f"a time window needs two times, as in integrated@0.6-0.9; got '@{window}'") from error
    _require_rising(early, late, may_meet=score == "temporal_ratio")  # raised before sampling
    return channel or None, score, {"early": early, "late": late}


def names_of(score: str) -> list[str]:
    """Return the names of the scores in a sum.

    >>> names_of("contest + 0.3 spread@0.3-0.8")
    ['contest', 'spread@0.3-0.8']
    """
    return [part.rpartition(" ")[2] for part in score.split(" + ")]


def of_variance(score: str) -> bool:
    """Return whether a score, or every part of a sum, depends on the variance of the velocity.

    >>> of_variance("type/integrated@0.6-0.9"), of_variance("contest + 0.3 integrated")
    (True, False)
    """
    return all(parsed(name)[1] in SCORES for name in names_of(score))


def needs_variance(score: str) -> bool:
    """Return whether a score, or any part of a sum, depends on the variance of the velocity."""
    return any(parsed(name)[1] in SCORES for name in names_of(score))


# ---- comparisons -----------------------------------------------------------------------------------------------------

FEWEST = 8  # samples per condition, needed to estimate centre and spread
MOST = 100_000  # values of a condition that is used as a class


class Standard(NamedTuple):
    """Standardisation that makes a score comparable between conditions.

    Attributes:
        cond: The name of the condition, which holds integers from 0.
        centre: The median of the score's logarithm per condition, `(C,)`.
        spread: Half of its 16–84 % range per condition, `(C,)`; NaN for a condition without samples.
        source: `checkpoint`, or `run` if it was computed from the samples that it is applied to. Scores then depend on
            one another, so they cannot be used for guarantees.
    """

    cond: str
    centre: Tensor
    spread: Tensor
    source: str = "checkpoint"

    def __call__(self, raw: Tensor, groups: Tensor) -> Tensor:  # (..., B), (B,) -> (..., B)
        """Return (log s − centre) / spread, with the centre and spread of each sample's condition."""
        groups = groups.long()  # torch would use bytes as a mask
        known = ~self.spread.isnan()
        strange = [g for g in groups.unique().tolist() if not 0 <= g < len(known) or not known[g]]
        if strange:
            raise UsageError(
                f"the reference holds no samples with {self.cond} = {strange[0]}; choose another score or condition"
            )
        logarithm = raw.clamp_min(torch.finfo(raw.dtype).tiny).log()
        return (logarithm - self.centre.to(raw)[groups]) / self.spread.to(raw)[groups]


def standard_of(cond: str, raw: Tensor, groups: Tensor) -> Standard:  # (B,), (B,)
    """Return the standardisation computed from the samples of a run."""
    if groups.is_floating_point() or groups.ndim != 1 or not 0 <= int(groups.min()) <= int(groups.max()) < MOST:
        raise UsageError(f"'{cond}' must hold one integer per sample to group samples by it")
    levels = torch.tensor([0.16, 0.5, 0.84], device=raw.device, dtype=raw.dtype)
    rows = []
    for group in range(int(groups.max()) + 1):
        members = raw[groups == group]
        if 0 < len(members) < FEWEST:
            raise UsageError(
                f"{len(members)} samples with {cond} = {group} are too few to compare; "
                f"draw at least {FEWEST}, or use a checkpoint that holds a reference"
            )
        logarithm = members.clamp_min(torch.finfo(raw.dtype).tiny).log()
        rows.append(logarithm.quantile(levels) if len(members) else levels * torch.nan)
    low, middle, high = torch.stack(rows, 1)
    return Standard(cond, middle, ((high - low) / 2).clamp_min(1e-6), "run")


def within_groups(cond: str, raw: Tensor, groups: Tensor) -> Tensor:  # (B,), (B,) -> (B,)
    """Return a score standardised among the samples of the same condition."""
    return standard_of(cond, raw, groups)(raw, groups)


def combined(scores: Sequence[tuple[Tensor, float, Tensor]]) -> Tensor:  # (B,), weight, (Q,) -> (B,)
    """Return the weighted sum of scores, each converted to a standard normal number by its rank in a reference.

    Arguments:
        scores: Triples of a score, its weight, and its quantiles over reference samples at evenly spaced levels. Beyond
            the smallest and the largest quantile, the order of samples is preserved.
    """
    total: Tensor | float = 0.0
    for score, weight, quantiles in scores:
        levels = quantiles.to(score).contiguous()
        last = len(levels) - 1
        at = torch.searchsorted(levels, score.contiguous()).clamp(1, last)
        low, high = levels[at - 1], levels[at]
        inside = ((score - low) / (high - low).clamp_min(torch.finfo(score.dtype).tiny)).clamp(0, 1)
        share = ((at - 1 + inside) / last).clamp(0.5 / last, 1 - 0.5 / last)
        width = (levels[-1] - levels[0]).clamp_min(torch.finfo(score.dtype).tiny)
        beyond = (score - levels[-1]).clamp_min(0) + (score - levels[0]).clamp_max(0)
        normal = torch.special.ndtri(share) + beyond.sign() * (beyond.abs() / width).log1p()
        total = total + normal * weight
    return total / sum(weight**2 for _, weight, _ in scores) ** 0.5


# ---- free signals ----------------------------------------------------------------------------------------------------
# Signals that need neither a noise model nor further evaluations. At every step the velocity predicts the endpoint,
# x̂₁ = x_t + (1 − t) v. If this prediction keeps changing, the sample is doubtful:
#
# - `spread`: the root mean square of x̂₁(t) − x₁ per number of a sample, as a geometric mean over channels and over ten
#   times of the trajectory (or those in a window).
# - `detour`: the length of the trajectory divided by the distance between its ends, as a geometric mean over channels.

ROUNDING = 1e-10  # squared distance relative to that between noise and sample
GUESSES = 10  # predicted endpoints that are stored while a batch is integrated


class FreeSignals:
    """Collect the free signals of a batch while it is integrated.

    Arguments:
        space: The space of the samples, given their conditions.
        x0: The states at the start.
        steps: The number of steps of the run.
    """

    def __init__(self, space: Space, x0: Any, steps: int) -> None:
        self.space, self.x0, self.last = space, x0, x0
        self.when = {round(i * steps / GUESSES) for i in range(GUESSES)} if steps > GUESSES else set(range(steps))
        self.guesses: list[tuple[Tensor, Any]] = []
        self.length: Any = 0.0

    def guess(self, step: int, x: Any, t: Tensor, v: Any) -> None:
        """Store the endpoint that the velocity at a step predicts."""
        if step in self.when:
            self.guesses.append((t, self.space.advance(x, v, 1 - t)))

    def move(self, x: Any) -> None:
        """Add the length of a step that ends at x."""
        self.length = self.length + self._between(self.last, x).sqrt()
        self.last = x

    def evidence(self) -> dict[str, Tensor]:
        """Return the signals, one row per sample."""
        squares = torch.stack([self._between(x, self.last) for _, x in self.guesses], 1)  # (C, G, B)
        far = self._between(self.x0, self.last).sqrt()
        # A channel that the condition determines is predicted exactly, up to rounding, and says nothing.
        known = squares <= ROUNDING * far.square()[:, None]
        squares = squares.masked_fill(known & ~known.all(0), 0.0)
        return {
            "guess": self._over_channels(squares).T.contiguous(),  # (B, G)
            "guess_t": torch.stack([t for t, _ in self.guesses], 1),  # (B, G)
            "detour": self._over_channels(self.length / far.clamp_min(TINY)),
        }

    def _between(self, x: Any, y: Any) -> Tensor:  # -> (C, B)
        """Return the squared geodesic distance per channel, divided by the number of coordinates."""
        rows = []
        for name, channel in self.space.channels.items():
            square = channel.manifold.logmap(channels(x)[name], channels(y)[name]).square().flatten(1)
            present, numbers = self.space.present.get(name), square.shape[1]
            count: Any = numbers if present is None else present.flatten(1).sum(1) * (numbers / channel.shape[0])
            rows.append(square.sum(1) / count)
        return torch.stack(rows)

    def _over_channels(self, value: Tensor) -> Tensor:  # (C, ...) -> (...)
        """Return the geometric mean over the channels that move."""
        moves = (value > TINY).to(value.dtype)
        return ((value.clamp_min(TINY).log() * moves).sum(0) / moves.sum(0).clamp_min(1)).exp() * (moves.sum(0) > 0)


def _spread(guess: Tensor, times: Tensor, early: float = 0.0, late: float = 1.0) -> Tensor:  # (B, G), (B, G) -> (B,)
    """Return the geometric mean of the distance to the end over the predictions with early ≤ t < late.

    The first predictions would dominate an arithmetic mean.
    """
    inside = ((times >= early - 1e-6) & (times < late - 1e-6)).to(guess.dtype)
    if not bool((inside.sum(1) > 0).all()):
        raise UsageError(f"no predicted endpoint is stored for {early} ≤ t < {late}; use more steps or another window")
    return ((guess.clamp_min(TINY).log() * inside).sum(1) / inside.sum(1) / 2).exp()


# ---- the trajectory --------------------------------------------------------------------------------------------------

NO_REFERENCE = "there is no reference for runs like this; call fmwc.fit_confidence(field, data)"

# The fields with one entry per sample, and the dimension of the samples.
SAMPLES = {
    "x": 0,
    "x0": 0,
    "cond": 0,
    "evidence": 0,
    "scores": 0,
    "index": 0,
    "times": 1,
    "mean": 1,
    "var": 1,
    "grid": 1,
}


@dataclass(frozen=True, eq=False, repr=False)
class Trajectory:
    """Samples of a run, and the variance of the velocity along their trajectories, read at R times.

    Attributes:
        x: Samples at t = 1, `(B, *)` or a dict of channels.
        x0: The states at the start.
        times: When the variance was read, `(R, B)`.
        mean: The velocity at these times, `(R, B, *)`.
        var: The variance, `(R, B, *)`; size 1 in the last dimensions if there is one number per sample.
        grid: Every time of the run, `(steps + 1, B)`.
        transported: The variance of the endpoint and its profile over steps and layers, with `transport=True`.
        cond: The conditions (such as the class), by name, `(B, *)` each.
        reference: Sorted quantiles of the default score over reference samples; `None` if the run cannot be compared
            with any.
        standard: Makes the default score comparable between conditions, if the reference holds it.
        default_score: The score that `confidence` is based on.
        units: Factors for the variance of channels with different units (such as ångström and fractions of a cell): the
            channels' weights in the training loss. Channels that are not named have factor 1.
        rows: For channels whose number of rows differs between samples (atoms): the condition that counts the rows, and
            the number of rows that are not free (1 if their mean is removed).
        evaluations: Network evaluations per sample that were spent on the velocity.
        seed: The seed of the run.
        scores: The default score, if it was kept instead of the variance (:func:`fmwc.sampling.stream`).
        made: The provenance of the run, saved with the samples: the checkpoint, its identity and the settings.
        index: The index of each sample within its run, `(B,)`; 0, 1, … if `None`.
        evidence: Other signals, by name and with one row per sample: the free signals of the trajectory
            (:class:`FreeSignals`), and the results of checks of the finished samples.
        without: Why the run has no confidence although its checkpoint holds a reference; else empty.
        ranks: The sorted scores of the run that these samples were selected from, if any.
        states: The states at every time of the grid, with `keep_states=True`.
    """

    x: Any
    x0: Any
    times: Tensor
    mean: Any
    var: Any
    grid: Tensor
    transported: Transported | None = None
    cond: dict[str, Tensor] = field(default_factory=dict)
    reference: Tensor | None = None
    standard: Standard | None = None
    default_score: str = "temporal_ratio"
    units: dict[str, float] = field(default_factory=dict)
    rows: dict[str, tuple[str, int]] = field(default_factory=dict)
    evaluations: int = 0
    seed: int = 0
    scores: Tensor | None = None
    made: dict[str, Any] = field(default_factory=dict)
    index: Tensor | None = None
    evidence: dict[str, Tensor] = field(default_factory=dict)
    without: str = ""
    ranks: Tensor | None = None
    states: list[Any] | None = None

    def __len__(self) -> int:
        return batch_size(self.x)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{tuple(c.shape)}" + f" {n}" * (n != SINGLE) for n, c in channels(self.x).items())
        read = f"variance read at {len(self.times)} times" if len(self.times) else "no variance read"
        place = "confidence in [0, 1], high = trust" if not self.withheld else self.withheld
        return (
            f"Trajectory of {len(self)} samples {shapes}: {self.evaluations} evaluations per sample, {read}\n"
            f"  score: {self.default_score}, high = doubtful; evidence: {', '.join(self.evidence) or 'none'}\n"
            f"  {place}"
        )

    @property
    def names(self) -> list[str]:
        """The name of each sample in tables and files: its index within the run."""
        numbers = range(len(self)) if self.index is None else self.index.tolist()
        return [f"{i:05d}" for i in numbers]

    # ---- variance ----

    @property
    def std(self) -> Tensor:  # (R, B)
        """‖σ_t‖₂ over all coordinates of all channels, each channel scaled by its unit."""
        totals = [self._total(name) * self.units.get(name, 1.0) for name in channels(self.var)]
        return torch.stack(totals).sum(0).sqrt()

    def _total(self, channel: str) -> Tensor:  # (R, B)
        var, mean = channels(self.var)[channel], channels(self.mean)[channel]
        return var.expand_as(mean).flatten(2).sum(2)

    @property
    def rms(self) -> Tensor:  # (R, B)
        """The geometric mean over channels of the root mean square of σ over a channel's degrees of freedom.

        A channel without degrees of freedom (the position of the only atom of a crystal) is left out.
        """
        free = torch.stack([self._freedom(name) for name in channels(self.var)])[:, None] > 0  # (C, 1, B)
        logs = torch.stack([self.rms_of(name).clamp_min(TINY).log() for name in channels(self.var)])
        mean = torch.where(free, logs, 0.0).sum(0) / free.sum(0).clamp_min(1)
        return torch.where(free.any(0), mean.exp(), 0.0)

    def rms_of(self, channel: str) -> Tensor:  # (R, B)
        """Return the root mean square of one channel; 0 if the channel cannot vary, whatever the estimator returns."""
        freedom = self._freedom(channel)
        return torch.where(freedom > 0, self._total(channel) / freedom.clamp_min(1), 0.0).sqrt()

    def _freedom(self, channel: str) -> Tensor:  # (B,)
        """Return the number of coordinates of a channel that can vary."""
        shape = channels(self.x)[channel].shape[1:]
        if channel not in self.rows:
            return self.times.new_full((len(self),), shape.numel())
        name, tied = self.rows[channel]
        return (self.cond[name].to(self.times) - tied) * shape[1:].numel()

    @property
    def weights(self) -> Tensor:  # (R, B)
        """The length of time that each reading represents: until the next one, or until t = 1 for the last."""
        return torch.cat([self.times[1:], torch.ones_like(self.times[:1])]) - self.times

    # ---- scores ----

    def score(
        self, name: str | None = None, *, within: str | None = None, channel: str | None = None, **options: float
    ) -> Tensor:  # (B,)
        """Return a score by name, high = doubtful: endpoint, integrated, temporal_ratio, peak, geometric, dispersion …

        `type/integrated` is the integrated score of the channel `type`; `integrated@0.6-0.9` is restricted to a time
        window.

        Arguments:
            name: The score. By default that of the confidence, standardised between conditions if its reference is.
            within: The name of a condition (`"y"`). Standardises the score among samples with the same value, so that
                it shows how doubtful a sample is for its condition.
            channel: Use the variance of one channel only.
            options: `early` and `late`, the time window of temporal_ratio, integrated and geometric.
        """
        raw = self._raw(name or self.default_score, channel, options)
        if within is not None:
            return within_groups(within, raw, self._groups(within))
        if name is None and self.standard is not None:
            return self.standard(raw, self._groups(self.standard.cond))
        return raw

    def _raw(self, score: str, channel: str | None = None, options: dict[str, float] | None = None) -> Tensor:
        """Return a score that is not standardised."""
        if self.scores is not None and score == self.default_score and channel is None and not options:
            return self.scores
        named_channel, name, window = parsed(score)
        channel, options = channel or named_channel, {**window, **(options or {})}
        if name == DISPERSION or name in EVIDENCE or name in self.evidence:
            if channel is not None or (options and name != SPREAD):
                raise UsageError(f"{name} is defined for the whole sample only; leave out channel and window")
            return self._dispersion() if name == DISPERSION else self._of_evidence(name, options)
        if name not in SCORES:
            raise UsageError(nearest(name, [*SCORES, DISPERSION, *EVIDENCE], "score"))
        if not len(self.times):
            kept = f", but its score {self.default_score}" if self.scores is not None else ""
            why = f"confidence is withheld: {self.without}; " if self.without and score == self.default_score else ""
            fix = "sample with confidence=Linearised() and the default record"
            raise UsageError(f"{why}this run kept no variance{kept}; {fix}")
        if channel is not None:
            pick(channels(self.var), channel, "channel")
        if name == "geometric":
            std = self.rms if channel is None else self.rms_of(channel)
        else:
            std = self.std if channel is None else self._total(channel).sqrt()
        return variance_score(name, std, self.times, self.weights, **options)

    def _dispersion(self) -> Tensor:
        if self.transported is None:
            raise UsageError("dispersion needs the transported variance; use sample(..., transport=True)")
        # The mean over probes times the dimension. With one probe per coordinate this is the sum; with random
        # projections, an unbiased estimate of it.
        dim = sum(c[0].numel() for c in channels(self.x).values())
        return (self.transported.var.mean(1) * dim).sqrt()

    def _of_evidence(self, name: str, options: dict[str, float]) -> Tensor:
        if name == SPREAD:
            if "guess" not in self.evidence:
                raise UsageError(
                    "this run did not keep its predicted endpoints, so there is no spread; choose another score"
                )
            return _spread(self.evidence["guess"], self.evidence["guess_t"], **options)
        if name not in self.evidence:
            raise UsageError(f"this run lacks the score {name}; sample with the check that computes it (check=...)")
        if self.evidence[name].ndim != 1:
            raise UsageError(f"'{name}' is not one number per sample; choose another score")
        return self.evidence[name]

    def _groups(self, within: str) -> Tensor:
        if not self.cond:
            raise UsageError("this run had no conditions")
        return pick(self.cond, within, "condition")

    def ranked_by(self, score: str, *, within: str | None = None) -> Trajectory:
        """Return the run ranked by another score among its samples (among those of the same condition, with `within`).

        The score is not standardised between conditions unless `within` is given.
        """
        if within is None and score == self.default_score and self.standard is None:
            return self
        raw = self._raw(score)
        standard = None if within is None else standard_of(within, raw, self._groups(within))
        without = f"the run is ranked by {score}, which has no reference"
        return replace(
            self, default_score=score, reference=None, standard=standard, ranks=None, scores=None, without=without
        )

    # ---- confidence ----

    @property
    def confidence(self) -> Tensor | None:  # (B,)
        """Confidence in [0, 1], high = trust: the share of reference samples with a higher score.

        The reference is that of the checkpoint. `None` if the run cannot be compared with it; :attr:`withheld` says
        why. :attr:`rank` is available for any run with a score.
        """
        if self.withheld:
            return None
        assert self.reference is not None
        return _share_above(self.score(), self.reference)

    @property
    def withheld(self) -> str:
        """Why this run has no confidence; empty if it has one."""
        reason, ranked = self.without or (NO_REFERENCE if self.reference is None else ""), ""
        if not reason:
            try:
                self.score()
                return ""
            except UsageError as error:  # the run lacks the score
                reason = str(error)
        with suppress(UsageError):
            self.rank  # noqa: B018
            ranked = "; rank orders the samples of this run"
        return f"confidence is withheld: {reason}{ranked}"

    @property
    def rank(self) -> Tensor:  # (B,)
        """Rank in [0, 1], high = trust: the share of the samples of this run with a higher score.

        0.5 for the sample of a run of one, which nothing is known of.
        """
        score = self.score()
        among = score.sort().values if self.ranks is None else self.ranks
        return ranked_among(score, require_varied(among, self.default_score))

    # ---- parts of a run ----

    def compact(self) -> Trajectory:
        """Return the run with one variance per sample and channel instead of per coordinate. Scores do not change."""
        totals = {name: self._total(name)[..., None] for name in channels(self.var)}
        var = totals if isinstance(self.var, dict) else totals[SINGLE]
        return replace(self, mean=tree_map(torch.zeros_like, var), var=var, states=None)

    def scored(self, score: str = "") -> Trajectory:
        """Return the run with a score instead of the variance, so that its size does not depend on the number of steps.

        Arguments:
            score: The name of the score; the default score if empty.
        """
        empty = {n: tree_map(lambda c: c[:0], getattr(self, n)) for n in ("times", "mean", "var")}
        name, scores = score or self.default_score, None
        with suppress(UsageError):
            scores = self._raw(name)
        evidence = {n: value for n, value in self.evidence.items() if n not in ("guess", "guess_t")}
        few: dict[str, Any] = {**empty, "grid": self.grid[-1:], "states": None, "evidence": evidence}
        return replace(self, **few, default_score=name, scores=scores)

    def read_at(self, steps: Sequence[int]) -> Trajectory:
        """Return the run with only some of its readings."""
        index = torch.as_tensor(steps, device=self.times.device)
        fewer: dict[str, Any] = {n: select(getattr(self, n), index) for n in ("times", "mean", "var")}
        return replace(self, **fewer, scores=None)  # the scores used all readings

    def take(self, index: Tensor) -> Trajectory:
        """Return some of the samples."""
        run = self if self.index is not None else replace(self, index=torch.arange(len(self)))
        changes = _per_sample([run], lambda axis, c: c[(*[slice(None)] * axis, index.to(c.device))])
        if self.ranks is None:
            with suppress(UsageError):  # samples keep their rank within this run
                changes["ranks"] = self.score().sort().values
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> Trajectory:
        """Return the trajectory with its tensors on a device."""
        changes = _per_sample([self], lambda axis, c: c.to(device))
        for name in ("reference", "ranks"):
            if (value := getattr(self, name)) is not None:
                changes[name] = value.to(device)
        if (s := self.standard) is not None:
            changes["standard"] = s._replace(centre=s.centre.to(device), spread=s.spread.to(device))
        return replace(self, **changes | {"index": self.index})  # the index stays on the CPU

    def surest(self, fraction: float, score: str | None = None, *, within: str | None = None) -> Trajectory:
        """Return the given fraction of the samples with the lowest scores, in their original order."""
        if not 0 < fraction <= 1:
            raise UsageError(f"the fraction to keep must lie in (0, 1], got {fraction}")
        keep = max(1, round(fraction * len(self)))
        values = self.score(score, within=within)
        if keep < len(self):
            require_varied(values, score or self.default_score)
        return self.take(values.argsort(stable=True)[:keep].sort().values)

    # ---- files ----

    def save(self, path: str | Path) -> Path:
        """Write `samples.safetensors`, or the named file, atomically."""
        path = Path(path)
        path = path / "samples.safetensors" if path.is_dir() else path
        return write_tensors(path, self.tensors(), self.about())

    @classmethod
    def load(cls, path: str | Path) -> Trajectory:
        """Read a file written by `save`; raise if it is not a run or was modified."""
        from fmwc.sampling.storage import load_run

        return load_run(Path(path))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `save` writes."""
        groups = {name: getattr(self, name) for name in (*SAMPLES, "reference", "ranks")}
        if self.standard is not None:
            groups["standard"] = {"centre": self.standard.centre, "spread": self.standard.spread}
        if self.transported is not None:
            groups["transported"] = {"var": self.transported.var, "profile": self.transported.profile}
        with suppress(UsageError):  # a run that is too short for its score can still be saved
            groups["score"] = self.score()
            groups["confidence"] = self.confidence
            groups["rank"] = self.rank
        found: dict[str, Tensor] = {}
        for name, group in groups.items():
            parts = group if isinstance(group, dict) else {"": group}
            found |= {f"{name}.{part}".rstrip("."): value.cpu() for part, value in parts.items() if value is not None}
        # Files cannot hold two tensors with shared memory. The large tensors share none and are not copied.
        large = ("x", "x0", "mean", "var")
        return {n: (c if n.partition(".")[0] in large else c.clone()).contiguous() for n, c in found.items()}

    def about(self) -> dict[str, Any]:
        """Return the description that `save` writes next to the tensors and their hash."""
        names = ("seed", "default_score", "evaluations", "units", "rows", "without")
        return {
            **{name: getattr(self, name) for name in names},
            "layers": list(self.transported.layers) if self.transported else [],
            "within": self.standard.cond if self.standard else None,
            "standardised_by": self.standard.source if self.standard else None,
            "made": plain(self.made),
        }


def join(runs: Sequence[Trajectory]) -> Trajectory:
    """Return one trajectory with the samples of several trajectories, which must be read at the same steps."""
    if len(runs) == 1:
        return runs[0]
    if len({len(run.times) for run in runs}) > 1:
        raise UsageError(
            "samples with different start times reach the scheduled times at different steps; use one batch, or "
            "Schedule.every(k)"
        )
    return replace(runs[0], **_per_sample(runs, lambda axis, *parts: torch.cat(parts, axis)))


def _per_sample(runs: Sequence[Trajectory], f: Callable[..., Tensor]) -> dict[str, Any]:
    """Return `f(dimension of the samples, tensor of each run, …)` for every field with one entry per sample."""
    first = runs[0]
    changes: dict[str, Any] = {
        name: tree_map(partial(f, axis), *(getattr(run, name) for run in runs))
        for name, axis in SAMPLES.items()
        if getattr(first, name) is not None
    }
    if first.transported is not None:
        ends = [run.transported for run in runs if run.transported is not None]
        var, profile = f(0, *(end.var for end in ends)), f(2, *(end.profile for end in ends))
        changes["transported"] = Transported(var, profile, first.transported.layers)
    if first.states is not None:
        changes["states"] = [
            tree_map(partial(f, 0), *states) for states in zip(*(run.states or [] for run in runs), strict=True)
        ]
    return changes


def ranked_among(score: Tensor, among: Tensor) -> Tensor:  # (B,), (N,) -> (B,)
    """Return the rank of each score among the sorted scores of a run: the share above it, 0.5 in a run of one."""
    return _share_above(score, among) if len(among) > 1 else torch.full_like(score, 0.5)


def _share_above(score: Tensor, reference: Tensor) -> Tensor:  # (B,), (N,) -> (B,)
    """Return the share of a sorted reference above each score."""
    at = torch.searchsorted(reference.to(score), score.contiguous(), right=True)
    return 1 - at.to(score.dtype) / len(reference)
