"""Figures of a results folder of crystals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.common.store import from_results, read_results
from experiments.common.tables import dig
from fmwc.crystals.recipe import SCORE
from fmwc.crystals.report import Ranked, sections
from fmwc.errors import CheckpointError, DataError, UsageError
from fmwc.readers import read_csv
from fmwc.report.page import FAINT, INK, LINES, TWO, Picture, Section, styled, write_pictures
from fmwc.sampling import Trajectory

__all__ = ["hutchinson", "write_figures"]


def _judged(path: Path) -> tuple[list[float], list[bool]]:
    """Read the energy above the hull and the result of the distance rule from a table of judged structures."""
    try:
        head, *rows = read_csv(path)
        above, distances = head.index("e_above_hull"), head.index("distances_ok")
        return [float(r[above] or "nan") for r in rows], [r[distances] == "true" for r in rows]
    except (DataError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a table of judged structures ({error!r}); run "
            "python -m experiments reproduce crystals to the end"
        ) from error


@from_results
def write_figures(out: Path) -> list[Path]:
    """Write the figures of a results folder as PNG files, from its first result file and its draws."""
    result = read_results(out)[0]
    points, name = dig(result, "numbers/hutchinson") or [], f"retrofit-{result.get('seed', 0)}"
    run = Trajectory.load(out / "draws" / f"{name}.safetensors").ranked_by(SCORE)
    pages = sections(Ranked(run, *_judged(out / "judged" / f"{name}.csv")))
    # Only estimators of all channels with a cost; markers of single channels would hide them.
    if whole := [p for p in points if p.get("flops") and (p.get("K") is not None or "," not in p["name"])]:
        pages.append(Section("", pictures=[Picture("hutchinson", "", hutchinson(whole))]))
    return write_pictures(out / "figures", pages)


@styled
def hutchinson(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the correlation with the divergence of the velocity against the cost per evaluation.

    The left panel shows single steps, the right one sums along the trajectory.

    Arguments:
        points: One row per estimator: `name`, `K` (the number of Hutchinson probes, None for other estimators), `flops`
            per evaluation, and `per_step_spearman`, `per_step_pearson`, `integrated_spearman`, `integrated_pearson`.
    """
    if not points:
        raise UsageError("no estimators to plot; give at least one")
    sweep = sorted((p for p in points if p.get("K") is not None), key=lambda p: p["K"])
    ours = [(p, colour) for p, colour in zip((p for p in points if p.get("K") is None), cycle(LINES), strict=False)]
    figure = Figure(figsize=(TWO[0], 3.8))
    panels = figure.subplots(1, 2, sharey=True)
    regimes = {"per_step": "at each step", "integrated": "summed along the trajectory"}
    kinds: dict[str, tuple[Any, bool]] = {"spearman": ("-", True), "pearson": ((0, (4, 2)), False)}  # line, filled
    circles: dict[str, Any] = {"color": FAINT, "marker": "o", "markersize": 4.5, "linewidth": 1.6}
    for axes, (regime, title) in zip(panels, regimes.items(), strict=True):
        for kind, (line, filled) in kinds.items():
            cost, value = [p["flops"] for p in sweep], [p[f"{regime}_{kind}"] for p in sweep]
            axes.plot(cost, value, linestyle=line, markerfacecolor=FAINT if filled else "white", **circles)
            for p, colour in ours:
                style = {"color": colour, "markerfacecolor": colour if filled else "white"}
                axes.plot(p["flops"], p[f"{regime}_{kind}"], "D", markersize=8, markeredgewidth=1.6, zorder=4, **style)
        for p in sweep:
            place, text = (p["flops"], p[f"{regime}_spearman"]), f"K = {p['K']}" if p is sweep[0] else f"{p['K']}"
            axes.annotate(
                text, place, xytext=(0, 6), textcoords="offset points", ha="center", fontsize=7.5, color=FAINT
            )
        axes.set(xscale="log", xlabel="FLOPs per evaluation")
        axes.set_title(title)
    lowest = min(p[f"{regime}_{kind}"] for regime in regimes for kind in kinds for p in points)
    panels[0].set(ylim=(min(0.0, 1.1 * lowest), 1.05), ylabel="correlation with the reference")
    handles = [Line2D([], [], label="Hutchinson, K probes", **circles)] if sweep else []
    handles += [Line2D([], [], ls="", marker="D", markersize=7, color=colour, label=p["name"]) for p, colour in ours]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, columnspacing=1.5)
    dots: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 5, "linewidth": 1.3}
    which = [
        Line2D([], [], linestyle=line, markerfacecolor=INK if filled else "white", label=kind.capitalize(), **dots)
        for kind, (line, filled) in kinds.items()
    ]
    panels[1].legend(handles=which, loc="lower right")
    return figure
