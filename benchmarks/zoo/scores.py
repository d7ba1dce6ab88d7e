"""Scores of the samples of a trained flow: all scores of one run, which is judged by the failure rule of the flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import fmwc
from benchmarks.zoo.flows import Trained
from fmwc.calibration import POINTS
from fmwc.checks import Contest, Echo, Nearest, embedded, run_checks
from fmwc.randomness import derive
from fmwc.sampling import SamplingConfig, Trajectory
from fmwc.sampling.confidence import PROBES
from fmwc.sampling.config import is_small
from fmwc.sampling.trajectory import DISPERSION, SCORES
from fmwc.state import tree_map

COUNT, STEPS = 3_000, 50
NOISE_STEPS = 1_000  # steps of fit_noise
BATCH = {"cpu": 500, "cuda": 1_500}
BACKWARD = 2  # the cost of a backward pass, in evaluations
FREE = ("spread", "spread@0.3-0.8", "spread@0.6-1", "detour")


class Reading(NamedTuple):
    """Scores by name, `(B,)` each, high = doubtful, and their costs in evaluations per sample beyond plain sampling."""

    scores: dict[str, torch.Tensor]
    costs: dict[str, float]


def variance(trained: Trained, field: fmwc.Field, run: Trajectory) -> Reading:
    """Return the scores of the variance, and the transported dispersion if it was read."""
    few = is_small(trained.space)
    readings = len(run.times) * BACKWARD
    scores = {name: run.score(name) for name in SCORES}
    costs = dict.fromkeys(SCORES, float(readings * (run.x[0].numel() if few else PROBES)))
    if run.transported is not None:
        scores[DISPERSION] = run.score(DISPERSION)
        probes = run.transported.var.shape[1]
        costs[DISPERSION] = float((len(run.grid) - 1) * (1 + BACKWARD * probes))
    return Reading(scores, costs)


def free(trained: Trained, field: fmwc.Field, run: Trajectory) -> Reading:
    """Return the scores that need no further evaluation."""
    return Reading({name: run.score(name) for name in FREE}, dict.fromkeys(FREE, 0.0))


def checks(trained: Trained, field: fmwc.Field, run: Trajectory) -> Reading:
    """Return echo, contest and nearest training points, each alone."""
    found: dict[str, Any] = {"echo": Echo.planned(4), "echo, late": Echo((0.8, 0.85, 0.9, 0.95))}
    data = tree_map(lambda c: c[:POINTS], trained.data)
    labels = trained.cond.get("y")
    points = embedded(trained.space, data)
    found["nearest, any class" if labels is not None else "nearest"] = Nearest(points)
    if labels is not None:
        found["nearest"] = Nearest(points, labels[:POINTS].to(points.device), "y")
        found["contest"] = Contest.planned("y", labels.unique(), 20)
    scores, costs = {}, {}
    for name, check in found.items():
        read = run_checks({check.name: check}, trained.network, trained.space, run.x, run.cond, run.seed, 0)
        scores[name], costs[name] = read[check.name], float(check.evaluations)
    return Reading(scores, costs)


def default(trained: Trained, field: fmwc.Field, run: Trajectory) -> Reading:
    """Return the default scores: those chosen with the training data, and without data."""
    scores, costs = {}, {}
    for name, data in (("default", trained.data), ("default, no data", None)):
        coupled = trained.pairs is not None  # the loss on independent pairs has no meaning
        reference = fmwc.fit_confidence(
            field, data, cond=trained.cond, steps=STEPS, pilot=1_000, seed=run.seed, conventions=not coupled
        )
        repeated = fmwc.sample(
            field,
            x0=run.x0,
            steps=STEPS,
            seed=run.seed,
            cond=run.cond,
            config=SamplingConfig(batch=BATCH[run.grid.device.type]),
        )
        scores[name] = repeated.score()
        costs[name] = float(sum(check.evaluations for check in reference.checks.values()))
        CHOSEN[name] = f"{reference.score}{' (withheld)' if reference.withheld else ''}: {reference.reason}"
    return Reading(scores, costs)


CHOSEN: dict[str, str] = {}  # descriptions of the chosen scores
READERS: tuple[Callable[[Trained, fmwc.Field, Trajectory], Reading], ...] = (
    variance,
    free,
    checks,
    default,
)


def score(trained: Trained, seed: int, *, count: int = COUNT) -> dict[str, np.ndarray]:
    """Draw samples, judge them and read every score.

    Returns:
        `failed` (B,), `score.<name>` (B,) and `cost.<name>` () for every score, `note.<name>` () for the failure rule's
        numbers, and the share of training and held-out data that the rule fails.
    """
    device = next(trained.network.parameters()).device
    field = fmwc.attach(trained.network, space=trained.space).to(device)
    coupled = {"captured": True} if trained.pairs is None else _coupling(trained)
    fmwc.fit_noise(
        field,
        trained.data,
        NOISE_STEPS,
        batch=256,
        seed=derive(seed, "noise"),
        confidence=False,
        **coupled,
        cond=trained.cond,
    )
    cond = trained.conditions(count)
    run = fmwc.sample(
        field,
        count,
        steps=STEPS,
        seed=derive(seed, "zoo"),
        transport=is_small(trained.space),
        cond=cond,
        config=SamplingConfig(record="total", batch=BATCH[device.type]),
    )
    found: dict[str, Any] = {"failed": trained.failed(run.x, cond)}
    for read in READERS:
        scores, costs = read(trained, field, run)
        found |= {f"score.{name}": value for name, value in scores.items()}
        found |= {f"cost.{name}": value for name, value in costs.items()}
    found |= {f"note.{name}": value for name, value in _notes(trained).items()}
    arrays = {name: np.asarray(torch.as_tensor(value).detach().cpu()) for name, value in found.items()}
    return {**arrays, **{f"chosen.{name}": np.array(text) for name, text in CHOSEN.items()}}


def _coupling(trained: Trained) -> Mapping[str, Any]:
    """Return the options of fit_noise for the coupling of training."""
    return {"pairs": trained.pairs, "captured": False}


def _notes(trained: Trained) -> dict[str, float]:
    data = {"data": (trained.data, trained.cond), "held_out": (trained.held_out, trained.held_out_cond)}
    shares = {f"failed_{name}": float(trained.failed(*rows).float().mean()) for name, rows in data.items()}
    return {**shares, **trained.notes}
