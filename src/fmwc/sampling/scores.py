"""Scores: one number a sample from its variance trajectory, high = doubtful (sec:method-readouts).

A score reads `(std, times, weights)`, each `(R, B)`: the norm ‖σ_t‖₂ of the velocity's standard deviation at the R
times it was read, those times, and how much time each stands for.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fmwc.errors import UsageError, pick

__all__ = ["EARLY", "LATE", "SCORES", "score"]

# The windows of the temporal ratio: the best and steadiest over validation seeds with the linearised variance
# (results/checkerboard, windows).
EARLY, LATE = 0.3, 0.7


def endpoint(std: Tensor, times: Tensor, weights: Tensor) -> Tensor:
    """‖σ_T‖ at the last evaluation (eq:cep)."""
    return std[-1]


def integrated(std: Tensor, times: Tensor, weights: Tensor) -> Tensor:
    """Σ ‖σ_t‖ Δt."""
    return (std * weights).sum(0)


def temporal_ratio(std: Tensor, times: Tensor, weights: Tensor, early: float = EARLY, late: float = LATE) -> Tensor:
    """The mean of ‖σ_t‖ over t ≥ late, divided by its mean over t < early (eq:ctc; a mean where the paper has a sum,
    so that a window read more often does not weigh more)."""

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
}


def score(name: str, std: Tensor, times: Tensor, weights: Tensor, **options: float) -> Tensor:
    read = pick(SCORES, name, "score")
    if options and name != "temporal_ratio":
        raise UsageError(f"score '{name}' takes no options; early and late are the temporal ratio's")
    if unknown := options.keys() - {"early", "late"}:
        raise UsageError(f"the temporal ratio's options are early and late, got {', '.join(sorted(unknown))}")
    return read(std, times, weights, **options)
