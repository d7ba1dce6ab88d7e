"""Figures of images: sheets by confidence and by class, edits, uncertainty per pixel, and images of any field."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from numpy.typing import ArrayLike

from fmwc.errors import UsageError
from fmwc.estimators import Tangent
from fmwc.field import Field
from fmwc.randomness import derive
from fmwc.report.curves import even_choice
from fmwc.report.page import CONFIDENCE, DOUBTFUL, FAINT, styled
from fmwc.sampling import SamplingConfig, Trajectory, sample

__all__ = [
    "Pixels",
    "Sheet",
    "contest_text",
    "draw_images",
    "edited_pairs",
    "extremes_by_class",
    "most_doubtful",
    "pixel_std",
    "read_pixels",
    "sorted_grid",
]

COLUMNS = 20  # images per row of a sorted grid
END_ROWS, MIDDLE_ROWS = 2, 6  # rows of each end and of the middle, if a run is too large to be shown in full
ENDS = 8  # images at each end of a class
SIDE = 0.42  # inches per image with its margin; a row of twenty is as wide as the page
MARGIN = 1 / 14  # around an image, relative to its height
SMALL = 9  # points
PAIRS, PAIR_COLUMNS = 40, 5  # maximum number of edits drawn, and pairs per row
STEPS = 50  # Euler steps of the runs whose states are shown
TIMES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.96)  # of the states
GRID = 6  # images per side of a grid
DOUBTFUL_SHOWN, DOUBTFUL_COLUMNS = 40, 8  # maximum number of most doubtful images drawn, and images per row


# ---- selections --------------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """Rows of images, surest first.

    Attributes:
        which: Indices of the images that are shown.
        places: Their positions in the ranking, from 0.
        total: The number of images that they represent.
    """

    which: np.ndarray
    places: np.ndarray
    total: int


def bands(confidence: ArrayLike, columns: int = COLUMNS) -> list[Band]:  # (B,)
    """Return all images in order if they fit in ten rows, or else both ends and evenly spaced images between them.

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
    """Return the surest and the most doubtful images of each class, surest first and without overlap.

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
    """A figure whose unit of length is one image with its margin, with the origin at the upper left.

    Values outside [0, 1] are drawn as white or black.

    Arguments:
        width, height: Size of the figure, in images.
        side: Side of an image, in inches.
    """

    def __init__(self, width: float, height: float, side: float = SIDE) -> None:
        self.figure = Figure(figsize=(side * width, side * height))
        self.figure.set_layout_engine("none")  # all positions are explicit
        self.axes = self.figure.add_axes((0, 0, 1, 1), frameon=False)
        self.axes.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])

    def images(
        self, images: np.ndarray, left: float, top: float, columns: int, paper: float = 0.0, **style: Any
    ) -> AxesImage:
        """Draw images row by row as one picture; `paper` is the pixel value between them."""
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
        classes: np.ndarray | None = None,
    ) -> None:
        """Draw images row by row; frame bad images and write the requested class in the corner."""
        if not len(images):
            return
        self.images(images, left, top, columns)
        for i in np.flatnonzero(bad):
            row, column = divmod(int(i), columns)
            self.frame(left + column, top + row)
            if classes is not None:
                self.text(left + column + 0.17, top + row + 0.2, f"{classes[i]}", ha="center", fontsize=SMALL - 2)

    def frame(self, left: float, top: float, side: float = 1.0, colour: str = DOUBTFUL) -> None:
        """Frame an image."""
        inset = 0.03 * side
        corner, side = (left + inset, top + inset), side - 2 * inset
        self.axes.add_patch(Rectangle(corner, side, side, facecolor="none", edgecolor=colour, linewidth=1.5))

    def legend(self, right: float, middle: float, bad: np.ndarray) -> None:
        """Write the right-aligned legend of the frames."""
        words = self.text(right, middle, f"classified as another digit ({bad.mean():.1%})", ha="right")
        start = words.get_window_extent().transformed(self.axes.transData.inverted()).x0
        self.frame(start - 0.65, middle - 0.25, 0.5)

    def scale(self, right: float, top: float, places: np.ndarray, count: int) -> None:
        """Write the rank of a row's first image and the row's confidence colour to the left of the row."""
        colour = CONFIDENCE(1 - places.mean() / max(1, count - 1))
        piece = Rectangle((right - 0.17, top), 0.17, 1, facecolor=colour, linewidth=0, antialiased=False)
        self.axes.add_patch(piece)
        self.text(right - 0.32, top + 0.5, f"{places[0] + 1:,}", ha="right", color=FAINT, fontsize=7.5)

    def text(self, x: float, y: float, words: str, **style: Any) -> Text:
        """Write text, vertically centred."""
        return self.axes.text(x, y, words, **{"va": "center", "fontsize": SMALL, **style})

    def rule(self, left: float, right: float, y: float) -> None:
        """Draw a horizontal line."""
        self.axes.plot([left, right], [y, y], color=FAINT, linewidth=0.6)

    def bar(self, shown: AxesImage, left: float, top: float, width: float, label: str) -> None:
        """Draw the horizontal colour scale of a picture."""
        (_, total), (height, _) = self.axes.get_xlim(), self.axes.get_ylim()
        place = (left / total, 1 - (top + 0.2) / height, width / total, 0.2 / height)
        bar = self.figure.colorbar(shown, cax=self.figure.add_axes(place), orientation="horizontal", extend="max")
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.ax.tick_params(labelsize=SMALL - 1)
        self.text(left + width + 0.4, top + 0.1, label)


# ---- digits ------------------------------------------------------------------------------------------------------


class Pixels(NamedTuple):
    """Trajectories of a few digits, with the standard deviation of the velocity per pixel.

    Attributes:
        states: x_t, `(T, n, H, W)`.
        std: σ_t, `(T, n, H, W)`.
        times: t, `(T,)`.
        index: Indices of the digits in the run, surest first, `(n,)`.
    """

    states: np.ndarray
    std: np.ndarray
    times: np.ndarray
    index: np.ndarray  # type: ignore[assignment]  # hides tuple.index


def read_pixels(
    field: Field,
    trajectory: Trajectory,
    count: int = 6,
    times: Sequence[float] = TIMES,
    probes: int = 64,
    seed: int = 0,
) -> Pixels:
    """Recompute the surest and the most doubtful digits of a run and read the variance of each pixel.

    Arguments:
        field: The field that was sampled.
        trajectory: The run.
        count: Number of digits, half of them from each end.
        times: Times of the readings, rounded to the nearest step.
        probes: Number of random probes per variance.
        seed: Seed of the probes.
    """
    if not 1 <= count <= len(trajectory):
        raise UsageError(f"count must be between 1 and {len(trajectory)}, the number of digits in the run, got {count}")
    order = trajectory.score().argsort(stable=True).cpu()
    sure = (count + 1) // 2
    index = torch.cat([order[:sure], order[len(order) - (count - sure) :]])
    x0 = trajectory.x0[index.to(trajectory.x0.device)].to(field.device)
    cond: dict[str, Any] = {
        name: value[index.to(value.device)].to(field.device) for name, value in trajectory.cond.items()
    }
    again = sample(field, x0=x0, steps=STEPS, confidence=None, cond=cond, config=SamplingConfig(keep_states=True))
    assert again.states is not None
    grid = again.grid[:-1, 0].cpu()
    states, stds, read = [], [], []
    for step in [int((grid - t).abs().argmin()) for t in times]:
        x, t = again.states[step], float(grid[step])
        # One seed per time, so that probe noise is not mistaken for a persistent pattern.
        var = field.moments(x, t, Tangent(probes), seed=derive(seed, "pixels", step), cond=cond).var
        states.append(_images(x.cpu()))
        stds.append(np.sqrt(_images(var.cpu())))
        read.append(t)
    return Pixels(np.stack(states), np.stack(stds), np.array(read), index.numpy())


def _images(x: ArrayLike) -> np.ndarray:  # (B, H, W) or (B, 1, H, W) -> (B, H, W)
    images = np.asarray(x)
    return images[:, 0] if images.ndim == 4 else images


@styled
def sorted_grid(
    x: ArrayLike, confidence: ArrayLike, bad: ArrayLike, classes: ArrayLike, columns: int = COLUMNS
) -> Figure:
    """Draw digits from the surest to the most doubtful, row by row, with failed digits framed.

    For a large run, draw both ends and evenly spaced digits between them.

    Arguments:
        x: Images, `(B, 1, H, W)` or `(B, H, W)`.
        confidence: High = sure, `(B,)`; only the order matters.
        bad: Whether each digit failed, `(B,)`.
        classes: Requested classes, `(B,)`, written in the frames.
        columns: Digits per row.
    """
    images, wrong, groups = _images(x), np.asarray(bad, dtype=bool), np.asarray(classes)
    shown = bands(confidence, columns)
    rows = [ceil(len(band.which) / columns) for band in shown]
    left, heading, gap = 1.75, 0.9, 0.15
    sheet = Sheet(left + columns + 0.15, sum(rows) + len(shown) * (heading + gap) + 0.1)
    top = 0.0
    for band, height, title in zip(shown, rows, _titles(shown, wrong), strict=True):
        sheet.text(left + 0.06, top + heading / 2, title)
        top += heading
        sheet.digits(images[band.which], wrong[band.which], left, top, columns, groups[band.which])
        for row in range(height):
            places = band.places[row * columns : (row + 1) * columns]
            sheet.scale(left - 0.18, top + row, places, len(wrong))
        top += height + gap
    sheet.legend(left + columns - 0.06, heading / 2, wrong)
    return sheet.figure


def _titles(shown: list[Band], bad: np.ndarray) -> list[str]:
    if len(shown) == 1:
        return [f"all {len(bad):,}, from the surest to the most doubtful"]
    sure, middle, doubtful = shown
    first, last = (int(bad[band.which].sum()) for band in (sure, doubtful))
    rest = int(bad.sum()) - first - last
    return [
        f"the {sure.total} surest of {len(bad):,}: {first or 'none'} failed",
        f"the {middle.total:,} in between ({len(middle.which)} shown): {rest or 'none'} failed",
        f"the {doubtful.total} most doubtful: {last or 'none'} failed",
    ]


@styled
def extremes_by_class(x: ArrayLike, confidence: ArrayLike, bad: ArrayLike, classes: ArrayLike) -> Figure:
    """Draw one row per class: its surest digits, its most doubtful digits, and its failure rate.

    The arguments are those of :func:`sorted_grid`.
    """
    images, wrong, groups = _images(x), np.asarray(bad, dtype=bool), np.asarray(classes)
    ends = ends_by_class(confidence, groups, ENDS)
    shown = max(4, *(len(sure) for sure, _ in ends.values()))  # the headings need the width of four images
    left, heading, between = 1.75, 1.5, 0.9
    right = left + shown + between
    width = right + shown + 1.75
    sheet = Sheet(width, heading + len(ends) + 0.15, side=0.46)
    for start, name in ((left, "surest"), (right, "most doubtful")):
        sheet.text(start + 0.06, heading - 0.5, f"the {name}")
        sheet.rule(start + 0.06, start + shown - 0.06, heading - 0.13)
    sheet.text(0.85, heading - 0.5, "class", ha="center")
    sheet.text(width - 0.15, heading - 0.5, "failed", ha="right")
    for row, (group, (sure, doubtful)) in enumerate(ends.items()):
        middle = heading + row + 0.5
        sheet.text(0.85, middle, f"{group}", ha="center", fontsize=13, fontweight="bold")
        sheet.digits(images[sure], wrong[sure], left, heading + row, shown)
        # Right-aligned, so that the most doubtful digits of all classes form one column.
        sheet.digits(images[doubtful], wrong[doubtful], right + shown - len(doubtful), heading + row, len(doubtful))
        sheet.text(width - 0.15, middle, f"{wrong[groups == group].mean():.1%}", ha="right")
    sheet.legend(right + shown - 0.06, 0.42, wrong)
    return sheet.figure


@styled
def edited_pairs(
    before: ArrayLike,
    after: ArrayLike,
    read_before: ArrayLike,
    read_after: ArrayLike,
    sample: ArrayLike,
    times: ArrayLike,
) -> Figure:
    """Draw evenly spaced digits beside their edits; frame edits that changed the class.

    Arguments:
        before, after: Images, `(B, 1, H, W)` or `(B, H, W)`.
        read_before, read_after: Predicted classes, `(B,)`.
        sample: Indices of the edited samples, `(B,)`.
        times: Times of the edits, `(B,)`.
    """
    old_images, new_images = _images(before), _images(after)
    numbers, old, new, t = (np.asarray(a) for a in (sample, read_before, read_after, times))
    shown = even_choice(len(t), PAIRS)
    columns = max(3, min(PAIR_COLUMNS, len(shown)))  # the heading needs the width of three
    left, heading, foot = 0.15, 0.75, 0.05
    wide, tall = 2.95, 1.55
    sheet = Sheet(left + columns * wide - 0.2, heading + ceil(len(shown) / columns) * tall + foot, side=0.66)
    which = "sample → edit" if len(shown) == len(t) else f"sample → edit, {len(shown)} of {len(t):,}"
    words = f"{which}; framed: class changed ({(old != new).mean():.1%})"
    sheet.text(left + 0.06, heading / 2 - 0.06, words, fontsize=10)
    for place, i in enumerate(shown):
        row, column = divmod(place, columns)
        x, y = left + column * wide, heading + row * tall
        sheet.images(old_images[i][None], x, y, 1)
        sheet.text(x + 1.19, y + 0.5, "→", ha="center", color=FAINT, fontsize=11)
        sheet.digits(new_images[i][None], np.array([old[i] != new[i]]), x + 1.38, y, 1)
        sheet.text(x + 0.5, y + 1.14, f"#{numbers[i]}: {old[i]}", ha="center", fontsize=7.5)
        sheet.text(x + 1.88, y + 1.14, f"{new[i]}, t = {t[i]:.2f}", ha="center", fontsize=7.5)
    return sheet.figure


@styled
def pixel_std(pixels: Pixels, confidence: ArrayLike, x: ArrayLike, bad: ArrayLike, label: str = "confidence") -> Figure:
    """Draw trajectories of a few digits, with the standard deviation of the velocity per pixel below each state.

    Arguments:
        pixels: The trajectories.
        confidence: In [0, 1], `(n,)`; the surer half is drawn on the left.
        x: The digits at t = 1, `(n, 1, H, W)` or `(n, H, W)`.
        bad: Whether each digit failed, `(n,)`.
        label: `confidence`, or `rank` if the confidence is withheld.
    """
    t, level, wrong = pixels.times, np.asarray(confidence, dtype=float), np.asarray(bad, dtype=bool)
    paths = np.concatenate([pixels.states.astype(float), _images(x)[None]]).swapaxes(0, 1)  # (n, T + 1, H, W)
    stds = pixels.std.astype(float).swapaxes(0, 1)  # (n, T, H, W)
    order = np.argsort(-level, kind="stable")
    half, columns = ceil(len(order) / 2), len(t) + 1
    ceiling = float(np.quantile(stds, 0.998))  # a few pixels would dominate the scale
    left, heading, between, gap, foot = 0.75, 1.15, 0.8, 0.3, 1.0
    sheet = Sheet(left + 2 * columns + between + 0.15, heading + half * (2 + gap) + foot, side=0.58)
    shown = None
    for start, which, name in (
        (left, order[:half], "surest"),
        (left + columns + between, order[half:], "most doubtful"),
    ):
        if not len(which):
            continue
        sheet.text(start + 0.06, 0.4, f"the {len(which)} {name}", fontsize=10)
        for column, value in enumerate([*t, 1.0]):
            when = f"t = {value:.2g}" if column == 0 else f"{value:.2g}"
            sheet.text(start + column + 0.5, heading - 0.3, when, ha="center", color=FAINT, fontsize=8)
        for row, i in enumerate(which):
            top = heading + row * (2 + gap)
            sheet.digits(paths[i], np.append(np.zeros(len(t), bool), wrong[i]), start, top, columns)
            shown = sheet.images(
                stds[i], start, top + 1, len(t), np.nan, cmap="plasma", vmax=ceiling, interpolation="nearest"
            )
            sheet.text(start + columns - 0.5, top + 1.36, label, ha="center", color=FAINT, fontsize=6.5)
            sheet.text(start + columns - 0.5, top + 1.68, f"{level[i]:.2f}", ha="center")
    for row in range(half):
        top = heading + row * (2 + gap)
        sheet.text(left - 0.15, top + 0.5, "$x_t$", ha="right", fontsize=10)
        sheet.text(left - 0.15, top + 1.5, r"$\sigma_t$", ha="right", fontsize=10)
    assert shown is not None
    bottom = heading + half * (2 + gap)
    sheet.bar(shown, left + 0.06, bottom + 0.1, 5, r"standard deviation of the velocity per pixel  $\sigma_t$")
    return sheet.figure


# ---- images of any field -----------------------------------------------------------------------------------------


@styled
def draw_images(x: np.ndarray, confidence: np.ndarray, label: str) -> Figure:  # (B, H, W) or (B, 1 or 3, H, W), (B,)
    """Draw the surest and the most doubtful images side by side, on a common scale of brightness."""
    images = x if x.ndim == 3 else x[:, 0] if x.shape[1] == 1 else np.moveaxis(x, 1, -1)  # (B, H, W) or (B, H, W, 3)
    order = np.argsort(-confidence, kind="stable")
    count = max(1, min(GRID * GRID, len(order) // 2))
    columns = max(3, min(GRID, count))  # the heading needs the width of three
    rows = -(-count // columns)
    low, high = np.quantile(images[np.append(order[:count], order[-count:])], [0.005, 0.995])
    scaled = np.clip((images - low) / max(float(high - low), 1e-12), 0, 1)
    left, heading, between, foot = 0.2, 0.9, 0.8, 0.6
    right = left + columns + between
    sheet = Sheet(right + columns + 0.2, heading + rows + foot, side=0.62)
    tall, wide = images.shape[1:3]
    across, down = 0.92 * min(1, wide / tall), 0.92 * min(1, tall / wide)
    style: dict[str, Any] = {"aspect": "auto", "cmap": "gray", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    for start, which, name in ((left, order[:count], "surest"), (right, order[-count:], "most doubtful")):
        words = f"the {count} {name} ({label} {confidence[which[0]]:.2f} to {confidence[which[-1]]:.2f})"
        sheet.text(start + 0.06, heading / 2, words, fontsize=10)
        for place, i in enumerate(which):
            row, column = divmod(place, columns)
            x0, y0 = start + column + (1 - across) / 2, heading + row + (1 - down) / 2
            sheet.axes.imshow(scaled[i], extent=(x0, x0 + across, y0 + down, y0), **style)
    ink = "in colour" if images.ndim == 4 else "black is low, white is high"
    words = f"values from {low:.3g} to {high:.3g} ({ink}); {label} decreases row by row"
    sheet.text(left + 0.06, heading + rows + foot / 2, words, color=FAINT)
    return sheet.figure


def contest_text(requested: Any, rival: Any, margin: float) -> str:
    """Describe the result of a contest for one sample.

    >>> contest_text(4, 9, -0.1), contest_text(4, 9, 0.2)
    ('requested 4, better fit 9', 'requested 4, second best 9')
    """
    return f"requested {requested}, {'better fit' if margin < 0 else 'second best'} {rival}"


@styled
def most_doubtful(
    x: ArrayLike,
    score: ArrayLike,
    classes: ArrayLike | None = None,
    rival: ArrayLike | None = None,
    margin: ArrayLike | None = None,
) -> Figure:
    """Draw the most doubtful images with their scores or the results of a contest.

    Arguments:
        x: Images, `(B, C, H, W)` or `(B, H, W)`; colours are averaged.
        score: High = doubtful, `(B,)`.
        classes: Requested classes, `(B,)`.
        rival, margin: Results of a contest, `(B,)`.
    """
    images, doubt = np.asarray(x, dtype=float), np.asarray(score, dtype=float)
    images = images.mean(1) if images.ndim == 4 else images
    order = np.argsort(-doubt, kind="stable")[:DOUBTFUL_SHOWN]
    columns, tall, heading = min(DOUBTFUL_COLUMNS, max(4, len(order))), 1.6, 0.5
    sheet = Sheet(columns * 1.35 + 0.2, ceil(len(order) / columns) * tall + heading + 0.1, side=0.82)
    sheet.text(0.15, heading / 2, f"the {len(order)} most doubtful of {len(doubt):,}")
    for place, i in enumerate(order):
        row, column = divmod(place, columns)
        left, top = 0.15 + column * 1.35, heading + row * tall
        sheet.images(images[i][None].clip(0, 1), left, top, 1)
        words, style = f"score {doubt[i]:.3g}", {}
        if classes is not None and rival is not None and margin is not None:
            values = (np.asarray(v)[i] for v in (classes, rival, margin))
            words = contest_text(*values).replace(", ", ",\n")
            if np.asarray(margin)[i] < 0:
                sheet.frame(left, top)
                style = {"color": DOUBTFUL}
        sheet.text(left + 0.5, top + 1.24, words, ha="center", fontsize=7, **style)
    return sheet.figure
