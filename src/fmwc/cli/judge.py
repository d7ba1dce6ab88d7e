"""Judge structures from files (`fmwc judge`)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fmwc.cli.verbs import Judge
from fmwc.crystals import Judgement, calculator, hull_for, judge, mp20, read
from fmwc.crystals.files import write_cifs, write_table
from fmwc.files import claimed
from fmwc.progress import stages_bar

__all__ = ["judge_structures", "result_rows", "summary_rows"]

SHOWN = 50  # printed rows; the files contain all rows


def judge_structures(options: Judge) -> tuple[Judgement, list[Path]]:
    """Judge the structures in files and folders; return the judgement and the files written."""
    model = calculator(options.calculator)
    out, data = options.out, options.data or None
    claim = claimed(out, "judge", force=options.force, resumes=True) if out is not None else nullcontext()
    with claim as folder:
        with stages_bar() as bar:
            hull = hull_for(model.name, data, progress=bar)
            training = mp20.load(data) if data else None
            structures = read(options.structures)
            judgement = judge(
                structures,
                calculator=model,
                hull=hull,
                training=training,
                relax=options.relax,
                kept=folder.work / "relaxed" if folder else None,
                progress=bar,
            )
        written: list[Path] = []
        if out is not None:
            written += write_table(out / "judged", judgement.columns)
            if options.relax > 0:
                write_cifs(out / "relaxed", judgement.candidates, judgement.columns)
                written.append(out / "relaxed")
    return judgement, written


def result_rows(judgement: Judgement) -> list[dict[str, str]]:
    """Return the printed table of the first structures."""

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


def summary_rows(judgement: Judgement) -> list[dict[str, str]]:
    """Return the printed summary of all structures."""
    summary = judgement.summary()
    descriptions = {
        "distances_ok": "valid by the distance rule",
        "valid": "valid (distances, charges, density)",
        "unique": "unique",
        "novel": "novel",
        "stable": "stable",
        "metastable": "metastable (≤ 0.1 eV/atom)",
        "sun": "stable, unique and novel",
        "msun": "metastable, unique and novel",
    }
    mean = summary["mean_e_above_hull"]
    rows = {
        "could not be judged": str(summary["problems"]),
        "mean energy above the hull, eV/atom": "—" if math.isnan(mean) else f"{mean:.3f}",
    }
    for name, words in descriptions.items():
        if summary[name] is not None:
            rows[words] = f"{summary[name]} ({summary[f'{name}_share']:.1%})"
    return [{"": name, "value": value} for name, value in rows.items()]
