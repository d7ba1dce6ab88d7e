"""The paper's MNIST columns beside ours, made from the cells of a results folder and nothing else."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np

from fmwc.files import write_json, write_text
from fmwc.metrics.ranking import Retention
from fmwc.recipes.comparing import cells, from_results
from fmwc.recipes.mnist.reading import HUTCHINSON, KEPT, PROBES, STATES, TIMES, WINDOWS
from fmwc.report.images import Sweep
from fmwc.report.paper.mnist_rows import (
    AGREEMENT,
    FIDELITY,
    FIELDS,
    HEADS,
    KEPT_COLUMN,
    METHODS,
    QUALITY,
    RIVALS,
    SCORES,
    TRANSPORTED,
    WITHIN,
    Row,
)
from fmwc.report.paper.table import NONE, dig
from fmwc.report.tables import markdown

__all__ = ["headline", "retention_of", "sweep_of", "tables", "write_tables"]

Numbers = dict[str, Any]
Rows = list[dict[str, str]]


class Table(NamedTuple):
    """A table: its title with the paper's label, how to read it, and its rows."""

    title: str
    note: str
    rows: Rows


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _rank(n: Numbers, row: Row) -> dict[str, str]:
    """A score: its AUPRC as read and within a class, each over the failure rate, and what the surest share fails."""
    label, paper, path, base = row
    entry, floor, samples = dig(n, path), dig(n, f"{base}/failure"), dig(n, f"{base}/samples")
    return {
        "": f"{label} ({samples:,} digits)" if samples else label,
        "paper, AUPRC": paper,
        "AUPRC": f"{entry['auprc']:.3f}",
        "÷ prevalence": f"{entry['auprc'] / floor:.2f}",
        "within class": f"{entry['auprc_within']:.3f}",
        "÷ prevalence ": f"{entry['auprc_within'] / floor:.2f}",
        KEPT_COLUMN: _percent(entry["kept_within"]),
    }


def _ranks(n: Numbers, rows: tuple[Row, ...]) -> Rows:
    return [_rank(n, row) for row in rows if dig(n, row[2]) is not None]


def _quality(n: Numbers) -> Rows:
    members = n["plain"]["members"]
    fid, failure = ([m[k] for m in members] for k in ("fid", "failure"))
    rows = [
        {
            "": label,
            "paper, FID": paper,
            "FID": f"{dig(n, path)['fid']:.2f}",
            "failed %": _percent(dig(n, path)["failure"]),
        }
        for label, paper, path in QUALITY
    ]
    spread = {
        "": f"FM, mean ± std of {len(members)} seeds: the ensemble's members",
        "paper, FID": "5.17; 4.35",
        "FID": f"{mean(fid):.2f} ± {stdev(fid):.2f}",
        "failed %": f"{_percent(mean(failure))} ± {_percent(stdev(failure))}",
    }
    floor = {
        "": "training images, which the judge has seen",
        "paper, FID": NONE,
        "FID": f"{n['plain']['floor_fid']:.2f}",
        "failed %": NONE,
    }
    return [rows[0], spread, *rows[1:], floor]


def _heads(n: Numbers) -> Rows:
    """On the half that heads did not see, beside the label-free score there."""
    return [
        {
            "": f"{label}: {kind}",
            "paper, AUPRC": paper,
            "AUPRC": f"{dig(n[m], path):.3f}",
        }
        for m, label in METHODS.items()
        for kind, path, paper in HEADS
    ]


def _both(n: Numbers, label: str, path: str, digits: int) -> dict[str, str]:
    return {"": label, **{name: f"{dig(n[m], path):.{digits}f}" for m, name in METHODS.items()}}


def _universality(n: Numbers) -> Rows:
    rows = []
    for estimator in ("linearised", "diagonal"):
        for name, (key, paper) in AGREEMENT.items():
            row = _both(n, f"{estimator}: {name}", f"agreement/{estimator}/{key}", 2)
            rows.append({"": row.pop(""), "paper": paper if estimator == "diagonal" else NONE, **row})
    return rows


def _sweep(n: Numbers) -> Rows:
    rows = []
    for steps in n["plain"]["sweep"]:
        row = {"steps": steps}
        for m, label in (("plain", "FM"), ("joint", METHODS["joint"])):
            found = n[m]["sweep"][steps]
            row |= {f"{label}, FID": f"{found['fid']:.2f}", f"{label}, failed %": _percent(found["failure"])}
        rows.append(row)
    return rows


def sweep_of(n: Numbers) -> Sweep:
    """Quality against the number of steps, for the figure."""
    curves = {"FM": n["plain"]["sweep"], METHODS["joint"]: n["joint"]["sweep"]}

    def values(key: str) -> dict[str, dict[int, float]]:
        return {label: {int(s): v[key] for s, v in curve.items()} for label, curve in curves.items()}

    return Sweep(values("fid"), values("failure"))


def retention_of(n: Numbers) -> dict[str, Retention]:
    """Retention curves of the whole run, for the figure."""
    curves = {
        "FM + retrofit, for its class": n["retrofit"]["retention"]["integrated_within"],
        "FM + retrofit, as read": n["retrofit"]["retention"]["integrated"],
        "FMwC joint, for its class": n["joint"]["retention"]["integrated_within"],
    }
    return {
        label: Retention(np.array([float(k) for k in curve]), np.array(list(curve.values())))
        for label, curve in curves.items()
    }


def tables(n: Numbers) -> dict[str, Table]:
    """Every table, from one cell's numbers."""
    again = tuple(
        (f"seed {seed}: linearised, {s}", NONE, f"repeats/{seed}/linearised/{s}", f"repeats/{seed}")
        for seed in n["repeats"]
        for s in SCORES
    )
    windows = tuple(
        (f"{label}: t = {a}–{b}", NONE, f"{m}/windows/{a}–{b}", m) for m, label in METHODS.items() for a, b in WINDOWS
    )
    agree = "; ".join(
        f"{label}: median ratio to the most trajectories {n[m]['transported']['ratio']:.2f}, Spearman "
        f"{n[m]['transported']['spearman']:.2f}"
        for m, label in METHODS.items()
    )
    fidelity = {f"t = {t}: {label}": f"fidelity/{t}/{kind}" for t in TIMES for label, kind in FIDELITY.items()}
    return {
        "table1_quality": Table(
            "Quality (tab:quality-summary)",
            "FID is the Fréchet distance of our judge's penultimate layer, so it compares between our rows; the "
            "paper's classifier is another. FM + retrofit is FM: the same digits, bit for bit. The judge is right on "
            f"{n['plain']['judge_accuracy']:.2%} of the test split.",
            _quality(n),
        ),
        "table2_auprc": Table(
            "Filtering (tab:filter-auprc)",
            "Positive class: the judge takes the digit for another class than was asked for. `within class`: the score "
            "standardised among digits of the class that was asked for, which needs no label. The paper's floor is "
            "0.04.",
            _ranks(n, (*FIELDS, *RIVALS)),
        ),
        "heads": Table("Learned heads, within class", "Fitted on one half, read on the other.", _heads(n)),
        "repeats": Table("FM + retrofit at another seed of the flow", "", _ranks(n, again)),
        "transported": Table(
            "Transported dispersion against k stochastic trajectories",
            f"The first {n['retrofit']['transported']['samples']:,} digits. {agree}.",
            _ranks(n, TRANSPORTED),
        ),
        "universality": Table(
            "Variance against |∇·v| (tab:universality, MNIST row)",
            f"The divergence by Hutchinson's estimator with {HUTCHINSON} probes, the linearised variance with {PROBES} "
            "probes; 500 digits, every second step. Per step: the mean over steps.",
            _universality(n),
        ),
        "fidelity": Table(
            "Variance of an image against 256 posterior draws",
            f"Median ratio and Spearman over {STATES} images; linearised with {PROBES} probes. `ceiling`: a second set "
            "of 256 draws against the first.",
            [_both(n, label, path, 3) for label, path in fidelity.items()],
        ),
        "sweep": Table("Quality against uniform Euler steps (fig:cross-app-adaptive, uniform part)", "", _sweep(n)),
        "windows": Table("Windows of the integrated score, linearised", "", _ranks(n, windows)),
    }


def headline(n: Numbers) -> str:
    """The README's table of results."""

    def row(label: str, paper: str, *values: str) -> dict[str, str]:
        return {"": label, "paper": paper, **dict(zip(METHODS.values(), values, strict=True))}

    def lift(where: tuple[str, str] | None) -> str:
        return NONE if where is None else f"{dig(n, where[0])['auprc_within'] / dig(n, where[1])['failure']:.1f}"

    kept = [_percent(n[m]["linearised"]["integrated"]["kept_within"]) for m in METHODS]
    heads = [f"{n[m]['heads']['l1']:.3f}; {n[m]['heads']['label_free']:.3f}" for m in METHODS]
    fids = [f"{n[m]['fid']:.2f}" for m in ("plain", "joint")]  # FM's digits are the retrofit's
    rows = [
        row(f"FID (of training images: {n['plain']['floor_fid']:.2f})", "5.17; 4.22", *fids),
        row("failed, %", "4", *(_percent(n[m]["failure"]) for m in METHODS)),
        row(f"failed, % of the surest {KEPT:.0%}", NONE, *kept),
        *(row(f"lift: {label}", paper, *map(lift, where)) for label, paper, *where in WITHIN),
        row("AUPRC on a held-out half: L1 head; no labels", "0.09; 0.04", *heads),
    ]
    return markdown(rows, list(rows[0]))


@from_results
def write_tables(out: Path) -> list[Path]:
    """Writes `summary.json` and `tables.md` from the first cell."""
    cell = cells(out)[0]
    about, found = cell["provenance"], tables(cell["numbers"])
    lines = [
        "# MNIST: the paper's columns beside ours",
        "",
        f"{about['samples']:,} digits, {about['steps']} Euler steps, networks of seed {cell['seed']}, digits of a seed "
        f"that nothing was chosen on. Commit {about['commit']}; {about['device']}; torch {about['torch']}; "
        f"{about['seconds']:.0f} s of reading. Made by `fmwc reproduce mnist`; `fmwc report` on this folder makes the "
        "tables again from `cells/`. What was tried, and which piece was read how, is in NOTES.md.",
    ]
    for table in found.values():
        lines += ["", f"## {table.title}", "", *([table.note, ""] if table.note else [])]
        lines.append(markdown(table.rows, list(table.rows[0])))
    return [
        write_json(out / "summary.json", {"provenance": about, "tables": {k: t.rows for k, t in found.items()}}),
        write_text(out / "tables.md", "\n".join(lines) + "\n"),
    ]
