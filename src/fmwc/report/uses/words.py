"""What a study found, in a sentence or two for each use; every word of them follows from its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fmwc.report.uses.folder import MetricWords, Study, plain_number, when_words
from fmwc.report.uses.tables import signed

__all__ = ["SENTENCES", "sentence"]

TOGETHER = "\u00a0"  # a number and its unit stay on one line
KEPT = {"bad": "retention_80%", "good": "precision_10%"}


def _percent(value: float) -> str:
    """
    >>> _percent(0.035).split(), _percent(0.0004).split()
    (['3.5', '%'], ['0.04', '%'])
    """
    digits = 2 if 0 < abs(value) < 0.001 else 1
    return f"{100 * value:.{digits}f}{TOGETHER}%"


def _apart(interval: list[float]) -> bool:
    """Whether a difference is told from none."""
    return interval[0] > 0 or interval[1] < 0


def _points(n: Mapping[str, Any]) -> str:
    """A gain in points with its interval, and whether it could be chance."""
    low, high = (signed(100 * end, 1) for end in n["gain_interval"])
    clear = "" if _apart(n["gain_interval"]) else ", which may be chance"
    return f"{signed(100 * n['gain'], 1)} points, 90 % interval {low} to {high}{clear}"


def _value(metric: MetricWords, entry: Mapping[str, Any]) -> str:
    unit = metric.words.partition(", ")[2].partition(" (")[0]
    return f"{metric.number(entry['mean'])}{TOGETHER}{unit}".rstrip()


def _overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two entries' intervals meet; of entries without intervals nothing is claimed."""
    if "interval" not in a or "interval" not in b:
        return False
    return a["interval"][0] <= b["interval"][1] and b["interval"][0] <= a["interval"][1]


# ---- uses --------------------------------------------------------------------------------------------------------


def _filter(study: Study) -> str:
    use = study.numbers["filter"]
    start = f"{_percent(use['bad'])} of {use['samples']:,} samples count as {study.bad}"
    compared = use["compared"]
    if not compared:
        return f"{start}, so there is nothing for a score to find."
    own = next(iter(compared))
    number = compared[own][KEPT[use["finds"]]]
    share = KEPT[use["finds"]].partition("_")[2].replace("%", f"{TOGETHER}%")
    word = {"bad": study.bad, "good": study.good}[use["finds"]]
    does = "do" if word == study.bad else f"count as {word}"
    kept = f"of the surest {share} by {own} {_percent(number['value'])} {does}"
    best = max(compared, key=lambda name: compared[name]["auprc"]["value"])
    auprc = f"AUPRC {compared[own]['auprc']['value']:.2f}, {compared[own]['lift']['value']:.1f} times a random order's"
    if best == own:
        return f"{start}; {kept} ({auprc}). No other score finds them better."
    entry = compared[best]["auprc"]
    clear = "" if _apart(entry["difference_interval"]) else ", which may be chance"
    more = f"{best} finds them better, by {signed(entry['difference'], 2)} in AUPRC{clear}"
    return f"{start}; {kept} ({auprc}). {more[0].upper() + more[1:]}."


def _trust(study: Study) -> str:
    use = study.numbers["trust"]
    success = use["reliability"]["success"]
    ends = (
        f"{_percent(success[0])} of the least sure samples are {study.good}, and {_percent(success[-1])} of the surest"
    )
    tried = [p for p in use["promises"] if p["given"]]
    if not tried:
        return f"{ends}. There are too few samples for a promise."
    worst = max(use["promises"], key=lambda p: p["broken"] / p["splits"])
    held = worst["broken"] / worst["splits"] <= worst["allowed"]
    best = max(tried, key=lambda p: (p["given"], p["kept"]))
    given = (
        f"at most {100 * best['risk']:.3g}{TOGETHER}% {study.bad} can be promised from {best['labelled']:,} labels in "
        f"{best['given']} of {best['splits']} tries, keeping {_percent(best['kept'])}"
    )
    broken = (
        f"broken in {_percent(worst['broken'] / worst['splits'])} of all tries, {_percent(worst['allowed'])} allowed"
    )
    return f"{ends}. Promises {'hold' if held else 'do not hold'} (at worst {broken}): {given}."


def _gain(row: dict[str, Any]) -> str:
    return f"{_percent(row['success'])} ({_points(row)})"


def _edit(study: Study) -> str:
    parts = []
    for intent, rows in study.edits.items():
        named = {row.when: row.numbers for row in rows}
        best = max((r for r in rows if r.when != "random"), key=lambda r: r.numbers["success"])
        text = (
            f"{intent}: {_percent(named['random']['success'])} of edits at random times succeed, "
            f"{_percent(named['variance']['success'])} at the paper's t* ({_points(named['variance'])})"
        )
        chosen = "" if study.wide else study.intents[intent].chosen
        if chosen in named:
            text += f"; {when_words(chosen)}, as the validation seed had it, {_gain(named[chosen])}"
            if "surest" in named[chosen]:
                text += f", and {_percent(named[chosen]['surest'])} of the surest quarter of each sample's"
                text += f" (at random times {_percent(named['random']['surest'])})"
        if best.when not in ("variance", chosen):
            text += f"; the highest of the {len(rows) - 1} is {when_words(best.when)} with {_gain(best.numbers)}"
        parts.append(f"{text}.")
    return " ".join(part[0].upper() + part[1:] for part in parts)


def _steps(study: Study) -> str:
    name, metric = study.first
    sweeps = {label: rows for label, rows in study.sweeps.items() if not label.startswith("blind")}
    fewest = min(sweeps["uniform"])
    there = {label: rows[fewest][name] for label, rows in sweeps.items() if fewest in rows}
    best = (max if metric.higher else min)(there, key=lambda label: there[label]["mean"])
    text = f"With {fewest} uniform steps, {metric.short} is {_value(metric, there['uniform'])}"
    if best == "uniform":
        return f"{text}; no other way to place them does better."
    paper = [f"{label} {_value(metric, there[label])}" for label in there if "(paper)" in label]
    beside = f"; {', '.join(paper)}" if paper else ""
    chance = ", their intervals overlapping" if _overlap(there[best], there["uniform"]) else ""
    return f"{text}{beside}; the best of {len(there)}, {best}, has {_value(metric, there[best])}{chance}."


def _rewind(study: Study) -> str:
    name, metric = study.first
    groups = study.rewinds
    plain = groups.get("", {}).get("plain")
    extra = "5" if "5" in groups else next((e for e in groups if e), "")
    if plain is None or "rewind" not in groups.get(extra, {}):
        return ""
    rows = {way: n[name] for way, n in groups[extra].items()}
    others = {way: entry for way, entry in rows.items() if way != "rewind"}
    best = (max if metric.higher else min)(others, key=lambda way: others[way]["mean"])
    chance = ", within their intervals" if _overlap(rows["rewind"], others[best]) else ""
    return (
        f"{extra} evaluations more a sample, spent on rewinding the most doubtful, take {metric.short} from "
        f"{_value(metric, plain[name])} to {_value(metric, rows['rewind'])}; the best other way to spend them, {best}, "
        f"to {_value(metric, others[best])}{chance}."
    )


def _guide(study: Study) -> str:
    use = study.numbers["guide"]
    (name, metric), *others = study.metrics.items()
    ways = {label: row for label, row in use.items() if label != "none"}
    if not ways:
        return "Guidance was not tried."
    best = (max if metric.higher else min)(ways, key=lambda label: ways[label][name]["mean"])
    costs = [
        f"{m.short} from {_value(m, use['none'][other])} to {_value(m, ways[best][other])}"
        for other, m in others
        if m.better(use["none"][other]["mean"], ways[best][other]["mean"])
        and _value(m, use["none"][other]) != _value(m, ways[best][other])
    ]
    slower = ways[best]["seconds"] / use["none"]["seconds"] if use["none"]["seconds"] else float("nan")
    at_cost = f", at the cost of {' and '.join(costs)}" if costs else ""
    return (
        f"Guidance {best} takes {metric.short} from {_value(metric, use['none'][name])} to "
        f"{_value(metric, ways[best][name])}{at_cost}; it takes {plain_number(slower, 1)} times as long."
    )


SENTENCES: Mapping[str, Callable[[Study], str]] = {
    "filter": _filter,
    "trust": _trust,
    "edit": _edit,
    "steps": _steps,
    "rewind": _rewind,
    "guide": _guide,
}


def sentence(study: Study, use: str) -> str:
    return SENTENCES[use](study)
