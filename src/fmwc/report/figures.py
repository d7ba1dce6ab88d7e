"""Figures of a Checkerboard run. Each function returns a matplotlib Figure; nothing is shown, no setting is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from fmwc.data.checkerboard import CELL, HALF, inside
from fmwc.diagnostics import divergence
from fmwc.field import Field
from fmwc.metrics.ranking import Retention
from fmwc.report.curves import EXTREME, extremes, on_common_times
from fmwc.report.look import CONFIDENCE, DOUBTFUL, FAINT, INK, LAYERS, LINES, SURE, look, png, svg

__all__ = [
    "png",
    "retention_curve",
    "samples_by_confidence",
    "svg",
    "transport_profile",
    "variance_against_divergence",
    "variance_trajectories",
]

ONE, TWO = (5.8, 4.0), (9.2, 4.3)  # inches: a figure of one panel, of two
TIME = "time t   (0: noise, 1: sample)"
EXTENT = 2.5  # the board and half a cell around it
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")


def _cells() -> list[tuple[float, float]]:
    """Lower left corners of the eight cells of the support."""
    corners = torch.cartesian_prod(*[torch.arange(-HALF, HALF, CELL)] * 2)
    return [(float(x), float(y)) for x, y in corners[inside(corners + CELL / 2)]]


def _board(axes: Axes, extent: float, **style: object) -> None:
    for corner in _cells():
        axes.add_patch(Rectangle(corner, CELL, CELL, **style))  # type: ignore[arg-type]
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal")
    axes.set_xticks(range(-2, 3))
    axes.set_yticks(range(-2, 3))


PROPAGATIONS = ("linearised", "diagonal")


@look
def samples_by_confidence(x: ArrayLike, confidence: ArrayLike, bad: ArrayLike) -> Figure:
    """Samples on the board, coloured by confidence; misplaced ones ringed. The doubtful lie on top.

    Arguments:
        x: Samples, `(B, 2)`.
        confidence: In [0, 1], `(B,)`.
        bad: The misplaced ones, `(B,)`.
    """
    order = np.argsort(-np.asarray(confidence), kind="stable")
    points, level, wrong = (np.asarray(a)[order] for a in (x, confidence, bad))
    figure = Figure(figsize=(5.8, 4.9))
    axes = figure.add_subplot()
    _board(axes, max(EXTENT, float(np.abs(points).max()) + 0.1), facecolor="#eef0f4", edgecolor="none", zorder=0)

    colours = CONFIDENCE(level)
    across, up = points.T
    axes.scatter(across[~wrong], up[~wrong], s=5, c=colours[~wrong], linewidths=0, rasterized=True)
    axes.scatter(across[wrong], up[wrong], s=11, c=colours[wrong], linewidths=0.5, edgecolors=INK, rasterized=True)
    label = f"misplaced ({wrong.mean():.1%})"
    axes.scatter([], [], s=22, facecolors="none", edgecolors=INK, linewidths=0.8, label=label)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0, handletextpad=0.2)
    bar = figure.colorbar(ScalarMappable(cmap=CONFIDENCE), ax=axes, shrink=0.8, label="confidence", ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


@look
def variance_trajectories(times: ArrayLike, std: ArrayLike, confidence: ArrayLike, bad: ArrayLike) -> Figure:
    """‖σ_t‖ over time: median and 10–90 % band of the surest and of the most doubtful tenth, and a few single samples.

    Arguments:
        times: When the variance was read, `(R,)` or `(R, B)`.
        std: ‖σ_t‖ there, `(R, B)`.
        confidence: In [0, 1], `(B,)`.
        bad: The misplaced ones, `(B,)`.
    """
    t, curves = on_common_times(np.asarray(times), np.asarray(std))
    wrong = np.asarray(bad)
    sure, doubtful = extremes(np.asarray(confidence))
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    for which, colour, name in ((doubtful, DOUBTFUL, "most doubtful"), (sure, SURE, "surest")):
        low, middle, high = np.quantile(curves[:, which], [0.1, 0.5, 0.9], axis=1)
        axes.fill_between(t, low, high, color=colour, alpha=0.18, linewidth=0)
        singles = which[np.linspace(0, len(which) - 1, 6).round().astype(int)]
        axes.plot(t, curves[:, singles], color=colour, linewidth=0.6, alpha=0.55)
        label = f"{name} {EXTREME:.0%} of samples ({wrong[which].mean():.1%} misplaced)"
        axes.plot(t, middle, color=colour, linewidth=2.4, label=label)
    axes.set(xlabel=TIME, ylabel=r"uncertainty of the velocity  $\|\sigma_t\|$", xlim=(0, 1), ylim=(0, None))
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
    return figure


@look
def retention_curve(curves: Mapping[str, Retention], prevalence: float) -> Figure:
    """How clean the kept samples are as the doubtful ones are given up, between a random and a perfect order.

    Arguments:
        curves: A retention curve for each label.
        prevalence: The share of misplaced samples when all are kept.
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
    axes.set(xlabel="share of samples kept", ylabel="misplaced among the kept", xlim=(1, 0), ylim=(0, 1.06 * highest))
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, ncols=2, columnspacing=1.2)
    return figure


@look
def variance_against_divergence(field: Field, t: float = 0.6, cells: int = 120) -> Figure:
    """σ_t beside |∇·v_t| on a grid (fig:div-vs-std), linearised and diagonal; the divergence is the exact trace.

    Arguments:
        field: A field over the plane.
        t: The time.
        cells: Grid cells a side.
    """
    side = ((torch.arange(cells) + 0.5) / cells * 2 - 1) * EXTENT
    x = torch.cartesian_prod(side, side).to(field.device)
    change = divergence(field, x, torch.full((len(x),), t, device=x.device)).abs().cpu().double().numpy()
    stds = {p: field.moments(x, t, p).var.sum(1).sqrt().detach().cpu().double().numpy() for p in PROPAGATIONS}
    values = [*stds.values(), change]
    names = [rf"$\sigma_t$, {p} (Spearman {spearmanr(std, change)[0]:.2f})" for p, std in stds.items()]
    names.append(r"divergence  $|\nabla\cdot v_t|$")
    figure = Figure(figsize=(1.45 * TWO[0], TWO[1]))
    for axes, value, name in zip(figure.subplots(1, 3, sharey=True), values, names, strict=True):
        ceiling = float(np.quantile(value, 0.995))  # a few cells at the rim would else take all of the scale
        grid = value.reshape(cells, cells).T
        shown = axes.imshow(
            grid, origin="lower", extent=(-EXTENT, EXTENT) * 2, cmap="plasma", vmin=grid.min(), vmax=ceiling
        )
        _board(axes, EXTENT, facecolor="none", edgecolor="white", linewidth=0.7, alpha=0.55)
        axes.set_title(name)
        axes.spines[:].set_visible(False)
        figure.colorbar(shown, ax=axes, shrink=0.8, extend="max").outline.set_visible(False)  # type: ignore[operator]
    figure.suptitle(f"At t = {t:g}: uncertainty of the velocity, and how fast the flow spreads or gathers")
    return figure


@look
def transport_profile(
    profile_sure: ArrayLike, profile_doubtful: ArrayLike, grid: ArrayLike, layers: Sequence[str]
) -> Figure:
    """When, and in which layer, the variance of the endpoint was made; each group's shares add up to one.

    Arguments:
        profile_sure, profile_doubtful: `Transported.profile` of the two groups, `(steps, L, B)`, from exact probes.
        grid: Every time of the run, `(steps + 1,)`.
        layers: The names of the layers.
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
    panels[0].legend(handles[::-1], names[::-1], title="layer", loc="upper left", alignment="left")
    return figure
