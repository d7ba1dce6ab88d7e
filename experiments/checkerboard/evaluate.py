"""Compute the numbers of the Checkerboard tables, from 10⁴ samples of a new seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.common.comparisons import PosteriorTrace, StateSensitivity
from experiments.common.evaluation import agreement, along, dispersion_agreement, evaluate_heads, fidelity, scores_of
from fmwc import checkerboard
from fmwc.baselines import dispersion, stochastic_ends
from fmwc.checkerboard.data import misplaced, misplacement
from fmwc.estimators import Diagonal, Linearised
from fmwc.field import Field
from fmwc.metrics.ranking import auprc, retention
from fmwc.moments import CLOSURES
from fmwc.sampling import SCORES, SamplingConfig, Schedule, Trajectory, sample

WINDOWS = ((0.1, 0.9), (0.2, 0.8), (0.3, 0.7), (0.5, 0.7), (0.5, 0.5))  # (early, late) of the temporal ratio
FLOOR = 1e-3  # minimum density, because the target is zero between the cells
KEPT = 0.9  # share of samples kept in the headline numbers
POINTS, DRAWS = 500, 1024  # states at which the variance is compared with posterior draws, and draws per set
# Estimators for a plain flow, and their schedules. The posterior trace divides network errors by t, so it starts at
# t = 0.1.
RIVALS: dict[str, tuple[Any, Any]] = {
    "state_sensitivity": (StateSensitivity(), Schedule.every(1)),
    "posterior_trace": (PosteriorTrace(), Schedule.at(tuple(0.1 + 0.02 * i for i in range(45)))),
}


def kernel_density(x: Tensor, at: Tensor) -> Tensor:  # (B, D), (N, D) -> (N,)
    """Return a Gaussian kernel density estimate with the samples' covariance, scaled by Silverman's rule."""
    count, dim = x.shape
    factor = (count * (dim + 2) / 4) ** (-1 / (dim + 4))
    root = torch.linalg.cholesky(torch.cov(x.T)) * factor
    white, query = (torch.linalg.solve_triangular(root, v.T, upper=False).T for v in (x, at))
    norm = (2 * math.pi) ** (dim / 2) * root.diagonal().prod() * count
    return torch.cat([(torch.cdist(q, white).square() / -2).exp().sum(1) for q in query.split(1000)]) / norm


def symmetric_kl(x: Tensor, cells: int = 200) -> float:
    """Return ½ (KL(p‖q) + KL(q‖p)) between the target p and a kernel density q of the samples.

    The KL is evaluated on a `cells`² grid over the board, with both densities floored at 1e-3 and normalised. The paper
    does not say how it treats zeros of the target, so compare values only between runs of this library.
    """
    centres = (torch.arange(cells, device=x.device) + 0.5) / cells * 2 * checkerboard.HALF - checkerboard.HALF
    grid = torch.cartesian_prod(centres, centres)
    densities = (checkerboard.density(grid), kernel_density(x, grid))
    p, q = (d.clamp_min(FLOOR) / d.clamp_min(FLOOR).sum() for d in densities)
    return float(((p - q) * (p / q).log()).sum() / 2)


def auprcs(run: Trajectory, bad: np.ndarray, names: Iterable[str] = SCORES) -> dict[str, float]:
    """Return the AUPRC of each score; the positive class is "misplaced"."""
    return {name: auprc(score, bad) for name, score in scores_of(run, names).items()}


def decoders(field: Field, count: int, steps: int, seed: int) -> dict[str, float]:
    """Return the misplacement of each decoder (tab:sampling)."""
    return {
        name: misplacement(
            sample(field, count, steps=steps, seed=seed, confidence=None, config=SamplingConfig(decoder=name)).x
        )
        for name in ("map", "stochastic", "mean5")
    }


def main_numbers(run: Trajectory, plain: Tensor) -> dict[str, Any]:
    """Return the headline numbers.

    Arguments:
        plain: The same samples, drawn without confidence.
    """
    bad = misplaced(run.x)
    transported = ["dispersion"] if run.transported is not None else []
    return {
        "misplacement": float(bad.mean()),
        "auprc": auprcs(run, bad, [*SCORES, *transported]),
        "kept_90": {n: retention(run.score(n).cpu(), bad).at(KEPT) for n in ("temporal_ratio", *transported)},
        "bit_for_bit": bool(torch.equal(run.x, plain)),
    }


def _accumulated(run: Trajectory) -> Tensor:
    """Return √(Σ σ_t² Δt²), the endpoint std if step errors were independent and not transported by the flow."""
    return (run.std * run.weights).square().sum(0).sqrt()


def _transported(run: Trajectory, ends: Tensor, bad: np.ndarray) -> dict[str, float]:
    """Compare the transported dispersion with that of k stochastic trajectories."""
    score = run.score("dispersion")
    numbers = {**dispersion_agreement(score, dispersion(ends)), "auprc": auprc(score.cpu(), bad)}
    ks = (k for k in (5, 10, 20, 40, 64) if k <= len(ends))
    return numbers | {f"auprc_k{k}": auprc(dispersion(ends[:k]).cpu(), bad) for k in ks}


def evaluate_field(
    field: Field,
    count: int = 10_000,
    steps: int = 50,
    seed: int = 0,
    trajectories: int = 5,
    pool: ThreadPoolExecutor | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Compute every Checkerboard number of one field.

    Arguments:
        field: The field.
        count, steps: Samples and Euler steps.
        seed: Seed of the samples; no option may have been tuned on it.
        trajectories: Stochastic trajectories for the Monte Carlo dispersion.
        pool: Threads for fitting learned heads in the background.
    """

    def draw(**options: Any) -> Trajectory:
        return sample(field, count, steps=steps, seed=seed, **{"schedule": Schedule.every(1), **options})

    say("linearised")
    plain = draw(confidence=None, config=SamplingConfig(keep_states=True))
    linear = draw(confidence=Linearised(), transport=True)
    runs = {"linearised": linear, "diagonal": draw(confidence=Diagonal())}
    bad = misplaced(linear.x)
    heads: dict[str, Future[dict[str, Any]]] = {}
    if pool:
        heads = {name: pool.submit(evaluate_heads, run, bad) for name, run in runs.items()}
    numbers = {**main_numbers(linear, plain.x), "kl": symmetric_kl(linear.x)}
    numbers["auprc"] = {"linearised": numbers["auprc"], "diagonal": auprcs(runs["diagonal"], bad)}
    for name, run in runs.items():
        numbers["auprc"][name]["accumulated"] = auprc(_accumulated(run).cpu(), bad)
    numbers["windows"] = {
        f"{early}/{late}": {
            name: auprc(run.score("temporal_ratio", early=early, late=late).cpu(), bad) for name, run in runs.items()
        }
        for early, late in WINDOWS
    }
    every_5th = draw(confidence=Linearised(), schedule=Schedule.every(5))
    numbers["every_5th"] = auprc(every_5th.score("temporal_ratio").cpu(), bad)
    numbers["closures"] = {
        name: auprc(draw(confidence=Diagonal(closure)).score("endpoint").cpu(), bad)
        for name, closure in CLOSURES.items()
    }
    say("decoders")
    numbers["decoders"] = decoders(field, count, steps, seed)
    say(f"dispersion of {trajectories}")
    ends = stochastic_ends(field, linear.x0, trajectories, steps=steps, seed=seed)
    numbers["transported"] = _transported(linear, ends, bad)
    say("divergence and fidelity")
    assert plain.states is not None
    divergence = along(field, plain.states, plain.grid)
    numbers["agreement"] = {name: agreement(run.var.sum(2), divergence)._asdict() for name, run in runs.items()}
    numbers["fidelity"] = fidelity(
        field,
        sample(field, POINTS, steps=steps, seed=seed, confidence=None, config=SamplingConfig(keep_states=True)),
        {"linearised": "linearised", "diagonal": "diagonal"},
        draws=DRAWS,
        abreast=64 if field.device.type == "cuda" else 8,
        seed=seed,
        read_seed=seed,
        sets=8,
    )
    for name, run in runs.items():
        numbers["auprc"][name] |= heads[name].result() if pool else evaluate_heads(run, bad)
    return numbers
