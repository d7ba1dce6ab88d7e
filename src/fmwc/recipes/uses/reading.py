"""What is read from what was drawn: every row's metrics over seeds, and what each use of confidence gained."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fmwc.confidence.trust import promise, reliability
from fmwc.errors import UsageError
from fmwc.metrics.ranking import bootstrap, compare, retention
from fmwc.recipes.uses.drawing import Drawn
from fmwc.recipes.uses.subject import OWN, Metric, Outcome, Subject

__all__ = ["READINGS", "Seen", "gather"]

TOP, KEPT = (0.01, 0.05, 0.1), (0.01, 0.05, 0.1, 0.5, 0.8, 0.9)
LABELLED = (300, 1_000)  # samples a promise rests on
SPLITS = 500
PROBABILITY = 0.9
SUREST = 4  # of so many edits of a sample, the surest one
SHOWN = 40  # edits that a picture may show, and is told of whether they succeeded

# What was seen of one experiment: by seed, by label, a drawn row and what became of its samples.
Seen = dict[int, dict[str, tuple[Drawn, Outcome]]]


def _over(values: list[float]) -> dict[str, Any]:
    return {
        "mean": float(np.mean(values)),  # NaN where nothing could be judged
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "each": values,
    }


def _pooled(outcomes: list[Outcome]) -> Outcome:
    names = set.intersection(*(set(o) for o in outcomes))
    return {name: np.concatenate([o[name] for o in outcomes]) for name in names}


class _Picked(Mapping[str, np.ndarray]):
    """Creates an outcome of some samples, each array picked when it is asked for: a resample looks at one or two."""

    def __init__(self, outcome: Outcome, index: np.ndarray) -> None:
        self.outcome, self.index = outcome, index

    def __getitem__(self, name: str) -> np.ndarray:
        return self.outcome[name][self.index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outcome)

    def __len__(self) -> int:
        return len(self.outcome)


def _entry(metric: Metric, outcomes: list[Outcome]) -> dict[str, Any]:
    """A metric of one row: mean and spread over seeds, and a bootstrap interval where it is a mean of samples."""
    found = _over([metric.read(outcome) for outcome in outcomes])
    if metric.each:
        pooled = _pooled(outcomes)
        found["interval"] = bootstrap(lambda index: metric.read(_Picked(pooled, index)), len(pooled["bad"]))
    return found


def gather(subject: Subject, seen: Seen) -> dict[str, dict[str, Any]]:
    """Each row with what it cost and its metrics."""
    found: dict[str, dict[str, Any]] = {}
    for label, (first, _) in next(iter(seen.values())).items():
        rows = [by_label[label] for by_label in seen.values()]
        found[label] = {
            key: statistics.mean(row.info[key] for row, _ in rows) if isinstance(value, (int, float)) else value
            for key, value in first.info.items()
        }
        outcomes = [outcome for _, outcome in rows]
        found[label]["samples"] = sum(len(outcome["bad"]) for outcome in outcomes)
        found[label] |= {name: _entry(metric, outcomes) for name, metric in subject.metrics.items()}
    return found


# ---- filter and trust --------------------------------------------------------------------------------------------


def _scored(seen: Seen) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Scores, the field's own first, what is bad, and confidence, of all seeds together."""
    rows = [found["samples"] for found in seen.values()]
    names = sorted((k for k in rows[0][0].kept if k.startswith("score ")), key=lambda name: not name.endswith(OWN))
    scores = {n.removeprefix("score "): np.concatenate([row.kept[n].numpy() for row, _ in rows]) for n in names}
    confidence = np.concatenate([row.kept["confidence"].numpy() for row, _ in rows])
    return scores, np.concatenate([outcome["bad"] for _, outcome in rows]), confidence


def read_filter(subject: Subject, seen: Seen) -> dict[str, Any]:
    """How well each score finds what it is to find, with intervals; and what is left among the surest."""
    scores, bad, _ = _scored(seen)
    sign, positive = (1, bad) if subject.finds == "bad" else (-1, ~bad)
    curves = {name: retention(score, bad) for name, score in scores.items()}
    shares = [share / 100 for share in range(1, 101)]
    return {
        "samples": len(bad),
        "bad": float(bad.mean()),
        "finds": subject.finds,
        # A score finds something only where there is something to be found.
        "compared": compare({n: sign * s for n, s in scores.items()}, positive, top=TOP, kept=KEPT)
        if positive.any()
        else {},
        "kept": shares,
        "retention": {name: [curve.at(share) for share in shares] for name, curve in curves.items()},
    }


def read_trust(subject: Subject, seen: Seen) -> dict[str, Any]:
    """Promises tested by repeated splits: how often one is broken on samples that it did not see, and what it keeps."""
    scores, bad, confidence = _scored(seen)
    own = next(iter(scores.values()))
    promises = []
    for risk in subject.risks:
        for labelled in (n for n in LABELLED if 3 * n <= len(bad)):
            given, broken, kept, achieved = 0, 0, [], []
            for split in range(SPLITS):
                order = np.random.default_rng(split).permutation(len(bad))
                known, fresh = order[:labelled], order[labelled:]
                try:
                    made = promise(own[known], bad[known], risk, PROBABILITY, seed=split)
                except UsageError:  # it says that it cannot be promised
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


def read_edit(subject: Subject, seen: Seen) -> dict[str, Any]:
    """The share of edits that do what they were meant to, and by how much that differs from random times; and the share
    of the surest quarter of each sample's edits.

    Replicates of one sample are alike, so the bootstrap draws samples, each with all of its edits.
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
            parts.append(subject.succeeded(intent, each, after).reshape(-1, replicates))
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
            "shown": parts[0][:SHOWN, 0].tolist(),  # of the first seed's samples, the first edit of each
        }
        if len(doubts) == len(parts):  # drawings of earlier have none
            surest = np.concatenate(doubts).argsort(1)[:, : max(1, replicates // SUREST)]
            sure = np.take_along_axis(succeeded, surest, 1).mean(1)
            found[label] |= {
                "surest": float(sure.mean()),
                "surest_interval": bootstrap(lambda i: float(sure[i].mean()), len(random)),  # noqa: B023
            }
    return found


READINGS: Mapping[str, tuple[str, Callable[[Subject, Seen], dict[str, Any]]]] = {
    "filter": ("samples", read_filter),
    "trust": ("samples", read_trust),
    "edit": ("edit", read_edit),
    "steps": ("steps", gather),
    "rewind": ("rewind", gather),
    "guide": ("guide", gather),
}
