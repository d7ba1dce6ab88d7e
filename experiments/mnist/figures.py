"""Figures of an MNIST results folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.common.plots import steps_axis, value_axis
from experiments.common.store import read_results
from experiments.common.tables import METHODS
from fmwc.domains import ShippedDomain
from fmwc.field import Field
from fmwc.metrics.ranking import Retention
from fmwc.mnist.page import digit_sections
from fmwc.report.curves import retention_curve
from fmwc.report.images import read_pixels
from fmwc.report.page import LINES, PERCENT, TWO, Picture, Section, styled, write_pictures
from fmwc.sampling import Trajectory, compared

CURVES = {  # method and curve by label
    "FM + retrofit, within class": ("retrofit", "integrated_within"),
    "FM + retrofit, across classes": ("retrofit", "integrated"),
    "FMwC joint, within class": ("joint", "integrated_within"),
}


def write_figures(out: Path, field: Field, domain: ShippedDomain) -> list[Path]:
    """Write the figures of a results folder: those of a report on its samples, and two from its numbers.

    The retention curve is drawn from the numbers, because the folder has too few samples for it.
    """
    # The samples were drawn before the field had a reference, with the options of the reference.
    assert field.reference is not None
    run = compared(Trajectory.load(out / "samples.safetensors"), field.reference)
    numbers = read_results(out)[0]["numbers"]
    curves = {}
    for label, (method, name) in CURVES.items():
        curve = numbers[method]["retention"][name]
        curves[label] = Retention(np.array([float(kept) for kept in curve]), np.array(list(curve.values())))
    retained = retention_curve(curves, numbers["retrofit"]["failure"], domain.bad)
    sweeps = {label: numbers[name]["sweep"] for label, name in {"FM": "plain", METHODS["joint"]: "joint"}.items()}
    pictures = [Picture("retention", "", retained), Picture("steps", "", quality_against_steps(sweeps))]
    sections = digit_sections(run, domain.judge(run), read_pixels(field, run, probes=64))
    return write_pictures(out / "figures", [*sections, Section("", pictures=pictures)])


@styled
def quality_against_steps(sweeps: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """Draw FID and failure rate against the number of Euler steps.

    Arguments:
        sweeps: `fid` and `failure` rate, by label and by number of steps.
    """
    figure = Figure(figsize=(TWO[0], 3.7))
    panels = figure.subplots(1, 2)
    for axes, metric in zip(panels, ("fid", "failure"), strict=True):
        for (label, sweep), colour in zip(sweeps.items(), LINES, strict=False):
            steps = sorted(sweep, key=int)
            values = [sweep[n][metric] for n in steps]
            axes.plot([int(n) for n in steps], values, color=colour, marker="o", markersize=5, label=label)
        steps_axis(axes, sorted({int(n) for sweep in sweeps.values() for n in sweep}), base=2)
    panels[0].set_ylabel("FID (classifier features)")
    value_axis(panels[0], panels[0].dataLim.intervaly)
    panels[1].set(ylabel="failure rate", ylim=(0, None))
    panels[1].yaxis.set_major_formatter(PERCENT)
    if len(sweeps) > 1:
        panels[0].legend(loc="upper right")
    return figure
