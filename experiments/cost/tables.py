"""Tables of costs, from one run of `python -m experiments bench` or from the runs in `results/bench`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.store import from_results
from experiments.common.tables import ratio_text
from experiments.cost.costs import CASES
from fmwc.files import write_json, write_text
from fmwc.readers import anything, mapping, read_json
from fmwc.report.table import MISSING, Table

MACHINES = {"cpu": "two cores", "h200": "H200"}  # names of machines, by folder
WORDS = {"checkerboard": "Checkerboard", "mnist": "digits", "crystals": "crystals"}
SHOWN = (
    "linearised, every step",
    "linearised, every 5th step",
    "diagonal Taylor-1, every step",
    "diagonal Gauss–Hermite, every step",
    "ensemble of 5",
)
MEASURED = ("seconds", "÷ plain", "peak MiB")


def _cells(row: Mapping[str, Any] | None) -> tuple[str, ...]:
    if row is None:
        return (MISSING,) * len(MEASURED)
    memory = MISSING if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
    return f"{row['seconds']:.3g}", ratio_text(row), memory


def write_costs(out: Path, name: str, costs: dict[str, Any]) -> list[Path]:
    """Write the result of :func:`measure` as JSON and as Markdown."""
    about = costs["provenance"]
    cases = costs.get("cases", {})
    rounds = min((row["rounds"] for row in cases.values()), default=costs["rounds"])  # fewer at the time limit
    parts = [
        f"# Cost of confidence: {name}",
        f"{about['samples']:,} samples in one batch, {about['steps']} steps; medians of {rounds} rounds "
        f"(lowest–highest), interleaved in one process, except that trainings run one after another. Ratios are "
        "relative to plain. "
        f"{about['device']}, torch {about['torch']}{', TF32' if about.get('tf32') else ''}, commit {about['commit']}, "
        f"{about['seconds']:.0f} s. Readings by {about['reading']}.",
    ]
    if cases:
        lines = [(case, *_cells(cases[case])) for case in CASES if case in cases]
        parts.append(Table.from_rows(("sampling", *MEASURED), lines).markdown())
    if rows := costs.get("training"):
        lines = [(case, *_cells(row)) for case, row in rows.items()]
        parts.append(Table.from_rows(("training", *MEASURED), lines).markdown())
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


def _ratio(costs: Mapping[str, Any], case: str) -> str:
    row = costs.get("cases", {}).get(case)
    return "" if row is None else ratio_text(row)


@from_results
def cost_table(bench: Path) -> Table:
    """Return the cost of readings and of other estimators relative to plain sampling."""
    costs = _read(bench)
    columns = {f"{WORDS[name]}, {MACHINES[m]}": (m, name) for m, name in sorted(costs, key=lambda key: key[0])}
    lines = [(case, *(_ratio(costs[key], case) for key in columns.values())) for case in SHOWN]
    return Table.from_rows(("÷ plain sampling", *columns), lines)
