"""The report of a Checkerboard run: what came out, how far to trust it, and why."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.metrics.points import misplaced
from fmwc.metrics.ranking import ranking, retention
from fmwc.report import figures, tables
from fmwc.report.curves import EXTREME, extremes
from fmwc.report.explorer import explorer
from fmwc.report.page import Section, picture, write_page
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import DISPERSION

__all__ = ["write_figures", "write_report"]

KEPT = 0.9  # the headline's share: what a user who can spare one sample in ten would keep
NAMES = {
    "temporal_ratio": "late over early uncertainty",
    "endpoint": "uncertainty at the end",
    "integrated": "uncertainty over the whole way",
    "peak": "highest uncertainty on the way",
    DISPERSION: "spread of the endpoint",
}


@dataclass(frozen=True)
class _Run:
    """A trajectory in numpy, read once."""

    field: Field
    x: np.ndarray  # (B, 2)
    scores: dict[str, np.ndarray]  # the default first, each (B,)
    confidence: np.ndarray  # (B,)
    bad: np.ndarray  # (B,)
    times: np.ndarray  # (R, B)
    std: np.ndarray  # (R, B)
    grid: np.ndarray  # (steps + 1, B)
    profile: np.ndarray | None  # (steps, L, B)
    layers: tuple[str, ...]

    @classmethod
    def read(cls, field: Field, trajectory: Trajectory) -> _Run:
        transported = trajectory.transported
        extra = [] if transported is None else [DISPERSION]
        names = dict.fromkeys([trajectory.default_score, "temporal_ratio", *extra])
        tensors = (trajectory.x, trajectory.confidence, trajectory.times, trajectory.std, trajectory.grid)
        x, confidence, times, std, grid = (v.detach().cpu().numpy() for v in tensors)
        return cls(
            field,
            x,
            {name: trajectory.score(name).detach().cpu().numpy() for name in names},
            confidence,
            misplaced(trajectory.x),
            times,
            std,
            grid,
            None if transported is None else transported.profile.cpu().numpy(),
            () if transported is None else transported.layers,
        )

    @property
    def score(self) -> np.ndarray:
        return next(iter(self.scores.values()))


class _Plate(NamedTuple):
    """A figure, and what a reader is told about it."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


def _plates(run: _Run) -> list[_Plate]:
    curves = {NAMES.get(name, name): retention(score, run.bad) for name, score in run.scores.items()}
    plates = [
        _Plate(
            "samples",
            "Where the doubt lies",
            "Grey squares are where samples belong; colour is how sure the model is of each one. "
            "If its confidence means anything, the ringed samples, which are misplaced, are the bright ones.",
            "Samples on the checkerboard, coloured by confidence, misplaced ones ringed.",
            figures.samples_by_confidence(run.x, run.confidence, run.bad),
        ),
        _Plate(
            "retention",
            "What confidence buys",
            "Read it from left to right: the further you go, the more of the doubtful samples you have given up. "
            "A confidence that knew nothing would follow the dashed line, one that knew everything the dotted one.",
            "Share of misplaced samples among those kept, against the share kept.",
            figures.retention_curve(curves, float(run.bad.mean())),
        ),
        _Plate(
            "trajectories",
            "Doubt has a history",
            "A sample is made by following a velocity from noise, and the model is not equally sure of it all the way. "
            "Thick lines are medians, bands hold eight samples in ten, thin lines are single samples.",
            "Uncertainty of the velocity over time, for the surest and the most doubtful tenth of the samples.",
            figures.variance_trajectories(run.times, run.std, run.confidence, run.bad),
        ),
        _Plate(
            "divergence",
            "Doubt, and where paths part",
            "On the left and in the middle, how unsure the model is of its velocity at each place, by our variance and "
            "by the paper's; on the right, how fast the flow spreads out or draws together. Where paths part, a small "
            "error decides where a sample ends, so the brightest places of the maps should meet.",
            "Maps of the plane: the velocity's standard deviation by two estimators, and the flow's divergence.",
            figures.variance_against_divergence(run.field),
        ),
    ]
    if run.profile is not None:
        sure, doubtful = (run.profile[:, :, which] for which in extremes(run.confidence))
        plates.append(
            _Plate(
                "transport",
                "When, and in which layer, the doubt was made",
                "Each bar is one step of the way and says how much of the endpoint's variance was made in it, colours "
                f"which layer of the network made it. The surest and the most doubtful {EXTREME:.0%} of samples are "
                "each scaled to their own total, whose square root is written above them.",
                "Share of the endpoint's variance made in each step, stacked by layer, for the two groups of samples.",
                figures.transport_profile(sure, doubtful, run.grid.mean(1), run.layers),
            )
        )
    return plates


def write_figures(folder: Path, field: Field, trajectory: Trajectory) -> list[Path]:
    """Writes the figures as PNG files into a folder."""
    plates = _plates(_Run.read(field, trajectory))
    return [write_bytes(folder / f"{plate.name}.png", figures.png(plate.figure)) for plate in plates]


def write_report(
    out: Path, field: Field, trajectory: Trajectory, *, numbers: list[dict[str, str]], provenance: dict[str, str]
) -> Path:
    """Writes `report.html` into the folder `out`.

    Arguments:
        out: The folder.
        field: The field that was sampled.
        trajectory: Its samples on the plane, with their variance; with `transported`, its profile is shown too.
        numbers: Rows of the table, each from column to cell.
        provenance: Where the numbers come from: commit, device, seed, time.
    """
    run = _Run.read(field, trajectory)
    columns = list(dict.fromkeys(column for row in numbers for column in row))
    sections = [
        explorer(run.x, run.score, run.confidence, run.bad, run.times, run.std),
        *[Section(p.title, picture(p.figure, p.alt), p.caption) for p in _plates(run)],
    ]
    if numbers:
        sections.append(Section("The numbers", tables.html(numbers, columns)))
    sections += [Section("What this cannot tell you", _LIMITS), Section("Where this comes from", _facts(provenance))]
    return write_page(out / "report.html", "Checkerboard: how far to trust each sample", _lead(run), sections)


def _lead(run: _Run) -> str:
    count, rate = len(run.bad), float(run.bad.mean())
    what = f"{count:,} generated samples, each with the confidence the model itself puts in it."
    if not run.bad.any():
        return f'<p class="lead">{what} None of them is misplaced, so there is no mistake for a confidence to find.</p>'
    kept = retention(run.score, run.bad).at(KEPT)
    found = ranking(run.score, run.bad)
    sentence = (
        f"{what} {rate:.1%} of them landed outside the cells where samples belong; among the {KEPT:.0%} "
        f"it is surest of, {kept:.1%} did. No label was used to find them."
    )
    tiles = [
        ("", f"{rate:.1%}", "misplaced, of all samples"),
        ("sure", f"{kept:.1%}", f"misplaced, of the surest {KEPT:.0%}"),
        ("", f"{found.auprc:.2f}", f"AUPRC: how well doubt finds the misplaced (floor {found.prevalence:.2f}, best 1)"),
    ]
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="{kind}">{escape(value)}</dd></div>' for kind, value, name in tiles
    )
    return f'<p class="lead">{escape(sentence)}</p>\n<dl class="tiles">{cells}</dl>'


def _facts(provenance: dict[str, str]) -> str:
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in provenance.items())
    return f'<dl class="facts">{rows}</dl>'


_LIMITS = """<ul>
<li>Confidence is a place in a ranking, not a probability: 0.9 means surer than nine in ten reference samples, not
right nine times in ten.</li>
<li>It judges the samples that were made. Whether the model leaves out a part of the data altogether, it cannot
say.</li>
<li>A model that has learned the wrong thing well is sure of it. The doubt here is the model's own, to first order in
its noise.</li>
<li>The floor of AUPRC is the share of misplaced samples, so two models that misplace different shares are not
compared by AUPRC alone.</li>
<li>This is one run with one seed, on a toy whose truth is known. It does not show how far the numbers move between
seeds.</li>
</ul>"""
