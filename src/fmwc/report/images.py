"""Figures of generated digits, and how the model's doubt about single pixels is read. Figures are matplotlib's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from numpy.typing import ArrayLike

from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.propagate import Tangent
from fmwc.randomness import derive
from fmwc.report.figures import PERCENT, TWO
from fmwc.report.look import FAINT, LINES, look
from fmwc.report.sheet import COLUMNS, Band, Sheet, bands, ends_by_class, share
from fmwc.sampling import Trajectory, sample

__all__ = [
    "Pixels",
    "Sweep",
    "edited_pairs",
    "extremes_by_class",
    "pixel_std",
    "quality_against_steps",
    "read_pixels",
    "sorted_grid",
]

DECADE = 10  # values that differ more than this are told apart on a logarithmic axis only
PAIRS = 40  # edits that are shown
STEPS = 50  # of the runs whose states are shown


class Pixels(NamedTuple):
    """The way of a few digits, and the doubt about every pixel of their velocity on it.

    Attributes:
        states: x_t, `(T, n, H, W)`.
        std: σ_t, `(T, n, H, W)`.
        times: t, `(T,)`.
        index: Which digits of the run they are, the surest first, `(n,)`.
    """

    states: np.ndarray
    std: np.ndarray
    times: np.ndarray
    index: np.ndarray  # type: ignore[assignment]  # hides tuple.index, which has no use here


def read_pixels(
    field: Field,
    trajectory: Trajectory,
    count: int = 6,
    times: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8, 0.96),
    probes: int = 64,
    seed: int = 0,
) -> Pixels:
    """Integrates the surest and the most doubtful digits of a run again and reads the variance of single pixels.

    Arguments:
        field: The field that was sampled.
        trajectory: The run.
        count: How many digits, half of them from either end.
        times: When to read; the nearest step is taken.
        probes: Random directions that a variance is averaged over.
        seed: Seeds them.
    """
    if not 1 <= count <= len(trajectory):
        raise UsageError(f"this run holds {len(trajectory)} digits, so {count} of them cannot be read")
    order = trajectory.score().argsort(stable=True).cpu()
    sure = (count + 1) // 2
    index = torch.cat([order[:sure], order[len(order) - (count - sure) :]])
    x0 = trajectory.x0[index.to(trajectory.x0.device)].to(field.device)
    cond: dict[str, Any] = {
        name: value[index.to(value.device)].to(field.device) for name, value in trajectory.cond.items()
    }
    again = sample(field, x0=x0, steps=STEPS, confidence=False, keep_states=True, **cond)
    assert again.states is not None
    grid = again.grid[:-1, 0].cpu()
    states, stds, read = [], [], []
    for step in [int((grid - t).abs().argmin()) for t in times]:
        x, t = again.states[step], float(grid[step])
        # A seed for each time, so that what is left of the probes' noise does not look like the digit's doing.
        var = field.moments(x, t, Tangent(probes), seed=derive(seed, "pixels", step), **cond).var
        states.append(_images(x.cpu()))
        stds.append(np.sqrt(_images(var.cpu())))
        read.append(t)
    return Pixels(np.stack(states), np.stack(stds), np.array(read), index.numpy())


class Sweep(NamedTuple):
    """How good the digits are with fewer steps: for each label, from the number of Euler steps to a value.

    Attributes:
        fid: The Fréchet distance to real digits.
        failures: The share that the judge takes for another class.
    """

    fid: Mapping[str, Mapping[int, float]]
    failures: Mapping[str, Mapping[int, float]]


def _images(x: ArrayLike) -> np.ndarray:  # (B, H, W) or (B, 1, H, W) -> (B, H, W)
    images = np.asarray(x)
    return images[:, 0] if images.ndim == 4 else images


@look
def sorted_grid(
    x: ArrayLike, confidence: ArrayLike, bad: ArrayLike, classes: ArrayLike | None = None, columns: int = COLUMNS
) -> Figure:
    """Digits from the surest to the most doubtful, row by row; failed ones framed. Of many, both ends and a choice.

    Arguments:
        x: Images, `(B, 1, H, W)` or `(B, H, W)`.
        confidence: High = sure, `(B,)`; only its order is used.
        bad: The failed ones, `(B,)`.
        classes: What was asked for, `(B,)`; written into the frames, if given.
        columns: Digits a row.
    """
    images, wrong = _images(x), np.asarray(bad, dtype=bool)
    shown = bands(confidence, columns)
    rows = [ceil(len(band.which) / columns) for band in shown]
    left, heading, gap = 1.75, 0.9, 0.15
    sheet = Sheet(left + columns + 0.15, sum(rows) + len(shown) * (heading + gap) + 0.1)
    top = 0.0
    for band, height, title in zip(shown, rows, _titles(shown, wrong), strict=True):
        sheet.text(left + 0.06, top + heading / 2, title)
        top += heading
        asked = None if classes is None else np.asarray(classes)[band.which]
        sheet.digits(images[band.which], wrong[band.which], left, top, columns, asked)
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
        f"the {middle.total:,} in between, {len(middle.which)} of which are shown: {rest or 'none'} failed",
        f"the {doubtful.total} most doubtful: {last or 'none'} failed",
    ]


@look
def extremes_by_class(
    x: ArrayLike, confidence: ArrayLike, bad: ArrayLike, classes: ArrayLike, shown: int = 8
) -> Figure:
    """A row for each class that was asked for: its surest digits, its most doubtful ones, and how many of all failed.

    Arguments:
        x: Images, `(B, 1, H, W)` or `(B, H, W)`.
        confidence: High = sure, `(B,)`; only its order is used.
        bad: The failed ones, `(B,)`.
        classes: What was asked for, `(B,)`.
        shown: Digits at either end.
    """
    images, wrong, groups = _images(x), np.asarray(bad, dtype=bool), np.asarray(classes)
    ends = ends_by_class(confidence, groups, shown)
    shown = max(4, *(len(sure) for sure, _ in ends.values()))  # a small run has fewer; four carry the headings
    left, heading, between = 1.75, 1.5, 0.9
    right = left + shown + between
    width = right + shown + 1.75
    sheet = Sheet(width, heading + len(ends) + 0.15, side=0.46)
    for start, name in ((left, "surest"), (right, "most doubtful")):
        sheet.text(start + 0.06, heading - 0.5, f"the {name}")
        sheet.rule(start + 0.06, start + shown - 0.06, heading - 0.13)
    sheet.text(0.85, heading - 0.5, "asked for", ha="center")
    sheet.text(width - 0.15, heading - 0.5, "failed", ha="right")
    for row, (group, (sure, doubtful)) in enumerate(ends.items()):
        middle = heading + row + 0.5
        sheet.text(0.85, middle, f"{group}", ha="center", fontsize=13, fontweight="bold")
        sheet.digits(images[sure], wrong[sure], left, heading + row, shown)
        # Flush right, so that the most doubtful of all classes stand below each other.
        sheet.digits(images[doubtful], wrong[doubtful], right + shown - len(doubtful), heading + row, len(doubtful))
        sheet.text(width - 0.15, middle, share(wrong[groups == group]), ha="right")
    sheet.legend(right + shown - 0.06, 0.42, wrong)
    return sheet.figure


@look
def edited_pairs(
    before: ArrayLike,
    after: ArrayLike,
    read_before: ArrayLike,
    read_after: ArrayLike,
    sample: ArrayLike,
    times: ArrayLike,
    columns: int = 5,
) -> Figure:
    """Digits and, to the right of each, its edit; framed where it reads as another digit. Of many, an even choice.

    Arguments:
        before, after: Images, `(B, 1, H, W)` or `(B, H, W)`.
        read_before, read_after: What each is taken for, `(B,)`.
        sample: The number of the sample that is edited, `(B,)`.
        times: When each was edited, `(B,)`.
        columns: Pairs a row.
    """
    here, there = _images(before), _images(after)
    numbers, old, new, t = (np.asarray(a) for a in (sample, read_before, read_after, times))
    shown = np.unique(np.linspace(0, len(t) - 1, min(PAIRS, len(t))).round().astype(int))
    columns = max(3, min(columns, len(shown)))  # three carry the heading
    left, heading, foot = 0.15, 0.75, 0.05
    wide, tall = 2.95, 1.55
    sheet = Sheet(left + columns * wide - 0.2, heading + ceil(len(shown) / columns) * tall + foot, side=0.66)
    which = "each edit" if len(shown) == len(t) else f"{len(shown)} of {len(t):,} edits, each"
    words = f"{which} after its sample; framed: another digit ({share(old != new)})"
    sheet.text(left + 0.06, heading / 2 - 0.06, words, fontsize=10)
    for place, one in enumerate(shown):
        row, column = divmod(place, columns)
        x, y = left + column * wide, heading + row * tall
        sheet.images(here[one][None], x, y, 1)
        sheet.text(x + 1.19, y + 0.5, "→", ha="center", color=FAINT, fontsize=11)
        sheet.digits(there[one][None], np.array([old[one] != new[one]]), x + 1.38, y, 1)
        sheet.text(x + 0.5, y + 1.14, f"#{numbers[one]}: {old[one]}", ha="center", fontsize=7.5)
        sheet.text(x + 1.88, y + 1.14, f"{new[one]}, t = {t[one]:.2f}", ha="center", fontsize=7.5)
    return sheet.figure


@look
def pixel_std(
    states: ArrayLike,
    std: ArrayLike,
    times: ArrayLike,
    confidence: ArrayLike,
    x: ArrayLike,
    bad: ArrayLike,
    called: str = "confidence",
) -> Figure:
    """How a few digits came about, and below each state the standard deviation of every pixel's velocity.

    Arguments:
        states: x_t, `(T, n, H, W)`.
        std: σ_t, `(T, n, H, W)`.
        times: t, `(T,)`.
        confidence: In [0, 1], `(n,)`; the surer half is drawn on the left.
        x: The digits at t = 1, `(n, 1, H, W)` or `(n, H, W)`.
        bad: The failed ones, `(n,)`.
        called: What it is called: `rank` where confidence is withheld.
    """
    t, level, wrong = np.asarray(times), np.asarray(confidence, dtype=float), np.asarray(bad, dtype=bool)
    paths = np.concatenate([np.asarray(states, dtype=float), _images(x)[None]]).swapaxes(0, 1)  # (n, T + 1, H, W)
    doubts = np.asarray(std, dtype=float).swapaxes(0, 1)  # (n, T, H, W)
    order = np.argsort(-level, kind="stable")
    half, columns = ceil(len(order) / 2), len(t) + 1
    ceiling = float(np.quantile(doubts, 0.998))  # a few pixels would else take all of the scale
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
            label = f"t = {value:.2g}" if column == 0 else f"{value:.2g}"
            sheet.text(start + column + 0.5, heading - 0.3, label, ha="center", color=FAINT, fontsize=8)
        for row, one in enumerate(which):
            top = heading + row * (2 + gap)
            sheet.digits(paths[one], np.append(np.zeros(len(t), bool), wrong[one]), start, top, columns)
            shown = sheet.images(
                doubts[one], start, top + 1, len(t), np.nan, cmap="plasma", vmax=ceiling, interpolation="nearest"
            )
            sheet.text(start + columns - 0.5, top + 1.36, called, ha="center", color=FAINT, fontsize=6.5)
            sheet.text(start + columns - 0.5, top + 1.68, f"{level[one]:.2f}", ha="center")
    for row in range(half):
        top = heading + row * (2 + gap)
        sheet.text(left - 0.15, top + 0.5, "$x_t$", ha="right", fontsize=10)
        sheet.text(left - 0.15, top + 1.5, r"$\sigma_t$", ha="right", fontsize=10)
    assert shown is not None
    bottom = heading + half * (2 + gap)
    sheet.bar(shown, left + 0.06, bottom + 0.1, 5, r"standard deviation of the velocity, pixel by pixel  $\sigma_t$")
    return sheet.figure


@look
def quality_against_steps(sweep: Sweep) -> Figure:
    """FID and failure rate against the number of Euler steps.

    Arguments:
        sweep: The curves of the two panels.
    """
    figure = Figure(figsize=(TWO[0], 3.7))
    panels = figure.subplots(1, 2)
    names = list(dict.fromkeys([*sweep.fid, *sweep.failures]))  # a label has one colour in both
    for axes, curves in zip(panels, sweep, strict=True):
        for label, curve in curves.items():
            steps, values = zip(*sorted((int(n), v) for n, v in curve.items()), strict=True)  # JSON makes keys text
            colour = LINES[names.index(label) % len(LINES)]
            axes.plot(steps, values, color=colour, marker="o", markersize=5, label=label)
        _steps_axis(axes, sorted({int(n) for curve in curves.values() for n in curve}))
    _distance_axis(panels[0])
    panels[1].set(ylabel="failure rate", ylim=(0, None))
    panels[1].yaxis.set_major_formatter(PERCENT)
    if len(names) > 1:
        panels[0].legend(loc="upper right")
    return figure


def _steps_axis(axes: Axes, steps: Sequence[int]) -> None:
    """A doubling of the steps is one stride; ticks only where something was measured."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlabel("Euler steps")


def _distance_axis(axes: Axes) -> None:
    low, high = axes.dataLim.intervaly
    axes.set_ylabel("FID (in the judge's features)")
    if low > 0 and high > DECADE * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, None)
