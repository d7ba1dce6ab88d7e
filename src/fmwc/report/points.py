"""Figures of samples in the plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure

from fmwc.report.curves import EXTREME, even_choice, extremes
from fmwc.report.page import CONFIDENCE, DOUBTFUL, SURE, TWO, styled

__all__ = [
    "POINTS",
    "colour_bar",
    "draw_points",
]

POINTS = 5_000  # maximum number of points drawn; more would overlap


def colour_bar(figure: Figure, panels: Sequence[Axes], label: str, names: Sequence[str] = ()) -> None:
    """Add the colour bar of confidence, from 0 to 1."""
    bar = figure.colorbar(ScalarMappable(cmap=CONFIDENCE), ax=panels, shrink=0.8, label=label, ticks=[0, 0.5, 1])
    if names:
        bar.ax.set_yticklabels(names)
    bar.outline.set_visible(False)  # type: ignore[operator]


@styled
def draw_points(x: np.ndarray, confidence: np.ndarray, label: str) -> Figure:  # (B, 2), (B,)
    """Draw all samples by confidence, and the surest and the most doubtful tenth over all samples."""
    order = np.argsort(-confidence, kind="stable")  # doubtful samples are drawn on top
    some = order[even_choice(len(order), POINTS)]
    sure, doubtful = extremes(confidence)
    low, high = np.quantile(x, [0.001, 0.999], axis=0)
    middle, half = (low + high) / 2, 0.55 * max(float((high - low).max()), 1e-6)
    figure = Figure(figsize=(TWO[0], 3.4))
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    style: dict[str, Any] = {"s": float(np.clip(3_000 / len(some), 2.5, 20)), "linewidths": 0, "rasterized": True}
    panels[0].scatter(*x[some].T, c=CONFIDENCE(confidence[some]), **style)
    panels[0].set_title(f"all samples ({len(x):,})")
    ends = ((sure, SURE, "surest"), (doubtful, DOUBTFUL, "most doubtful"))
    for axes, (which, colour, name) in zip(panels[1:], ends, strict=True):
        axes.scatter(*x[some].T, c="#e3e5ea", **style)
        axes.scatter(*x[which].T, color=colour, **style)
        axes.set_title(f"{name} {EXTREME:.0%} ({len(which):,})")
    for axes in panels:
        axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), aspect="equal")
        axes.set_xlabel("first coordinate")
    panels[0].set_ylabel("second coordinate")
    colour_bar(figure, list(panels), label)
    return figure
