"""Figures of generated crystals: structures sorted by confidence, and the quality of the ranking."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike

from fmwc.crystals.drawing import draw_crystal
from fmwc.crystals.judge import METASTABLE
from fmwc.crystals.structures import Crystals
from fmwc.errors import ShapeError, UsageError
from fmwc.metrics.ranking import retention
from fmwc.report.curves import EXTREME, even_choice, extremes, on_common_times
from fmwc.report.images import Sheet
from fmwc.report.page import (
    CONFIDENCE,
    DASHED,
    DOUBTFUL,
    FAINT,
    LEGEND_ABOVE,
    LINES,
    ONE,
    PERCENT,
    SURE,
    TIME,
    TWO,
    styled,
)

__all__ = ["CHANNELS", "channel_variances", "edited_pairs", "precision_curve", "sorted_by_confidence"]

STABLE_COLOUR, HIGH_COLOUR, NONE_COLOUR = LINES[2], LINES[3], LINES[4]
CLASSES = (  # colour, line, name
    (STABLE_COLOUR, "-", f"metastable: at most {METASTABLE} eV/atom above the hull"),
    (HIGH_COLOUR, "-", "higher"),
    (NONE_COLOUR, (0, (2.5, 1.5)), "invalid, or no energy"),
)
CHANNELS = {"type": "atom types", "coord": "coordinates", "lattice": "lattice"}
WINDOW = 0.05  # share of the ranking that is averaged around each position
MARKED = (0.05, 0.1)  # shares kept whose precision is printed in the legend


# ---- structures in order -----------------------------------------------------------------------------------------


def _classes(energy: np.ndarray, valid: np.ndarray) -> np.ndarray:  # (N,), into CLASSES
    return np.where(valid & np.isfinite(energy), np.where(energy <= METASTABLE, 0, 1), 2)


@styled
def sorted_by_confidence(
    crystals: Crystals,
    confidence: ArrayLike,
    e_above_hull: ArrayLike,
    valid: ArrayLike,
    score: ArrayLike,
    *,
    rows: int = 3,
    columns: int = 6,
    label: str = "confidence",
) -> Figure:
    """Draw structures at even steps of the ranking, the surest first. Frames show the energy above the hull.

    Below, plot the energy and the share of metastable structures along the whole ranking.

    Arguments:
        crystals: N structures.
        confidence: Higher is surer, `(N,)`.
        e_above_hull: eV/atom, `(N,)`; NaN if there is none.
        valid: Whether each structure passed the checks, `(N,)`.
        score: Higher is more doubtful, `(N,)`; orders structures of equal confidence.
        rows, columns: The size of the grid of structures.
        label: `confidence`, or `rank` if the confidence is withheld.
    """
    level, energy = np.asarray(confidence, dtype=float), np.asarray(e_above_hull, dtype=float)
    kind = _classes(energy, np.asarray(valid, dtype=bool))
    if not len(crystals) == len(level) == len(kind) > 0:
        raise ShapeError(
            f"one value per crystal is needed: {len(crystals)} crystals, {len(level)} confidences, {len(kind)} energies"
        )
    order = np.lexsort((np.asarray(score, dtype=float), -level))
    places = even_choice(len(order), rows * columns)
    rows = -(-len(places) // columns)
    left, heading, strip = 0.12, 0.62, 2.55  # inches, like all lengths below
    wide, tall = (TWO[0] - 2 * left) / columns, 1.98
    sheet = Sheet(TWO[0], heading + rows * tall + strip, side=1.0)
    which = "all" if len(places) == len(order) else f"{len(places)} of {len(order):,}, at even steps of the ranking:"
    sheet.text(left + 0.05, 0.17, f"{which} from the surest to the most doubtful", fontsize=10.5)
    _class_legend(sheet, left + 0.05, 0.44, kind)
    for n, place in enumerate(places):
        row, column = divmod(n, columns)
        one = int(order[place])
        x, y = left + column * wide, heading + row * tall
        caption = f"{_energy(energy[one])}\n{label} {_number(level[one])}"
        _draw_card(sheet, (x + 0.04, y + 0.04, wide - 0.08, tall - 0.08), kind[one], crystals, one, caption, 8.5)
        sheet.text(x + 0.11, y + 0.14, f"{place + 1:,}", fontsize=6.5, color=FAINT)
    top = heading + rows * tall + 0.22
    half = TWO[0] / 2
    _energies(_axes(sheet, 0.72, top, half - 0.95, strip - 0.80), energy[order], kind[order], places)
    _shares(_axes(sheet, half + 0.62, top, half - 0.95, strip - 0.80), kind[order], places)
    return sheet.figure


@styled
def edited_pairs(
    before: Crystals,
    after: Crystals,
    e_before: ArrayLike,
    e_after: ArrayLike,
    sample: ArrayLike,
    times: ArrayLike,
    success: ArrayLike,
    rows: int = 6,
    columns: int = 3,
) -> Figure:
    """Draw structures, each with its edit to the right. Frames show the energy above the hull.

    Arguments:
        before, after: The structures of each edit.
        e_before, e_after: eV/atom above the hull, `(N,)`; NaN if there is none.
        sample: The index of the edited sample, `(N,)`.
        times: The time of each edit, `(N,)`.
        success: Whether each edit is a success, `(N,)`; successes are marked.
        rows, columns: The maximum size of the grid. If there are more pairs, an even selection is shown.
    """
    energies = [np.asarray(e, dtype=float) for e in (e_before, e_after)]
    kinds = [_classes(e, np.ones(len(e), dtype=bool)) for e in energies]
    numbers, t, good = np.asarray(sample), np.asarray(times, dtype=float), np.asarray(success, dtype=bool)
    shown = even_choice(len(t), rows * columns)
    left, heading, tall = 0.12, 0.62, 2.0  # inches
    wide = (TWO[0] - 2 * left) / columns
    sheet = Sheet(TWO[0], heading + -(-len(shown) // columns) * tall + 0.08, side=1.0)
    which = "each edit" if len(shown) == len(t) else f"{len(shown)} of {len(t):,} edits, each"
    marked = f"; ✓ marks a success ({good.sum()} of {len(t)})" if good.any() else ""
    sheet.text(
        left + 0.05, 0.17, f"{which} to the right of its structure{marked}; shares refer to edits", fontsize=10.5
    )
    _class_legend(sheet, left + 0.05, 0.44, kinds[1])
    card = (wide - 0.3) / 2
    for n, one in enumerate(shown):
        row, column = divmod(n, columns)
        x, y = left + column * wide, heading + row * tall
        for side, (crystals, energy, kind) in enumerate(zip((before, after), energies, kinds, strict=True)):
            at = x + 0.04 + side * (card + 0.17)
            caption = f"{_energy(energy[one])}\n" + (f"t = {t[one]:.2f}" if side else f"sample {numbers[one]}")
            _draw_card(sheet, (at, y + 0.04, card, tall - 0.12), kind[one], crystals, int(one), caption, 7.6)
        sheet.text(x + 0.04 + card + 0.085, y + tall / 2, "→", ha="center", color=FAINT, fontsize=12)
        if good[one]:
            sheet.text(at + card - 0.06, y + 0.15, "✓", ha="right", color=STABLE_COLOUR, fontsize=10, fontweight="bold")
    return sheet.figure


def _axes(sheet: Sheet, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes at a position in inches from the upper left corner."""
    across, down = sheet.figure.get_size_inches()
    return sheet.figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def _energy(value: float) -> str:
    return rf"$E_\mathrm{{hull}}$ {_number(value)} eV/atom"


def _number(value: float) -> str:
    """
    >>> _number(0.034), _number(-0.012), _number(-0.001), _number(12.3), _number(float("nan"))
    ('0.03', '−0.01', '0.00', '12', '–')
    """
    if not np.isfinite(value):
        return "–"
    text = f"{value:.2f}" if abs(value) < 9.995 else f"{value:.0f}"
    return text.replace("-0.00", "0.00").replace("-", "−")


def _draw_card(
    sheet: Sheet,
    box: tuple[float, float, float, float],
    kind: int,
    crystals: Crystals,
    index: int,
    caption: str,
    size: float,
) -> None:
    """Draw a structure in a frame; `box` is left, top, width and height."""
    left, top, width, height = box
    _card(sheet, left, top, width, height, kind)
    draw_crystal(
        _axes(sheet, left + 0.07, top + 0.35, width - 0.14, height - 0.71), crystals, index, caption, size=size
    )


def _card(sheet: Sheet, left: float, top: float, width: float, height: float, kind: int) -> None:
    colour, line, _ = CLASSES[kind]
    style: dict[str, Any] = {"facecolor": "white", "linewidth": 1.6, "linestyle": line}
    style["boxstyle"] = "round,pad=0,rounding_size=0.06"
    sheet.axes.add_patch(FancyBboxPatch((left, top), width, height, edgecolor=colour, **style))


def _class_legend(sheet: Sheet, left: float, middle: float, kind: np.ndarray) -> None:
    for number, (_, _, words) in enumerate(CLASSES):
        _card(sheet, left, middle - 0.075, 0.21, 0.15, number)
        text = sheet.text(left + 0.28, middle, f"{words} ({(kind == number).mean():.1%})", fontsize=9)
        left = text.get_window_extent().transformed(sheet.axes.transData.inverted()).x1 + 0.3


def _windows(count: int) -> list[tuple[float, slice]]:
    """Return positions of a ranking in [0, 1], each with the window around it."""
    half = max(5, round(WINDOW * count / 2))
    return [((c + 0.5) / count, slice(max(0, c - half), c + half + 1)) for c in even_choice(count, 121).tolist()]


def _ranked(axes: Axes, count: int, places: np.ndarray, kind: np.ndarray) -> None:
    """Draw an axis from sure to doubtful in the colours of confidence, with a mark for each structure shown."""
    gradient = np.linspace(1, 0, 256)[None]
    bar = axes.inset_axes((0, -0.055, 1, 0.04))
    bar.imshow(gradient, cmap=CONFIDENCE, vmin=0, vmax=1, aspect="auto", extent=(0, 1, 0, 1))
    bar.set_axis_off()
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", length=0, pad=11)
    axes.set(xlim=(0, 1), xlabel="position in the ranking, surest first  (▾: shown above)")
    axes.xaxis.set_major_formatter(PERCENT)
    spots = (places + 0.5) / count
    colours = [CLASSES[k][0] for k in kind[places]]
    axes.scatter(
        spots, np.ones(len(spots)), s=16, c=colours, marker="v", transform=axes.get_xaxis_transform(), clip_on=False
    )


def _energies(axes: Axes, energy: np.ndarray, kind: np.ndarray, places: np.ndarray) -> None:
    """Plot the energy above the hull of valid structures along the ranking."""
    known = np.where(kind < 2, energy, np.nan)
    rows = []
    for place, window in _windows(len(energy)):
        values = known[window][np.isfinite(known[window])]
        if len(values):
            rows.append([place, *np.quantile(values, [0.16, 0.5, 0.84]), values.mean()])
    _ranked(axes, len(energy), places, kind)
    axes.set_ylabel("eV/atom above the hull")
    if not rows:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no energies", transform=axes.transAxes, ha="center", color=FAINT)
        return
    x, low, middle, high, mean = np.array(rows).T
    axes.axhline(METASTABLE, color=STABLE_COLOUR, linewidth=1.0, linestyle=DASHED)
    axes.fill_between(x, low, high, color=SURE, alpha=0.14, linewidth=0, label="16–84 %")
    axes.plot(x, mean, color=LINES[1], linewidth=1.3, label="mean")
    axes.plot(x, middle, color=SURE, label="median")
    bottom, top = min(0.0, *low), max(2 * METASTABLE, *high, *mean)
    axes.set_ylim(bottom - 0.04 * (top - bottom), 1.1 * top)
    axes.legend(loc="upper left", fontsize=8.5, borderaxespad=0.2)


def _shares(axes: Axes, kind: np.ndarray, places: np.ndarray) -> None:
    """Plot the shares of metastable and of invalid structures along the ranking."""
    windows = _windows(len(kind))
    for number, words, width in ((2, CLASSES[2][2], 1.3), (0, "metastable", 2.0)):
        colour, line, _ = CLASSES[number]
        share = [(kind[window] == number).mean() for _, window in windows]
        axes.plot([x for x, _ in windows], share, color=colour, linestyle=line, linewidth=width, label=words)
    axes.axhline((kind == 0).mean(), color=FAINT, linewidth=1.0, linestyle=DASHED, label="metastable, all structures")
    _ranked(axes, len(kind), places, kind)
    axes.set(ylim=(0, 1.04), ylabel="share of structures")
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(loc="best", fontsize=8.5)


# ---- curves ------------------------------------------------------------------------------------------------------


@styled
def channel_variances(times: ArrayLike, std_by_channel: Mapping[str, ArrayLike], confidence: ArrayLike) -> Figure:
    """Plot ‖σ_t‖ over time, one panel per channel: all samples (median, 16–84 %) and both ends of the ranking.

    Arguments:
        times: Times of the readings, `(R,)` or `(R, B)`.
        std_by_channel: ‖σ_t‖ at these times, `(R, B)`, by channel.
        confidence: Higher is surer, `(B,)`; only its order is used.
    """
    if not std_by_channel:
        raise UsageError("no channels to draw; give the standard deviation of at least one")
    sure, doubtful = extremes(np.asarray(confidence, dtype=float))
    figure = Figure(figsize=(TWO[0], 3.0))
    panels = figure.subplots(1, len(std_by_channel), squeeze=False)[0]
    for axes, (name, std) in zip(panels, std_by_channel.items(), strict=True):
        t, curves = on_common_times(np.asarray(times, dtype=float), np.asarray(std, dtype=float))
        low, middle, high = np.quantile(curves, [0.16, 0.5, 0.84], axis=1)
        axes.fill_between(t, low, high, color=NONE_COLOUR, alpha=0.2, linewidth=0, label="16–84 % of all")
        axes.plot(t, middle, color=NONE_COLOUR, linewidth=1.4, label="median of all")
        for group, colour, words in ((sure, SURE, "surest"), (doubtful, DOUBTFUL, "most doubtful")):
            label = f"median of the {words} {EXTREME:.0%}"
            axes.plot(t, np.median(curves[:, group], axis=1), color=colour, label=label)
        peak = int(middle.argmax())
        style = {"color": NONE_COLOUR, "markersize": 5, "markeredgecolor": "white", "zorder": 5, "clip_on": False}
        axes.plot(t[peak], middle[peak], "o", **style)
        axes.set(xlim=(0, 1), ylim=(0, None))
        axes.set_xlabel(TIME, fontsize=9)
        axes.set_title(f"{CHANNELS.get(name, name)}: highest at t = {t[peak]:.2f}", fontsize=10)
    panels[0].set_ylabel(r"uncertainty  $\|\sigma_t\|$")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, columnspacing=1.3, fontsize=9)
    return figure


@styled
def precision_curve(scores: Mapping[str, ArrayLike], good: ArrayLike, what: str = "metastable") -> Figure:
    """Plot the share of good structures among the surest, from the surest 1 % to all structures.

    Arguments:
        scores: Scores by name, `(N,)` each; higher is more doubtful.
        good: Whether each structure is good, `(N,)`.
        what: The word for a good structure.
    """
    right = np.asarray(good, dtype=bool)
    floor = float(right.mean())
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    for (name, score), colour in zip(scores.items(), cycle(LINES), strict=False):
        curve = retention(score, right)
        drawn = curve.kept >= 0.01
        marks = [curve.at(share) for share in MARKED]
        written = ", ".join(f"{rate:.0%} at {share:.0%}" for rate, share in zip(marks, MARKED, strict=True))
        axes.plot(curve.kept[drawn], curve.rate[drawn], color=colour, label=f"{name}  ({written})")
        axes.plot(MARKED, marks, "o", color=colour, markersize=7, markeredgecolor="white", zorder=4)
    axes.axhline(floor, color=FAINT, linewidth=1.2, linestyle=DASHED, label=f"random order  ({floor:.0%})")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set(xlim=(0.01, 1), ylim=(0, 1.04), xlabel="share kept, the surest first", ylabel=f"{what} among the kept")
    axes.legend(**LEGEND_ABOVE)
    return figure
