"""Figures of a study: curves of its numbers, and samples before and after an edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.common.experiment import Outcome
from experiments.common.plots import comparison_plot, reliability_plot, steps_axis, value_axis
from experiments.uses.drawing import Drawn
from experiments.uses.folder import (
    MetricFormat,
    Row,
    Study,
    drawn_at,
    judged_at,
    load_drawn,
    load_outcomes,
    time_label,
)
from fmwc.checkerboard.figures import EditedPaths, edited_paths
from fmwc.crystals.figures import edited_pairs
from fmwc.crystals.structures import Crystals
from fmwc.metrics.ranking import Retention
from fmwc.report.curves import retention_curve
from fmwc.report.images import Sheet
from fmwc.report.page import DASHED, FAINT, INK, LEGEND_ABOVE, LINES, ONE, PERCENT, SURE, TIME, TWO, styled
from fmwc.uses.risk import Reliability

GRIDS = (5, 10)  # numbers of steps whose time grids are drawn
HIGH = 3.5  # panel height in inches
WIDE = {1: ONE[0], 2: 4.6, 3: 3.6}  # panel width by number of panels per row, so that figures fit the page
APART = 0.08  # relative x shift from the first to the last line, so that points do not overlap
MARKERS = "osD^vPXh"
AHEAD = ", extrapolated"  # suffix of controllers that also extrapolate; drawn dashed in the same colour
PAIRS = 9  # number of crystals drawn
POINT: dict[str, Any] = {"markersize": 5.5, "elinewidth": 1.3, "markeredgecolor": "white", "markeredgewidth": 0.6}


# ---- filtering and risk control ----------------------------------------------------------------------------------


def filter_curves(study: Study) -> Figure:
    """Draw the share of bad samples among the surest for each score; scores with the same order are drawn once."""
    use = study.numbers["filter"]
    kept = np.asarray(use["kept"])
    curves: dict[str, Retention] = {}
    for name, rates in use["retention"].items():
        if rates not in [curve.rate.tolist() for curve in curves.values()]:
            curves[name] = Retention(kept, np.asarray(rates))
    return retention_curve(curves, use["bad"], study.bad)


def filter_scores(study: Study) -> Figure | None:
    """Draw the AUPRC of each score and its difference from the first score."""
    compared = study.numbers["filter"]["compared"]
    return comparison_plot(compared) if compared else None


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

MARKS = {"variance": (LINES[1], "o"), "transported": (LINES[2], "D")}  # filled at the critical time, hollow before it


def _shared_time_label(when: str, groups: Mapping[str, Sequence[Row]]) -> str:
    """Describe a time of an edit for all panels, which may use different times before the same peak."""
    before, separator, peak = when.partition(" before ")
    if not separator or all(any(row.at == when for row in rows) for rows in groups.values()):
        return time_label(when)
    others = (row.at.partition(" before ") for rows in groups.values() for row in rows)
    return time_label(when).replace(before, ", ".join(time for time, _, name in others if name == peak), 1)


def _critical_edit(axes: Axes, when: str, numbers: Mapping[str, Any], label: str) -> None:
    """Mark the success rate of edits at or before a critical time."""
    colour, mark = MARKS[when.rpartition(" ")[2]]
    fill = colour if when in MARKS else "white"
    success, (low, high) = numbers["success"], numbers["interval"]
    bars = np.maximum([[success - low], [high - success]], 0)
    style = {**POINT, "markersize": 8, "markerfacecolor": fill, "markeredgecolor": colour, "markeredgewidth": 1.6}
    axes.errorbar(numbers["time"], success, bars, fmt=mark, color=colour, zorder=4, **style)
    axes.plot([], [], mark, color=colour, markerfacecolor=fill, label=label)


@styled
def edit_times(study: Study) -> Figure:
    """Draw the success rate of edits by time, with critical times marked."""
    groups = study.groups("edit")
    columns = min(3, len(groups))
    figure, panels = _panels(len(groups), columns, HIGH, 0.75, sharey=True)
    for axes, (intent, rows) in zip(panels, groups.items(), strict=True):
        fixed = sorted((row.numbers["time"], row.numbers) for row in rows if row.at.startswith("t = "))
        if fixed:
            t, success = [time for time, _ in fixed], [numbers["success"] for _, numbers in fixed]
            low, high = np.array([numbers["interval"] for _, numbers in fixed]).T
            axes.fill_between(t, low, high, color=FAINT, alpha=0.22, linewidth=0)
            axes.plot(t, success, color=FAINT, marker="o", markersize=3.5, label="at a fixed time")
        for _, when, numbers in rows:
            if when == "random":
                axes.axhspan(*numbers["interval"], color=INK, alpha=0.07, linewidth=0)
                axes.axhline(numbers["success"], color=INK, linewidth=1.4, linestyle=DASHED, label=time_label(when))
            elif not when.startswith("t = "):
                _critical_edit(axes, when, numbers, _shared_time_label(when, groups))
        axes.set(xlabel="time of the edit", xlim=(-0.03, 1.03))
        axes.yaxis.set_major_formatter(PERCENT)
        axes.set_title(intent)
    highest = max(row.numbers["interval"][1] for rows in groups.values() for row in rows)
    panels[0].set(ylabel="edits that succeeded", ylim=(-0.02 * highest, 1.05 * max(highest, 0.01)))
    _shared_legend(figure, panels[0])
    return figure


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


@styled
def step_grids(study: Study) -> Figure:
    """Draw the time grid of each controller; bars span ± one standard deviation over samples."""
    sweeps = _sweeps(study)
    shown = [n for n in GRIDS if any(n in rows for rows in sweeps.values())]
    bases = [_base(name) for name in sweeps]
    names = [
        name for i, name in enumerate(sweeps) if _base(name) not in bases[:i]
    ]  # extrapolation does not change the grid
    styles = _styles(list(sweeps))
    figure = Figure(figsize=(TWO[0], 1.0 + 0.42 * len(names)))
    panels = np.atleast_1d(figure.subplots(1, len(shown), sharey=True))
    for axes, steps in zip(panels, shown, strict=True):
        for row, name in enumerate(names):
            axes.axhline(row, color=FAINT, linewidth=0.5, alpha=0.5, zorder=0)
            if steps not in sweeps[name]:
                continue
            colour, numbers = styles[name]["color"], sweeps[name][steps]
            for t, std in zip(numbers["grid"], numbers.get("grid_std") or [0.0] * len(numbers["grid"]), strict=True):
                axes.fill_betweenx([row - 0.3, row + 0.3], t - std, t + std, color=colour, alpha=0.25, linewidth=0)
                axes.plot([t, t], [row - 0.3, row + 0.3], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.set(xlabel=TIME, xlim=(-0.01, 1.01), ylim=(len(names) - 0.5, -0.5))
        axes.set_title(f"{steps} steps")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(names)), [_base(name) for name in names])
    return figure


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


# ---- rewinding and guidance --------------------------------------------------------------------------------------


@styled
def rewound(study: Study) -> Figure:
    """Draw each metric against evaluations per sample, with one line per method, starting from plain samples."""
    groups = study.groups("rewind")
    plain = groups.pop("plain", [])
    series = {}
    for method, rows in groups.items():
        points = [*plain, *rows] if rows[0].at else rows
        pairs = [(float(row.numbers["evaluations"]), row.numbers) for row in points]
        series[method] = sorted(pairs, key=lambda pair: pair[0])
    styles = {name: {"color": colour} for name, colour in zip(series, cycle(LINES), strict=False)}
    figure = _curves(study, series, styles, APART / 10)
    for axes in figure.axes:
        axes.set_xlabel("evaluations per sample")
    _shared_legend(figure, figure.axes[0])
    return figure


@styled
def guided(study: Study) -> Figure | None:
    """Draw the first metric against each other metric, which guidance may worsen."""
    (first, quality), *others = study.metrics.items()
    rows = study.numbers["guide"]
    if len(rows) < 2:
        return None
    figure = Figure(figsize=(max(ONE[0], 3.6 * len(others)), 3.5 + 0.22 * -(-len(rows) // 3)))
    panels = np.atleast_1d(figure.subplots(1, len(others), sharey=True))
    colours = [FAINT, *LINES, *LINES]  # the first is without guidance
    styles = dict(zip(rows, zip(colours, cycle(MARKERS), strict=False), strict=False))
    for axes, (name, metric) in zip(panels, others, strict=True):
        for label, numbers in rows.items():
            x, y = numbers[name], numbers[first]
            bars = [[[abs(e["mean"] - end)] for end in _ends(e)] for e in (x, y)]
            colour, mark = styles[label]
            style = {**POINT, "markersize": 8, "label": label if label == "none" else f"guidance {label}"}
            axes.errorbar(x["mean"], y["mean"], bars[1], bars[0], fmt=mark, color=colour, **style)
        axes.set_xlabel(_metric_label(metric))
        axes.margins(0.15)
    panels[0].set_ylabel(_metric_label(quality))
    _shared_legend(figure, panels[0])
    return figure


def _metric_label(metric: MetricFormat) -> str:
    return f"{metric.words}\n({metric.better})"


# ---- samples before and after an edit ----------------------------------------------------------------------------


class Edits(NamedTuple):
    """The edits of one kind, with samples of the first seed and outcomes by label; label `seeds` holds originals."""

    words: str  # the definition of success
    chosen: str  # the time chosen on the validation seed
    rows: dict[str, Row]  # by time
    drawn: dict[str, Drawn]
    outcomes: Mapping[str, Outcome]


def _label(row: Row) -> str:
    return f"{row.name}, {row.at}"


def _points(edits: Edits) -> Figure:
    before = edits.drawn["seeds"].tensors["ways"].numpy().swapaxes(0, 1)
    panels = {}
    for row in (edits.rows[when] for when in ("random", "variance", edits.chosen)):
        tensors = edits.drawn[_label(row)].tensors
        after = tensors["ways"].numpy().swapaxes(0, 1)
        count = after.shape[1]
        grid = np.tile(np.linspace(0, 1, len(after))[:, None], (1, count))
        times = tensors["time"][:: row.numbers["replicates"]][:count].numpy()  # the first edit of each sample
        title = f"{time_label(row.at)}\n{row.numbers['success']:.0%} succeed"
        panels[title] = EditedPaths(before[:, :count], after, grid, times, np.array(row.numbers["shown"][:count]))
    return edited_paths(panels, "edited, failure", "edited, success")


@styled
def _digits(edits: Edits) -> Figure:
    """Draw one column per digit: the digit, its edits from the earliest to the latest, and edits at critical times."""
    before = edits.drawn["seeds"].tensors["images"][:, 0].numpy() / 255
    order = sorted(edits.rows.values(), key=lambda row: not row.at.startswith("t = "))
    fixed = sum(row.at.startswith("t = ") for row in order)
    left, heading, gap, columns, right = 5.6, 0.85, 0.35, len(before), 1.7
    sheet = Sheet(left + columns + right, heading + len(order) + 1 + 2 * gap + 0.15, side=0.46)
    sheet.text(left + columns + right - 0.15, heading / 2, "success", ha="right", color=FAINT)
    sheet.text(0.15, heading / 2, f"framed: success ({edits.words})")
    sheet.images(before, left, heading, columns)
    sheet.text(left - 0.25, heading + 0.5, "sample", ha="right", fontweight="bold")
    top = heading + 1 + gap
    for number, row in enumerate(order):
        if number == fixed:
            top += gap
        after = edits.drawn[_label(row)].tensors["images"][:, 0].numpy() / 255
        sheet.images(after, left, top, columns)
        for column in np.flatnonzero(row.numbers["shown"][: len(after)]):
            sheet.frame(left + int(column), top, colour=LINES[2])
        sheet.text(left - 0.25, top + 0.5, time_label(row.at), ha="right")
        sheet.text(left + columns + right - 0.15, top + 0.5, f"{row.numbers['success']:.0%}", ha="right")
        top += 1
    return sheet.figure


def _structures(outcome: Outcome) -> Crystals:
    numbers, coords, cell = (torch.as_tensor(outcome[name]) for name in ("numbers", "coords", "cell"))
    return Crystals(numbers.long(), coords, cell[:, :3], cell[:, 3:], tuple(map(str, range(len(numbers)))))


def _crystals(edits: Edits) -> Figure:
    row = edits.rows[edits.chosen]
    count = min(PAIRS, len(edits.outcomes["seeds"]["bad"]))
    before = {name: value[:count] for name, value in edits.outcomes["seeds"].items()}
    replicates = row.numbers["replicates"]
    after = {name: value[::replicates][:count] for name, value in edits.outcomes[_label(row)].items()}
    pairs = _structures(before), _structures(after), before["above"], after["above"]
    return edited_pairs(*pairs, np.arange(count), after["time"], row.numbers["shown"][:count])


_DRAW: Mapping[str, Callable[[Edits], Figure]] = {"checkerboard": _points, "mnist": _digits, "crystals": _crystals}


def edited_samples(study: Study) -> dict[str, Figure]:
    """Draw each kind of edit, if the folder has the samples."""
    seed = study.provenance["seeds"][0]
    path = drawn_at(study.folder, "edit", seed)
    outcomes = load_outcomes(judged_at(study.folder, "edit", seed))
    if study.wide or outcomes is None or not path.exists():
        return {}
    drawn = load_drawn(path)
    if not any("time" in row.tensors for row in drawn.values()):  # an older file
        return {}
    figures = {}
    for intent, rows in study.groups("edit").items():
        by_time = {row.at: row for row in rows}
        edits = Edits(study.intents[intent], study.chosen[intent], by_time, drawn, outcomes)
        figures[intent] = _DRAW[study.setting](edits)
    return figures
