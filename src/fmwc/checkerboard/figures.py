"""Figures of points in the plane: the Checkerboard, and samples of any two-dimensional field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from fmwc.checkerboard.data import CELL, HALF, inside
from fmwc.field import Field
from fmwc.metrics.divergence import divergence
from fmwc.report.curves import even_choice
from fmwc.report.page import CONFIDENCE, FAINT, INK, LINES, TWO, styled
from fmwc.report.points import colour_bar

__all__ = [
    "EditedPaths",
    "edited_paths",
    "samples_by_confidence",
    "support",
    "variance_against_divergence",
]

EXTENT = 2.5  # the board and half a cell around it
PATHS = 24  # maximum number of paths drawn; more would be indistinguishable
ESTIMATORS = ("linearised", "diagonal")


def support() -> list[tuple[float, float]]:
    """Return the lower left corners of the eight cells of the support."""
    corners = torch.cartesian_prod(*[torch.arange(-HALF, HALF, CELL)] * 2)
    return [(left, bottom) for left, bottom in corners[inside(corners + CELL / 2)].tolist()]


def _board(axes: Axes, extent: float, **style: Any) -> None:
    """Draw the eight cells of the support."""
    for corner in support():
        axes.add_patch(Rectangle(corner, CELL, CELL, **{"zorder": 0, **style}))
    axes.set(xlim=(-extent, extent), ylim=(-extent, extent), aspect="equal", xticks=range(-2, 3), yticks=range(-2, 3))


@styled
def samples_by_confidence(x: ArrayLike, levels: Mapping[str, ArrayLike], bad: ArrayLike) -> Figure:
    """Draw samples on the board, coloured by confidence, with misplaced samples ringed and doubtful samples on top.

    Arguments:
        x: Samples, `(B, 2)`.
        levels: Confidences in [0, 1] by name, `(B,)`, with one panel for each.
        bad: Whether each sample is misplaced, `(B,)`.
    """
    one = len(levels) == 1
    figure = Figure(figsize=(5.8, 4.9) if one else (TWO[0], 4.9))
    panels = np.atleast_1d(figure.subplots(1, len(levels), sharey=True))
    for axes, (name, level) in zip(panels, levels.items(), strict=True):
        order = np.argsort(-np.asarray(level), kind="stable")
        points, shade, wrong = (np.asarray(a)[order] for a in (x, level, bad))
        _board(axes, max(EXTENT, float(np.abs(points).max()) + 0.1), facecolor="#eef0f4", edgecolor="none")
        colours = CONFIDENCE(shade)
        axes.scatter(*points[~wrong].T, s=5, c=colours[~wrong], linewidths=0, rasterized=True)
        axes.scatter(*points[wrong].T, s=11, c=colours[wrong], linewidths=0.5, edgecolors=INK, rasterized=True)
        if not one:
            axes.set_title(name, fontsize=10)
    label = f"misplaced ({np.asarray(bad).mean():.1%})"
    panels[-1].scatter([], [], s=22, facecolors="none", edgecolors=INK, linewidths=0.8, label=label)
    if one:
        panels[-1].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0, handletextpad=0.2)
    else:
        figure.legend(loc="outside upper right", borderpad=0, handletextpad=0.2)
    colour_bar(figure, list(panels), next(iter(levels)) if one else "", () if one else ("doubtful", "", "sure"))
    return figure


@styled
def variance_against_divergence(field: Field, t: float = 0.6, cells: int = 120) -> Figure:
    """Draw σ_t by two estimators and the exact divergence `|∇·v_t|` on a grid (fig:div-vs-std).

    Arguments:
        field: A field over the plane.
        t: The time.
        cells: Grid cells per side.
    """
    side = ((torch.arange(cells) + 0.5) / cells * 2 - 1) * EXTENT
    x = torch.cartesian_prod(side, side).to(field.device)
    change = divergence(field, x, torch.full((len(x),), t, device=x.device)).abs().cpu().double().numpy()
    stds = {p: field.moments(x, t, p).var.sum(1).sqrt().detach().cpu().double().numpy() for p in ESTIMATORS}
    maps = {rf"$\sigma_t$, {p} (Spearman {spearmanr(std, change)[0]:.2f})": std for p, std in stds.items()}
    maps[r"divergence  $|\nabla\cdot v_t|$"] = change
    figure = Figure(figsize=(1.45 * TWO[0], TWO[1]))
    for axes, (name, value) in zip(figure.subplots(1, 3, sharey=True), maps.items(), strict=True):
        shown = axes.imshow(
            value.reshape(cells, cells).T,
            origin="lower",
            extent=(-EXTENT, EXTENT) * 2,
            cmap="plasma",
            vmin=value.min(),
            vmax=float(np.quantile(value, 0.995)),  # a few cells at the edge would dominate the scale
        )
        _board(axes, EXTENT, facecolor="none", edgecolor="white", linewidth=0.7, alpha=0.55, zorder=1)
        axes.set_title(name)
        axes.spines[:].set_visible(False)
        figure.colorbar(shown, ax=axes, shrink=0.8, extend="max").outline.set_visible(False)  # type: ignore[operator]
    figure.suptitle(f"Standard deviation of the velocity and divergence of the flow at t = {t:g}")
    return figure


# ---- edits -------------------------------------------------------------------------------------------------------


class EditedPaths(NamedTuple):
    """Paths on the board before and after an edit.

    Attributes:
        before, after: States of the original and of the edited path, `(steps + 1, B, 2)`.
        grid: Their times, `(steps + 1, B)`.
        times: Time of each edit, `(B,)`.
        changed: Whether each path is drawn in the second colour, `(B,)`.
    """

    before: ArrayLike
    after: ArrayLike
    grid: ArrayLike
    times: ArrayLike
    changed: ArrayLike


@styled
def edited_paths(
    panels: Mapping[str, EditedPaths], same: str = "edited, same cell", other: str = "edited, another cell"
) -> Figure:
    """Draw original and edited paths from the edit onwards, for evenly spaced samples.

    Arguments:
        panels: Paths by panel title.
        same, other: Labels of the two colours.
    """
    one = len(panels) == 1
    ends = [np.abs(np.asarray(states)[-1]).max() for paths in panels.values() for states in paths[:2]]
    extent = max(HALF, float(max(ends))) + 0.1
    figure = Figure(figsize=(6.2, 5.6) if one else (3.6 * len(panels), 4.2))
    for axes, (name, paths) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels.items(), strict=True):
        _draw_paths(axes, paths, extent)
        if not one:
            axes.set_title(name)
    changed = np.asarray(next(iter(panels.values())).changed)
    share = f" ({changed.mean():.0%} of {len(changed):,})" if one else ""
    axes = figure.axes[0]
    styles: dict[str, dict[str, Any]] = {
        "edit (noise added along the dotted line)": {"color": INK, "marker": "o", "markersize": 3, "linestyle": ""},
        "original path": {"color": FAINT, "marker": "o", "markerfacecolor": "white", "linewidth": 0.9},
        same: {"color": LINES[2], "marker": "o", "linewidth": 1.3},
        f"{other}{share}": {"color": LINES[1], "marker": "o", "linewidth": 1.3},
    }
    for words, style in styles.items():
        axes.plot([], [], label=words, **style)
    if one:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, borderaxespad=0.2, columnspacing=1.4)
    else:
        figure.legend(loc="outside upper left", ncols=4, columnspacing=1.4)
    return figure


def _draw_paths(axes: Axes, paths: EditedPaths, extent: float) -> None:
    """Draw old and new paths on a board labelled as a chessboard."""
    old, new, t, start, changed = (np.asarray(a) for a in paths)
    _board(axes, extent, facecolor="#eef0f4", edgecolor="none")
    axes.spines[:].set_visible(False)
    centres = np.arange(-HALF, HALF, CELL) + CELL / 2
    axes.set_xticks(centres, list("abcd"))
    axes.set_yticks(centres, ["1", "2", "3", "4"])
    axes.tick_params(length=0)
    for i in even_choice(len(start), PATHS):
        late = t[:, i] >= start[i] - 1e-6
        colour = LINES[1] if changed[i] else LINES[2]
        axes.plot(*old[late, i].T, color=FAINT, linewidth=0.9, alpha=0.8, zorder=1)
        axes.plot(*new[late, i].T, color=colour, linewidth=1.3, alpha=0.85, zorder=2)
        kick = np.stack([old[late, i][0], new[late, i][0]])
        axes.plot(*kick.T, color=colour, linewidth=1.0, linestyle=(0, (1, 1.2)), zorder=2)
        axes.plot(*kick[0], "o", color=INK, markersize=2.6, zorder=3)
        axes.plot(*old[-1, i], "o", color=FAINT, markerfacecolor="white", markersize=4.2, zorder=3)
        end: dict[str, Any] = {"color": colour, "markeredgecolor": "white", "markeredgewidth": 0.5, "markersize": 5.2}
        axes.plot(*new[-1, i], "o", zorder=4, **end)
