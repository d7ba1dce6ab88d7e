"""The tables of a study, by use of confidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from experiments.uses.folder import Study, format_number, interval_of, time_label
from fmwc.report.table import MISSING, Table

__all__ = ["TABLES", "entry_text"]

INTERVALS = "Brackets: 90 % bootstrap intervals over samples. ±: standard deviation over seeds."
PAPER_GAIN = {"crystals": {"variance": "+6 to +17"}}  # over its three modes, which it gives in a figure only
# Columns of a score that finds bad or good samples: the top of its ranking, and the rest.
ENDS = {
    "precision": {"bad": "most doubtful {}", "good": "surest {}"},
    "retention": {"bad": "surest {}", "good": "most doubtful {}"},
}
KEPT = ("retention_10%", "retention_50%", "retention_80%", "retention_90%")


# ---- entries -----------------------------------------------------------------------------------------------------


def _interval(value: float | None, ends: Any, digits: int, scale: float = 1.0, sign: bool = False) -> str:
    """
    >>> _interval(0.5, [0.25, 0.75], 0, 100.0)
    '50 [25, 75]'
    """
    if value is None or value != value:
        return MISSING
    middle = format_number(scale * value, digits, sign)
    return f"{middle} [{', '.join(format_number(scale * end, digits, sign) for end in ends)}]" if ends else middle


def entry_text(entry: Mapping[str, Any] | None, digits: int) -> str:
    """Format a metric: its mean with an interval, or with its spread over seeds."""
    if not entry or entry["mean"] != entry["mean"]:
        return MISSING
    if "interval" in entry:
        return _interval(entry["mean"], entry["interval"], digits)
    middle = format_number(entry["mean"], digits)
    return middle if interval_of(entry) is None else f"{middle} ± {format_number(entry['std'], digits)}"


def _metrics(study: Study, row: Mapping[str, Any]) -> dict[str, str]:
    return {m.words: entry_text(row.get(name), m.digits) for name, m in study.metrics.items()}


def _score_column(finds: str, number: str) -> tuple[str, float, int]:
    """Return heading, scale and digits of a column of the filter's tables."""
    kind, sign, share = number.partition("_")
    if not sign:
        return {"auprc": ("AUPRC", 1.0, 3), "lift": ("AUPRC ÷ random", 1.0, 2)}[kind]
    return ENDS[kind][finds].format(share.replace("%", " %")), 100.0, 2 if kind == "retention" else 1


# ---- tables ------------------------------------------------------------------------------------------------------


def _filter(study: Study) -> list[Table]:
    use = study.numbers["filter"]
    compared, finds = use["compared"], use["finds"]
    if not compared:
        return []

    def rows(numbers: list[str], value: str = "") -> list[dict[str, str]]:
        found = []
        for score, entries in compared.items():
            row = {"score": score}
            for number in numbers:
                heading, scale, digits = _score_column(finds, number)
                entry = entries[number]
                ends = entry.get(f"{value}_interval" if value else "interval")
                row[heading] = _interval(entry.get(value or "value"), ends, digits, scale, bool(value))
            found.append(row)
        return found

    first, word = next(iter(compared)), {"bad": study.bad, "good": study.good}[finds]
    precise = [number for number in compared[first] if number.startswith("precision")]
    what = f"{use['samples']:,} samples, {100 * use['bad']:.2f} % {study.bad}. Shares are % {word}."
    return [
        Table(rows(["auprc", "lift", *precise]), f"Detection of {word} samples", f"{what} {INTERVALS}"),
        Table(rows(list(KEPT)), "The other end of the ranking", f"Shares are % {word}."),
        Table(
            rows(["auprc", *precise, *KEPT], "difference")[1:],
            f"Difference to {first}",
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
            "violated, % of all splits": format_number(100 * p["broken"] / p["splits"], 1),
            "allowed, %": format_number(100 * p["allowed"], 0),
            f"{study.bad} among the kept, %": _interval(p.get("achieved"), p.get("achieved_range"), 2, 100.0),
            "kept, %": _interval(p["kept"], None, 1, 100.0),
        }
        for p in use["promises"]
    ]
    bins = use["reliability"]
    columns = (bins[name] for name in ("confidence", "success", "low", "high", "size"))
    reliable = [
        {
            "confidence": format_number(c, 2),
            f"{study.good}, %": _interval(s, (low, high), 1, 100.0),
            "samples": f"{n:,}",
        }
        for c, s, low, high, n in zip(*columns, strict=True)
    ]
    note = (
        "Certificates by the field's own score, computed from labelled samples and tested on the others, over random "
        "splits. The guarantee is over all splits: at most the allowed share of them may have a violated certificate. "
        "Brackets: 5 % and 95 % quantiles of the splits."
    )
    return [
        *([Table(certificates, "Risk certificates", note)] if certificates else []),
        Table(reliable, "Success by confidence", "Brackets: exact 90 % intervals."),
    ]


def _edit(study: Study) -> list[Table]:
    paper = PAPER_GAIN.get(study.setting, {})
    tables = []
    for intent, rows in study.edits.items():
        cells = []
        for _, when, n in rows:
            gain = MISSING if when == "random" else _interval(n["gain"], n["gain_interval"], 1, 100.0, sign=True)
            cell = {
                "time": time_label(when),
                "mean time": format_number(n["time"], 2),
                "success, %": _interval(n["success"], n["interval"], 1, 100.0),
                "gain over random, points": gain,
            }
            if "surest" in n:
                cell["of the surest quarter, %"] = _interval(n["surest"], n["surest_interval"], 1, 100.0)
            cells.append({**cell, "paper, points": paper.get(when, MISSING)} if paper else cell)
        first = rows[0].numbers
        note = (
            f"Success: {study.intents[intent.partition(',')[0]].words}. Noise scale {first['scale']:g}; "
            f"{first['samples']:,} samples × {first['replicates']} edits. {INTERVALS}"
        )
        tables.append(Table(cells, f"Edits: {intent}", note))
    return tables


def _steps(study: Study) -> list[Table]:
    sweeps = study.sweeps
    counts = sorted({n for row in sweeps.values() for n in row})

    def table(title: str, note: str, cell: Callable[[Mapping[int, Any], int], str]) -> Table:
        rows = [{"steps": name, **{f"{n}": cell(row, n) for n in counts}} for name, row in sweeps.items()]
        return Table(rows, title, note)

    def relative_time(row: Mapping[int, Any], n: int) -> str:
        known = n in row and row[n]["seconds"] and sweeps["uniform"][n]["seconds"]
        return f"{row[n]['seconds'] / sweeps['uniform'][n]['seconds']:.1f}×" if known else MISSING

    tables = []
    for name, metric in study.metrics.items():

        def quality(row: Mapping[int, Any], n: int, name: str = name, digits: int = metric.digits) -> str:
            return entry_text(row.get(n, {}).get(name), digits)

        tables.append(table(f"Steps: {metric.words}", f"By number of steps; {metric.better}. {INTERVALS}", quality))
    note = "Wall time. Controllers that read the variance while sampling take longer."
    return [*tables, table("Steps: time relative to uniform steps", note, relative_time)]


def _rewind(study: Study) -> list[Table]:
    rows = [
        {
            "extra evaluations, requested": f"+{extra}" if extra else MISSING,
            "method": method,
            "evaluations per sample": format_number(n["evaluations"], 1),
            **_metrics(study, n),
            "changed, %": _interval(n.get("changed"), None, 1, 100.0),
            "seconds": format_number(n["seconds"], 2),
        }
        for extra, group in study.rewinds.items()
        for method, n in group.items()
    ]
    return [Table(rows, "Rewinding, and other methods of the same cost", INTERVALS)]


def _guide(study: Study) -> list[Table]:
    use = study.numbers["guide"]
    plain = use["none"]["seconds"]
    rows = [
        {"guidance": label, **_metrics(study, n), "time ÷ none": f"{n['seconds'] / plain:.1f}×" if plain else MISSING}
        for label, n in use.items()
    ]
    note = f"Guidance is named by its strength and its interval of times. {INTERVALS}"
    return [Table(rows, "Guidance", note)] if len(rows) > 1 else []


TABLES: Mapping[str, Callable[[Study], list[Table]]] = {
    "filter": _filter,
    "trust": _trust,
    "edit": _edit,
    "steps": _steps,
    "rewind": _rewind,
    "guide": _guide,
}
