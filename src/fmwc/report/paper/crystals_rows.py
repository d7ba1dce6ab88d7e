"""Which of our numbers of crystals stand beside which of the paper's, as data."""

from __future__ import annotations

from fmwc.recipes.crystals.recipe import SCORE
from fmwc.report.paper.table import NONE, PERCENT

__all__ = [
    "AGREEMENT",
    "CHANNELS",
    "DIAGONAL",
    "FILTERS",
    "PAPER",
    "PAPER_SWEEP",
    "QUALITY",
    "READINGS",
    "SAMPLED",
    "SCORES",
    "SHARES",
    "SWEEP",
    "THRESHOLDS",
    "Lift",
    "Quality",
]

Quality = tuple[str, str, float, int]  # label, key of a judgement's summary, factor, digits
Lift = tuple[str, str, str, str]  # label, the paper's AUPRC, its lift over its 0.03, path below a method

CHANNELS = ("all", "type", "coord", "lattice")
SCORES = {"integrated": "integrated", "peak": "peak", "temporal_ratio": "temporal ratio", "endpoint": "endpoint"}
READINGS = {"linearised": "linearised", "every_5th": "linearised, at every 5th step", "diagonal": "diagonal"}
DIAGONAL = {"integrated": ("0.04", "1.3"), "temporal_ratio": ("0.03", "1.0"), "endpoint": ("0.04", "1.3")}
PAPER = {"retrofit": "paper, FM", "joint": "paper, FMwC"}
QUALITY: tuple[Quality, ...] = (
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
SAMPLED = (QUALITY[0], QUALITY[2], QUALITY[4])  # what the sampler's sweep is judged by
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
SWEEP = {
    "Spearman, per step": "per_step_spearman",
    "Pearson, per step": "per_step_pearson",
    "Spearman, integrated": "integrated_spearman",
    "Pearson, integrated": "integrated_pearson",
}
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
