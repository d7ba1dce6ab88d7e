"""Judge structures from files (`fmwc judge`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.cli.verbs import Judge
from fmwc.crystals import Calculator, Candidate, Judgement, calculator, judge, mp20, read, validity
from fmwc.crystals.files import write_cifs, write_table
from fmwc.crystals.fingerprints import featurizers, fingerprints
from fmwc.crystals.judge import with_consensus
from fmwc.crystals.statistics import properties, real_structures, statistics
from fmwc.data import arrays
from fmwc.errors import UsageError
from fmwc.files import cache_folder, fresh, moved, write_json
from fmwc.progress import stages_bar

__all__ = ["judge_structures", "result_rows", "rows_left_out", "statistics_rows", "summary_rows"]

SHOWN = 50  # printed rows; the files contain all rows
NOVELTY = "the package has no structures to compare with; give --data FOLDER of MP-20, or set FMWC_DATA"


Rows = list[dict[str, str]]


def judge_structures(options: Judge) -> tuple[Judgement, list[Path], Rows]:
    """Judge the structures in files and folders.

    Returns the judgement, the files written, and the rows of the statistics, if requested.
    """
    names = [name.strip() for name in options.calculator.split(",") if name.strip()]
    if len({*names}) < max(len(names), 1):
        raise UsageError(f"--calculator must name each energy model once; got '{options.calculator}'")
    if options.statistics:
        _require_statistics(options)
    models = [calculator(name) for name in names]
    out = options.out
    with fresh(out, force=options.force) if out is not None else nullcontext() as folder:
        judgements = _judgements(options, models)
        judgement = with_consensus(judgements) if len(judgements) > 1 else judgements[models[0].name]
        written: list[Path] = []
        if folder is not None:
            written += write_table(folder / "judged", judgement.columns)
            for name, one in judgements.items() if options.relax > 0 else ():
                place = folder / ("relaxed" if one.candidates is judgement.candidates else f"relaxed-{name}")
                write_cifs(place, one.candidates, one.columns)
                written.append(place)
        compared: Rows = []
        if options.statistics:
            numbers = _statistics(options, judgement)
            compared = statistics_rows(numbers)
            if folder is not None:
                written.append(write_json(folder / "statistics.json", numbers))
    return judgement, moved(written, folder, out) if out is not None and folder is not None else [], compared


# ---- statistics ------------------------------------------------------------------------------------------------------

MEASURES = {  # label, factor, digits
    "structures": ("structures", 1, 0),
    "structurally_valid": ("structurally valid, %", 100, 1),
    "compositionally_valid": ("compositionally valid (SMACT), %", 100, 1),
    "coverage_recall": ("coverage recall, %", 100, 1),
    "coverage_precision": ("coverage precision, %", 100, 1),
    "wasserstein_density": ("Wasserstein distance of densities, g/cm³", 1, 3),
    "wasserstein_elements": ("Wasserstein distance of numbers of elements", 1, 3),
    "wasserstein_energy": ("Wasserstein distance of energies, eV/atom", 1, 3),
    "p1_0.1": ("without symmetry (P1) at 0.1 Å, %", 100, 1),
    "p1_0.01": ("without symmetry (P1) at 0.01 Å, %", 100, 1),
    "space_groups_0.1": ("different space groups at 0.1 Å", 1, 0),
    "space_groups_0.01": ("different space groups at 0.01 Å", 1, 0),
}


def _require_statistics(options: Judge) -> None:
    """Raise an error if the statistics lack data or packages, before any work."""
    if mp20.folder_given(options.data) is None:
        raise UsageError(
            "--statistics compares with the test split of a data set; give --data FOLDER, or set FMWC_DATA"
        )
    featurizers()


def _statistics(options: Judge, judgement: Judgement) -> dict[str, dict[str, float | None]]:
    """Return the statistics of the structures as given and, with --relax, after relaxation."""
    data, jobs = mp20.folder_given(options.data), options.jobs
    with stages_bar() as bar:
        crystals, real = real_structures(data)
        if options.calculator.split(",")[0].strip() != "chgnet":  # the stored energies are CHGNet's
            real["energy_per_atom"] = [math.nan] * len(crystals)
        kept = cache_folder("fingerprints") / f"{arrays.fingerprint(crystals.numbers, crystals.coords)}.npz"
        theirs = fingerprints(crystals, jobs=jobs, kept=kept, progress=bar)
        sets: dict[str, tuple[Sequence[Candidate], list[float]]] = {}
        if options.relax > 0:
            sets["as given"] = read(options.structures), judgement["energy_raw"]
        sets["relaxed" if options.relax > 0 else "as given"] = judgement.candidates, judgement["energy_per_atom"]
        found = {}
        for name, (given, energies) in sets.items():
            ours = fingerprints(given, jobs=jobs, progress=bar)
            apart = [validity(one).apart for one in given]
            columns: dict[str, Any] = {"apart_ok": apart, "energy_per_atom": energies, **properties(given)}
            found[name] = {k: plain(v) for k, v in statistics(columns, real, ours, theirs).items()}
        itself = statistics(real, real)
        found["test split"] = {k: plain(v) for k, v in itself.items() if not k.startswith(("wass", "space_group_d"))}
    return found


def plain(value: float) -> float | None:
    """Return a number for a JSON file."""
    return value if math.isfinite(value) else None


def statistics_rows(numbers: dict[str, dict[str, float | None]]) -> Rows:
    """Return one row per measure and one column per set."""

    def cell(value: float | None, factor: int, digits: int) -> str:
        return "" if value is None else f"{factor * value:.{digits}f}"

    return [
        {"": label, **{name: cell(found.get(key), factor, digits) for name, found in numbers.items()}}
        for key, (label, factor, digits) in MEASURES.items()
    ]


# ---- the judgement ---------------------------------------------------------------------------------------------------


def _judgements(options: Judge, models: list[Calculator]) -> dict[str, Judgement]:
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
                progress=bar
                if len(models) == 1
                else lambda stage, *rest, name=model.name: bar(f"{stage}, {name}", *rest),
            )
            for model in models
        }


def result_rows(judgement: Judgement) -> list[dict[str, str]]:
    """Return the printed table of the first structures."""
    words = {True: "yes", False: "no", None: "unknown"}
    first = "energy_per_atom_"  # of the columns of each further model
    other = [name.removeprefix(first) for name in judgement.columns if name.startswith(first)]

    def energy(value: Any) -> str:
        return "" if value is None or math.isnan(value) else f"{value:.3f}"

    def row_of(row: dict[str, Any]) -> dict[str, str]:
        twin = f": {row['twin']}{f' ({place})' if (place := row['twin_split']) else ''}" if row["twin"] else ""
        return {
            "structure": str(row["name"]),
            "formula": str(row["formula"]),
            "above hull, eV/atom": energy(row["e_above_hull"]),
            **{f"by {name}": energy(row[f"e_above_hull_{name}"]) for name in other},
            "phases": f"{row['competing_phases']} ({row['own_phases']} own)",
            "stable": words[row["stable"]],
            "valid": words[row["valid"]],
            "novel": words[row["novel"]] + twin,
            "remark": row["problem"] or row["sparse_hull"],
        }

    return [row_of(row) for row in judgement.rows()[:SHOWN]]


def summary_rows(judgement: Judgement, cut: float) -> list[dict[str, str]]:
    """Return the printed summary of all structures."""
    summary = judgement.summary()
    descriptions = {
        "apart_ok": "all atoms at least 0.5 Å apart (CDVAE's rule)",
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
    if any(judgement["sparse_hull"]):
        rows["unknown energy above the hull"] = (
            f"{sum(map(bool, judgement['sparse_hull']))}: references are missing (column sparse_hull)"
        )
    if "consensus" in judgement.columns:
        agreed = judgement["consensus"]
        rows[f"metastable by all models (≤ {cut:g} eV/atom)"] = (
            f"{agreed.count(True)} ({agreed.count(True) / max(len(agreed), 1):.1%}); by none {agreed.count(False)}; "
            f"disputed or not judged {agreed.count(None)}"
        )
    if "converged" in judgement.columns:
        rows |= _relaxation_rows(judgement, cut)
    if summary["novel"] is None:
        rows["novel is unknown"] = NOVELTY
    rows |= {"note": "; ".join(judgement.notes)} if judgement.notes else {}
    return [{"": name, "value": value} for name, value in rows.items()]


def _relaxation_rows(judgement: Judgement, cut: float) -> dict[str, str]:
    """Return what the relaxation changed."""
    before = np.array(judgement["e_above_hull_raw"], float) <= cut
    moved, steps = np.array(judgement["rmsd"], float), np.array(judgement["relax_steps"], float)
    moved = moved[np.isfinite(moved)]
    return {
        "relaxations that converged": f"{sum(map(bool, judgement['converged']))} of {len(judgement)}",
        "steps, mean": f"{steps.mean():.1f}" if len(steps) else "—",
        "RMSD of relaxation, Å, mean": f"{moved.mean():.3f}" if len(moved) else "—",
        f"metastable (≤ {cut:g} eV/atom) before relaxation": f"{before.sum()} ({before.mean():.1%})"
        if len(before)
        else "—",
    }


def rows_left_out(judgement: Judgement, out: Path | None) -> str:
    """Return a line about the rows that are not printed; empty if all are."""
    if len(judgement) <= SHOWN:
        return ""
    place = f"all are in {out / 'judged.csv'}" if out is not None else "print all with --json, or write all with --out"
    return f"the first {SHOWN} of {len(judgement)} structures; {place}"
