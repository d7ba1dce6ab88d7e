"""The numbers of a study: the metrics of every row over seeds, and what each use of confidence gains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from experiments.common.experiment import OWN, Experiment, Metric, Outcome
from experiments.uses.drawing import Drawn
from fmwc.errors import UsageError
from fmwc.metrics.ranking import bootstrap, compare, retention
from fmwc.uses.risk import reliability, risk_control

__all__ = ["READINGS", "Seen", "gather"]

TOP, KEPT = (0.01, 0.05, 0.1), (0.01, 0.05, 0.1, 0.5, 0.8, 0.9)
LABELLED = (300, 1_000)  # labelled samples of a guarantee
SPLITS = 500
PROBABILITY = 0.9
SUREST = 4  # the surest of this many edits of a sample
SHOWN = 40  # edits that a picture may show, with whether they succeeded

# A drawn row and the outcome of its samples, by label, by seed.
Seen = dict[int, dict[str, tuple[Drawn, Outcome]]]


def _over(values: list[float]) -> dict[str, Any]:
    return {
        "mean": float(np.mean(values)),  # NaN if nothing could be judged
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "each": values,
    }


def _pooled(outcomes: list[Outcome]) -> Outcome:
    names = set.intersection(*(set(o) for o in outcomes))
    return {name: np.concatenate([o[name] for o in outcomes]) for name in names}


class _Picked(Mapping[str, np.ndarray]):
    """The outcome of some samples, indexed lazily: a resample uses one or two of its arrays."""

    def __init__(self, outcome: Outcome, index: np.ndarray) -> None:
        self.outcome, self.index = outcome, index

    def __getitem__(self, name: str) -> np.ndarray:
        return self.outcome[name][self.index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outcome)

    def __len__(self) -> int:
        return len(self.outcome)


def _entry(metric: Metric, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return a metric's mean and spread over seeds, and a bootstrap interval if it is a mean over samples."""
    found = _over([metric.read(outcome) for outcome in outcomes])
    if metric.each:
        pooled = _pooled(outcomes)
        found["interval"] = bootstrap(lambda index: metric.read(_Picked(pooled, index)), len(pooled["bad"]))
    return found


def gather(experiment: Experiment, seen: Seen) -> dict[str, dict[str, Any]]:
    """Return the cost and the metrics of each row."""
    found: dict[str, dict[str, Any]] = {}
    for label, (first, _) in next(iter(seen.values())).items():
        rows = [by_label[label] for by_label in seen.values()]
        found[label] = {
            key: statistics.mean(row.info[key] for row, _ in rows) if isinstance(value, (int, float)) else value
            for key, value in first.info.items()
        }
        outcomes = [outcome for _, outcome in rows]
        found[label]["samples"] = sum(len(outcome["bad"]) for outcome in outcomes)
        found[label] |= {name: _entry(metric, outcomes) for name, metric in experiment.metrics.items()}
    return found


# ---- filter and trust --------------------------------------------------------------------------------------------


def _scored(seen: Seen) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the scores, the field's own first, what is bad, and confidence, of all seeds together."""
    rows = [found["samples"] for found in seen.values()]
    names = sorted((k for k in rows[0][0].kept if k.startswith("score ")), key=lambda name: not name.endswith(OWN))
    scores = {n.removeprefix("score "): np.concatenate([row.kept[n].numpy() for row, _ in rows]) for n in names}
    confidence = np.concatenate([row.kept["confidence"].numpy() for row, _ in rows])
    return scores, np.concatenate([outcome["bad"] for _, outcome in rows]), confidence


def read_filter(experiment: Experiment, seen: Seen) -> dict[str, Any]:
    """Return how well each score finds its positive class, with intervals, and what is left among the surest."""
    scores, bad, _ = _scored(seen)
    sign, positive = (1, bad) if experiment.finds == "bad" else (-1, ~bad)
    curves = {name: retention(score, bad) for name, score in scores.items()}
    shares = [share / 100 for share in range(1, 101)]
    return {
        "samples": len(bad),
        "bad": float(bad.mean()),
        "finds": experiment.finds,
        # Without a positive sample there is nothing to find.
        "compared": compare({n: sign * s for n, s in scores.items()}, positive, top=TOP, kept=KEPT)
        if positive.any()
        else {},
        "kept": shares,
        "retention": {name: [curve.at(share) for share in shares] for name, curve in curves.items()},
    }


def read_trust(experiment: Experiment, seen: Seen) -> dict[str, Any]:
    """Test guarantees on repeated splits: how often one fails on the unlabelled samples, and what share it keeps."""
    scores, bad, confidence = _scored(seen)
    own = next(iter(scores.values()))
    promises = []
    for risk in experiment.risks:
        for labelled in (n for n in LABELLED if 3 * n <= len(bad)):
            given, broken, kept, achieved = 0, 0, [], []
            for split in range(SPLITS):
                order = np.random.default_rng(split).permutation(len(bad))
                known, fresh = order[:labelled], order[labelled:]
                try:
                    made = risk_control(own[known], bad[known], risk, PROBABILITY, seed=split)
                except UsageError:  # no guarantee can be given
                    continue
                inside = made.keeps(own[fresh])
                rate = float(bad[fresh][inside].mean()) if inside.any() else 0.0
                given += 1
                broken += rate > risk
                kept.append(float(inside.mean()))
                achieved.append(rate)
            promises.append(
                {
                    "risk": risk,
                    "labelled": labelled,
                    "splits": SPLITS,
                    "given": given,
                    "broken": broken,
                    "allowed": round(1 - PROBABILITY, 6),
                    "kept": float(np.mean(kept)) if kept else None,
                    "achieved": float(np.mean(achieved)) if achieved else None,
                    "achieved_range": [float(q) for q in np.quantile(achieved, (0.05, 0.95))] if achieved else None,
                }
            )
    found = reliability(confidence, bad)
    return {
        "samples": len(bad),
        "bad": float(bad.mean()),
        "promises": promises,
        "reliability": {name: value.tolist() for name, value in found._asdict().items()},
    }


# ---- the others --------------------------------------------------------------------------------------------------


def read_edit(experiment: Experiment, seen: Seen) -> dict[str, Any]:
    """Return the share of edits that succeed, its gain over random times, and the share among the surest quarter.

    Replicates of one sample are alike, so the bootstrap resamples samples, each with all of its edits.
    """
    found: dict[str, Any] = {}
    labels = [label for label in next(iter(seen.values())) if label != "seeds"]
    rates: dict[str, np.ndarray] = {}
    for label in labels:
        intent = label.partition(",")[0]
        parts, doubts = [], []
        for rows in seen.values():
            before, after = rows["seeds"][1], rows[label][1]
            replicates = len(after["bad"]) // len(before["bad"])
            each = {name: np.repeat(value, replicates, 0) for name, value in before.items()}
            parts.append(experiment.succeeded(intent, each, after).reshape(-1, replicates))
            if "score" in (kept := rows[label][0].kept):
                doubts.append(kept["score"].numpy().reshape(-1, replicates))
        succeeded = np.concatenate(parts)
        rates[label] = succeeded.mean(1)
        random = rates[label.rpartition(", ")[0] + ", random"]
        gain = rates[label] - random
        info = [rows[label][0].info for rows in seen.values()]
        found[label] = {
            "success": float(rates[label].mean()),
            "interval": bootstrap(lambda i: float(rates[label][i].mean()), len(random)),  # noqa: B023
            "gain": float(gain.mean()),
            "gain_interval": bootstrap(lambda i: float(gain[i].mean()), len(random)),  # noqa: B023
            "time": statistics.mean(i["time"] for i in info),
            "scale": info[0]["scale"],
            "samples": len(random),
            "replicates": replicates,
            "shown": parts[0][:SHOWN, 0].tolist(),  # the first edit of each sample of the first seed
        }
        if len(doubts) == len(parts):  # older drawings have none
            surest = np.concatenate(doubts).argsort(1)[:, : max(1, replicates // SUREST)]
            sure = np.take_along_axis(succeeded, surest, 1).mean(1)
            found[label] |= {
                "surest": float(sure.mean()),
                "surest_interval": bootstrap(lambda i: float(sure[i].mean()), len(random)),  # noqa: B023
            }
    return found


READINGS: Mapping[str, tuple[str, Callable[[Experiment, Seen], dict[str, Any]]]] = {
    "filter": ("samples", read_filter),
    "trust": ("samples", read_trust),
    "edit": ("edit", read_edit),
    "steps": ("steps", gather),
    "rewind": ("rewind", gather),
    "guide": ("guide", gather),
}
