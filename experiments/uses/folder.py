"""Reading the folder of a study: its numbers, their format, their provenance, and samples to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.common.store import read_result
from experiments.uses.drawing import Drawn, load_drawn
from experiments.uses.evaluate import READINGS
from experiments.uses.study import NUMBERS, drawn_at, judged_at, load_outcomes
from fmwc.errors import CheckpointError

__all__ = ["Edit", "Intent", "MetricFormat", "Study", "format_number", "interval_of", "read_study", "time_label"]

TIMES = {
    "random": "at random times",
    "variance": "at t*, the peak of the variance",
    "transported": "at the peak of the transported variance",
}
SIZE = {"samples": "samples", "edit": "edited", "steps": "swept", "rewind": "rewound", "guide": "guided"}
MINUS = "−"


def format_number(value: float, digits: int, sign: bool = False) -> str:
    """Format a number with a typographic minus.

    >>> format_number(-0.25, 1), format_number(-0.01, 1), format_number(0.5, 1, sign=True)
    ('−0.2', '0.0', '+0.5')
    """
    text = f"{value:{'+' if sign else ''}.{digits}f}"
    return text.replace("-", MINUS) if float(text) else text.lstrip("+-")


def time_label(when: str) -> str:
    """Describe the time of an edit.

    >>> time_label("0.2 before variance"), time_label("t = 0.4")
    ('0.2 before t*', 'at t = 0.4')
    """
    before, sign, peak = when.partition(" before ")
    if sign:
        return f"{before} before {'t*' if peak == 'variance' else 'the transported peak'}"
    return TIMES.get(when, f"at {when}")


class MetricFormat(NamedTuple):
    """How a metric is written: its name, whether higher is better, and its digits after the point."""

    words: str
    higher: bool
    digits: int

    @property
    def better(self) -> str:
        return "higher is better" if self.higher else "lower is better"


class Edit(NamedTuple):
    """One row of edits: the intent, the time (such as `random` or `t = 0.4`), and the numbers."""

    intent: str
    when: str
    numbers: dict[str, Any]


class Intent(NamedTuple):
    """A kind of edit: what counts as a success, and the time chosen on the validation seed."""

    words: str
    chosen: str


@dataclass(frozen=True)
class Study:
    """The results of a study.

    Arguments:
        folder: The folder.
        setting: Name of the experiment.
        bad, good: The words for bad and for other samples.
        metrics: Metrics of sets of samples; options are chosen by the first.
        intents: Kinds of edits.
        numbers: Numbers by use.
        origin: Their provenance.
    """

    folder: Path
    setting: str
    bad: str
    good: str
    metrics: dict[str, MetricFormat]
    intents: dict[str, Intent]
    numbers: dict[str, Any]
    origin: dict[str, Any]

    @property
    def wide(self) -> bool:
        """Whether the study covers everything that was tried on the validation seed."""
        return bool(self.origin["wide"])

    @property
    def edits(self) -> dict[str, list[Edit]]:
        """Rows of edits by intent."""
        found: dict[str, list[Edit]] = {}
        for label, numbers in self.numbers["edit"].items():
            intent, _, when = label.rpartition(", ")
            found.setdefault(intent, []).append(Edit(intent, when, numbers))
        return found

    @property
    def sweeps(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Numbers by controller and number of steps."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for label, numbers in self.numbers["steps"].items():
            controller, _, steps = label.rpartition(", ")
            found.setdefault(controller, {})[int(steps)] = numbers
        return found

    @property
    def rewinds(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Numbers by extra evaluations per sample (empty for none) and method."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for label, numbers in self.numbers["rewind"].items():
            method, sign, extra = label.rpartition(", +")
            method, extra = (method, extra) if sign else (label, "")
            found.setdefault(extra, {})[method] = numbers
        return found

    def provenance(self, use: str) -> str:
        """Return samples, seeds, commit, device and time of an experiment on one line."""
        drawn = READINGS[use][0]
        pieces = [p for name, p in self.origin["pieces"].items() if name.rpartition("-")[0] == drawn]
        each = {key: ", ".join(sorted({str(p[key]) for p in pieces})) for key in ("commit", "device", "torch")}
        seeds = sorted(seed for p in pieces for seed in p["seeds"])
        counts = sorted({p["sizes"][SIZE[drawn]] for p in pieces})
        replicates = f" × {pieces[0]['sizes']['replicates']} edits" if drawn == "edit" else ""
        return (
            f"{' or '.join(f'{n:,}' for n in counts)} samples{replicates} per seed, "
            f"seeds {', '.join(map(str, seeds))}; commit {each['commit']}; {each['device']}; torch {each['torch']}; "
            f"sampled in {sum(p['seconds'] for p in pieces):.0f} s."
        )

    def samples(self, use: str) -> tuple[dict[str, Drawn], dict[str, dict[str, np.ndarray]]] | None:
        """Return the samples of the first seed and their outcomes, or `None` if the folder has the numbers only."""
        seed, drawn = self.origin["seeds"][0], READINGS[use][0]
        path = drawn_at(self.folder, drawn, seed)
        found = load_outcomes(judged_at(self.folder, drawn, seed))
        return (load_drawn(path), found) if path.exists() and found is not None else None


def read_study(folder: Path) -> Study:
    """Read the folder of `python -m experiments study`."""
    path = folder / NUMBERS
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {NUMBERS}; run python -m experiments study first")
    found: Mapping[str, Any] = read_result(path)
    try:
        return Study(
            folder,
            found["setting"],
            found["bad"],
            found["good"],
            {name: MetricFormat(**words) for name, words in found["metrics"].items()},
            {
                name: Intent(i["words"], f"{i.get('before', 0.2):g} before {i.get('peak', 'transported')}")
                for name, i in found["intents"].items()
            },
            found["numbers"],
            found["provenance"],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has an older format; run python -m experiments study again") from error


def interval_of(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the interval of an entry, or one standard deviation over seeds to either side; `None` for one seed."""
    if entry.get("interval"):
        low, high = entry["interval"]
        return low, high
    if entry.get("std") is None:
        return None
    return entry["mean"] - entry["std"], entry["mean"] + entry["std"]
