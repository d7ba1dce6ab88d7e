"""Tables of the paper's crystal columns beside ours, made from the results in a folder.

A number that a result file does not hold is printed as a dash; a method that it does not hold has no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments.common.store import from_results, read_results
from experiments.common.tables import (
    METHODS,
    NONE,
    PERCENT,
    Numbers,
    Rows,
    dig,
    number,
    with_interval,
    write_tables,
)
from fmwc.errors import CheckpointError
from fmwc.recipes.crystals import SCORE
from fmwc.report.table import Table

__all__ = ["FILTERS", "PAPER_SWEEP", "headline", "tables", "tables_of"]

Quality = tuple[str, str, float, int]  # label, key of a judgement's summary, factor, digits
Lift = tuple[str, str, str, str]  # label, the paper's AUPRC, its lift over its 0.03, path below a method
Run = Mapping[str, Any]

CHANNELS = ("all", "type", "coord", "lattice")
SCORES = {"integrated": "integrated", "peak": "peak", "temporal_ratio": "temporal ratio", "endpoint": "endpoint"}
READINGS = {"linearised": "linearised", "every_5th": "linearised, at every 5th step", "diagonal": "diagonal"}
DIAGONAL = {"integrated": ("0.04", "1.3"), "temporal_ratio": ("0.03", "1.0"), "endpoint": ("0.04", "1.3")}
PAPER = {"retrofit": "paper, FM", "joint": "paper, FMwC"}
QUALITY: tuple[Quality, ...] = (  # the first has a value in the paper
    ("mean energy above the hull, eV/atom", "mean_e_above_hull", 1.0, 3),
    ("median energy above the hull, eV/atom", "median_e_above_hull", 1.0, 3),
    ("valid by the distance rule, %", "distances_ok_share", PERCENT, 1),
    ("valid by all rules, %", "valid_share", PERCENT, 1),
    ("metastable, %", "metastable_share", PERCENT, 1),
    ("stable, %", "stable_share", PERCENT, 1),
    ("unique, %", "unique_share", PERCENT, 1),
    ("novel, %", "novel_share", PERCENT, 1),
    ("SUN (stable, unique, novel), %", "sun_share", PERCENT, 1),
    ("MSUN (metastable, unique, novel), %", "msun_share", PERCENT, 1),
)
SAMPLED = (QUALITY[0], QUALITY[2], QUALITY[4])  # measures of the sampler's sweep
FILTERS: tuple[Lift, ...] = (
    (f"the default score, {SCORE}", NONE, NONE, "own"),
    (f"the same at every 5th step, {SCORE}", NONE, NONE, f"every_5th/all/{SCORE}"),
    (f"the same by the diagonal estimator, {SCORE}", NONE, NONE, f"diagonal/all/{SCORE}"),
    *((f"linearised, {c}/integrated", NONE, NONE, f"linearised/{c}/integrated") for c in CHANNELS),
    *((f"diagonal, {c}/integrated", NONE, NONE, f"diagonal/{c}/integrated") for c in CHANNELS[1:]),
    *((f"diagonal, all/{s}", *paper, f"diagonal/all/{s}") for s, paper in DIAGONAL.items()),
    ("5 stochastic trajectories", "0.03", "1.0", "dispersion"),
    ("held-out half, no labels", NONE, NONE, "heads/label_free"),
    ("held-out half, L1 head, linearised", NONE, NONE, "heads/l1"),
    ("held-out half, boosting head, linearised", NONE, NONE, "heads/boosting"),
    ("held-out half, L1 head, diagonal", "0.06", "2.0", "heads_diagonal/l1"),
    ("held-out half, boosting head, diagonal", "0.06", "2.0", "heads_diagonal/boosting"),
)
SHARES = ("5%", "10%")
THRESHOLDS = ("0.0", "0.05", "0.1", "0.2")
AGREEMENT = {
    "Pearson, per step": ("per_step_pearson", "0.79 ± 0.09"),
    "Pearson, integrated": ("integrated_pearson", "0.93"),
    "Spearman, per step": ("per_step_spearman", "0.87 ± 0.04"),
    "Spearman, integrated": ("integrated_spearman", "0.96"),
}
SWEEP = ("Spearman, per step", "Pearson, per step", "Spearman, integrated", "Pearson, integrated")
PAPER_SWEEP = {  # by K, in the order of SWEEP
    1: ("0.500", "0.410", "0.947", "0.919"),
    5: ("0.682", "0.610", "0.955", "0.933"),
    10: ("0.745", "0.674", "0.955", "0.934"),
    25: ("0.807", "0.733", "0.955", "0.934"),
    50: ("0.835", "0.762", "0.955", "0.934"),
    100: ("0.853", "0.779", "0.955", "0.934"),
    250: ("0.864", "0.790", "0.955", "0.934"),
    500: ("0.868", "0.794", "0.955", "0.934"),
}

BARE = {"atoms": "fewest atoms first", "elements": "fewest elements first"}  # rankings that use no model


# ---- cells -----------------------------------------------------------------------------------------------------------


def entry_at(numbers: Any, path: str) -> Any:
    """Return the entry at a path such as `linearised/type/integrated`, where the score's name is one key.

    >>> entry_at({"diagonal": {"peak": 1, "type/peak": 2}}, "diagonal/all/peak")
    1
    """
    first, _, key = path.partition("/")
    entry = dig(numbers, first)
    if not key or not isinstance(entry, dict):
        return entry if not key else None
    return entry.get(key, entry.get(key.removeprefix("all/")))  # `all` may be left out


def lift_text(entry: Any) -> str:
    """Return the lift with its interval."""
    return with_interval(dig(entry, "lift"), dig(entry, "lift_interval"), 2)


def quality_text(entry: Any, row: Quality) -> str:
    """Return a number of a judgement's summary with its interval."""
    _, key, factor, digits = row
    return with_interval(dig(entry, key), dig(entry, f"intervals/{key}"), digits, factor)


def _methods(n: Numbers) -> dict[str, str]:
    """Return the methods that a result file holds, with their names."""
    return {m: name for m, name in METHODS.items() if n.get(m)}


def _precision(entry: Any, share: str) -> str:
    return number(dig(entry, f"precision_{share}"), 1, PERCENT)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _quality(n: Numbers) -> Table:
    def row(label: str, cells: Sequence[str]) -> dict[str, str]:
        row = {"": label}
        for (m, name), cell in zip(METHODS.items(), cells, strict=True):
            row |= {PAPER[m]: NONE, name: cell}
        return row

    quality = {m: dig(n, f"{m}/quality") for m in METHODS}
    rows = [row(what[0], [quality_text(entry, what) for entry in quality.values()]) for what in QUALITY]
    rows[0] |= dict.fromkeys(PAPER.values(), "0.21")
    for label, key in (("structures", "structures"), ("of which could not be judged", "problems")):
        rows.append(row(label, [number(dig(entry, key), 0) for entry in quality.values()]))
    rows.append(row("trained, steps", [_steps(dig(n, f"{m}/trained")) for m in METHODS]))
    known = {name: dig(n, f"{m}/bit_for_bit") for m, name in METHODS.items()}
    same = [f"{name} {'yes' if yes else 'NO'}" for name, yes in known.items() if yes is not None]
    checked = f" The same structures with and without confidence, bit for bit: {'; '.join(same)}." if same else ""
    if any(yes is False for yes in known.values()):
        checked += (
            " On a GPU a sum over neighbours has no fixed order, so that two runs of the plain flow differ as well; on "
            "a CPU they are the same."
        )
    return Table(
        rows,
        "Quality (tab:quality-summary, crystals)",
        "Single points of CHGNet on structures as generated, against a hull of CHGNet energies of our part of MP-20; "
        "the paper's energies are UMA's, against another hull, after 2,000 epochs on all of MP-20. So our rows compare "
        "with one another, and not with the paper's. Shares are of all structures, what could not be judged among "
        "them; metastable: at most 0.1 eV/atom above the hull. In brackets, 90 % of bootstrap samples of the "
        f"structures. FM + retrofit is FM: its structures are the plain flow's.{checked}",
    )


def _steps(trained: Any) -> str:
    done, of = dig(trained, "steps"), dig(trained, "of")
    return NONE if done is None else f"{done:,}" if of is None else f"{done:,} of {of:,}"


def _filter(n: Numbers) -> Table:
    rows: Rows = []

    def add(label: str, entry: Any, paper: str = NONE, paper_lift: str = NONE) -> None:
        row = {"": label, "paper, AUPRC": paper, "AUPRC": number(dig(entry, "auprc"))}
        row |= {"a random order's": number(dig(entry, "prevalence")), "paper, lift": paper_lift}
        row["lift"] = lift_text(entry)
        rows.append(row | {f"metastable % of the surest {share}": _precision(entry, share) for share in SHARES})

    ceilings = ["33 in the paper (0.03)"]
    for m, name in _methods(n).items():
        share = dig(n, f"{m}/own/prevalence")
        random = {"auprc": share, "prevalence": share, "lift": None if share is None else 1.0}
        add(f"{name}: random order", {**random, **{f"precision_{s}": share for s in SHARES}}, "0.03", "1.0")
        for label, paper, paper_lift, path in FILTERS:
            add(f"{name}: {label}", entry_at(n[m], path), paper, paper_lift)
        for key, entry in (dig(n, f"{m}/baselines") or {}).items():
            add(f"{name}: no model, ranked by {key}", entry)
        if share:
            ceilings.append(f"{1 / share:.1f} for {name} ({share:.3f})")
    return Table(
        rows,
        "Filtering (tab:filter-auprc, crystals)",
        "Positive class: at most 0.1 eV/atom above the hull; what could not be judged is not. The lift is AUPRC over "
        "the share of positives, which is a random order's AUPRC, and is at most one over it: "
        f"{', '.join(ceilings)}. "
        "Heads are fitted on the first half and read on the second; `no labels` is the default score there. "
        "`no model`: ranked by a property of the structure alone, such as its number of atoms, few first.",
    )


def _channels(n: Numbers) -> Table:
    columns = {
        f"{name}: {label}": (m, reading) for m, name in _methods(n).items() for reading, label in READINGS.items()
    }
    rows = [
        {
            "": f"{channel}: {words}",
            **{c: lift_text(entry_at(n[m], f"{reading}/{channel}/{score}")) for c, (m, reading) in columns.items()},
        }
        for channel, (score, words) in product(CHANNELS if columns else (), SCORES.items())
    ]
    return Table(rows, "Lift of every score of every channel")


def _thresholds(n: Numbers) -> Table:
    rows = []
    for m, name in _methods(n).items():
        levels = dig(n, f"{m}/thresholds") or dict.fromkeys(THRESHOLDS)
        for level, entry in sorted(levels.items(), key=lambda item: float(item[0])):
            share = dig(entry, "prevalence")
            row = {"": name, "at most, eV/atom": level, "% of all": number(share, 1, PERCENT)}
            row |= {"AUPRC": number(dig(entry, "auprc")), "lift": lift_text(entry)}
            row["best lift"] = number(1 / share if share else None, 1)
            rows.append(row | {f"% of the surest {s}": _precision(entry, s) for s in SHARES})
    note = "The default score, with another energy above the hull for what counts as good."
    return Table(rows, "Other thresholds", note)


def _universality(n: Numbers) -> Table:
    points = n.get("hutchinson") or []
    rows = [{"": "paper", **{label: paper for label, (_, paper) in AGREEMENT.items()}}]
    estimators = [p for p in points if p.get("K") is None] or [{"name": name} for name in ("linearised", "diagonal")]
    for point in estimators:
        values = {label: number(point.get(key), 2) for label, (key, _) in AGREEMENT.items()}
        rows.append({"": str(point.get("name", NONE)), **values})
    return Table(
        rows,
        "Variance against |∇·v| (tab:universality, crystals row)",
        "The divergence is Hutchinson's, with the reference's probes (next table). Per step: the mean over steps; the "
        "paper's ± is over steps too. Divergence and variance are sums over atoms, so they agree in part by the number "
        "of atoms alone: its row, where it was read, says how far.",
    )


def _hutchinson(n: Numbers) -> Table:
    points = n.get("hutchinson") or []
    sweep = {p["K"]: p for p in points if p.get("K") is not None}
    whole = [p for p in points if p.get("K") is None and "," not in str(p.get("name"))]

    def row(name: str, k: int | None, point: Any) -> dict[str, str]:
        cells = {"": name, "K": str(k or NONE), "GFLOPs a query": number(dig(point, "flops"), 1, 1e-9)}
        for label, paper in zip(SWEEP, PAPER_SWEEP.get(k or 0, (NONE,) * len(SWEEP)), strict=True):
            cells |= {f"paper: {label}": paper, label: number(dig(point, AGREEMENT[label][0]))}
        return cells

    def matched(point: Run, kind: str) -> str:
        """Return the smallest K that agrees as well per step."""
        own = point.get(f"per_step_{kind}")
        values = {k: dig(p, f"per_step_{kind}") for k, p in sorted(sweep.items())}
        if own is None or not values:
            return NONE
        return next((f"K = {k}" for k, v in values.items() if v is not None and v >= own), "more than any K here")

    rows = [row("Hutchinson", k, sweep.get(k)) for k in sorted(sweep or PAPER_SWEEP)]
    rows += [row(str(p["name"]), None, p) for p in whole]
    reached = "".join(
        f" {p['name']} is reached per step by {matched(p, 'spearman')} (Spearman), {matched(p, 'pearson')} (Pearson)."
        for p in whole
    )
    return Table(
        rows,
        "Hutchinson's estimate with K probes (tab:hutchinson-full, fig:mech-flops)",
        "Ours: correlation with |∇·v| by an independent Hutchinson reference of as many probes as the largest K, so it "
        "rises to 1. The paper's stops below, and at its largest K is its universality row (0.87, 0.79, 0.96, 0.93): "
        "its columns may be of the variance against Hutchinson with K probes instead."
        f"{reached} The paper's pass matches K ≈ 13 (Spearman) and 7 (Pearson).",
    )


def _sampler(n: Numbers) -> Table:
    rows = []
    for m, name in _methods(n).items():
        others = dig(n, f"{m}/sampler") or {}
        for options, entry in {"as in the other tables": n[m], **others}.items() if others else ():
            row = {"": f"{name}: {options}", "structures": number(dig(entry, "quality/structures"), 0)}
            row |= {what[0]: quality_text(dig(entry, "quality"), what) for what in SAMPLED}
            rows.append({**row, "AUPRC": number(dig(entry, "own/auprc")), "lift": lift_text(dig(entry, "own"))})
    note = "Coordinates are followed at 1 + s·t times their speed."
    return Table(rows, "Steps and anti-annealing of the sampler", note)


# Per table: its function, the tasks that its numbers come from (as words in their names), and the entry of their
# provenance that counts structures; empty where the rows state structures and steps.
METHOD_TASKS = tuple(METHODS)
TABLES: dict[str, tuple[Callable[[Numbers], Table], tuple[str, ...], str]] = {
    "table1_quality": (_quality, METHOD_TASKS, "samples"),
    "table2_auprc": (_filter, METHOD_TASKS, "samples"),
    "channels": (_channels, METHOD_TASKS, "samples"),
    "thresholds": (_thresholds, METHOD_TASKS, "samples"),
    "universality": (_universality, ("hutchinson", "sweep"), "few"),
    "hutchinson": (_hutchinson, ("hutchinson", "sweep"), "few"),
    "sampler": (_sampler, ("sampler", *METHODS), ""),
}


def tables_of(n: Numbers) -> dict[str, Table]:
    """Return every table that has rows, from one result file's numbers."""
    made = {name: make(n) for name, (make, _, _) in TABLES.items()}
    return {name: table for name, table in made.items() if table.rows}


@from_results
def headline(out: Path) -> Table:
    """Return the main table, from the first result file."""
    n = _numbers(read_results(out)[0], out)
    whole = {p.get("name"): p for p in n.get("hutchinson") or [] if p.get("K") is None}

    rows: Rows = []

    def add(label: str, paper: str, *values: str) -> None:
        rows.append({"": label, "paper": paper, **dict(zip(METHODS.values(), values, strict=True))})

    measures = zip(SAMPLED, ("0.21; 0.21", NONE, "3"), strict=True)
    for measure, paper in measures:
        label = "metastable (at most 0.1 eV/atom above it), %" if measure is QUALITY[4] else measure[0]
        add(label, paper, *(quality_text(dig(n, f"{m}/quality"), measure) for m in METHODS))
    for share in reversed(SHARES):
        add(f"metastable, % of the surest {share}", NONE, *(_precision(dig(n, f"{m}/own"), share) for m in METHODS))
    lifts = [(label, paper, path) for label, _, paper, path in FILTERS]
    lifts += [(f"{name}, no model", NONE, f"baselines/{key}") for key, name in BARE.items()]
    for label, paper, path in lifts:
        add(f"lift: {label}", paper, *(lift_text(entry_at(n.get(m), path)) for m in METHODS))
    agreement = number(dig(whole.get("linearised"), "integrated_spearman"), 2)
    paper = AGREEMENT["Spearman, integrated"][1]
    add("Spearman of the linearised variance and |∇·v|, integrated", paper, agreement, NONE)
    # Rows and methods without numbers are left out here; tables.md shows what is missing.
    known = [name for name in METHODS.values() if any(row[name] != NONE for row in rows)]
    present = [row for row in rows if any(row[name] != NONE for name in known)]
    return Table([{name: row[name] for name in ("", "paper", *known)} for row in present])


# ---- files -----------------------------------------------------------------------------------------------------------


def _numbers(result: Mapping[str, Any], out: Path) -> Numbers:
    numbers = result.get("numbers")
    if not isinstance(numbers, dict):
        raise CheckpointError(
            f"a result file in {out} holds no numbers; run python -m experiments reproduce crystals to the end"
        )
    return numbers


def _origin(result: Mapping[str, Any], name: str) -> str:
    """Return where a table's numbers are from: its tasks, or the whole result file where they do not state it."""
    _, words, structures = TABLES[name]
    about = result.get("provenance") or {}
    tasks = (about.get("pieces") or {}).items()
    parts = [part for task, part in tasks if isinstance(part, dict) and any(word in task for word in words)]

    def each(*paths: str, length: int | None = None) -> str:
        for path, sources in product(paths, (parts, [about])):
            if found := [value for part in sources if (value := dig(part, path)) is not None]:
                return ", ".join(dict.fromkeys(f"{v:,}" if isinstance(v, int) else f"{v}"[:length] for v in found))
        return NONE

    counted = f" {each(structures, 'samples')} structures; {each('steps', 'recipe/steps')} steps;" if structures else ""
    return (
        f"Commit {each('commit')}; {each('device')}; seed {result.get('seed', NONE)};{counted} "
        f"{each('date', length=10)}."
    )


@from_results
def tables(out: Path) -> list[Path]:
    """Write `summary.json` and `tables.md` from the first result file."""
    result = read_results(out)[0]
    found = tables_of(_numbers(result, out))
    heading = (
        "# Crystals: the paper's columns beside ours\n\n"
        "One seed. Made by `python -m experiments reproduce crystals`; `python -m experiments report` on this folder "
        "makes the tables again from `cells/`. What was tried, and which piece was read how, is in NOTES.md."
    )
    origins = {name: _origin(result, name) for name in found}
    return write_tables(out, heading, found, result.get("provenance"), origins=origins)
