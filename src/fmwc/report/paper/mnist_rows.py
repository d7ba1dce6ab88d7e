"""Which of our MNIST numbers stand beside which of the paper's, as data.

A row is (label, the paper's value, the path of its numbers in a cell, the path of its failure rate).
"""

from __future__ import annotations

from fmwc.recipes.mnist.reading import KEPT
from fmwc.report.paper.table import NONE

__all__ = [
    "AGREEMENT",
    "FIDELITY",
    "FIELDS",
    "HEADS",
    "KEPT_COLUMN",
    "METHODS",
    "QUALITY",
    "RIVALS",
    "SCORES",
    "TRANSPORTED",
    "WITHIN",
    "Row",
]

Row = tuple[str, str, str, str]

METHODS = {"retrofit": "FM + retrofit", "joint": "FMwC, joint"}
SCORES = ("integrated", "peak", "temporal_ratio", "endpoint")
DIAGONAL = {"integrated": "0.02", "peak": NONE, "temporal_ratio": "0.04", "endpoint": "0.02"}  # the paper's AUPRC
KEPT_COLUMN = f"failed % of surest {KEPT:.0%}, within class"

QUALITY: tuple[tuple[str, str, str], ...] = (
    ("FM (and FM + retrofit)", "5.17", "plain"),
    ("MC-Dropout, dropout off", "4.25", "dropout"),
    ("MC-Dropout, dropout on", "4.25", "dropout/stochastic"),
    ("UA-Flow as published", NONE, "head"),
    ("FMwC, joint", "4.22", "joint"),
)
FIELDS: tuple[Row, ...] = tuple(
    row
    for method, label in METHODS.items()
    for row in (
        *((f"{label}: linearised, {s}", NONE, f"{method}/linearised/{s}", method) for s in SCORES),
        (f"{label}: linearised, integrated, at every 5th step", NONE, f"{method}/every_5th/integrated", method),
        *((f"{label}: diagonal, {s}", DIAGONAL[s], f"{method}/diagonal/{s}", method) for s in SCORES),
    )
)
RIVALS: tuple[Row, ...] = (
    ("MC-Dropout, 5 trajectories", "0.08", "dropout/scores/dispersion", "dropout"),
    ("Ensemble of 5", "0.11", "plain/ensemble/dispersion", "plain"),
    *((f"UA-Flow's variance head on the frozen flow, {s}", NONE, f"variance/scores/{s}", "variance") for s in SCORES),
    ("UA-Flow as published, integrated", NONE, "head/scores/integrated", "head"),
    *((f"state sensitivity, {s}", NONE, f"rivals/state_sensitivity/{s}", "plain") for s in SCORES),
    *((f"divergence is uncertainty, {s}", NONE, f"rivals/posterior_trace/{s}", "plain") for s in SCORES),
)
ENDS = {"pixels": "transported, all random projections"}
ENDS |= {f"projections_{k}": f"transported, {k} random projection{'s' * (k > 1)}" for k in (1, 2, 4)}
ENDS |= {f"k{k}": f"{k} trajectories" for k in (5, 10, 20)}
TRANSPORTED: tuple[Row, ...] = tuple(
    (f"{label}: {name}", "0.04" if key == "k5" else NONE, f"{m}/transported/scores/{key}", f"{m}/transported")
    for m, label in METHODS.items()
    for key, name in ENDS.items()
)
AGREEMENT = {
    "Pearson, per step": ("pearson_step", "0.46 ± 0.18"),
    "Pearson, integrated": ("pearson", "0.57"),
    "Spearman, per step": ("spearman_step", "0.44 ± 0.17"),
    "Spearman, integrated": ("spearman", "0.58"),
}
FIDELITY = {
    "linearised, ratio": "linearised_ratio",
    "linearised, Spearman": "linearised_spearman",
    "ceiling, Spearman": "ceiling_spearman",
    "diagonal, ratio": "diagonal_ratio",
    "diagonal, Spearman": "diagonal_spearman",
}
# The README's table: label, the paper's lift, and for retrofit and joint the paths of score and failure rate.
WITHIN: tuple[tuple[str, str, tuple[str, str] | None, tuple[str, str] | None], ...] = (
    *(
        (label, paper, (f"retrofit/{path}", f"retrofit{base}"), (f"joint/{path}", f"joint{base}"))
        for label, paper, path, base in (
            ("linearised, integrated", NONE, "linearised/integrated", ""),
            ("linearised, integrated, read at every 5th step", NONE, "every_5th/integrated", ""),
            ("diagonal, integrated", "0.5", "diagonal/integrated", ""),
            ("diagonal, temporal ratio", "1.0", "diagonal/temporal_ratio", ""),
            ("transported dispersion", NONE, "transported/scores/pixels", "/transported"),
            ("5 stochastic trajectories", "1.0", "transported/scores/k5", "/transported"),
        )
    ),
    ("ensemble of 5", "2.75", ("plain/ensemble/dispersion", "plain"), None),
    ("MC-dropout, 5 trajectories", "2.0", ("dropout/scores/dispersion", "dropout"), None),
    (
        "UA-Flow's variance head on the frozen flow (ratio, its best)",
        NONE,
        ("variance/scores/temporal_ratio", "variance"),
        None,
    ),
    ("state sensitivity (ratio, its best)", NONE, ("rivals/state_sensitivity/temporal_ratio", "plain"), None),
    ("divergence is uncertainty", NONE, ("rivals/posterior_trace/integrated", "plain"), None),
)
# Label, path below a method, the paper's AUPRC.
HEADS = (
    ("linearised, no labels (integrated)", "heads/label_free", NONE),
    ("linearised, L1 head", "heads/l1", NONE),
    ("linearised, boosting head", "heads/boosting", NONE),
    ("diagonal, L1 head", "heads_diagonal/l1", "0.09"),
    ("diagonal, boosting head", "heads_diagonal/boosting", "0.09"),
)
