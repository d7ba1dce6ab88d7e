"""A study's folder, read: its numbers, the words for them, where they come from, and samples to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fmwc.errors import CheckpointError
from fmwc.recipes.comparing import read_piece
from fmwc.recipes.uses.drawing import Drawn, load_drawn
from fmwc.recipes.uses.reading import READINGS
from fmwc.recipes.uses.study import NUMBERS, drawn_at, judged_at, load_outcomes

__all__ = ["Edit", "MetricWords", "Study", "plain_number", "read_study", "spread", "when_words"]

WHEN = {
    "random": "at random times",
    "variance": "at t*, the variance's peak",
    "transported": "at the transported variance's peak",
}
SIZE = {"samples": "samples", "edit": "edited", "steps": "swept", "rewind": "rewound", "guide": "guided"}
MINUS = "−"


def plain_number(value: float, digits: int) -> str:
    """A number as it is set in a table, its minus as long as a plus.

    >>> plain_number(-0.25, 1), plain_number(-0.01, 1)
    ('−0.2', '0.0')
    """
    text = f"{value:.{digits}f}"
    return text.replace("-", MINUS) if float(text) else text.lstrip("-")


def when_words(when: str) -> str:
    """When an edit was made, in words.

    >>> when_words("0.2 before variance"), when_words("t = 0.4")
    ('0.2 before t*', 'at t = 0.4')
    """
    before, sign, kind = when.partition(" before ")
    if sign:
        return f"{before} before {'t*' if kind == 'variance' else 'the transported peak'}"
    return WHEN.get(when, f"at {when}")


class MetricWords(NamedTuple):
    """How a metric is spoken of: its name in a table, whether more is better, digits after the point."""

    words: str
    higher: bool
    digits: int

    @property
    def short(self) -> str:
        """Its name in a sentence.

        >>> MetricWords("in the emptiest square, % (12.5)", True, 1).short
        'the share in the emptiest square'
        """
        name, _, unit = self.words.partition(",")
        return f"the share {name}" if "%" in unit else name

    def better(self, a: float, b: float) -> bool:
        return a > b if self.higher else a < b

    def number(self, value: float) -> str:
        return plain_number(value, self.digits)


class Edit(NamedTuple):
    """One row of edits: what was meant, when it was done (`random`, `t = 0.4`), and its numbers."""

    intent: str
    when: str
    numbers: dict[str, Any]


class Meant(NamedTuple):
    """A kind of edit: what counts as a success, and when the validation seed says to edit."""

    words: str
    chosen: str


def _meant(words: str, before: float = 0.2, peak: str = "transported", **others: Any) -> Meant:
    return Meant(words, f"{before:g} before {peak}")


@dataclass(frozen=True)
class Study:
    """Creates what was found in a folder.

    Arguments:
        folder: The folder.
        setting: The setting's name.
        bad, good: Words for samples to discard, and for the others.
        metrics: What was read of sets of samples; the first is the one that things are chosen by.
        intents: Kinds of edits.
        numbers: Of each experiment.
        origin: Where they come from.
    """

    folder: Path
    setting: str
    bad: str
    good: str
    metrics: dict[str, MetricWords]
    intents: dict[str, Meant]
    numbers: dict[str, Any]
    origin: dict[str, Any]

    @property
    def wide(self) -> bool:
        """Whether it is of everything that was tried, on the validation seed."""
        return bool(self.origin["wide"])

    @property
    def first(self) -> tuple[str, MetricWords]:
        return next(iter(self.metrics.items()))

    @property
    def edits(self) -> dict[str, list[Edit]]:
        """Rows of edits by what was meant, and at which scale where several were tried."""
        found: dict[str, list[Edit]] = {}
        for label, numbers in self.numbers["edit"].items():
            intent, _, when = label.rpartition(", ")
            found.setdefault(intent, []).append(Edit(intent, when, numbers))
        return found

    @property
    def sweeps(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Rows of steps: controller to N to numbers."""
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for label, numbers in self.numbers["steps"].items():
            controller, _, steps = label.rpartition(", ")
            found.setdefault(controller, {})[int(steps)] = numbers
        return found

    @property
    def rewinds(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Rows of rewinding: extra evaluations a sample (empty for none) to method to numbers."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for label, numbers in self.numbers["rewind"].items():
            method, sign, extra = label.rpartition(", +")
            method, extra = (method, extra) if sign else (label, "")
            found.setdefault(extra, {})[method] = numbers
        return found

    def pieces(self, use: str) -> list[dict[str, Any]]:
        """Where the samples of an experiment come from, a seed each."""
        drawn = READINGS[use][0]
        return [p for name, p in self.origin["pieces"].items() if name.rpartition("-")[0] == drawn]

    def provenance(self, use: str) -> str:
        """One line: commit, device, seeds, samples and seconds of an experiment."""
        pieces, drawn = self.pieces(use), READINGS[use][0]
        each = {key: sorted({str(p[key]) for p in pieces}) for key in ("commit", "device", "torch")}
        seeds = sorted(seed for p in pieces for seed in p["seeds"])
        counts = sorted({p["sizes"][SIZE[drawn]] for p in pieces})
        replicated = f" × {pieces[0]['sizes']['replicates']} edits" if drawn == "edit" else ""
        return (
            f"{' or '.join(f'{n:,}' for n in counts)} samples{replicated} a seed, seeds {', '.join(map(str, seeds))}; "
            f"commit {', '.join(each['commit'])}; {', '.join(each['device'])}; torch {', '.join(each['torch'])}; "
            f"drawn in {sum(p['seconds'] for p in pieces):.0f} s."
        )

    def samples(self, use: str) -> tuple[dict[str, Drawn], dict[str, dict[str, np.ndarray]]] | None:
        """What the first seed drew for an experiment, and what became of it; none where only the numbers are here."""
        seed, drawn = self.origin["seeds"][0], READINGS[use][0]
        path = drawn_at(self.folder, drawn, seed)
        found = load_outcomes(judged_at(self.folder, drawn, seed))
        return (load_drawn(path), found) if path.exists() and found is not None else None


def read_study(folder: Path) -> Study:
    """Reads the folder that `fmwc study` filled."""
    path = folder / NUMBERS
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {NUMBERS}; run fmwc study first")
    found: Mapping[str, Any] = read_piece(path)
    try:
        return Study(
            folder,
            found["setting"],
            found["bad"],
            found["good"],
            {name: MetricWords(**words) for name, words in found["metrics"].items()},
            {name: _meant(**intent) for name, intent in found["intents"].items()},
            found["numbers"],
            found["provenance"],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is of an older study; read it again with fmwc study") from error


def spread(entry: Mapping[str, Any]) -> tuple[float, float] | None:
    """The ends of an entry's interval, or one standard deviation over seeds to either side; none for one seed."""
    if entry.get("interval"):
        low, high = entry["interval"]
        return low, high
    if entry.get("std") is None:
        return None
    return entry["mean"] - entry["std"], entry["mean"] + entry["std"]
