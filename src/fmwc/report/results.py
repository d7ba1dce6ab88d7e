"""The paper's Checkerboard tables beside ours, made from the cells of a results folder and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fmwc.files import write_json, write_text
from fmwc.readers import anything, mapping, read_json
from fmwc.recipes.comparing import cells, from_results
from fmwc.report.paper.checkerboard import HEADLINE, TABLES
from fmwc.report.paper.table import NONE, Table, dig
from fmwc.report.tables import markdown

__all__ = ["cost_table", "headline_table", "summarise", "write_tables"]


COST_NOTE = (
    "Wall clock on two CPU cores, ratios to plain FM sampling, full depth (as `fmwc bench` measures it). The paper "
    "counts FLOPs: FM 1×, MC-Dropout and ensemble 5×, FMwC 3.22×."
)


def _find(numbers: Any, prefix: str, path: str) -> float | None:
    if path.startswith("windows/"):  # its own keys hold a slash
        _, early, late, estimator = path.split("/")
        value = numbers[prefix]["windows"].get(f"{early}/{late}", {}).get(estimator)
        return None if value is None else float(value)
    value = dig(numbers, f"{prefix}/{path}")
    return None if value is None else float(value)


def summarise(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation over seeds of every entry of every table."""

    def entry(table: Table, column: tuple[str, str], path: str) -> dict[str, Any]:
        decay, prefix = column
        values = [v for c in found if c["decay"] == decay if (v := _find(c["numbers"], prefix, path)) is not None]
        scaled = [v * table.scale for v in values]
        spread = stdev(scaled) if len(scaled) > 1 else 0.0
        return {"mean": mean(scaled), "std": spread, "seeds": len(scaled)} if scaled else {"seeds": 0}

    return {
        name: {
            label: {"paper": paper, **{h: entry(table, c, path) for h, c in table.columns.items()}}
            for label, path, paper in table.rows
        }
        for name, table in TABLES.items()
    }


def _cell(entry: dict[str, Any], digits: int) -> str:
    return f"{entry['mean']:.{digits}f} ± {entry['std']:.{digits}f}" if entry["seeds"] else NONE


@from_results
def write_tables(out: Path, say: Callable[[str], None] = lambda text: None) -> list[Path]:
    """Writes `summary.json` and `tables.md` from the cells."""
    found = cells(out)
    summary = summarise(found)
    abouts = [c["provenance"] for c in found]
    about = {
        "commit": sorted({a["commit"] for a in abouts}),
        "device": sorted({a["device"] for a in abouts}),
        "torch": sorted({a["torch"] for a in abouts}),
        "seeds": sorted({c["seed"] for c in found}),
        "samples": abouts[0]["samples"],
        "steps": abouts[0]["steps"],
        "seconds": round(sum(a["seconds"] for a in abouts), 1),
    }
    lines = [
        "# Checkerboard: the paper's tables beside ours",
        "",
        f"{about['samples']:,} samples, {about['steps']} Euler steps, seeds {about['seeds']}, mean ± std over seeds. "
        f"Commit {', '.join(about['commit'])}; {', '.join(about['device'])}; "
        f"torch {', '.join(about['torch'])}; {about['seconds']:.0f} s in all, training included. Made by "
        "`fmwc reproduce checkerboard`; `fmwc report` on this folder makes the tables again from `cells/`.",
    ]
    for name, table in TABLES.items():
        rows = [
            {"": label, "paper": paper, **{h: _cell(summary[name][label][h], table.digits) for h in table.columns}}
            for label, _, paper in table.rows
        ]
        lines += ["", f"## {table.title}", "", *([table.note, ""] if table.note else []), markdown(rows, list(rows[0]))]
    if (out / "cost.json").is_file():
        cost = read_json(out / "cost.json", mapping(anything))
        lines += ["", "## Inference cost (tab:quality-summary)", "", COST_NOTE, "", cost_table(cost)]
    say(f"{len(found)} cells, {len(TABLES)} tables")
    return [
        write_json(out / "summary.json", {"provenance": about, "tables": summary}),
        write_text(out / "tables.md", "\n".join(lines) + "\n"),
    ]


def headline_table(summary: dict[str, Any]) -> str:
    """The README's table of results, from `summary.json`."""

    def row(label: str, table: str, name: str, constant: str, cosine: str) -> dict[str, str]:
        found, digits = summary["tables"][table][name], TABLES[table].digits
        return {
            "": label,
            "paper": found["paper"],
            "as printed (constant rate)": _cell(found[constant], digits),
            "with cosine decay": _cell(found[cosine], digits),
        }

    rows = [row(*entry) for entry in HEADLINE]
    return markdown(rows, list(rows[0]))


def cost_table(cost: dict[str, Any]) -> str:
    """The README's table of costs, from `cost.json`."""
    rows = [
        {"sampling": name, "time ÷ plain": f"{row['ratio']:.2f}× ({row['lowest']:.2f}–{row['highest']:.2f})"}
        for name, row in cost["cases"].items()
    ]
    return markdown(rows, list(rows[0]))
