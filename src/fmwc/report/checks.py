"""What checks of finished samples found: a sheet of the most doubtful images, and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from fmwc.files import write_bytes
from fmwc.report import figures, tables
from fmwc.report.look import DOUBTFUL, look
from fmwc.report.page import Section, facts, picture, write_page
from fmwc.report.plates import Plate
from fmwc.report.samples import kind_of
from fmwc.report.sheet import Sheet
from fmwc.sampling import Trajectory
from fmwc.state import channels

__all__ = ["contest_plate", "contested", "doubtful_sheet", "write_checks"]

MOST = 40  # images on a sheet
LISTED = 30  # samples in the page's table
ROW = 8  # images per row

TITLE = "What the flow itself reads"
CAPTION = (
    "The samples that the flow explains worst as what was asked for, compared with its other classes; most doubtful "
    "first. A frame marks those that another class explains better."
)


def contested(asked: Any, rival: Any, margin: float) -> str:
    """What a contest says of a sample, in words.

    >>> contested(4, 9, -0.1), contested(4, 9, 0.2)
    ('asked for 4, the flow itself reads 9', 'asked for 4, next is 9')
    """
    return f"asked for {asked}, the flow itself reads {rival}" if margin < 0 else f"asked for {asked}, next is {rival}"


@look
def doubtful_sheet(
    x: ArrayLike,
    score: ArrayLike,
    asked: ArrayLike | None = None,
    rival: ArrayLike | None = None,
    margin: ArrayLike | None = None,
) -> Figure:
    """Draw the most doubtful images, each with what was asked for and what the flow itself reads.

    Arguments:
        x: Images, `(B, C, H, W)` or `(B, H, W)`; of several colours their mean is drawn.
        score: High = doubtful, `(B,)`.
        asked: What was asked for, `(B,)`.
        rival, margin: Those of a contest, `(B,)`.
    """
    images, doubt = np.asarray(x, dtype=float), np.asarray(score, dtype=float)
    images = images.mean(1) if images.ndim == 4 else images
    order = np.argsort(-doubt, kind="stable")[:MOST]
    columns, tall, heading = min(ROW, max(4, len(order))), 1.6, 0.5
    sheet = Sheet(columns * 1.35 + 0.2, ceil(len(order) / columns) * tall + heading + 0.1, side=0.82)
    sheet.text(0.15, heading / 2, f"the {len(order)} most doubtful of {len(doubt):,}")
    for place, one in enumerate(order):
        row, column = divmod(place, columns)
        left, top = 0.15 + column * 1.35, heading + row * tall
        sheet.images(images[one][None].clip(0, 1), left, top, 1)
        words, style = f"score {doubt[one]:.3g}", {}
        if asked is not None and rival is not None and margin is not None:
            other = np.asarray(margin)[one] < 0
            words = contested(np.asarray(asked)[one], np.asarray(rival)[one], -1.0 if other else 1.0)
            words = words.replace(", ", ",\n").replace("the flow itself reads", "the flow reads")
            if other:
                sheet.frame(left, top)
                style = {"color": DOUBTFUL}
        sheet.text(left + 0.5, top + 1.24, words, ha="center", fontsize=7, **style)
    return sheet.figure


def contest_plate(run: Trajectory) -> list[Plate]:
    """The plate of a run of images that ended with a contest; none for other runs."""
    if not {"contest", "rival", "margin"} <= run.evidence.keys() or "y" not in run.cond:
        return []
    score, rival, margin = (run.evidence[name].cpu().numpy() for name in ("contest", "rival", "margin"))
    sheet = doubtful_sheet(run.x.cpu().numpy(), score, run.cond["y"].cpu().numpy(), rival, margin)
    return [Plate("contest", TITLE, CAPTION, "The most doubtful samples with what the flow itself reads.", sheet)]


def write_checks(
    out: Path,
    x: Any,
    table: Mapping[str, Sequence[Any]],
    found: Any,
    rows: list[dict[str, str]],
    origin: dict[str, str],
) -> list[Path]:
    """Write `checks.html`, and for images `checks.png`; return the files.

    Arguments:
        out: The folder.
        x: The samples.
        table: Columns with a row per sample: `name`, conditions, `score`, …
        found: The :class:`fmwc.checks.Check`.
        rows: The summary, each row from column to cell.
        origin: Where the numbers come from.
    """
    conditions = [n for n in table if n not in ("name", "score", "rank", "confidence", "rival", "margin")]
    asked = table[conditions[0]] if len(conditions) == 1 else None
    sections, written = [Section("The numbers", tables.html(rows, list(rows[0])))], []
    values = list(channels(x).values())
    if len(values) == 1 and kind_of(tuple(values[0].shape[1:])) == "images":
        sheet = doubtful_sheet(values[0].cpu().numpy(), table["score"], asked, table.get("rival"), table.get("margin"))
        written.append(write_bytes(out / "checks.png", figures.png(sheet)))
        caption = CAPTION if found.rival is not None else "The samples that the flow explains worst, first."
        sections.append(Section("The most doubtful", picture(sheet, "The most doubtful samples."), caption))
    order = sorted(range(len(table["name"])), key=lambda i: -table["score"][i])[:LISTED]
    lines = [{name: _cell(column[i]) for name, column in table.items()} for i in order]
    if asked is not None and "rival" in table:
        for line, i in zip(lines, order, strict=True):
            line["in words"] = contested(asked[i], table["rival"][i], table["margin"][i])
    sections.append(Section("The most doubtful samples, by their numbers", tables.html(lines, list(lines[0]))))
    sections.append(Section("Where this comes from", facts(origin)))
    lead = f"{len(table['name']):,} finished samples, each checked by the flow itself ({found.evidence})."
    page = write_page(out / "checks.html", "What the flow itself says", f'<p class="lead">{escape(lead)}</p>', sections)
    return [*written, page]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
