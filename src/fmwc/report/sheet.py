"""Sheets of images: which ones are shown and where, and how they are drawn.

Images are ink on paper, and whatever lies outside [0, 1] is white or black: as the judge sees them.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from numpy.typing import ArrayLike

from fmwc.report.look import CONFIDENCE, DOUBTFUL, FAINT

__all__ = ["COLUMNS", "Band", "Sheet", "bands", "ends_by_class", "share"]

COLUMNS = 20
END_ROWS, MIDDLE_ROWS = 2, 6  # of a run too large to be shown whole
SIDE = 0.42  # inches: an image with its margin; a row of twenty is as wide as the page
MARGIN = 1 / 14  # around an image, in its own height
SMALL = 9  # points


# ---- which digits, where -----------------------------------------------------------------------------------------


class Band(NamedTuple):
    """Rows of digits, surest first.

    Attributes:
        which: The digits that are shown.
        places: Their places in the ranking, from 0.
        total: How many digits they stand for.
    """

    which: np.ndarray
    places: np.ndarray
    total: int


def bands(confidence: ArrayLike, columns: int = COLUMNS) -> list[Band]:  # (B,)
    """All digits in order, if they fill no more than ten rows; else both ends whole and an even choice of the rest.

    >>> [band.which.tolist() for band in bands([0.2, 0.9, 0.5])]
    [[1, 2, 0]]
    >>> [(len(band.which), band.places[[0, -1]].tolist(), band.total) for band in bands(np.arange(10_000))]
    [(40, [0, 39], 40), (120, [40, 9959], 9920), (40, [9960, 9999], 40)]
    """
    order = np.argsort(-np.asarray(confidence, dtype=float), kind="stable")
    count, end, middle = len(order), END_ROWS * columns, MIDDLE_ROWS * columns
    if count <= 2 * end + middle:
        return [Band(order, np.arange(count), count)]
    chosen = [
        (np.arange(end), end),
        (np.linspace(end, count - end - 1, middle).round().astype(int), count - 2 * end),
        (np.arange(count - end, count), end),
    ]
    return [Band(order[places], places, total) for places, total in chosen]


def ends_by_class(
    confidence: ArrayLike, classes: ArrayLike, shown: int
) -> dict[int, tuple[np.ndarray, np.ndarray]]:  # (B,), (B,)
    """For each class that occurs, its surest and its most doubtful digits, both surest first and none in both.

    >>> ends = ends_by_class([0.1, 0.9, 0.5, 0.7], [3, 3, 3, 7], shown=1)
    >>> {c: (sure.tolist(), doubtful.tolist()) for c, (sure, doubtful) in ends.items()}
    {3: ([1], [0]), 7: ([3], [])}
    """
    level, groups = np.asarray(confidence, dtype=float), np.asarray(classes)
    order = np.argsort(-level, kind="stable")
    ends = {}
    for group in np.unique(groups):
        members = order[groups[order] == group]
        sure = min(shown, ceil(len(members) / 2))
        doubtful = min(shown, len(members) - sure)
        ends[int(group)] = members[:sure], members[len(members) - doubtful :]
    return ends


# ---- drawing -----------------------------------------------------------------------------------------------------


class Sheet:
    """Creates a figure whose unit is the side of an image with its margin, from the upper left corner down.

    Arguments:
        width, height: Of the figure, in that unit.
        side: That unit, in inches.
    """

    def __init__(self, width: float, height: float, side: float = SIDE) -> None:
        self.figure = Figure(figsize=(side * width, side * height))
        self.figure.set_layout_engine("none")  # everything has its place already
        self.axes = self.figure.add_axes((0, 0, 1, 1), frameon=False)
        self.axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])

    def images(
        self, images: np.ndarray, left: float, top: float, columns: int, paper: float = 0.0, **style: Any
    ) -> AxesImage:
        """Images row by row, as one picture; `paper` is what lies between them."""
        count, high, wide = images.shape
        margin = 2 * max(1, round(MARGIN * high))
        rows = ceil(count / columns)
        sheet = np.full((rows, columns, high + margin, wide + margin), paper)
        inner = sheet[:, :, margin // 2 : margin // 2 + high, margin // 2 : margin // 2 + wide]
        places = np.divmod(np.arange(count), columns)
        inner[places] = images
        picture = sheet.swapaxes(1, 2).reshape(rows * (high + margin), columns * (wide + margin))
        style = {"cmap": "gray_r", "vmin": 0, "vmax": 1, **style}
        extent = (left, left + columns, top + rows, top)
        return self.axes.imshow(picture, extent=extent, aspect="auto", **style)

    def digits(
        self,
        images: np.ndarray,
        bad: np.ndarray,
        left: float,
        top: float,
        columns: int,
        asked: np.ndarray | None = None,
    ) -> None:
        """Images row by row, the bad ones framed, with what was asked for in a corner."""
        if not len(images):
            return
        self.images(images, left, top, columns)
        for one in np.flatnonzero(bad):
            row, column = divmod(int(one), columns)
            self.frame(left + column, top + row)
            if asked is not None:
                self.text(left + column + 0.17, top + row + 0.2, f"{asked[one]}", ha="center", fontsize=SMALL - 2)

    def frame(self, left: float, top: float, side: float = 1.0, colour: str = DOUBTFUL) -> None:
        inset = 0.03 * side
        corner, side = (left + inset, top + inset), side - 2 * inset
        self.axes.add_patch(Rectangle(corner, side, side, facecolor="none", edgecolor=colour, linewidth=1.5))

    def legend(self, right: float, middle: float, bad: np.ndarray) -> None:
        """What a frame means, flush right."""
        words = self.text(right, middle, f"the judge reads another digit ({share(bad)})", ha="right")
        start = words.get_window_extent().transformed(self.axes.transData.inverted()).x0
        self.frame(start - 0.65, middle - 0.25, 0.5)

    def scale(self, right: float, top: float, places: np.ndarray, count: int) -> None:
        """Left of a row, the place of its first image and a piece of the way from sure to doubtful."""
        colour = CONFIDENCE(1 - places.mean() / max(1, count - 1))
        piece = Rectangle((right - 0.17, top), 0.17, 1, facecolor=colour, linewidth=0, antialiased=False)
        self.axes.add_patch(piece)
        self.text(right - 0.32, top + 0.5, f"{places[0] + 1:,}", ha="right", color=FAINT, fontsize=7.5)

    def text(self, x: float, y: float, words: str, **style: Any) -> Text:
        return self.axes.text(x, y, words, **{"va": "center", "fontsize": SMALL, **style})

    def rule(self, left: float, right: float, y: float) -> None:
        self.axes.plot([left, right], [y, y], color=FAINT, linewidth=0.6)

    def bar(self, shown: AxesImage, left: float, top: float, width: float, label: str) -> None:
        """The scale of a picture, lying."""
        (_, total), (height, _) = self.axes.get_xlim(), self.axes.get_ylim()
        place = (left / total, 1 - (top + 0.2) / height, width / total, 0.2 / height)
        bar = self.figure.colorbar(shown, cax=self.figure.add_axes(place), orientation="horizontal", extend="max")
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(labelsize=SMALL - 1)
        self.text(left + width + 0.4, top + 0.1, label)


def share(bad: np.ndarray) -> str:
    return f"{bad.mean():.1%}"
