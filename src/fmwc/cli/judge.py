"""Judge structures from files (`fmwc judge`)."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fmwc.cli.verbs import Judge
from fmwc.crystals import Calculator, Judgement, calculator, judge, mp20, read
from fmwc.crystals.files import write_cifs, write_table
from fmwc.crystals.judge import with_consensus
from fmwc.errors import UsageError
from fmwc.files import Folder, claimed
from fmwc.progress import stages_bar

__all__ = ["judge_structures", "result_rows", "rows_left_out", "summary_rows"]

SHOWN = 50  # printed rows; the files contain all rows
NOVELTY = "the package has no structures to compare with; give --data FOLDER of MP-20, or set FMWC_DATA"


def judge_structures(options: Judge) -> tuple[Judgement, list[Path]]:
    """Judge the structures in files and folders; return the judgement and the files written."""
    names = [name.strip() for name in options.calculator.split(",") if name.strip()]
    if len({*names}) < max(len(names), 1):
        raise UsageError(f"--calculator must name each energy model once; got '{options.calculator}'")
    models = [calculator(name) for name in names]
    out = options.out
    claim = claimed(out, "judge", force=options.force, resumes=True) if out is not None else nullcontext()
    with claim as folder:
        judgements = _judgements(options, models, folder)
        judgement = with_consensus(judgements) if len(judgements) > 1 else judgements[models[0].name]
        written: list[Path] = []
        if out is not None:
            written += write_table(out / "judged", judgement.columns)
            for name, one in judgements.items() if options.relax > 0 else ():
                place = out / ("relaxed" if one.candidates is judgement.candidates else f"relaxed-{name}")
                write_cifs(place, one.candidates, one.columns)
                written.append(place)
    return judgement, written


def _judgements(options: Judge, models: list[Calculator], folder: Folder | None) -> dict[str, Judgement]:
    """Return the judgement by each energy model."""
    data = mp20.folder_given(options.data)
    with stages_bar() as bar:
        structures = read(options.structures)
        return {
            model.name: judge(
                structures,
                calculator=model,
                data=data,
                relax=options.relax,
                cut=options.cut,
                kept=folder.work / "relaxed" if folder else None,
                progress=bar
                if len(models) == 1
                else lambda stage, *rest, name=model.name: bar(f"{stage}, {name}", *rest),
            )
            for model in models
        }


def result_rows(judgement: Judgement) -> list[dict[str, str]]:
    """Return the printed table of the first structures."""
    words = {True: "yes", False: "no", None: "unknown"}
    other = [name for name in judgement.columns if name.startswith("e_above_hull_") and name != "e_above_hull_raw"]

    def energy(value: Any) -> str:
        return "" if value is None or math.isnan(value) else f"{value:.3f}"

    def row_of(row: dict[str, Any]) -> dict[str, str]:
        twin = f": {row['twin']}{f' ({place})' if (place := row['twin_split']) else ''}" if row["twin"] else ""
        return {
            "structure": str(row["name"]),
            "formula": str(row["formula"]),
            "above hull, eV/atom": energy(row["e_above_hull"]),
            **{f"by {name.removeprefix('e_above_hull_')}": energy(row[name]) for name in other},
            "phases": f"{row['competing_phases']} ({row['own_phases']} own)",
            "stable": words[row["stable"]],
            "valid": words[row["valid"]],
            "novel": words[row["novel"]] + twin,
            "remark": row["problem"] or (row["sparse_hull"] if row["stable"] is None else ""),
        }

    return [row_of(row) for row in judgement.rows()[:SHOWN]]


def summary_rows(judgement: Judgement, cut: float) -> list[dict[str, str]]:
    """Return the printed summary of all structures."""
    summary = judgement.summary()
    descriptions = {
        "distances_ok": "valid by the distance rule",
        "valid": "valid (distances, charges, density)",
        "unique": "unique",
        "novel": "novel",
        "stable": "stable",
        "metastable": f"metastable (≤ {cut:g} eV/atom)",
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
            unknown = f"; unknown for {count}" if (count := summary.get(f"{name}_unknown")) else ""
            rows[words] = f"{summary[name]} ({summary[f'{name}_share']:.1%}){unknown}"
    if summary["stable_unknown"]:
        rows["stable is unknown"] = "where the references of the chemical system are too few (column sparse_hull)"
    if "consensus" in judgement.columns:
        agreed = judgement["consensus"]
        rows[f"metastable by all models (≤ {cut:g} eV/atom)"] = (
            f"{agreed.count(True)} ({agreed.count(True) / max(len(agreed), 1):.1%}); by none {agreed.count(False)}; "
            f"disputed or not judged {agreed.count(None)}"
        )
    if "converged" in judgement.columns:
        rows["relaxations that converged"] = f"{sum(map(bool, judgement['converged']))} of {len(judgement)}"
    if summary["novel"] is None:
        rows["novel is unknown"] = NOVELTY
    rows |= {"note": "; ".join(judgement.notes)} if judgement.notes else {}
    return [{"": name, "value": value} for name, value in rows.items()]


def rows_left_out(judgement: Judgement, out: Path | None) -> str:
    """Return a line about the rows that are not printed; empty if all are."""
    if len(judgement) <= SHOWN:
        return ""
    place = f"all are in {out / 'judged.csv'}" if out is not None else "print all with --json, or write all with --out"
    return f"the first {SHOWN} of {len(judgement)} structures; {place}"
