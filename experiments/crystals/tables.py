"""Tables that compare the paper's crystal columns with our results in a folder.

Missing numbers are printed as a dash; missing methods have no rows.
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
from experiments.crystals import screening_tables
from fmwc.crystals.recipe import SCORE
from fmwc.errors import CheckpointError
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
QUALITY: tuple[Quality, ...] = (  # the paper has a value of the first
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
SAMPLED = (QUALITY[0], QUALITY[2], QUALITY[4])  # measures in the table of the sampler's options
FILTERS: tuple[Lift, ...] = (
    (f"the score of the variance, {SCORE}", NONE, NONE, "own"),
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
    """Return the entry at a path such as `linearised/type/integrated`, where `type/integrated` is a single key.

    >>> entry_at({"diagonal": {"peak": 1, "type/peak": 2}}, "diagonal/all/peak")
    1
    """
    first, _, key = path.partition("/")
    entry = dig(numbers, first)
    if not key or not isinstance(entry, dict):
        return entry if not key else None
    return entry.get(key, entry.get(key.removeprefix("all/")))  # `all` may be left out


def lift_text(entry: Any) -> str:
    """Format the lift with its interval."""
    return with_interval(dig(entry, "lift"), dig(entry, "lift_interval"), 2)


def quality_text(entry: Any, row: Quality) -> str:
    """Format a number of a judgement's summary with its interval."""
    _, key, factor, digits = row
    return with_interval(dig(entry, key), dig(entry, f"intervals/{key}"), digits, factor)


def _methods(n: Numbers) -> dict[str, str]:
    """Return the methods in a result file with their names."""
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
    for label, key in (("structures", "structures"), ("structures that could not be judged", "problems")):
        rows.append(row(label, [number(dig(entry, key), 0) for entry in quality.values()]))
    rows.append(row("training steps", [_steps(dig(n, f"{m}/trained")) for m in METHODS]))
    known = {name: dig(n, f"{m}/bit_for_bit") for m, name in METHODS.items()}
    same = [f"{name} {'yes' if yes else 'NO'}" for name, yes in known.items() if yes is not None]
    checked = f" Structures with and without confidence are the same bit for bit: {'; '.join(same)}." if same else ""
    if any(yes is False for yes in known.values()):
        checked += (
            " On a GPU, the order of sums over neighbours is not fixed, so two runs of the plain flow also differ; on "
            "a CPU they are identical."
        )
    return Table(
        rows,
        "Quality (tab:quality-summary, crystals)",
        "Energies are CHGNet's, without relaxation, relative to a hull of CHGNet energies of MP-20. The "
        "paper uses UMA, another hull, and 2,000 epochs, so our values are comparable with one another "
        "but not with the paper's. Shares refer to all structures, including those that could not be judged. "
        "Metastable: at most 0.1 eV/atom above the hull. In brackets: 90 % bootstrap intervals over structures. The "
        f"structures of FM + retrofit are those of the plain flow (FM).{checked}",
    )


def _steps(trained: Any) -> str:
    done, of = dig(trained, "steps"), dig(trained, "of")
    return NONE if done is None else f"{done:,}" if of is None else f"{done:,} of {of:,}"


def _filter(n: Numbers) -> Table:
    rows: Rows = []

    def add(label: str, entry: Any, paper: str = NONE, paper_lift: str = NONE) -> None:
        row = {"": label, "paper, AUPRC": paper, "AUPRC": number(dig(entry, "auprc"))}
        row |= {"AUPRC of a random order": number(dig(entry, "prevalence")), "paper, lift": paper_lift}
        row["lift"] = lift_text(entry)
        rows.append(row | {f"metastable among the surest {share}, %": _precision(entry, share) for share in SHARES})

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
        "Positive class: at most 0.1 eV/atom above the hull. Structures that could not be judged are negative. The "
        "lift is the AUPRC divided by the share of positives, the AUPRC of a random order. The maximum lift is "
        f"one divided by this share: {', '.join(ceilings)}. "
        "Heads are fitted on the first half and evaluated on the second; `no labels` is the score of the variance on "
        "the second half. `no model`: ranked by a property of the structure alone, such as its number of atoms, "
        "smallest first.",
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
            row = {"": name, "maximum, eV/atom": level, "share of all, %": number(share, 1, PERCENT)}
            row |= {"AUPRC": number(dig(entry, "auprc")), "lift": lift_text(entry)}
            row["maximum lift"] = number(1 / share if share else None, 1)
            rows.append(row | {f"share of the surest {s}, %": _precision(entry, s) for s in SHARES})
    note = "The default score, with other maximum energies above the hull for good structures."
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
        "The divergence is the Hutchinson reference of the next table. Per step: the mean over steps; the paper's ± is "
        "also over steps. Divergence and variance are sums over atoms, so they correlate in part through the number of "
        "atoms alone. The row `number of atoms`, if present, shows how much.",
    )


def _hutchinson(n: Numbers) -> Table:
    points = n.get("hutchinson") or []
    sweep = {p["K"]: p for p in points if p.get("K") is not None}
    whole = [p for p in points if p.get("K") is None and "," not in str(p.get("name"))]

    def row(name: str, k: int | None, point: Any) -> dict[str, str]:
        cells = {"": name, "K": str(k or NONE), "GFLOPs per evaluation": number(dig(point, "flops"), 1, 1e-9)}
        for label, paper in zip(SWEEP, PAPER_SWEEP.get(k or 0, (NONE,) * len(SWEEP)), strict=True):
            cells |= {f"paper: {label}": paper, label: number(dig(point, AGREEMENT[label][0]))}
        return cells

    def matched(point: Run, kind: str) -> str:
        """Return the smallest K with at least the same agreement per step."""
        own = point.get(f"per_step_{kind}")
        values = {k: dig(p, f"per_step_{kind}") for k, p in sorted(sweep.items())}
        if own is None or not values:
            return NONE
        return next((f"K = {k}" for k, v in values.items() if v is not None and v >= own), "no K in this table")

    rows = [row("Hutchinson", k, sweep.get(k)) for k in sorted(sweep or PAPER_SWEEP)]
    rows += [row(str(p["name"]), None, p) for p in whole]
    reached = "".join(
        f" {p['name']} is matched per step by {matched(p, 'spearman')} (Spearman), {matched(p, 'pearson')} (Pearson)."
        for p in whole
    )
    return Table(
        rows,
        "Hutchinson's estimate with K probes (tab:hutchinson-full, fig:mech-flops)",
        "Ours: the correlation with |∇·v| from an independent Hutchinson reference with as many probes as the "
        "largest K. It increases to 1. The paper's values stay below 1 and, at the largest K, equal its universality "
        "row (0.87, 0.79, 0.96, 0.93), so they may be correlations of the variance with Hutchinson's estimate."
        f"{reached} The paper's estimator matches K ≈ 13 (Spearman) and 7 (Pearson).",
    )


def _sampler(n: Numbers) -> Table:
    rows = []
    for m, name in _methods(n).items():
        others = dig(n, f"{m}/sampler") or {}
        for options, entry in {"as in the other tables": n[m], **others}.items() if others else ():
            row = {"": f"{name}: {options}", "structures": number(dig(entry, "quality/structures"), 0)}
            row |= {what[0]: quality_text(dig(entry, "quality"), what) for what in SAMPLED}
            rows.append({**row, "AUPRC": number(dig(entry, "own/auprc")), "lift": lift_text(dig(entry, "own"))})
    note = "Anti-annealing s multiplies the velocity of the coordinates by 1 + s·t."
    return Table(rows, "Steps and anti-annealing of the sampler", note)


# Per table: its function, the tasks that its numbers come from (as words in their names), and the key of the number of
# structures in their provenance, which is empty if the rows state structures and steps.
METHOD_TASKS = tuple(METHODS)
SCREENING = "screening"  # the task of the tables of `screening_tables`
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
    """Return all tables with rows, from the numbers of one result file."""
    made = {name: make(n) for name, (make, _, _) in TABLES.items()}
    if n.get(SCREENING):
        made |= {f"{SCREENING}_{name}": table for name, table in screening_tables.tables_of(n[SCREENING]).items()}
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
        add(f"metastable among the surest {share}, %", NONE, *(_precision(dig(n, f"{m}/own"), share) for m in METHODS))
    lifts = [(label, paper, path) for label, _, paper, path in FILTERS]
    lifts += [(f"{name}, no model", NONE, f"baselines/{key}") for key, name in BARE.items()]
    for label, paper, path in lifts:
        add(f"lift: {label}", paper, *(lift_text(entry_at(n.get(m), path)) for m in METHODS))
    agreement = number(dig(whole.get("linearised"), "integrated_spearman"), 2)
    paper = AGREEMENT["Spearman, integrated"][1]
    add("Spearman of the linearised variance and |∇·v|, integrated", paper, agreement, NONE)
    # Leave out rows and methods without numbers; tables.md shows what is missing.
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
    """Describe the provenance of a table, from its tasks or else from the whole result file."""
    _, words, structures = TABLES.get(name, (None, (SCREENING,), ""))
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
        "# Crystals: comparison with the paper\n\n"
        "One seed. Written by `python -m experiments reproduce crystals`; `python -m experiments report` on this "
        "folder writes the tables again from `cells/`. NOTES.md describes the choices and the evaluation."
    )
    origins = {name: _origin(result, name) for name in found}
    return write_tables(out, heading, found, result.get("provenance"), origins=origins)
