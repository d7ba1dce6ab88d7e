"""Judging structures from files: what `fmwc judge` does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fmwc.data import mp20
from fmwc.metrics.crystals import Calculator, Judgement, hull_for, judge, read
from fmwc.report.crystal_files import write_cifs, write_table

__all__ = ["judge_files", "judged_rows", "judged_summary", "write_judged"]

SHOWN = 50  # rows on the terminal; the files hold all


def judge_files(
    structures: Sequence[Path], model: Calculator, relax: int, data: str, progress: Callable[[str, int, int], None]
) -> Judgement:
    """Judges files and folders; against the hull and the training set in `data`, where it is given."""
    hull = hull_for(model.name, data or None, progress=progress)
    training = mp20.load(data) if data else None
    return judge(read(structures), calculator=model, hull=hull, training=training, relax=relax, progress=progress)


def write_judged(judgement: Judgement, out: Path, relaxed: bool = False) -> list[Path]:
    """Writes the table, as CSV and Parquet, and the structures where they were relaxed."""
    written = list(write_table(out / "judged", judgement.columns))
    if relaxed:
        write_cifs(out / "relaxed", judgement.candidates, judgement.columns)
        written.append(out / "relaxed")
    return written


def judged_rows(judgement: Judgement) -> list[dict[str, str]]:
    """The first structures, in words."""

    def energy(value: Any) -> str:
        return "" if value is None or math.isnan(value) else f"{value:.3f}"

    return [
        {
            "structure": str(row["name"]),
            "formula": str(row["formula"]),
            "above hull, eV/atom": energy(row["e_above_hull"]),
            "valid": "yes" if row["valid"] else "no",
            "novel": {True: "yes", False: "no", None: ""}[row["novel"]],
            "problem": row["problem"],
        }
        for row in judgement.rows()[:SHOWN]
    ]


def judged_summary(judgement: Judgement) -> dict[str, str]:
    """What there is to say of all of them."""
    found = judgement.summary()
    words = {
        "distances_ok": "valid by the distance rule",
        "valid": "valid (distances, charges, density)",
        "unique": "unique",
        "novel": "novel",
        "stable": "stable",
        "metastable": "metastable (≤ 0.1 eV/atom)",
        "sun": "stable, unique and novel",
        "msun": "metastable, unique and novel",
    }
    rows = {"could not be judged": str(found["problems"])}
    mean = found["mean_e_above_hull"]
    rows["mean energy above the hull, eV/atom"] = "—" if math.isnan(mean) else f"{mean:.3f}"
    rows |= {w: f"{found[n]} ({found[f'{n}_share']:.1%})" for n, w in words.items() if found[n] is not None}
    return rows
