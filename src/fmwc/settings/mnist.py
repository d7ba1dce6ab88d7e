"""Digits under every verb of the command."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fmwc.checkpoint import load, load_network
from fmwc.data import mnist
from fmwc.errors import DataError, UsageError
from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.metrics.images import activations, failed, frechet, predictions
from fmwc.metrics.ranking import auprc
from fmwc.nets import LeNet
from fmwc.recipes.comparing import cells
from fmwc.recipes.fitting import Progress, fit
from fmwc.recipes.mnist.judge import Judge, fit_judge
from fmwc.recipes.mnist.reading import heads_of, lifts, scores_of
from fmwc.recipes.mnist.recipe import JUDGE, PRESETS, Mnist, batch_for, labels
from fmwc.recipes.mnist.reproduce import reproduce
from fmwc.recipes.recipe import override
from fmwc.recipes.uses.digits import Digits
from fmwc.report import figures, images
from fmwc.report.checks import contest_plate
from fmwc.report.mnist import WORDS, write_figures, write_report
from fmwc.report.paper.mnist import retention_of, sweep_of, write_tables
from fmwc.report.run import level_of
from fmwc.sampling import Trajectory, compared
from fmwc.sampling.scores import FEWEST
from fmwc.settings.setting import Rows, Setting, Show, say_on_stderr, shares, told, write_run

__all__ = ["MnistSetting"]

ENOUGH = 2_000  # digits for a Fréchet distance, which fewer bias upwards
PIXEL_PROBES = 24  # a picture of six digits: enough to see strokes, and seconds on two cores


def _config(field: Field) -> dict[str, Any]:
    config: Any = field.network.config
    return config


class MnistSetting(Setting):
    """Creates the setting.

    Arguments:
        eye: The judge, by shipped name or folder; empty where there is none for the data.
    """

    name, presets = "mnist", {**PRESETS, "judge": Judge()}
    bad, kept = WORDS.bad, WORDS.kept
    draws, seeds, large = 20, "0", 20_000

    def __init__(self, eye: str = JUDGE) -> None:
        self.eye = eye

    @property
    def has_judge(self) -> bool:  # type: ignore[override]
        return bool(self.eye)

    def judged_by(self, judge: str) -> Setting:
        if not isinstance(load_network(judge), LeNet):
            raise UsageError(f"{judge} is not a judge; train one with fmwc train mnist --preset judge")
        return MnistSetting(judge)

    def unjudged(self) -> Setting:
        return MnistSetting("")

    def require_judge(self, field: Field) -> None:
        judge, network = self._eye(field.device).config, _config(field)
        side = field.space.channels["x"].shape[-1] if field.space else judge["side"]
        if (judge["side"], judge["classes"]) != (side, network["classes"]):
            raise UsageError(
                f"the judge knows {judge['classes']} classes of side {judge['side']}, and this field makes "
                f"{network['classes']} of side {side}; train a judge on the same data"
            )

    def _eye(self, device: torch.device) -> Any:
        if not self.eye:
            raise UsageError(
                "the shipped judge knows MNIST only; train one on your data (fmwc train mnist --preset judge --data … "
                "--own --out FOLDER) and give it with --judge FOLDER"
            )

        return load_network(self.eye, device=device)

    def fit(
        self, recipe: Any, out: Path, device: torch.device, progress: Progress | None = None, *, force: bool = False
    ) -> None:
        if not isinstance(recipe, Judge):
            fit(recipe, out, device, progress, force=force)
            return

        def show(done: int, loss: float) -> None:
            if progress:
                progress("judge", done, recipe.iterations, loss)

        splits = [mnist.load(recipe.data or None, s, own=recipe.own, classes=recipe.classes) for s in ("train", "test")]
        fit_judge(recipe, splits[0], splits[1], out, device, show, force=force)

    def conditions(self, field: Field, count: int, label: int | None = None, seed: int = 0) -> dict[str, Tensor]:
        classes = _config(field)["classes"]
        if label is None:
            return {"y": labels(count, classes)}
        if not 0 <= label < classes:
            raise UsageError(f"--label is a class from 0 to {classes - 1}, got {label}")
        return {"y": torch.full((count,), label)}

    def count(self, device: torch.device) -> int:
        return 10_000 if device.type == "cuda" else 100

    def batch(self, device: torch.device) -> int:
        return batch_for(device)

    def pilot(self, device: torch.device) -> int:
        return 1_000 if device.type == "cuda" else 80  # of ten classes the fewest that can be compared within each

    def judge(self, trajectory: Trajectory) -> np.ndarray:
        return failed(self._eye(trajectory.x.device), trajectory.x, trajectory.cond["y"])

    def changes(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        """The judge's reading, where there is one, and the root mean square over pixels of what is shown."""
        shown = [run.x.clamp(0, 1).flatten(1) for run in (before, after)]
        table: dict[str, list[Any]] = {
            "asked_before": before.cond["y"].tolist(),
            "asked_after": after.cond["y"].tolist(),
            "pixel_distance": (shown[1] - shown[0]).square().mean(1).sqrt().tolist(),
        }
        if self.has_judge:
            here, there = (predictions(self._eye(run.x.device), run.x).tolist() for run in (before, after))
            table |= {"taken_for_before": here, "taken_for_after": there}
            table["turned"] = [a != b for a, b in zip(here, there, strict=True)]
            table["as_asked"] = [a == b for a, b in zip(there, table["asked_after"], strict=True)]
        return table

    def changed(self, table: dict[str, list[Any]]) -> Rows:
        rows = [{"": "pixels moved by (root mean square)", "value": f"{np.mean(table['pixel_distance']):.3f}"}]
        if self.has_judge:
            rows += shares(table, {"taken for another digit": "turned", "taken for what was asked": "as_asked"})
        return rows

    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        here, there = (run.x[:, 0].clamp(0, 1).cpu().numpy() for run in (before, after))
        read = "taken_for" if self.has_judge else "asked"
        reads = table[f"{read}_before"], table[f"{read}_after"]
        return images.edited_pairs(here, there, *reads, table["sample"], table["time"])

    def shown(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        return self.draw(field, count, seed, progress, transport=2 if field.device.type == "cpu" else 8)

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        pixels = images.read_pixels(field, run, count=min(6, len(run)), probes=PIXEL_PROBES)
        return write_report(out, run, self.judge(run), pixels, numbers=numbers, provenance=about)

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """Also what a judge, if there is one, takes each for, and whether that is what was asked for."""
        if not self.eye:
            return super().table(run)
        taken = predictions(self._eye(run.x.device), run.x)
        as_asked = (taken == run.cond["y"].cpu()).tolist()
        return {**super().table(run), "taken_for": taken.tolist(), "as_asked": as_asked}

    def write_samples(self, run: Trajectory, out: Path, format: str = "") -> list[Path]:
        """Also digits.png, from the surest to the most doubtful, and contest.png after a contest."""
        table = self.table(run)
        written = write_run(run, table, out)
        asked = run.cond["y"].cpu().numpy()
        taken = np.array(table.get("taken_for", asked))
        with suppress(UsageError):  # digits without a score have no order
            level = level_of(run).values.cpu().numpy()
            x = run.x[:, 0].clamp(0, 1).cpu().numpy()
            grid = images.sorted_grid(x, level, taken != asked, asked)
            written.append(write_bytes(out / "digits.png", figures.png(grid)))
        for plate in contest_plate(run):
            written.append(write_bytes(out / "contest.png", figures.png(plate.figure)))
        return written

    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        judge = self._eye(field.device)
        plain = self.draw(field, count, seed, progress, confidence=False)
        run = self.draw(field, count, seed, progress, schedule=self.every)
        bad, y = failed(judge, run.x, run.cond["y"]), run.cond["y"]
        found: dict[str, Any] = {"failure": float(bad.mean()), "bit_for_bit": bool(torch.equal(run.x, plain.x))}
        found["fid"] = self._fid(judge, run, data) if count >= ENOUGH else f"not read: it takes {ENOUGH:,} digits"
        if bad.any() and count < FEWEST * _config(field)["classes"]:
            found["auprc"] = {name: auprc(score.cpu(), bad) for name, score in scores_of(run).items()}
        elif bad.any():
            read = lifts(scores_of(run), y, bad)
            found["auprc"] = {name: entry["auprc"] for name, entry in read.items()}
            found["auprc_within"] = {name: entry["auprc_within"] for name, entry in read.items()}
            found["kept_80"] = {name: entry["kept_within"] for name, entry in read.items()}
            with suppress(UsageError):  # heads need more digits, and more failures, than a quick look has
                found["heads"] = heads_of(run, bad)
        return told(found, bad, self.bad, run.score().cpu())

    def _test(self, data: str) -> mnist.Images | str:
        """The test split, or why it is not at hand; said only where nobody named a place."""
        try:
            return mnist.load(data or None, "test", own=self.eye != JUDGE, download=False)
        except DataError as error:
            if data:
                raise
            return f"not read: {error}"

    def _fid(self, judge: Any, run: Trajectory, data: str) -> float | str:
        test = self._test(data)
        if isinstance(test, str):
            return test
        return frechet(activations(judge, run.x), activations(judge, mnist.unit(test.x)))

    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        if not isinstance(recipe, Mnist):
            raise UsageError("reproduce takes a recipe of a flow")
        options: dict[str, Any] = {"seeds": seeds, "count": count, "draws": draws, "only": only, "say": say_on_stderr}
        reproduce(recipe, out, device, judge=self.eye, **options)
        if not only:
            self.figures(out, load(out / "models" / "mnist", device=device))

    def figures(self, out: Path, field: Field) -> list[Path]:
        """Draws the figures of a results folder: of its samples, and of its first cell where 10⁴ digits are needed."""
        run, reference = Trajectory.load(out / "samples.safetensors"), field.reference
        assert reference is not None
        # The samples were drawn before the field had a reference, in the setting the reference was read in.
        run = compared(run, reference)
        numbers = cells(out)[0]["numbers"]
        pixels = images.read_pixels(field, run, probes=64)
        written = write_figures(out / "figures", run, self.judge(run), pixels, sweep_of(numbers))
        curve = figures.retention_curve(retention_of(numbers), numbers["retrofit"]["failure"], what=self.bad)
        write_bytes(out / "figures" / "retention.png", figures.png(curve))  # in place of that of the few digits shown
        return written

    def subject(self, field: Field, data: str, sizes: Sequence[str]) -> Digits:
        self.require_judge(field)
        test = self._test(data)
        if isinstance(test, str):
            say_on_stderr(f"FID {test}")
        there = None if isinstance(test, str) else test
        return Digits(field, override(Digits.sizes_for(field.device.type), sizes, "size"), there, self.eye)

    def tables(self, out: Path) -> list[Path]:
        return write_tables(out)
