r"""Schedules that adapt: few readings of the variance, at the times that tell most of a score.

A pilot run is read at every step. Of its readings those are left out, one after another, without which the score s of
its samples stays most like itself, and the K that are left are exchanged for others as long as that helps:

.. math:: \max_{|T| = K} \; ρ \big( s_T, s \big)

with Pearson's ρ, to which the doubtful few say most. Readings outside the windows a score looks at go first. A reading
stands until the next, as everywhere (:attr:`Trajectory.weights`); the times are chosen by the score that comes of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.field import ReadWith, Reference, Schedule
from fmwc.sampling.scores import standard_of
from fmwc.sampling.trajectory import Trajectory

__all__ = ["READINGS", "fitted", "score_at"]

READINGS = 3  # makes 50 steps 1.2 times as long (results/bench)
LEVELS = 201  # quantiles of the pilot's scores


def fitted(run: Trajectory, readings: int, read_with: Callable[[tuple[float, ...]], ReadWith]) -> Schedule:
    """The schedule that a pilot's score asks for.

    Arguments:
        run: The pilot, read at every step.
        readings: K.
        read_with: How a run that is read at these times is made (:func:`fmwc.sampling.read_with`).
    """
    every = range(len(run.times))
    if not 1 <= readings <= len(every):
        raise UsageError(f"a schedule takes 1 to {len(every)} of the pilot's readings, got {readings}")
    if not bool((run.times == run.times[:, :1]).all()):
        raise UsageError("a pilot reads the variance at the same times for every sample")
    run = run.compact().to("cpu")  # thousands of small sums
    whole = score_at(run, every)

    def alike(steps: Iterable[int]) -> float:
        try:
            both = torch.stack([score_at(run, steps), whole]).double()
        except UsageError:  # nothing is left in a window that the score looks at
            return -math.inf
        return float(torch.corrcoef(both)[0, 1].nan_to_num(-1.0))

    kept = frozenset(every)
    while len(kept) > readings:
        kept = max((kept - {step} for step in sorted(kept)), key=alike)
    while others := [kept - {old} | {new} for old in sorted(kept) for new in every if new not in kept]:
        best = max(others, key=alike)
        if alike(best) <= alike(kept):
            break
        kept = best
    if (agreement := alike(kept)) == -math.inf:
        raise UsageError(f"{run.default_score} cannot be read from {readings} readings; take more")
    # In the fewest digits that give the same number again: rounded up, a time would be read a step later.
    times = tuple(float(str(run.times[step, 0].cpu().numpy())) for step in sorted(kept))
    few, standard = run.read_at(sorted(kept)), None
    if run.standard is not None:
        name = run.standard.cond
        standard = standard_of(name, few.score(run.default_score), run.cond[name])
    score = replace(few, standard=standard).score()
    quantiles = score.quantile(torch.linspace(0, 1, LEVELS, device=score.device, dtype=score.dtype))
    return Schedule(times, Reference(run.default_score, read_with(times), quantiles, standard), agreement)


def score_at(run: Trajectory, steps: Iterable[int]) -> Tensor:  # (B,)
    """The score read at some of the steps, among samples of the same condition where the run's own is."""
    within = run.standard.cond if run.standard else None
    return run.read_at(sorted(steps)).score(run.default_score, within=within)
