"""Which of our Checkerboard numbers stand beside which of the paper's: the tables, as data."""

from __future__ import annotations

from fmwc.recipes.checkerboard.reading import TIMES, WINDOWS
from fmwc.report.paper.table import NONE, PERCENT, Table

__all__ = ["HEADLINE", "TABLES"]

METHODS = {"constant": ("constant", ""), "cosine": ("cosine", "")}
FIELDS = {
    "joint, constant": ("constant", "joint"),
    "joint, cosine": ("cosine", "joint"),
    "retrofit, constant": ("constant", "retrofit"),
    "retrofit, cosine": ("cosine", "retrofit"),
}
SCORES = ("temporal_ratio", "endpoint", "integrated", "peak", "accumulated")

TABLES: dict[str, Table] = {
    "table1_quality": Table(
        "Misplacement, % (tab:quality-summary)",
        "The paper's schedule is the constant one. FM + retrofit is FM: the same samples, bit for bit.",
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
    "table2_auprc": Table(
        "Filtering AUPRC (tab:filter-auprc, tab:singlevsmulti-auprc)",
        "Positive class: misplaced. The floor is the prevalence. Learned heads: fitted on one half, read on the other.",
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
    "rivals_auprc": Table(
        "Filtering AUPRC of baselines and rivals",
        "Each on its own samples; its floor is its misplacement in Table 1. Four of an ensemble's five members are "
        "common to all seeds, so its ± is not over independent ensembles.",
        METHODS,
        (
            ("MC-Dropout, k = 5 dispersion", "dropout/auprc/dispersion", "0.60"),
            ("Ensemble, k = 5 dispersion", "ensemble/auprc/dispersion", "0.55"),
            *((f"UA-Flow head, {s}", f"head/auprc/{s}", NONE) for s in SCORES[:4]),
            *((f"state sensitivity, {s}", f"state_sensitivity/auprc/{s}", NONE) for s in SCORES[:4]),
            *((f"divergence is uncertainty, {s}", f"posterior_trace/auprc/{s}", NONE) for s in SCORES[:4]),
        ),
    ),
    "a1_output_only": Table(
        "Output-only against every layer, misplacement % (tab:singlevsmulti)",
        "Under MAP integration.",
        METHODS,
        (("Output-only FMwC", "output_only/misplacement", "4.3"), ("FMwC, joint", "joint/misplacement", "4.6")),
        PERCENT,
    ),
    "a1_kl": Table(
        "The same, KL (tab:singlevsmulti)",
        "Symmetric KL with a floor of 1e-3 under both densities. The paper does not say how it treats the target's "
        "zeros, so only our own rows compare with one another.",
        METHODS,
        (
            ("Output-only FMwC", "output_only/kl", "0.088"),
            ("FMwC, joint", "joint/kl", "0.084"),
            ("FM", "fm/kl", NONE),
        ),
        digits=3,
    ),
    "a1_auprc": Table(
        "Output-only: AUPRC of the linearised variance (which is exact there)",
        "Noise on the last layer alone.",
        METHODS,
        tuple((f"Output-only, {s}", f"output_only/auprc/{s}", NONE) for s in SCORES[:4]),
    ),
    "a2_decoders": Table(
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
    "a4_closures": Table(
        "Closures, AUPRC of the diagonal endpoint (tab:propagation)",
        "",
        FIELDS,
        (
            ("Taylor, 1st order", "closures/taylor1", "0.30"),
            ("Taylor, 2nd order", "closures/taylor2", "0.30"),
            ("Gauss–Hermite, 10 nodes", "closures/gauss_hermite", "0.30"),
        ),
    ),
    "a5_endpoint_trajectory": Table(
        "Endpoint against trajectory, AUPRC (tab:endpoint-vs-traj)",
        "",
        FIELDS,
        (
            ("diagonal, endpoint", "auprc/diagonal/endpoint", "0.30"),
            ("diagonal, integrated", "auprc/diagonal/integrated", "0.33"),
            ("linearised, endpoint", "auprc/linearised/endpoint", NONE),
            ("linearised, integrated", "auprc/linearised/integrated", NONE),
        ),
    ),
    "universality": Table(
        "Variance against |∇·v| (tab:universality, Checkerboard row)",
        "The divergence is exact. Per step: the mean over steps.",
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
    "fidelity": Table(
        "Variance against 1024 posterior draws",
        "Median ratio and Spearman over 500 states × 2 coordinates. `ceiling`: a second set of 1024 draws against the "
        "first. `8192 draws`: against a reference with less noise of its own.",
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
    "transported": Table(
        "Transported dispersion against k stochastic trajectories",
        "Ratio and Spearman are against k = 64.",
        FIELDS,
        (
            ("median ratio", "transported/ratio", NONE),
            ("Spearman", "transported/spearman", NONE),
            ("AUPRC, transported (1 trajectory)", "transported/auprc", NONE),
            *((f"AUPRC, k = {k}", f"transported/auprc_k{k}", "0.58" if k == 5 else NONE) for k in (5, 10, 20, 40, 64)),
        ),
        digits=3,
    ),
    "windows": Table(
        "Windows of the temporal ratio, AUPRC",
        "early / late. The default, 0.3 / 0.7, was chosen on other seeds.",
        FIELDS,
        tuple(
            (f"{estimator}, {early}/{late}", f"windows/{early}/{late}/{estimator}", NONE)
            for estimator in ("linearised", "diagonal")
            for early, late in WINDOWS
        ),
    ),
}

# The README's table: label, then (table, row) of the number, then its column under each schedule.
HEADLINE: tuple[tuple[str, str, str, str, str], ...] = (
    ("FM, misplaced %", "table1_quality", "FM", "constant", "cosine"),
    ("FMwC trained jointly, misplaced %", "table1_quality", "FMwC, joint", "constant", "cosine"),
    (
        "FM + retrofit (the same samples as FM), misplaced %",
        "table1_quality",
        "FM + retrofit (ours)",
        "constant",
        "cosine",
    ),
    (
        "… its surest 90 % by temporal ratio",
        "table1_quality",
        "FM + retrofit, surest 90 % by temporal ratio",
        "constant",
        "cosine",
    ),
    *(
        (label.format(method), "table2_auprc", row, f"{method}, constant", f"{method}, cosine")
        for label, row in (
            ("AUPRC, transported dispersion, {}", "linearised, transported dispersion"),
            ("AUPRC, linearised temporal ratio, {}", "linearised, temporal_ratio"),
            ("AUPRC, diagonal temporal ratio, {}", "diagonal, temporal_ratio"),
            ("AUPRC, L1 head on linearised, {}", "linearised, L1 head"),
            ("AUPRC, boosting head on linearised, {}", "linearised, boosting head"),
        )
        for method in ("retrofit", "joint")
    ),
    (
        "AUPRC, 5 stochastic trajectories, joint",
        "table2_auprc",
        "k = 5 dispersion (5 trajectories)",
        "joint, constant",
        "joint, cosine",
    ),
    ("AUPRC, ensemble of 5", "rivals_auprc", "Ensemble, k = 5 dispersion", "constant", "cosine"),
    ("AUPRC, MC-dropout, 5 trajectories", "rivals_auprc", "MC-Dropout, k = 5 dispersion", "constant", "cosine"),
    ("AUPRC, UA-Flow head (ratio)", "rivals_auprc", "UA-Flow head, temporal_ratio", "constant", "cosine"),
    (
        "AUPRC, state sensitivity (ratio)",
        "rivals_auprc",
        "state sensitivity, temporal_ratio",
        "constant",
        "cosine",
    ),
    (
        "AUPRC, divergence is uncertainty (ratio)",
        "rivals_auprc",
        "divergence is uncertainty, temporal_ratio",
        "constant",
        "cosine",
    ),
    (
        "Spearman, linearised variance and |∇·v|, integrated, retrofit",
        "universality",
        "linearised, Spearman integrated",
        "retrofit, constant",
        "retrofit, cosine",
    ),
)
