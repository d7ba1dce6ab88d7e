"""Figures and axes shared by the experiments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator
from numpy.typing import ArrayLike

from fmwc.report.page import DASHED, FAINT, LEGEND_ABOVE, LINES, ONE, PERCENT, styled
from fmwc.uses.risk import Reliability

DECADE = 10  # values with a larger ratio are drawn on a logarithmic axis


@styled
def reliability_plot(curve: Reliability, good: str) -> Figure:
    """Draw the rate of good samples by confidence, with the exact interval of each bin.

    Confidence is a rank, so the rate should rise from below the mean to above it.
    """
    figure = Figure(figsize=ONE)
    axes = figure.add_subplot()
    x, rate = curve.confidence, curve.success
    bars = np.maximum([rate - curve.low, curve.high - rate], 0)  # negative only by rounding
    mean = float(np.average(rate, weights=curve.size))
    axes.axhline(mean, color=FAINT, linewidth=1.0, linestyle=DASHED)
    axes.plot(x, rate, color=LINES[0], linewidth=1.2, alpha=0.6)
    label = f"{mean:.1%} of all {curve.size.sum():,} are {good}"
    axes.errorbar(x, rate, bars, fmt="o", color=LINES[0], markersize=5.5, elinewidth=1.4, label=label)
    lowest = float(curve.low.min())
    bottom = 0.0 if lowest < 0.3 else lowest
    axes.set(xlabel="confidence", ylabel=f"{good}, observed", xlim=(-0.02, 1.02))
    axes.set_ylim(bottom - 0.03 * (1 - bottom), 1 + 0.03 * (1 - bottom))  # do not clip points at the edges
    axes.xaxis.set_major_formatter(PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(**LEGEND_ABOVE)
    return figure


def steps_axis(axes: Axes, steps: Sequence[int], base: int = 10) -> None:
    """Set a logarithmic x axis of Euler steps, with ticks only at the measured numbers."""
    axes.set_xscale("log", base=base)
    axes.xaxis.set_major_locator(FixedLocator(list(steps)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_xlabel("Euler steps")


def value_axis(axes: Axes, values: ArrayLike, bottom: float = 0.0) -> None:
    """Set a logarithmic y axis if positive values span more than a decade, else start the axis at zero.

    Arguments:
        axes: The axes.
        values: The plotted values.
        bottom: Space below zero as a share of the axis, so that points at zero are not clipped.
    """
    low, high = float(np.min(values)), float(np.max(values))
    if low > 0 and high > DECADE * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        top = axes.get_ylim()[1]
        axes.set_ylim(-bottom * top, top)
