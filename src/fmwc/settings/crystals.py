"""Crystals under every verb of the command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fmwc.data import fingerprint, mp20
from fmwc.data.crystals import Crystals
from fmwc.errors import UsageError, pick
from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.metrics.crystals import CALCULATORS, Judgement, calculator
from fmwc.metrics.crystals.edits import MODES, chemistry_changed, coordinate_rmsd, success
from fmwc.metrics.headline import INTERVALS, ranking_text, rate, rate_kept
from fmwc.randomness import derive
from fmwc.recipes.crystals.reading import CHANNELS, crystals_of, good_of, judged, read_run
from fmwc.recipes.crystals.recipe import EVERY, PRESETS, READ_BY, SCORE, Mp20, batch_for
from fmwc.recipes.crystals.reproduce import reproduce
from fmwc.recipes.recipe import override
from fmwc.recipes.uses.crystals import Crystals as CrystalSubject
from fmwc.report import figures
from fmwc.report.crystal_files import write_cifs, write_extxyz, write_table
from fmwc.report.crystals import write_figures, write_report
from fmwc.report.crystals_drawn import edited_pairs, sorted_by_confidence
from fmwc.report.paper.crystals import write_tables
from fmwc.report.run import level_of
from fmwc.sampling import Trajectory, needs_variance
from fmwc.sampling.scores import names_of
from fmwc.settings.setting import Rows, Setting, Show, say_on_stderr, shares, told

__all__ = ["CrystalSetting"]

FORMATS = dict.fromkeys(("cif", "extxyz"))


class CrystalSetting(Setting):
    """Creates the setting.

    Arguments:
        calculator: The energy model that judges, by name.
    """

    name, presets = "crystals", PRESETS
    bad, kept = "above 0.1 eV/atom or not to be judged", 0.1
    large, compact, variance = None, True, SCORE  # they are judged together
    draws, seeds, every, reading, judges, reproduced = 5, "0", EVERY, READ_BY, True, 2_500

    def __init__(self, calculator: str = "chgnet") -> None:
        self.calculator = calculator
        self._latest: tuple[str, Judgement] | None = None

    def judged_by(self, judge: str) -> Setting:
        if ":" not in judge:
            pick(CALCULATORS, judge, "calculator")
        return CrystalSetting(judge)

    def require_judge(self, field: Field) -> None:
        calculator(self.calculator)

    def count(self, device: torch.device) -> int:
        return 2_500 if device.type == "cuda" else 60

    def batch(self, device: torch.device) -> int:
        return batch_for(device)

    def pilot(self, device: torch.device) -> int:
        return 500 if device.type == "cuda" else 20

    def conditions(self, field: Field, count: int, label: int | None = None, seed: int = 0) -> dict[str, Tensor]:
        """As many atoms as the crystals have that the network was trained on."""
        super().conditions(field, count, label)
        network: Any = field.network
        return {"atoms": network.draw_sizes(count, derive(seed, "atoms"))}

    def judgement(self, run: Trajectory, data: str = "") -> Judgement:
        """What the energy model says of a run's structures; novelty where the training set is at hand."""
        key = fingerprint(run.x)
        if self._latest is None or self._latest[0] != key:
            say_on_stderr(f"judging {len(run)} structures")
            self._latest = key, judged(run, _training(data), self.calculator)
        return self._latest[1]

    def judge(self, trajectory: Trajectory) -> np.ndarray:
        return ~good_of(self.judgement(trajectory))

    def changes(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        """Formulas, how far atoms moved, energies, and success by the paper's rules where the channel has a mode."""
        here, there = self.judgement(before), self.judgement(after)  # the later one is kept: it is asked for again
        seeds, edits = crystals_of(before), crystals_of(after)
        moved, other = coordinate_rmsd(seeds, edits), chemistry_changed(seeds, edits)
        table: dict[str, list[Any]] = {
            "formula_before": here["formula"],
            "formula_after": there["formula"],
            "chemistry_changed": other.tolist(),
            "coord_rmsd": moved.tolist(),
            "e_above_hull_before": here["e_above_hull"],
            "e_above_hull_after": there["e_above_hull"],
        }
        modes = {mode.channel: name for name, mode in MODES.items()}
        if channel in modes:
            energies = here["e_above_hull"], there["e_above_hull"]
            good = success(modes[channel], seeds, edits, *energies).tolist()
            table |= {"mode": [modes[channel]] * len(good), "success": good}
        return table

    def changed(self, table: dict[str, list[Any]]) -> Rows:
        pairs = list(zip(table["e_above_hull_before"], table["e_above_hull_after"], strict=True))
        lower = [after < before if np.isfinite([before, after]).all() else None for before, after in pairs]
        columns = {"another formula": "chemistry_changed", "lower above the hull": "lower"}
        if "success" in table:
            columns[f"success by the paper's rules for {table['mode'][0]}"] = "success"
        moved = {"": "atoms moved by (RMSD, fractions of the cell)", "value": f"{np.mean(table['coord_rmsd']):.3f}"}
        return [moved, *shares({**table, "lower": lower}, columns)]

    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        energies = table["e_above_hull_before"], table["e_above_hull_after"]
        good = table.get("success", [False] * len(after))
        return edited_pairs(crystals_of(before), crystals_of(after), *energies, table["sample"], table["time"], good)

    def shown(self, field: Field, count: int, seed: int, progress: Show) -> Trajectory:
        return self.draw(field, count, seed, progress)

    def numbers(self, run: Trajectory, bad: np.ndarray) -> Rows:
        found = self.judgement(run).summary()
        rows = [
            {"": "structures", "value": f"{found['structures']}, of which {found['problems']} could not be judged"},
            {"": "mean energy above the hull, eV/atom", "value": f"{found['mean_e_above_hull']:.3f}"},
            {"": "valid by the distance rule", "value": f"{found['distances_ok_share']:.1%}"},
            {"": "metastable (≤ 0.1 eV/atom)", "value": rate(~bad)},
        ]
        if 0 < bad.sum() < len(bad):
            score, floor = run.score().cpu(), (~bad).mean()
            value = ranking_text(-score, ~bad, "metastable")
            rows += [
                {"": f"metastable, surest {self.kept:.0%}", "value": rate_kept(score, ~bad, self.kept)},
                {"": f"AUPRC of {run.default_score} (floor {floor:.2f})", "value": value},
            ]
        return [*rows, *self.noted(run), {"": "in brackets", "value": INTERVALS}]

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        return write_report(out, run, self.judgement(run), numbers=numbers, provenance=about)

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """One row a structure: what it is, how sure the model is, and what the judge says."""
        columns = dict(self.judgement(run).columns)
        first = {name: columns.pop(name) for name in ("name", "formula", "atoms")}
        own = self.sureness(run)
        if own and len(run.times):
            single = needs_variance(run.default_score) and len(names_of(run.default_score)) == 1
            name = run.default_score.rpartition("/")[2] if single else SCORE
            own |= {f"score_{c}": run.score(f"{c}/{name}").tolist() for c in CHANNELS}
        return {**first, **own, **columns}

    def write_samples(self, run: Trajectory, out: Path, format: str = "") -> list[Path]:
        """Structures as CIF files or one extended XYZ, the table as CSV and Parquet, and a picture, surest first."""
        self.check_format(format)
        judgement, table = self.judgement(run), self.table(run)
        written = [run.compact().save(out / "samples.safetensors")]
        if format != "extxyz":
            write_cifs(out / "cif", judgement.candidates, table)
            written.append(out / "cif")
        else:
            written.append(write_extxyz(out / "samples.xyz", judgement.candidates, table))
        written += write_table(out / "samples", table)
        if "rank" in table:
            level, energy = level_of(run), np.array(judgement["e_above_hull"], float)
            order = level.values.cpu().numpy(), energy, np.array(judgement["distances_ok"], bool)
            score = run.score().cpu().numpy()
            picture = sorted_by_confidence(crystals_of(run), *order, score=score, called=level.called)
            written.append(write_bytes(out / "crystals.png", figures.png(picture)))
        return written

    def check_format(self, format: str) -> None:
        pick(FORMATS, format or "cif", "format")

    def evaluate(self, field: Field, count: int, seed: int, data: str, progress: Show) -> dict[str, Any]:
        run = self.draw(field, count, seed, progress, schedule=self.every)
        few = min(count, batch_for(field.device))
        plain = self.draw(field, few, seed, None, confidence=False)  # a shorter run starts with the same structures
        same = all(torch.equal(run.x[c][:few], plain.x[c]) for c in CHANNELS)
        found = {"bit_for_bit": same, **read_run(run, self.judgement(run, data))}
        return told(found, ~self.judge(run), "metastable", -run.score().cpu())

    def reproduce(
        self, recipe: Any, out: Path, device: torch.device, seeds: Sequence[int], *, count: int, draws: int, only: str
    ) -> None:
        if not isinstance(recipe, Mp20):
            raise UsageError("reproduce takes a recipe of a flow")
        options: dict[str, Any] = {"count": count, "draws": draws, "only": only, "say": say_on_stderr}
        reproduce(recipe, out, device, seeds=seeds, calculator=self.calculator, **options)
        if (out / "draws" / f"retrofit-{seeds[0]}.safetensors").exists() and (out / "cells").is_dir():
            write_figures(out)

    def subject(self, field: Field, data: str, sizes: Sequence[str]) -> CrystalSubject:
        """Not asked for its judge here: drawing needs none."""
        chosen = override(CrystalSubject.sizes_for(field.device.type), sizes, "size")
        return CrystalSubject(field, chosen, self.calculator, data)

    def tables(self, out: Path) -> list[Path]:
        return write_tables(out)


def _training(data: str = "") -> Crystals | None:
    """The training set, where one is named: novelty is judged against it."""
    return mp20.load(data or None) if data or os.environ.get("FMWC_DATA") else None
