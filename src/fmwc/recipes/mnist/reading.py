"""Reading digits: every number the MNIST tables need, from 10⁴ of a fresh seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from fmwc.baselines import PosteriorTrace, StateSensitivity, dispersion, stochastic_ends
from fmwc.confidence.heads import HEADS, fit_head
from fmwc.data import mnist
from fmwc.diagnostics.agreement import agreement
from fmwc.diagnostics.divergence import along
from fmwc.field import Field
from fmwc.metrics.images import activations, failed, frechet
from fmwc.metrics.ranking import auprc, retention
from fmwc.propagate import Linearised, MonteCarlo
from fmwc.recipes.mnist.recipe import SCORE, WITHIN, batch_for, labels
from fmwc.sampling import SCORES, Trajectory, default_estimator, sample
from fmwc.sampling.scores import within_groups

__all__ = ["KEPT", "RIVALS", "STEPS", "TIMES", "Examiner", "lifts", "read_field"]

KEPT = 0.8  # the share kept in the headline
TIMES = (0.0, 0.2, 0.5, 0.8, 0.98)  # where the variance is held against Monte Carlo
STEPS = (5, 10, 20, 30, 50)  # of the sweep
WINDOWS = ((0.0, 0.3), (0.3, 0.7), (0.5, 0.8), (0.7, 1.0))  # of the integrated score
PROBES = 16  # where the variance itself is the question
STATES = 128  # images whose variance is held against draws, at each of TIMES
HUTCHINSON = 64  # probes of the divergence's reference
# Readings of a plain flow, and when they are read; the posterior's trace divides the network's error by t.
RIVALS: dict[str, tuple[Any, Any]] = {
    "state_sensitivity": (StateSensitivity(probes=2), 2),
    "posterior_trace": (PosteriorTrace(probes=2), tuple(0.1 + 0.04 * i for i in range(23))),
}
Say = Callable[[str], None]


def lifts(scores: Mapping[str, Tensor], y: Tensor, bad: np.ndarray) -> dict[str, dict[str, float]]:
    """AUPRC of each score, as read and standardised within the class asked for; the positive class is failure."""
    found = {}
    for name, score in scores.items():
        inside = within_groups(WITHIN, score, y).cpu()
        found[name] = {
            "auprc": auprc(score.cpu(), bad),
            "auprc_within": auprc(inside, bad),
            "kept": retention(score.cpu(), bad).at(KEPT),
            "kept_within": retention(inside, bad).at(KEPT),
        }
    return found


def retained(score: Tensor, bad: np.ndarray) -> dict[str, float]:
    """The failure rate among the surest digits, for shares kept from 1 % to all: a curve small enough to keep."""
    curve = retention(score.cpu(), bad)
    return {f"{share / 100:g}": curve.at(share / 100) for share in range(1, 101)}


def scores_of(trajectory: Trajectory) -> dict[str, Tensor]:
    """Every score a run can be read by."""
    return {name: trajectory.score(name) for name in SCORES}


@dataclass(frozen=True)
class Examiner:
    """Creates what reads digits: the judge, and the test split to compare with.

    Arguments:
        judge: The classifier.
        test: The test split.
        count, steps, seed: The run: digits, Euler steps, and a seed that nothing was chosen on.
        few: Digits where a reference is expensive (many draws, many probes).
    """

    judge: Any
    test: mnist.Images
    count: int = 10_000
    steps: int = 50
    seed: int = 0
    few: int = 500

    def draw(self, field: Any, count: int | None = None, **options: Any) -> Trajectory:
        """Digits of this seed, each class in turn; the first ones are the same however many are drawn."""
        device = next(self.judge.parameters()).device
        y = labels(count or self.count, self.judge.config["classes"]).to(device)
        options = {"steps": self.steps, "confidence": False, "batch": batch_for(device), "schedule": 1, **options}
        if options["confidence"] is True:  # also where the field's own score takes no variance
            options["confidence"] = default_estimator(field.space)
        if "x0" not in options:
            options["count"] = len(y)
        return sample(field, seed=self.seed, y=y, **options)

    def quality(self, trajectory: Trajectory) -> dict[str, float]:
        reference = activations(self.judge, mnist.unit(self.test.x))
        return {
            "fid": frechet(activations(self.judge, trajectory.x), reference),
            "failure": float(self.bad(trajectory).mean()),
        }

    def bad(self, trajectory: Trajectory) -> np.ndarray:
        return failed(self.judge, trajectory.x, trajectory.cond["y"])

    def sweep(self, field: Any, space: Any) -> dict[str, dict[str, float]]:
        """Quality against the number of uniform steps (fig:cross-app-adaptive, uniform part)."""
        return {str(n): self.quality(self.draw(field, steps=n, space=space)) for n in STEPS}


def heads_of(trajectory: Trajectory, bad: np.ndarray) -> dict[str, float]:
    """AUPRC of learned heads on the second half, fitted on the first, beside the label-free score on the same half."""
    half = len(bad) // 2
    known, fresh = (trajectory.take(torch.arange(a, b)) for a, b in ((0, half), (half, len(bad))))
    found = {k: auprc(fit_head(known, bad[:half], k, within=WITHIN).score(fresh), bad[half:]) for k in HEADS}
    label_free = auprc(fresh.score(SCORE, within=WITHIN).cpu(), bad[half:])
    return {**found, "label_free": label_free, "failure": float(bad[half:].mean())}


def fidelity(field: Field, examiner: Examiner, draws: int = 256) -> dict[str, dict[str, float]]:
    """Each estimator's total variance of an image against posterior draws, on states along trajectories."""
    run = examiner.draw(field, min(STATES, examiner.few), keep_states=True)
    assert run.states is not None
    found: dict[str, dict[str, float]] = {}
    for time in TIMES:
        x, t = run.states[round(time * examiner.steps)], torch.full((len(run),), time, device=field.device)

        def total(propagation: Any, draw: int, x: Tensor = x, t: Tensor = t) -> np.ndarray:
            var = field.moments(x, t, propagation, seed=examiner.seed + draw, **run.cond).var
            return var.flatten(1).mean(1).double().cpu().numpy()

        abreast = min(8, draws)
        reference, second = (total(MonteCarlo(draws, abreast), i) for i in range(2))
        row = {"ceiling_spearman": float(spearmanr(second, reference)[0])}
        for name, propagation in (("linearised", Linearised(PROBES)), ("diagonal", "diagonal")):
            own = total(propagation, 2)
            row[f"{name}_ratio"] = float(np.median(own / reference))
            row[f"{name}_spearman"] = float(spearmanr(own, reference)[0])
        found[str(time)] = row
    return found


def universality(field: Field, examiner: Examiner) -> dict[str, dict[str, float]]:
    """Variance against |∇·v|, by Hutchinson's estimator, at every second step (tab:universality)."""
    every = 2
    run = examiner.draw(field, examiner.few, keep_states=True)
    assert run.states is not None
    first = (examiner.steps - 1) % every  # as the schedule counts, from the last step
    read_at = [*range(first, examiner.steps, every), examiner.steps]
    states, grid = [run.states[i] for i in read_at], run.grid[read_at]
    divergence = along(field, states, grid, HUTCHINSON, seed=examiner.seed, **run.cond)
    found = {}
    for name, propagation in (("linearised", Linearised(PROBES)), ("diagonal", "diagonal")):
        options = {"x0": run.x0, "confidence": propagation, "schedule": every}
        read = examiner.draw(field, examiner.few, **options)
        found[name] = agreement(read.std.square(), divergence)._asdict()
    return found


def transported(field: Field, examiner: Examiner, projections: int, trajectories: int, few: int) -> dict[str, Any]:
    """Transported dispersion, of all pixels and of a few random projections, against that of k trajectories.

    Projections at random are an unbiased reading of all pixels' variance; the first of them alone are what a judge-free
    user with little time would take.
    """
    run = examiner.draw(field, few, transport=projections)
    bad = examiner.bad(run)
    assert run.transported is not None
    own, y = run.score("dispersion"), run.cond["y"]
    scores = {"pixels": own}
    for k in (1, 2, 4):
        if k < projections:
            part = replace(run.transported, var=run.transported.var[:, :k])
            scores[f"projections_{k}"] = replace(run, transported=part).score("dispersion")
    ends = stochastic_ends(
        field,
        run.x0,
        trajectories,
        steps=examiner.steps,
        seed=examiner.seed % 2**20,
        batch=batch_for(field.device),
        y=y,
    )
    scores |= {f"k{k}": dispersion(ends[:k]) for k in (5, 10, 20) if k <= trajectories}
    reference = scores[f"k{trajectories}"] if f"k{trajectories}" in scores else dispersion(ends)
    return {
        "samples": len(run),
        "projections": projections,
        "failure": float(bad.mean()),
        "ratio": float((own / reference).median()),
        "spearman": float(spearmanr(own.cpu(), reference.cpu())[0]),
        "scores": lifts(scores, y, bad),
    }


def read_field(
    field: Field,
    examiner: Examiner,
    *,
    projections: int = 8,
    trajectories: int = 5,
    few: int = 2_500,
    say: Say = lambda text: None,
) -> tuple[dict[str, Any], Trajectory]:
    """Every number of one field, and the run it was read from.

    Arguments:
        field: The field.
        examiner: Reads it.
        projections, trajectories, few: Of the transported dispersion and its reference.
    """
    say("linearised")
    plain = examiner.draw(field)
    run = examiner.draw(field, x0=plain.x0, confidence=True)
    bad, y = examiner.bad(run), run.cond["y"]
    found: dict[str, Any] = {**examiner.quality(run), "bit_for_bit": bool(torch.equal(run.x, plain.x))}
    found["linearised"] = lifts(scores_of(run), y, bad)
    windows = {f"{a}–{b}": run.score("integrated", early=a, late=b) for a, b in WINDOWS}
    found["windows"] = lifts(windows, y, bad)
    found["retention"] = {
        SCORE: retained(run.score(SCORE), bad),
        f"{SCORE}_within": retained(run.score(SCORE, within=WITHIN), bad),
    }
    say("learned heads")
    found["heads"] = heads_of(run, bad)
    say("diagonal")
    diagonal = examiner.draw(field, x0=plain.x0, confidence="diagonal", schedule=5, record="total")
    found["diagonal"] = lifts(scores_of(diagonal), y, bad)
    found["heads_diagonal"] = heads_of(diagonal, bad)
    say("every 5th step")
    found["every_5th"] = lifts(scores_of(_thinned(run, 5)), y, bad)
    say("against draws")
    found["fidelity"] = fidelity(field, examiner)
    say("against the divergence")
    found["agreement"] = universality(field, examiner)
    say(f"transported, against {trajectories} trajectories")
    found["transported"] = transported(field, examiner, projections, trajectories, few)
    return found, run


def _thinned(run: Trajectory, every: int) -> Trajectory:
    """The run as if its variance had been read at every k-th step, the last among them."""
    kept = torch.arange(len(run.times) - 1, -1, -every).flip(0)
    return replace(run, times=run.times[kept], mean=run.mean[kept], var=run.var[kept])
