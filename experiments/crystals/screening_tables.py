"""Tables and figures of screened crystals, beside published results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.common.tables import NONE, PERCENT, Numbers, Rows, dig, number, with_interval, write_tables
from experiments.crystals.confidence import GOAL, ORDERS, PLAIN, QUANTITIES, SHARES, Columns
from fmwc.files import write_bytes
from fmwc.report.page import CONFIDENCE, DASHED, FAINT, LEGEND_ABOVE, ONE, png, styled
from fmwc.report.table import Table

__all__ = [
    "PUBLISHED",
    "energies_figure",
    "tables_of",
    "verdicts",
    "write_figures",
    "write_screening",
]


# ---- published results -----------------------------------------------------------------------------------------------


class Published(NamedTuple):
    """A published result on MP-20, with one value per column of its table; `None` if it is not reported."""

    values: tuple[float | None, ...]
    source: str


# Structural and compositional validity, coverage recall and precision (%), Wasserstein distances of density and of the
# number of elements. All four rows are those of Table 3 in arXiv:2503.16278, which quotes the other papers.
DISTRIBUTION = {
    "CDVAE": Published((100.0, 86.70, 99.15, 99.49, 0.6875, 1.432), "arXiv:2110.06197"),
    "DiffCSP": Published((100.0, 83.25, 99.71, 99.76, 0.3502, 0.3398), "arXiv:2309.04475"),
    "FlowMM, 1,000 steps": Published((96.85, 83.19, 99.49, 99.58, 0.239, 0.083), "arXiv:2406.04713"),
    "Uni-3DAR": Published((99.89, 90.31, 99.62, 99.83, 0.4768, 0.0694), "arXiv:2503.16278"),
}
# Unique, novel, metastable, metastable S.U.N. (%), RMSD (Å), from the README of microsoft/mattergen
# (commit ac9ddd4), where `stable` means at most 0.1 eV/atom above the hull.
STABILITY = {
    "MatterGen, trained on MP-20": Published((100.0, 75.44, 42.19, 22.27, 0.110), "microsoft/mattergen, README"),
    "DiffCSP, trained on MP-20": Published((100.0, 70.73, 36.23, 12.71, 0.232), "microsoft/mattergen, README"),
    "CDVAE": Published((100.0, 92.00, 19.31, 13.99, 0.359), "microsoft/mattergen, README"),
}
PUBLISHED = {"distribution": DISTRIBUTION, "stability": STABILITY}

SETS = {
    "drawn": "ours, as drawn",
    "same, drawn": "ours, those relaxed, as drawn",
    "relaxed": "ours, relaxed",
    "test": "MP-20, test split",
}


# ---- standard tables -------------------------------------------------------------------------------------------------

Measure = tuple[str, str, float, int]  # label, key, factor, digits

MEASURES: tuple[Measure, ...] = (
    ("structurally valid, %", "structurally_valid", PERCENT, 2),
    ("compositionally valid, %", "compositionally_valid", PERCENT, 2),
    ("coverage recall, %", "coverage_recall", PERCENT, 2),
    ("coverage precision, %", "coverage_precision", PERCENT, 2),
    ("W(density), g/cm³", "wasserstein_density", 1.0, 3),
    ("W(number of elements)", "wasserstein_elements", 1.0, 3),
    ("W(energy), eV/atom", "wasserstein_energy", 1.0, 3),
)
OUTCOMES: tuple[Measure, ...] = (
    ("unique, %", "unique", PERCENT, 1),
    ("novel, %", "novel", PERCENT, 1),
    ("metastable, %", "metastable", PERCENT, 1),
    ("metastable S.U.N., %", "msun", PERCENT, 1),
    ("RMSD, Å", "rmsd", 1.0, 3),
    ("stable, %", "stable", PERCENT, 1),
    ("stability unknown, %", "stable_unknown", PERCENT, 1),
    ("S.U.N., %", "sun", PERCENT, 1),
    ("energy above the hull, eV/atom", "e_above_hull", 1.0, 3),
    ("steps", "relax_steps", 1.0, 1),
    ("converged, %", "converged", PERCENT, 1),
    ("not judged", "problems", 1.0, 0),
)
SYMMETRY: tuple[Measure, ...] = tuple(
    (f"{label}, {symprec} Å", f"{key}_{symprec}", factor, digits)
    for symprec in ("0.1", "0.01")
    for label, key, factor, digits in (
        ("without symmetry (P1), %", "p1", PERCENT, 1),
        ("space groups", "space_groups", 1.0, 0),
        ("distance from the test split", "space_group_distance", 1.0, 3),
    )
)


def _standard(n: Numbers, measures: Sequence[Measure], published: Mapping[str, Published]) -> Rows:
    """Return one row per set of structures and one per published result, which has values of the first measures."""
    rows = []
    for kind, label in SETS.items():
        if found := dig(n, f"sets/{kind}"):
            cells = {name: number(dig(found, key), digits, factor) for name, key, factor, digits in measures}
            rows.append({"": label, "structures": f"{found['structures']:,}", **cells})
    for label, result in published.items():
        pairs = zip(measures, result.values, strict=False)
        rows.append({"": label, **{name: number(value, digits) for (name, _, _, digits), value in pairs}})
        rows[-1]["source"] = result.source
    return [{name: row.get(name, NONE) for name in dict.fromkeys(k for one in rows for k in one)} for row in rows]


def _limit(n: Numbers) -> str:
    return number(dig(n, "relaxation/limit"), 0)


def _distribution(n: Numbers) -> Table:
    return Table(
        _standard(n, MEASURES, DISTRIBUTION),
        "Validity, coverage and distances",
        "Definitions of CDVAE: structurally valid if all atoms are at least 0.5 Å apart; compositionally valid by "
        "SMACT with its oxidation states of 2014; coverage of the test split with cutoffs 0.4 and 10. Recall grows "
        "with the number of structures. W: Wasserstein distance of valid structures from the test split; other papers "
        "compute it from 1,000 of them. Our energies are CHGNet's; real structures are not relaxed for them. "
        "Published distances of energies come from another model and are left out. Published rows are as quoted in "
        "arXiv:2503.16278, Table 3.",
    )


def _outcomes(n: Numbers) -> Table:
    return Table(
        [row for row in _standard(n, OUTCOMES, STABILITY) if row[""] != SETS["test"]],
        "Stability, uniqueness and novelty",
        f"Judged by {n['model']}, whose errors are not corrected; relaxed for at most {_limit(n)} steps, and then "
        "compared with relaxed references if there are any. Metastable: at most 0.1 eV/atom above the hull. Shares are "
        "of all structures. Unknown: below the hull where only pure elements compete, which counts neither as stable "
        "nor as S.U.N. Novel: not in MP-20 (all splits). RMSD: displacement of atoms by index, without drift. "
        "Published rows: relaxed with DFT, at most 0.1 eV/atom above the hull of a larger reference (MP and "
        "Alexandria), and novel with respect to it, so they are comparable with one another but not with ours.",
    )


def _symmetry(n: Numbers) -> Table:
    return Table(
        _standard(n, SYMMETRY, {}),
        "Space groups",
        "By spglib with two tolerances. Distance: half the sum of absolute differences of the shares of space groups, "
        "0 for equal distributions and 1 for disjoint ones; it also decreases with the number of structures.",
    )


# ---- confidence ------------------------------------------------------------------------------------------------------


def _names(n: Numbers, part: str, order: str) -> list[str]:
    """Return the quantities that a part of the numbers holds."""
    return [name for name in QUANTITIES if dig(n, f"confidence/{part}/{order}/selections/{name}")]


def _selected(entry: Any, name: str, at: int) -> str:
    quantity = QUANTITIES[name]
    mean, interval = dig(entry, "means")[at], dig(entry, "intervals")[at]
    return with_interval(mean, interval, quantity.digits, quantity.factor)


def _against_confidence(n: Numbers, part: str, title: str) -> Table:
    rows = []
    for name in _names(n, part, "confidence"):
        entry = dig(n, f"confidence/{part}/confidence/selections/{name}")
        row = {"": QUANTITIES[name].label}
        for at, share in enumerate(SHARES):
            row["all" if share == 1 else f"surest {share:.0%}"] = _selected(entry, name, at)
        ratio = entry["ratio"] if QUANTITIES[name].factor == PERCENT else [None] * 3  # energies may be negative
        rows.append(row | {f"ratio of the surest {GOAL:.0%} to all": with_interval(ratio[0], ratio[1:], 2)})
    count = dig(n, f"confidence/{part}/structures")
    note = (
        f"{count:,} structures, ranked by {n['score']}. Uniqueness is judged within each selection. In brackets: 90 % "
        "bootstrap intervals over structures."
    )
    return Table(rows, title, " ".join([note, *(verdicts(n) if part == "relaxed" else [])]))


def _rivals(n: Numbers) -> Table:
    rows = []
    for name in _names(n, "relaxed", "confidence"):
        row = {"": QUANTITIES[name].label}
        at = SHARES.index(GOAL)
        row["all"] = _selected(dig(n, f"confidence/relaxed/confidence/selections/{name}"), name, -1)
        for order, label in ORDERS.items():
            row[label] = _selected(dig(n, f"confidence/relaxed/{order}/selections/{name}"), name, at)
        for order in PLAIN:
            entry = dig(n, f"confidence/relaxed/{order}/equal sizes/{name}")
            row[f"{ORDERS[order]}, equal sizes"] = _selected(entry, name, at)
        rows.append(row)
    return Table(
        rows,
        f"The first {GOAL:.0%} by confidence and by rivals",
        "Ties in the number of atoms count in part. Known last: structures of MP-20, and repetitions, are put behind "
        "the others, which needs no energy. Equal sizes: the same share of the structures with each number of atoms, "
        "so that selected structures are as large as all. The energy as drawn costs one evaluation of the energy model "
        "per structure; confidence and the number of atoms need none.",
    )


def _correlations(n: Numbers) -> Table:
    rows = []
    for name in _names(n, "relaxed", "confidence"):
        row = {"": QUANTITIES[name].label}
        for kind, words in (("spearman", ""), ("partial", ", size partialled out")):
            for order in PLAIN if words else (*PLAIN, "atoms"):
                found = dig(n, f"confidence/relaxed/{order}/correlations/{name}/{kind}")
                row[f"{ORDERS[order]}{words}"] = with_interval(found[0], found[1:], 2)
        rows.append(row)
    return Table(
        rows,
        "Rank correlations",
        "Spearman's correlation of each order with each quantity; positive if the first structures have high values. "
        "Partialled out: the partial rank correlation given the number of atoms. In brackets: 90 % bootstrap "
        "intervals. The energy drop contains the energy as drawn, so these two correlate by definition.",
    )


def _effect(entry: Any, better: int) -> str:
    """Return whether a selection is better or worse than all, by the interval of the difference."""
    _, low, high = entry["difference"]
    if low is None or (low <= 0 <= high):
        return "no clear difference"
    return "better" if (low > 0) == (better > 0) else "worse"


def verdicts(n: Numbers) -> list[str]:
    """Return sentences that say where the surest structures are better after relaxation, and where they are not."""
    sentences: list[str] = []
    if not dig(n, "confidence/relaxed"):
        return sentences
    for kind, words in (("selections", ""), ("equal sizes", ", at equal sizes")):
        found: dict[str, list[str]] = {"better": [], "no clear difference": [], "worse": []}
        for name in _names(n, "relaxed", "confidence"):
            quantity, entry = QUANTITIES[name], dig(n, f"confidence/relaxed/confidence/{kind}/{name}")
            if quantity.stage == "relaxed" and quantity.better:
                at = SHARES.index(GOAL)
                chosen, whole = (number(entry["means"][i], quantity.digits, quantity.factor) for i in (at, -1))
                label = quantity.label.removeprefix("relaxed: ").removeprefix("relaxation: ")
                found[_effect(entry, quantity.better)].append(f"{label} ({chosen} against {whole})")
        parts = [f"{effect}: {', '.join(labels)}" for effect, labels in found.items() if labels]
        sentences.append(f"After relaxation, the surest {GOAL:.0%} against all{words} — {'; '.join(parts)}.")
    for order, label in ORDERS.items():
        ratio = dig(n, f"confidence/relaxed/{order}/selections/msun_relaxed")["ratio"]
        if ratio[0] is not None:
            reached = with_interval(ratio[0], ratio[1:], 2)
            sentences.append(f"Metastable S.U.N. after relaxation, {label}: first {GOAL:.0%} {reached} times all.")
    return sentences


def tables_of(n: Numbers) -> dict[str, Table]:
    """Return all tables that the numbers suffice for."""
    made = {"distribution": _distribution(n), "outcomes": _outcomes(n), "symmetry": _symmetry(n)}
    if dig(n, "confidence/relaxed"):
        made["confidence"] = _against_confidence(n, "relaxed", "Every quantity against confidence")
        made["rivals"], made["correlations"] = _rivals(n), _correlations(n)
    if dig(n, "confidence/drawn"):
        made["confidence_drawn"] = _against_confidence(n, "drawn", "All structures as drawn, against confidence")
    return made


def write_screening(out: Path, n: Numbers) -> list[Path]:
    """Write `tables.md` and `summary.json`."""
    heading = "# Screening of drawn crystals\n\nWritten by `python -m experiments screen` from `numbers.json`."
    return write_tables(out, heading, tables_of(n), n.get("provenance"))


# ---- figures ---------------------------------------------------------------------------------------------------------

STAGES = ("drawn", "relaxed")


@styled
def energies_figure(tables: Mapping[str, Columns]) -> Figure:
    """Plot the energy above the hull after relaxation against that as drawn, coloured by confidence."""
    before, after = (np.array(tables[stage]["e_above_hull"], float) for stage in STAGES)
    doubt = np.array(tables["drawn"]["doubt"], float)
    place = 1 - np.argsort(np.argsort(doubt)) / max(len(doubt) - 1, 1)
    known = np.isfinite(before) & np.isfinite(after)
    order = np.argsort(place[known])  # the surest on top
    figure = Figure(figsize=(ONE[0], ONE[0] * 0.85))
    axes = figure.add_subplot()
    low, high = (float(np.percentile(np.append(before[known], 0.0), level)) for level in (1, 98))
    axes.plot([low, high], [low, high], color=FAINT, linewidth=1, linestyle=DASHED, label="unchanged")
    axes.axhline(0.1, color=FAINT, linewidth=1, label="0.1 eV/atom")
    points = axes.scatter(
        before[known][order], after[known][order], c=place[known][order], cmap=CONFIDENCE, s=9, linewidths=0
    )
    figure.colorbar(points, ax=axes, label="rank by confidence (1: surest)")
    axes.set(xlabel="energy above the hull as drawn, eV/atom", ylabel="after relaxation, eV/atom")
    axes.set(xlim=(low - 0.05, high), ylim=(low - 0.05, 0.6 * high))
    axes.legend(**LEGEND_ABOVE, ncols=2)
    return figure


def write_figures(out: Path, tables: Mapping[str, Columns]) -> list[Path]:
    """Write the figure of relaxed structures as a PNG file; none if there are none."""
    if not tables:
        return []
    return [write_bytes(out / "figures" / "energies.png", png(energies_figure(tables)))]
