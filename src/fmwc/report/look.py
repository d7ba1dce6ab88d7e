"""One look for every figure: colours, type sizes, and the way to a file."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure

__all__ = ["CONFIDENCE", "DOUBTFUL", "FAINT", "INK", "LAYERS", "LINES", "LOOK", "SURE", "look", "palette", "png", "svg"]

INK = "#23262d"
FAINT = "#8a8f99"

# Plasma is even to the eye and safe for colour-blind readers. Its yellow end is left out: doubt must show on white.
CONFIDENCE = ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.80, 0.03, 256)), name="confidence")
SURE, DOUBTFUL = to_hex(CONFIDENCE(1.0)), to_hex(CONFIDENCE(0.0))
LINES = (SURE, "#d1495b", "#00798c", "#edae49", "#66717e", "#7a9e3f", "#b07aa1")
LAYERS = matplotlib.colormaps["viridis"]  # layers have an order, so their colours have one

LOOK: dict[str, Any] = {
    "axes.edgecolor": FAINT,
    "axes.grid": False,
    "axes.labelcolor": INK,
    "axes.labelsize": 10.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 12,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a figure looks the same on every machine
    "font.size": 10,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "svg.fonttype": "path",  # no font is needed to read the page
    "svg.hashsalt": "fmwc",  # the same figure gives the same file
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.color": FAINT,
    "ytick.labelcolor": INK,
}

# A decorator as well as a context: matplotlib reads its settings when an artist is made, so a whole function wears it,
# and the caller's own settings are back when it returns.
look = matplotlib.rc_context(LOOK)


def palette(count: int) -> list[str]:
    """The confidence colours as hex, from confidence 0 to 1.

    >>> palette(2) == [DOUBTFUL, SURE]
    True
    """
    return [to_hex(c) for c in CONFIDENCE(np.linspace(0, 1, count))]


@look
def png(figure: Figure, dpi: int = 160) -> bytes:
    """The figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return file.getvalue()


@look
def svg(figure: Figure, dpi: int = 160) -> str:
    """The figure as an `<svg>` element, its text as paths; `dpi` is for what is drawn as pixels (clouds of points)."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", dpi=dpi, facecolor="white", metadata=nothing)
    text = file.getvalue()
    return text[text.index("<svg") :]
