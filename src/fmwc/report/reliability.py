"""Figures of what confidence can be trusted with: success by confidence, and scores side by side."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fmwc.confidence.trust import Reliability
from fmwc.errors import UsageError, pick
from fmwc.report.figures import ONE, PERCENT, TWO
from fmwc.report.look import FAINT, INK, LINES, SURE, look

__all__ = ["comparison_plot", "reliability_plot"]

WORDS = {"auprc": "AUPRC", "lift": "AUPRC ÷ that of a random order"}
PREFIXES = {"precision_": "share found among the top {}", "retention_": "rate among the surest {}"}


@look
def reliability_plot(
    curves: Reliability | Mapping[str, Reliability], good: str = "good", *, probability: bool = False
) -> Figure:
    """How often samples turn out well, by how sure the model was of them; bars are exact intervals of each bin.

    Arguments:
        curves: What :func:`fmwc.confidence.trust.reliability` found, or several by label.
        good: The word for samples that did.
        probability: The confidence is meant as one: draw the diagonal that it should lie on. Otherwise it is a place
            in a ranking, and ought to rise from below the mean to above it.
    """
    named = {"": curves} if isinstance(curves, Reliability) else dict(curves)
    if not named:
        raise UsageError("no reliability was given to draw")
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    shift = 0.012  # between labels, so that their bars do not hide one another
    for i, ((label, found), colour) in enumerate(zip(named.items(), cycle(LINES), strict=False)):
        x = found.confidence + shift * (i - (len(named) - 1) / 2)
        # An exact interval holds the rate, up to rounding.
        bars = np.maximum([found.success - found.low, found.high - found.success], 0)
        mean = float(np.average(found.success, weights=found.size))
        words = f"{label}  ({mean:.1%} of all)" if label else f"{mean:.1%} of all {found.size.sum():,} are {good}"
        axes.axhline(mean, color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.plot(x, found.success, color=colour, linewidth=1.2, alpha=0.6)
        axes.errorbar(x, found.success, bars, fmt="o", color=colour, markersize=5.5, elinewidth=1.4, label=words)
    if probability:
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.2, linestyle=(0, (1, 2)), label="as often as it says")
    lowest = min(float(found.low.min()) for found in named.values())
    axes.set(xlabel="confidence", ylabel=f"{good}, observed", xlim=(-0.02, 1.02))
    bottom = 0.0 if probability or lowest < 0.3 else lowest
    axes.set_ylim(bottom - 0.03 * (1 - bottom), 1 + 0.03 * (1 - bottom))  # points at the edges are drawn whole
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
    return figure


def _words(metric: str) -> str:
    for prefix, words in PREFIXES.items():
        if metric.startswith(prefix):
            return words.format(metric.removeprefix(prefix))
    return WORDS.get(metric, metric)


def _dots(axes: Axes, entries: list[dict[str, Any]], value: str, interval: str) -> None:
    for row, entry in enumerate(entries):
        if value in entry:
            low, high = entry[interval]
            colour = SURE if row == 0 else INK
            axes.plot([low, high], [row, row], color=colour, linewidth=1.8, solid_capstyle="butt")
            axes.plot(entry[value], row, "o", color=colour, markersize=6.5, markeredgecolor="white")


@look
def comparison_plot(compared: Mapping[str, Mapping[str, Mapping[str, Any]]], metric: str = "auprc") -> Figure:
    """Scores side by side: each with its interval, and by how much it differs from the first on the same samples.

    Arguments:
        compared: What :func:`fmwc.metrics.ranking.compare` found.
        metric: Which of its numbers: `auprc`, `lift`, `precision_5%`, `retention_80%`.
    """
    if not compared:
        raise UsageError("no score was given to draw")
    names = list(compared)
    entries = [dict(pick(compared[name], metric, "number")) for name in names]
    figure = Figure(figsize=(TWO[0], 1.5 + 0.34 * len(names)))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    _dots(left, entries, "value", "interval")
    _dots(right, entries, "difference", "difference_interval")
    first = compared[names[0]]
    floors = {"auprc": first["auprc"]["value"] / first["lift"]["value"], "lift": 1.0}
    if metric in floors:
        left.axvline(floors[metric], color=FAINT, linewidth=1.2, linestyle=(0, (1, 2)))
        left.set_title("dotted: random order", fontsize=9.5, color=FAINT)
    elif metric.startswith(tuple(PREFIXES)):
        left.xaxis.set_major_formatter(PERCENT)
        right.xaxis.set_major_formatter(PERCENT)
    right.axvline(0, color=SURE, linewidth=1.2, linestyle=(0, (4, 3)))
    left.set(xlabel=_words(metric), yticks=range(len(names)), ylim=(len(names) - 0.4, -0.6))
    left.set_yticklabels(names)
    right.set(xlabel="difference to the first, paired")
    right.tick_params(left=False)
    right.spines["left"].set_visible(False)
    return figure
