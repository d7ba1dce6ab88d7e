"""Samples of any network as figures, by the shape of a state: points, images or curves; surest beside most doubtful."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike

from fmwc.report.curves import EXTREME, extremes
from fmwc.report.figures import TWO
from fmwc.report.look import CONFIDENCE, DOUBTFUL, FAINT, INK, SURE, look
from fmwc.report.sheet import Sheet

__all__ = ["Drawn", "draw", "kind_of"]

LONG = 8  # numbers in a row from which on they are a curve, or the side of an image
SIDE = 4  # of an image with colours: its shape leaves no doubt that it is one
PANELS = 4  # channels of a curve, at most, that are drawn
MANY = 5_000  # points that a figure holds; more only hide each other
GRID = 6  # images a side
SINGLE = 8  # curves from either end


class Drawn(NamedTuple):
    """A figure of samples, and what a reader is told about it."""

    title: str
    caption: str
    alt: str
    figure: Figure


def kind_of(shape: tuple[int, ...]) -> str:
    """What a state of this shape is drawn as; empty where no picture is honest.

    >>> [kind_of(shape) for shape in [(2,), (1, 28, 28), (3, 32, 32), (16, 16), (100,), (2, 64), (5, 3), (7,)]]
    ['points', 'images', 'images', 'images', 'curves', 'curves', '', '']
    """
    if shape == (2,):
        return "points"
    if len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= SIDE:
        return "images"
    if len(shape) == 2 and min(shape) >= LONG:
        return "images"
    if (len(shape) == 1 and shape[0] >= LONG) or (len(shape) == 2 and shape[0] <= PANELS and shape[1] >= LONG):
        return "curves"
    return ""


def draw(x: ArrayLike, confidence: ArrayLike, name: str = "", called: str = "confidence") -> Drawn | None:
    """Draw samples; `None` where their shape says nothing of what they are.

    Arguments:
        x: Samples, `(B, *)`.
        confidence: In [0, 1], `(B,)`.
        name: The channel, where a state has several.
    """
    values, level = np.asarray(x, dtype=float), np.asarray(confidence, dtype=float)
    kind = kind_of(values.shape[1:])
    finite = np.isfinite(values).reshape(len(values), -1).all(1)
    if not kind or not finite.any():
        return None
    left_out = "" if finite.all() else f" {(~finite).sum():,} samples with NaN or infinity are left out."
    title, caption, alt, figure = {"points": _points, "images": _images, "curves": _curves}[kind](
        values[finite], level[finite], called
    )
    return Drawn(f"{title}: {name}" if name else title, caption + left_out, alt, figure)


@look
def _points(x: np.ndarray, level: np.ndarray, called: str) -> Drawn:
    order = np.argsort(-level, kind="stable")  # the doubtful lie on top
    some = order[np.unique(np.linspace(0, len(order) - 1, min(MANY, len(order))).round().astype(int))]
    sure, doubtful = extremes(level)
    low, high = np.quantile(x, [0.001, 0.999], axis=0)
    middle, half = (low + high) / 2, 0.55 * max(float((high - low).max()), 1e-6)
    figure = Figure(figsize=(TWO[0], 3.4))
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    size = float(np.clip(3_000 / len(some), 2.5, 20))
    panels[0].scatter(*x[some].T, s=size, c=CONFIDENCE(level[some]), linewidths=0, rasterized=True)
    panels[0].set_title(f"all samples ({len(x):,})")
    for axes, which, colour, name in (
        (panels[1], sure, SURE, "surest"),
        (panels[2], doubtful, DOUBTFUL, "most doubtful"),
    ):
        axes.scatter(*x[some].T, s=size, c="#e3e5ea", linewidths=0, rasterized=True)
        axes.scatter(*x[which].T, s=size, color=colour, linewidths=0, rasterized=True)
        axes.set_title(f"{name} {EXTREME:.0%} ({len(which):,})")
    for axes in panels:
        axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), aspect="equal")
        axes.set_xlabel("first number of the state")
    panels[0].set_ylabel("second number of the state")
    bar = figure.colorbar(ScalarMappable(cmap=CONFIDENCE), ax=panels, shrink=0.8, label=called, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)  # type: ignore[operator]
    return Drawn(
        "The samples",
        f"Each point is a sample, coloured by its {called}; the doubtful are drawn on top. Beside it, the surest and "
        "the most doubtful tenth in front of all others. A few far outliers may lie outside of the frame.",
        f"Scatter plots of the samples: all by {called}, the surest tenth, and the most doubtful tenth.",
        figure,
    )


@look
def _images(x: np.ndarray, level: np.ndarray, called: str) -> Drawn:
    images = x if x.ndim == 3 else x[:, 0] if x.shape[1] == 1 else np.moveaxis(x, 1, -1)  # (B, H, W) or (B, H, W, 3)
    order = np.argsort(-level, kind="stable")
    count = max(1, min(GRID * GRID, len(order) // 2))
    columns = max(3, min(GRID, count))  # three carry a heading
    low, high = np.quantile(images[np.append(order[:count], order[-count:])], [0.005, 0.995])
    span = max(float(high - low), 1e-12)
    rows = -(-count // columns)
    left, heading, between, foot = 0.2, 0.9, 0.8, 0.6
    right = left + columns + between
    sheet = Sheet(right + columns + 0.2, heading + rows + foot, side=0.62)
    for start, which, name in ((left, order[:count], "surest"), (right, order[-count:], "most doubtful")):
        first, last = level[which[0]], level[which[-1]]
        words = f"the {len(which)} {name} ({called} {first:.2f} to {last:.2f})"
        sheet.text(start + 0.06, heading / 2, words, fontsize=10)
        _grid(sheet.axes, (images[which] - low) / span, start, heading, columns, rows)
    ink = "in colour" if images.ndim == 4 else "black is low, white is high"
    scale = f"values from {low:.3g} to {high:.3g} ({ink}); from left to right and down, {called} falls"
    sheet.text(left + 0.06, heading + rows + foot / 2, scale, color=FAINT)
    return Drawn(
        "The samples",
        f"The {count} samples that the model is surest of, and the {count} it doubts most. All share one scale of "
        "brightness, so that they can be compared.",
        f"Two grids of generated images: the {count} surest on the left, the {count} most doubtful on the right.",
        sheet.figure,
    )


def _grid(axes: Axes, images: np.ndarray, left: float, top: float, columns: int, rows: int) -> None:
    """Images, each in a unit square with a margin; their own proportions are kept."""
    for place, image in enumerate(np.clip(images, 0, 1)):
        row, column = divmod(place, columns)
        high, wide = image.shape[:2]
        across, down = 0.92 * min(1, wide / high), 0.92 * min(1, high / wide)
        x, y = left + column + (1 - across) / 2, top + row + (1 - down) / 2
        axes.imshow(
            image,
            extent=(x, x + across, y + down, y),
            aspect="auto",
            cmap="gray",
            vmin=0,
            vmax=1,
            interpolation="nearest",
        )


@look
def _curves(x: np.ndarray, level: np.ndarray, called: str) -> Drawn:
    curves = x[:, None] if x.ndim == 2 else x  # (B, C, L)
    channels, length = curves.shape[1:]
    order = np.argsort(-level, kind="stable")
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
            axes.plot(place, middle, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), label="median of all samples")
            lines = axes.plot(place, curves[which, row].T, color=colour, linewidth=1.0, alpha=0.75)
            lines[0].set_label("single samples")
            axes.set_xlim(0, length - 1)
            if row == 0:
                first, last = level[which[0]], level[which[-1]]
                axes.set_title(f"the {count} {name} ({called} {first:.2f} to {last:.2f})")
        panels[row, 0].set_ylabel("value" if channels == 1 else f"channel {row}")
    for axes in panels[-1]:
        axes.set_xlabel("position in the signal")
    handles, names = panels[0, 0].get_legend_handles_labels()
    handles[-1] = Line2D([], [], color=INK, linewidth=1.0)  # in neither group's colour
    figure.legend(handles, names, loc="outside lower left", ncols=3)
    return Drawn(
        "The samples",
        f"The {count} samples that the model is surest of, and the {count} it doubts most, in front of the range of "
        f"all {len(curves):,} samples.",
        f"Curves: the {count} surest samples on the left, the {count} most doubtful on the right.",
        figure,
    )
