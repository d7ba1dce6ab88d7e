"""The pages of the commands, and the sections that pages share: samples of any network, and checks of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from torch import Tensor

from fmwc.metrics.ranking import ranking_text, rate, rate_kept, retention
from fmwc.report import images
from fmwc.report.curves import (
    draw_signals,
    extremes,
    retention_curve,
    transport_profile,
    variance_trajectories,
)
from fmwc.report.page import Picture, Section, Tile, write_page, write_pictures
from fmwc.report.points import draw_points
from fmwc.report.run import RunArrays, array, describe
from fmwc.report.table import Table
from fmwc.sampling import Trajectory
from fmwc.state import channels

__all__ = [
    "ENOUGH",
    "checks_page",
    "closing",
    "contest_section",
    "draw_samples",
    "figure_section",
    "history_section",
    "judged_head",
    "judged_limits",
    "retention_section",
    "samples_page",
    "tile",
    "transport_section",
]

Rows = Sequence[Mapping[str, str]]

CHECKERBOARD_KEPT, DIGITS_KEPT = 0.9, 0.8  # shares of samples kept for the headline numbers
ENOUGH = 50  # minimum number of samples for a retention curve
ENDS = 10  # samples listed from each end of the ranking
LISTED = 30  # samples in the table of checks
NUMBERS = 8  # coordinates listed per sample that is not drawn
LONG, SIDE, PANELS = (
    8,
    4,
    4,
)  # minimum length of a signal, minimum side of an image, maximum number of channels of a signal


# ---- shared parts ------------------------------------------------------------------------------------------------


def tile(value: str, name: str, kind: str = "", chance: float | None = None) -> Tile:
    """Return a headline number, with its interval as part of its name.

    Arguments:
        value: The number and its interval, or the reason why it is missing.
        name: The name of the number.
        kind: Its colour: `sure`, `doubtful` or `""`.
        chance: The value of a random order, for numbers that rate a ranking.
    """
    if value.startswith("too few"):
        return Tile("?", f"{name}: {value}", kind)
    number, _, interval = value.partition(" ")
    random = "" if chance is None else f" (random order: {chance:.2f}, best: 1)"
    return Tile(number, f"{name}{random}, 90 % interval {interval}", kind)


def closing(numbers: Rows, limits: Sequence[str], provenance: Mapping[str, str]) -> list[Section]:
    """Return the last sections of a page: numbers, limitations and provenance."""
    return [
        *([Section("Numbers", tables=[Table(numbers)])] if numbers else []),
        Section("Limitations", items=[*_LIMITS, *limits]),
        Section("Provenance", facts=provenance),
    ]


_LIMITS = (
    "A confidence is a position in a ranking, not a probability: 0.9 means surer than 90 % of the reference samples, "
    "not correct in 90 % of the cases.",
    "Confidence rates the generated samples. It does not show which parts of the data the model misses.",
    "A model can be confident and wrong. The variance measures the model's uncertainty, to first order in the noise "
    "of its weights.",
)
_ONE_SEED = "The numbers come from one run with one seed and do not show the variation between seeds."


def judged_limits(bad: str) -> list[str]:
    auprc = (
        f"The AUPRC of a random order is the share of {bad} samples, so do not compare the AUPRC of models with "
        "different shares."
    )
    return [auprc, _ONE_SEED]


def _notes(note: str, score: str) -> list[str]:
    return [
        f"Samples are ranked by the score “{score}”: {describe(score)}.",
        *([f"Samples are ordered by their {note}."] if note else []),
    ]


def judged_head(run: RunArrays, score: str, samples: str, bad: str, kept: float) -> dict[str, Any]:
    """Return the lead and the headline numbers of a page of judged samples."""
    none, tiles = f" There are no {bad} {samples}, so the ranking cannot be evaluated.", []
    if run.bad.any():
        none = ""
        tiles = [
            tile(rate(run.bad), f"{bad}, all {samples}"),
            tile(rate_kept(run.score, run.bad, kept), f"{bad}, surest {kept:.0%}", "sure"),
            tile(ranking_text(run.score, run.bad, bad), f"AUPRC of {bad} {samples}", chance=float(run.bad.mean())),
        ]
    lead = f"{len(run.bad):,} generated {samples}, each with its {run.label}.{none}"
    return {"lead": [lead, *_notes(run.note, score)], "tiles": tiles}


def figure_section(title: str, caption: str, name: str, alt: str, figure: Figure) -> Section:
    return Section(title, caption, [Picture(name, alt, figure)])


def retention_section(run: RunArrays, bad: str) -> list[Section]:
    """Return the retention curves of the run's scores, if there are enough samples."""
    if len(run.bad) < ENOUGH:
        return []
    curves = {name: retention(score, run.bad) for name, score in run.scores.items()}
    section = figure_section(
        f"Share of {bad} samples among those kept",
        "From left to right, more of the most doubtful samples are discarded. The dashed line is a random order, the "
        "dotted line a perfect order.",
        "retention",
        f"Share of {bad} samples among those kept, against the share kept.",
        retention_curve(curves, float(run.bad.mean()), bad),
    )
    return [section]


def history_section(run: RunArrays, bad: str = "", closer: RunArrays | None = None) -> list[Section]:
    """Return the variance over time, if it was computed.

    Arguments:
        run: The samples.
        bad: The word for bad samples; empty if samples were not judged.
        closer: Some of the samples with more readings, drawn instead of the run.
    """
    drawn = run if closer is None else closer
    if not len(drawn.times):
        return []
    shares = [float(run.bad[which].mean()) for which in extremes(-run.score)] if bad else None
    some = "" if closer is None else f" The curves show {len(drawn.bad):,} of the {len(run.bad):,} samples."
    section = figure_section(
        "Uncertainty over time",
        "Standard deviation of the velocity along the trajectories of the surest and of the most doubtful tenth of "
        f"the samples, by {run.label}. Thick lines are medians, bands cover 80 % of the samples, and thin lines are "
        f"individual samples.{some}",
        "trajectories",
        "Uncertainty of the velocity over time, for the surest and the most doubtful tenth of the samples.",
        variance_trajectories(drawn.times, drawn.std, drawn.confidence, shares, bad),
    )
    return [section]


def transport_section(run: RunArrays, profile: np.ndarray, parts: Sequence[str], part: str = "layer") -> Section:
    """Return the endpoint variance by step and part of the network; `profile` is `(steps, parts, B)`."""
    return figure_section(
        f"Endpoint variance by step and {part}",
        "Each bar is one step of the trajectory. Its height is the share of the endpoint variance that comes from this "
        f"step; its colours show the {part} of the network. In each panel, the shares add up to 100 %.",
        "transport",
        f"Share of the endpoint variance per step, stacked by {part}, for the two groups of samples.",
        transport_profile(profile, run.confidence, run.grid.mean(1), parts, part),
    )


_CONTEST = (
    "The most doubtful samples, with the other class that explains each of them best. Framed samples are explained "
    "better by that class than by the requested class."
)


def contest_section(run: Trajectory) -> list[Section]:
    """Return the most doubtful images of a run that has a contest between classes; empty for other runs."""
    if not {"contest", "rival", "margin"} <= run.evidence.keys() or "y" not in run.cond:
        return []
    score, rival, margin = (array(run.evidence[name]) for name in ("contest", "rival", "margin"))
    figure = images.most_doubtful(array(run.x), score, array(run.cond["y"]), rival, margin)
    alt = "The most doubtful samples with the class that explains them best."
    return [figure_section("Contest between classes", _CONTEST, "contest", alt, figure)]


# ---- any network -------------------------------------------------------------------------------------------------


def kind_of(shape: tuple[int, ...]) -> str:
    """Return how states of this shape are drawn, or `""` if the shape is ambiguous.

    >>> [kind_of(shape) for shape in [(2,), (1, 28, 28), (3, 32, 32), (16, 16), (100,), (2, 64), (5, 3), (7,)]]
    ['points', 'images', 'images', 'images', 'signals', 'signals', '', '']
    """
    if shape == (2,):
        return "points"
    if len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= SIDE:
        return "images"
    if len(shape) == 2 and min(shape) >= LONG:
        return "images"
    if (len(shape) == 1 and shape[0] >= LONG) or (len(shape) == 2 and shape[0] <= PANELS and shape[1] >= LONG):
        return "signals"
    return ""


_DRAWINGS: dict[str, tuple[Callable[[np.ndarray, np.ndarray, str], Figure], str, str]] = {
    "points": (
        draw_points,
        "Each point is a sample. Left: all samples, with doubtful samples on top. Middle and right: the surest and the "
        "most doubtful tenth over all samples. Distant outliers may lie outside the frame.",
        "Scatter plots of the samples: all samples, the surest tenth, and the most doubtful tenth.",
    ),
    "images": (
        images.draw_images,
        "The surest and the most doubtful images, on a common scale of brightness.",
        "Two grids of generated images: the surest on the left, the most doubtful on the right.",
    ),
    "signals": (
        draw_signals,
        "The surest and the most doubtful signals over the range of all samples.",
        "Curves: the surest samples on the left, the most doubtful on the right.",
    ),
}


def draw_samples(x: ArrayLike, confidence: ArrayLike, name: str = "", label: str = "confidence") -> Section | None:
    """Draw samples according to their shape; return `None` if the shape is ambiguous.

    Arguments:
        x: Samples, `(B, *)`.
        confidence: In [0, 1], `(B,)`.
        name: Name of the channel, if the state has several channels.
        label: `confidence` or `rank`.
    """
    values, level = np.asarray(x, dtype=float), np.asarray(confidence, dtype=float)
    kind = kind_of(values.shape[1:])
    finite = np.isfinite(values).reshape(len(values), -1).all(1)
    if not kind or not finite.any():
        return None
    draw, caption, alt = _DRAWINGS[kind]
    if not finite.all():
        caption += f" Samples with NaN or infinity are omitted: {(~finite).sum():,}."
    title, file = (f"Samples: {name}", f"samples-{name}") if name else ("Samples", "samples")
    return figure_section(title, caption, file, alt, draw(values[finite], level[finite], label))


def samples_page(out: Path, run: Trajectory, *, numbers: Rows, provenance: Mapping[str, str]) -> Path:
    """Write `report.html` of samples of any network.

    Arguments:
        out: The folder.
        run: Samples with their variance.
        numbers: Rows of the table.
        provenance: Commit, device, seed and time.
    """
    read = RunArrays.read(run)
    named = {"": read.x} if isinstance(run.x, Tensor) else read.x
    drawings = (draw_samples(x, read.confidence, name, read.label) for name, x in named.items())
    drawn = [section for section in drawings if section is not None]
    limits = [
        "The samples were not judged, so this page does not show whether doubtful samples are bad. With a few hundred "
        "labels, fmwc filter --max-risk guarantees a maximum failure rate.",
        _ONE_SEED,
    ]
    return write_page(
        out / "report.html",
        "Confidence of each sample",
        [
            *drawn,
            *history_section(read),
            _ends(run, read, bool(drawn)),
            *closing(numbers, limits, provenance),
        ],
        lead=[
            f"{len(run):,} generated samples, each with its {read.label}. They were not judged.",
            *_notes(read.note, run.default_score),
        ],
    )


def _ends(run: Trajectory, read: RunArrays, drawn: bool) -> Section:
    """Return tables of the surest and the most doubtful samples, or of all samples if there are few."""
    order = np.argsort(read.score, kind="stable").tolist()
    states = {name: value.flatten(1).cpu() for name, value in channels(run.x).items()}
    label = "rank in [0, 1]" if read.label == "rank" else read.label

    def line(place: int, i: int) -> dict[str, str]:
        cells = {"rank": f"{place:,}", "sample": str(i), "score": f"{read.score[i]:.4g}"}
        cells[label] = f"{read.confidence[i]:.3f}"
        if drawn:
            return cells
        numbers = ((f"{name}[{k}]", v) for name, x in states.items() for k, v in enumerate(x[i].tolist()))
        return cells | {name: f"{v:.4g}" for name, v in islice(numbers, NUMBERS)}

    places = list(enumerate(order, 1))
    total = sum(value.shape[1] for value in states.values())
    caption = (
        ""
        if drawn or total <= NUMBERS
        else f"The first {NUMBERS} of the {total:,} coordinates of each sample are listed."
    )
    if len(order) <= 2 * ENDS:
        return Section("All samples, surest first", caption, tables=[Table([line(*place) for place in places])])
    ends = {f"The {ENDS} surest": places[:ENDS], f"The {ENDS} most doubtful": places[-ENDS:]}
    tables = [Table([line(*place) for place in rows], title) for title, rows in ends.items()]
    return Section("Surest and most doubtful samples", caption, tables=tables)


# ---- checks ------------------------------------------------------------------------------------------------------


def checks_page(
    out: Path,
    x: Any,
    table: Mapping[str, Sequence[Any]],
    found: Any,
    rows: Rows,
    provenance: Mapping[str, str],
) -> list[Path]:
    """Write `checks.html` and, for images, `checks.png`; return the paths of the files.

    Arguments:
        out: The folder.
        x: The samples.
        table: Columns with one entry per sample: `name`, conditions, `score`, …
        found: The :class:`fmwc.checks.CheckResult`.
        rows: Rows of the summary.
        provenance: Commit, device, seed and time.
    """
    results = ("name", "score", "rank", "standard_error", "confidence", "rival", "margin")
    conditions = [name for name in table if name not in results]
    classes = table[conditions[0]] if len(conditions) == 1 else None
    rival, margin = table.get("rival"), table.get("margin")
    pictures: list[Picture] = []
    values = list(channels(x).values())
    if len(values) == 1 and kind_of(tuple(values[0].shape[1:])) == "images":
        figure = images.most_doubtful(array(values[0]), table["score"], classes, rival, margin)
        pictures.append(Picture("checks", "The most doubtful samples.", figure))
    columns = dict(table)
    if classes is not None and rival is not None and margin is not None:
        columns["result"] = [images.contest_text(*row) for row in zip(classes, rival, margin, strict=True)]
    lines = sorted(Table.from_columns(columns).rows, key=lambda line: -line["score"])[:LISTED]
    caption = _CONTEST if found.rival is not None else ""
    doubtful = Section("Most doubtful samples", caption, pictures, [Table(lines)])
    page = write_page(
        out / "checks.html",
        "Check of finished samples",
        [Section("Summary", tables=[Table(rows)]), doubtful, Section("Provenance", facts=provenance)],
        lead=[f"{len(table['name']):,} finished samples, checked with the flow ({describe(found.evidence)})."],
    )
    return [*write_pictures(out, [doubtful]), page]
