"""Figures of curves: variance over time, rates along a ranking, quality against steps, and one-dimensional samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from numpy.typing import ArrayLike

from fmwc.errors import UsageError, pick
from fmwc.metrics.ranking import Retention
from fmwc.report.page import (
    DASHED,
    DOTTED,
    DOUBTFUL,
    FAINT,
    INK,
    LAYERS,
    LEGEND_ABOVE,
    LINES,
    ONE,
    PERCENT,
    SURE,
    TIME,
    TWO,
    styled,
)
from fmwc.uses.risk import Reliability

__all__ = [
    "DECADE",
    "EXTREME",
    "Sweep",
    "comparison_plot",
    "draw_signals",
    "even_choice",
    "extremes",
    "on_common_times",
    "quality_against_steps",
    "reliability_plot",
    "retention_curve",
    "steps_axis",
    "transport_profile",
    "value_axis",
    "variance_trajectories",
]

EXTREME = 0.1  # the share of samples called the surest, and the most doubtful
SINGLE = 8  # signals drawn from either end of the ranking
DECADE = 10  # values that span more are drawn on a logarithmic axis


# ---- selections --------------------------------------------------------------------------------------------------


def on_common_times(
    times: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # (R, B), (R, B) -> (R,), (R, B)
    """Interpolate curves linearly to times that all samples share.

    >>> t, s = on_common_times(np.array([[0.0, 0.0], [0.4, 0.6]]), np.array([[1.0, 1.0], [2.0, 4.0]]))
    >>> t.tolist(), s[1].tolist()
    ([0.0, 0.5], [2.0, 3.5])
    """
    if times.ndim == 1:
        return times, std
    if (times == times[:, :1]).all():
        return times[:, 0], std
    shared = times.mean(1)
    return shared, np.stack([np.interp(shared, t, s) for t, s in zip(times.T, std.T, strict=True)], 1)


def extremes(confidence: np.ndarray, share: float = EXTREME) -> tuple[np.ndarray, np.ndarray]:  # (B,)
    """Return the indices of the surest share of samples and of the most doubtful share, each surest first.

    >>> [index.tolist() for index in extremes(np.array([0.2, 0.9, 0.1, 0.8]), 0.25)]
    [[1], [2]]
    """
    order = np.argsort(-confidence, kind="stable")
    count = max(1, round(share * len(order)))
    return order[:count], order[-count:]


def even_choice(total: int, count: int) -> np.ndarray:
    """Return at most `count` evenly spaced indices below `total`, including the first and the last.

    >>> even_choice(10, 4).tolist(), even_choice(2, 4).tolist()
    ([0, 3, 6, 9], [0, 1])
    """
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(int))


# ---- one run -----------------------------------------------------------------------------------------------------


@styled
def variance_trajectories(
    times: ArrayLike,
    std: ArrayLike,
    confidence: ArrayLike,
    shares: tuple[float, float] | None = None,
    what: str = "misplaced",
) -> Figure:
    """‖σ_t‖ over time: median and 10–90 % band of the surest and the most doubtful tenth, and a few single samples.

    Arguments:
        times: Times of the readings, `(R,)` or `(R, B)`.
        std: ‖σ_t‖ at these times, `(R, B)`.
        confidence: High = sure, `(B,)`; only the order matters.
        shares: The share of bad samples among the surest tenth and among the most doubtful tenth, if known.
        what: The word for bad samples.
    """
    t, curves = on_common_times(np.asarray(times), np.asarray(std))
    sure, doubtful = extremes(np.asarray(confidence))
    among = ("", "") if shares is None else tuple(f" ({share:.1%} {what})" for share in shares)
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    ends = ((doubtful, DOUBTFUL, "most doubtful", among[1]), (sure, SURE, "surest", among[0]))
    for which, colour, name, share in ends:
        low, middle, high = np.quantile(curves[:, which], [0.1, 0.5, 0.9], axis=1)
        axes.fill_between(t, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(t, curves[:, which[even_choice(len(which), 6)]], color=colour, linewidth=0.6, alpha=0.55)
        axes.plot(t, middle, color=colour, linewidth=2.4, label=f"{name} {EXTREME:.0%} of samples{share}")
    axes.set(xlabel=TIME, ylabel=r"uncertainty of the velocity  $\|\sigma_t\|$", xlim=(0, 1), ylim=(0, None))
    axes.legend(**LEGEND_ABOVE)
    return figure


@styled
def transport_profile(
    profile_sure: ArrayLike, profile_doubtful: ArrayLike, grid: ArrayLike, layers: Sequence[str], part: str = "layer"
) -> Figure:
    """Contribution of each step and layer to the variance of the endpoint; the shares of each group add up to one.

    Arguments:
        profile_sure, profile_doubtful: Variance of the two groups, `(steps, L, B)`, summed over coordinates.
        grid: Times of the run, `(steps + 1,)`.
        layers: Names of the L layers or parts of the network.
        part: The word for one of them.
    """
    edges = np.asarray(grid)
    figure = Figure(figsize=TWO)
    panels = figure.subplots(1, 2, sharey=True)
    groups = ((profile_sure, f"surest {EXTREME:.0%}"), (profile_doubtful, f"most doubtful {EXTREME:.0%}"))
    colours = LAYERS(np.linspace(0.0, 0.92, len(layers)))
    for axes, (profile, name) in zip(panels, groups, strict=True):
        parts = np.asarray(profile, dtype=float).mean(2)  # (steps, L)
        below = np.zeros(len(parts))
        for share, colour, layer in zip((parts / parts.sum()).T, colours, layers, strict=True):
            axes.stairs(below + share, edges, baseline=below, fill=True, color=colour, label=layer)
            below = below + share
        axes.set(xlabel=TIME, xlim=(edges[0], edges[-1]))
        axes.set_title(f"{name}: std {np.sqrt(parts.sum()):.2g} at the end")
    panels[0].set_ylabel("share of the endpoint variance, per step")
    panels[0].yaxis.set_major_formatter(PERCENT)
    handles, names = panels[0].get_legend_handles_labels()
    panels[0].legend(handles[::-1], names[::-1], title=part, loc="upper left", alignment="left")
    return figure


# ---- what a ranking is worth -------------------------------------------------------------------------------------


@styled
def retention_curve(curves: Mapping[str, Retention], prevalence: float, what: str = "misplaced") -> Figure:
    """The share of bad samples among those kept, between a random and a perfect order.

    Arguments:
        curves: Retention curves by label.
        prevalence: The share of bad samples among all.
        what: The word for bad samples.
    """
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    share = np.linspace(1, 0.01, 400)
    axes.axhline(prevalence, color=FAINT, linewidth=1.2, linestyle=DASHED, label="random order")
    perfect = np.maximum(0, (prevalence - (1 - share)) / share)
    axes.plot(share, perfect, color=FAINT, linewidth=1.2, linestyle=DOTTED, label="perfect order")
    highest = max(prevalence, 1e-3)
    for (label, curve), colour in zip(curves.items(), LINES, strict=False):
        steady = curve.kept >= 0.01  # rates among fewer samples are noise
        axes.plot(curve.kept[steady], curve.rate[steady], color=colour, label=label)
        highest = max(highest, float(curve.rate[steady].max(initial=0)))
    axes.set(xlabel="share of samples kept", ylabel=f"{what} among the kept", xlim=(1, 0), ylim=(0, 1.06 * highest))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(**LEGEND_ABOVE, ncols=2, columnspacing=1.2)
    return figure


@styled
def reliability_plot(
    curves: Reliability | Mapping[str, Reliability], good: str = "good", *, probability: bool = False
) -> Figure:
    """The rate of good samples by confidence, with the exact interval of each bin.

    Arguments:
        curves: A result of :func:`fmwc.uses.risk.reliability`, or several by label.
        good: The word for good samples.
        probability: Whether the confidence is a probability: then the diagonal is drawn too. Otherwise it is a rank,
            and the rate should rise from below the mean to above it.
    """
    named = {"": curves} if isinstance(curves, Reliability) else dict(curves)
    if not named:
        raise UsageError("reliability_plot needs at least one reliability curve")
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    shift = 0.012  # between labels, so that their bars do not hide one another
    for i, ((label, found), colour) in enumerate(zip(named.items(), cycle(LINES), strict=False)):
        x = found.confidence + shift * (i - (len(named) - 1) / 2)
        # An exact interval contains the rate, up to rounding.
        bars = np.maximum([found.success - found.low, found.high - found.success], 0)
        mean = float(np.average(found.success, weights=found.size))
        words = f"{label}  ({mean:.1%} of all)" if label else f"{mean:.1%} of all {found.size.sum():,} are {good}"
        axes.axhline(mean, color=FAINT, linewidth=1.0, linestyle=DASHED)
        axes.plot(x, found.success, color=colour, linewidth=1.2, alpha=0.6)
        axes.errorbar(x, found.success, bars, fmt="o", color=colour, markersize=5.5, elinewidth=1.4, label=words)
    if probability:
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1.2, linestyle=DOTTED, label="calibrated")
    lowest = min(float(found.low.min()) for found in named.values())
    axes.set(xlabel="confidence", ylabel=f"{good}, observed", xlim=(-0.02, 1.02))
    bottom = 0.0 if probability or lowest < 0.3 else lowest
    axes.set_ylim(bottom - 0.03 * (1 - bottom), 1 + 0.03 * (1 - bottom))  # points at the edges are drawn whole
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(**LEGEND_ABOVE)
    return figure


METRICS = {"auprc": "AUPRC", "lift": "AUPRC ÷ AUPRC of a random order"}
SHARES = {"precision_": "precision among the top {}", "retention_": "rate among the surest {}"}


@styled
def comparison_plot(compared: Mapping[str, Mapping[str, Mapping[str, Any]]], metric: str = "auprc") -> Figure:
    """A metric of several scores with intervals, and the paired difference of each to the first score.

    Arguments:
        compared: A result of :func:`fmwc.metrics.ranking.compare`.
        metric: `auprc`, `lift`, or a name such as `precision_5%` or `retention_80%`.
    """
    if not compared:
        raise UsageError("comparison_plot needs at least one score")
    names = list(compared)
    entries = [dict(pick(compared[name], metric, "number")) for name in names]
    figure = Figure(figsize=(TWO[0], 1.5 + 0.34 * len(names)))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    for axes, value, interval in (
        (left, "value", "interval"),
        (right, "difference", "difference_interval"),
    ):
        for row, entry in enumerate(entries):
            if value in entry:
                colour = SURE if row == 0 else INK
                axes.plot(entry[interval], [row, row], color=colour, linewidth=1.8, solid_capstyle="butt")
                axes.plot(entry[value], row, "o", color=colour, markersize=6.5, markeredgecolor="white")
    first = compared[names[0]]
    floors = {"auprc": first["auprc"]["value"] / first["lift"]["value"], "lift": 1.0}
    label = METRICS.get(metric, metric)
    if metric in floors:
        left.axvline(floors[metric], color=FAINT, linewidth=1.2, linestyle=DOTTED)
        left.set_title("dotted: random order", fontsize=9.5, color=FAINT)
    for prefix, words in SHARES.items():
        if metric.startswith(prefix):
            label = words.format(metric.removeprefix(prefix))
            left.xaxis.set_major_formatter(PERCENT)
            right.xaxis.set_major_formatter(PERCENT)
    right.axvline(0, color=SURE, linewidth=1.2, linestyle=DASHED)
    left.set(xlabel=label, yticks=range(len(names)), ylim=(len(names) - 0.4, -0.6))
    left.set_yticklabels(names)
    right.set(xlabel="paired difference to the first score")
    right.tick_params(left=False)
    right.spines["left"].set_visible(False)
    return figure


# ---- steps -------------------------------------------------------------------------------------------------------


class Sweep(NamedTuple):
    """Quality of digits against the number of Euler steps, by label.

    Attributes:
        fid: Fréchet distance to real digits.
        failures: Failure rate according to the classifier.
    """

    fid: Mapping[str, Mapping[int, float]]
    failures: Mapping[str, Mapping[int, float]]


@styled
def quality_against_steps(sweep: Sweep) -> Figure:
    """FID and failure rate against the number of Euler steps."""
    figure = Figure(figsize=(TWO[0], 3.7))
    panels = figure.subplots(1, 2)
    names = list(dict.fromkeys([*sweep.fid, *sweep.failures]))  # a label has the same colour in both panels
    for axes, curves in zip(panels, sweep, strict=True):
        for label, curve in curves.items():
            steps, values = zip(*sorted((int(n), v) for n, v in curve.items()), strict=True)  # JSON keys are strings
            colour = LINES[names.index(label) % len(LINES)]
            axes.plot(steps, values, color=colour, marker="o", markersize=5, label=label)
        steps_axis(axes, sorted({int(n) for curve in curves.values() for n in curve}), base=2)
    panels[0].set_ylabel("FID (in the classifier's features)")
    value_axis(panels[0], panels[0].dataLim.intervaly)
    panels[1].set(ylabel="failure rate", ylim=(0, None))
    panels[1].yaxis.set_major_formatter(PERCENT)
    if len(names) > 1:
        panels[0].legend(loc="upper right")
    return figure


def steps_axis(axes: Axes, steps: Sequence[int], base: int = 10) -> None:
    """Make the x axis a logarithmic axis of Euler steps with ticks at the measured numbers only."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_locator(FixedLocator(list(steps)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlabel("Euler steps")


def value_axis(axes: Axes, values: ArrayLike, bottom: float = 0.0) -> None:
    """Make the y axis logarithmic if positive values span more than a decade; otherwise start it at zero.

    Arguments:
        axes: The axes.
        values: The values that are drawn.
        bottom: Space below zero, as a share of the axis, so that points at zero are drawn whole.
    """
    low, high = float(np.min(values)), float(np.max(values))
    if low > 0 and high > DECADE * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        top = axes.get_ylim()[1]
        axes.set_ylim(-bottom * top, top)


# ---- one-dimensional samples -------------------------------------------------------------------------------------


@styled
def draw_signals(x: np.ndarray, confidence: np.ndarray, label: str) -> Figure:  # (B, L) or (B, C, L)
    """The surest and the most doubtful signals, in front of the range of all signals."""
    curves = x[:, None] if x.ndim == 2 else x  # (B, C, L)
    channels, length = curves.shape[1:]
    order = np.argsort(-confidence, kind="stable")
    count = max(1, min(SINGLE, len(order) // 2))
    figure = Figure(figsize=(TWO[0], 1.1 + 2.6 * channels))
    panels = figure.subplots(channels, 2, sharex=True, sharey="row", squeeze=False)
    place = np.arange(length)
    for row in range(channels):
        low, middle, high = np.quantile(curves[:, row], [0.1, 0.5, 0.9], axis=0)
        for axes, which, colour, name in (
            (panels[row, 0], order[:count], SURE, "surest"),
            (panels[row, 1], order[-count:], DOUBTFUL, "most doubtful"),
        ):
            axes.fill_between(place, low, high, color="#e3e5ea", linewidth=0, label="80 % of all samples")
            axes.plot(place, middle, color=FAINT, linewidth=1.2, linestyle=DASHED, label="median of all samples")
            axes.plot(place, curves[which, row].T, color=colour, linewidth=1.0, alpha=0.75)
            axes.set_xlim(0, length - 1)
            if row == 0:
                first, last = confidence[which[0]], confidence[which[-1]]
                axes.set_title(f"the {count} {name} ({label} {first:.2f} to {last:.2f})")
        panels[row, 0].set_ylabel("value" if channels == 1 else f"channel {row}")
    for axes in panels[-1]:
        axes.set_xlabel("position in the signal")
    handles, names = panels[0, 0].get_legend_handles_labels()
    single = Line2D([], [], color=INK, linewidth=1.0)
    figure.legend([*handles, single], [*names, "single samples"], loc="outside lower left", ncols=3)
    return figure
