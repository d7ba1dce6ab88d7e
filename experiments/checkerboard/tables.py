"""Checkerboard tables of the paper's numbers and ours, as data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from experiments.checkerboard.evaluate import WINDOWS
from experiments.common.evaluation import TIMES
from experiments.common.store import from_results, read_results
from experiments.common.tables import NONE, PERCENT, dig, ratio_text, write_tables
from fmwc.readers import anything, mapping, read_json
from fmwc.report.table import Table


class Spec(NamedTuple):
    """The specification of a table.

    Attributes:
        title, note: As in `Table`.
        columns: (schedule, path prefix in the numbers) by heading.
        rows: (label, path, the paper's value).
        scale: The factor applied to the numbers.
        digits: The number of decimals.
    """

    title: str
    note: str
    columns: Mapping[str, tuple[str, str]]
    rows: tuple[tuple[str, str, str], ...]
    scale: float = 1.0
    digits: int = 2


METHODS = {decay: (decay, "") for decay in ("constant", "cosine")}
FIELDS = {f"{kind}, {decay}": (decay, kind) for kind in ("joint", "retrofit") for decay in METHODS}
SCORES = ("temporal_ratio", "endpoint", "integrated", "peak", "accumulated")
COST_NOTE = (
    "Wall-clock time on two CPU cores relative to plain FM sampling (measured with `python -m experiments bench`). "
    "The paper counts FLOPs: FM 1×, MC-Dropout and ensemble 5×, FMwC 3.22×."
)

TABLES: dict[str, Spec] = {
    "table1_quality": Spec(
        "Misplacement, % (tab:quality-summary)",
        "The paper uses the constant schedule. FM + retrofit has the same samples as FM, bit for bit.",
        METHODS,
        (
            ("FM", "fm/misplacement", "5.9"),
            ("MC-Dropout, dropout off", "dropout/misplacement", "7.5"),
            ("MC-Dropout, dropout on", "dropout/stochastic_misplacement", "7.5"),
            ("Ensemble (first member)", "ensemble/misplacement", "5.9"),
            ("UA-Flow head", "head/misplacement", NONE),
            ("FMwC, joint", "joint/misplacement", "4.6"),
            ("FM + retrofit (ours)", "retrofit/misplacement", NONE),
            ("FM + retrofit, surest 90 % by temporal ratio", "retrofit/kept_90/temporal_ratio", NONE),
            ("FM + retrofit, surest 90 % by dispersion", "retrofit/kept_90/dispersion", NONE),
        ),
        PERCENT,
    ),
    "table2_auprc": Spec(
        "Filtering AUPRC (tab:filter-auprc, tab:singlevsmulti-auprc)",
        "Positive class: misplaced. The floor is the AUPRC of a random order. "
        "Learned heads are fitted on one half and evaluated on the other.",
        FIELDS,
        (
            ("floor (prevalence)", "misplacement", "0.06"),
            *((f"linearised, {s}", f"auprc/linearised/{s}", NONE) for s in SCORES),
            ("linearised, transported dispersion", "auprc/linearised/dispersion", NONE),
            ("linearised, ratio, read at every 5th step", "every_5th", NONE),
            ("linearised, L1 head", "auprc/linearised/l1", NONE),
            ("linearised, boosting head", "auprc/linearised/boosting", NONE),
            ("diagonal, temporal_ratio", "auprc/diagonal/temporal_ratio", "0.55"),
            ("diagonal, endpoint", "auprc/diagonal/endpoint", "0.30"),
            ("diagonal, integrated", "auprc/diagonal/integrated", "0.33"),
            ("diagonal, peak", "auprc/diagonal/peak", NONE),
            ("diagonal, accumulated (“endpoint var”?)", "auprc/diagonal/accumulated", "0.44"),
            ("diagonal, L1 head", "auprc/diagonal/l1", "0.65"),
            ("diagonal, boosting head", "auprc/diagonal/boosting", "0.83"),
            ("k = 5 dispersion (5 trajectories)", "transported/auprc_k5", "0.58"),
        ),
    ),
    "rivals_auprc": Spec(
        "Filtering AUPRC of other methods",
        "Each method is evaluated on the samples it generates. A random order has the misplacement of Table 1. "
        "The ensembles of all seeds share four of five members, so their ± is not over independent ensembles.",
        METHODS,
        (
            ("MC-Dropout, k = 5 dispersion", "dropout/auprc/dispersion", "0.60"),
            ("Ensemble, k = 5 dispersion", "ensemble/auprc/dispersion", "0.55"),
            *((f"UA-Flow head, {s}", f"head/auprc/{s}", NONE) for s in SCORES[:4]),
            *((f"state sensitivity, {s}", f"state_sensitivity/auprc/{s}", NONE) for s in SCORES[:4]),
            *((f"divergence is uncertainty, {s}", f"posterior_trace/auprc/{s}", NONE) for s in SCORES[:4]),
        ),
    ),
    "a1_output_only": Spec(
        "Noise on the output layer or on all layers, misplacement % (tab:singlevsmulti)",
        "MAP integration.",
        METHODS,
        (("Output-only FMwC", "output_only/misplacement", "4.3"), ("FMwC, joint", "joint/misplacement", "4.6")),
        PERCENT,
    ),
    "a1_kl": Spec(
        "Noise on the output layer or on all layers, KL (tab:singlevsmulti)",
        "Symmetric KL, with both densities floored at 1e-3. The paper does not say how it treats zeros of the target, "
        "so compare only our values with each other.",
        METHODS,
        (
            ("Output-only FMwC", "output_only/kl", "0.088"),
            ("FMwC, joint", "joint/kl", "0.084"),
            ("FM", "fm/kl", NONE),
        ),
        digits=3,
    ),
    "a1_auprc": Spec(
        "Noise on the output layer: AUPRC of the linearised variance",
        "The linearised variance is exact for this field.",
        METHODS,
        tuple((f"Output-only, {s}", f"output_only/auprc/{s}", NONE) for s in SCORES[:4]),
    ),
    "a2_decoders": Spec(
        "Decoders, misplacement % (tab:sampling)",
        "",
        METHODS,
        (
            ("Output-only, stochastic", "output_only/decoders/stochastic", "4.3"),
            ("Output-only, mean of 5", "output_only/decoders/mean5", "4.3"),
            ("Output-only, MAP", "output_only/decoders/map", "4.3"),
            ("FMwC, stochastic", "joint/decoders/stochastic", "4.6"),
            ("FMwC, mean of 5", "joint/decoders/mean5", "4.6"),
            ("FMwC, MAP", "joint/decoders/map", "4.6"),
            ("Retrofit, stochastic", "retrofit/decoders/stochastic", NONE),
            ("Retrofit, mean of 5", "retrofit/decoders/mean5", NONE),
        ),
        PERCENT,
    ),
    "a4_closures": Spec(
        "Closures, AUPRC of the diagonal endpoint (tab:propagation)",
        "",
        FIELDS,
        (
            ("Taylor, 1st order", "closures/taylor1", "0.30"),
            ("Taylor, 2nd order", "closures/taylor2", "0.30"),
            ("Gauss–Hermite, 10 nodes", "closures/gauss_hermite", "0.30"),
        ),
    ),
    "a5_endpoint_trajectory": Spec(
        "Endpoint and trajectory scores, AUPRC (tab:endpoint-vs-traj)",
        "",
        FIELDS,
        (
            ("diagonal, endpoint", "auprc/diagonal/endpoint", "0.30"),
            ("diagonal, integrated", "auprc/diagonal/integrated", "0.33"),
            ("linearised, endpoint", "auprc/linearised/endpoint", NONE),
            ("linearised, integrated", "auprc/linearised/integrated", NONE),
        ),
    ),
    "universality": Spec(
        "Correlation of variance and |∇·v| (tab:universality, Checkerboard row)",
        "The divergence is exact. Per-step values are means over steps.",
        FIELDS,
        tuple(
            (f"{estimator}, {label}", f"agreement/{estimator}/{key}", paper if estimator == "diagonal" else NONE)
            for estimator in ("linearised", "diagonal")
            for label, key, paper in (
                ("Pearson per step", "pearson_step", "0.42"),
                ("Pearson per step, std over steps", "pearson_step_std", "0.26"),
                ("Pearson integrated", "pearson", "0.71"),
                ("Spearman per step", "spearman_step", "0.36"),
                ("Spearman per step, std over steps", "spearman_step_std", "0.29"),
                ("Spearman integrated", "spearman", "0.76"),
            )
        ),
    ),
    "fidelity": Spec(
        "Variance compared with 1024 posterior draws",
        "Median ratio and Spearman over 500 states × 2 coordinates. `ceiling` compares a second set of 1024 draws with "
        "the first. `8192 draws` uses a reference with less noise.",
        FIELDS,
        tuple(
            row
            for t in TIMES
            for row in (
                (f"t = {t}: linearised, ratio", f"fidelity/{t}/linearised_ratio", NONE),
                (f"t = {t}: linearised, Spearman", f"fidelity/{t}/linearised_spearman", NONE),
                (f"t = {t}: ceiling, Spearman", f"fidelity/{t}/ceiling_spearman", NONE),
                (f"t = {t}: linearised, Spearman, 8192 draws", f"fidelity/{t}/linearised_spearman_long", NONE),
                (f"t = {t}: diagonal, ratio", f"fidelity/{t}/diagonal_ratio", NONE),
                (f"t = {t}: diagonal, Spearman", f"fidelity/{t}/diagonal_spearman", NONE),
            )
        ),
        digits=3,
    ),
    "transported": Spec(
        "Transported dispersion compared with k stochastic trajectories",
        "Ratio and Spearman use k = 64 as the reference.",
        FIELDS,
        (
            ("median ratio", "transported/ratio", NONE),
            ("Spearman", "transported/spearman", NONE),
            ("AUPRC, transported (1 trajectory)", "transported/auprc", NONE),
            *((f"AUPRC, k = {k}", f"transported/auprc_k{k}", "0.58" if k == 5 else NONE) for k in (5, 10, 20, 40, 64)),
        ),
        digits=3,
    ),
    "windows": Spec(
        "Windows of the temporal ratio, AUPRC",
        "Windows are early / late. The default, 0.3 / 0.7, was chosen on other seeds.",
        FIELDS,
        tuple(
            (f"{estimator}, {early}/{late}", f"windows/{early}/{late}/{estimator}", NONE)
            for estimator in ("linearised", "diagonal")
            for early, late in WINDOWS
        ),
    ),
}

# The rows of the main table: label, table and row of the number, and the method if the table has both methods.
HEADLINE: tuple[tuple[str, str, str, str], ...] = (
    ("FM, misplaced %", "table1_quality", "FM", ""),
    ("FMwC trained jointly, misplaced %", "table1_quality", "FMwC, joint", ""),
    ("FM + retrofit (same samples as FM), misplaced %", "table1_quality", "FM + retrofit (ours)", ""),
    (
        "FM + retrofit, surest 90 % by temporal ratio, misplaced %",
        "table1_quality",
        "FM + retrofit, surest 90 % by temporal ratio",
        "",
    ),
    *(
        (f"AUPRC, {label}, {method}", "table2_auprc", row, method)
        for label, row in (
            ("transported dispersion", "linearised, transported dispersion"),
            ("linearised temporal ratio", "linearised, temporal_ratio"),
            ("diagonal temporal ratio", "diagonal, temporal_ratio"),
            ("L1 head on linearised", "linearised, L1 head"),
            ("boosting head on linearised", "linearised, boosting head"),
        )
        for method in ("retrofit", "joint")
    ),
    ("AUPRC, 5 stochastic trajectories, joint", "table2_auprc", "k = 5 dispersion (5 trajectories)", "joint"),
    ("AUPRC, ensemble of 5", "rivals_auprc", "Ensemble, k = 5 dispersion", ""),
    ("AUPRC, MC-dropout, 5 trajectories", "rivals_auprc", "MC-Dropout, k = 5 dispersion", ""),
    *(
        (f"AUPRC, {rival} (ratio)", "rivals_auprc", f"{rival}, temporal_ratio", "")
        for rival in ("UA-Flow head", "state sensitivity", "divergence is uncertainty")
    ),
    (
        "Spearman, linearised variance and |∇·v|, integrated, retrofit",
        "universality",
        "linearised, Spearman integrated",
        "retrofit",
    ),
)


def _find(numbers: Any, prefix: str, path: str) -> float | None:
    if path.startswith("windows/"):  # the keys contain a slash
        _, early, late, estimator = path.split("/")
        return dig(numbers[prefix]["windows"].get(f"{early}/{late}"), estimator)
    return dig(numbers, f"{prefix}/{path}")


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean and standard deviation over seeds of every entry of every table."""

    def entry(spec: Spec, column: tuple[str, str], path: str) -> dict[str, Any]:
        decay, prefix = column
        numbers = [_find(result["numbers"], prefix, path) for result in results if result["decay"] == decay]
        values = [spec.scale * float(v) for v in numbers if v is not None]
        spread = stdev(values) if len(values) > 1 else 0.0
        return {"mean": mean(values), "std": spread, "seeds": len(values)} if values else {"seeds": 0}

    return {
        name: {
            label: {"paper": paper, **{heading: entry(spec, c, path) for heading, c in spec.columns.items()}}
            for label, path, paper in spec.rows
        }
        for name, spec in TABLES.items()
    }


def _cell(entry: Mapping[str, Any], digits: int) -> str:
    return f"{entry['mean']:.{digits}f} ± {entry['std']:.{digits}f}" if entry["seeds"] else NONE


def _table(spec: Spec, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    lines = [(label, row["paper"], *(_cell(row[c], spec.digits) for c in spec.columns)) for label, row in rows.items()]
    return Table.from_rows(("", "paper", *spec.columns), lines, spec.title, spec.note)


@from_results
def tables(out: Path) -> list[Path]:
    """Write `summary.json` and `tables.md` from the results in a folder."""
    results = read_results(out)
    summary = summarise(results)
    abouts = [result["provenance"] for result in results]
    about = {
        **{key: sorted({a[key] for a in abouts}) for key in ("commit", "device", "torch")},
        "seeds": sorted({result["seed"] for result in results}),
        **{key: abouts[0][key] for key in ("samples", "steps")},
        "seconds": round(sum(a["seconds"] for a in abouts), 1),
    }
    heading = (
        "# Checkerboard: results of the paper and of fmwc\n\n"
        f"{about['samples']:,} samples, {about['steps']} Euler steps, seeds {about['seeds']}, mean ± std over seeds. "
        f"Commit {', '.join(about['commit'])}; {', '.join(about['device'])}; torch {', '.join(about['torch'])}; "
        f"{about['seconds']:.0f} s in total, including training. Generated by `python -m experiments reproduce "
        "checkerboard`; `python -m experiments report` on this folder regenerates the tables from `cells/`."
    )
    made = {name: _table(TABLES[name], rows) for name, rows in summary.items()}
    if (out / "cost.json").is_file():
        made["cost"] = cost_table(read_json(out / "cost.json", mapping(anything)))
    return write_tables(out, heading, made, about, summary=summary)


def headline(summary: Mapping[str, Any]) -> Table:
    """Return the main table, from `summary.json`."""
    rows = []
    for label, table, name, method in HEADLINE:
        row, digits = summary["tables"][table][name], TABLES[table].digits
        cells = [_cell(row[f"{method}, {decay}" if method else decay], digits) for decay in METHODS]
        rows.append((label, row["paper"], *cells))
    return Table.from_rows(("", "paper", "constant learning rate (as in the paper)", "cosine decay"), rows)


def cost_table(cost: Mapping[str, Any]) -> Table:
    """Return the table of costs, from `cost.json`."""
    rows = [(name, ratio_text(row)) for name, row in cost["cases"].items()]
    return Table.from_rows(("sampling", "time ÷ plain"), rows, "Inference cost (tab:quality-summary)", COST_NOTE)
