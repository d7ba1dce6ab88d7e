"""Figures of a study's numbers. Each function returns a matplotlib Figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fmwc.confidence.trust import Reliability
from fmwc.metrics.ranking import Retention
from fmwc.report.figures import ONE, PERCENT, TIME, TWO, retention_curve
from fmwc.report.look import FAINT, INK, LINES, SURE, look
from fmwc.report.reliability import comparison_plot, reliability_plot
from fmwc.report.uses.folder import Study, spread, when_words

__all__ = [
    "edit_times",
    "filter_curves",
    "filter_scores",
    "guided",
    "promises",
    "reliable",
    "rewound",
    "step_grids",
    "step_quality",
]

DECADE = 10.0  # a metric that varies by more is drawn on a logarithmic axis
GRIDS = (5, 10)  # steps whose places are shown
HIGH = 3.5  # inches: one of several panels
WIDE = {1: ONE[0], 2: 4.6, 3: 3.6}  # the same, by how many stand side by side: a page shrinks what is wider than it
APART = 0.08  # between lines whose points share places, from the first to the last, as a share of where they are
MARKERS = "osD^vPXh"
AHEAD = ", extrapolated"  # a controller's name ends so where it also extrapolates: its colour, dashed
POINT = {"markersize": 5.5, "elinewidth": 1.3, "markeredgecolor": "white", "markeredgewidth": 0.6}


# ---- filter and trust --------------------------------------------------------------------------------------------


def filter_curves(study: Study) -> Figure:
    """What share is bad among the surest, by each score; one that orders samples as another does is drawn once."""
    use = study.numbers["filter"]
    kept = np.asarray(use["kept"])
    curves: dict[str, Retention] = {}
    for name, rates in use["retention"].items():
        if rates not in [curve.rate.tolist() for curve in curves.values()]:
            curves[name] = Retention(kept, np.asarray(rates))
    return retention_curve(curves, use["bad"], study.bad)


def filter_scores(study: Study) -> Figure:
    """How well each score finds what it is to find."""
    return comparison_plot(study.numbers["filter"]["compared"])


def reliable(study: Study) -> Figure:
    """How often samples turn out well, by confidence."""
    found = study.numbers["trust"]["reliability"]
    return reliability_plot(Reliability(**{k: np.asarray(v) for k, v in found.items()}), study.good)


@look
def promises(study: Study) -> Figure:
    """What was asked for and what came: the rate among the kept, how often it was too high, and how many were kept."""
    rows = study.numbers["trust"]["promises"]
    figure = Figure(figsize=(TWO[0], 1.4 + 0.5 * len(rows)))
    risk, broken, kept = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    for i, row in enumerate(rows):
        often = 0.3 + 0.7 * row["given"] / row["splits"]  # what was rarely given is pale
        risk.plot([row["risk"]] * 2, [i - 0.3, i + 0.3], color=INK, linewidth=2.4)
        broken.barh(i, row["broken"] / row["splits"], height=0.5, color=LINES[1])
        if row["given"]:
            risk.plot(row["achieved_range"], [i, i], color=SURE, alpha=often, linewidth=2, solid_capstyle="butt")
            risk.plot(row["achieved"], i, "o", color=SURE, alpha=often, markersize=7, markeredgecolor="white")
            kept.barh(i, row["kept"], height=0.5, color=SURE, alpha=often)
    risk.plot([], [], "|", color=INK, markersize=11, markeredgewidth=2.4, label="asked")
    risk.plot([], [], color=SURE, marker="o", markeredgecolor="white", label="came (90 %)")
    broken.axvline(rows[0]["allowed"], color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    names = [
        f"≤ {100 * r['risk']:.3g} %, {r['labelled']:,} labels\ngiven {r['given']} of {r['splits']} times" for r in rows
    ]
    risk.set(xlabel=f"{study.bad} among the kept", ylim=(len(rows) - 0.4, -0.6), xlim=(0, None))
    risk.set_yticks(range(len(rows)), names, fontsize=9)
    widest = max(rows[0]["allowed"], *(row["broken"] / row["splits"] for row in rows))
    broken.set(xlabel="broken, of all tries", xlim=(0, 1.25 * widest))
    broken.set_title("dashed: allowed", fontsize=9.5, color=FAINT)
    kept.set(xlabel="kept", xlim=(0, 1), xticks=(0, 0.5, 1))
    risk.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, columnspacing=1.2)
    for axes in (risk, broken):
        axes.xaxis.set_major_locator(MaxNLocator(4))
    for axes in (risk, broken, kept):
        axes.xaxis.set_major_formatter(PERCENT)
        axes.tick_params(axis="y", length=0)
    return figure


# ---- edits -------------------------------------------------------------------------------------------------------

MARKS = {"variance": (LINES[1], "o"), "transported": (LINES[2], "D")}  # an earlier one has the same, hollow


def _when_label(when: str, groups: Mapping[str, Sequence[Any]]) -> str:
    """In words, as they are for all panels of a figure: those before a peak may be so by another time in each."""
    earlier, before, peak = when.partition(" before ")
    shared = all(any(row.when == when for row in rows) for rows in groups.values())
    if not before or shared:
        return when_words(when)
    others = (row.when.partition(" before ") for rows in groups.values() for row in rows)
    times = [time for time, _, named in others if named == peak]
    return when_words(when).replace(earlier, ", ".join(times), 1)


@look
def edit_times(study: Study) -> Figure:
    """How often edits do what they were meant to, by when they were made; those at critical times are marked."""
    groups = study.edits
    columns = min(3, len(groups))
    rows_of_panels = -(-len(groups) // columns)
    figure = Figure(figsize=(columns * WIDE[columns], HIGH * rows_of_panels + 0.75))
    panels = np.atleast_1d(figure.subplots(rows_of_panels, columns, sharey=True)).ravel()
    for axes, (intent, rows) in zip(panels, groups.items(), strict=False):
        fixed = sorted((r.numbers["time"], r.numbers) for r in rows if r.when.startswith("t = "))
        if fixed:
            t, success = [time for time, _ in fixed], [n["success"] for _, n in fixed]
            low, high = np.array([n["interval"] for _, n in fixed]).T
            axes.fill_between(t, low, high, color=FAINT, alpha=0.22, linewidth=0)
            axes.plot(t, success, color=FAINT, marker="o", markersize=3.5, label="all at one time")
        for _, when, n in rows:
            if when == "random":
                axes.axhspan(*n["interval"], color=INK, alpha=0.07, linewidth=0)
                axes.axhline(n["success"], color=INK, linewidth=1.4, linestyle=(0, (4, 3)), label=when_words(when))
            elif not when.startswith("t = "):
                colour, mark = MARKS[when.rpartition(" ")[2]]
                inner = colour if when in MARKS else "white"
                bars = [[n["success"] - n["interval"][0]], [n["interval"][1] - n["success"]]]
                style = {**POINT, "markersize": 8, "markerfacecolor": inner, "markeredgecolor": colour}
                style["markeredgewidth"] = 1.6
                axes.errorbar(n["time"], n["success"], np.maximum(bars, 0), fmt=mark, color=colour, zorder=4, **style)
                axes.plot([], [], mark, color=colour, markerfacecolor=inner, label=_when_label(when, groups))
        axes.set(xlabel="time of the edit", xlim=(-0.03, 1.03))
        axes.yaxis.set_major_formatter(PERCENT)
        axes.set_title(intent)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    highest = max(row.numbers["interval"][1] for rows in groups.values() for row in rows)
    panels[0].set(ylabel="edits that succeeded", ylim=(-0.02 * highest, 1.05 * max(highest, 0.01)))
    _shared_legend(figure, panels[0])
    return figure


# ---- steps -------------------------------------------------------------------------------------------------------


def _base(controller: str) -> str:
    return controller.partition(AHEAD)[0]


def _styles(controllers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour for each way to place steps; dashed where it also extrapolates, grey for uniform ones."""
    bases = list(dict.fromkeys(_base(name) for name in controllers if _base(name) != "uniform"))
    colours = {"uniform": FAINT, **dict(zip(bases, cycle(LINES), strict=False))}
    return {
        name: {"color": colours[_base(name)], "linestyle": (0, (3, 1.6)) if AHEAD in name else "-"}
        for name in controllers
    }


@look
def step_grids(study: Study) -> Figure:
    """Where each controller put its steps, at few of them; a bar is as wide as samples differ (one std either way)."""
    sweeps = study.sweeps
    shown = [n for n in GRIDS if any(n in rows for rows in sweeps.values())]
    bases = [_base(name) for name in sweeps]
    names = [name for i, name in enumerate(sweeps) if _base(name) not in bases[:i]]  # extrapolation leaves steps alone
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


Series = Mapping[str, Sequence[tuple[float, Mapping[str, Any]]]]  # by label, points: where, and the row's numbers


def _curves(study: Study, series: Series, styles: Mapping[str, Mapping[str, Any]], shift: float = 0.0) -> Figure:
    """One panel a metric, one line a label, with intervals; lines a little apart where their points share places."""
    rows = 1 if len(study.metrics) <= 3 else 2
    columns = -(-len(study.metrics) // rows)
    figure = Figure(figsize=(columns * WIDE[min(columns, 3)], (HIGH - 0.2 * (rows > 1)) * rows + 0.9))
    panels = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axes, (name, metric) in zip(panels, study.metrics.items(), strict=False):
        for place, (label, points) in enumerate(series.items()):
            known = [(x, row[name]) for x, row in points if name in row and np.isfinite(row[name]["mean"])]
            if not known:
                continue
            x = np.array([x for x, _ in known]) * (1 + shift * (place / max(1, len(series) - 1) - 0.5))
            y = np.array([entry["mean"] for _, entry in known])
            ends = np.array([spread(entry) or (entry["mean"],) * 2 for _, entry in known]).T
            style = {"marker": MARKERS[place % len(MARKERS)], "linewidth": 1.7, **styles[label]}
            bars = axes.errorbar(x, y, np.maximum([y - ends[0], ends[1] - y], 0), label=label, **POINT, **style)
            for bar in bars[2]:
                bar.set(alpha=0.45, linestyle="-")
        axes.set_ylabel(metric.words)
        axes.set_title("more is better" if metric.higher else "less is better", fontsize=9.5, color=FAINT)
        _value_axis(axes)
    for axes in panels[len(study.metrics) :]:
        axes.set_visible(False)
    return figure


def _value_axis(axes: Axes) -> None:
    """Logarithmic where values differ by more than a decade; else from zero, unless that would press them together."""
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    heights = heights[np.isfinite(heights)]
    if not len(heights) or heights.min() > heights.max() / 4:
        return
    if heights.min() > 0 and heights.max() > DECADE * heights.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        top = axes.get_ylim()[1]
        axes.set_ylim(-0.03 * top, top)  # points at zero are drawn whole


def _shared_legend(figure: Figure, axes: Axes) -> None:
    """Above all panels, which share their labels."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 3 if figure.get_figwidth() > ONE[0] else 2
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, columnspacing=1.4, fontsize=9.5)


@look
def step_quality(study: Study) -> Figure:
    """Every metric against the number of steps, one line a controller."""
    sweeps = study.sweeps
    series = {name: [(float(n), row) for n, row in sorted(rows.items())] for name, rows in sweeps.items()}
    figure = _curves(study, series, _styles(list(sweeps)), APART)
    counts = sorted({n for rows in sweeps.values() for n in rows})
    for axes in figure.axes:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.set_xlabel("Euler steps")
    _shared_legend(figure, figure.axes[0])
    return figure


# ---- rewind and guide --------------------------------------------------------------------------------------------


@look
def rewound(study: Study) -> Figure:
    """Every metric against what was spent, one line a way to spend it; all start from the plain samples."""
    groups = study.rewinds
    plain = groups.get("", {}).get("plain")
    series: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for extra, rows in groups.items():
        for method, numbers in rows.items():
            if extra or method != "plain":
                points = series.setdefault(method, [])
                if plain and extra and not points:
                    points.append((float(plain["evaluations"]), plain))
                points.append((float(numbers["evaluations"]), numbers))
    styles = {name: {"color": colour} for name, colour in zip(series, cycle(LINES), strict=False)}
    figure = _curves(
        study, {name: sorted(p, key=lambda point: point[0]) for name, p in series.items()}, styles, APART / 10
    )
    for axes in figure.axes:
        axes.set_xlabel("evaluations a sample")
    _shared_legend(figure, figure.axes[0])
    return figure


@look
def guided(study: Study) -> Figure:
    """Quality against what it may cost: the first metric over each of the others."""
    (first, quality), *others = study.metrics.items()
    rows = study.numbers["guide"]
    figure = Figure(figsize=(max(ONE[0], 3.6 * len(others)), 3.5 + 0.22 * -(-len(rows) // 3)))
    panels = np.atleast_1d(figure.subplots(1, len(others), sharey=True))
    colours = [FAINT, *LINES, *LINES]  # the first is without guidance
    styles = dict(zip(rows, zip(colours, cycle(MARKERS), strict=False), strict=False))
    for axes, (name, metric) in zip(panels, others, strict=True):
        for label, numbers in rows.items():
            x, y = numbers[name], numbers[first]
            bars = [[[abs(e["mean"] - end)] for end in spread(e) or (e["mean"],) * 2] for e in (x, y)]
            colour, mark = styles[label]
            style = {
                **POINT,
                "markersize": 8,
                "color": colour,
                "label": f"guidance {label}" if label != "none" else "none",
            }
            axes.errorbar(x["mean"], y["mean"], bars[1], bars[0], fmt=mark, **style)
        better = "more is better" if metric.higher else "less is better"
        axes.set_xlabel(f"{metric.words}\n({better})")
        axes.margins(0.15)
    panels[0].set_ylabel(f"{quality.words}\n({'more' if quality.higher else 'less'} is better)")
    _shared_legend(figure, panels[0])
    return figure
