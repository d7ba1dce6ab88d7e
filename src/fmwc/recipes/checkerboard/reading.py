"""Reading one trained field: every number the tables need, from 10⁴ samples of a fresh seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from fmwc.baselines import dispersion, stochastic_ends
from fmwc.confidence.heads import HEADS, fit_head
from fmwc.diagnostics.agreement import agreement
from fmwc.diagnostics.divergence import along
from fmwc.field import Field
from fmwc.metrics.points import misplaced, misplacement, symmetric_kl
from fmwc.metrics.ranking import auprc, retention
from fmwc.moments import CLOSURES
from fmwc.propagate import Diagonal, MonteCarlo
from fmwc.sampling import SCORES, Trajectory, sample

__all__ = ["TIMES", "WINDOWS", "decoders", "fidelity", "headline", "read_field", "scores_of"]

TIMES = (0.0, 0.2, 0.5, 0.8, 0.98)  # where the variance is held against Monte Carlo
WINDOWS = ((0.1, 0.9), (0.2, 0.8), (0.3, 0.7), (0.5, 0.7), (0.5, 0.5))  # (early, late) of the temporal ratio
PRINTED = 0.9  # the share kept in the headline


def scores_of(trajectory: Trajectory, bad: np.ndarray, names: Sequence[str] = tuple(SCORES)) -> dict[str, float]:
    """AUPRC of each score; the positive class is what is misplaced."""
    return {name: auprc(trajectory.score(name).cpu(), bad) for name in names}


def _accumulated(trajectory: Trajectory) -> Tensor:
    """√(Σ σ_t² Δt²): the endpoint's std if steps' errors were independent and the flow did not move them."""
    return (trajectory.std * trajectory.weights).square().sum(0).sqrt()


def heads_of(trajectory: Trajectory, bad: np.ndarray) -> dict[str, float]:
    """AUPRC of learned heads on the second half, fitted on the first."""
    half = len(bad) // 2
    known, fresh = (trajectory.take(torch.arange(a, b)) for a, b in ((0, half), (half, len(bad))))
    return {kind: auprc(fit_head(known, bad[:half], kind).score(fresh), bad[half:]) for kind in HEADS}


def decoders(field: Field, count: int, steps: int, seed: int) -> dict[str, float]:
    """Misplacement under each decoder (tab:sampling)."""
    return {
        name: misplacement(sample(field, count, steps=steps, seed=seed, confidence=False, decoder=name).x)
        for name in ("map", "stochastic", "mean5")
    }


def fidelity(field: Field, steps: int, seed: int, points: int = 500, draws: int = 1024) -> dict[str, dict[str, float]]:
    """Each estimator's variance against posterior draws, on states along trajectories, coordinate by coordinate.

    `ceiling` is what a second, independent set of as many draws reaches against the first, and `long` the same
    comparison with eight times the draws: how much of a disagreement is the reference's own noise.
    """
    states = sample(field, points, steps=steps, seed=seed, confidence=False, keep_states=True).states
    assert states is not None
    abreast = 64 if field.device.type == "cuda" else 8
    found: dict[str, dict[str, float]] = {}
    for time in TIMES:
        x, t = states[round(time * steps)], torch.full((points,), time, device=field.device)

        def var(propagation: Any, draw: int, x: Tensor = x, t: Tensor = t) -> np.ndarray:
            return field.moments(x, t, propagation, seed=seed + draw).var.double().cpu().numpy().ravel()

        sets = [var(MonteCarlo(draws, abreast), i) for i in range(8)]
        reference, long = sets[0], np.mean(sets, 0)
        row: dict[str, float] = {"ceiling_spearman": float(spearmanr(sets[1], reference)[0])}
        for name in ("linearised", "diagonal"):
            own = var(name, 0)
            row[f"{name}_ratio"] = float(np.median(own / reference))
            row[f"{name}_spearman"] = float(spearmanr(own, reference)[0])
            row[f"{name}_spearman_long"] = float(spearmanr(own, long)[0])
        found[str(time)] = row
    return found


def _transported(trajectory: Trajectory, ends: Tensor, bad: np.ndarray) -> dict[str, float]:
    """The transported dispersion against that of k stochastic trajectories."""
    own, reference = trajectory.score("dispersion").cpu(), dispersion(ends).cpu()
    found = {
        "ratio": float((own / reference).median()),
        "spearman": float(spearmanr(own, reference)[0]),
        "auprc": auprc(own, bad),
    }
    for k in (5, 10, 20, 40, 64):
        if k <= len(ends):
            found[f"auprc_k{k}"] = auprc(dispersion(ends[:k]).cpu(), bad)
    return found


def headline(field: Field, trajectory: Trajectory, plain: Tensor) -> dict[str, Any]:
    """What a user would ask first."""
    bad = misplaced(trajectory.x)
    own = scores_of(trajectory, bad)
    found: dict[str, Any] = {
        "misplacement": float(bad.mean()),
        "auprc": own,
        "kept_90": {"temporal_ratio": retention(trajectory.score("temporal_ratio").cpu(), bad).at(PRINTED)},
        "bit_for_bit": bool(torch.equal(trajectory.x, plain)),
    }
    if trajectory.transported is not None:
        own["dispersion"] = auprc(trajectory.score("dispersion").cpu(), bad)
        found["kept_90"]["dispersion"] = retention(trajectory.score("dispersion").cpu(), bad).at(PRINTED)
    return found


def read_field(
    field: Field,
    count: int = 10_000,
    steps: int = 50,
    seed: int = 0,
    trajectories: int = 5,
    pool: ThreadPoolExecutor | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every Checkerboard number of one field. Heads are fitted in the pool's threads meanwhile, if there is one.

    Arguments:
        field: The field.
        count, steps, seed: The run: samples, Euler steps, and a seed that nothing was chosen on.
        trajectories: Stochastic trajectories for the Monte Carlo dispersion.
    """
    say("linearised")
    plain = sample(field, count, steps=steps, seed=seed, confidence=False, keep_states=True)
    linear = sample(field, count, steps=steps, seed=seed, confidence="linearised", transport=True, schedule=1)
    diagonal = sample(field, count, steps=steps, seed=seed, confidence="diagonal", schedule=1)
    bad = misplaced(linear.x)
    fits: dict[str, Future[dict[str, float]]] = {}
    if pool:
        fits = {n: pool.submit(heads_of, t, bad) for n, t in (("linearised", linear), ("diagonal", diagonal))}
    found = headline(field, linear, plain.x)
    found["kl"] = symmetric_kl(linear.x)
    found["auprc"] = {"linearised": found["auprc"], "diagonal": scores_of(diagonal, bad)}
    for name, trajectory in (("linearised", linear), ("diagonal", diagonal)):
        found["auprc"][name]["accumulated"] = auprc(_accumulated(trajectory).cpu(), bad)
    found["windows"] = {
        f"{early}/{late}": {
            n: auprc(t.score("temporal_ratio", early=early, late=late).cpu(), bad)
            for n, t in (("linearised", linear), ("diagonal", diagonal))
        }
        for early, late in WINDOWS
    }
    every5 = sample(field, count, steps=steps, seed=seed, confidence="linearised", schedule=5)
    found["every_5th"] = auprc(every5.score("temporal_ratio").cpu(), bad)
    found["closures"] = {
        name: auprc(
            sample(field, count, steps=steps, seed=seed, confidence=Diagonal(c), schedule=1).score("endpoint").cpu(),
            bad,
        )
        for name, c in CLOSURES.items()
    }
    say("decoders")
    found["decoders"] = decoders(field, count, steps, seed)
    say(f"dispersion of {trajectories}")
    ends = stochastic_ends(field, linear.x0, trajectories, steps=steps, seed=seed)
    found["transported"] = _transported(linear, ends, bad)
    say("divergence and fidelity")
    assert plain.states is not None
    divergence = along(field, plain.states, plain.grid)
    for name, trajectory in (("linearised", linear), ("diagonal", diagonal)):
        found.setdefault("agreement", {})[name] = agreement(trajectory.var.sum(2), divergence)._asdict()
    found["fidelity"] = fidelity(field, steps, seed)
    for name, trajectory in (("linearised", linear), ("diagonal", diagonal)):
        fitted = fits[name].result() if pool else heads_of(trajectory, bad)
        found["auprc"][name].update(fitted)
    return found
