"""The page of a Checkerboard run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fmwc.checkerboard.data import CELL, misplaced
from fmwc.checkerboard.figures import samples_by_confidence, support, variance_against_divergence
from fmwc.field import Field
from fmwc.report.gallery import gallery, packed_curves
from fmwc.report.page import Section, write_page
from fmwc.report.reports import (
    closing,
    figure_section,
    history_section,
    judged_head,
    judged_limits,
    retention_section,
    transport_section,
)
from fmwc.report.run import NAMES, RunArrays
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import DISPERSION

__all__ = [
    "KEPT",
    "checkerboard_page",
    "checkerboard_sections",
]

Rows = Sequence[Mapping[str, str]]

KEPT = 0.9  # share of samples that is kept for the main numbers
FINE, COARSE = 120, 72  # grid cells per side of a map, in a report and in a demo
_VARIANCE = "temporal_ratio"  # the variance score shown next to other scores


def _read_board(trajectory: Trajectory) -> RunArrays:
    dispersion = [] if trajectory.transported is None else [DISPERSION]
    return RunArrays.read(trajectory, misplaced(trajectory.x), [_VARIANCE, *dispersion])


def _variance_rank(run: RunArrays) -> np.ndarray | None:  # -> (B,)
    """Return the rank of each sample by variance in [0, 1], or `None` if the run itself is ranked by variance."""
    if next(iter(run.scores)) in (NAMES[_VARIANCE], NAMES[DISPERSION]) or NAMES[_VARIANCE] not in run.scores:
        return None
    score = run.scores[NAMES[_VARIANCE]]
    return 1 - np.searchsorted(np.sort(score), score, side="right") / len(score)


def _board_sections(run: RunArrays, field: Field, closer: RunArrays | None = None) -> list[Section]:
    rank = _variance_rank(run)
    levels, both = {run.label: run.confidence}, ""
    if rank is not None:
        both = f" Left: {run.label}. Right: rank by variance, which needs no training data."
        levels = {f"{run.label}: {next(iter(run.scores))}": run.confidence, f"variance: {NAMES[_VARIANCE]}": rank}
    sections = [
        figure_section(
            f"Samples by {run.label}",
            "Grey cells are the support of the data. Misplaced samples are ringed; with a useful score, they have the "
            f"colour of doubtful samples.{both}",
            "samples",
            f"Samples on the checkerboard, coloured by {run.label}, with misplaced samples ringed.",
            samples_by_confidence(run.x, levels, run.bad),
        ),
        *retention_section(run, "misplaced"),
        *history_section(run, "misplaced", closer),
        figure_section(
            "Uncertainty and divergence of the flow",
            "Left and middle: standard deviation of the velocity, by the linearised estimator and by the paper's "
            "diagonal estimator. Right: divergence of the flow. Where trajectories separate, small errors determine "
            "where samples end, so the bright regions should coincide.",
            "divergence",
            "Maps of the plane: standard deviation of the velocity by two estimators, and divergence.",
            variance_against_divergence(field, cells=FINE if closer is None else COARSE),
        ),
    ]
    closest = run if closer is None else closer
    if closest.profile is not None:
        sections.append(transport_section(closest, closest.profile, closest.layers))
    return sections


def _gallery(run: RunArrays, closer: RunArrays | None, stride: int) -> Section:
    beside = _variance_rank(run)
    shown = run if closer is None else closer
    return gallery(
        "Discard doubtful samples",
        "Each point is a generated sample; shaded cells are the support of the data, and a ring marks a misplaced "
        f"sample. Move the slider to discard the samples with the lowest {run.label}.",
        "points",
        {"x": run.x},
        score=run.score,
        level=run.confidence,
        label=run.label,
        failed=run.bad,
        word="misplaced",
        columns={} if beside is None else {"variance": beside},
        titles={"variance": "rank by variance"},
        support=[[left, bottom, left + CELL, bottom + CELL] for left, bottom in support()],
        curves=packed_curves(shown.times, {"": shown.std}, run.score, 1 if closer is None else stride),
        share=KEPT,
    )


def checkerboard_sections(field: Field, trajectory: Trajectory) -> list[Section]:
    """Return the sections with the figures of a Checkerboard run."""
    return _board_sections(_read_board(trajectory), field)


def checkerboard_page(
    out: Path,
    field: Field,
    trajectory: Trajectory,
    *,
    numbers: Rows,
    provenance: Mapping[str, str],
    closer: Trajectory | None = None,
    stride: int = 1,
) -> Path:
    """Write `report.html` of a Checkerboard run.

    Arguments:
        out: The folder.
        field: The sampled field.
        trajectory: Samples with their variance; a transported variance is also shown.
        numbers: Rows of the table.
        provenance: Commit, device, seed and time.
        closer: If the trajectory has few readings, every `stride`-th sample in order of score, sampled again with the
            variance of every step.
        stride: See `closer`.
    """
    run, again = _read_board(trajectory), None
    if closer is not None:
        order = np.argsort(run.score, kind="stable")
        again = replace(_read_board(closer), confidence=run.confidence[order[::stride]])
    limits = judged_limits("misplaced")
    if "nearest" in trajectory.default_score:
        limits.append(
            "The distance to training samples favours copies of training samples: good samples far from them count as "
            "doubtful."
        )
    return write_page(
        out / "report.html",
        "Checkerboard: confidence of each sample",
        [
            _gallery(run, again, stride),
            *_board_sections(run, field, again),
            *closing(numbers, limits, provenance),
        ],
        **judged_head(run, trajectory.default_score, "samples", "misplaced", KEPT),
    )
