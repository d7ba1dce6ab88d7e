"""The tables of a study: each a function of what was found, listed in TABLES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fmwc.report.paper.table import NONE, PERCENT
from fmwc.report.uses.folder import Study, plain_number, spread, when_words

__all__ = ["TABLES", "UseTable", "entry_text", "signed"]

Rows = list[dict[str, str]]

INTERVALS = "In brackets: 90 % intervals from resampled samples; ± is the standard deviation over seeds."
PAPER_GAIN = {"crystals": {"variance": "+6 to +17"}}  # over its three modes, which it gives in a figure only
# How a score is read that is asked to find the bad, or the good: columns of the top of its ranking, and of the rest.
ENDS = {
    "precision": {"bad": "most doubtful {}", "good": "surest {}"},
    "retention": {"bad": "surest {}", "good": "most doubtful {}"},
}
LEFT = ("retention_10%", "retention_50%", "retention_80%", "retention_90%")


class UseTable(NamedTuple):
    """A table: what it is, how to read it, and its rows from column to cell."""

    title: str
    note: str
    rows: Rows


# ---- entries -----------------------------------------------------------------------------------------------------


def signed(value: float, digits: int) -> str:
    """
    >>> signed(0.5, 1), signed(-0.5, 1), signed(0, 1)
    ('+0.5', '−0.5', '0.0')
    """
    text = plain_number(value, digits)
    return f"+{text}" if float(f"{value:.{digits}f}") > 0 else text


def _interval(
    value: float | None, ends: Any, digits: int, scale: float = 1.0, write: Callable[[float, int], str] = plain_number
) -> str:
    """
    >>> _interval(0.5, [0.25, 0.75], 0, 100.0)
    '50 [25, 75]'
    """
    if value is None or value != value:
        return NONE
    middle = write(scale * value, digits)
    return f"{middle} [{', '.join(write(scale * end, digits) for end in ends)}]" if ends else middle


def entry_text(entry: Mapping[str, Any] | None, digits: int) -> str:
    """A metric of one row: its mean with an interval, or with its spread over seeds."""
    if not entry or entry["mean"] != entry["mean"]:
        return NONE
    if "interval" in entry:
        return _interval(entry["mean"], entry["interval"], digits)
    middle = plain_number(entry["mean"], digits)
    return middle if spread(entry) is None else f"{middle} ± {plain_number(entry['std'], digits)}"


def _metrics(study: Study, row: Mapping[str, Any]) -> dict[str, str]:
    return {m.words: entry_text(row.get(name), m.digits) for name, m in study.metrics.items()}


# ---- tables ------------------------------------------------------------------------------------------------------


def _of_score(finds: str, number: str) -> tuple[str, float, int]:
    """A column of the filter's tables: its heading, scale and digits."""
    kind, sign, share = number.partition("_")
    if not sign:
        return {"auprc": ("AUPRC", 1.0, 3), "lift": ("AUPRC ÷ random", 1.0, 2)}[kind]
    return ENDS[kind][finds].format(share.replace("%", " %")), PERCENT, 2 if kind == "retention" else 1


def _filter(study: Study) -> list[UseTable]:
    use = study.numbers["filter"]
    compared = use["compared"]
    if not compared:
        return []
    first, finds = next(iter(compared)), use["finds"]

    def rows(numbers: list[str], value: str, write: Callable[[float, int], str]) -> Rows:
        found = []
        for score, entries in compared.items():
            row = {"score": score}
            for number in numbers:
                heading, scale, digits = _of_score(finds, number)
                entry = entries[number]
                ends = entry.get("difference_interval" if value == "difference" else "interval")
                row[heading] = _interval(entry.get(value), ends, digits, scale, write)
            found.append(row)
        return found

    word = {"bad": study.bad, "good": study.good}[finds]
    precise = [number for number in compared[first] if number.startswith("precision")]
    what = f"{use['samples']:,} samples, {PERCENT * use['bad']:.2f} % {study.bad}. Below a share: % {word} in it."
    others = rows(["auprc", *precise, *LEFT], "difference", signed)[1:]
    return [
        UseTable(
            f"What each score finds: {word}",
            f"{what} {INTERVALS}",
            rows(["auprc", "lift", *precise], "value", plain_number),
        ),
        UseTable("What is left at the other end", f"% {word}.", rows(list(LEFT), "value", plain_number)),
        UseTable(f"Difference to {first}", "On the same resamples, so that it is paired.", others),
    ]


def _trust(study: Study) -> list[UseTable]:
    use = study.numbers["trust"]
    promises = [
        {
            f"asked: {study.bad} at most, %": f"{PERCENT * p['risk']:.3g}",
            "labels": f"{p['labelled']:,}",
            "given": f"{p['given']} of {p['splits']}",
            "broken, of those given": f"{p['broken']} of {p['given']}",
            "broken, % of all tries": plain_number(PERCENT * p["broken"] / p["splits"], 1),
            "allowed, %": plain_number(PERCENT * p["allowed"], 0),
            f"{study.bad} among the kept, %": _interval(p.get("achieved"), p.get("achieved_range"), 2, PERCENT),
            "kept, %": _interval(p["kept"], None, 1, PERCENT),
        }
        for p in use["promises"]
    ]
    bins = use["reliability"]
    reliable = [
        {
            "confidence": plain_number(c, 2),
            f"{study.good}, %": _interval(s, (low, high), 1, PERCENT),
            "samples": f"{n:,}",
        }
        for c, s, low, high, n in zip(*(bins[k] for k in ("confidence", "success", "low", "high", "size")), strict=True)
    ]
    note = (
        "Promises by the field's own score, each made from labelled samples and held against the rest, over random "
        "splits. The promise is about all tries: it may be given and broken in at most the allowed share of them. Of "
        "the few given where it is hard to give any, many are broken. Brackets: 5 % and 95 % of the splits."
    )
    given = [UseTable("Promises", note, promises)] if promises else []
    return [*given, UseTable("Success by confidence", "Brackets: exact 90 % intervals.", reliable)]


def _edit(study: Study) -> list[UseTable]:
    paper = PAPER_GAIN.get(study.setting, {})
    tables = []
    for intent, rows in study.edits.items():
        meant = study.intents[intent.partition(",")[0]]
        cells = []
        for _, when, n in rows:
            gain = NONE if when == "random" else _interval(n["gain"], n["gain_interval"], 1, PERCENT, signed)
            cell = {
                "when": when_words(when),
                "mean time": plain_number(n["time"], 2),
                "success, %": _interval(n["success"], n["interval"], 1, PERCENT),
                "gain over random, points": gain,
            }
            if "surest" in n:
                cell["of the surest quarter, %"] = _interval(n["surest"], n["surest_interval"], 1, PERCENT)
            cells.append({**cell, "paper, points": paper.get(when, NONE)} if paper else cell)
        counts = f"{rows[0].numbers['samples']:,} samples × {rows[0].numbers['replicates']} edits"
        note = f"Success: {meant.words}. Noise {rows[0].numbers['scale']:g}; {counts}. {INTERVALS}"
        tables.append(UseTable(f"Edits: {intent}", note, cells))
    return tables


def _steps(study: Study) -> list[UseTable]:
    sweeps = study.sweeps
    counts = sorted({n for row in sweeps.values() for n in row})
    tables = []
    for name, metric in study.metrics.items():
        rows = [
            {"steps": label, **{f"{n}": entry_text(row.get(n, {}).get(name), metric.digits) for n in counts}}
            for label, row in sweeps.items()
        ]
        better = "more" if metric.higher else "less"
        tables.append(UseTable(f"Steps: {metric.words}", f"By how many steps; {better} is better. {INTERVALS}", rows))
    uniform = sweeps["uniform"]

    def over(n: int, row: Mapping[int, Mapping[str, Any]]) -> str:
        known = n in row and row[n]["seconds"] and uniform[n]["seconds"]
        return f"{row[n]['seconds'] / uniform[n]['seconds']:.1f}×" if known else NONE

    times = [{"steps": label, **{f"{n}": over(n, row) for n in counts}} for label, row in sweeps.items()]
    note = "Wall time; those that read the variance as they go pay for it."
    return [*tables, UseTable("Steps: time over uniform's", note, times)]


def _rewind(study: Study) -> list[UseTable]:
    rows = [
        {
            "evaluations more, asked": f"+{extra}" if extra else NONE,
            "way": method,
            "evaluations a sample": plain_number(n["evaluations"], 1),
            **_metrics(study, n),
            "changed, %": _interval(n.get("changed"), None, 1, PERCENT),
            "seconds": plain_number(n["seconds"], 2),
        }
        for extra, group in study.rewinds.items()
        for method, n in group.items()
    ]
    return [UseTable("Rewinding, and other ways to spend as much", INTERVALS, rows)]


def _guide(study: Study) -> list[UseTable]:
    use = study.numbers["guide"]
    none = use["none"]["seconds"]
    rows = [
        {"guidance": label, **_metrics(study, n), "time ÷ none's": f"{n['seconds'] / none:.1f}×" if none else NONE}
        for label, n in use.items()
    ]
    note = f"A strength, and the times between which it steers. {INTERVALS}"
    return [UseTable("Guidance", note, rows)] if len(rows) > 1 else []


TABLES: Mapping[str, Callable[[Study], list[UseTable]]] = {
    "filter": _filter,
    "trust": _trust,
    "edit": _edit,
    "steps": _steps,
    "rewind": _rewind,
    "guide": _guide,
}
