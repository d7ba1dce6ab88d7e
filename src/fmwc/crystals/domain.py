"""Crystals, judged by an energy model. A sample fails if it is too far above the hull or cannot be judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fmwc.checks import RowEcho, run_checks
from fmwc.crystals import CALCULATORS, Controls, Judgement, calculator, judge, mp20
from fmwc.crystals.figures import edited_pairs, sorted_by_confidence
from fmwc.crystals.files import FORMATS, links_to, write_structures, write_table
from fmwc.crystals.judge import SHARES
from fmwc.crystals.matching import MODES, USEFUL, changes, chemistry_changed, coordinate_rmsd, success
from fmwc.crystals.recipe import EVERY, PRESETS, READ_BY, SCORE, batch_for
from fmwc.crystals.report import write_report
from fmwc.crystals.structures import CHANNELS, DOUBT, Candidate, candidates, crystals_of
from fmwc.data.arrays import fingerprint
from fmwc.domains import EditDefault, Rows, ShippedDomain, Show, shares
from fmwc.errors import pick
from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.metrics.ranking import INTERVALS, ranking_text, rate, rate_kept
from fmwc.progress import say_on_stderr
from fmwc.randomness import derive
from fmwc.report.page import png
from fmwc.report.run import ordering_of
from fmwc.sampling import Trajectory, needs_variance
from fmwc.sampling.trajectory import names_of

__all__ = ["CrystalDomain"]

ATOM_EVALUATIONS = 4  # of the doubt, if the checkpoint has no echo
CHANGES = {  # of edits, by their name in tables
    "same": "the same crystal",
    "polymorph": "polymorph (another crystal of the formula)",
    "substitution": "substitution (another formula on the prototype)",
    "other": "another formula and prototype",
    "": "not comparable",
}
# Time and standard deviation of the noise of edits by channel (None: all channels), as chosen on validation seed 100 by
# the share of useful edits (docs/how-to/edits.md).
EDITS: dict[str | None, EditDefault] = {
    "type": EditDefault(0.4, 0.3),
    "coord": EditDefault(0.2, 0.3),
    "lattice": EditDefault(0.4, 1.0),
    None: EditDefault(0.4, 1.0),
}


class CrystalDomain(ShippedDomain):
    """Crystals.

    Arguments:
        calculator: The energy model that judges samples, by name or as `module:function`.
        controls: Restrictions of the crystals that are drawn.
    """

    name, presets = "crystals", PRESETS
    bad, kept = "above 0.1 eV/atom or not judged", 0.1
    counts, pilots = (2_500, 60), (500, 20)
    large, compact, variance = None, True, SCORE  # all samples are judged together
    every, reading, judges = EVERY, READ_BY, True
    formats, edits, page_needs_field = tuple(FORMATS), EDITS, False

    def __init__(self, calculator: str = "chgnet", controls: Controls | None = None) -> None:
        self.calculator, self.controls = calculator, controls or Controls()
        self._latest: tuple[tuple[str, str | Path | None], Judgement] | None = None  # by the samples and the data
        self._links: list[str] = []  # addresses of the structures' files

    def with_judge(self, judge: str) -> ShippedDomain:
        if judge and ":" not in judge:
            pick(CALCULATORS, judge, "calculator")
        return CrystalDomain(judge, self.controls) if judge else self

    def with_controls(self, controls: Mapping[str, str]) -> CrystalDomain:
        return CrystalDomain(self.calculator, Controls(**controls))

    def effect_of_controls(self, field: Field) -> list[str]:
        return self.controls.effect(field)

    def require_judge(self, field: Field) -> None:
        calculator(self.calculator)

    def with_doubt(self, field: Field, run: Trajectory, progress: Show) -> Trajectory:
        """Add the doubt of each atom: its echo, with the noise of the reference's check."""
        echo = field.reference.checks.get("echo") if field.reference is not None else None
        check = RowEcho(echo.times, echo.draws) if echo is not None else RowEcho.planned(ATOM_EVALUATIONS)
        assert field.space is not None
        given = field, field.space, run.x, run.cond, run.seed, 0
        found = run_checks({DOUBT: check}, *given, batch=self.batch(field.device), progress=progress)
        return replace(run, evidence={**run.evidence, **found})

    def batch(self, device: torch.device) -> int:
        return batch_for(device)

    def conditions(
        self, field: Field, count: int, label: int | None = None, seed: int = 0, first: int = 0
    ) -> dict[str, Tensor]:
        """Draw numbers of atoms from their distribution in the training data, and apply the controls."""
        super().conditions(field, count, label)
        return self.controls.conditions(field, count, derive(seed, first) if first else seed)

    def judgement(self, run: Trajectory, data: str = "") -> Judgement:
        """Judge the structures of a run. Novelty is judged if `data` or FMWC_DATA names a folder of known ones."""
        folder = mp20.folder_given(data)
        key = fingerprint(run.x), folder
        if self._latest is None or self._latest[0] != key:
            say_on_stderr(f"judging {len(run)} structures")
            self._latest = key, judge(crystals_of(run), calculator=self.calculator, data=folder)
        return self._latest[1]

    def judge(self, trajectory: Trajectory) -> np.ndarray:
        return ~self.judgement(trajectory).good

    def compare_edits(self, before: Trajectory, after: Trajectory, channel: str | None) -> dict[str, list[Any]]:
        """Return formulas, what changed, and energies; success as a chemist sees it, and by the paper's rules."""
        old = self.judgement(before)
        new = self.judgement(after)  # the second, because only the latest judgement is cached, and it is used again
        seeds, edits = crystals_of(before), crystals_of(after)
        found = changes(old.candidates, new.candidates)
        moved, other = coordinate_rmsd(seeds, edits), chemistry_changed(seeds, edits)
        table: dict[str, list[Any]] = {
            "formula_before": old["formula"],
            "formula_after": new["formula"],
            "change": [change.kind for change in found],
            "matched_rmsd": [change.rmsd for change in found],
            "useful": [
                None if good is None and change.kind in USEFUL else change.kind in USEFUL and good
                for change, good in zip(found, new["metastable"], strict=True)
            ],
            "chemistry_changed": other.tolist(),
            "coord_rmsd": moved.tolist(),
            "e_above_hull_before": old["e_above_hull"],
            "e_above_hull_after": new["e_above_hull"],
            "metastable_before": old["metastable"],
            "metastable_after": new["metastable"],
        }
        modes = {mode.channel: name for name, mode in MODES.items()}
        if channel in modes:
            energies = old["e_above_hull"], new["e_above_hull"]
            good = success(modes[channel], seeds, edits, *energies).tolist()
            table |= {"mode": [modes[channel]] * len(good), "success": good}
        return table

    def summarise_edits(self, table: dict[str, list[Any]]) -> Rows:
        pairs = list(zip(table["e_above_hull_before"], table["e_above_hull_after"], strict=True))
        lower = [after < before if np.isfinite([before, after]).all() else None for before, after in pairs]
        kinds, matched = Counter(table["change"]), np.array(table["matched_rmsd"], float)
        matched = matched[np.isfinite(matched)]
        described = [f"{kinds[kind]} {words}" for kind, words in CHANGES.items() if kinds[kind]]
        columns = {"metastable before": "metastable_before", "metastable after": "metastable_after"}
        columns["useful: metastable, and a polymorph or a substitution"] = "useful"
        if "success" in table:
            columns[f"success by the paper's rules for {table['mode'][0]}"] = "success"
        columns |= {"another formula": "chemistry_changed", "lower above the hull": "lower"}
        distance = f"{np.median(matched):.3f} Å (median of {len(matched)})" if len(matched) else "no atoms match"
        values = {
            "change": ", ".join(described),
            "matched atoms moved by (RMSD)": distance,
            "paired by index, moved by (RMSD, fractions of the cell)": f"{np.mean(table['coord_rmsd']):.3f}",
        }
        return [
            *({"": name, "value": value} for name, value in values.items()),
            *shares({**table, "lower": lower}, columns),
        ]

    def draw_edits(self, before: Trajectory, after: Trajectory, table: dict[str, list[Any]]) -> Figure:
        energies = table["e_above_hull_before"], table["e_above_hull_after"]
        pairs = crystals_of(before), crystals_of(after)
        return edited_pairs(*pairs, *energies, table["sample"], table["time"], table["useful"])

    def with_files(
        self, run: Trajectory, table: Mapping[str, Sequence[str]], folder: Path, page: Path
    ) -> CrystalDomain:
        """Use the results of the judge, if the table has all of them, and link to a file of each structure."""
        domain, names = CrystalDomain(self.calculator, self.controls), table.get("name", run.names)
        if {*SHARES, "formula", "atoms", "e_above_hull", "problem"} <= table.keys():
            columns = {name: [_value(cell) for cell in column] for name, column in table.items()}
            columns |= {name: list(table[name]) for name in ("name", "formula", "problem")}
            domain._latest = (
                (fingerprint(run.x), mp20.folder_given()),
                Judgement(columns, tuple(candidates(crystals_of(run)))),
            )
        domain._links = links_to(folder, page, names)
        return domain

    def numbers(self, run: Trajectory, bad: np.ndarray | None = None) -> Rows:
        bad = self.judge(run) if bad is None else bad
        summary = self.judgement(run).summary()
        rows = [
            {"": "structures", "value": f"{summary['structures']}; {summary['problems']} could not be judged"},
            {"": "mean energy above the hull, eV/atom", "value": f"{summary['mean_e_above_hull']:.3f}"},
            {"": "valid by the distance rule", "value": f"{summary['distances_ok_share']:.1%}"},
            {"": "metastable (≤ 0.1 eV/atom)", "value": rate(~bad)},
        ]
        if unknown := summary["metastable_unknown"]:
            rows.append({"": "metastable is unknown", "value": f"{unknown}: references are missing (sparse_hull)"})
        if 0 < bad.sum() < len(bad):
            score, floor = run.score().cpu(), (~bad).mean()
            value = ranking_text(-score, ~bad, "metastable")
            rows += [
                {"": f"metastable, surest {self.kept:.0%}", "value": rate_kept(score, ~bad, self.kept)},
                {"": f"AUPRC of {run.default_score} (floor {floor:.2f})", "value": value},
            ]
        return [*rows, *self.notes(run), {"": "in brackets", "value": INTERVALS}]

    def page(self, field: Field, run: Trajectory, out: Path, numbers: Rows, about: dict[str, str]) -> Path:
        return write_report(out, run, self.judgement(run), numbers=numbers, provenance=about, links=self._links)

    def table(self, run: Trajectory) -> dict[str, list[Any]]:
        """Return one row per structure: name, formula, confidence, and the judge's results."""
        columns = dict(self.judgement(run).columns)
        first = {name: columns.pop(name) for name in ("name", "formula", "atoms")}
        confidence = self.confidence_columns(run)
        if confidence and len(run.times):
            single = needs_variance(run.default_score) and len(names_of(run.default_score)) == 1
            name = run.default_score.rpartition("/")[2] if single else SCORE
            confidence |= {f"score_{c}": run.score(f"{c}/{name}").tolist() for c in CHANNELS}
        return {**first, **confidence, **columns}

    def write_samples(self, run: Trajectory, out: Path, format: str = "", symmetrise: float = 0.0) -> list[Path]:
        """Write the structures, the table in both formats, and a picture."""
        table = self.table(run)
        structures: Sequence[Candidate] = self.judgement(run).candidates
        if DOUBT in run.evidence:
            rows = run.evidence[DOUBT].cpu().double().numpy()
            structures = [replace(one, doubt=row[: len(one)]) for one, row in zip(structures, rows, strict=True)]
        written = [run.compact().save(out / "samples.safetensors")]
        written += write_structures(out, structures, table, format, symmetrise)
        written += write_table(out / "samples", table)
        return [*written, *self.pictures(run, table, out)]

    def pictures(self, run: Trajectory, table: Mapping[str, Sequence[Any]], out: Path) -> list[Path]:
        """Write crystals.png, most confident first."""
        if "rank" not in table:
            return []
        level, energy = ordering_of(run), np.array(table["e_above_hull"], float)
        order = level.values.cpu().numpy(), energy, np.array(table["distances_ok"], bool)
        picture = sorted_by_confidence(crystals_of(run), *order, run.score().cpu().numpy(), label=level.label)
        return [write_bytes(out / "crystals.png", png(picture))]


def _value(cell: str) -> Any:
    """Return a cell of a table of the judge: true, false, a number, text, or `None` if it is empty."""
    word = cell.strip().lower()  # pandas and spreadsheets write True and TRUE
    if word in ("true", "false", ""):
        return {"true": True, "false": False, "": None}[word]
    try:
        return float(cell)
    except ValueError:
        return cell
