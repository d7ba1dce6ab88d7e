"""Best of n: several candidates per sample, of which the surest is kept.

Candidates of a sample share its condition, so that what is asked for is drawn as often as before. Evaluations are those
of the network for velocities and for checks of finished samples. What reading the variance costs comes on top, as it
does for every sample that has a score.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmwc.checks import suited
from fmwc.errors import ShapeError, UsageError, pick
from fmwc.field import Schedule
from fmwc.flow import as_space
from fmwc.randomness import derive
from fmwc.sampling import STEPPERS, Trajectory, sample, standard_of
from fmwc.sampling.decoders import cost_of
from fmwc.sampling.sampler import join
from fmwc.sampling.scores import require_varied
from fmwc.state import as_whole

__all__ = [
    "MOST",
    "Best",
    "Score",
    "best_of",
    "by_check",
    "candidate_seed",
    "checks_of",
    "cost",
    "fitting",
    "price",
    "surest_of",
]

MOST = 1_000  # candidates per sample

Score = str | Callable[[Trajectory], Any] | None  # by name, a function such as a head's, or the run's own


class Best(NamedTuple):
    """What best of n gives.

    Attributes:
        run: The samples kept, with their readings.
        evaluations: Evaluations of the network over all samples and candidates, those of checks included.
        branch: Which candidate each sample is, `(B,)`: 0 is the one that a run without candidates draws.
    """

    run: Trajectory
    evaluations: int
    branch: Tensor


def best_of(
    field: Any, count: int, n: int = 0, *, budget: int = 0, score: Score = None, seed: int = 0, **options: Any
) -> Best:
    """Draw `count` samples, each the surest of n candidates.

    The first candidates are the samples of `sample(field, count, seed=seed)`. A candidate does not depend on the others
    or on the batch.

    Arguments:
        field: A field, or a network with a check (`check=20`).
        count: The number of samples to keep.
        n: The number of candidates per sample.
        budget: In place of n: the evaluations per sample, at most.
        score: By which the surest is chosen: a name, a function of a trajectory (`head.score`), or the run's own. A run
            that has none (`confidence=False`) is ranked by the check that it was given.
        seed: Seeds the candidates.
        options: Those of :func:`fmwc.sample`. A condition with one row per sample is given to all of its candidates.
    """
    if bool(n) == bool(budget):
        raise UsageError("give the number of candidates, n, or a budget of evaluations per sample")
    for name in ("x0", "first", "parts"):
        if name in options:
            raise UsageError(f"candidates have noise of their own; leave out {name}")
    options = _as_tensors(options)
    n = as_whole(n, "n", 1, MOST) if n else fitting(budget, cost(field, options))
    drawn = (sample(field, count, seed=candidate_seed(seed, j), **options) for j in range(n))
    runs = (by_check(run, options.get("check", True)) if score is None else run for run in drawn)
    run, branch = surest_of(runs, score)
    checked = sum(own.evaluations for name, own in checks_of(field, options).items() if name in run.evidence)
    return Best(run, n * (run.evaluations + checked) * len(run), branch)


def by_check(run: Trajectory, check: Any) -> Trajectory:
    """Return a run ranked by the check that was asked for, if it has no score of its own; else the run as it is.

    Arguments:
        run: A run.
        check: The option of :func:`fmwc.sample` that it was drawn with.
    """
    try:
        run.score()
    except UsageError:
        names = (getattr(check, "name", ""), "contest", "echo")  # a number of evaluations is one of these two
        given = next((name for name in names if name in run.evidence), "")
        if given and not isinstance(check, bool):  # which names no check
            return run.ranked_by(given)
    return run


def _as_tensors(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a run, with conditions that are lists as the tensors that they are drawn with."""
    own = inspect.signature(sample).parameters  # others are conditions
    lists = {k: v for k, v in options.items() if k not in own and isinstance(v, (list, tuple, np.ndarray))}
    return options | {k: torch.as_tensor(v) for k, v in lists.items()}


def candidate_seed(seed: int, number: int) -> int:
    """Return the seed of a candidate: the first has the run's own."""
    return derive(seed, "candidate", number) if number else seed


def surest_of(runs: Iterable[Trajectory], score: Score = None) -> tuple[Trajectory, Tensor]:
    """Return the surest candidate of each sample and its number. Two of the runs are held at a time.

    Arguments:
        runs: The candidates, one run after another, with the same conditions.
        score: As :func:`best_of` takes it. Scores are compared as they were read: candidates share their condition.
    """
    best: Trajectory | None = None
    doubts = []
    for number, run in enumerate(runs):
        doubt = read(run, score)
        doubts.append(doubt)
        if best is None:
            best, least = run, doubt
            branch = torch.zeros(len(run), dtype=torch.long, device=doubt.device)
            continue
        better = doubt < least  # of equal ones the first is kept
        rows = torch.arange(len(run), device=doubt.device) + better * len(run)
        best = replace(join([best, run]).take(rows), ranks=None)
        least = torch.where(better, doubt, least)
        branch = torch.where(better, number, branch)
    if best is None:
        raise UsageError("the best is chosen of at least 1 candidate, got none")
    if len(doubts) > 1:
        require_varied(torch.cat(doubts), "this score" if callable(score) else score or best.default_score)
    if best.standard is not None and best.standard.source == "run":
        name = best.standard.cond
        best = replace(best, standard=standard_of(name, read(best, best.default_score), best.cond[name]))
    return best, branch


def read(run: Trajectory, score: Score) -> Tensor:  # (B,)
    """Return a score of each sample; the run's own as it was read, before conditions are made comparable."""
    if not callable(score):
        return run.score(score or run.default_score)
    found = torch.as_tensor(score(run), device=run.grid.device)
    if found.shape != (len(run),):
        raise ShapeError(f"a score is one number per sample ({len(run)}), got shape {tuple(found.shape)}")
    return found


# ---- evaluations -------------------------------------------------------------------------------------------------


def fitting(budget: int, each: int) -> int:
    """Return how many candidates fit into a budget of evaluations per sample."""
    budget = as_whole(budget, "budget", 1, 10**7)
    if budget < each:
        raise UsageError(
            f"one candidate takes {each} evaluations, more than the budget of {budget}; give {each} or more"
        )
    return min(budget // each, MOST)


def cost(field: Any, options: dict[str, Any]) -> int:
    """Return the evaluations of one candidate: the velocities of its trajectory and the checks at its end."""
    checked = sum(own.evaluations for own in checks_of(field, options).values())
    if options.get("evaluations") is not None:
        return int(options["evaluations"]) + checked
    if options.get("times") is not None:
        steps = len(options["times"]) - 1
    else:
        steps = options["controller"].steps if options.get("controller") else options.get("steps") or 50
    return steps * price(options) + checked


def price(options: dict[str, Any]) -> int:
    """Return the evaluations of the network per step."""
    stages = pick(STEPPERS, options.get("stepper", "euler"), "stepper").evaluations
    return stages * cost_of(options.get("decoder", "map"))


def checks_of(field: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the checks that a run with these options ends with, by name."""
    check, reference = options.get("check", True), getattr(field, "reference", None)
    if check is False or check is None:
        return {}
    if check is True:
        schedule = options.get("schedule")
        schedule = getattr(field, "schedule", None) if schedule == "adaptive" else schedule
        reference = schedule.reference if isinstance(schedule, Schedule) else reference
        return dict(reference.checks) if reference is not None and options.get("confidence", True) is not False else {}
    if isinstance(check, int):
        space: Any = options.get("space") if options.get("space") is not None else field.space
        check = suited(as_space(space), options, check, getattr(reference, "checks", {}))
    return {check.name: check}
