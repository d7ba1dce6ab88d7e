"""Figures of the Checkerboard's plane. Each function returns a matplotlib Figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from fmwc.data.checkerboard import CELL, HALF, inside
from fmwc.diagnostics import divergence
from fmwc.field import Field
from fmwc.report.figures import TWO
from fmwc.report.look import CONFIDENCE, FAINT, INK, LINES, look

__all__ = ["Ways", "samples_by_confidence", "variance_against_divergence", "ways_beside", "ways_turned"]

EXTENT = 2.5  # the board and half a cell around it
WAYS = 24  # that are shown: more cannot be told apart
PROPAGATIONS = ("linearised", "diagonal")


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


@look
def samples_by_confidence(x: ArrayLike, levels: Mapping[str, ArrayLike], bad: ArrayLike) -> Figure:
    """Samples on the board, coloured by confidence; misplaced ones ringed. The doubtful lie on top.

    Arguments:
        x: Samples, `(B, 2)`.
        levels: What they are coloured by, in [0, 1], `(B,)` each, by name: a board each.
        bad: The misplaced ones, `(B,)`.
    """
    one = len(levels) == 1
    figure = Figure(figsize=(5.8, 4.9) if one else (TWO[0], 4.9))
    boards = np.atleast_1d(figure.subplots(1, len(levels), sharey=True))
    for axes, (name, level) in zip(boards, levels.items(), strict=True):
        order = np.argsort(-np.asarray(level), kind="stable")
        points, shade, wrong = (np.asarray(a)[order] for a in (x, level, bad))
        _board(axes, max(EXTENT, float(np.abs(points).max()) + 0.1), facecolor="#eef0f4", edgecolor="none", zorder=0)
        colours = CONFIDENCE(shade)
        across, up = points.T
        axes.scatter(across[~wrong], up[~wrong], s=5, c=colours[~wrong], linewidths=0, rasterized=True)
        axes.scatter(across[wrong], up[wrong], s=11, c=colours[wrong], linewidths=0.5, edgecolors=INK, rasterized=True)
        if not one:
            axes.set_title(name, fontsize=10)
    label = f"misplaced ({np.asarray(bad).mean():.1%})"
    boards[-1].scatter([], [], s=22, facecolors="none", edgecolors=INK, linewidths=0.8, label=label)
    if one:
        boards[-1].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0, handletextpad=0.2)
    else:
        figure.legend(loc="outside upper right", borderpad=0, handletextpad=0.2)
    called = next(iter(levels)) if one else ""
    bar = figure.colorbar(ScalarMappable(cmap=CONFIDENCE), ax=list(boards), shrink=0.8, label=called, ticks=[0, 0.5, 1])
    if not one:
        bar.ax.set_yticklabels(["doubtful", "", "sure"])
    bar.outline.set_visible(False)  # type: ignore[operator]
    return figure


class Ways(NamedTuple):
    """Ways on the board before and after an edit.

    Attributes:
        before, after: Every state of the old and of the new way, `(steps + 1, B, 2)`.
        grid: Their times, `(steps + 1, B)`.
        times: When each was edited, `(B,)`.
        turned: Which ended in another square, `(B,)`.
    """

    before: ArrayLike
    after: ArrayLike
    grid: ArrayLike
    times: ArrayLike
    turned: ArrayLike


def ways_turned(before: ArrayLike, after: ArrayLike, grid: ArrayLike, times: ArrayLike, turned: ArrayLike) -> Figure:
    """Ways on the board, from where each was edited: the old one to its end, and the new one. Of many, an even choice.

    The arguments are those of :class:`Ways`.
    """
    return ways_beside({"": Ways(before, after, grid, times, turned)})


@look
def ways_beside(
    panels: Mapping[str, Ways], same: str = "edited, to the same square", other: str = "edited, to another"
) -> Figure:
    """The same for several kinds of edits, a board each under its name; `same`, `other`: words for the colours."""
    one = len(panels) == 1
    ends = [np.abs(np.asarray(states)[-1]).max() for ways in panels.values() for states in ways[:2]]
    extent = max(HALF, float(max(ends))) + 0.1
    figure = Figure(figsize=(6.2, 5.6) if one else (3.6 * len(panels), 4.2))
    for axes, (name, ways) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        _draw_ways(axes, ways, extent)
        if not one:
            axes.set_title(name)
    turned = np.asarray(next(iter(panels.values())).turned)
    share = f" ({turned.mean():.0%} of {len(turned):,})" if one else ""
    axes = figure.axes[0]
    for style, words in (
        ({"color": INK, "marker": "o", "markersize": 3, "linestyle": ""}, "where noise came in (dotted)"),
        ({"color": FAINT, "marker": "o", "markerfacecolor": "white", "linewidth": 0.9}, "the way it was"),
        ({"color": LINES[2], "marker": "o", "linewidth": 1.3}, same),
        ({"color": LINES[1], "marker": "o", "linewidth": 1.3}, f"{other}{share}"),
    ):
        axes.plot([], [], label=words, **style)  # type: ignore[arg-type]
    if one:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2, columnspacing=1.4)
    else:
        figure.legend(loc="outside upper left", ncols=4, columnspacing=1.4)
    return figure


def _draw_ways(axes: Axes, ways: Ways, extent: float) -> None:
    old, new, t, start, other = (np.asarray(a) for a in ways)
    _board(axes, extent, facecolor="#eef0f4", edgecolor="none", zorder=0)
    axes.spines[:].set_visible(False)
    centres = np.arange(-HALF, HALF, CELL) + CELL / 2
    axes.set_xticks(centres, list("abcd"))
    axes.set_yticks(centres, ["1", "2", "3", "4"])
    axes.tick_params(length=0)
    for one in np.unique(np.linspace(0, len(start) - 1, min(WAYS, len(start))).round().astype(int)):
        late = t[:, one] >= start[one] - 1e-6
        colour = LINES[1] if other[one] else LINES[2]
        axes.plot(*old[late, one].T, color=FAINT, linewidth=0.9, alpha=0.8, zorder=1)
        axes.plot(*new[late, one].T, color=colour, linewidth=1.3, alpha=0.85, zorder=2)
        kick = np.stack([old[late, one][0], new[late, one][0]])
        axes.plot(*kick.T, color=colour, linewidth=1.0, linestyle=(0, (1, 1.2)), zorder=2)
        axes.plot(*old[late, one][0], "o", color=INK, markersize=2.6, zorder=3)
        axes.plot(*old[-1, one], "o", color=FAINT, markerfacecolor="white", markersize=4.2, zorder=3)
        axes.plot(
            *new[-1, one], "o", color=colour, markeredgecolor="white", markeredgewidth=0.5, markersize=5.2, zorder=4
        )


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
