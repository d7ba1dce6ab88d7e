"""Compute the numbers of the MNIST tables, from 10⁴ digits of a new seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.common.comparisons import PosteriorTrace, StateSensitivity
from experiments.common.evaluation import (
    agreement,
    along,
    dispersion_agreement,
    evaluate_heads,
    fidelity,
    scores_of,
    second_half,
    thinned,
)
from fmwc.baselines import dispersion, stochastic_ends
from fmwc.errors import UsageError
from fmwc.estimators import Diagonal, Linearised
from fmwc.field import Field
from fmwc.metrics.ranking import auprc, retention
from fmwc.mnist import data as mnist
from fmwc.mnist.classifier import activations, failed
from fmwc.mnist.recipe import SCORE, WITHIN, batch_for, labels
from fmwc.sampling import AsReference, SamplingConfig, Schedule, Trajectory, default_estimator, sample
from fmwc.sampling.trajectory import within_groups

KEPT = 0.8  # share of digits kept in the headline numbers
STEPS = (5, 10, 20, 30, 50)  # numbers of steps in the sweep
WINDOWS = ((0.0, 0.3), (0.3, 0.7), (0.5, 0.8), (0.7, 1.0))  # windows of the integrated score
PROBES = 16  # probes of the linearised variance in comparisons of the variance
STATES, DRAWS = 128, 256  # images per time, and posterior draws, for comparisons of the variance
HUTCHINSON = 64  # probes of the reference divergence
EVERY = 2  # the divergence is computed at every second step
# Estimators for a plain flow, and their schedules. The posterior trace divides network errors by t.
RIVALS: dict[str, tuple[Any, Any]] = {
    "state_sensitivity": (StateSensitivity(probes=2), Schedule.every(2)),
    "posterior_trace": (PosteriorTrace(probes=2), Schedule.at(tuple(0.1 + 0.04 * i for i in range(23)))),
}


def frechet(a: np.ndarray, b: np.ndarray) -> float:  # (N, F), (M, F)
    r"""Return the Fréchet distance between Gaussians fitted to two sets of activations (FID).

    .. math:: \| μ_a - μ_b \|^2 + \mathrm{tr}(Σ_a + Σ_b - 2 (Σ_a Σ_b)^{1/2})

    The trace of the square root is the sum of the square roots of the eigenvalues of the symmetric matrix
    Σ_a^{1/2} Σ_b Σ_a^{1/2}, which avoids complex numbers.
    """
    if min(len(a), len(b)) < 2:
        raise UsageError("a Fréchet distance needs at least 2 images in each set")
    shift = a.mean(0) - b.mean(0)
    first, second = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ second @ root).clip(0)
    return float(shift @ shift + np.trace(first) + np.trace(second) - 2 * np.sqrt(inner).sum())


def lifts(scores: Mapping[str, Tensor], y: Tensor, bad: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the AUPRC of each score for failures, with and without standardisation within classes."""
    numbers = {}
    for name, score in scores.items():
        inside = within_groups(WITHIN, score, y.to(score.device)).cpu()
        numbers[name] = {
            "auprc": auprc(score.cpu(), bad),
            "auprc_within": auprc(inside, bad),
            "kept": retention(score.cpu(), bad).at(KEPT),
            "kept_within": retention(inside, bad).at(KEPT),
        }
    return numbers


def retained(score: Tensor, bad: np.ndarray) -> dict[str, float]:
    """Return the failure rate among the surest 1 %, 2 %, …, 100 % of the digits."""
    curve = retention(score.cpu(), bad)
    return {f"{share / 100:g}": curve.at(share / 100) for share in range(1, 101)}


def heads(run: Trajectory, bad: np.ndarray) -> dict[str, float]:
    """Return the AUPRC of learned heads and of the label-free score on the second half of a run."""
    fresh, half = second_half(run), len(bad) // 2
    label_free = auprc(fresh.score(SCORE, within=WITHIN).cpu(), bad[half:])
    failure = float(bad[half:].mean())
    return {**evaluate_heads(run, bad, within=WITHIN), "label_free": label_free, "failure": failure}


@dataclass(frozen=True)
class Examiner:
    """Draws digits and judges them.

    Arguments:
        classifier: The judge.
        test: The test split.
        count, steps: Digits and Euler steps.
        seed: Seed of the digits; no option may have been tuned on it.
        few: Digits for comparisons with an expensive reference (many draws or probes).
    """

    classifier: Any
    test: mnist.Images
    count: int = 10_000
    steps: int = 50
    seed: int = 0
    few: int = 500

    def draw(self, field: Any, count: int | None = None, **options: Any) -> Trajectory:
        """Draw digits of this seed, cycling through the classes; the first digits do not depend on the count."""
        device = next(self.classifier.parameters()).device
        y = labels(count or self.count, self.classifier.config["classes"]).to(device)
        config = options.get("config", SamplingConfig()).with_defaults(batch=batch_for(device))
        usual = {"steps": self.steps, "confidence": None, "schedule": Schedule.every(1)}
        options = {**usual, **options, "config": config}
        if isinstance(options["confidence"], AsReference):  # even if the field's default score needs no variance
            options["confidence"] = default_estimator(field.space)
        if "x0" not in options:
            options["count"] = len(y)
        return sample(field, seed=self.seed, cond={"y": y}, **options)

    def quality(self, run: Trajectory) -> dict[str, float]:
        """Return the Fréchet distance to the test split, and the failure rate."""
        reference = activations(self.classifier, mnist.unit(self.test.x))
        fid = frechet(activations(self.classifier, run.x), reference)
        return {"fid": fid, "failure": float(self.bad(run).mean())}

    def bad(self, run: Trajectory) -> np.ndarray:
        """Return whether each digit failed."""
        return failed(self.classifier, run.x, run.cond["y"])

    def lifts(self, run: Trajectory, scores: Mapping[str, Tensor] | None = None) -> dict[str, dict[str, float]]:
        """Return the metrics of :func:`lifts` for the run's scores, or for given scores of the same digits."""
        return lifts(scores_of(run) if scores is None else scores, run.cond["y"], self.bad(run))

    def sweep(self, field: Any, space: Any) -> dict[str, dict[str, float]]:
        """Return the quality by number of uniform steps (fig:cross-app-adaptive, uniform part)."""
        return {str(n): self.quality(self.draw(field, steps=n, config=SamplingConfig(space=space))) for n in STEPS}


def universality(field: Field, examiner: Examiner) -> dict[str, dict[str, float]]:
    """Compare the variance with |∇·v|, by Hutchinson's estimator (tab:universality)."""
    run = examiner.draw(field, examiner.few, config=SamplingConfig(keep_states=True))
    assert run.states is not None
    first = (examiner.steps - 1) % EVERY  # the schedule counts from the last step
    read_at = [*range(first, examiner.steps, EVERY), examiner.steps]
    states, grid = [run.states[i] for i in read_at], run.grid[read_at]
    divergence = along(field, states, grid, HUTCHINSON, seed=examiner.seed, cond=run.cond)
    numbers = {}
    for name, estimator in (("linearised", Linearised(PROBES)), ("diagonal", Diagonal())):
        read = examiner.draw(field, examiner.few, x0=run.x0, confidence=estimator, schedule=Schedule.every(EVERY))
        numbers[name] = agreement(read.std.square(), divergence)._asdict()
    return numbers


def transported(field: Field, examiner: Examiner, projections: int, trajectories: int, few: int) -> dict[str, Any]:
    """Compare the transported dispersion by random projections with the dispersion of k trajectories.

    Random projections give an unbiased estimate of the variance summed over all pixels.
    """
    run = examiner.draw(field, few, transport=True, config=SamplingConfig(projections=projections))
    assert run.transported is not None
    score = run.score("dispersion")
    config = SamplingConfig(batch=batch_for(field.device))
    options: dict[str, Any] = {"steps": examiner.steps, "cond": run.cond, "config": config}
    scores = {"pixels": score}
    for k in (k for k in (1, 2, 4) if k < projections):
        part = replace(run.transported, var=run.transported.var[:, :k])
        scores[f"projections_{k}"] = replace(run, transported=part).score("dispersion")
    ends = stochastic_ends(field, run.x0, trajectories, seed=examiner.seed % 2**20, **options)
    scores |= {f"k{k}": dispersion(ends[:k]) for k in (5, 10, 20) if k <= trajectories}
    return {
        "samples": len(run),
        "projections": projections,
        "failure": float(examiner.bad(run).mean()),
        **dispersion_agreement(score, dispersion(ends)),
        "scores": examiner.lifts(run, scores),
    }


def evaluate_field(
    field: Field,
    examiner: Examiner,
    *,
    projections: int = 8,
    trajectories: int = 5,
    few: int = 2_500,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Compute every number of one field.

    Arguments:
        projections, trajectories, few: Numbers of projections, reference trajectories and digits for the transported
            dispersion.
    """
    say("linearised")
    plain = examiner.draw(field)
    run = examiner.draw(field, x0=plain.x0, confidence=AsReference())
    bad = examiner.bad(run)
    numbers: dict[str, Any] = {**examiner.quality(run), "bit_for_bit": bool(torch.equal(run.x, plain.x))}
    numbers["linearised"] = examiner.lifts(run)
    windows = {f"{a}–{b}": run.score("integrated", early=a, late=b) for a, b in WINDOWS}
    numbers["windows"] = examiner.lifts(run, windows)
    numbers["retention"] = {
        SCORE: retained(run.score(SCORE), bad),
        f"{SCORE}_within": retained(run.score(SCORE, within=WITHIN), bad),
    }
    say("learned heads")
    numbers["heads"] = heads(run, bad)
    say("diagonal")
    diagonal = examiner.draw(field, x0=plain.x0, confidence=Diagonal(), schedule=Schedule.every(5))
    numbers["diagonal"] = examiner.lifts(diagonal)
    numbers["heads_diagonal"] = heads(diagonal, bad)
    numbers["every_5th"] = examiner.lifts(thinned(run, 5))
    say("against draws")
    numbers["fidelity"] = fidelity(
        field,
        examiner.draw(field, min(STATES, examiner.few), config=SamplingConfig(keep_states=True)),
        {"linearised": Linearised(PROBES), "diagonal": "diagonal"},
        draws=DRAWS,
        abreast=min(8, DRAWS),
        seed=examiner.seed,
        read_seed=examiner.seed + 2,
        reduce=lambda var: var.flatten(1).mean(1),
    )
    say("against the divergence")
    numbers["agreement"] = universality(field, examiner)
    say(f"transported, against {trajectories} trajectories")
    numbers["transported"] = transported(field, examiner, projections, trajectories, few)
    return numbers
