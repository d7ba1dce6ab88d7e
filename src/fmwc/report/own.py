"""The report on samples of a user's own network: what they look like, and which of them the model is sure of."""

from __future__ import annotations

from html import escape
from itertools import islice
from pathlib import Path

from torch import Tensor

from fmwc.report import figures, samples, tables
from fmwc.report.page import Section, picture, write_page
from fmwc.report.plates import closing, noted
from fmwc.report.run import Level, level_of
from fmwc.sampling import Trajectory
from fmwc.state import channels

__all__ = ["write_report"]

ENDS = 10  # samples listed from either end
WIDE = 8  # numbers of a sample that are listed where it is not drawn


def write_report(out: Path, run: Trajectory, *, numbers: list[dict[str, str]], provenance: dict[str, str]) -> Path:
    """Writes `report.html` into the folder `out`.

    Arguments:
        out: The folder.
        run: Samples with their variance.
        numbers: Rows of the table, each from column to cell.
        provenance: Where the numbers come from: commit, device, seed, time.
    """
    level = level_of(run)
    lead = (
        f"{len(run):,} generated samples, each with the {level.called} the model itself puts in it. Nobody judged them."
    )
    drawn = _drawn(run, level)
    sections = [*drawn, *_history(run, level), *_ends(run, level, bool(drawn)), *closing(numbers, _LIMITS, provenance)]
    words = f'<p class="lead">{escape(lead)}</p>{noted(level.note)}'
    return write_page(out / "report.html", "How far to trust each sample", words, sections)


def _history(run: Trajectory, level: Level) -> list[Section]:
    """The variance over time, if it was read."""
    if not len(run.times):
        return []
    times, std, values = (value.cpu().numpy() for value in (run.times, run.std, level.values))
    return [
        Section(
            "Doubt has a history",
            picture(
                figures.variance_trajectories(times, std, values),
                "Uncertainty of the velocity over time, for the surest and the most doubtful tenth of the samples.",
            ),
            "A sample is made by following a velocity from noise, and the model is not equally sure of it all the way. "
            "Thick lines are medians, bands hold eight samples in ten, thin lines are single samples.",
        )
    ]


def _drawn(run: Trajectory, level: Level) -> list[Section]:
    """The samples themselves, each channel whose shape says what it is."""
    found, values = [], level.values.cpu().numpy()
    for name, value in channels(run.x).items():
        label = "" if isinstance(run.x, Tensor) else name
        made = samples.draw(value.detach().cpu().numpy(), values, label, level.called)
        if made is not None:
            found.append(Section(made.title, picture(made.figure, made.alt), made.caption))
    return found


def _ends(run: Trajectory, level: Level, drawn: bool) -> list[Section]:
    """The surest samples and the most doubtful ones, by their numbers; all of them where they are few."""
    score, values = run.score().tolist(), level.values.tolist()
    order = run.score().argsort(stable=True).tolist()
    states = {name: value.flatten(1).cpu() for name, value in channels(run.x).items()}
    total = sum(value.shape[1] for value in states.values())
    lines = [
        {
            "place": f"{place:,}",
            "sample": str(i),
            "score": f"{score[i]:.4g}",
            level.called: f"{values[i]:.3f}",
            **({} if drawn else _numbers(states, i)),
        }
        for place, i in enumerate(order, 1)
        if place <= ENDS or place > len(order) - ENDS
    ]
    caption = "" if drawn or total <= WIDE else f"Of the {total:,} numbers of a sample, the first {WIDE} are listed."
    if len(order) <= 2 * ENDS:
        return [Section("All samples, the surest first", tables.html(lines, list(lines[0])), caption)]
    titles = {f"The {ENDS} surest": lines[:ENDS], f"The {ENDS} most doubtful": lines[-ENDS:]}
    return [Section(title, tables.html(some, list(some[0])), caption) for title, some in titles.items()]


def _numbers(states: dict[str, Tensor], sample: int) -> dict[str, str]:
    """The first numbers of a sample whose shape does not say how to draw it."""
    named = ((f"{name}[{i}]", v) for name, value in states.items() for i, v in enumerate(value[sample].tolist()))
    return {name: f"{v:.4g}" for name, v in islice(named, WIDE)}


_LIMITS = """\
<li>Whether doubt finds what is bad in these samples is not shown: that takes somebody who says which are. With a few
hundred labels, fmwc filter --max-risk makes a promise of it.</li>
<li>This is one run with one seed.</li>"""
