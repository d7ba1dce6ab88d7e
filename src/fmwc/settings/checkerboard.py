"""The Checkerboard under every verb of the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fmwc.checkpoint import load
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.metrics.points import misplaced, squares
from fmwc.recipes.checkerboard import reading
from fmwc.recipes.checkerboard.recipe import PRESETS
from fmwc.recipes.checkerboard.reproduce import RIVALS, reproduce
from fmwc.recipes.recipe import override
from fmwc.recipes.uses.points import Points
from fmwc.report.board import ways_turned
from fmwc.report.checkerboard import WORDS, write_figures, write_report
from fmwc.report.results import write_tables
from fmwc.report.run import NAMES, explained
from fmwc.sampling import PILOT, Trajectory
from fmwc.sampling.scores import of_variance
from fmwc.sampling.trajectory import DISPERSION
from fmwc.settings.setting import Rows, Setting, Show, say_on_stderr, shares, told

__all__ = ["CheckerboardSetting"]

CLOSER = 250  # samples of a demonstration whose variance is computed at every step


class CheckerboardSetting(Setting):
    name, presets = "checkerboard", PRESETS
    bad, kept, others = WORDS.bad, WORDS.kept, ("temporal_ratio",)
    draws, seeds = 64, "0,1,2"
    transported = DISPERSION
    one_thread = True

    def count(self, device: torch.device) -> int:
        return 10_000

    def batch(self, device: torch.device) -> int:
        return 2048

    def pilot(self, device: torch.device) -> int:
        return PILOT

    def demo_recipe(self, changes: Sequence[str]) -> Any:
        """A small network: minutes on two cores."""
        return self.recipe("quick", changes)

    def judge(self, trajectory: Trajectory) -> np.ndarray:
        return misplaced(trajectory.x)

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """Also which points are misplaced, so that fmwc filter has labels."""
        return {**super().table(run), "misplaced": self.judge(run).tolist()}

    def changes(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        here, there = (squares(run.x) for run in (before, after))
        return {
            "square_before": here,
            "square_after": there,
            "turned": [a != b for a, b in zip(here, there, strict=True)],
            "misplaced_before": self.judge(before).tolist(),
            "misplaced_after": self.judge(after).tolist(),
            "distance": (after.x - before.x).norm(dim=1).tolist(),
        }

    def changed(self, table: dict[str, list[Any]]) -> Rows:
        return shares(
            table,
            {
                "in another square": "turned",
                "misplaced before": "misplaced_before",
                "misplaced after": "misplaced_after",
            },
        )

    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        old, new = (torch.stack(run.states or []).cpu().numpy() for run in (before, after))
        return ways_turned(old, new, before.grid.cpu().numpy(), table["time"], table["turned"])

    def shown(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        # The page asks for the best score there is; its samples are ranked among themselves.
        return self.draw(field, count, seed, progress, transport=True, schedule=self.every).ranked_by(DISPERSION)

    def glance(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        """The field's own confidence, with the variance of a few steps: a fifth of the time of all with transport."""
        if field.schedule is None:
            return self.draw(field, count, seed, progress, schedule=self.every, transport=True)
        return self.draw(field, count, seed, progress, schedule=list(field.schedule.times))

    def numbers(self, run: Trajectory, bad: np.ndarray) -> Rows:
        """The short table; where it holds the variance beside the run's own score, it says what each of them is."""
        rows = super().numbers(run, bad)
        beside = [name for name in self.others if any(row[""].startswith(f"AUPRC of {name} ") for row in rows)]
        if of_variance(run.default_score) or run.default_score == DISPERSION or not beside:
            return rows
        own = "confidence" if not run.withheld else "rank"
        said = [{"": f"{run.default_score}: the {own}", "value": explained(run.default_score, NAMES)}]
        said += [{"": f"{name}: the variance", "value": explained(name, NAMES)} for name in beside]
        return [*rows[:-1], *said, rows[-1]]

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        if len(run.times) == len(run.grid) - 1:
            return write_report(out, field, run, numbers=numbers, provenance=about)
        # What the page shows of whole trajectories is drawn again for some samples, evenly along the ranking.
        stride = -(-len(run) // CLOSER)
        some = run.score().argsort(stable=True)[::stride]
        closer = self.draw(field, len(some), run.seed, None, x0=run.x0[some], transport=True, schedule=1)
        return write_report(out, field, run, numbers=numbers, provenance=about, closer=closer, stride=stride)

    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        plain = self.draw(field, count, seed, progress, confidence=False)
        linear = self.draw(field, count, seed, progress, transport=True, schedule=self.every)
        diagonal = self.draw(field, count, seed, progress, confidence="diagonal")
        bad = misplaced(plain.x)
        found = reading.headline(field, linear, plain.x)
        found["auprc_diagonal"] = reading.scores_of(diagonal, bad)
        for name, (rival, schedule) in RIVALS.items():
            run = self.draw(field, count, seed, progress, confidence=rival, schedule=schedule)
            found[f"auprc_{name}"] = reading.scores_of(run, bad)
        found["heads"] = reading.heads_of(linear, bad)
        return told(found, bad, self.bad, linear.score().cpu())

    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        reproduce(recipe, out, device, seeds=seeds, count=count, draws=draws, say=say_on_stderr)
        field = load(out / "models" / "checkerboard", device=device)
        write_figures(out / "figures", field, self.draw(field, count, 2026, None, transport=True, schedule=self.every))

    def subject(self, field: Field, data: str, sizes: Sequence[str]) -> Points:
        if data:
            raise UsageError("checkerboard makes its own data; leave out --data")
        return Points(field, override(Points.sizes_for(field.device.type), sizes, "size"))

    def tables(self, out: Path) -> list[Path]:
        return write_tables(out)
