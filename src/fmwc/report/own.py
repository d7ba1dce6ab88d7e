"""The report of samples of a user's own network, which nobody judges: which the model is sure of, and since when."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fmwc.report import figures, tables
from fmwc.report.page import Section, picture, write_page
from fmwc.report.plates import closing
from fmwc.sampling import Trajectory

__all__ = ["write_report"]

ENDS = 10  # samples listed from either end


def write_report(out: Path, run: Trajectory, *, numbers: list[dict[str, str]], provenance: dict[str, str]) -> Path:
    """Writes `report.html` into the folder `out`.

    Arguments:
        out: The folder.
        run: Samples with their variance.
        numbers: Rows of the table, each from column to cell.
        provenance: Where the numbers come from: commit, device, seed, time.
    """
    lead = f"{len(run):,} generated samples, each with the confidence the model itself puts in it. Nobody judged them."
    times, std, confidence = (value.cpu().numpy() for value in (run.times, run.std, run.confidence))
    history = Section(
        "Doubt has a history",
        picture(
            figures.variance_trajectories(times, std, confidence),
            "Uncertainty of the velocity over time, for the surest and the most doubtful tenth of the samples.",
        ),
        "A sample is made by following a velocity from noise, and the model is not equally sure of it all the way. "
        "Thick lines are medians, bands hold eight samples in ten, thin lines are single samples.",
    )
    sections = [history, *_ends(run), *closing(numbers, _LIMITS, provenance)]
    return write_page(
        out / "report.html", "How far to trust each sample", f'<p class="lead">{escape(lead)}</p>', sections
    )


def _ends(run: Trajectory) -> list[Section]:
    """The surest samples and the most doubtful ones, by their numbers; all of them where they are few."""
    score, confidence = run.score().tolist(), run.confidence.tolist()
    order = run.score().argsort(stable=True).tolist()
    lines = [
        {"place": f"{place:,}", "sample": str(i), "score": f"{score[i]:.4g}", "confidence": f"{confidence[i]:.3f}"}
        for place, i in enumerate(order, 1)
    ]
    if len(lines) <= 2 * ENDS:
        return [Section("All samples, the surest first", tables.html(lines, list(lines[0])))]
    titles = {f"The {ENDS} surest": lines[:ENDS], f"The {ENDS} most doubtful": lines[-ENDS:]}
    return [Section(title, tables.html(some, list(some[0]))) for title, some in titles.items()]


_LIMITS = """\
<li>Whether doubt finds what is bad in these samples is not shown: that takes somebody who says which are. With a few
hundred labels, fmwc filter --max-risk makes a promise of it.</li>
<li>This is one run with one seed.</li>"""
