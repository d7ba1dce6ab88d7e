"""The MNIST experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.common.evaluation import scores_of, with_intervals
from experiments.common.experiment import OWN, Experiment, Intent, Metric, Outcome, Sizes
from experiments.mnist.evaluate import frechet, heads, lifts
from experiments.mnist.figures import write_figures
from experiments.mnist.reproduce import reproduce
from experiments.mnist.tables import tables
from fmwc.checkpoint import load, load_network
from fmwc.data.arrays import fingerprint
from fmwc.domains import Show
from fmwc.errors import DataError, UsageError
from fmwc.field import Field
from fmwc.metrics.ranking import auprc
from fmwc.mnist import data as mnist
from fmwc.mnist.classifier import activations, failed, predictions
from fmwc.mnist.recipe import JUDGE, WITHIN, Mnist, batch_for
from fmwc.progress import say_on_stderr
from fmwc.randomness import derive
from fmwc.recipes import override
from fmwc.sampling import SCORES, SamplingConfig, Schedule, Trajectory
from fmwc.sampling.trajectory import DISPERSION, FEWEST
from fmwc.uses.guidance import Guidance

ENOUGH = 2_000  # minimum number of digits for a Fréchet distance; with fewer, it is biased upwards
SHOWN = 12  # number of edits drawn
STYLE = 1.0  # minimum distance between different styles, in standard deviations
PROBES = 2  # probes of guidance per step


def without_specks(x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 1, H, W)
    """Return images after a 3 × 3 median filter, which removes residual noise of edits."""
    return F.pad(x[:, 0], (1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1).flatten(3).median(3).values[:, None]


def ink_of(x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 3)
    """Return the amount of ink, the slant, and the ratio of width to height.

    They are computed from moments of the ink: the mean, the regression of columns on rows, and the ratio of standard
    deviations.
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


def style_of(x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B, 3)
    """Return the style of a handwritten digit."""
    return ink_of(without_specks(x))


class MnistExperiment(Experiment):
    """The MNIST experiment.

    Scales, times and strengths were chosen on validation seed 100, steps by FID.

    Arguments:
        test: The test split for the Fréchet distance; if missing, the distance is not computed.
    """

    draws, seeds = 20, "0"
    bad, good = "failed", "classified as requested"
    intents: Mapping[str, Intent] = {
        "style": Intent(None, 1.0, "same digit in another style", before=0.4),
        "class": Intent(None, 0.0, "new digit in the same style", other=True, before=0.4),
    }
    guides: Mapping[str, Guidance] = {f"{s:g} in 0.3–0.7": Guidance(s, 0.3, 0.7, probes=PROBES) for s in (1.0, 5.0)}
    dispersion = False  # costs 13× plain sampling and is a weak score for digits (results/mnist)
    risks = (0.01, 0.015)
    power, weight = 0.5, 0.5

    def __init__(
        self, domain: Any, field: Field | None = None, sizes: Sizes | None = None, test: mnist.Images | None = None
    ) -> None:
        super().__init__(domain, field, sizes)
        self.test = test
        if field is not None:
            self.classifier: Any = load_network(domain.classifier, device=field.device)
        fid = {"fid": Metric(self._fid, "FID", each=False)} if test is not None else {}
        self.metrics = {
            **fid,
            "failed": Metric(lambda outcome: 100 * float(outcome["bad"].mean()), "failed, %"),
            "style": Metric(self._spread, "spread of styles ÷ that of the data", each=False, higher=True),
        }

    # ---- the paper's tables ------------------------------------------------------------------------------------------

    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        judge = self.domain.load_judge(field.device)
        plain = self.domain.draw(field, count, seed, progress, confidence=None)
        run = self.domain.draw(field, count, seed, progress, schedule=Schedule.every(self.domain.every))
        bad, y = failed(judge, run.x, run.cond["y"]), run.cond["y"]
        numbers: dict[str, Any] = {"failure": float(bad.mean()), "bit_for_bit": bool(torch.equal(run.x, plain.x))}
        if count < ENOUGH:
            numbers["fid"] = f"not computed: requires at least {ENOUGH:,} digits"
        elif isinstance(test := self._test(data), str):
            numbers["fid"] = test
        else:
            numbers["fid"] = frechet(activations(judge, run.x), activations(judge, mnist.unit(test.x)))
        if bad.any() and count < FEWEST * judge.config["classes"]:
            numbers["auprc"] = {name: auprc(score, bad) for name, score in scores_of(run).items()}
        elif bad.any():
            read = lifts(scores_of(run), y, bad)
            for name, key in (("auprc", "auprc"), ("auprc_within", "auprc_within"), ("kept_80", "kept_within")):
                numbers[name] = {score: entry[key] for score, entry in read.items()}
            with suppress(UsageError):  # too few digits or failures to fit heads
                numbers["heads"] = heads(run, bad)
        return with_intervals(numbers, bad, self.domain.bad, run.score().cpu())

    def _test(self, data: str) -> mnist.Images | str:
        """Return the test split, or the reason why it is missing if no folder was given."""
        try:
            return mnist.load(data or None, "test", own=self.domain.classifier != JUDGE, download=False)
        except DataError as error:
            if data:
                raise
            return f"not computed: {error}"

    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        if not isinstance(recipe, Mnist):
            raise UsageError("reproduce needs a recipe of a flow, not of a judge")
        options: dict[str, Any] = {"seeds": seeds, "count": count, "draws": draws, "only": only, "say": say_on_stderr}
        reproduce(recipe, out, device, judge=self.domain.classifier, **options)
        if not only:
            write_figures(out, load(out / "models" / "mnist", device=device), self.domain)

    def tables(self, out: Path) -> list[Path]:
        return tables(out)

    # ---- the study ---------------------------------------------------------------------------------------------------

    def with_field(self, field: Field, data: str = "", changes: Sequence[str] = ()) -> Experiment:
        self.domain.require_judge(field)
        test = self._test(data)
        if isinstance(test, str):
            say_on_stderr(f"FID {test}")
        sizes = override(self.sizes_for(field.device.type), changes, "size")
        return type(self)(self.domain, field, sizes, None if isinstance(test, str) else test)

    @staticmethod
    def sizes_for(device: str) -> Sizes:
        return Sizes(5_000, 100, 20, 5_000, 2_000) if device == "cuda" else Sizes(200, 20, 4, 100, 50)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "config": SamplingConfig(batch=batch_for(self.field.device))}

    def judged_by(self) -> dict[str, str]:
        known = {"judge": fingerprint(*self.classifier.state_dict().values())}
        return known | ({} if self.test is None else {"test": fingerprint(*self.test)})

    def keep(self, x: Any, cond: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "y": cond["y"].to(torch.uint8),
            "taken": predictions(self.classifier, x).to(torch.uint8),
            "features": torch.from_numpy(activations(self.classifier, x)).half(),
            "style": style_of(x).cpu(),
        }

    def judge(self, kept: Mapping[str, Tensor]) -> Outcome:
        known = {name: kept[name].cpu().numpy() for name in ("y", "taken", "features", "style")}
        return {**known, "bad": known["taken"] != known["y"], "features": known["features"].astype(float)}

    def shown(self, run: Trajectory, every: int = 1) -> dict[str, Tensor]:
        return {"images": (run.x[::every][:SHOWN].clamp(0, 1) * 255).round().to(torch.uint8)}

    def scores(self, run: Trajectory) -> dict[str, Tensor]:
        names = [*SCORES, *([DISPERSION] if run.transported is not None else [])]
        return {f"{run.default_score}{OWN}": run.score(), **{n: run.score(n, within=WITHIN) for n in names}}

    def edited_conditions(self, run: Trajectory, intent: Intent, seed: int) -> dict[str, Any]:
        if not intent.other:
            return {}
        y, classes = run.cond["y"], self.classifier.config["classes"]
        generator = torch.Generator().manual_seed(derive(seed, "another class"))
        return {"y": (y + torch.randint(1, classes, (len(y),), generator=generator).to(y)) % classes}

    def succeeded(self, intent: str, before: Outcome, after: Outcome) -> np.ndarray:
        """Return whether each edit succeeded; styles are standardised within digits, as a 1 has less ink than an 8."""
        distance = np.sqrt(((self._standard(before) - self._standard(after)) ** 2).mean(1))
        restyled = distance > STYLE
        return ~after["bad"] & (restyled if intent == "style" else ~restyled)

    @cached_property
    def _styles(self) -> tuple[np.ndarray, np.ndarray]:  # (10, 3) each
        """The mean and standard deviation of styles per digit, from the test split or from generated samples."""
        if self.test is not None:
            style, y = style_of(mnist.unit(self.test.x)).numpy(), self.test.y.numpy()
        else:
            run = self.draw(200, 0, confidence=None)
            style, y = style_of(run.x).cpu().numpy(), run.cond["y"].cpu().numpy()
        groups = [style[y == digit] for digit in range(self.classifier.config["classes"])]
        return np.stack([g.mean(0) for g in groups]), np.stack([g.std(0) for g in groups])

    def _standard(self, outcome: Outcome) -> np.ndarray:  # (B, 3)
        mean, std = self._styles
        return (outcome["style"] - mean[outcome["y"]]) / std[outcome["y"]]

    def _spread(self, outcome: Outcome) -> float:
        return float(self._standard(outcome).std(0).mean())

    @cached_property
    def _target(self) -> np.ndarray:
        assert self.test is not None
        return activations(self.classifier, mnist.unit(self.test.x))

    def _fid(self, outcome: Outcome) -> float:
        return frechet(outcome["features"], self._target)
