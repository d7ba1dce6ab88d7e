"""The Checkerboard: points in the plane that fail if they fall on an empty square."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fmwc.checkerboard.data import misplaced, squares
from fmwc.checkerboard.figures import EditedPaths, edited_paths
from fmwc.checkerboard.page import KEPT, checkerboard_page
from fmwc.checkerboard.recipe import PRESETS
from fmwc.domains import Rows, ShippedDomain, Show, shares
from fmwc.field import Field
from fmwc.report.run import describe
from fmwc.sampling import PILOT, Schedule, Trajectory
from fmwc.sampling.trajectory import DISPERSION, of_variance

__all__ = ["CheckerboardDomain"]

CLOSER = 250  # samples of a demo whose variance is computed at every step
DEMO = (0.18, 0.8, 0.92)  # times of the readings of a demo: early and late, for the temporal ratio


class CheckerboardDomain(ShippedDomain):
    name, presets, demo_preset = "checkerboard", PRESETS, "quick"
    bad, kept, others = "misplaced", KEPT, ("temporal_ratio",)
    counts, pilots = (10_000, 10_000), (PILOT, PILOT)
    transported = DISPERSION
    one_thread = True

    def batch(self, device: torch.device) -> int:
        return 2048

    def judge(self, trajectory: Trajectory) -> np.ndarray:
        return misplaced(trajectory.x)

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """Also list which points are misplaced, as labels for fmwc filter."""
        return {**super().table(run), "misplaced": self.judge(run).tolist()}

    def compare_edits(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        old, new = (squares(run.x) for run in (before, after))
        return {
            "square_before": old,
            "square_after": new,
            "turned": [a != b for a, b in zip(old, new, strict=True)],
            "misplaced_before": self.judge(before).tolist(),
            "misplaced_after": self.judge(after).tolist(),
            "distance": (after.x - before.x).norm(dim=1).tolist(),
        }

    def summarise_edits(self, table: dict[str, list[Any]]) -> Rows:
        words = ("misplaced before", "misplaced after")
        return shares(table, {"in another square": "turned", **{name: name.replace(" ", "_") for name in words}})

    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        old, new = (torch.stack(run.states or []).cpu().numpy() for run in (before, after))
        return edited_paths({"": EditedPaths(old, new, before.grid.cpu().numpy(), table["time"], table["turned"])})

    def report_run(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        # The page ranks samples within the run by the best score, the dispersion.
        return self.draw(field, count, seed, progress, transport=True, schedule=Schedule.every(self.every)).ranked_by(
            DISPERSION
        )

    def demo_run(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        """Read the variance at few steps, five times faster than transporting it at every step."""
        return self.draw(field, count, seed, progress, schedule=Schedule.at(DEMO))

    def numbers(self, run: Trajectory, bad: np.ndarray | None = None) -> Rows:
        """Also describe the scores if the table compares the run's score with scores of the variance."""
        rows = super().numbers(run, bad)
        beside = [name for name in self.others if any(row[""].startswith(f"AUPRC of {name} ") for row in rows)]
        if of_variance(run.default_score) or run.default_score == DISPERSION or not beside:
            return rows
        level = "confidence" if not run.withheld else "rank"
        legend = [{"": f"{run.default_score}: the {level}", "value": describe(run.default_score)}]
        legend += [{"": f"{name}: the variance", "value": describe(name)} for name in beside]
        return [*rows[:-1], *legend, rows[-1]]

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        if len(run.times) == len(run.grid) - 1:
            return checkerboard_page(out, field, run, numbers=numbers, provenance=about)
        # Figures that need the variance at every step show evenly spaced ranks, which are drawn again.
        stride = -(-len(run) // CLOSER)
        some = run.score().argsort(stable=True)[::stride]
        closer = self.draw(
            field, len(some), run.seed, None, x0=run.x0[some], transport=True, schedule=Schedule.every(1)
        )
        return checkerboard_page(out, field, run, numbers=numbers, provenance=about, closer=closer, stride=stride)
