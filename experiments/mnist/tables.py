"""MNIST tables of the paper's numbers and ours, as data."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.common.evaluation import TIMES
from experiments.common.store import from_results, read_results
from experiments.common.tables import METHODS, NONE, PERCENT, Numbers, dig, number, write_tables
from experiments.mnist.evaluate import HUTCHINSON, KEPT, PROBES, STATES, WINDOWS
from fmwc.report.table import Table

Row = tuple[str, str, str, str]  # label, the paper's value, path of the numbers, path of the failure rate

SCORES = ("integrated", "peak", "temporal_ratio", "endpoint")
DIAGONAL = {"integrated": "0.02", "peak": NONE, "temporal_ratio": "0.04", "endpoint": "0.02"}  # the paper's AUPRC
QUALITY = (
    ("FM (and FM + retrofit)", "5.17", "plain"),
    ("MC-Dropout, dropout off", "4.25", "dropout"),
    ("MC-Dropout, dropout on", "4.25", "dropout/stochastic"),
    ("UA-Flow as published", NONE, "head"),
    ("FMwC, joint", "4.22", "joint"),
)
FIELDS: list[Row] = [
    row
    for m, label in METHODS.items()
    for row in (
        *((f"{label}: linearised, {s}", NONE, f"{m}/linearised/{s}", m) for s in SCORES),
        (f"{label}: linearised, integrated, at every 5th step", NONE, f"{m}/every_5th/integrated", m),
        *((f"{label}: diagonal, {s}", DIAGONAL[s], f"{m}/diagonal/{s}", m) for s in SCORES),
    )
]
RIVALS: list[Row] = [
    ("MC-Dropout, 5 trajectories", "0.08", "dropout/scores/dispersion", "dropout"),
    ("Ensemble of 5", "0.11", "plain/ensemble/dispersion", "plain"),
    *((f"UA-Flow's variance head on the frozen flow, {s}", NONE, f"variance/scores/{s}", "variance") for s in SCORES),
    ("UA-Flow as published, integrated", NONE, "head/scores/integrated", "head"),
    *((f"state sensitivity, {s}", NONE, f"rivals/state_sensitivity/{s}", "plain") for s in SCORES),
    *((f"divergence is uncertainty, {s}", NONE, f"rivals/posterior_trace/{s}", "plain") for s in SCORES),
]
ENDS = {
    "pixels": "transported, all random projections",
    **{f"projections_{k}": f"transported, {k} random projection{'s' * (k > 1)}" for k in (1, 2, 4)},
    **{f"k{k}": f"{k} trajectories" for k in (5, 10, 20)},
}
TRANSPORTED: list[Row] = [
    (f"{label}: {name}", "0.04" if key == "k5" else NONE, f"{m}/transported/scores/{key}", f"{m}/transported")
    for m, label in METHODS.items()
    for key, name in ENDS.items()
]
# Label, path within a method, the paper's value.
AGREEMENT = [
    (f"{estimator}: {label}", f"agreement/{estimator}/{key}", paper if estimator == "diagonal" else NONE)
    for estimator in ("linearised", "diagonal")
    for label, key, paper in (
        ("Pearson, per step", "pearson_step", "0.46 ± 0.18"),
        ("Pearson, integrated", "pearson", "0.57"),
        ("Spearman, per step", "spearman_step", "0.44 ± 0.17"),
        ("Spearman, integrated", "spearman", "0.58"),
    )
]
FIDELITY = [
    (f"t = {t}: {name}, {label}", f"fidelity/{t}/{name}_{key}")
    for t in TIMES
    for name, label, key in (
        ("linearised", "ratio", "ratio"),
        ("linearised", "Spearman", "spearman"),
        ("ceiling", "Spearman", "spearman"),
        ("diagonal", "ratio", "ratio"),
        ("diagonal", "Spearman", "spearman"),
    )
]
# Label, path within a method, the paper's AUPRC.
HEADS = (
    ("linearised, no labels (integrated)", "heads/label_free", NONE),
    ("linearised, L1 head", "heads/l1", NONE),
    ("linearised, boosting head", "heads/boosting", NONE),
    ("diagonal, L1 head", "heads_diagonal/l1", "0.09"),
    ("diagonal, boosting head", "heads_diagonal/boosting", "0.09"),
)
# The lifts of the main table: label, the paper's lift, and the paths of the score and of the failure rate. `*` stands
# for the method.
LIFTS = (
    ("linearised, integrated", NONE, "*/linearised/integrated", "*"),
    ("linearised, integrated, every 5th step", NONE, "*/every_5th/integrated", "*"),
    ("diagonal, integrated", "0.5", "*/diagonal/integrated", "*"),
    ("diagonal, temporal ratio", "1.0", "*/diagonal/temporal_ratio", "*"),
    ("transported dispersion", NONE, "*/transported/scores/pixels", "*/transported"),
    ("5 stochastic trajectories", "1.0", "*/transported/scores/k5", "*/transported"),
    ("ensemble of 5", "2.75", "plain/ensemble/dispersion", "plain"),
    ("MC-dropout, 5 trajectories", "2.0", "dropout/scores/dispersion", "dropout"),
    (
        "UA-Flow's variance head on the frozen flow (temporal ratio, its best score)",
        NONE,
        "variance/scores/temporal_ratio",
        "variance",
    ),
    ("state sensitivity (temporal ratio, its best score)", NONE, "rivals/state_sensitivity/temporal_ratio", "plain"),
    ("divergence is uncertainty", NONE, "rivals/posterior_trace/integrated", "plain"),
)


def _percent(value: Any) -> str:
    return number(value, 2, PERCENT)


def _scores(n: Numbers, rows: Iterable[Row], title: str, note: str = "") -> Table:
    """Return a table of scores: AUPRC across and within classes, also divided by the failure rate."""
    kept = f"failed % of surest {KEPT:.0%}, within class"
    columns = ("", "paper, AUPRC", "AUPRC", "÷ prevalence", "within class", "÷ prevalence ", kept)
    lines = []
    for label, paper, path, base in rows:
        if entry := dig(n, path):
            run, area, within = dig(n, base), entry["auprc"], entry["auprc_within"]
            digits = f" ({run['samples']:,} digits)" if "samples" in run else ""
            floor = run["failure"]
            cells = (number(area), number(area / floor, 2), number(within), number(within / floor, 2))
            lines.append((label + digits, paper, *cells, _percent(entry["kept_within"])))
    return Table.from_rows(columns, lines, title, note)


def _quality(n: Numbers) -> Table:
    plain = n["plain"]
    fid, failure = ([member[key] for member in plain["members"]] for key in ("fid", "failure"))
    spread = f"{mean(fid):.2f} ± {stdev(fid):.2f}", f"{_percent(mean(failure))} ± {_percent(stdev(failure))}"
    first, *rows = (
        (label, paper, number(dig(n, path)["fid"], 2), _percent(dig(n, path)["failure"]))
        for label, paper, path in QUALITY
    )
    members = (f"FM, mean ± std over {len(fid)} seeds (ensemble members)", "5.17; 4.35", *spread)
    floor = ("training images (seen by the judge)", NONE, number(plain["floor_fid"], 2), NONE)
    return Table.from_rows(
        ("", "paper, FID", "FID", "failed %"),
        [first, members, *rows, floor],
        "Quality (tab:quality-summary)",
        "FID is the Fréchet distance in the penultimate layer of our judge. The paper uses another classifier, so "
        "compare only our values with each other. FM + retrofit has the same digits as FM, bit for bit. The judge's "
        f"accuracy on the test split is {plain['judge_accuracy']:.2%}.",
    )


def _both(n: Numbers, path: str, digits: int) -> list[str]:
    """Return one number per method."""
    return [number(dig(n[m], path), digits) for m in METHODS]


def _sweep(n: Numbers) -> Table:
    runs = {"FM": n["plain"]["sweep"], METHODS["joint"]: n["joint"]["sweep"]}
    columns = [f"{label}, {metric}" for label in runs for metric in ("FID", "failed %")]
    lines = []
    for steps in n["plain"]["sweep"]:
        pairs = [(number(run[steps]["fid"], 2), _percent(run[steps]["failure"])) for run in runs.values()]
        lines.append((steps, *chain.from_iterable(pairs)))
    title = "Quality by number of uniform Euler steps (fig:cross-app-adaptive, uniform part)"
    return Table.from_rows(("steps", *columns), lines, title)


def tables_of(n: Numbers) -> dict[str, Table]:
    """Return all tables, from the numbers of one result file."""
    repeats = [
        (f"seed {seed}: linearised, {s}", NONE, f"repeats/{seed}/linearised/{s}", f"repeats/{seed}")
        for seed in n["repeats"]
        for s in SCORES
    ]
    windows = [
        (f"{label}: t = {a}–{b}", NONE, f"{m}/windows/{a}–{b}", m) for m, label in METHODS.items() for a, b in WINDOWS
    ]
    agree = "; ".join(
        f"{label}: median ratio to the largest k {n[m]['transported']['ratio']:.2f}, Spearman "
        f"{n[m]['transported']['spearman']:.2f}"
        for m, label in METHODS.items()
    )
    heads = [
        (f"{label}: {kind}", paper, number(dig(n[m], path)))
        for m, label in METHODS.items()
        for kind, path, paper in HEADS
    ]
    return {
        "table1_quality": _quality(n),
        "table2_auprc": _scores(
            n,
            [*FIELDS, *RIVALS],
            "Filtering (tab:filter-auprc)",
            "Positive class: the judge assigns the digit to another class than requested. `within class`: the score is "
            "standardised among digits of the requested class, which needs no labels. The paper's prevalence is 0.04.",
        ),
        "heads": Table.from_rows(
            ("", "paper, AUPRC", "AUPRC"),
            heads,
            "Learned heads, within class",
            "Fitted on one half and evaluated on the other.",
        ),
        "repeats": _scores(n, repeats, "FM + retrofit with another seed of the flow"),
        "transported": _scores(
            n,
            TRANSPORTED,
            "Transported dispersion compared with k stochastic trajectories",
            f"The first {n['retrofit']['transported']['samples']:,} digits. {agree}.",
        ),
        "universality": Table.from_rows(
            ("", "paper", *METHODS.values()),
            [(label, paper, *_both(n, path, 2)) for label, path, paper in AGREEMENT],
            "Correlation of variance and |∇·v| (tab:universality, MNIST row)",
            f"The divergence uses Hutchinson's estimator with {HUTCHINSON} probes, and the linearised variance uses "
            f"{PROBES} probes. 500 digits, every second step. Per-step values are means over steps.",
        ),
        "fidelity": Table.from_rows(
            ("", *METHODS.values()),
            [(label, *_both(n, path, 3)) for label, path in FIDELITY],
            "Variance per image compared with 256 posterior draws",
            f"Median ratio and Spearman over {STATES} images; linearised with {PROBES} probes. `ceiling` compares a "
            "second set of 256 draws with the first.",
        ),
        "sweep": _sweep(n),
        "windows": _scores(n, windows, "Windows of the integrated score, linearised"),
    }


def headline(n: Numbers) -> Table:
    """Return the main table."""

    def lift(method: str, path: str, base: str) -> str:
        if method == "joint" and "*" not in path:
            return NONE
        entry, run = (dig(n, p.replace("*", method)) for p in (path, base))
        return number(entry["auprc_within"] / run["failure"], 1)

    fids = [number(n[m]["fid"], 2) for m in ("plain", "joint")]  # FM and the retrofit have the same digits
    heads = [f"{number(n[m]['heads']['l1'])}; {number(n[m]['heads']['label_free'])}" for m in METHODS]
    failed = [_percent(n[m]["failure"]) for m in METHODS]
    kept = [_percent(n[m]["linearised"]["integrated"]["kept_within"]) for m in METHODS]
    lines = [
        (f"FID (training images: {n['plain']['floor_fid']:.2f})", "5.17; 4.22", *fids),
        ("failed, %", "4", *failed),
        (f"failed, %, surest {KEPT:.0%}", NONE, *kept),
        *((f"lift: {label}", paper, *(lift(m, *paths) for m in METHODS)) for label, paper, *paths in LIFTS),
        ("AUPRC on a held-out half: L1 head; score without labels", "0.09; 0.04", *heads),
    ]
    return Table.from_rows(("", "paper", *METHODS.values()), lines)


@from_results
def tables(out: Path) -> list[Path]:
    """Write `summary.json` and `tables.md` from the first result file."""
    result = read_results(out)[0]
    about = result["provenance"]
    heading = (
        "# MNIST: results of the paper and of fmwc\n\n"
        f"{about['samples']:,} digits, {about['steps']} Euler steps, networks of seed {result['seed']}, digits of a "
        f"seed on which no option was tuned. Commit {about['commit']}; {about['device']}; torch {about['torch']}; "
        f"{about['seconds']:.0f} s of evaluation. Generated by `python -m experiments reproduce mnist`; "
        "`python -m experiments report` on this folder regenerates the tables from `cells/`. NOTES.md lists what was "
        "tried and how each piece was computed."
    )
    return write_tables(out, heading, tables_of(result["numbers"]), about)
