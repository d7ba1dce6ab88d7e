"""The tables of costs, from what `python -m experiments bench` wrote on each machine (`results/bench`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.store import from_results
from fmwc.readers import anything, mapping, read_json
from fmwc.report.table import Table

__all__ = ["default_table", "other_table"]

MACHINES = {"cpu": "two cores", "h200": "H200"}  # the folder of each, and its name
WORDS = {"checkerboard": "Checkerboard", "mnist": "digits", "crystals": "crystals"}
SHOWN = {  # compiled cases
    "linearised, every step": "linearised in bf16, every step",
    "— by one probe": "linearised (1 probe) in bf16, every step",
    "— in full precision": "linearised, every step",
    "— every 5th step, in full precision": "linearised, every 5th step",
    "diagonal Taylor-1, every step": "diagonal Taylor-1 in bf16, every step",
    "— in full precision ": "diagonal Taylor-1, every step",
    "diagonal Gauss–Hermite, every step": "diagonal Gauss–Hermite in bf16, every step",
    "ensemble of 5": "ensemble of 5",
}


def _read(bench: Path) -> dict[tuple[str, str], Any]:
    paths = {(m, s): bench / m / f"{s}.json" for s in WORDS for m in MACHINES}
    return {key: read_json(path, mapping(anything)) for key, path in paths.items() if path.is_file()}


def _cell(costs: Mapping[str, Any], how: str, case: str) -> str:
    row = costs.get(how, {}).get(case)
    return "" if row is None else f"{row['ratio']:.2f}× ({row['lowest']:.2f}–{row['highest']:.2f})"


@from_results
def default_table(bench: Path) -> Table:
    """Return the cost of the default relative to plain sampling, compiled and not."""
    found, rows = _read(bench), []
    for name, word in WORDS.items():
        few = next((len(costs["provenance"]["few"]) for (_, n), costs in found.items() if n == name), None)
        if few is None:
            continue
        row = {"the default ÷ plain sampling": f"{word}: {few} readings"}
        for machine, title in MACHINES.items():
            costs = found.get((machine, name), {})
            row[f"{title}, uncompiled"] = _cell(costs, "cases", "linearised, few readings")
            row[f"{title}, compiled"] = _cell(costs, "compiled", "linearised in bf16, few readings")
        rows.append(row)
    return Table(rows)


@from_results
def other_table(bench: Path) -> Table:
    """Return the cost of more readings and of other estimators, compiled, relative to compiled plain sampling."""
    found = _read(bench)
    titles = {key: f"{WORDS[key[1]]}, {MACHINES[key[0]]}" for key in sorted(found, key=lambda key: key[0])}
    return Table(
        [
            {"÷ plain, both compiled": title.strip()}
            | {word: _cell(found[key], "compiled", case) for key, word in titles.items()}
            for title, case in SHOWN.items()
        ]
    )
