"""The Checkerboard as a subject."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.confidence.guidance import Guidance
from fmwc.data import checkerboard
from fmwc.metrics.points import misplaced, symmetric_kl
from fmwc.randomness import derive
from fmwc.recipes.uses.subject import Intent, Metric, Outcome, Sizes, Subject
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import DISPERSION

__all__ = ["Points"]

MARGIN = 0.05  # a point this near a square's edge, from inside, is at its edge: 19 % of the data are
SHOWN = 40  # edits that a picture shows the way of


def square(x: np.ndarray) -> np.ndarray:  # (B, 2) -> (B,)
    """The number of the square a point is in, of 16; the nearest for a point off the board."""
    cell = np.clip(np.floor((x + checkerboard.HALF) / checkerboard.CELL), 0, 3).astype(int)
    return cell[:, 0] * 4 + cell[:, 1]


def _emptiest(found: Outcome) -> float:
    """The share of points in the square that holds fewest of the eight that should hold as many each."""
    target = [number for number in range(16) if (number // 4 + number % 4) % 2 == 0]
    return 100 * min(float((square(found["x"][~found["bad"]]) == n).sum()) for n in target) / len(found["x"])


def _kl(found: Outcome) -> float:
    """How far the symmetric KL to the target is from that of as many points of the data.

    A kernel density of few points blurs edges, so that points which keep away from them have a lower KL than the data
    have. Not a number for points too few to have a density.
    """
    count = len(found["x"])
    return abs(symmetric_kl(torch.as_tensor(found["x"]), cells=100) - _own_kl(count)) if count > 2 else math.nan


@cache
def _own_kl(count: int) -> float:
    return symmetric_kl(checkerboard.sample(count, derive("checkerboard", "as many")), cells=100)


def _at_edges(found: Outcome) -> float:
    inside = found["x"][~found["bad"]]
    place = inside - np.floor(inside)
    return math.nan if not len(inside) else 100 * float(((place < MARGIN) | (place >= 1 - MARGIN)).any(1).mean())


METRICS = {
    "misplaced": Metric(lambda found: 100 * float(found["bad"].mean()), "misplaced, %"),
    # Misplacement can be bought by leaving squares empty, or by keeping away from their edges.
    "kl": Metric(_kl, "symmetric KL, off the data's own", each=False),
    "emptiest": Metric(_emptiest, "in the emptiest square, % (12.5)", each=False, higher=True, digits=1),
    "at_edges": Metric(_at_edges, "at the squares' edges, % (19)", each=False, higher=True, digits=1),
}
INTENTS = {"turn": Intent(None, 0.2, "ends in another square, and inside it")}
GUIDES = {"0.2 in 0.5–0.9": Guidance(0.2, 0.5, 0.9), "0.5 in 0.5–0.7": Guidance(0.5, 0.5, 0.7)}
STRENGTHS = {
    f"{strength} in {early}–{late}": Guidance(strength, early, late)
    for strength in (0.1, 0.2, 0.5)
    for early, late in ((0.0, 1.0), (0.5, 0.7), (0.5, 0.9))
}


class Points(Subject):
    """Creates the Checkerboard's subject.

    Scales and strengths were chosen on validation seed 100: few misplaced, while squares are as full as those of the
    plain flow, and their edges not much emptier.
    """

    name, bad, good = "checkerboard", "misplaced", "placed"
    metrics = METRICS
    intents = INTENTS
    power, weight = 2.0, 0.75
    guides = GUIDES
    strengths = STRENGTHS
    risks = (0.01, 0.02)

    @staticmethod
    def sizes_for(device: str) -> Sizes:
        return (
            Sizes(10_000, 500, 20, 10_000, 5_000, 5_000)
            if device == "cuda"
            else Sizes(4_000, 300, 4, 1_500, 1_500, 800)
        )

    def draw(self, count: int, seed: int, **options: Any) -> Trajectory:
        return self.drawn(count, seed, **options)

    def kept(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"x": x}

    def read(self, kept: Mapping[str, Tensor]) -> Outcome:
        x = kept["x"].cpu()
        return {"bad": misplaced(x), "x": x.numpy()}

    def shown(self, run: Trajectory, every: int = 1) -> dict[str, Tensor]:
        return {} if run.states is None else {"ways": torch.stack([s[::every][:SHOWN] for s in run.states], 1)}

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        found = super().scores(run)
        return found if run.transported is None else {**found, DISPERSION: run.score(DISPERSION)}

    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        return ~after["bad"] & (square(after["x"]) != square(before["x"]))
