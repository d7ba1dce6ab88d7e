"""Reading crystals that were drawn: how good they are, and how well confidence finds the good ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from fmwc.confidence.heads import HEADS, fit_head
from fmwc.data.crystals import Crystals, decode
from fmwc.diagnostics.agreement import agreement
from fmwc.metrics.crystals import Judgement, judge
from fmwc.metrics.crystals.judge import METASTABLE, STABLE
from fmwc.metrics.ranking import auprc, bootstrap, retention
from fmwc.recipes.crystals.recipe import SCORE
from fmwc.sampling import SCORES, Trajectory

__all__ = [
    "CHANNELS",
    "crystals_of",
    "good_of",
    "heads_of",
    "hutchinson_rows",
    "lift_of",
    "quality_of",
    "read_run",
]

CHANNELS = ("type", "coord", "lattice")
# eV/atom above the hull that count as good; none, but for rounding, is stable.
THRESHOLDS = {"0.0": STABLE, "0.05": 0.05, "0.1": METASTABLE, "0.2": 0.2}
FEWEST_ALIKE = 8  # crystals of one size among which a correlation is read
FEWEST = 10  # of each kind that a head is fitted on
TOP = (0.05, 0.10)  # what a laboratory buys: the surest of them


def crystals_of(run: Trajectory) -> Crystals:
    """The structures of a run."""
    return decode(run.x, run.cond["atoms"])


def good_of(judgement: Judgement) -> np.ndarray:
    """At most 0.1 eV/atom above the hull: the paper's success. What could not be judged is none."""
    return np.array(judgement["metastable"], bool)


def quality_of(judgement: Judgement) -> dict[str, Any]:
    """Every share over all structures, and the mean energy above the hull of those judged, with intervals."""
    found: dict[str, Any] = dict(judgement.summary())
    columns = {"mean_e_above_hull": np.array(judgement["e_above_hull"], float)}
    shares = ("distances_ok", "valid", "unique", "novel", "stable", "metastable", "sun", "msun")
    columns |= {f"{n}_share": np.array(judgement[n], float) for n in shares if None not in judgement[n]}

    def mean(values: np.ndarray) -> Callable[[np.ndarray], float]:
        def read(index: np.ndarray) -> float:
            known = values[index][np.isfinite(values[index])]
            return float(known.mean()) if len(known) else math.nan

        return read

    found["intervals"] = {name: bootstrap(mean(values), len(values)) for name, values in columns.items()}
    return found


def lift_of(score: Tensor | np.ndarray, good: np.ndarray, *, intervals: bool = False) -> dict[str, Any]:
    """How well a score, high = doubtful, finds the good ones: they are the positive class.

    AUPRC, its floor (their share), the lift over it, and the share of good ones among the surest.
    """
    doubt = np.asarray(score, float)
    area = auprc(-doubt, good)
    curve = retention(doubt, good)
    found: dict[str, Any] = {"auprc": area, "prevalence": float(good.mean()), "lift": area / float(good.mean())}
    found |= {f"precision_{share:.0%}": curve.at(share) for share in TOP}
    if intervals:

        def lift(index: np.ndarray) -> float:
            some = good[index]
            return auprc(-doubt[index], some) / some.mean() if some.any() else math.nan

        found["lift_interval"] = bootstrap(lift, len(good))
    return found


def heads_of(run: Trajectory, good: np.ndarray, label_free: Tensor) -> dict[str, dict[str, Any]]:
    """Learned heads on the second half, fitted on the first, beside a label-free score on the same half.

    A head sees the variance of each channel at every time.
    """
    half = len(good) // 2
    if min(np.bincount(good[:half], minlength=2).min(), good[half:].sum()) < FEWEST:
        return {}
    known, fresh = (run.take(torch.arange(a, b)) for a, b in ((0, half), (half, len(good))))
    found = {k: lift_of(fit_head(known, ~good[:half], k).score(fresh), good[half:], intervals=True) for k in HEADS}
    return {**found, "label_free": lift_of(label_free[half:], good[half:], intervals=True)}


def scores_of(run: Trajectory, channels: tuple[str, ...] = CHANNELS) -> dict[str, Tensor]:
    """Every score of all channels (`all/score`), the one that is chosen among them, and of each channel."""
    found = {f"all/{name}": run.score(name) for name in (*SCORES, SCORE)}
    return found | {f"{c}/{name}": run.score(f"{c}/{name}") for c in channels for name in SCORES}


def lifts(scores: Mapping[str, Tensor], good: np.ndarray) -> dict[str, dict[str, Any]]:
    return {name: lift_of(score.cpu(), good) for name, score in scores.items()}


def read_run(run: Trajectory, judgement: Judgement) -> dict[str, Any]:
    """How good a run's structures are, and how well its variance finds the good ones; every number with its floor."""
    good, above = good_of(judgement), np.array(judgement["e_above_hull"], float)
    found: dict[str, Any] = {"quality": quality_of(judgement)}
    if not 0 < good.sum() < len(good):
        return found
    own, size = run.score(SCORE), run.cond["atoms"].cpu().double()
    return {
        **found,
        "own": lift_of(own.cpu(), good, intervals=True),
        "linearised": lifts(scores_of(run), good),
        "heads": heads_of(run, good, own.cpu()),
        "thresholds": {name: lift_of(own.cpu(), above <= e) for name, e in THRESHOLDS.items() if (above <= e).any()},
        "baselines": {
            "atoms": lift_of(size, good),
            "elements": lift_of(np.array([len({*c.numbers.tolist()}) for c in judgement.candidates]), good),
        },
        "beyond size": lift_of(_beyond(own.cpu(), size), good, intervals=True),
    }


def _beyond(score: Tensor, size: Tensor) -> Tensor:
    """What a score says that the number of atoms does not: the residual of a parabola in their logarithms."""
    x, y = size.log().numpy(), score.double().clamp_min(1e-12).log().numpy()
    degree = min(2, len(np.unique(x)) - 1)
    return torch.as_tensor(y - np.polyval(np.polyfit(x, y, degree), x))


def thinned(run: Trajectory, every: int) -> Trajectory:
    """The run as if its variance had been read at every k-th step, the last among them."""
    kept = torch.arange(len(run.times) - 1, -1, -every).flip(0)
    var = {name: value[kept] for name, value in run.var.items()}
    mean = {name: value[kept] for name, value in run.mean.items()}
    return replace(run, times=run.times[kept], mean=mean, var=var)


def hutchinson_rows(
    sweep: Mapping[str, Tensor], flops: Mapping[str, float], units: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Agreement with the independent reference of Hutchinson's estimate with K probes, and of the variances."""
    reference = sweep["reference"]
    rows: list[dict[str, Any]] = []

    def add(name: str, k: int | None, value: Tensor, cost: float) -> None:
        a = agreement(value.abs(), reference)
        rows.append(
            {
                "name": name,
                "K": k,
                "flops": cost,
                "per_step_spearman": a.spearman_step,
                "per_step_pearson": a.pearson_step,
                "integrated_spearman": a.spearman,
                "integrated_pearson": a.pearson,
                "within_size_spearman": _within_size(value.abs().sum(0), reference.abs().sum(0), sweep.get("atoms")),
            }
        )

    probe = flops["hutchinson_2"] - flops["hutchinson_1"]
    for name in sorted((n for n in sweep if n.startswith("k")), key=lambda n: int(n[1:])):
        k = int(name[1:])
        add("Hutchinson", k, sweep[name], flops["hutchinson_1"] + (k - 1) * probe)
    for estimator in sorted({n.split(".")[0] for n in sweep if "." in n}):
        parts = {c: sweep[f"{estimator}.{c}"] for c in CHANNELS}
        add(estimator, None, torch.stack([v * units.get(c, 1.0) for c, v in parts.items()]).sum(0), flops[estimator])
        for channel, value in parts.items():
            add(f"{estimator}, {channel}", None, value, flops[estimator])
    if "atoms" in sweep:  # what a correlation of two sums over atoms owes to their number
        add("number of atoms", None, sweep["atoms"].expand_as(reference), 0.0)
    return rows


def _within_size(value: Tensor, reference: Tensor, atoms: Tensor | None) -> float | None:
    """Spearman's correlation among crystals of one size, averaged over the sizes that at least eight have."""
    if atoms is None:
        return None
    groups = [atoms == size for size in atoms.unique() if int((atoms == size).sum()) >= FEWEST_ALIKE]
    told = [(value[g].numpy(), reference[g].numpy()) for g in groups if len(value[g].unique()) > 1]
    if not told:
        return None
    return float(np.average([spearmanr(a, b)[0] for a, b in told], weights=[len(a) for a, _ in told]))


def judged(run: Trajectory, training: Crystals | None = None, calculator: str = "chgnet", **options: Any) -> Judgement:
    """The structures of a run, judged."""
    return judge(crystals_of(run), calculator=calculator, training=training, **options)
