"""The folder of a study: samples and outcomes by seed, and `uses.json` with all numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from experiments.common.experiment import Outcome
from experiments.common.store import read_result
from experiments.uses.drawing import Drawn
from fmwc.errors import CheckpointError
from fmwc.files import write_bytes
from fmwc.readers import anything, check, mapping, parse_json, read_safetensors

NUMBERS = "uses.json"
SEPARATOR = "|"  # between the label of a row and the name of a tensor
SEPARATORS = {"rewind": ", +"}  # separator of the two parts of a label, if not a comma
TIMES = {
    "random": "at random times",
    "variance": "at t*, the peak of the variance",
    "transported": "at the peak of the transported variance",
}


# ---- samples and outcomes ----------------------------------------------------------------------------------------


def drawn_at(out: Path, name: str, seed: int) -> Path:
    """Return the path of the samples of a seed."""
    return out / "draws" / f"{name}-{seed}.safetensors"


def judged_at(out: Path, name: str, seed: int) -> Path:
    """Return the path of the outcomes of a seed."""
    return out / "outcomes" / f"{name}-{seed}.safetensors"


def _save(path: Path, rows: Mapping[str, Mapping[str, Tensor]], metadata: dict[str, str]) -> Path:
    # Copy, because safetensors does not accept tensors that share memory.
    tensors = {
        f"{label}{SEPARATOR}{name}": value.cpu().clone().contiguous()
        for label, row in rows.items()
        for name, value in row.items()
    }
    return write_bytes(path, save(tensors, metadata))


def _load(path: Path) -> tuple[dict[str, dict[str, Tensor]], Mapping[str, str]]:
    tensors, metadata = read_safetensors(path, error=CheckpointError)
    rows: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        label, _, name = key.rpartition(SEPARATOR)
        rows.setdefault(label, {})[name] = value
    return rows, metadata


def save_drawn(path: Path, rows: Mapping[str, Drawn]) -> Path:
    """Write the rows of a drawing."""
    infos = json.dumps({label: row.info for label, row in rows.items()})
    return _save(path, {label: row.tensors for label, row in rows.items()}, {"rows": infos})


def load_drawn(path: Path) -> dict[str, Drawn]:
    """Read the rows of a drawing."""
    tensors, metadata = _load(path)
    what = f"{path} is not a drawing of python -m experiments study"
    infos = check(
        parse_json(metadata.get("rows", ""), what, CheckpointError), mapping(mapping(anything)), what, CheckpointError
    )
    if unknown := sorted(tensors.keys() - infos.keys()):
        raise CheckpointError(f"{what}: it has no description of '{unknown[0][:60]}'")
    return {label: Drawn(tensors.get(label, {}), info) for label, info in infos.items()}


def save_outcomes(path: Path, outcomes: Mapping[str, Outcome], of: str) -> Path:
    """Write the outcomes of the drawing identified by `of`."""
    rows = {
        label: {name: torch.as_tensor(np.ascontiguousarray(value)) for name, value in outcome.items()}
        for label, outcome in outcomes.items()
    }
    return _save(path, rows, {"of": of})


def load_outcomes(path: Path, of: str = "") -> dict[str, Outcome] | None:
    """Return the outcomes of a drawing by label, or `None` if the file is missing or belongs to another drawing."""
    if not path.exists():
        return None
    rows, metadata = _load(path)
    if of and metadata.get("of") != of:
        return None
    if any(value.dtype == torch.bfloat16 for row in rows.values() for value in row.values()):
        raise CheckpointError(f"{path} holds torch.bfloat16, which is not a type of outcomes; delete it")
    return {label: {name: value.numpy() for name, value in row.items()} for label, row in rows.items()}


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

    name: str  # an intent, a controller, a method or a guidance
    at: str  # the time of an edit (`random`, `t = 0.4`), the number of steps, or the extra evaluations (empty for none)
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

    @property
    def wide(self) -> bool:
        """Whether the study covers all options compared on the validation seed."""
        return bool(self.provenance["wide"])

    def rows(self, use: str) -> list[Row]:
        """Return the rows of a use, with labels split into `name` and `at`."""
        rows = []
        for label, numbers in self.numbers[use].items():
            name, separator, at = label.rpartition(SEPARATORS.get(use, ", "))
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
