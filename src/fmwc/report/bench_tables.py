"""The README's tables of costs, from what `fmwc bench` wrote on each machine (`results/bench`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fmwc.readers import anything, mapping, read_json
from fmwc.recipes.comparing import from_results
from fmwc.report.tables import markdown

__all__ = ["bench_tables"]

MACHINES = {"cpu": "two cores", "h200": "H200"}  # the folder of each, and its name
WORDS = {"checkerboard": "Checkerboard", "mnist": "digits", "crystals": "crystals"}
FEW = "linearised, few readings"
FEW_IN_HALF = "linearised in bf16, few readings"  # a compiled field's own precision
SHOWN = (  # what is compiled, and its case
    ("linearised, every step", "linearised in bf16, every step"),
    ("— by one probe", "linearised (1 probe) in bf16, every step"),
    ("— in full precision", "linearised, every step"),
    ("— every 5th step, in full precision", "linearised, every 5th step"),
    ("diagonal Taylor-1, every step", "diagonal Taylor-1 in bf16, every step"),
    ("— in full precision", "diagonal Taylor-1, every step"),
    ("diagonal Gauss–Hermite, every step", "diagonal Gauss–Hermite in bf16, every step"),
    ("ensemble of 5", "ensemble of 5"),
)


@from_results
def bench_tables(bench: Path) -> tuple[str, str]:
    """The default beside plain sampling, compiled and not; and more readings, compiled."""
    found = {
        (machine, setting): read_json(path, mapping(anything))
        for setting in WORDS
        for machine in MACHINES
        if (path := bench / machine / f"{setting}.json").is_file()
    }
    return _default(found), _others(found)


def _default(found: Mapping[tuple[str, str], Any]) -> str:
    rows = []
    for setting, word in WORDS.items():
        few = next((len(costs["provenance"]["few"]) for (_, name), costs in found.items() if name == setting), None)
        if few is None:
            continue
        row = {"the default ÷ plain sampling": f"{word}: {few} readings"}
        for machine, title in MACHINES.items():
            costs = found.get((machine, setting), {})
            row[f"{title}, uncompiled"] = _cell(costs, "cases", FEW)
            row[f"{title}, compiled"] = _cell(costs, "compiled", FEW_IN_HALF)
        rows.append(row)
    return markdown(rows, list(rows[0]))


def _others(found: Mapping[tuple[str, str], Any]) -> str:
    titles = {key: f"{WORDS[key[1]]}, {MACHINES[key[0]]}" for key in sorted(found, key=lambda key: key[0])}
    rows = [
        {"÷ plain, both compiled": title} | {word: _cell(found[key], "compiled", name) for key, word in titles.items()}
        for title, name in SHOWN
    ]
    return markdown(rows, list(rows[0]))


def _cell(costs: Mapping[str, Any], way: str, name: str) -> str:
    row = costs.get(way, {}).get(name)
    return "" if row is None else f"{row['ratio']:.2f}× ({row['lowest']:.2f}–{row['highest']:.2f})"
