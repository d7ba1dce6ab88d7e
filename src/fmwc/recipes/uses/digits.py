"""Digits as a subject."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.checkpoint import load_network
from fmwc.confidence.guidance import Guidance
from fmwc.data import mnist
from fmwc.field import Field
from fmwc.metrics.images import activations, frechet, predictions
from fmwc.randomness import derive
from fmwc.recipes.mnist.recipe import JUDGE, WITHIN, batch_for, labels
from fmwc.recipes.uses.subject import OWN, Intent, Metric, Outcome, Sizes, Subject
from fmwc.sampling import SCORES, Trajectory
from fmwc.sampling.trajectory import DISPERSION

__all__ = ["Digits", "ink_of", "style_of", "without_specks"]

SHOWN = 12  # edits that a picture shows
STYLE = 1.0  # standard deviations: a style further off than this is another
PROBES = 2  # of guidance, a step


def without_specks(x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 1, H, W)
    """Each pixel as the median of its neighbourhood: noise that an edit left behind is not a way to write."""
    return F.pad(x[:, 0], (1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1).flatten(3).median(3).values[:, None]


def ink_of(x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 3)
    """How much ink there is, how slanted, how wide for its height.

    From the moments of the ink: its mean, the regression of columns on rows, and the ratio of their spreads.
    """
    ink = x[:, 0].clamp(0, 1).double()
    rows, columns = (torch.arange(n, device=x.device, dtype=torch.float64) for n in ink.shape[1:])
    total = ink.sum((1, 2)).clamp_min(1e-6)
    row, column = (ink.sum(2) @ rows) / total, (ink.sum(1) @ columns) / total
    down, across = rows - row[:, None], columns - column[:, None]
    tall = (ink.sum(2) * down.square()).sum(1) / total
    wide = (ink.sum(1) * across.square()).sum(1) / total
    both = torch.einsum("bhw,bh,bw->b", ink, down, across) / total
    return torch.stack([ink.mean((1, 2)), both / tall.clamp_min(1e-6), (wide / tall.clamp_min(1e-6)).sqrt()], 1).float()


INTENTS = {
    "style": Intent(None, 1.0, "the judge reads the same digit, written otherwise", scales=(0.2, 0.5, 1.0), before=0.4),
    "class": Intent(
        None, 0.0, "the judge reads the new digit, written as before", other=True, scales=(0.0, 0.3), before=0.4
    ),
}
GUIDES = {f"{s:g} in 0.3–0.7": Guidance(s, 0.3, 0.7, probes=PROBES) for s in (1.0, 5.0)}
STRENGTHS = {
    f"{strength} in {early}–{late}": Guidance(strength, early, late, probes=PROBES)
    for strength in (0.2, 1.0, 5.0)
    for early, late in ((0.0, 1.0), (0.3, 0.7))
}


def style_of(x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 3)
    """How a digit is written, whichever it is."""
    return ink_of(without_specks(x))


class Digits(Subject):
    """Creates the digits' subject. What `--wide` tried on validation seed 100 chose scales, times and strengths.

    Steps are chosen by FID; rewinding, which moved it nowhere, by the share that failed.

    Arguments:
        test: The test split, which the Fréchet distance is taken to; without it there is none.
        judge: Who reads the digits, by shipped name or folder.
    """

    name, bad, good = "mnist", "failed", "read as asked for"
    intents = INTENTS
    guides = GUIDES
    strengths = STRENGTHS
    dispersion = False  # thirteen times the cost of plain sampling, and a weak score of digits (results/mnist)
    risks = (0.01, 0.015)
    power, weight = 0.5, 0.5
    before, scale = 0.4, 0.5
    scales = (0.2, 0.5, 1.0)

    def __init__(
        self, field: Field, sizes: Sizes | None = None, test: mnist.Images | None = None, judge: str = JUDGE
    ) -> None:
        super().__init__(field, sizes)
        self.judge: Any = load_network(judge, device=field.device)
        self.test = test
        self.metrics = {
            "failed": Metric(lambda found: 100 * float(found["bad"].mean()), "failed, %"),
            "style": Metric(self._spread, "spread of styles ÷ the data's", each=False, higher=True),
        }
        if test is not None:
            self.metrics = {"fid": Metric(self._fid, "FID", each=False), **self.metrics}

    @staticmethod
    def sizes_for(device: str) -> Sizes:
        return Sizes(5_000, 100, 20, 5_000, 2_000, 2_000) if device == "cuda" else Sizes(200, 20, 4, 100, 100, 50)

    def draw(self, count: int, seed: int, **options: Any) -> Trajectory:
        y = labels(count, self.judge.config["classes"]).to(self.field.device)
        return self.drawn(count, seed, y=y, **options)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "batch": batch_for(self.field.device)}

    def kept(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "y": cond["y"].to(torch.uint8),
            "taken": predictions(self.judge, x).to(torch.uint8),
            "features": torch.from_numpy(activations(self.judge, x)).half(),
            "style": style_of(x).cpu(),
        }

    def read(self, kept: Mapping[str, Tensor]) -> Outcome:
        found = {name: kept[name].cpu().numpy() for name in ("y", "taken", "features", "style")}
        return {**found, "bad": found["taken"] != found["y"], "features": found["features"].astype(float)}

    def shown(self, run: Trajectory, every: int = 1) -> dict[str, Tensor]:
        return {"images": (run.x[::every][:SHOWN].clamp(0, 1) * 255).round().to(torch.uint8)}

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        names = [*SCORES, *([DISPERSION] if run.transported is not None else [])]
        return {f"{run.default_score}{OWN}": run.score(), **{n: run.score(n, within=WITHIN) for n in names}}

    def conditions(self, run: Trajectory, intent: Intent, seed: int) -> dict[str, Any]:
        if not intent.other:
            return {}
        y, classes = run.cond["y"], self.judge.config["classes"]
        generator = torch.Generator().manual_seed(derive(seed, "another class"))
        return {"y": (y + torch.randint(1, classes, (len(y),), generator=generator).to(y)) % classes}

    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        """Styles are held against others of the same digit: a 1 has less ink than an 8 whoever writes it."""
        apart = np.sqrt(((self._standard(before) - self._standard(after)) ** 2).mean(1))
        otherwise = apart > STYLE
        return ~after["bad"] & (otherwise if intent == "style" else ~otherwise)

    # ---- parts ---------------------------------------------------------------------------------------------------

    @cached_property
    def _styles(self) -> tuple[np.ndarray, np.ndarray]:  # (10, 3) each
        """The mean and standard deviation of styles of each digit: of the test split, or of the samples of one seed."""
        if self.test is not None:
            style, y = style_of(mnist.unit(self.test.x)).numpy(), self.test.y.numpy()
        else:
            run = self.draw(200, 0, confidence=False)
            style, y = style_of(run.x).cpu().numpy(), run.cond["y"].cpu().numpy()
        groups = [style[y == digit] for digit in range(self.judge.config["classes"])]
        return np.stack([g.mean(0) for g in groups]), np.stack([g.std(0) for g in groups])

    def _standard(self, found: Outcome) -> np.ndarray:  # (B, 3)
        mean, std = self._styles
        return (found["style"] - mean[found["y"]]) / std[found["y"]]

    def _spread(self, found: Outcome) -> float:
        return float(self._standard(found).std(0).mean())

    @cached_property
    def _target(self) -> np.ndarray:
        assert self.test is not None
        return activations(self.judge, mnist.unit(self.test.x))

    def _fid(self, found: Outcome) -> float:
        return frechet(found["features"], self._target)
