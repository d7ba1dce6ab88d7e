"""Write the report of a study: `tables.md`, `figures/` and `report.html`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments.common.store import from_results
from experiments.uses import figures
from experiments.uses.evaluate import READINGS
from experiments.uses.folder import Study, read_study, time_label
from fmwc.files import write_text
from fmwc.report.page import Picture, Section, write_page, write_pictures
from fmwc.report.table import MISSING, Table

NAMES = {"checkerboard": "Checkerboard", "mnist": "Digits", "crystals": "Crystals"}
LEAD = "Uses of per-sample confidence, each compared with baselines. Options were chosen on other seeds."
INTERVALS = "Brackets: 90 % bootstrap intervals over samples. ±: standard deviation over seeds."
PAPER_GAIN = {"crystals": {"variance": "+6 to +17"}}  # over the paper's three modes, read from a figure
SIZES = {"samples": "samples", "edit": "edited", "steps": "swept", "guide": "guided"}
KEPT = ("retention_10%", "retention_50%", "retention_80%", "retention_90%")
# Headings of score columns, by positive class: the top of the ranking, and the rest.
ENDS = {
    "precision": {"bad": "most doubtful {}", "good": "surest {}"},
    "retention": {"bad": "surest {}", "good": "most doubtful {}"},
}


# ---- cells -------------------------------------------------------------------------------------------------------


def _number(value: float, digits: int, sign: bool = False) -> str:
    """Format a number with a typographic minus.

    >>> _number(-0.25, 1), _number(-0.01, 1), _number(0.5, 1, sign=True)
    ('−0.2', '0.0', '+0.5')
    """
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("+-")


def _interval(value: float | None, ends: Any, digits: int, scale: float = 1.0, sign: bool = False) -> str:
    """Format a number with its interval.

    >>> _interval(0.5, [0.25, 0.75], 0, 100.0)
    '50 [25, 75]'
    """
    if value is None or value != value:
        return MISSING
    middle = _number(scale * value, digits, sign)
    return f"{middle} [{', '.join(_number(scale * end, digits, sign) for end in ends)}]" if ends else middle


def entry_text(entry: Mapping[str, Any] | None, digits: int) -> str:
    """Format a metric as its mean with an interval, or with its standard deviation over seeds."""
    if not entry or entry["mean"] != entry["mean"]:
        return MISSING
    if "interval" in entry or entry["std"] is None:
        return _interval(entry["mean"], entry.get("interval"), digits)
    return f"{_number(entry['mean'], digits)} ± {_number(entry['std'], digits)}"


def _metrics(study: Study, numbers: Mapping[str, Any]) -> dict[str, str]:
    return {m.words: entry_text(numbers.get(name), m.digits) for name, m in study.metrics.items()}


# ---- tables ------------------------------------------------------------------------------------------------------


def _score_column(finds: str, number: str) -> tuple[str, float, int]:
    """Return the heading, scale and decimals of a column of the filter tables."""
    kind, separator, share = number.partition("_")
    if not separator:
        return {"auprc": ("AUPRC", 1.0, 3), "lift": ("AUPRC ÷ random", 1.0, 2)}[kind]
    return ENDS[kind][finds].format(share.replace("%", " %")), 100.0, 2 if kind == "retention" else 1


def _filter(study: Study) -> list[Table]:
    use = study.numbers["filter"]
    compared, finds = use["compared"], use["finds"]
    if not compared:
        return []

    def rows(columns: Sequence[str], value: str = "value", interval: str = "interval") -> list[dict[str, str]]:
        table = []
        for score, entries in compared.items():
            row = {"score": score}
            for column in columns:
                heading, scale, digits = _score_column(finds, column)
                entry = entries[column]
                row[heading] = _interval(entry.get(value), entry.get(interval), digits, scale, value == "difference")
            table.append(row)
        return table

    first, word = next(iter(compared)), {"bad": study.bad, "good": study.good}[finds]
    precise = [column for column in compared[first] if column.startswith("precision")]
    about = f"{use['samples']:,} samples, {100 * use['bad']:.2f} % {study.bad}. Shares are % {word}."
    return [
        Table(rows(["auprc", "lift", *precise]), f"Detection of {word} samples", f"{about} {INTERVALS}"),
        Table(rows(KEPT), "The other end of the ranking", f"Shares are % {word}."),
        Table(
            rows(["auprc", *precise, *KEPT], "difference", "difference_interval")[1:],
            f"Difference from {first}",
            "Paired: the intervals use the same bootstrap samples.",
        ),
    ]


def _trust(study: Study) -> list[Table]:
    use = study.numbers["trust"]
    certificates = [
        {
            f"requested: {study.bad} at most, %": f"{100 * p['risk']:.3g}",
            "labels": f"{p['labelled']:,}",
            "issued": f"{p['given']} of {p['splits']}",
            "violated, of those issued": f"{p['broken']} of {p['given']}",
            "violated, % of all splits": _number(100 * p["broken"] / p["splits"], 1),
            "allowed, %": _number(100 * p["allowed"], 0),
            f"{study.bad} among the kept, %": _interval(p.get("achieved"), p.get("achieved_range"), 2, 100.0),
            "kept, %": _interval(p["kept"], None, 1, 100.0),
        }
        for p in use["promises"]
    ]
    columns = (use["reliability"][name] for name in ("confidence", "success", "low", "high", "size"))
    reliable = [
        {"confidence": _number(c, 2), f"{study.good}, %": _interval(s, (low, high), 1, 100.0), "samples": f"{n:,}"}
        for c, s, low, high, n in zip(*columns, strict=True)
    ]
    note = (
        "Certificates for the default score, computed from labelled samples and tested on the other samples, over "
        "random splits. Certificates may be violated in at most the allowed share of all splits. Brackets: 5 % and "
        "95 % quantiles over splits."
    )
    return [
        *([Table(certificates, "Risk certificates", note)] if certificates else []),
        Table(reliable, "Success by confidence", "Brackets: exact 90 % intervals."),
    ]


def _edit(study: Study) -> list[Table]:
    paper = PAPER_GAIN.get(study.setting, {})
    tables = []
    for intent, rows in study.groups("edit").items():
        cells = []
        for _, when, n in rows:
            gain = MISSING if when == "random" else _interval(n["gain"], n["gain_interval"], 1, 100.0, sign=True)
            cell = {
                "time": time_label(when),
                "mean time": _number(n["time"], 2),
                "success, %": _interval(n["success"], n["interval"], 1, 100.0),
                "gain over random, points": gain,
            }
            if "useful" in n:
                cell["useful, %"] = _interval(n["useful"], n["useful_interval"], 1, 100.0)
            if "surest" in n:
                cell["success of the surest quarter, %"] = _interval(n["surest"], n["surest_interval"], 1, 100.0)
            cells.append({**cell, "paper, points": paper.get(when, MISSING)} if paper else cell)
        first = rows[0].numbers
        note = (
            f"Success: {study.intents[intent.partition(',')[0]]}. Noise scale {first['scale']:g}; "
            f"{first['samples']:,} samples × {first['replicates']} edits. {INTERVALS}"
        )
        if "useful" in first:
            note += (
                " Useful: the result is metastable, and another crystal of the same formula or another formula on the "
                "same prototype."
            )
        tables.append(Table(cells, f"Edits: {intent}", note))
    return tables


def _steps(study: Study) -> list[Table]:
    rows = study.rows("steps")
    counts = sorted({int(row.at) for row in rows})
    sweeps = {name: {int(row.at): row.numbers for row in group} for name, group in study.groups("steps").items()}

    def table(title: str, note: str, cell: Callable[[Mapping[str, Any], int], str]) -> Table:
        cells = {
            name: {str(n): cell(sweep[n], n) if n in sweep else MISSING for n in counts}
            for name, sweep in sweeps.items()
        }
        return Table([{"steps": name, **row} for name, row in cells.items()], title, note)

    def relative_time(numbers: Mapping[str, Any], n: int) -> str:
        uniform = sweeps["uniform"][n]["seconds"]
        return f"{numbers['seconds'] / uniform:.1f}×" if uniform and numbers["seconds"] else MISSING

    tables = []
    for name, metric in study.metrics.items():

        def quality(numbers: Mapping[str, Any], n: int, name: str = name, digits: int = metric.digits) -> str:
            return entry_text(numbers.get(name), digits)

        tables.append(table(f"Steps: {metric.words}", f"By number of steps; {metric.better}. {INTERVALS}", quality))
    note = "Wall-clock time. Controllers that read the variance during sampling take longer."
    return [*tables, table("Steps: time relative to uniform steps", note, relative_time)]


def _guide(study: Study) -> list[Table]:
    use = study.numbers["guide"]
    plain = use["none"]["seconds"]
    rows = [
        {"guidance": label, **_metrics(study, n), "time ÷ none": f"{n['seconds'] / plain:.1f}×" if plain else MISSING}
        for label, n in use.items()
    ]
    note = f"Guidance is labelled by strength and time window. {INTERVALS}"
    return [Table(rows, "Guidance", note)] if len(rows) > 1 else []


# ---- figures and page --------------------------------------------------------------------------------------------


class Use(NamedTuple):
    """A section: its title, a function that returns its tables, and the name, alt text and function of each figure."""

    title: str
    tables: Callable[[Study], list[Table]]
    plots: tuple[tuple[str, str, Callable[[Study], Figure | None]], ...] = ()


USES = {
    "filter": Use("Filter: keep the surest samples", _filter),
    "trust": Use(
        "Risk control: guarantee a failure rate",
        _trust,
        (
            ("reliability", "The rate of good samples by confidence.", figures.reliable),
            (
                "certificates",
                "Requested and achieved failure rates, share of violated certificates, and share of samples kept.",
                figures.certificates,
            ),
        ),
    ),
    "edit": Use("Edit: change samples at critical times", _edit),
    "steps": Use(
        "Steps: place steps by variance",
        _steps,
        (("steps", "Quality against the number of steps, for each controller.", figures.step_quality),),
    ),
    "guide": Use("Guide: steer away from uncertainty", _guide),
}


def _provenance(study: Study, use: str) -> str:
    """Return a one-line description of samples, seeds, commit, device and time of a use."""
    drawing = READINGS[use][0]
    pieces = [p for name, p in study.provenance["pieces"].items() if name.rpartition("-")[0] == drawing]
    commit, device, version = (
        ", ".join(sorted({str(p[key]) for p in pieces})) for key in ("commit", "device", "torch")
    )
    seeds = ", ".join(map(str, sorted(seed for p in pieces for seed in p["seeds"])))
    counts = " or ".join(f"{n:,}" for n in sorted({p["sizes"][SIZES[drawing]] for p in pieces}))
    edits = f" × {pieces[0]['sizes']['replicates']} edits" if drawing == "edit" else ""
    seconds = sum(p["seconds"] for p in pieces)
    return (
        f"{counts} samples{edits} per seed, seeds {seeds}; commit {commit}; {device}; torch {version}; "
        f"sampled in {seconds:.0f} s."
    )


def _section(study: Study, use: str) -> Section:
    plots = [(name, alt, draw(study)) for name, alt, draw in USES[use].plots]
    pictures = [Picture(name, alt, figure) for name, alt, figure in plots if figure]
    if use == "edit":
        pictures += [
            Picture(f"edited-{intent}", f"Samples and their edits: {intent}.", figure)
            for intent, figure in figures.edited_samples(study).items()
        ]
    facts = {"provenance": _provenance(study, use)}
    return Section(USES[use].title, pictures=pictures, tables=USES[use].tables(study), facts=facts, summary="Tables")


@from_results
def study_text(folder: Path) -> str:
    """Return the tables of a study as Markdown, from its numbers."""
    study = read_study(folder)
    lines = [
        f"# {_title(study)}",
        f"Generated by `python -m experiments study {study.setting}`. `python -m experiments report` on this folder "
        "regenerates the tables, the figures and the page.",
    ]
    for use in study.numbers:
        tables = (table.section("###") for table in USES[use].tables(study))
        lines += [f"## {USES[use].title}", *tables, _provenance(study, use)]
    return "\n\n".join(lines) + "\n"


def _title(study: Study) -> str:
    return f"{NAMES[study.setting]}: uses of confidence"


@from_results
def write_study(folder: Path) -> list[Path]:
    """Write `tables.md`, `figures/*.png` and `report.html` from a study's folder."""
    study = read_study(folder)
    sections = [_section(study, use) for use in study.numbers]
    tables = write_text(folder / "tables.md", study_text(folder))
    write_pictures(folder / "figures", sections)
    about = {k: str(v) for k, v in study.provenance.items() if k != "pieces"}
    sections.append(Section("Provenance", facts=about))
    page = write_page(folder / "report.html", _title(study), sections, lead=[LEAD])
    return [tables, folder / "figures", page]
