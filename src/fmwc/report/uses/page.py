"""A study, reported: `tables.md`, `figures/` and `report.html`."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from fmwc.files import write_bytes, write_text
from fmwc.recipes.comparing import from_results
from fmwc.report import tables
from fmwc.report.look import png
from fmwc.report.page import Section, facts, picture, write_page
from fmwc.report.uses import figures
from fmwc.report.uses.folder import Study, read_study
from fmwc.report.uses.pictures import edited_samples
from fmwc.report.uses.tables import TABLES, UseTable
from fmwc.report.uses.words import sentence

__all__ = ["Written", "write_study"]

NAMES = {"checkerboard": "Checkerboard", "mnist": "Digits", "crystals": "Crystals"}
TITLES = {
    "filter": "Filter: keep the surest",
    "trust": "Trust: promise a failure rate",
    "edit": "Edit: change a sample where it was decided",
    "steps": "Steps: spend them where the flow is unsure",
    "rewind": "Rewind: go back on the most doubtful",
    "guide": "Guide: steer away from doubt",
}
FROM = {
    False: "Each stands beside baselines. Options were chosen on another seed; only where a sentence says that one is "
    "the best or the highest was something picked from what is shown here.",
    True: "These are samples of the validation seed, and everything that was tried on it.",
}
NOTHING = "The numbers were read, and there is nothing to show."


class Plot(NamedTuple):
    """A figure: its file's name, what it shows, how it is made, and whether there is anything to make it of."""

    name: str
    alt: str
    make: Callable[[Study], Figure]
    there: Callable[[Study], object] = lambda study: True


PLOTS: dict[str, tuple[Plot, ...]] = {
    "filter": (
        Plot("retention", "The share of bad samples among the surest, for each score.", figures.filter_curves),
        Plot(
            "scores",
            "Each score's AUPRC with its interval, and its difference to the first.",
            figures.filter_scores,
            lambda study: study.numbers["filter"]["compared"],
        ),
    ),
    "trust": (
        Plot("reliability", "How often samples turn out well, by confidence.", figures.reliable),
        Plot(
            "promises",
            "Failure rates that were promised, those that came, how often they were broken, and what was kept.",
            figures.promises,
            lambda study: study.numbers["trust"]["promises"],
        ),
    ),
    "edit": (Plot("edits", "The share of edits that succeed, by when they are made.", figures.edit_times),),
    "steps": (
        Plot("grids", "Where each controller puts its steps.", figures.step_grids),
        Plot("steps", "Quality against the number of steps, for each controller.", figures.step_quality),
    ),
    "rewind": (Plot("rewind", "Quality against evaluations a sample, for each way to spend them.", figures.rewound),),
    "guide": (
        Plot(
            "guide",
            "Quality against diversity, for each guidance.",
            figures.guided,
            lambda study: len(study.numbers["guide"]) > 1,
        ),
    ),
}


class Written(NamedTuple):
    """The files that were written, and what was found, a row each use."""

    written: list[Path]
    findings: list[dict[str, str]]


def _figures(study: Study, use: str) -> dict[str, tuple[str, Figure]]:
    """The figures of a use by name, with their alternative texts."""
    found = {plot.name: (plot.alt, plot.make(study)) for plot in PLOTS[use] if plot.there(study)}
    if use == "edit":
        for intent, figure in edited_samples(study).items():
            found[f"edited-{intent}"] = f"Samples and their edits: {intent}.", figure
    return found


def _markdown(study: Study, uses: dict[str, list[UseTable]]) -> str:
    lines = [
        f"# {NAMES[study.setting]}: what confidence is for",
        "",
        f"Made by `fmwc study {study.setting}`; `fmwc report` on this folder makes tables, figures and page again.",
    ]
    for use, found in uses.items():
        lines += ["", f"## {TITLES[use]}", "", sentence(study, use) or NOTHING]
        for table in found:
            note = [table.note, ""] if table.note else []
            lines += ["", f"### {table.title}", "", *note, tables.markdown(table.rows, list(table.rows[0]))]
        lines += ["", study.provenance(use)]
    return "\n".join(lines) + "\n"


def _section(study: Study, use: str, shown: dict[str, tuple[str, Figure]], found: list[UseTable]) -> Section:
    pictures = "\n".join(picture(figure, alt) for alt, figure in shown.values())
    listed = "\n".join(
        f"<h3>{escape(t.title)}</h3>\n{f'<p>{escape(t.note)}</p>' if t.note else ''}"
        f"\n{tables.html(t.rows, list(t.rows[0]))}"
        for t in found
    )
    origin = f'<p class="origin">{escape(study.provenance(use))}</p>'
    body = (
        f'<div class="plates">{pictures}</div>\n<details><summary>The numbers</summary>\n{listed}\n{origin}\n</details>'
    )
    return Section(TITLES[use], body, sentence(study, use) or NOTHING)


@from_results
def write_study(folder: Path) -> Written:
    """Writes `tables.md`, `figures/*.png` and `report.html` from the folder that `fmwc study` filled."""
    study = read_study(folder)
    uses = {use: TABLES[use](study) for use in study.numbers}
    written, sections = [write_text(folder / "tables.md", _markdown(study, uses))], []
    for use, found in uses.items():
        shown = _figures(study, use)
        written += [write_bytes(folder / "figures" / f"{name}.png", png(f)) for name, (_, f) in shown.items()]
        sections.append(_section(study, use, shown, found))
    about = {k: str(v) for k, v in study.origin.items() if k != "pieces"}
    lead = (
        f"What a model's confidence in its own samples can be used for, and what each use is worth. {FROM[study.wide]}"
    )
    title = f"{NAMES[study.setting]}: what confidence is for"
    closing = Section("Where this comes from", facts(about))
    page = write_page(folder / "report.html", title, f'<p class="lead">{escape(lead)}</p>', [*sections, closing])
    findings = [{"": use, "value": text} for use in uses if (text := sentence(study, use))]
    return Written([*written[:1], folder / "figures", page], findings)
