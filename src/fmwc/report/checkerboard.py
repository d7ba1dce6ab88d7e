"""The report of a Checkerboard run: what came out, how far to trust it, and why."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from fmwc.field import Field
from fmwc.files import write_bytes
from fmwc.metrics.headline import ranking_text, rate_kept
from fmwc.metrics.points import misplaced
from fmwc.report import board, figures
from fmwc.report.explorer import explorer
from fmwc.report.page import write_page
from fmwc.report.plates import Plate, Words, closing, history, lead, retained, transport
from fmwc.report.run import NAMES, Run, explained
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import DISPERSION

__all__ = ["write_figures", "write_report"]

FINE, COARSE = 120, 72  # cells of a map's side: of a report, of a demonstration that is to be quick

WORDS = Words(
    samples="samples",
    bad="misplaced",
    none="is misplaced",
    fate="landed outside the cells where samples belong",
    again="did",
    unaided="No label was used to find them.",
    kept=0.9,
)


VARIANCE = "temporal_ratio"  # the score of the variance that is shown beside others


def _read(trajectory: Trajectory) -> Run:
    dispersion = [] if trajectory.transported is None else [DISPERSION]
    return Run.read(trajectory, misplaced(trajectory.x), [VARIANCE, *dispersion])


def _beside(run: Run) -> np.ndarray | None:  # -> (B,)
    """The rank of each sample by the variance, in [0, 1]; `None` where the run is ranked by the variance itself."""
    if next(iter(run.scores)) in (NAMES[VARIANCE], NAMES[DISPERSION]) or NAMES[VARIANCE] not in run.scores:
        return None
    score = run.scores[NAMES[VARIANCE]]
    return 1 - np.searchsorted(np.sort(score), score, side="right") / len(score)


def _sources(run: Run, score: str) -> str:
    """What the confidence is made from, and what is shown beside it, as HTML."""
    if _beside(run) is None:
        return ""
    what = f"{run.called.capitalize()} is made from {explained(score)}. "
    if not run.bad.any():
        return f"\n<p>{escape(what)}</p>"
    other = run.scores[NAMES[VARIANCE]]
    what += (
        f"Shown beside it, for comparison, is a score of the variance: {explained(VARIANCE)}. It needs no training "
        f"data. Among the {WORDS.kept:.0%} that the variance is surest of, "
        f"{rate_kept(other, run.bad, WORDS.kept).split()[0]} are {WORDS.bad}; its AUPRC is "
        f"{ranking_text(other, run.bad, WORDS.bad)}."
    )
    return f"\n<p>{escape(what)}</p>"


def _plates(run: Run, field: Field, closer: Run | None = None) -> list[Plate]:
    beside, own = _beside(run), next(iter(run.scores))
    levels = {run.called: run.confidence}
    if beside is not None:
        levels = {f"{run.called}: {own}": run.confidence, f"variance: {NAMES[VARIANCE]}": beside}
    both = "" if beside is None else "The left board is coloured by confidence, the right one by the variance score. "
    plates = [
        Plate(
            "samples",
            "Where the doubt lies",
            f"Grey squares are where samples belong; colour shows how sure a score is of each sample. {both}"
            "If a score means anything, the ringed samples, which are misplaced, are the bright ones.",
            "Samples on the checkerboard, coloured by confidence, misplaced ones ringed.",
            board.samples_by_confidence(run.x, levels, run.bad),
        ),
        *retained(run, WORDS),
        *history(run, WORDS, closer),
        Plate(
            "divergence",
            "Doubt, and where paths part",
            "On the left and in the middle, how unsure the model is of its velocity at each place, by our variance and "
            "by the paper's; on the right, how fast the flow spreads out or draws together. Where paths part, a small "
            "error decides where a sample ends, so the brightest places of the maps should meet.",
            "Maps of the plane: the velocity's standard deviation by two estimators, and the flow's divergence.",
            board.variance_against_divergence(field, cells=FINE if closer is None else COARSE),
        ),
    ]
    closest = run if closer is None else closer
    if closest.profile is not None:
        plates.append(transport(closest.profile, closest.confidence, closest.grid, closest.layers))
    return plates


def _every(run: Run, stride: int) -> np.ndarray:
    return run.confidence[np.argsort(run.score, kind="stable")[::stride]]


def write_figures(folder: Path, field: Field, trajectory: Trajectory) -> list[Path]:
    """Writes the figures as PNG files into a folder."""
    plates = _plates(_read(trajectory), field)
    return [write_bytes(folder / f"{plate.name}.png", figures.png(plate.figure)) for plate in plates]


def write_report(
    out: Path,
    field: Field,
    trajectory: Trajectory,
    *,
    numbers: list[dict[str, str]],
    provenance: dict[str, str],
    closer: Trajectory | None = None,
    stride: int = 1,
) -> Path:
    """Writes `report.html` into the folder `out`.

    Arguments:
        out: The folder.
        field: The field that was sampled.
        trajectory: Its samples on the plane, with their variance; with `transported`, its profile is shown too.
        numbers: Rows of the table, each from column to cell.
        provenance: Where the numbers come from: commit, device, seed, time.
        closer: Every `stride`-th sample in the order of the score, drawn again with the variance of every step, where
            the trajectory has the variance of a few steps only.
        stride: See `closer`.
    """
    run = _read(trajectory)
    again = None if closer is None else replace(_read(closer), confidence=_every(run, stride))
    way = run if again is None else again
    sections = [
        explorer(
            run.x,
            run.score,
            run.confidence,
            run.bad,
            way.times,
            way.std,
            stride if again else 1,
            run.called,
            _beside(run),
        ),
        *[plate.section for plate in _plates(run, field, again)],
        *closing(numbers, _LIMITS + (_NEAREST if "nearest" in trajectory.default_score else ""), provenance),
    ]
    first = lead(run, WORDS, _sources(run, trajectory.default_score))
    return write_page(out / "report.html", "Checkerboard: how far to trust each sample", first, sections)


_LIMITS = """\
<li>The floor of AUPRC is the share of misplaced samples, so two models that misplace different shares are not
compared by AUPRC alone.</li>
<li>This is one run with one seed, on a toy whose truth is known. It does not show how far the numbers move between
seeds.</li>"""
_NEAREST = """
<li>The distance to training samples rewards copies of them: a sample that is new and good counts as doubtful.</li>"""
