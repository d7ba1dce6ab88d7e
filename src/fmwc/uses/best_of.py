"""Best of n: draw several candidates per sample, and keep the surest.

All candidates of a sample share its condition, so the proportions of the conditions do not change. Evaluations count
network calls for velocities and for checks of finished samples. They do not include the cost of reading the variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmwc.checks import choose_check
from fmwc.errors import ShapeError, UsageError
from fmwc.flow import as_space
from fmwc.randomness import derive
from fmwc.sampling import STEPPERS, SamplingConfig, Trajectory, sample, standard_of
from fmwc.sampling.config import cost_of
from fmwc.sampling.trajectory import join, require_varied
from fmwc.state import as_conditions, as_whole

__all__ = [
    "MOST",
    "Score",
    "Selection",
    "best_of",
    "candidate_seed",
    "candidates_within",
    "checks_of",
    "evaluations_per_candidate",
    "evaluations_per_step",
    "ranked_by_check",
    "read_score",
    "require_evidence",
    "surest_of",
]

MOST = 1_000  # candidates per sample

Score = (
    str | Callable[[Trajectory], Any] | None
)  # a name, a function of a trajectory, or None for the run's default score


class Selection(NamedTuple):
    """The result of :func:`best_of`.

    Attributes:
        run: The kept samples, with their readings.
        evaluations: Network evaluations over all samples and candidates, including those of checks.
        branch: The index of the kept candidate, `(B,)`.
    """

    run: Trajectory
    evaluations: int
    branch: Tensor


def best_of(
    field: Any,
    count: int,
    n: int = 0,
    *,
    budget: int = 0,
    score: Score = None,
    seed: int = 0,
    cond: Mapping[str, Any] | None = None,
    **options: Any,
) -> Selection:
    """Draw `count` samples, each the surest of n candidates.

    The first candidates are the samples of `sample(field, count, seed=seed)`. A candidate does not depend on other
    candidates or on the batch.

    Arguments:
        field: A field, or a plain network if `check` is given (`check=20`).
        count: The number of samples to keep.
        n: The number of candidates per sample.
        budget: The maximum number of evaluations per sample, instead of n.
        score: The name of the score to compare, or a function of a trajectory (`head.score`). The default is the
            run's default score, or its check if it has no score (`confidence=None`).
        seed: Seeds the candidates.
        cond: The conditions, by name. All candidates of a sample use the same row.
        options: Those of :func:`fmwc.sample`.
    """
    if bool(n) == bool(budget):
        raise UsageError("give either n, the number of candidates, or budget, the evaluations per sample")
    config = options.get("config") or SamplingConfig()
    for name, is_set in (("x0", "x0" in options), ("first", config.first)):
        if is_set:
            raise UsageError(f"candidates are drawn from different noise; leave out {name}")
    if score is None and options.get("check", True) is True:
        require_evidence(field)
    lists = (list, tuple, np.ndarray)
    options["cond"] = {k: torch.as_tensor(v) if isinstance(v, lists) else v for k, v in as_conditions(cond).items()}
    n = as_whole(n, "n", 1, MOST) if n else candidates_within(budget, evaluations_per_candidate(field, options))
    runs = (sample(field, count, seed=candidate_seed(seed, j), **options) for j in range(n))
    if score is None:
        runs = (ranked_by_check(run, options.get("check", True)) for run in runs)
    run, branch = surest_of(runs, score)
    spent_on_checks = sum(c.evaluations for name, c in checks_of(field, options).items() if name in run.evidence)
    return Selection(run, n * (run.evaluations + spent_on_checks) * len(run), branch)


def require_evidence(field: Any) -> None:
    """Raise an error if the field's confidence is withheld, because its default score cannot rank candidates."""
    if withheld := getattr(getattr(field, "reference", None), "withheld", ""):
        raise UsageError(f"{withheld}; best of n needs another score: give score= or check= (--score, --check)")


def ranked_by_check(run: Trajectory, check: Any) -> Trajectory:
    """Return the run, ranked by its check if it has no score.

    Arguments:
        run: A run.
        check: The `check` option of :func:`fmwc.sample` with which the run was drawn.
    """
    try:
        run.score()
    except UsageError:
        names = (getattr(check, "name", ""), "contest", "echo")  # a check given as a number is a contest or an echo
        read = next((name for name in names if name in run.evidence), "")
        if read and not isinstance(check, bool):  # a bool selects no particular check
            return run.ranked_by(read)
    return run


def candidate_seed(seed: int, number: int) -> int:
    """Return the seed of a candidate. The first candidate uses `seed` itself."""
    return derive(seed, "candidate", number) if number else seed


def surest_of(runs: Iterable[Trajectory], score: Score = None) -> tuple[Trajectory, Tensor]:
    """Return the surest candidate of each sample, and its index. Only two runs are in memory at a time.

    Arguments:
        runs: One run per candidate, all with the same conditions.
        score: As in :func:`best_of`. Raw scores are compared, because candidates share their condition.
    """
    best: Trajectory | None = None
    doubts = []
    for number, run in enumerate(runs):
        doubt = read_score(run, score)
        doubts.append(doubt)
        if best is None:
            best, least = run, doubt
            branch = torch.zeros(len(run), dtype=torch.long, device=doubt.device)
            continue
        better = doubt < least  # ties keep the first candidate
        rows = torch.arange(len(run), device=doubt.device) + better * len(run)
        best = replace(join([best, run]).take(rows), ranks=None)
        least = torch.where(better, doubt, least)
        branch = torch.where(better, number, branch)
    if best is None:
        raise UsageError("runs must contain at least 1 candidate, got none")
    if len(doubts) > 1:
        require_varied(torch.cat(doubts), "this score" if callable(score) else score or best.default_score)
    if best.standard is not None and best.standard.source == "run":
        name = best.standard.cond
        best = replace(best, standard=standard_of(name, read_score(best), best.cond[name]))
    return best, branch


def read_score(run: Trajectory, score: Score = None) -> Tensor:  # (B,)
    """Return one score per sample, by default the run's default score, without standardisation by condition."""
    if not callable(score):
        return run.score(score or run.default_score)
    values = torch.as_tensor(score(run), device=run.grid.device)
    if values.shape != (len(run),):
        raise ShapeError(f"a score must return one number per sample ({len(run)}), got shape {tuple(values.shape)}")
    return values


# ---- evaluations -------------------------------------------------------------------------------------------------


def candidates_within(budget: int, each: int) -> int:
    """Return the number of candidates per sample, at `each` evaluations, that fit in a budget."""
    budget = as_whole(budget, "budget", 1, 10**7)
    if budget < each:
        raise UsageError(
            f"one candidate needs {each} evaluations, more than the budget of {budget}; give at least {each}"
        )
    return min(budget // each, MOST)


def evaluations_per_candidate(field: Any, options: dict[str, Any]) -> int:
    """Return the evaluations of one candidate: its trajectory and its checks."""
    spent_on_checks = sum(check.evaluations for check in checks_of(field, options).values())
    config = options.get("config") or SamplingConfig()
    if config.evaluations is not None:
        return config.evaluations + spent_on_checks
    controller, _ = config.with_steps(options.get("steps")).plan()
    return controller.steps * evaluations_per_step(config) + spent_on_checks


def evaluations_per_step(config: SamplingConfig | None) -> int:
    """Return the evaluations of the network per step."""
    config = config or SamplingConfig()
    return STEPPERS[config.stepper].evaluations * cost_of(config.decoder)


def checks_of(field: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the checks of a run with these options, by name."""
    check, reference = options.get("check", True), getattr(field, "reference", None)
    if check is False or check is None or (check is True and options.get("confidence", True) is None):
        return {}
    if check is True:
        return dict(reference.checks) if reference else {}
    if isinstance(check, int):
        config = options.get("config")
        space: Any = config.space if config is not None and config.space is not None else field.space
        check = choose_check(as_space(space), options.get("cond") or {}, check, getattr(reference, "checks", {}))
    return {check.name: check}
