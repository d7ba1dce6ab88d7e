"""Figures of any run. Each function returns a matplotlib Figure; nothing is shown, no setting is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import ArrayLike

from fmwc.metrics.ranking import Retention
from fmwc.report.curves import EXTREME, extremes, on_common_times
from fmwc.report.look import DOUBTFUL, FAINT, LAYERS, LINES, SURE, look, png, svg

__all__ = ["png", "retention_curve", "svg", "transport_profile", "variance_trajectories"]

ONE, TWO = (5.8, 4.0), (9.2, 4.3)  # inches: a figure of one panel, of two
TIME = "time t   (0: noise, 1: sample)"
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")


@look
def variance_trajectories(
    times: ArrayLike,
    std: ArrayLike,
    confidence: ArrayLike,
    shares: tuple[float, float] | None = None,
    what: str = "misplaced",
) -> Figure:
    """‖σ_t‖ over time: median and 10–90 % band of the surest and of the most doubtful tenth, and a few single samples.

    Arguments:
        times: When the variance was read, `(R,)` or `(R, B)`.
        std: ‖σ_t‖ there, `(R, B)`.
        confidence: High = sure, `(B,)`; only its order is used.
        shares: The share of samples to discard among the surest tenth and among the most doubtful, if that is known.
        what: The word for those.
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
        singles = which[np.linspace(0, len(which) - 1, 6).round().astype(int)]
        axes.plot(t, curves[:, singles], color=colour, linewidth=0.6, alpha=0.55)
        label = f"{name} {EXTREME:.0%} of samples{share}"
        axes.plot(t, middle, color=colour, linewidth=2.4, label=label)
    axes.set(xlabel=TIME, ylabel=r"uncertainty of the velocity  $\|\sigma_t\|$", xlim=(0, 1), ylim=(0, None))
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
    return figure


@look
def retention_curve(curves: Mapping[str, Retention], prevalence: float, what: str = "misplaced") -> Figure:
    """How clean the kept samples are as the doubtful ones are given up, between a random and a perfect order.

    Arguments:
        curves: A retention curve for each label.
        prevalence: The share of samples to discard when all are kept.
        what: The word for those.
    """
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    share = np.linspace(1, 0.01, 400)
    axes.axhline(prevalence, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label="random order")
    perfect = np.maximum(0, (prevalence - (1 - share)) / share)
    axes.plot(share, perfect, color=FAINT, linewidth=1.2, linestyle=(0, (1, 2)), label="perfect order")
    highest = max(prevalence, 1e-3)
    for (label, curve), colour in zip(curves.items(), LINES, strict=False):
        steady = curve.kept >= 0.01  # a rate among fewer samples says nothing
        axes.plot(curve.kept[steady], curve.rate[steady], color=colour, label=label)
        highest = max(highest, float(curve.rate[steady].max(initial=0)))
    axes.set(xlabel="share of samples kept", ylabel=f"{what} among the kept", xlim=(1, 0), ylim=(0, 1.06 * highest))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, ncols=2, columnspacing=1.2)
    return figure


@look
def transport_profile(
    profile_sure: ArrayLike, profile_doubtful: ArrayLike, grid: ArrayLike, layers: Sequence[str], part: str = "layer"
) -> Figure:
    """When, and in which layer, the variance of the endpoint was made; each group's shares add up to one.

    Arguments:
        profile_sure, profile_doubtful: The variance of the two groups, `(steps, L, B)`, summed over coordinates.
        grid: Every time of the run, `(steps + 1,)`.
        layers: The names of the layers, or of parts of the network they are added up over.
        part: What one of them is called.
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
        axes.set_title(f"{name}: ±{np.sqrt(parts.sum()):.2g} at the end")
    panels[0].set_ylabel("share of the endpoint variance, per step")
    panels[0].yaxis.set_major_formatter(PERCENT)
    handles, names = panels[0].get_legend_handles_labels()
    panels[0].legend(handles[::-1], names[::-1], title=part, loc="upper left", alignment="left")
    return figure
