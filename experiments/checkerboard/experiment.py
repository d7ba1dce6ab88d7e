"""The Checkerboard experiment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.checkerboard.evaluate import RIVALS, auprcs, main_numbers, symmetric_kl
from experiments.checkerboard.reproduce import reproduce
from experiments.checkerboard.tables import tables
from experiments.common.evaluation import evaluate_heads, with_intervals
from experiments.common.experiment import Experiment, Intent, Metric, Outcome, Sizes
from fmwc import checkerboard
from fmwc.checkerboard.data import misplaced
from fmwc.checkerboard.page import checkerboard_sections
from fmwc.checkpoint import load
from fmwc.domains import Show
from fmwc.errors import UsageError
from fmwc.estimators import Diagonal
from fmwc.field import Field
from fmwc.progress import say_on_stderr
from fmwc.randomness import derive
from fmwc.report.page import write_pictures
from fmwc.sampling import Schedule, Trajectory
from fmwc.sampling.trajectory import DISPERSION
from fmwc.uses.guidance import Guidance

MARGIN = 0.05  # points closer than this to an edge count as at the edge: 19 % of the data


def square(x: np.ndarray) -> np.ndarray:  # (B, 2) -> (B,)
    """Return the index of the square of each point, from 0 to 15; points off the board have the nearest square."""
    cell = np.clip(np.floor((x + checkerboard.HALF) / checkerboard.CELL), 0, 3).astype(int)
    return cell[:, 0] * 4 + cell[:, 1]


def _emptiest(outcome: Outcome) -> float:
    """Return the percentage of points in the emptiest of the eight squares; the data have equal shares."""
    target = [number for number in range(16) if (number // 4 + number % 4) % 2 == 0]
    return 100 * min(float((square(outcome["x"][~outcome["bad"]]) == n).sum()) for n in target) / len(outcome["x"])


def _kl(outcome: Outcome) -> float:
    """Return the absolute difference between the symmetric KL of the points and that of as many data points.

    A kernel density of few points blurs edges, so points that avoid the edges have a lower KL than the data. The result
    is NaN if there are too few points for a density.
    """
    count = len(outcome["x"])
    return abs(symmetric_kl(torch.as_tensor(outcome["x"]), cells=100) - _own_kl(count)) if count > 2 else math.nan


@cache
def _own_kl(count: int) -> float:
    return symmetric_kl(checkerboard.sample(count, derive("checkerboard", "as many")), cells=100)


def _at_edges(outcome: Outcome) -> float:
    inside = outcome["x"][~outcome["bad"]]
    place = inside - np.floor(inside)
    return math.nan if not len(inside) else 100 * float(((place < MARGIN) | (place >= 1 - MARGIN)).any(1).mean())


class CheckerboardExperiment(Experiment):
    """The Checkerboard experiment.

    Scales and strengths were chosen on validation seed 100 for few misplaced points, while squares and edges stay about
    as full as those of the plain flow.
    """

    draws, seeds = 64, "0,1,2"
    bad, good = "misplaced", "placed"
    metrics: Mapping[str, Metric] = {
        "misplaced": Metric(lambda outcome: 100 * float(outcome["bad"].mean()), "misplaced, %"),
        # These metrics detect low misplacement that comes from empty squares or from points that avoid edges.
        "kl": Metric(_kl, "symmetric KL, difference from the data", each=False),
        "emptiest": Metric(_emptiest, "in the emptiest square, % (12.5)", each=False, higher=True, digits=1),
        "at_edges": Metric(_at_edges, "at the squares' edges, % (19)", each=False, higher=True, digits=1),
    }
    intents: Mapping[str, Intent] = {"turn": Intent(None, 0.2, "ends in another square, and inside it")}
    power, weight = 2.0, 0.75
    guides: Mapping[str, Guidance] = {
        "0.2 in 0.5–0.9": Guidance(0.2, 0.5, 0.9),
        "0.5 in 0.5–0.7": Guidance(0.5, 0.5, 0.7),
    }
    risks = (0.01, 0.02)

    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        _require_no_data(data)
        plain = self.domain.draw(field, count, seed, progress, confidence=None)
        linear = self.domain.draw(
            field, count, seed, progress, transport=True, schedule=Schedule.every(self.domain.every)
        )
        diagonal = self.domain.draw(field, count, seed, progress, confidence=Diagonal())
        bad = misplaced(plain.x)
        numbers = {**main_numbers(linear, plain.x), "auprc_diagonal": auprcs(diagonal, bad)}
        for name, (estimator, schedule) in RIVALS.items():
            run = self.domain.draw(field, count, seed, progress, confidence=estimator, schedule=schedule)
            numbers[f"auprc_{name}"] = auprcs(run, bad)
        numbers["heads"] = evaluate_heads(linear, bad)
        return with_intervals(numbers, bad, self.domain.bad, linear.score().cpu())

    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        if only:
            raise UsageError("checkerboard is not split into tasks; leave out --only")
        reproduce(recipe, out, device, seeds=seeds, count=count, draws=draws, say=say_on_stderr)
        field = load(out / "models" / "checkerboard", device=device)
        run = self.domain.draw(field, count, 2026, None, transport=True, schedule=Schedule.every(self.domain.every))
        write_pictures(out / "figures", checkerboard_sections(field, run))

    def tables(self, out: Path) -> list[Path]:
        return tables(out)

    def with_field(self, field: Field, data: str = "", changes: Sequence[str] = ()) -> Experiment:
        _require_no_data(data)
        return super().with_field(field, data, changes)

    @staticmethod
    def sizes_for(device: str) -> Sizes:
        if device == "cuda":
            return Sizes(10_000, 500, 20, 10_000, 5_000)
        return Sizes(4_000, 300, 4, 1_500, 800)

    def keep(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"x": x}

    def judge(self, kept: Mapping[str, Tensor]) -> Outcome:
        x = kept["x"].cpu()
        return {"bad": misplaced(x), "x": x.numpy()}

    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        return ~after["bad"] & (square(after["x"]) != square(before["x"]))

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        transported = {} if run.transported is None else {DISPERSION: run.score(DISPERSION)}
        return {**super().scores(run), **transported}


def _require_no_data(data: str) -> None:
    if data:
        raise UsageError("checkerboard generates its data; leave out --data")
