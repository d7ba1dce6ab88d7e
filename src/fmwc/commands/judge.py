"""Judging structures from files: what `fmwc judge` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fmwc.crystals import Judgement, hull_for, judge, mp20, read
from fmwc.crystals import calculator as load_calculator
from fmwc.crystals.files import write_cifs, write_table
from fmwc.files import claimed
from fmwc.progress import stages_bar

__all__ = ["judge_files", "judged_rows", "judged_summary"]

SHOWN = 50  # rows printed; the files hold all rows


def judge_files(
    structures: Sequence[Path],
    out: Path | None = None,
    *,
    calculator: str = "chgnet",
    relax: int = 0,
    data: str = "",
    force: bool = False,
) -> tuple[Judgement, list[Path]]:
    """Judge the structures in files and folders; return the judgement and the files written.

    Arguments:
        structures: CIF, POSCAR or extended XYZ files, or folders of them.
        out: A folder for the table, as CSV and Parquet, and for relaxed structures.
        calculator: The energy model, by name or as `module:function`.
        relax: The maximum number of steps by which structures are relaxed first.
        data: Folder of MP-20, for its hull and for novelty with respect to its training set.
        force: Write into a folder that is not empty.
    """
    model = load_calculator(calculator)
    with claimed(out, "judge", force=force) if out is not None else nullcontext():
        with stages_bar() as bar:
            hull = hull_for(model.name, data or None, progress=bar)
            training = mp20.load(data) if data else None
            found = judge(read(structures), calculator=model, hull=hull, training=training, relax=relax, progress=bar)
        written: list[Path] = []
        if out is not None:
            written += write_table(out / "judged", found.columns)
            if relax > 0:
                write_cifs(out / "relaxed", found.candidates, found.columns)
                written.append(out / "relaxed")
    return found, written


def judged_rows(judgement: Judgement) -> list[dict[str, str]]:
    """Return a printable table of the first structures."""

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


def judged_summary(judgement: Judgement) -> list[dict[str, str]]:
    """Return a printable summary of all structures."""
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
    return [{"": name, "value": value} for name, value in rows.items()]
