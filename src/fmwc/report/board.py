"""Figures of the Checkerboard's plane. Each function returns a matplotlib Figure."""

from __future__ import annotations

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
from fmwc.report.look import CONFIDENCE, INK, look

__all__ = ["samples_by_confidence", "variance_against_divergence"]

EXTENT = 2.5  # the board and half a cell around it
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
