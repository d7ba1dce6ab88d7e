"""Draw the AUROC of scores on every flow of the zoo, from the committed numbers: results/zoo/scores.png.

python -m benchmarks.zoo.figure
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from fmwc.report.page import styled

FOLDER = Path(__file__).parents[2] / "results" / "zoo"
SCORES = {
    "default": "default",
    "nearest": "nearest",
    "echo": "echo",
    "contest": "contest",
    "spread": "spread",
    "temporal_ratio": "temporal ratio",
    "integrated": "integrated",
    "dispersion": "dispersion",
}


@styled
def draw() -> Figure:
    """Draw one row per score and one column per flow; empty cells were not measured."""
    flows = {}
    for name in ("table", "table-fresh3"):
        flows |= json.loads((FOLDER / f"{name}.json").read_text())["flows"]
    shown = sorted(flows, key=lambda name: -flows[name]["scores"]["default"]["auroc"]["mean"])
    missing = {"auroc": {"mean": np.nan}}
    values = np.array([[flows[f]["scores"].get(s, missing)["auroc"]["mean"] for f in shown] for s in SCORES])
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="PuOr", norm=TwoSlopeNorm(0.5, 0, 1), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            strong = abs(value - 0.5) > 0.35
            text = f"{value:.2f}".removeprefix("0")
            axes.text(column, row, text, ha="center", va="center", size=6, color="white" if strong else "black")
    axes.set_xticks(range(len(shown)), shown, rotation=60, ha="right", rotation_mode="anchor", size=7)
    axes.set_yticks(range(len(SCORES)), SCORES.values(), size=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, pad=0.01, label="AUROC (0.5: chance)")
    return figure


if __name__ == "__main__":
    draw().savefig(FOLDER / "scores.png", dpi=150)
