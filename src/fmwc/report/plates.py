"""What the pages of all settings share: the lead, figures that show no data, and the last sections."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fmwc.metrics.headline import ranking_text, rate, rate_kept
from fmwc.metrics.ranking import retention
from fmwc.report import figures, tables
from fmwc.report.curves import EXTREME, extremes
from fmwc.report.page import Section, facts, picture, tiles
from fmwc.report.run import Run

__all__ = ["ENOUGH", "Plate", "Words", "closing", "history", "lead", "noted", "retained", "tile", "transport"]

ENOUGH = 50  # samples whose ranking is worth a curve: of fewer, the surest tenth are four at most


class Words(NamedTuple):
    """How a setting speaks of its samples.

    Attributes:
        samples: What they are.
        bad: The word for those to discard.
        none: What became of none, after "None of them".
        fate: What became of those, after "3% of them".
        again: The same in short, after "of the others, 1%".
        unaided: What the confidence did not need to find them.
        kept: The share of samples that its headline keeps, on the page and in its short table.
    """

    samples: str
    bad: str
    none: str
    fate: str
    again: str
    unaided: str
    kept: float


class Plate(NamedTuple):
    """A figure, and what a reader is told about it."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure

    @property
    def section(self) -> Section:
        return Section(self.title, picture(self.figure, self.alt), self.caption)


def lead(run: Run, words: Words, more: str = "") -> str:
    """The page's first words and its main numbers, as HTML; `more` comes between them."""
    count, share = len(run.bad), float(run.bad.mean())
    what = f"{count:,} generated {words.samples}, each with its {run.called}."
    if not run.bad.any():
        none = f"{what} None of them {words.none}, so there is no mistake for a confidence to find."
        return f'<p class="lead">{escape(none)}</p>{noted(run.note)}{more}'
    kept = rate_kept(run.score, run.bad, words.kept)
    sentence = (
        f"{what} {share:.1%} of them {words.fate}; among the surest {words.kept:.0%}, "
        f"{kept.split()[0]} {words.again}. {words.unaided}"
    )
    numbers = [
        tile("", rate(run.bad), f"{words.bad}, of all {words.samples}"),
        tile("sure", kept, f"{words.bad}, of the surest {words.kept:.0%}"),
        tile("", ranking_text(run.score, run.bad, words.bad), f"AUPRC: how well doubt finds the {words.bad}", share),
    ]
    return f'<p class="lead">{escape(sentence)}</p>{noted(run.note)}{more}\n{tiles(numbers)}'


def noted(note: str) -> str:
    """Why samples have a rank in place of a confidence, as HTML."""
    return f"\n<p>Ordered by {escape(note)}.</p>" if note else ""


def tile(kind: str, value: str, name: str, floor: float | None = None) -> tuple[str, str, str]:
    """A main number, its interval below it; what is too little to tell has no number."""
    if value.startswith("too few"):
        return kind, "?", f"{name}: {value}"
    number, _, interval = value.partition(" ")
    chance = "" if floor is None else f" (a random order: {floor:.2f}, best 1)"
    return kind, number, f"{name}{chance}, 90 % interval {interval}"


def retained(run: Run, words: Words) -> list[Plate]:
    """The retention curves of the run's scores, if it has enough samples for any."""
    if len(run.bad) < ENOUGH:
        return []
    curves = {name: retention(score, run.bad) for name, score in run.scores.items()}
    return [
        Plate(
            "retention",
            "What confidence buys",
            "Read it from left to right: the further you go, the more of the doubtful samples you have given up. "
            "A confidence that knew nothing would follow the dashed line, one that knew everything the dotted one.",
            f"Share of {words.bad} samples among those kept, against the share kept.",
            figures.retention_curve(curves, float(run.bad.mean()), words.bad),
        )
    ]


def history(run: Run, words: Words, closer: Run | None = None) -> list[Plate]:
    """The variance over time, if it was read.

    Arguments:
        run: All samples.
        words: How the setting speaks of them.
        closer: Some of them, whose variance is drawn, where that of all was read at a few times only.
    """
    drawn = run if closer is None else closer
    if not len(drawn.times):
        return []
    sure, doubtful = (float(run.bad[which].mean()) for which in extremes(-run.score))
    some = "" if closer is None else f"They are of {len(drawn.bad):,} of the {len(run.bad):,} samples, drawn again. "
    return [
        Plate(
            "trajectories",
            "Doubt has a history",
            "A sample is made by following a velocity from noise, and the model is not equally sure of it all the way. "
            f"The samples are the surest and the most doubtful tenth by {run.called}; the curves are the variance of "
            f"their velocity. {some}"
            "Thick lines are medians, bands hold eight samples in ten, thin lines are single samples.",
            "Uncertainty of the velocity over time, for the surest and the most doubtful tenth of the samples.",
            figures.variance_trajectories(drawn.times, drawn.std, drawn.confidence, (sure, doubtful), words.bad),
        )
    ]


def transport(
    profile: np.ndarray, confidence: np.ndarray, grid: np.ndarray, parts: Sequence[str], part: str = "layer"
) -> Plate:
    """When, and in which part of the network, the endpoint's variance was made.

    Arguments:
        profile: The variance, `(steps, L, B)`.
        confidence: High = sure, `(B,)`.
        grid: Every time of the run, `(steps + 1, B)`.
        parts: The names of the L parts.
        part: What one of them is called.
    """
    sure, doubtful = (profile[:, :, which] for which in extremes(confidence))
    return Plate(
        "transport",
        f"When, and in which {part}, the doubt was made",
        "Each bar is one step of the way and says how much of the endpoint's variance was made in it, colours "
        f"which {part} of the network made it. The surest and the most doubtful {EXTREME:.0%} of samples are "
        "each scaled to their own total, whose square root is written above them.",
        f"Share of the endpoint's variance made in each step, stacked by {part}, for the two groups of samples.",
        figures.transport_profile(sure, doubtful, grid.mean(1), parts, part),
    )


def closing(numbers: list[dict[str, str]], limits: str, provenance: dict[str, str]) -> list[Section]:
    """The last sections: the table, the limits (list items in HTML, beside those that hold always), the origin."""
    columns = list(dict.fromkeys(column for row in numbers for column in row))
    table = [Section("The numbers", tables.html(numbers, columns))] if numbers else []
    return [
        *table,
        Section("What this cannot tell you", f"<ul>\n{_LIMITS}\n{limits}\n</ul>"),
        Section("Where this comes from", facts(provenance)),
    ]


_LIMITS = """\
<li>Confidence is a place in a ranking, not a probability: 0.9 means surer than nine in ten reference samples, not
right nine times in ten.</li>
<li>It judges the samples that were made. Whether the model leaves out a part of the data altogether, it cannot
say.</li>
<li>A model that has learned the wrong thing well is sure of it: the variance is the model's own doubt, to first order
in its noise.</li>"""
