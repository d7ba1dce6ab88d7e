"""The folder of a study: samples and outcomes by seed, and `uses.json` with all numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save

from experiments.common.store import read_result
from experiments.uses.drawing import Drawn
from fmwc.errors import CheckpointError
from fmwc.files import write_bytes
from fmwc.readers import read_safetensors

NUMBERS = "uses.json"
SEPARATOR = "|"  # between the label of a row and the name of a tensor
TIMES = {
    "random": "at random times",
    "variance": "at t*, the peak of the variance",
    "transported": "at the peak of the transported variance",
}


# ---- samples and outcomes ----------------------------------------------------------------------------------------


def drawn_at(out: Path, name: str, seed: int) -> Path:
    """Return the path of the samples of a seed."""
    return out / "draws" / f"{name}-{seed}.safetensors"


def save_drawn(path: Path, rows: Mapping[str, Drawn]) -> Path:
    """Write the rows of a drawing."""
    # Copy, because safetensors does not accept tensors that share memory.
    tensors = {
        f"{label}{SEPARATOR}{name}": value.cpu().clone().contiguous()
        for label, row in rows.items()
        for name, value in row.tensors.items()
    }
    return write_bytes(path, save(tensors, {"rows": json.dumps({label: row.info for label, row in rows.items()})}))


def load_drawn(path: Path) -> dict[str, Drawn]:
    """Read the rows of a drawing."""
    tensors, metadata = read_safetensors(path, error=CheckpointError)
    rows = {label: Drawn({}, info) for label, info in json.loads(metadata["rows"]).items()}
    for key, value in tensors.items():
        label, _, name = key.rpartition(SEPARATOR)
        rows[label].tensors[name] = value
    return rows


# ---- numbers -----------------------------------------------------------------------------------------------------


class MetricFormat(NamedTuple):
    """The format of a metric."""

    words: str
    higher: bool
    digits: int  # decimals

    @property
    def better(self) -> str:
        return "higher is better" if self.higher else "lower is better"


class Row(NamedTuple):
    """The numbers of one row."""

    name: str  # an intent, a controller or a guidance
    at: str  # the time of an edit (`random`, `t = 0.4`) or the number of steps (empty for none)
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Study:
    """The results of a study.

    Arguments:
        folder: The folder.
        setting: The name of the experiment.
        bad, good: The words for bad and for good samples.
        metrics: The formats of the metrics; options are chosen by the first metric.
        intents: The definition of success, by kind of edit.
        chosen: The time chosen on the validation seed, by kind of edit.
        numbers: The numbers by use.
        provenance: The provenance of the numbers.
    """

    folder: Path
    setting: str
    bad: str
    good: str
    metrics: dict[str, MetricFormat]
    intents: dict[str, str]
    chosen: dict[str, str]
    numbers: dict[str, Any]
    provenance: dict[str, Any]

    def rows(self, use: str) -> list[Row]:
        """Return the rows of a use, with labels split into `name` and `at`."""
        rows = []
        for label, numbers in self.numbers[use].items():
            name, separator, at = label.rpartition(", ")
            rows.append(Row(name if separator else label, at if separator else "", numbers))
        return rows

    def groups(self, use: str) -> dict[str, list[Row]]:
        """Return the rows of a use, grouped by name."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows(use):
            groups.setdefault(row.name, []).append(row)
        return groups


def read_study(folder: Path) -> Study:
    """Read a folder written by `python -m experiments study`."""
    path = folder / NUMBERS
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {NUMBERS}; run python -m experiments study first")
    result: Mapping[str, Any] = read_result(path)
    try:
        intents = result["intents"]
        return Study(
            folder,
            result["setting"],
            result["bad"],
            result["good"],
            {name: MetricFormat(**words) for name, words in result["metrics"].items()},
            {name: intent["words"] for name, intent in intents.items()},
            {n: f"{i.get('before', 0.2):g} before {i.get('peak', 'transported')}" for n, i in intents.items()},
            result["numbers"],
            result["provenance"],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has an older format; run python -m experiments study again") from error


def time_label(when: str) -> str:
    """Describe the time of an edit.

    >>> time_label("0.2 before variance"), time_label("t = 0.4")
    ('0.2 before t*', 'at t = 0.4')
    """
    before, separator, peak = when.partition(" before ")
    if separator:
        return f"{before} before {'t*' if peak == 'variance' else 'the transported peak'}"
    return TIMES.get(when, f"at {when}")
