"""Metrics shared by the experiments: scores, learned heads, and variances compared with posterior draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from fmwc.estimators import MonteCarlo
from fmwc.field import Field
from fmwc.metrics.divergence import divergence
from fmwc.metrics.ranking import auprc, ranking_text, too_few, wilson
from fmwc.sampling import SCORES, Trajectory
from fmwc.state import State, tree_map
from fmwc.uses.heads import HEADS, fit_head

RANKINGS = ("auprc", "heads", "own", "linearised", "thresholds", "baselines", "beyond")  # prefixes of ranking metrics
TIMES = (0.0, 0.2, 0.5, 0.8, 0.98)  # times at which the variance is compared with posterior draws


def spearman(a: Any, b: Any) -> float:
    """Return Spearman's rank correlation."""
    return float(spearmanr(a, b)[0])


def scores_of(run: Trajectory, names: Iterable[str] = SCORES) -> dict[str, Tensor]:
    """Return a run's scores by name."""
    return {name: run.score(name).cpu() for name in names}


def thinned(run: Trajectory, every: int) -> Trajectory:
    """Return the run with only every k-th reading of the variance, counted from the last."""
    kept = torch.arange(len(run.times) - 1, -1, -every).flip(0)
    mean, var = (tree_map(lambda rows: rows[kept], part) for part in (run.mean, run.var))
    return replace(run, times=run.times[kept], mean=mean, var=var)


def second_half(run: Trajectory) -> Trajectory:
    """Return the second half of a run, on which learned heads are evaluated."""
    return run.take(torch.arange(len(run) // 2, len(run)))


def evaluate_heads(
    run: Trajectory, bad: np.ndarray, measure: Callable[[Any, np.ndarray], Any] = auprc, *, within: str | None = None
) -> dict[str, Any]:
    """Fit each learned head on the first half of a run and measure it on the second."""
    half = len(bad) // 2
    known, fresh = run.take(torch.arange(half)), second_half(run)
    return {kind: measure(fit_head(known, bad[:half], kind, within=within).score(fresh), bad[half:]) for kind in HEADS}


def dispersion_agreement(transported: Tensor, reference: Tensor) -> dict[str, float]:
    """Compare the transported dispersion with that of stochastic trajectories."""
    transported, reference = transported.cpu(), reference.cpu()
    return {"ratio": float((transported / reference).median()), "spearman": spearman(transported, reference)}


def along(
    velocity: Callable[..., Any],
    states: Sequence[State],
    times: Tensor,
    probes: int | None = None,
    *,
    cond: Mapping[str, Any] | None = None,
    **options: Any,
) -> Tensor:  # -> (steps, B)
    """Return the divergence at every step of a trajectory with saved states.

    Arguments:
        velocity, probes, cond, options: As in :func:`divergence`.
        states: The states of the trajectory.
        times: The time grid.
    """
    rows = zip(states[:-1], times[:-1], strict=True)
    return torch.stack([divergence(velocity, x, t, probes, cond=cond, **options) for x, t in rows])


class Agreement(NamedTuple):
    """Correlations per step (mean and standard deviation over steps), and of sums along the trajectory."""

    pearson_step: float
    pearson_step_std: float
    spearman_step: float
    spearman_step_std: float
    pearson: float
    spearman: float


def agreement(var: Tensor, divergence: Tensor) -> Agreement:  # (R, B), (R, B)
    """Return the correlations of σ_t² with |∇·v_t| over samples (tab:universality)."""
    a, b = var.double().cpu().numpy(), divergence.double().abs().cpu().numpy()
    # Skip steps at which all samples have the same value, because their correlation is undefined.
    steps = [(x, y) for x, y in zip(a, b, strict=True) if np.ptp(x) > 0 and np.ptp(y) > 0]
    per_step = ([correlate(x, y)[0] for x, y in steps] for correlate in (pearsonr, spearmanr))
    summary = [float(f(values)) for values in per_step for f in (np.mean, np.std)]
    return Agreement(*summary, *(float(correlate(a.sum(0), b.sum(0))[0]) for correlate in (pearsonr, spearmanr)))


def fidelity(
    field: Field,
    run: Trajectory,
    estimators: Mapping[str, Any],
    *,
    draws: int,
    abreast: int,
    seed: int,
    read_seed: int,
    sets: int = 2,
    reduce: Callable[[Tensor], Tensor] = lambda var: var,
) -> dict[str, dict[str, float]]:
    """Compare each estimator's variance with that of posterior draws, at states along trajectories.

    `ceiling` compares the second set of draws with the first. With more than two sets, `long` compares with the mean
    over all sets, which shows how much disagreement is due to noise in the reference.

    Arguments:
        run: Trajectories with their states.
        draws, sets: Posterior draws per set, and number of independent sets.
        reduce: Reduces the variance to the values to compare.
    """
    assert run.states is not None
    rows: dict[str, dict[str, float]] = {}
    for time in TIMES:
        x = run.states[round(time * (len(run.grid) - 1))]
        t = torch.full((len(run),), time, device=field.device)

        def variance(estimator: Any, offset: int, x: Any = x, t: Tensor = t) -> np.ndarray:
            var: Any = field.moments(x, t, estimator, seed=offset, cond=run.cond).var
            return reduce(var).double().cpu().numpy().ravel()

        references = [variance(MonteCarlo(draws, abreast), seed + i) for i in range(sets)]
        row = {"ceiling_spearman": spearman(references[1], references[0])}
        for name, estimator in estimators.items():
            var = variance(estimator, read_seed)
            row[f"{name}_ratio"] = float(np.median(var / references[0]))
            row[f"{name}_spearman"] = spearman(var, references[0])
            if sets > 2:
                row[f"{name}_spearman_long"] = spearman(var, np.mean(references, 0))
        rows[str(time)] = row
    return rows


def with_intervals(numbers: dict[str, Any], positive: np.ndarray, what: str, score: Any) -> dict[str, Any]:
    """Return headline numbers with sample counts and intervals, without rankings of too few samples.

    Arguments:
        numbers: The numbers by name.
        positive: Whether each sample is positive.
        what: The word for positive samples.
        score: The ranking score, high for positive samples.
    """
    count = int(positive.sum())
    counts = {f"{what}_samples": count, f"{what}_share_90%_interval": [*wilson(count, len(positive))]}
    if reason := too_few(positive, what):
        return {**counts, **{k: reason if k.startswith(RANKINGS) else v for k, v in numbers.items()}}
    return {**counts, "auprc_with_90%_interval": ranking_text(score, positive, what), **numbers}
