"""Scores: one number a sample from its variance trajectory, high = doubtful (sec:method-readouts).

A score reads `(std, times, weights)`, each `(R, B)`: the norm ‖σ_t‖₂ of the velocity's standard deviation at the R
times it was read (for `geometric` its root mean square), those times, and how much time each stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.flow import Space
from fmwc.state import channels

__all__ = [
    "EARLY",
    "GUESSES",
    "LATE",
    "PER_COORDINATE",
    "SCORES",
    "Free",
    "Standard",
    "combined",
    "names_of",
    "of_variance",
    "parsed",
    "require_varied",
    "score",
    "spread",
    "standard_of",
    "within_groups",
]

# The windows of the temporal ratio: the best and steadiest over validation seeds with the linearised variance
# (results/checkerboard, windows).
EARLY, LATE = 0.3, 0.7


def endpoint(std: Tensor, times: Tensor, weights: Tensor) -> Tensor:
    """‖σ_T‖ at the last evaluation (eq:cep)."""
    return std[-1]


def integrated(std: Tensor, times: Tensor, weights: Tensor, early: float = 0.0, late: float = 1.0) -> Tensor:
    """Σ ‖σ_t‖ Δt, over the whole way or over early ≤ t < late."""
    return (std * weights * _window(times, early, late)).sum(0)


def _require_rising(early: float, late: float, *, may_meet: bool = False) -> None:
    if not (early < late or (may_meet and early == late)):
        raise UsageError(f"a window of time rises, got {early} to {late}")


def _window(times: Tensor, early: float, late: float) -> Tensor:
    _require_rising(early, late)
    window = (times >= early) & (times < late)
    if not bool(window.any(0).all()):
        raise UsageError(
            f"the variance was not read for {early} ≤ t < {late}; read it at more steps, or choose another score"
        )
    return window


def geometric(std: Tensor, times: Tensor, weights: Tensor, early: float = 0.0, late: float = 1.0) -> Tensor:
    r"""The geometric mean over channels and time of the root mean square of σ over a channel's d_c degrees of freedom.

    .. math:: \exp \Big\langle \frac1C \sum_c \log \sqrt{ \tfrac1{d_c} \sum_i σ_{c,i}^2 } \Big\rangle_{early ≤ t < late}

    Up to constants the entropy of independent channels: no units to be weighed against one another, and a sample with
    more coordinates (atoms) is not more doubtful for having them.
    """
    share = weights * _window(times, early, late)
    logarithm = std.clamp_min(torch.finfo(std.dtype).tiny).log()
    return ((logarithm * share).sum(0) / share.sum(0)).exp()


def temporal_ratio(std: Tensor, times: Tensor, weights: Tensor, early: float = EARLY, late: float = LATE) -> Tensor:
    """The mean of ‖σ_t‖ over t ≥ late, divided by its mean over t < early (eq:ctc; a mean where the paper has a sum,
    so that a window read more often does not weigh more)."""
    _require_rising(early, late, may_meet=True)

    def mean(window: Tensor, name: str) -> Tensor:
        share = (window * weights).sum(0)
        if not bool((share > 0).all()):
            raise UsageError(
                f"temporal_ratio needs the variance in the {name} window, and it was not read there; "
                "start at t = 0 with a finer schedule, or choose another score"
            )
        return (std * weights * window).sum(0) / share

    return mean((times >= late).to(std.dtype), f"late (t ≥ {late})") / mean(
        (times < early).to(std.dtype), f"early (t < {early})"
    ).clamp_min(1e-30)


def peak(std: Tensor, times: Tensor, weights: Tensor) -> Tensor:
    """max ‖σ_t‖ over time."""
    return std.amax(0)


SCORES: dict[str, Callable[..., Tensor]] = {
    "endpoint": endpoint,
    "integrated": integrated,
    "temporal_ratio": temporal_ratio,
    "peak": peak,
    "geometric": geometric,
}

TAKES_WINDOW = ("temporal_ratio", "integrated", "geometric")
PER_COORDINATE = ("geometric",)  # read the root mean square, not the norm


def score(name: str, std: Tensor, times: Tensor, weights: Tensor, **options: float) -> Tensor:
    read = pick(SCORES, name, "score")
    if options and name not in TAKES_WINDOW:
        raise UsageError(f"score '{name}' takes no options; early and late are those of {' and '.join(TAKES_WINDOW)}")
    if unknown := options.keys() - {"early", "late"}:
        raise UsageError(f"the options of a score are early and late, got {', '.join(sorted(unknown))}")
    return read(std, times, weights, **options)


def require_varied(score: Tensor, name: str = "the score") -> Tensor:  # (B,) -> (B,)
    """Return a score, or raise where it is the same for all of two or more samples and so ranks none of them.

    >>> require_varied(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    low, high = (float(end) for end in score.aminmax()) if score.numel() else (0.0, 0.0)
    if score.numel() > 1 and high - low <= 4 * torch.finfo(score.dtype).eps * max(abs(low), abs(high)):
        raise UsageError(
            f"{name} is {low:.4g} for all of {score.numel()} samples, so it ranks none of them; choose another score, "
            "and if every variance is 0 look at which layers carry noise (attach's include and exclude)"
        )
    return score


# ---- between conditions ------------------------------------------------------------------------------------------

FEWEST = 8  # samples a condition whose centre and spread can be told
MOST = 100_000  # conditions; what takes more values is not a class


class Standard(NamedTuple):
    """What makes a score comparable between conditions: an 8 has more ink than a 1, and more variance, not more doubt.

    Attributes:
        cond: The name of the condition, whole numbers from 0 on.
        centre: The median of the score's logarithm among samples of each condition, `(C,)`.
        spread: Half of its 16–84 % range, `(C,)`; NaN for a condition that was not seen.
        source: `checkpoint`, or `run` where it was taken from the very samples it is applied to: their scores then
            depend on one another, and no guarantee can rest on them.
    """

    cond: str
    centre: Tensor
    spread: Tensor
    source: str = "checkpoint"

    def __call__(self, raw: Tensor, groups: Tensor) -> Tensor:  # (..., B), (B,) -> (..., B)
        """(log s − centre) / spread, each sample by its own condition."""
        groups = groups.long()  # a byte would be taken for a mask
        known = ~self.spread.isnan()
        strange = [g for g in groups.unique().tolist() if not 0 <= g < len(known) or not known[g]]
        if strange:
            raise UsageError(f"the reference holds no samples with {self.cond} = {strange[0]}, so none can be compared")
        logarithm = raw.clamp_min(torch.finfo(raw.dtype).tiny).log()
        return (logarithm - self.centre.to(raw)[groups]) / self.spread.to(raw)[groups]


def parsed(name: str) -> tuple[str | None, str, dict[str, float]]:
    """A score's name in its parts: the channel it reads, the score, and its window of time.

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
        raise UsageError(f"a window is two times, integrated@0.6-0.9; got '@{window}'") from error
    _require_rising(early, late, may_meet=score == "temporal_ratio")  # here too: said before anything is drawn
    return channel or None, score, {"early": early, "late": late}


def names_of(score: str) -> list[str]:
    """The names in a score that is made of several.

    >>> names_of("contest + 0.3 spread@0.3-0.8")
    ['contest', 'spread@0.3-0.8']
    """
    return [part.rpartition(" ")[2] for part in score.split(" + ")]


def of_variance(score: str) -> bool:
    """Whether a score, or every part of a sum, is read from the variance of the velocity.

    >>> of_variance("type/integrated@0.6-0.9"), of_variance("contest + 0.3 integrated")
    (True, False)
    """
    return all(parsed(name)[1] in SCORES for name in names_of(score))


def combined(scores: Sequence[tuple[Tensor, float, Tensor]]) -> Tensor:  # (B,), weight, (Q,) -> (B,)
    """Return the weighted sum of scores, each as a standard normal number by its rank among reference samples.

    Arguments:
        scores: For each, the score, its weight, and its quantiles over reference samples at evenly spaced levels.
            Beyond the largest and the smallest quantile the order of samples is kept.
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


def standard_of(cond: str, raw: Tensor, groups: Tensor) -> Standard:  # (B,), (B,)
    """The standard of a run by its own samples."""
    if groups.is_floating_point() or groups.ndim != 1 or not 0 <= int(groups.min()) <= int(groups.max()) < MOST:
        raise UsageError(
            f"'{cond}' is not a condition of whole numbers, one a sample, so samples cannot be grouped by it"
        )
    levels = torch.tensor([0.16, 0.5, 0.84], device=raw.device, dtype=raw.dtype)
    rows = []
    for group in range(int(groups.max()) + 1):
        members = raw[groups == group]
        if 0 < len(members) < FEWEST:
            raise UsageError(
                f"{len(members)} samples with {cond} = {group} are too few to compare them with one another; "
                f"draw at least {FEWEST}, or use a checkpoint that holds a reference"
            )
        logarithm = members.clamp_min(torch.finfo(raw.dtype).tiny).log()
        rows.append(logarithm.quantile(levels) if len(members) else levels * torch.nan)
    low, middle, high = torch.stack(rows, 1)
    return Standard(cond, middle, ((high - low) / 2).clamp_min(1e-6), "run")


def within_groups(cond: str, raw: Tensor, groups: Tensor) -> Tensor:  # (B,), (B,) -> (B,)
    """A score standardised among the samples of the same condition."""
    return standard_of(cond, raw, groups)(raw, groups)


# ---- free signals ----------------------------------------------------------------------------------------------------
# What a trajectory says of its end without a noise model and without another evaluation.
#
# At every step the velocity predicts the end, x̂₁ = x_t + (1 − t) v. A flow whose prediction changes is doubtful:
#
# - `spread`: the root mean square of x̂₁(t) − x₁ over the numbers of a sample, as a geometric mean over ten times of the
#   trajectory (or those in a window) and over channels.
# - `detour`: the length of the trajectory divided by the distance between its ends, averaged likewise.

GUESSES = 10  # predicted ends that are kept while a batch is integrated
TINY = 1e-30


class Free:
    """Collects the free signals of a batch while it is integrated.

    Arguments:
        space: The space of the samples, given their conditions.
        x0: Where they start.
        steps: The number of steps of the run.
    """

    def __init__(self, space: Space, x0: Any, steps: int) -> None:
        self.space, self.x0, self.last = space, x0, x0
        self.when = {round(i * steps / GUESSES) for i in range(GUESSES)} if steps > GUESSES else set(range(steps))
        self.guesses: list[tuple[Tensor, Any]] = []
        self.length: Any = 0.0

    def guess(self, step: int, x: Any, t: Tensor, v: Any) -> None:
        """Note the end that the velocity at a step predicts."""
        if step in self.when:
            self.guesses.append((t, self.space.advance(x, v, 1 - t)))

    def move(self, x: Any) -> None:
        """Note where a step ended."""
        self.length = self.length + self._between(self.last, x).sqrt()
        self.last = x

    def found(self) -> dict[str, Tensor]:
        """Return the signals, a row per sample."""
        squares = torch.stack([self._between(x, self.last) for _, x in self.guesses], 1)  # (C, G, B)
        far = self._between(self.x0, self.last).sqrt()
        return {
            "guess": self._over_channels(squares).T.contiguous(),  # (B, G)
            "guess_t": torch.stack([t for t, _ in self.guesses], 1),  # (B, G)
            "detour": self._over_channels(self.length / far.clamp_min(TINY)),
        }

    def _between(self, x: Any, y: Any) -> Tensor:  # -> (C, B)
        """The squared distance along the geodesic, per number of each channel."""
        found = []
        for name, channel in self.space.channels.items():
            square = channel.manifold.logmap(channels(x)[name], channels(y)[name]).square().flatten(1)
            found.append(square.sum(1) / self._numbers(name, square))
        return torch.stack(found)

    def _numbers(self, name: str, square: Tensor) -> Any:
        present = self.space.present.get(name)
        if present is None:
            return square.shape[1]
        return present.flatten(1).sum(1) * (square.shape[1] / self.space.channels[name].shape[0])

    def _over_channels(self, value: Tensor) -> Tensor:  # (C, ...) -> (...)
        """The geometric mean over channels that move at all."""
        moves = (value > TINY).to(value.dtype)
        return ((value.clamp_min(TINY).log() * moves).sum(0) / moves.sum(0).clamp_min(1)).exp() * (moves.sum(0) > 0)


def spread(guess: Tensor, times: Tensor, early: float = 0.0, late: float = 1.0) -> Tensor:  # (B, G), (B, G) -> (B,)
    """The geometric mean of the distance to the end over the predictions with early ≤ t < late.

    Not the arithmetic one, which would be that of the first predictions alone.
    """
    inside = ((times >= early - 1e-6) & (times < late - 1e-6)).to(guess.dtype)
    if not bool((inside.sum(1) > 0).all()):
        raise UsageError(f"no predicted end is known for {early} ≤ t < {late}; take more steps, or another window")
    return ((guess.clamp_min(TINY).log() * inside).sum(1) / inside.sum(1) / 2).exp()
