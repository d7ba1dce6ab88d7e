"""Figures of curves: variance over time, rates along a ranking, and one-dimensional samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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

__all__ = [
    "EXTREME",
    "draw_signals",
    "even_choice",
    "extremes",
    "on_common_times",
    "retention_curve",
    "transport_profile",
    "variance_trajectories",
]

EXTREME = 0.1  # share of samples in each of the groups "surest" and "most doubtful"
SINGLE = 8  # signals drawn from each end of the ranking


# ---- selections --------------------------------------------------------------------------------------------------


def on_common_times(
    times: np.ndarray, std: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # (R, B), (R, B) -> (R,), (R, B)
    """Interpolate curves linearly to common times.

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
    """Return the indices of the surest and of the most doubtful samples, each surest first.

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
    times: np.ndarray,
    std: np.ndarray,
    confidence: np.ndarray,
    shares: Sequence[float] | None = None,
    what: str = "misplaced",
) -> Figure:
    """Draw ‖σ_t‖ over time: medians, 10–90 % bands and individual samples of the surest and the most doubtful tenth.

    Arguments:
        times: Times of the readings, `(R,)` or `(R, B)`.
        std: ‖σ_t‖ at these times, `(R, B)`.
        confidence: High = sure, `(B,)`; only the order matters.
        shares: The shares of bad samples among the surest and among the most doubtful tenth, if known.
        what: The word for bad samples.
    """
    t, curves = on_common_times(times, std)
    sure, doubtful = extremes(confidence)
    among = ("", "") if shares is None else [f" ({share:.1%} {what})" for share in shares]
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
    profile: np.ndarray, confidence: np.ndarray, grid: np.ndarray, layers: Sequence[str], part: str = "layer"
) -> Figure:
    """Draw the contribution of each step and layer to the variance of the endpoint, for both ends of the ranking.

    Arguments:
        profile: Variance, `(steps, L, B)`, summed over coordinates.
        confidence: High = sure, `(B,)`; only the order matters.
        grid: Times of the run, `(steps + 1,)`.
        layers: Names of the L layers or parts of the network.
        part: The word for a layer in the legend.
    """
    figure = Figure(figsize=TWO)
    panels = figure.subplots(1, 2, sharey=True)
    colours = LAYERS(np.linspace(0.0, 0.92, len(layers)))
    for axes, which, name in zip(panels, extremes(confidence), ("surest", "most doubtful"), strict=True):
        parts = profile[:, :, which].astype(float).mean(2)  # (steps, L)
        below = np.zeros(len(parts))
        for share, colour, layer in zip((parts / parts.sum()).T, colours, layers, strict=True):
            axes.stairs(below + share, grid, baseline=below, fill=True, color=colour, label=layer)
            below = below + share
        axes.set(xlabel=TIME, xlim=(grid[0], grid[-1]))
        axes.set_title(f"{name} {EXTREME:.0%}: endpoint std {np.sqrt(parts.sum()):.2g}")
    panels[0].set_ylabel("share of the endpoint variance, per step")
    panels[0].yaxis.set_major_formatter(PERCENT)
    handles, names = panels[0].get_legend_handles_labels()
    panels[0].legend(handles[::-1], names[::-1], title=part, loc="upper left", alignment="left")
    return figure


# ---- ranking -----------------------------------------------------------------------------------------------------


@styled
def retention_curve(curves: Mapping[str, Retention], prevalence: float, what: str = "misplaced") -> Figure:
    """Draw the share of bad samples among those kept, with those of a random and a perfect order.

    Arguments:
        curves: Retention curves by label.
        prevalence: The share of bad samples among all samples.
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
        steady = curve.kept >= 0.01  # rates among fewer samples are too noisy
        axes.plot(curve.kept[steady], curve.rate[steady], color=colour, label=label)
        highest = max(highest, float(curve.rate[steady].max(initial=0)))
    axes.set(xlabel="share of samples kept", ylabel=f"{what} among the kept", xlim=(1, 0), ylim=(0, 1.06 * highest))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(**LEGEND_ABOVE, ncols=2, columnspacing=1.2)
    return figure


# ---- one-dimensional samples -------------------------------------------------------------------------------------


@styled
def draw_signals(x: np.ndarray, confidence: np.ndarray, label: str) -> Figure:  # (B, L) or (B, C, L)
    """Draw the surest and the most doubtful signals over the range of all signals."""
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
    figure.legend([*handles, single], [*names, "individual samples"], loc="outside lower left", ncols=3)
    return figure
