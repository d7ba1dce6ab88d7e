"""Sample crystals for the experiment, and measure how well confidence finds the good ones.

Sampling needs a GPU; judging needs pymatgen and an energy model. Both can run on different machines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from experiments.common.evaluation import agreement, evaluate_heads, scores_of, spearman
from fmwc.baselines import dispersion, stochastic_ends
from fmwc.crystals import Judgement
from fmwc.crystals.judge import METASTABLE, STABLE
from fmwc.crystals.recipe import EVERY, SCORE, Mp20, batch_for
from fmwc.crystals.structures import CHANNELS
from fmwc.estimators import Diagonal, Estimator, Linearised
from fmwc.field import Field
from fmwc.metrics.divergence import divergence, estimates
from fmwc.metrics.ranking import auprc, bootstrap, retention
from fmwc.sampling import SCORES, SamplingConfig, Schedule, Trajectory
from fmwc.state import channels

__all__ = [
    "KS",
    "TRAJECTORIES",
    "draw_diagonal",
    "draw_dispersion",
    "draw_linearised",
    "evaluate_run",
    "flops",
    "heads",
    "hutchinson_rows",
    "lift_of",
    "lifts",
    "quality_of",
    "run_batch",
    "sweep",
]

KS = (1, 5, 10, 25, 50, 100, 250, 500)  # Hutchinson probes (tab:hutchinson-full)
TRAJECTORIES = 5
THRESHOLDS = {"0.0": STABLE, "0.05": 0.05, "0.1": METASTABLE, "0.2": 0.2}  # maximum eV/atom above the hull
FEWEST_ALIKE = 8  # minimum number of crystals of one size for a correlation among them
FEWEST = 10  # minimum number of samples per class to fit a head
TOP = (0.05, 0.10)  # shares of the surest samples at which precision is reported
# Every score, for all channels together (`all/score`) and for each channel.
EVERY_SCORE = {
    **{f"all/{name}": name for name in (*SCORES, SCORE)},
    **{f"{c}/{name}": f"{c}/{name}" for c in CHANNELS for name in SCORES},
}

# ---- sampling --------------------------------------------------------------------------------------------------------


def run_batch(device: torch.device) -> int:
    """Return the batch size for estimators that keep every activation."""
    return min(1_250, batch_for(device))


def draw_linearised(recipe: Mp20, field: Field, count: int, seed: int, **options: Any) -> Trajectory:
    """Sample with the variance at every step. Most results are computed from this run."""
    config = options.pop("config", SamplingConfig()).with_defaults(batch=run_batch(field.device))
    options = {"confidence": Linearised(2), "schedule": Schedule.every(1), "config": config, **options}
    return recipe.draw(field, count, seed, **options).compact()


def draw_diagonal(recipe: Mp20, field: Field, count: int, seed: int) -> Trajectory:
    """Sample with the paper's estimator, at every fifth step."""
    config = SamplingConfig(batch=min(625, batch_for(field.device)))
    schedule = Schedule.every(EVERY)
    return recipe.draw(field, count, seed, confidence=Diagonal(), schedule=schedule, config=config).compact()


def draw_dispersion(recipe: Mp20, field: Field, run: Trajectory, k: int = TRAJECTORIES) -> Tensor:  # -> (B,)
    """Return the dispersion of the endpoints of k stochastic trajectories from the same start."""
    options: dict[str, Any] = {"steps": recipe.steps, "cond": run.cond}
    options["config"] = SamplingConfig(batch=batch_for(field.device))
    ends = stochastic_ends(field, run.x0, k, seed=run.seed % 2**20, space=recipe.space(), **options)
    return dispersion(ends, recipe.space())


def sweep(
    recipe: Mp20,
    field: Field,
    count: int,
    seed: int,
    estimators: Mapping[str, Estimator],
    ks: Sequence[int] = KS,
    every: int = EVERY,
) -> dict[str, Tensor]:
    """Compute Hutchinson's divergence, an independent reference of it, and variances at the same states.

    Returns `(R, B)` tensors: `k1` … `k500` for K probes, `reference` with as many probes as the largest K, and
    `name.channel` for each estimator and channel.
    """
    run = recipe.draw(field, count, seed, confidence=None, config=SamplingConfig(keep_states=True))
    assert run.states is not None
    rows: dict[str, list[Tensor]] = defaultdict(list)
    for step in range((recipe.steps - 1) % every, recipe.steps, every):
        x, t = run.states[step], run.grid[step]
        single = estimates(field, x, t, 2 * max(ks), seed=seed, cond=run.cond)
        for k in ks:
            rows[f"k{k}"].append(single[:k].mean(0))
        rows["reference"].append(single[max(ks) :].mean(0))
        for name, estimator in estimators.items():
            moments = field.moments(x, t, estimator, seed=seed, cond=run.cond)
            means = channels(moments.mean)
            for channel, var in channels(moments.var).items():
                rows[f"{name}.{channel}"].append(var.expand_as(means[channel]).flatten(1).sum(1))
    return {name: torch.stack(values).cpu() for name, values in rows.items()}


class _Counter(TorchDispatchMode):
    """A counter of FLOPs. torch's counter misses explicitly requested gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def flops(recipe: Mp20, field: Field, estimators: Mapping[str, Estimator], count: int = 32) -> dict[str, float]:
    """Return the FLOPs per crystal of a network call, of one and two Hutchinson probes, and of each estimator."""
    run = recipe.draw(field, count, 0, confidence=None, config=SamplingConfig(keep_states=True))
    assert run.states is not None
    x, t = run.states[recipe.steps // 2], run.grid[recipe.steps // 2]

    def counted(f: Callable[[], Any]) -> float:
        with _Counter() as counter:
            f()
        return counter.total / count

    with torch.no_grad():
        costs = {"plain": counted(lambda: field(x, t, **run.cond))}
    for k in (1, 2):
        costs[f"hutchinson_{k}"] = counted(partial(divergence, field, x, t, k, seed=0, cond=run.cond))
    for name, estimator in estimators.items():
        costs[name] = counted(partial(field.moments, x, t, estimator, seed=0, cond=run.cond))
    return costs


# ---- measures of runs ------------------------------------------------------------------------------------------------


def quality_of(judgement: Judgement) -> dict[str, Any]:
    """Return shares of all structures and the mean energy above the hull of judged ones, with intervals."""
    columns = {"mean_e_above_hull": np.array(judgement["e_above_hull"], float)}
    summary = judgement.summary()
    shares = ("distances_ok", "valid", "unique", "novel", "stable", "metastable", "sun", "msun")
    for name in (name for name in shares if summary[name] is not None):  # what is unknown does not count as stable
        columns[f"{name}_share"] = np.array([value is True for value in judgement[name]], float)

    def mean(values: np.ndarray, index: np.ndarray) -> float:
        known = values[index][np.isfinite(values[index])]
        return float(known.mean()) if len(known) else math.nan

    intervals = {name: bootstrap(partial(mean, values), len(values)) for name, values in columns.items()}
    return {**summary, "intervals": intervals}


def lift_of(score: Tensor | np.ndarray, good: np.ndarray, *, intervals: bool = False) -> dict[str, Any]:
    """Measure how well a score (higher is more doubtful) finds the good samples, the positive class.

    Returns the AUPRC, the prevalence of good samples (the AUPRC of a random order), the lift (the ratio of the two),
    and the precision among the surest samples.
    """
    doubt = np.asarray(score, float)
    area, curve = auprc(-doubt, good), retention(doubt, good)
    measures: dict[str, Any] = {"auprc": area, "prevalence": float(good.mean()), "lift": area / float(good.mean())}
    measures |= {f"precision_{share:.0%}": curve.at(share) for share in TOP}
    if intervals:

        def lift(index: np.ndarray) -> float:
            some = good[index]
            return auprc(-doubt[index], some) / some.mean() if some.any() else math.nan

        measures["lift_interval"] = bootstrap(lift, len(good))
    return measures


def lifts(run: Trajectory, good: np.ndarray) -> dict[str, dict[str, Any]]:
    """Return the lift of every score of every channel."""
    scores = scores_of(run, EVERY_SCORE.values())
    return {name: lift_of(scores[score], good) for name, score in EVERY_SCORE.items()}


def heads(run: Trajectory, good: np.ndarray, label_free: Tensor) -> dict[str, dict[str, Any]]:
    """Return the lift of learned heads and of a label-free score on the second half of a run.

    The result is empty if a class has too few samples to fit a head, or if the second half has too few good samples.
    """
    half = len(good) // 2
    if min(np.bincount(good[:half], minlength=2).min(), good[half:].sum()) < FEWEST:
        return {}
    measures = evaluate_heads(run, ~good, lambda score, bad: lift_of(score, ~bad, intervals=True))
    return {**measures, "label_free": lift_of(label_free[half:], good[half:], intervals=True)}


def evaluate_run(run: Trajectory, judgement: Judgement) -> dict[str, Any]:
    """Measure how good a run's structures are, and how well its variance finds the good ones."""
    good, above = judgement.good, np.array(judgement["e_above_hull"], float)
    measures: dict[str, Any] = {"quality": quality_of(judgement)}
    if not 0 < good.sum() < len(good):
        return measures
    score, size = run.score(SCORE).cpu(), run.cond["atoms"].cpu().double()
    elements = np.array([len({*c.numbers.tolist()}) for c in judgement.candidates])
    return {
        **measures,
        "own": lift_of(score, good, intervals=True),
        "linearised": lifts(run, good),
        "heads": heads(run, good, score),
        "thresholds": {name: lift_of(score, above <= e) for name, e in THRESHOLDS.items() if (above <= e).any()},
        "baselines": {"atoms": lift_of(size, good), "elements": lift_of(elements, good)},
        "beyond size": lift_of(_beyond(score, size), good, intervals=True),
    }


def _beyond(score: Tensor, size: Tensor) -> Tensor:
    """Return the logarithm of a score minus its quadratic fit in the logarithm of the number of atoms."""
    x, y = size.log().numpy(), score.double().clamp_min(1e-12).log().numpy()
    degree = min(2, len(np.unique(x)) - 1)
    return torch.as_tensor(y - np.polyval(np.polyfit(x, y, degree), x))


def hutchinson_rows(
    sweep: Mapping[str, Tensor], flops: Mapping[str, float], units: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return how Hutchinson's estimate with K probes, and variances, agree with the independent reference.

    Arguments:
        units: The weight of each channel's variance in the sum over channels.
    """
    reference = sweep["reference"]
    rows: list[dict[str, Any]] = []

    def add(name: str, k: int | None, value: Tensor, cost: float) -> None:
        correlation = agreement(value.abs(), reference)
        row = {"name": name, "K": k, "flops": cost, "per_step_spearman": correlation.spearman_step}
        row |= {"per_step_pearson": correlation.pearson_step, "integrated_spearman": correlation.spearman}
        row["integrated_pearson"] = correlation.pearson
        row["within_size_spearman"] = _within_size(value.abs().sum(0), reference.abs().sum(0), sweep.get("atoms"))
        rows.append(row)

    probe = flops["hutchinson_2"] - flops["hutchinson_1"]
    for name in sorted((n for n in sweep if n.startswith("k")), key=lambda n: int(n[1:])):
        k = int(name[1:])
        add("Hutchinson", k, sweep[name], flops["hutchinson_1"] + (k - 1) * probe)
    for estimator in sorted({n.split(".")[0] for n in sweep if "." in n}):
        parts = {c: sweep[f"{estimator}.{c}"] for c in CHANNELS}
        add(estimator, None, torch.stack([v * units.get(c, 1.0) for c, v in parts.items()]).sum(0), flops[estimator])
        for channel, value in parts.items():
            add(f"{estimator}, {channel}", None, value, flops[estimator])
    if "atoms" in sweep:  # sums over atoms correlate through the number of atoms alone
        add("number of atoms", None, sweep["atoms"].expand_as(reference), 0.0)
    return rows


def _within_size(value: Tensor, reference: Tensor, atoms: Tensor | None) -> float | None:
    """Return Spearman's correlation among crystals of one size, averaged over sizes with enough crystals."""
    if atoms is None:
        return None
    groups = [atoms == size for size in atoms.unique() if int((atoms == size).sum()) >= FEWEST_ALIKE]
    known = [(value[g].numpy(), reference[g].numpy()) for g in groups if len(value[g].unique()) > 1]
    if not known:
        return None
    return float(np.average([spearman(a, b) for a, b in known], weights=[len(a) for a, _ in known]))
