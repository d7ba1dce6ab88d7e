"""Samples before and after an edit, drawn for each setting from what its first seed drew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from fmwc.data.crystals import Crystals
from fmwc.recipes.uses.drawing import Drawn
from fmwc.report.board import Ways, ways_beside
from fmwc.report.crystals_drawn import edited_pairs
from fmwc.report.look import FAINT, LINES, look
from fmwc.report.sheet import Sheet
from fmwc.report.uses.folder import Edit, Meant, Study, when_words

__all__ = ["edited_samples"]

Outcomes = dict[str, dict[str, np.ndarray]]
Draw = Callable[[Meant, list[Edit], dict[str, Drawn], Outcomes], Figure]

PAIRS = 9  # crystals shown


def _label(edit: Edit) -> str:
    return f"{edit.intent}, {edit.when}"


def _by_when(rows: list[Edit]) -> dict[str, Edit]:
    return {row.when: row for row in rows}


def _first_edits(drawn: Drawn, name: str, edit: Edit) -> Any:
    """Of every sample, its first edit."""
    return drawn.kept[name][:: edit.numbers["replicates"]]


def _points(meant: Meant, rows: list[Edit], drawn: dict[str, Drawn], judged: Outcomes) -> Figure:
    named = _by_when(rows)
    old = drawn["seeds"].kept["ways"].numpy().swapaxes(0, 1)
    panels = {}
    for edit in (named["random"], named["variance"], named[meant.chosen]):
        new = drawn[_label(edit)].kept["ways"].numpy().swapaxes(0, 1)
        count = new.shape[1]
        grid = np.tile(np.linspace(0, 1, len(new))[:, None], (1, count))
        times = _first_edits(drawn[_label(edit)], "time", edit)[:count].numpy()
        title = f"{when_words(edit.when)}\n{edit.numbers['success']:.0%} succeed"
        panels[title] = Ways(old[:, :count], new, grid, times, np.array(edit.numbers["shown"][:count]))
    return ways_beside(panels, "edited, no success", "edited, a success")


@look
def _digits(meant: Meant, rows: list[Edit], drawn: dict[str, Drawn], judged: Outcomes) -> Figure:
    """Each column a digit; below it its edits, from the earliest to the latest and then at critical times."""
    before = drawn["seeds"].kept["images"][:, 0].numpy() / 255
    fixed = [row for row in rows if row.when.startswith("t = ")]
    order = [*fixed, *(row for row in rows if row not in fixed)]
    left, heading, gap, columns = 5.6, 0.85, 0.35, len(before)
    right = 1.7
    sheet = Sheet(left + columns + right, heading + len(order) + 1 + 2 * gap + 0.15, side=0.46)
    sheet.text(left + columns + right - 0.15, heading / 2, "success", ha="right", color=FAINT)
    sheet.text(0.15, heading / 2, f"framed, a success: {meant.words}")
    sheet.images(before, left, heading, columns)
    sheet.text(left - 0.25, heading + 0.5, "the sample", ha="right", fontweight="bold")
    top = heading + 1 + gap
    for number, edit in enumerate(order):
        if number == len(fixed):
            top += gap
        after = drawn[_label(edit)].kept["images"][:, 0].numpy() / 255
        sheet.images(after, left, top, columns)
        for one in np.flatnonzero(edit.numbers["shown"][: len(after)]):
            sheet.frame(left + int(one), top, colour=LINES[2])
        sheet.text(left - 0.25, top + 0.5, when_words(edit.when), ha="right")
        sheet.text(left + columns + right - 0.15, top + 0.5, f"{edit.numbers['success']:.0%}", ha="right")
        top += 1
    return sheet.figure


def _structures(outcome: Mapping[str, np.ndarray]) -> Crystals:
    numbers, coords, cell = (torch.as_tensor(outcome[name]) for name in ("numbers", "coords", "cell"))
    return Crystals(numbers.long(), coords, cell[:, :3], cell[:, 3:], tuple(map(str, range(len(numbers)))))


def _crystals(meant: Meant, rows: list[Edit], drawn: dict[str, Drawn], judged: Outcomes) -> Figure:
    edit = _by_when(rows)[meant.chosen]
    count = min(PAIRS, len(judged["seeds"]["bad"]))
    before = {name: value[:count] for name, value in judged["seeds"].items()}
    after = {name: value[:: edit.numbers["replicates"]][:count] for name, value in judged[_label(edit)].items()}
    pairs = _structures(before), _structures(after), before["above"], after["above"]
    return edited_pairs(*pairs, np.arange(count), after["time"], edit.numbers["shown"][:count])


DRAWS: Mapping[str, Draw] = {"checkerboard": _points, "mnist": _digits, "crystals": _crystals}


def edited_samples(study: Study) -> dict[str, Figure]:
    """A picture for each kind of edit, where the samples came along with the numbers."""
    found = study.samples("edit")
    # Draws of before the time of each edit was kept also keep other edits to show.
    if found is None or study.wide or not any("time" in row.kept for row in found[0].values()):
        return {}
    return {intent: DRAWS[study.setting](study.intents[intent], rows, *found) for intent, rows in study.edits.items()}
