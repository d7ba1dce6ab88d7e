"""Samples as rows of an Arrow table, as they pass from stage to stage and lie in block files.

Rows have an `index`, a `score`, a `confidence` unless it is withheld, one column per condition with one number per
sample, and the sample, flattened: `x`, or one column per channel. Crystals have `atoms`, `numbers` (atomic numbers),
`coords` (fractional, three per atom), `lengths` (Å) and `angles` (degrees) instead of channels, and after relaxation
`relaxed_coords` and `relaxed_cell` (a, b and c in Å, row by row).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fmwc.crystals.structures import Candidate, Crystals, candidates, crystals_of, from_flat
from fmwc.errors import UsageError
from fmwc.sampling import Trajectory
from fmwc.state import SINGLE, channels

__all__ = ["CRYSTALS", "INDEX", "SCORE", "candidates_of", "crystals_in", "flat", "rows_of", "run_of", "samples_of"]

INDEX, SCORE, CONFIDENCE = "index", "score", "confidence"
CRYSTALS = "crystals"


def flat(values: np.ndarray) -> pa.Array:  # (N, *)
    """Return an array as a column: numbers, or lists of a fixed size."""
    size = math.prod(values.shape[1:])
    return pa.array(values) if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), size)


def _lists(counts: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], counts.cumsum()]).astype(np.int32)), pa.array(values))


def rows_of(run: Trajectory, kind: str) -> pa.Table:
    """Return the rows of a run."""
    columns: dict[str, Any] = {INDEX: pa.array(run.index.numpy()) if run.index is not None else None}
    columns[SCORE] = pa.array(run.score().double().cpu().numpy())
    if (confidence := run.confidence) is not None:
        columns[CONFIDENCE] = pa.array(confidence.double().cpu().numpy())
    state = _crystal_columns(crystals_of(run)) if kind == CRYSTALS else _state_columns(run)
    if taken := columns.keys() & state.keys():
        raise UsageError(f"the condition or channel '{min(taken)}' has the name of a column; rename it in the network")
    return pa.table({**columns, **state})


def _state_columns(run: Trajectory) -> dict[str, pa.Array]:
    cond = {name: flat(value.cpu().numpy()) for name, value in run.cond.items() if value.ndim == 1}
    return {**cond, **{name: flat(value.cpu().flatten(1).numpy()) for name, value in channels(run.x).items()}}


def _crystal_columns(crystals: Crystals) -> dict[str, pa.Array]:
    present, atoms = crystals.numbers > 0, crystals.atoms.numpy()
    return {
        "atoms": pa.array(atoms),
        "numbers": _lists(atoms, crystals.numbers[present].numpy().astype(np.int16)),
        "coords": _lists(3 * atoms, crystals.coords[present].numpy().reshape(-1)),
        "lengths": flat(crystals.lengths.numpy()),
        "angles": flat(crystals.angles.numpy()),
    }


def _values(column: pa.ChunkedArray) -> np.ndarray:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def names_of(table: pa.Table) -> tuple[str, ...]:
    """Return the names of samples, as in the other commands."""
    return tuple(f"{i:05d}" for i in table[INDEX].to_pylist())


def samples_of(table: pa.Table, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the samples by channel."""
    return {name: _values(table[name]).reshape(len(table), *shape) for name, shape in shapes.items()}


def run_of(table: pa.Table, shapes: Mapping[str, Sequence[int]], device: str = "cpu") -> Trajectory:
    """Return a run with the samples and conditions of rows, and without readings, for a judge."""
    x: Any = {n: torch.tensor(v, device=device) for n, v in samples_of(table, shapes).items()}
    cond = {
        name: torch.tensor(table[name].to_numpy(), device=device)
        for name, kind in zip(table.column_names, table.schema.types, strict=True)
        if name not in (INDEX, SCORE, CONFIDENCE) and (pa.types.is_integer(kind) or pa.types.is_floating(kind))
    }
    state = x[SINGLE] if [*x] == [SINGLE] else x
    none = torch.zeros(0, len(table), device=device)
    index = torch.tensor(table[INDEX].to_numpy())
    return Trajectory(state, state, none, none, none, none, cond=cond, index=index)


def crystals_in(table: pa.Table) -> Crystals:
    """Return the crystals of rows, as they were drawn."""
    counts = table["atoms"].to_numpy()
    numbers = _values(table["numbers"])
    coords, lengths, angles = (_values(table[name]).reshape(-1, 3) for name in ("coords", "lengths", "angles"))
    return from_flat(counts, numbers, coords, lengths, angles, names_of(table), max(counts, default=1))


def candidates_of(table: pa.Table) -> list[Candidate]:
    """Return the crystals of rows for the judge, relaxed if they were."""
    given = candidates(crystals_in(table)) if len(table) else []
    if "relaxed_cell" not in table.column_names:
        return given
    after = zip(table["relaxed_coords"].to_pylist(), table["relaxed_cell"].to_pylist(), strict=True)
    return [
        replace(one, coords=np.array(coords).reshape(-1, 3), cell=np.array(cell).reshape(3, 3))
        if cell is not None and math.isfinite(cell[0])
        else one
        for one, (coords, cell) in zip(given, after, strict=True)
    ]
