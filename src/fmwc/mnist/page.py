"""The page of an MNIST run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fmwc.errors import UsageError
from fmwc.report import images
from fmwc.report.gallery import gallery, packed_curves
from fmwc.report.page import Section, write_page
from fmwc.report.reports import (
    closing,
    contest_section,
    figure_section,
    history_section,
    judged_head,
    judged_limits,
    retention_section,
    transport_section,
)
from fmwc.report.run import RunArrays, array
from fmwc.sampling import Trajectory

__all__ = [
    "KEPT",
    "by_stage",
    "digit_sections",
    "digits_page",
]

Rows = Sequence[Mapping[str, str]]

KEPT = 0.8  # share of samples that is kept for the main numbers

STAGES = {  # of the UNet, in forward order
    "first": "first",
    "time": "time & class",
    "down": "down",
    "shrink": "down",
    "middle": "middle",
    "grow": "up",
    "up": "up",
    "out": "out",
}


def by_stage(
    profile: np.ndarray, layers: Sequence[str]
) -> tuple[np.ndarray, list[str]]:  # (steps, L, B) -> (steps, S, B)
    """Sum the layers of the UNet by stage; layers that add time and class form a separate stage.

    >>> layers = ["time", "first", "down.0.0.conv1", "down.0.0.cond", "shrink.0", "out"]
    >>> parts, stages = by_stage(np.arange(6.0).reshape(1, 6, 1), layers)
    >>> dict(zip(stages, parts[0, :, 0].tolist()))
    {'first': 1.0, 'time & class': 3.0, 'down': 6.0, 'out': 5.0}
    """

    def stage(layer: str) -> str:
        parts = layer.split(".")
        return STAGES["time"] if parts[-1] == "cond" else STAGES.get(parts[0], parts[0])

    stages = [stage(layer) for layer in layers]
    known = [name for name in dict.fromkeys(STAGES.values()) if name in stages]
    names = list(dict.fromkeys([*known, *stages]))  # layers of other networks keep their names
    sums = [profile[:, [name == stage for stage in stages]].sum(1) for name in names]
    return np.stack(sums, 1), names


def _read_digits(trajectory: Trajectory, bad: ArrayLike) -> RunArrays:
    if "y" not in trajectory.cond:
        raise UsageError("the report needs the requested class of each digit; sample with cond={'y': classes}")
    return RunArrays.read(trajectory, bad, ["integrated"])


def _gallery(trajectory: Trajectory, run: RunArrays) -> Section:
    classes = {"y": array(trajectory.cond["y"])}
    classes |= {name: array(value) for name, value in trajectory.evidence.items() if name in ("rival", "margin")}
    return gallery(
        f"Digits by {run.label}",
        "Digits from the surest to the most doubtful, row by row. A classifier trained on real digits assigns framed "
        f"digits to another class. Move the slider to discard the digits with the lowest {run.label}.",
        "images",
        {"x": (255 * np.clip(run.x[:, 0], 0, 1)).round().astype(np.uint8)},
        score=run.score,
        level=run.confidence,
        label=run.label,
        failed=run.bad,
        columns=classes,
        titles={"y": "requested class", "rival": "rival class", "margin": "margin over the rival"},
        curves=packed_curves(run.times, {"": run.std}, run.score),
        share=KEPT,
    )


def _grid(run: RunArrays, sureness: np.ndarray, classes: np.ndarray) -> Section:
    return figure_section(
        f"Digits by {run.label}",
        "Digits from the surest to the most doubtful, row by row; the numbers on the left are ranks. A classifier "
        "trained on real digits assigns framed digits to another class; the small number in the frame is the "
        "requested class.",
        "digits",
        "Generated digits from the surest to the most doubtful, with failed digits framed.",
        images.sorted_grid(run.x, sureness, run.bad, classes),
    )


def digit_sections(
    trajectory: Trajectory, bad: ArrayLike, pixels: images.Pixels, *, interactive: bool = False
) -> list[Section]:
    """Return the sections with the figures of an MNIST run; the other arguments are those of :func:`digits_page`.

    Arguments:
        interactive: Whether the digits are an interactive gallery instead of a picture.
    """
    run = _read_digits(trajectory, bad)
    classes = array(trajectory.cond["y"])
    sureness = -run.score  # unlike confidence, it has no ties for digits outside the range of the reference
    some = pixels.index
    sections = [
        _gallery(trajectory, run) if interactive else _grid(run, sureness, classes),
        *retention_section(run, "failed"),
        figure_section(
            "Surest and most doubtful digits of each class",
            "Each row shows the surest and the most doubtful digits of one class, and its failure rate.",
            "classes",
            "For each class, a row of its surest and most doubtful digits, with failed digits framed.",
            images.extremes_by_class(run.x, sureness, run.bad, classes),
        ),
        figure_section(
            "Uncertainty of each pixel",
            "Upper rows: states of a trajectory from noise to digit. Lower rows: standard deviation of the velocity of "
            "each pixel at the same times, on a common scale.",
            "pixels",
            "States and standard deviations of the velocity of each pixel at several times, for a few sure and a few "
            "doubtful digits.",
            images.pixel_std(pixels, run.confidence[some], run.x[some], run.bad[some], run.label),
        ),
        *history_section(run, "failed"),
    ]
    if run.profile is not None:
        sections.append(transport_section(run, *by_stage(run.profile, run.layers), "stage"))
    return [*sections, *contest_section(trajectory)]


def digits_page(
    out: Path,
    trajectory: Trajectory,
    bad: ArrayLike,
    pixels: images.Pixels,
    *,
    numbers: Rows,
    provenance: Mapping[str, str],
) -> Path:
    """Write `report.html` of an MNIST run.

    Arguments:
        out: The folder.
        trajectory: Digits with their variance and the requested classes `y`; a transported variance is also shown.
        bad: Whether the classifier assigns each digit to another class, `(B,)`.
        pixels: Uncertainty of each pixel of a few digits (:func:`fmwc.report.images.read_pixels`).
        numbers: Rows of the table.
        provenance: Commit, device, seed and time.
    """
    run = _read_digits(trajectory, bad)
    limits = [
        "Failures are determined by a classifier, which makes errors and finds only digits that resemble another "
        "class. A malformed digit that is classified as requested counts as good.",
        *judged_limits("failed"),
    ]
    if trajectory.standard is not None:
        limits.insert(
            0,
            "Digits are ranked within their class, because classes with more ink have more variance. A class whose "
            "digits are all poor does not stand out.",
        )
    return write_page(
        out / "report.html",
        "MNIST: confidence of each digit",
        [*digit_sections(trajectory, bad, pixels, interactive=True), *closing(numbers, limits, provenance)],
        **judged_head(run, trajectory.default_score, "digits", "failed", KEPT),
    )
