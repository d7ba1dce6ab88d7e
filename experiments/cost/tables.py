"""Tables of costs, from one run of `python -m experiments bench` or from the runs in `results/bench`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.common.store import from_results
from experiments.common.tables import ratio_text
from experiments.cost.costs import CASES, COMPILATION
from fmwc.files import write_json, write_text
from fmwc.readers import anything, mapping, read_json
from fmwc.report.table import MISSING, Table
from fmwc.sampling import Schedule, Uniform
from fmwc.sampling.confidence import foreseen

MACHINES = {"cpu": "two cores", "h200": "H200"}  # names of machines, by folder
WORDS = {"checkerboard": "Checkerboard", "mnist": "digits", "crystals": "crystals"}
SHOWN = {  # compiled cases
    "linearised, every step": "linearised in bf16, every step",
    "— with one probe": "linearised (1 probe) in bf16, every step",
    "— in full precision": "linearised, every step",
    "— every 5th step, in full precision": "linearised, every 5th step",
    "diagonal Taylor-1, every step": "diagonal Taylor-1 in bf16, every step",
    "— in full precision ": "diagonal Taylor-1, every step",
    "diagonal Gauss–Hermite, every step": "diagonal Gauss–Hermite in bf16, every step",
    "ensemble of 5": "ensemble of 5",
}
MEASURED = ("seconds", "÷ plain", "peak MiB")


def _cells(row: Mapping[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return (MISSING,) * len(MEASURED)
    memory = MISSING if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    return f"{row['seconds']:.3g}", ratio_text(row), memory


def write_costs(out: Path, name: str, costs: dict[str, Any]) -> list[Path]:
    """Write the result of :func:`measure` as JSON and as Markdown."""
    about = costs["provenance"]
    keys = [key for key in COMPILATION if key in costs]
    measured = [row["rounds"] for key in keys for row in costs[key].values()]
    rounds = min(measured, default=costs["rounds"])  # fewer than requested if the time limit was reached
    few = len(foreseen(Schedule.at(about["few"]), Uniform(about["steps"]), torch.zeros(1)) or ())
    parts = [
        f"# Cost of confidence: {name}",
        f"{about['samples']:,} samples in one batch, {about['steps']} steps; medians of {rounds} rounds "
        f"(lowest–highest), interleaved in one process, except that trainings run one after another. Ratios are "
        "relative to plain in the same column. Peak memory includes code compiled by earlier cases. "
        f"{about['device']}, torch {about['torch']}{', TF32' if about.get('tf32') else ''}, commit {about['commit']}, "
        f"{about['seconds']:.0f} s. Few readings: {few}, by {about['reading']}.",
    ]
    if keys:
        columns = [f"{COMPILATION[key]} {what}" for key in keys for what in MEASURED]
        lines = [
            (case, *(cell for key in keys for cell in _cells(costs[key].get(case))))
            for case in CASES
            if any(case in costs[key] for key in keys)
        ]
        parts.append(Table.from_rows(("sampling", *columns), lines).markdown())
    others = {"training": costs["training"]} if costs.get("training") else {}
    for title, rows in {**others, **costs.get("sweep", {})}.items():
        lines = [(case, *_cells(row)) for case, row in rows.items()]
        parts.append(Table.from_rows((title, *MEASURED), lines).markdown())
    if costs["compiling"]:
        parts.append(f"One-time compilation: {'; '.join(costs['compiling'])}.")
    if costs["left_out"]:
        parts.append(
            f"Skipped because of the time limit, unless another reason is given: {'; '.join(costs['left_out'])}."
        )
    return [write_json(out / f"{name}.json", costs), write_text(out / f"{name}.md", "\n\n".join(parts) + "\n")]


# ---- the tables of the documents -------------------------------------------------------------------------------------


def _read(bench: Path) -> dict[tuple[str, str], Any]:
    """Return the costs by machine and domain."""
    paths = {(machine, name): bench / machine / f"{name}.json" for name in WORDS for machine in MACHINES}
    return {key: read_json(path, mapping(anything)) for key, path in paths.items() if path.is_file()}


def _ratio(costs: Mapping[str, Any], key: str, case: str) -> str:
    row = costs.get(key, {}).get(case)
    return "" if row is None else ratio_text(row)


@from_results
def default_table(bench: Path) -> Table:
    """Return the cost of the default relative to plain sampling, with and without compilation."""
    costs, lines = _read(bench), []
    cases = {"cases": "linearised, few readings", "compiled": "linearised in bf16, few readings"}
    for name, word in WORDS.items():
        few = next((len(found["provenance"]["few"]) for (_, n), found in costs.items() if n == name), None)
        if few is not None:
            ratios = [_ratio(costs.get((m, name), {}), key, case) for m in MACHINES for key, case in cases.items()]
            lines.append((f"{word}: {few} readings", *ratios))
    columns = [f"{machine}, {COMPILATION[key]}" for machine in MACHINES.values() for key in cases]
    return Table.from_rows(("the default ÷ plain sampling", *columns), lines)


@from_results
def other_table(bench: Path) -> Table:
    """Return the cost of more readings and of other estimators, compiled, relative to compiled plain sampling."""
    costs = _read(bench)
    columns = {f"{WORDS[name]}, {MACHINES[m]}": (m, name) for m, name in sorted(costs, key=lambda key: key[0])}
    lines = [
        (label.strip(), *(_ratio(costs[key], "compiled", case) for key in columns.values()))
        for label, case in SHOWN.items()
    ]
    return Table.from_rows(("÷ plain, both compiled", *columns), lines)
