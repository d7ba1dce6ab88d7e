"""Digits, judged by a classifier. A sample fails if it is not classified as the requested digit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fmwc.checkpoint import load_network
from fmwc.domains import Rows, ShippedDomain, Show, shares, write_run
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.mnist import data as mnist
from fmwc.mnist.classifier import Classifier, failed, fit_classifier, predictions
from fmwc.mnist.page import KEPT, digits_page
from fmwc.mnist.recipe import JUDGE, PRESETS, batch_for, labels
from fmwc.networks import LeNet
from fmwc.recipes import Progress, fit
from fmwc.report import images
from fmwc.report.page import png, write_pictures
from fmwc.report.reports import contest_section
from fmwc.report.run import ordering_of
from fmwc.sampling import SamplingConfig, Trajectory

__all__ = ["MnistDomain"]

PIXEL_PROBES = 24  # random probes per digit of a figure: enough to show strokes, in seconds on two cores


def _config(field: Field) -> dict[str, Any]:
    config: Any = field.network.config
    return config


class MnistDomain(ShippedDomain):
    """Digits.

    Arguments:
        classifier: The judge, as a shipped name or a folder; empty for no judge.
    """

    name, presets = "mnist", {**PRESETS, "judge": Classifier()}
    bad, kept = "failed", KEPT
    counts = (10_000, 100)
    pilots = (1_000, 80)  # 80: the minimum for comparing samples within each of ten classes
    large = 20_000

    def __init__(self, classifier: str = JUDGE) -> None:
        self.classifier = classifier
        self.has_judge = bool(classifier)

    def batch(self, device: torch.device) -> int:
        return batch_for(device)

    def conditions(
        self, field: Field, count: int, label: int | None = None, seed: int = 0, first: int = 0
    ) -> dict[str, Tensor]:
        classes = _config(field)["classes"]
        if label is None:
            return {"y": labels(count, classes, first)}
        if not 0 <= label < classes:
            raise UsageError(f"--label must be a class from 0 to {classes - 1}; got {label}")
        return {"y": torch.full((count,), label)}

    def fit(
        self, recipe: Any, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
    ) -> None:
        if not isinstance(recipe, Classifier):
            fit(recipe, out, device, progress, force=force)
            return

        def show(done: int, loss: float) -> None:
            if progress:
                progress("judge", done, recipe.iterations, loss)

        splits = [mnist.load(recipe.data or None, s, own=recipe.own, classes=recipe.classes) for s in ("train", "test")]
        fit_classifier(recipe, splits[0], splits[1], out, device, show, force=force)

    # ---- judging -----------------------------------------------------------------------------------------------------

    def with_judge(self, judge: str) -> ShippedDomain:
        if judge and not isinstance(load_network(judge), LeNet):
            raise UsageError(f"{judge} is not a judge; train one with fmwc train mnist --preset judge")
        return MnistDomain(judge)

    def require_judge(self, field: Field) -> None:
        judge, network = self.load_judge(field.device).config, _config(field)
        side = field.space.channels["x"].shape[-1] if field.space else judge["side"]
        if (judge["side"], judge["classes"]) != (side, network["classes"]):
            raise UsageError(
                f"the judge is for {judge['classes']} classes and images of side {judge['side']}, but this checkpoint "
                f"draws {network['classes']} classes and side {side}; train a judge on the same data"
            )

    def load_judge(self, device: torch.device) -> Any:
        """Load the classifier; raise if there is none for the data."""
        if not self.classifier:
            raise UsageError(
                "the shipped judge is for MNIST only; train one on your data (fmwc train mnist --preset judge --data … "
                "--own --out FOLDER) and pass it as --judge FOLDER"
            )
        return load_network(self.classifier, device=device)

    def _predict(self, x: Tensor) -> Tensor:
        return predictions(self.load_judge(x.device), x)

    def judge(self, trajectory: Trajectory) -> np.ndarray:
        return failed(self.load_judge(trajectory.x.device), trajectory.x, trajectory.cond["y"])

    # ---- edits -------------------------------------------------------------------------------------------------------

    def compare_edits(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        """Return the classifier's predictions, if there is one, and the root mean square change per pixel."""
        shown = [run.x.clamp(0, 1).flatten(1) for run in (before, after)]
        table: dict[str, list[Any]] = {
            "asked_before": before.cond["y"].tolist(),
            "asked_after": after.cond["y"].tolist(),
            "pixel_distance": (shown[1] - shown[0]).square().mean(1).sqrt().tolist(),
        }
        if self.has_judge:
            old, new = (self._predict(run.x).tolist() for run in (before, after))
            table |= {"predicted_before": old, "predicted_after": new}
            table["turned"] = [a != b for a, b in zip(old, new, strict=True)]
            table["correct"] = [a == b for a, b in zip(new, table["asked_after"], strict=True)]
        return table

    def summarise_edits(self, table: dict[str, list[Any]]) -> Rows:
        rows = [{"": "change per pixel (root mean square)", "value": f"{np.mean(table['pixel_distance']):.3f}"}]
        if self.has_judge:
            rows += shares(table, {"classified as another digit": "turned", "classified as requested": "correct"})
        return rows

    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        old, new = (run.x[:, 0].clamp(0, 1).cpu().numpy() for run in (before, after))
        name = "predicted" if self.has_judge else "asked"
        classes = table[f"{name}_before"], table[f"{name}_after"]
        return images.edited_pairs(old, new, *classes, table["sample"], table["time"])

    # ---- reports and files -------------------------------------------------------------------------------------------

    def report_run(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        return self.draw(
            field,
            count,
            seed,
            progress,
            transport=True,
            config=SamplingConfig(projections=2 if field.device.type == "cpu" else 8),
        )

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        pixels = images.read_pixels(field, run, count=min(6, len(run)), probes=PIXEL_PROBES)
        return digits_page(out, run, self.judge(run), pixels, numbers=numbers, provenance=about)

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """Also list the class that the judge predicts, if there is a judge, and whether it is the requested one."""
        if not self.has_judge:
            return super().table(run)
        predicted = self._predict(run.x)
        correct = (predicted == run.cond["y"].cpu()).tolist()
        return {**super().table(run), "predicted": predicted.tolist(), "correct": correct}

    def write_samples(self, run: Trajectory, out: Path, format: str = "", symmetrise: float = 0.0) -> list[Path]:
        """Also write the pictures of :meth:`pictures`."""
        table = self.table(run)
        return [*write_run(run, table, out), *self.pictures(run, table, out)]

    def pictures(self, run: Trajectory, table: Mapping[str, Sequence[Any]], out: Path) -> list[Path]:
        """Write digits.png, most confident first, and contest.png after a contest."""
        written, asked = [], run.cond["y"].cpu().numpy()
        predicted = np.array(table.get("predicted", asked))
        with suppress(UsageError):  # digits without a score have no order
            level = ordering_of(run).values.cpu().numpy()
            x = run.x[:, 0].clamp(0, 1).cpu().numpy()
            grid = images.sorted_grid(x, level, predicted != asked, asked)
            written.append(write_bytes(out / "digits.png", png(grid)))
        return written + write_pictures(out, contest_section(run))
