"""Scores of a trained flow's samples: one run, read by every score, and judged by the flow's failure rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.zoo.flows import Trained

import fmwc
from fmwc.randomness import derive
from fmwc.sampling import PROBES, Trajectory
from fmwc.sampling.adaptive import FEW, numbers
from fmwc.sampling.scores import SCORES
from fmwc.sampling.trajectory import DISPERSION

__all__ = ["BACKWARD", "Reading", "score", "variance"]

COUNT, STEPS = 4_000, 50
NOISE_STEPS = 1_000  # of fit_noise
BATCH = {"cpu": 500, "cuda": 2_000}
BACKWARD = 2  # evaluations that one backward pass counts as
TRANSPORTED = 64  # numbers of a state, at most, whose dispersion is read on a CPU


class Reading(NamedTuple):
    """Scores by name, high = doubtful, `(B,)` each, and what each costs beyond plain sampling, in evaluations per
    sample."""

    scores: dict[str, torch.Tensor]
    costs: dict[str, float]


def variance(trained: Trained, field: fmwc.Field, run: Trajectory) -> Reading:
    """The scores of the variance along the run, and the transported dispersion where it was read."""
    few = numbers(trained.space) <= FEW
    readings = len(run.times) * BACKWARD
    scores = {name: run.score(name) for name in SCORES}
    costs = dict.fromkeys(SCORES, float(readings * (numbers(trained.space) if few else PROBES)))
    if run.transported is not None:
        scores[DISPERSION] = run.score(DISPERSION)
        probes = run.transported.var.shape[1]
        costs[DISPERSION] = float((len(run.grid) - 1) * (1 + BACKWARD * probes))
    return Reading(scores, costs)


READERS: tuple[Callable[[Trained, fmwc.Field, Trajectory], Reading], ...] = (variance,)


def score(trained: Trained, seed: int, *, count: int = COUNT) -> dict[str, np.ndarray]:
    """Draw samples, judge them and read every score.

    Returns:
        `failed` (B,), `score.<name>` (B,) and `cost.<name>` () for every score, `note.<name>` () for the failure rule's
        numbers, and the share of training and held-out data that the rule fails.
    """
    device = next(trained.network.parameters()).device
    field = fmwc.attach(trained.network, space=trained.space).to(device)
    coupled = {} if trained.pairs is None else _coupling(trained)
    fmwc.fit_noise(field, trained.data, NOISE_STEPS, batch=256, seed=derive(seed, "noise"), **coupled, **trained.cond)
    cond = trained.conditions(count)
    run = fmwc.sample(
        field,
        count,
        steps=STEPS,
        seed=derive(seed, "zoo"),
        transport=device.type == "cuda" or numbers(trained.space) <= TRANSPORTED,
        record="total",
        keep_states=True,
        batch=BATCH[device.type],
        **cond,
    )
    found: dict[str, Any] = {"failed": trained.failed(run.x, cond)}
    for read in READERS:
        scores, costs = read(trained, field, run)
        found |= {f"score.{name}": value for name, value in scores.items()}
        found |= {f"cost.{name}": value for name, value in costs.items()}
    found |= {f"note.{name}": value for name, value in _notes(trained).items()}
    return {name: np.asarray(torch.as_tensor(value).detach().cpu()) for name, value in found.items()}


def _coupling(trained: Trained) -> Mapping[str, Any]:
    """The coupling of training for fit_noise, once the library takes it."""
    import inspect

    return {"pairs": trained.pairs} if "pairs" in inspect.signature(fmwc.fit_noise).parameters else {}


def _notes(trained: Trained) -> dict[str, float]:
    data = {"data": (trained.data, trained.cond), "held_out": (trained.held_out, trained.held_out_cond)}
    shares = {f"failed_{name}": float(trained.failed(*rows).float().mean()) for name, rows in data.items()}
    return {**shares, **trained.notes}
