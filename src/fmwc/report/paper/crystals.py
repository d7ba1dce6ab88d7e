"""The paper's crystal columns beside ours, made from the cells of a results folder and nothing else.

What a cell does not hold is printed as a dash; a method that it does not hold at all has no rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from fmwc.errors import CheckpointError
from fmwc.files import write_json, write_text
from fmwc.recipes.comparing import cells, from_results
from fmwc.report.paper.crystals_entries import Table, entry_at, lift_text, number, precisions, quality_text
from fmwc.report.paper.crystals_rows import (
    AGREEMENT,
    CHANNELS,
    FILTERS,
    PAPER,
    PAPER_SWEEP,
    QUALITY,
    READINGS,
    SAMPLED,
    SCORES,
    SHARES,
    SWEEP,
    THRESHOLDS,
)
from fmwc.report.paper.mnist_rows import METHODS
from fmwc.report.paper.table import NONE, PERCENT, dig
from fmwc.report.tables import markdown

__all__ = ["headline", "tables", "write_tables"]

Numbers = dict[str, Any]
BARE = {"atoms": "fewest atoms first", "elements": "fewest elements first"}  # rankings that ask no model
Rows = list[dict[str, str]]


def _there(n: Numbers) -> dict[str, str]:
    """The methods that the cell holds."""
    return {m: label for m, label in METHODS.items() if n.get(m)}


# ---- tables ------------------------------------------------------------------------------------------------------


def _table1(n: Numbers) -> Table:
    rows = []
    for what in QUALITY:
        row = {"": what[0]}
        for m, name in METHODS.items():
            row |= {PAPER[m]: "0.21" if what is QUALITY[0] else NONE, name: quality_text(dig(n, f"{m}/quality"), what)}
        rows.append(row)
    counts = {"structures": "quality/structures", "of which could not be judged": "quality/problems"}
    for label, path in counts.items():
        rows.append({"": label, **{name: number(dig(n, f"{m}/{path}"), 0) for m, name in METHODS.items()}})
    trained = {name: _steps(dig(n, f"{m}/trained")) for m, name in METHODS.items()}
    rows.append({"": "trained, steps", **trained})
    rows = [{**dict.fromkeys(rows[0], NONE), **row} for row in rows]
    told = {name: dig(n, f"{m}/bit_for_bit") for m, name in METHODS.items()}
    same = [f"{name} {'yes' if yes else 'NO'}" for name, yes in told.items() if yes is not None]
    checked = f" The same structures with and without confidence, bit for bit: {'; '.join(same)}." if same else ""
    if any(yes is False for yes in told.values()):
        checked += (
            " On a GPU a sum over neighbours has no fixed order, so that two runs of the plain flow differ as well; on "
            "a CPU they are the same."
        )
    return Table(
        "Quality (tab:quality-summary, crystals)",
        "Single points of CHGNet on structures as generated, against a hull of CHGNet energies of our part of MP-20; "
        "the paper's energies are UMA's, against another hull, after 2,000 epochs on all of MP-20. So our rows compare "
        "with one another, and not with the paper's. Shares are of all structures, what could not be judged among "
        "them; metastable: at most 0.1 eV/atom above the hull. In brackets, 90 % of bootstrap samples of the "
        f"structures. FM + retrofit is FM: its structures are the plain flow's.{checked}",
        rows,
        tuple(METHODS),
    )


def _steps(trained: Any) -> str:
    done, of = dig(trained, "steps"), dig(trained, "of")
    return NONE if done is None else f"{done:,}" if of is None else f"{done:,} of {of:,}"


def _filter_row(label: str, entry: Any, paper: str = NONE, paper_lift: str = NONE) -> dict[str, str]:
    return {
        "": label,
        "paper, AUPRC": paper,
        "AUPRC": number(dig(entry, "auprc")),
        "a random order's": number(dig(entry, "prevalence")),
        "paper, lift": paper_lift,
        "lift": lift_text(entry),
        **precisions(entry),
    }


def _table2(n: Numbers) -> Table:
    rows = []
    for m, name in _there(n).items():
        share = dig(n, f"{m}/own/prevalence")
        random = {"auprc": share, "prevalence": share, "lift": None if share is None else 1.0}
        random |= {f"precision_{s}": share for s in SHARES}
        rows.append(_filter_row(f"{name}: random order", random, "0.03", "1.0"))
        rows += [_filter_row(f"{name}: {label}", entry_at(n[m], path), *paper) for label, *paper, path in FILTERS]
        rows += [
            _filter_row(f"{name}: no model, ranked by {key}", entry)
            for key, entry in (dig(n, f"{m}/baselines") or {}).items()
        ]
    return Table(
        "Filtering (tab:filter-auprc, crystals)",
        "Positive class: at most 0.1 eV/atom above the hull; what could not be judged is not. The lift is AUPRC over "
        f"the share of positives, which is a random order's AUPRC, and is at most one over it: {_ceilings(n)}. "
        "Heads are fitted on the first half and read on the second; `no labels` is the default score there. "
        "`no model`: ranked by a property of the structure alone, such as its number of atoms, few first.",
        rows,
        tuple(METHODS),
    )


def _ceilings(n: Numbers) -> str:
    found = ["33 in the paper (0.03)"]
    for m, name in _there(n).items():
        if share := dig(n, f"{m}/own/prevalence"):
            found.append(f"{1 / share:.1f} for {name} ({share:.3f})")
    return ", ".join(found)


def _channels(n: Numbers) -> Table:
    rows = []
    for channel in CHANNELS if _there(n) else ():
        for score, words in SCORES.items():
            row = {"": f"{channel}: {words}"}
            for m, name in _there(n).items():
                for reading, label in READINGS.items():
                    row[f"{name}: {label}"] = lift_text(entry_at(n[m], f"{reading}/{channel}/{score}"))
            rows.append(row)
    return Table("Lift of every score of every channel", "", rows, tuple(METHODS))


def _thresholds(n: Numbers) -> Table:
    rows = []
    for m, name in _there(n).items():
        found = dig(n, f"{m}/thresholds") or dict.fromkeys(THRESHOLDS)
        for level in sorted(found, key=float):
            entry = found[level]
            share = dig(entry, "prevalence")
            rows.append(
                {
                    "": name,
                    "at most, eV/atom": level,
                    "% of all": number(share, 1, PERCENT),
                    "AUPRC": number(dig(entry, "auprc")),
                    "lift": lift_text(entry),
                    "best lift": number(1 / share if share else None, 1),
                    **{f"% of the surest {s}": number(dig(entry, f"precision_{s}"), 1, PERCENT) for s in SHARES},
                }
            )
    note = "The default score, with another energy above the hull for what counts as good."
    return Table("Other thresholds", note, rows, tuple(METHODS))


def _universality(points: Sequence[Mapping[str, Any]]) -> Table:
    rows = [{"": "paper", **{label: paper for label, (_, paper) in AGREEMENT.items()}}]
    found = [p for p in points if p.get("K") is None] or [{"name": name} for name in ("linearised", "diagonal")]
    for point in found:
        values = {words: number(point.get(key), 2) for words, (key, _) in AGREEMENT.items()}
        rows.append({"": str(point.get("name", NONE)), **values})
    return Table(
        "Variance against |∇·v| (tab:universality, crystals row)",
        "The divergence is Hutchinson's, with the reference's probes (next table). Per step: the mean over steps; the "
        "paper's ± is over steps too. Divergence and variance are sums over atoms, so they agree in part by the number "
        "of atoms alone: its row, where it was read, says how far.",
        rows,
        ("hutchinson", "sweep"),
        "few",
    )


def _hutchinson(points: Sequence[Mapping[str, Any]]) -> Table:
    sweep = {p["K"]: p for p in points if p.get("K") is not None}
    whole = [p for p in points if p.get("K") is None and "," not in str(p.get("name"))]
    rows = []
    for k in sorted(sweep or PAPER_SWEEP):
        row = {"": "Hutchinson", "K": f"{k}", "GFLOPs a query": number(dig(sweep.get(k), "flops"), 1, 1e-9)}
        for place, (label, key) in enumerate(SWEEP.items()):
            row[f"paper: {label}"] = PAPER_SWEEP[k][place] if k in PAPER_SWEEP else NONE
            row[label] = number(dig(sweep.get(k), key))
        rows.append(row)
    for p in whole:
        row = {"": str(p["name"]), "K": NONE, "GFLOPs a query": number(p.get("flops"), 1, 1e-9)}
        rows.append({**dict.fromkeys(rows[0], NONE), **row, **{w: number(p.get(key)) for w, key in SWEEP.items()}})
    return Table(
        "Hutchinson's estimate with K probes (tab:hutchinson-full, fig:mech-flops)",
        "Ours: correlation with |∇·v| by an independent Hutchinson reference of as many probes as the largest K, so it "
        "rises to 1. The paper's stops below, and at its largest K is its universality row (0.87, 0.79, 0.96, 0.93): "
        "its columns may be of the variance against Hutchinson with K probes instead."
        f"{''.join(_matched(p, sweep) for p in whole)} The paper's pass matches K ≈ 13 (Spearman) and 7 (Pearson).",
        rows,
        ("hutchinson", "sweep"),
        "few",
    )


def _matched(point: Mapping[str, Any], sweep: Mapping[int, Mapping[str, Any]]) -> str:
    """How many probes do as well at each step."""

    def probes(kind: str) -> str:
        own = point.get(f"per_step_{kind}")
        values = {k: dig(p, f"per_step_{kind}") for k, p in sorted(sweep.items())}
        if own is None or not values:
            return NONE
        return next((f"K = {k}" for k, v in values.items() if v is not None and v >= own), "more than any K here")

    return f" {point['name']} is reached per step by {probes('spearman')} (Spearman), {probes('pearson')} (Pearson)."


def _sampler(n: Numbers) -> Table | None:
    rows = []
    for m, name in _there(n).items():
        others = dig(n, f"{m}/sampler") or {}
        for how, entry in {"as in the other tables": n[m], **others}.items() if others else ():
            row = {"": f"{name}: {how}", "structures": number(dig(entry, "quality/structures"), 0)}
            row |= {what[0]: quality_text(dig(entry, "quality"), what) for what in SAMPLED}
            rows.append({**row, "AUPRC": number(dig(entry, "own/auprc")), "lift": lift_text(dig(entry, "own"))})
    title, note = "Steps and anti-annealing of the sampler", "Coordinates are followed at 1 + s·t times their speed."
    return Table(title, note, rows, ("sampler", *METHODS), "") if rows else None


def tables(n: Numbers) -> dict[str, Table]:
    """Every table, from one cell's numbers."""
    points = n.get("hutchinson") or []
    found = {
        "table1_quality": _table1(n),
        "table2_auprc": _table2(n),
        "channels": _channels(n),
        "thresholds": _thresholds(n),
        "universality": _universality(points),
        "hutchinson": _hutchinson(points),
        "sampler": _sampler(n),
    }
    return {name: table for name, table in found.items() if table is not None and table.rows}


@from_results
def headline(out: Path) -> Rows:
    """The rows of the README's table of results, from the first cell."""
    n = _numbers(cells(out)[0], out)
    whole = {p.get("name"): p for p in n.get("hutchinson") or [] if p.get("K") is None}

    def row(label: str, paper: str, *values: str) -> dict[str, str]:
        return {"": label, "paper": paper, **dict(zip(METHODS.values(), values, strict=True))}

    def quality(place: int) -> list[str]:
        return [quality_text(dig(n, f"{m}/quality"), QUALITY[place]) for m in METHODS]

    def precision(share: str) -> list[str]:
        return [number(dig(n, f"{m}/own/precision_{share}"), 1, PERCENT) for m in METHODS]

    def lifts(path: str) -> list[str]:
        return [lift_text(entry_at(n.get(m), path)) for m in METHODS]

    rows = [
        row(QUALITY[0][0], "0.21; 0.21", *quality(0)),
        row(QUALITY[2][0], NONE, *quality(2)),
        row("metastable (at most 0.1 eV/atom above it), %", "3", *quality(4)),
        *(row(f"metastable, % of the surest {share}", NONE, *precision(share)) for share in reversed(SHARES)),
        *(row(f"lift: {label}", paper, *lifts(path)) for label, _, paper, path in FILTERS),
        *(row(f"lift: {name}, no model", NONE, *lifts(f"baselines/{key}")) for key, name in BARE.items()),
        row(
            "Spearman of the linearised variance and |∇·v|, integrated",
            AGREEMENT["Spearman, integrated"][1],
            number(dig(whole.get("linearised"), "integrated_spearman"), 2),
            NONE,
        ),
    ]
    # What has not been read yet, rows and methods, is left to tables.md, which shows what is missing.
    unread = {name for name in METHODS.values() if all(row[name] == NONE for row in rows)}
    known = [{name: text for name, text in row.items() if name not in unread} for row in rows]
    return [row for row in known if any(row.get(name, NONE) != NONE for name in METHODS.values())]


# ---- files -------------------------------------------------------------------------------------------------------


def _numbers(cell: Mapping[str, Any], out: Path) -> Numbers:
    numbers = cell.get("numbers")
    if not isinstance(numbers, dict):
        raise CheckpointError(f"a cell in {out} holds no numbers; run fmwc reproduce crystals to the end")
    return numbers


def _origin(cell: Mapping[str, Any], table: Table) -> str:
    """Where a table's numbers are from: the pieces that it is made of, and the cell where they do not say."""
    about = cell.get("provenance") or {}
    parts = (about.get("pieces") or {}).items()
    own = [part for name, part in parts if isinstance(part, dict) and any(piece in name for piece in table.pieces)]

    def each(*paths: str, length: int | None = None) -> str:
        for path, sources in product(paths, (own, [about])):
            if found := [value for part in sources if (value := dig(part, path)) is not None]:
                return ", ".join(dict.fromkeys(f"{v:,}" if isinstance(v, int) else f"{v}"[:length] for v in found))
        return NONE

    counted = f" {each(table.structures, 'samples')} structures; {each('steps', 'recipe/steps')} steps;"
    counted = counted if table.structures else ""
    return (
        f"Commit {each('commit')}; {each('device')}; seed {cell.get('seed', NONE)};{counted} {each('date', length=10)}."
    )


@from_results
def write_tables(out: Path) -> list[Path]:
    """Writes `summary.json` and `tables.md` from the first cell."""
    cell = cells(out)[0]
    found = tables(_numbers(cell, out))
    lines = [
        "# Crystals: the paper's columns beside ours",
        "",
        "One seed. Made by `fmwc reproduce crystals`; `fmwc report` on this folder makes the tables again from "
        "`cells/`. What was tried, and which piece was read how, is in NOTES.md.",
    ]
    for table in found.values():
        lines += ["", f"## {table.title}", "", *([table.note, ""] if table.note else [])]
        lines += [markdown(table.rows, list(table.rows[0])), "", _origin(cell, table)]
    rows = {name: table.rows for name, table in found.items()}
    return [
        write_json(out / "summary.json", {"provenance": cell.get("provenance"), "tables": rows}),
        write_text(out / "tables.md", "\n".join(lines) + "\n"),
    ]
