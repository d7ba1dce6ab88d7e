"""Figures of a study: curves of its numbers, and samples before and after an edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.common.plots import reliability_plot, steps_axis, value_axis
from experiments.uses.drawing import Drawn
from experiments.uses.folder import (
    Row,
    Study,
    drawn_at,
    load_drawn,
    time_label,
)
from fmwc.report.images import Sheet
from fmwc.report.page import DASHED, FAINT, INK, LEGEND_ABOVE, LINES, ONE, PERCENT, SURE, TWO, styled
from fmwc.uses.risk import Reliability

HIGH = 3.5  # panel height in inches
WIDE = {1: ONE[0], 2: 4.6, 3: 3.6}  # panel width by number of panels per row, so that figures fit the page
APART = 0.08  # relative x shift from the first to the last line, so that points do not overlap
MARKERS = "osD^vPXh"
AHEAD = ", extrapolated"  # suffix of controllers that also extrapolate; drawn dashed in the same colour
POINT: dict[str, Any] = {"markersize": 5.5, "elinewidth": 1.3, "markeredgecolor": "white", "markeredgewidth": 0.6}


# ---- filtering and risk control ----------------------------------------------------------------------------------


def reliable(study: Study) -> Figure:
    """Draw the rate of good samples by confidence."""
    bins = study.numbers["trust"]["reliability"]
    return reliability_plot(Reliability(**{k: np.asarray(v) for k, v in bins.items()}), study.good)


@styled
def certificates(study: Study) -> Figure | None:
    """Draw requested and achieved failure rates, the share of violated certificates, and the share of kept samples."""
    rows = study.numbers["trust"]["promises"]
    if not rows:
        return None
    allowed = rows[0]["allowed"]
    figure = Figure(figsize=(TWO[0], 1.4 + 0.5 * len(rows)))
    risk, broken, kept = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    for i, row in enumerate(rows):
        alpha = 0.3 + 0.7 * row["given"] / row["splits"]  # rarely issued certificates are pale
        risk.plot([row["risk"]] * 2, [i - 0.3, i + 0.3], color=INK, linewidth=2.4)
        broken.barh(i, row["broken"] / row["splits"], height=0.5, color=LINES[1])
        if row["given"]:
            risk.plot(row["achieved_range"], [i, i], color=SURE, alpha=alpha, linewidth=2, solid_capstyle="butt")
            risk.plot(row["achieved"], i, "o", color=SURE, alpha=alpha, markersize=7, markeredgecolor="white")
            kept.barh(i, row["kept"], height=0.5, color=SURE, alpha=alpha)
    risk.plot([], [], "|", color=INK, markersize=11, markeredgewidth=2.4, label="requested")
    risk.plot([], [], color=SURE, marker="o", markeredgecolor="white", label="achieved (90 %)")
    broken.axvline(allowed, color=INK, linewidth=1.4, linestyle=DASHED)
    names = [
        f"≤ {100 * r['risk']:.3g} %, {r['labelled']:,} labels\nissued {r['given']} of {r['splits']} times" for r in rows
    ]
    risk.set(xlabel=f"{study.bad} among the kept", ylim=(len(rows) - 0.4, -0.6), xlim=(0, None))
    risk.set_yticks(range(len(rows)), names, fontsize=9)
    widest = max(allowed, *(row["broken"] / row["splits"] for row in rows))
    broken.set(xlabel="violated, of all splits", xlim=(0, 1.25 * widest))
    broken.set_title("dashed: allowed", fontsize=9.5, color=FAINT)
    kept.set(xlabel="kept", xlim=(0, 1), xticks=(0, 0.5, 1))
    risk.legend(**LEGEND_ABOVE, ncols=2, columnspacing=1.2)
    for axes in (risk, broken):
        axes.xaxis.set_major_locator(MaxNLocator(4))
    for axes in (risk, broken, kept):
        axes.xaxis.set_major_formatter(PERCENT)
        axes.tick_params(axis="y", length=0)
    return figure


# ---- editing -----------------------------------------------------------------------------------------------------


# ---- steps -------------------------------------------------------------------------------------------------------


def _sweeps(study: Study) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the numbers by controller and number of steps."""
    return {name: {int(row.at): row.numbers for row in rows} for name, rows in study.groups("steps").items()}


def _base(controller: str) -> str:
    return controller.partition(AHEAD)[0]


def _styles(controllers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return line styles per controller: grey for uniform steps, dashed with extrapolation."""
    bases = list(dict.fromkeys(_base(name) for name in controllers if _base(name) != "uniform"))
    colours = {"uniform": FAINT, **dict(zip(bases, cycle(LINES), strict=False))}
    return {
        name: {"color": colours[_base(name)], "linestyle": (0, (3, 1.6)) if AHEAD in name else "-"}
        for name in controllers
    }


def _ends(entry: Mapping[str, Any]) -> tuple[float, float]:
    """Return the ends of an error bar: the interval, or ± one standard deviation over seeds."""
    mean, std = entry["mean"], entry.get("std") or 0.0
    low, high = entry.get("interval") or (mean - std, mean + std)
    return low, high


def _panels(count: int, columns: int, height: float, legend: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels that fit the page width, and the visible panels."""
    rows = -(-count // columns)
    figure = Figure(figsize=(columns * WIDE[min(columns, 3)], height * rows + legend))
    panels = np.atleast_1d(figure.subplots(rows, columns, **options)).ravel()
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, list(panels[:count])


Series = Mapping[str, Sequence[tuple[float, Mapping[str, Any]]]]  # by label: position and numbers of each point


def _curves(study: Study, series: Series, styles: Mapping[str, Mapping[str, Any]], shift: float = 0.0) -> Figure:
    """Draw one panel per metric and one line per label, with intervals; lines are shifted to separate points."""
    count = len(study.metrics)
    rows = 1 if count <= 3 else 2
    figure, panels = _panels(count, -(-count // rows), HIGH - 0.2 * (rows > 1), 0.9)
    for axes, (name, metric) in zip(panels, study.metrics.items(), strict=True):
        for place, (label, points) in enumerate(series.items()):
            known = [(x, row[name]) for x, row in points if name in row and np.isfinite(row[name]["mean"])]
            if not known:
                continue
            x = np.array([x for x, _ in known]) * (1 + shift * (place / max(1, len(series) - 1) - 0.5))
            y = np.array([entry["mean"] for _, entry in known])
            ends = np.array([_ends(entry) for _, entry in known]).T
            style = {"marker": MARKERS[place % len(MARKERS)], "linewidth": 1.7, **styles[label]}
            bars = axes.errorbar(x, y, np.maximum([y - ends[0], ends[1] - y], 0), label=label, **POINT, **style)
            for bar in bars[2]:
                bar.set(alpha=0.45, linestyle="-")
        axes.set_ylabel(metric.words)
        axes.set_title(metric.better, fontsize=9.5, color=FAINT)
        _value_axis(axes)
    return figure


def _value_axis(axes: Axes) -> None:
    """Apply :func:`value_axis` unless the values are close together."""
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    heights = heights[np.isfinite(heights)]
    if len(heights) and heights.min() <= heights.max() / 4:
        value_axis(axes, heights, bottom=0.03)


def _shared_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend for all panels above the figure."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 3 if figure.get_figwidth() > ONE[0] else 2
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.4, fontsize=9.5)


@styled
def step_quality(study: Study) -> Figure:
    """Draw each metric against the number of steps, with one line per controller."""
    sweeps = _sweeps(study)
    series = {name: [(float(n), row) for n, row in sorted(rows.items())] for name, rows in sweeps.items()}
    figure = _curves(study, series, _styles(list(sweeps)), APART)
    counts = sorted({n for rows in sweeps.values() for n in rows})
    for axes in figure.axes:
        steps_axis(axes, counts)
    _shared_legend(figure, figure.axes[0])
    return figure


# ---- guidance ----------------------------------------------------------------------------------------------------


# ---- samples before and after an edit ----------------------------------------------------------------------------


@styled
def _digits(success: str, rows: Sequence[Row], drawn: Mapping[str, Drawn]) -> Figure:
    """Draw one column per digit: the digit, its edits from the earliest to the latest, and edits at critical times."""
    before = drawn["seeds"].tensors["images"][:, 0].numpy() / 255
    order = sorted(rows, key=lambda row: not row.at.startswith("t = "))
    fixed = sum(row.at.startswith("t = ") for row in order)
    left, heading, gap, columns, right = 5.6, 0.85, 0.35, len(before), 1.7
    sheet = Sheet(left + columns + right, heading + len(order) + 1 + 2 * gap + 0.15, side=0.46)
    sheet.text(left + columns + right - 0.15, heading / 2, "success", ha="right", color=FAINT)
    sheet.text(0.15, heading / 2, f"framed: success ({success})")
    sheet.images(before, left, heading, columns)
    sheet.text(left - 0.25, heading + 0.5, "sample", ha="right", fontweight="bold")
    top = heading + 1 + gap
    for number, row in enumerate(order):
        if number == fixed:
            top += gap
        after = drawn[f"{row.name}, {row.at}"].tensors["images"][:, 0].numpy() / 255
        sheet.images(after, left, top, columns)
        for column in np.flatnonzero(row.numbers["shown"][: len(after)]):
            sheet.frame(left + int(column), top, colour=LINES[2])
        sheet.text(left - 0.25, top + 0.5, time_label(row.at), ha="right")
        sheet.text(left + columns + right - 0.15, top + 0.5, f"{row.numbers['success']:.0%}", ha="right")
        top += 1
    return sheet.figure


def edited_samples(study: Study) -> dict[str, Figure]:
    """Draw each kind of edit of digits, if the folder has the samples."""
    seed = study.provenance["seeds"][0]
    path = drawn_at(study.folder, "edit", seed)
    if study.setting != "mnist" or not path.exists():
        return {}
    drawn = load_drawn(path)
    return {intent: _digits(study.intents[intent], rows, drawn) for intent, rows in study.groups("edit").items()}
