"""The report of an MNIST run: the digits in the order the model trusts them, and where its doubt comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from fmwc.errors import UsageError
from fmwc.files import write_bytes
from fmwc.report import figures, images
from fmwc.report.checks import contest_plate
from fmwc.report.images import Pixels, Sweep
from fmwc.report.page import write_page
from fmwc.report.plates import Plate, Words, closing, history, lead, retained, transport
from fmwc.report.run import Run
from fmwc.sampling import Trajectory

__all__ = ["by_stage", "write_figures", "write_report"]

WORDS = Words(
    samples="digits",
    bad="failed",
    none="failed",
    fate="are taken by a judge for another class than was asked for",
    again="are",
    unaided="The judge had no say in the ranking.",
    kept=0.8,
)
STAGES = {  # of the UNet, in the order its signal takes
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
    """The UNet's layers added up over its stages; those that bring in time and class are a stage of their own.

    >>> layers = ["time", "first", "down.0.0.conv1", "down.0.0.cond", "shrink.0", "out"]
    >>> parts, stages = by_stage(np.arange(6.0).reshape(1, 6, 1), layers)
    >>> dict(zip(stages, parts[0, :, 0].tolist()))
    {'first': 1.0, 'time & class': 3.0, 'down': 6.0, 'out': 5.0}
    """

    def stage(layer: str) -> str:
        parts = layer.split(".")
        return STAGES["time"] if parts[-1] == "cond" else STAGES.get(parts[0], parts[0])

    own = [stage(layer) for layer in layers]
    known = [name for name in dict.fromkeys(STAGES.values()) if name in own]
    names = list(dict.fromkeys([*known, *own]))  # a network of another make keeps its own names, at the end
    sums = [profile[:, [name == stage for stage in own]].sum(1) for name in names]
    return np.stack(sums, 1), names


def _read(trajectory: Trajectory, bad: ArrayLike) -> tuple[Run, np.ndarray]:
    if "y" not in trajectory.cond:
        raise UsageError("this report needs the class that was asked for with each digit: sample(..., y=classes)")
    return Run.read(trajectory, bad, ["integrated"]), trajectory.cond["y"].cpu().numpy()


def _plates(run: Run, asked: np.ndarray, pixels: Pixels, sweep: Sweep | None) -> list[Plate]:
    sureness = -run.score  # confidence itself has ties, where digits lie beyond all of its reference
    some = pixels.index
    plates = [
        Plate(
            "digits",
            "Digits in the order of the model's confidence",
            "Read it like text: the model is surest of the first digit and doubts the last one most; numbers on the "
            "left are places in the ranking. A frame marks a digit that the judge, a classifier trained on real "
            "digits, takes for another class than was asked for; the small number in it is what was asked for.",
            "Generated digits, sorted from the surest to the most doubtful, failed ones framed.",
            images.sorted_grid(run.x, sureness, run.bad, asked),
        ),
        *retained(run, WORDS),
        Plate(
            "classes",
            "The surest and the most doubtful of each class",
            "Each row holds digits of one class, again from sure to doubtful, with those in between left out. On the "
            "right, the share of all digits of the class that failed.",
            "For each class, a row of its surest and of its most doubtful digits, failed ones framed.",
            images.extremes_by_class(run.x, sureness, run.bad, asked),
        ),
        Plate(
            "pixels",
            "Where on the image the model is unsure, and when",
            "Above, a digit as it comes out of the noise; below, how unsure the model is of the velocity of each pixel "
            "at that time. All maps share one scale. Doubt along the edges of a stroke is one thing, doubt about "
            "whether the stroke is there at all another.",
            "The state and the standard deviation of each pixel's velocity at several times, for a few sure and a few "
            "doubtful digits.",
            images.pixel_std(
                pixels.states,
                pixels.std,
                pixels.times,
                run.confidence[some],
                run.x[some],
                run.bad[some],
                run.called,
            ),
        ),
        *history(run, WORDS),
    ]
    if run.profile is not None:
        parts, stages = by_stage(run.profile, run.layers)
        plates.append(transport(parts, run.confidence, run.grid, stages, "stage"))
    if sweep is not None:
        plates.append(
            Plate(
                "steps",
                "What fewer steps cost",
                "Each step is one evaluation of the network. Left, how far the digits as a whole are from real ones; "
                "right, how many the judge takes for another class.",
                "Fréchet distance and failure rate against the number of Euler steps.",
                images.quality_against_steps(sweep),
            )
        )
    return plates


def write_figures(
    folder: Path, trajectory: Trajectory, bad: ArrayLike, pixels: Pixels, sweep: Sweep | None = None
) -> list[Path]:
    """Writes the figures as PNG files into a folder; the arguments are those of `write_report`."""
    plates = [*_plates(*_read(trajectory, bad), pixels, sweep), *contest_plate(trajectory)]
    return [write_bytes(folder / f"{plate.name}.png", figures.png(plate.figure)) for plate in plates]


def write_report(
    out: Path,
    trajectory: Trajectory,
    bad: ArrayLike,
    pixels: Pixels,
    *,
    numbers: list[dict[str, str]],
    provenance: dict[str, str],
    sweep: Sweep | None = None,
) -> Path:
    """Writes `report.html` into the folder `out`.

    Arguments:
        out: The folder.
        trajectory: Digits with their variance and the classes asked for, `y`; ranked by its own default score. With
            `transported`, its profile is shown too.
        bad: The digits that the judge takes for another class, `(B,)`.
        pixels: A few digits' doubt, pixel by pixel (:func:`fmwc.report.images.read_pixels`).
        numbers: Rows of the table, each from column to cell.
        provenance: Where the numbers come from: commit, device, seed, time.
        sweep: Quality against the number of steps, if it was measured.
    """
    run, asked = _read(trajectory, bad)
    sections = [
        *[plate.section for plate in (*_plates(run, asked, pixels, sweep), *contest_plate(trajectory))],
        *closing(numbers, _LIMITS if trajectory.standard is None else f"{_WITHIN}\n{_LIMITS}", provenance),
    ]
    return write_page(out / "report.html", "MNIST: how far to trust each digit", lead(run, WORDS), sections)


_WITHIN = """\
<li>Digits are ranked among others of their class, because an 8 has more ink than a 1 and so more variance. A class that
the model draws badly throughout does not stand out.</li>"""
_LIMITS = """\
<li>Whether a digit failed is the judge's word. It errs too, and it only finds digits that look like another one: a
malformed digit that it still reads rightly counts as good here.</li>
<li>The floor of AUPRC is the share of failed digits, so two models that fail differently often are not compared by
AUPRC alone.</li>
<li>This is one run with one seed. It does not show how far the numbers move between seeds.</li>"""
