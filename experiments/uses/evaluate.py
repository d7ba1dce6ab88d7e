"""Compute the numbers of a study: metrics of every row over seeds, and the gain of each use of confidence."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.common.experiment import OWN, Experiment, Metric, Outcome
from experiments.uses.drawing import Drawn
from fmwc.errors import UsageError
from fmwc.metrics.ranking import bootstrap, compare, retention
from fmwc.uses.risk import reliability, risk_control

TOP, KEPT = (0.01, 0.05, 0.1), (0.01, 0.05, 0.1, 0.5, 0.8, 0.9)
LABELLED = (300, 1_000)  # numbers of labelled samples per certificate
SPLITS = 500
PROBABILITY = 0.9
SUREST = 4  # the surest edits of a sample are one in this many
SHOWN = 40  # edits per row whose success is stored for figures

# Rows with the outcomes of their samples, by seed and label.
Judged = Mapping[int, Mapping[str, tuple[Drawn, Outcome]]]


class _Resampled(dict[str, np.ndarray]):
    """The outcome of resampled samples. Arrays are indexed on access, because a metric reads only one or two."""

    def __init__(self, outcome: Outcome, index: np.ndarray) -> None:
        super().__init__()
        self.outcome, self.index = outcome, index

    def __missing__(self, name: str) -> np.ndarray:
        return self.outcome[name][self.index]


def _mean_interval(values: np.ndarray) -> list[float]:
    return bootstrap(lambda index: float(values[index].mean()), len(values))


def _over_seeds(metric: Metric, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return a metric's mean and standard deviation over seeds, and a bootstrap interval for means over samples."""
    values = [metric.read(outcome) for outcome in outcomes]
    entry = {
        "mean": float(np.mean(values)),  # NaN if nothing could be judged
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "each": values,
    }
    if metric.each:
        names = set.intersection(*(set(outcome) for outcome in outcomes))
        pooled = {name: np.concatenate([outcome[name] for outcome in outcomes]) for name in names}
        entry["interval"] = bootstrap(lambda index: metric.read(_Resampled(pooled, index)), len(pooled["bad"]))
    return entry


def gather(experiment: Experiment, judged: Judged) -> dict[str, dict[str, Any]]:
    """Return the cost and the metrics of each row."""
    numbers: dict[str, dict[str, Any]] = {}
    for label, (first, _) in next(iter(judged.values())).items():
        rows, outcomes = zip(*(by_label[label] for by_label in judged.values()), strict=True)
        info = {
            key: statistics.mean(row.info[key] for row in rows) if isinstance(value, (int, float)) else value
            for key, value in first.info.items()
        }
        metrics = {name: _over_seeds(metric, list(outcomes)) for name, metric in experiment.metrics.items()}
        numbers[label] = {**info, "samples": sum(len(outcome["bad"]) for outcome in outcomes), **metrics}
    return numbers


# ---- filtering and risk control ----------------------------------------------------------------------------------


def _scored(judged: Judged) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the scores (the default score first), `bad` and the confidence, pooled over seeds."""
    rows, outcomes = zip(*(by_label["samples"] for by_label in judged.values()), strict=True)

    def pooled(name: str) -> np.ndarray:
        return np.concatenate([row.tensors[name].numpy() for row in rows])

    names = sorted((k for k in rows[0].tensors if k.startswith("score ")), key=lambda name: not name.endswith(OWN))
    scores = {name.removeprefix("score "): pooled(name) for name in names}
    return scores, np.concatenate([outcome["bad"] for outcome in outcomes]), pooled("confidence")


def read_filter(experiment: Experiment, judged: Judged) -> dict[str, Any]:
    """Return ranking metrics of each score with intervals, and retention curves."""
    scores, bad, _ = _scored(judged)
    sign, positive = (1, bad) if experiment.finds == "bad" else (-1, ~bad)
    signed = {name: sign * score for name, score in scores.items()}
    curves = {name: retention(score, bad) for name, score in scores.items()}
    shares = [share / 100 for share in range(1, 101)]
    return {
        "samples": len(bad),
        "bad": float(bad.mean()),
        "finds": experiment.finds,
        # Without positive samples, no ranking metric is defined.
        "compared": compare(signed, positive, top=TOP, kept=KEPT) if positive.any() else {},
        "kept": shares,
        "retention": {name: [curve.at(share) for share in shares] for name, curve in curves.items()},
    }


def _certificates(score: np.ndarray, bad: np.ndarray, risk: float, labelled: int) -> dict[str, Any]:
    """Certify on repeated splits; return the violations on held-out samples, and the shares of samples kept."""
    kept, rates = [], []
    for split in range(SPLITS):
        order = np.random.default_rng(split).permutation(len(bad))
        known, fresh = order[:labelled], order[labelled:]
        try:
            certificate = risk_control(score[known], bad[known], risk, PROBABILITY, seed=split)
        except UsageError:  # no certificate
            continue
        keeps = certificate.keeps(score[fresh])
        kept.append(float(keeps.mean()))
        rates.append(float(bad[fresh][keeps].mean()) if keeps.any() else 0.0)
    return {
        "risk": risk,
        "labelled": labelled,
        "splits": SPLITS,
        "given": len(rates),
        "broken": sum(rate > risk for rate in rates),
        "allowed": round(1 - PROBABILITY, 6),
        "kept": float(np.mean(kept)) if kept else None,
        "achieved": float(np.mean(rates)) if rates else None,
        "achieved_range": [float(q) for q in np.quantile(rates, (0.05, 0.95))] if rates else None,
    }


def read_trust(experiment: Experiment, judged: Judged) -> dict[str, Any]:
    """Test risk certificates for the default score, and compute the success rate by confidence."""
    scores, bad, confidence = _scored(judged)
    own = next(iter(scores.values()))
    sizes = [count for count in LABELLED if 3 * count <= len(bad)]
    bins = reliability(confidence, bad)._asdict()
    return {
        "samples": len(bad),
        "bad": float(bad.mean()),
        "promises": [_certificates(own, bad, risk, count) for risk in experiment.risks for count in sizes],
        "reliability": {name: value.tolist() for name, value in bins.items()},
    }


# ---- editing -----------------------------------------------------------------------------------------------------


def read_edit(experiment: Experiment, judged: Judged) -> dict[str, Any]:
    """Return the success rate of edits, its gain over random times, and the success rate of the surest quarter.

    Replicates of one sample are correlated, so the bootstrap resamples samples together with all their edits.
    """
    numbers: dict[str, Any] = {}
    rates: dict[str, np.ndarray] = {}
    for label in (label for label in next(iter(judged.values())) if label != "seeds"):
        parts, wanted, scores = [], [], []
        for rows in judged.values():
            before, (row, after) = rows["seeds"][1], rows[label]
            replicates = len(after["bad"]) // len(before["bad"])
            repeated = {name: np.repeat(value, replicates, 0) for name, value in before.items()}
            parts.append(experiment.succeeded(label.partition(",")[0], repeated, after).reshape(-1, replicates))
            if (useful := experiment.useful(repeated, after)) is not None:
                wanted.append(useful.reshape(-1, replicates).mean(1))
            if "score" in row.tensors:
                scores.append(row.tensors["score"].numpy().reshape(-1, replicates))
        succeeded = np.concatenate(parts)
        rates[label] = succeeded.mean(1)
        gain = rates[label] - rates[label.rpartition(", ")[0] + ", random"]
        infos = [rows[label][0].info for rows in judged.values()]
        numbers[label] = {
            "success": float(rates[label].mean()),
            "interval": _mean_interval(rates[label]),
            "gain": float(gain.mean()),
            "gain_interval": _mean_interval(gain),
            "time": statistics.mean(info["time"] for info in infos),
            "scale": infos[0]["scale"],
            "samples": len(gain),
            "replicates": replicates,
            "shown": parts[0][:SHOWN, 0].tolist(),  # first edit of each sample, first seed
        }
        if wanted:
            rate = np.concatenate(wanted)
            numbers[label] |= {"useful": float(rate.mean()), "useful_interval": _mean_interval(rate)}
        if len(scores) == len(parts):  # too few readings for the score otherwise
            surest = np.concatenate(scores).argsort(1)[:, : max(1, replicates // SUREST)]
            rate = np.take_along_axis(succeeded, surest, 1).mean(1)
            numbers[label] |= {"surest": float(rate.mean()), "surest_interval": _mean_interval(rate)}
    return numbers


# The drawing of each use, and the function that evaluates it.
READINGS: Mapping[str, tuple[str, Callable[[Experiment, Judged], dict[str, Any]]]] = {
    "filter": ("samples", read_filter),
    "trust": ("samples", read_trust),
    "edit": ("edit", read_edit),
    "steps": ("steps", gather),
    "guide": ("guide", gather),
}
