"""Blocks: what is computed and written at a time, and the files that hold them.

A block is a whole number of batches. Its file is written atomically and holds the identity of the campaign, so a block
is done if its file is there and has that identity. Nothing else is recorded: after a kill, the blocks without a file
are computed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fmwc.entry import one_line
from fmwc.errors import DataError, FmwcError
from fmwc.files import written
from fmwc.readers import (
    check,
    mapping,
    number,
    open_parquet,
    open_regular,
    parquet_table,
    parse_json,
    record,
    shown,
    text,
    whole,
)
from fmwc.screening.rows import INDEX
from fmwc.screening.stages import Compute, Stage

__all__ = ["Outcome", "Segment", "Spent", "Work", "advance", "finish", "read_rows", "run_local", "write_rows"]

FOLDER = "blocks"
LARGEST = 1 << 34  # bytes of a block file
CELLS = 1 << 28  # values in a block file
ABOUT = b"fmwc"  # metadata key

_SPENT = record({"rows_in": whole(), "rows_out": whole(), "evaluations": whole(), "seconds": number(0)})
_ABOUT = record(
    {
        "identity": text(64),
        "start": whole(),
        "stop": whole(),
        "spent": mapping(_SPENT, 10),
        "rows": whole(),
        "columns": mapping(text(200), 1000),  # their types by name
    }
)


class Spent(NamedTuple):
    """What a stage did: rows in and out, network evaluations, and seconds."""

    rows_in: int = 0
    rows_out: int = 0
    evaluations: int = 0
    seconds: float = 0.0

    def __add__(self, other: Any) -> Spent:
        return Spent(*(a + b for a, b in zip(self, other, strict=True)))


class Work(NamedTuple):
    """A block on its way through the stages: its number, the rows of each batch, and what each stage did."""

    block: int
    batches: list[pa.Table]
    spent: dict[str, Spent]


class Outcome(NamedTuple):
    """The end of a block: its number, and why it failed; the reason is empty if its file was written."""

    block: int
    problem: str = ""


@dataclass(frozen=True)
class Segment:
    """Blocks that pass through the same stages without waiting for one another.

    Attributes:
        folder: The folder of the campaign.
        name: `draw` or `judge`.
        identity: A hash of all that determines the rows.
        stages: The stages.
        batch: The number of rows of a batch.
        spans: The first row of each block, and the row after its last.
        source: The name of the files that hold the rows; empty if they are new.
    """

    folder: Path
    name: str
    identity: str
    stages: tuple[Stage, ...]
    batch: int
    spans: tuple[tuple[int, int], ...]
    source: str = ""

    def path(self, block: int, name: str = "") -> Path:
        """Return the file of a block."""
        return self.folder / FOLDER / f"{name or self.name}-{block:05d}.parquet"

    def about(self, block: int, name: str = "") -> dict[str, Any] | None:
        """Return the description of a block; `None` if it is not done."""
        with suppress(FmwcError), _opened(self.path(block, name)) as (_, about):
            return about if about.items() >= self.head(block).items() else None
        return None

    def head(self, block: int) -> dict[str, Any]:
        """Return what tells a block from those of other segments."""
        start, stop = self.spans[block]
        return {"identity": self.identity, "start": start, "stop": stop}

    def missing(self) -> list[int]:
        """Return the blocks that are not done."""
        return [block for block in range(len(self.spans)) if self.about(block) is None]

    def begin(self, block: int) -> Work:
        """Return the rows of each batch before the first stage."""
        start, stop = self.spans[block]
        if self.source:
            rows = read_rows(self.path(block, self.source), stop - start)
        else:
            rows = pa.table({INDEX: np.arange(start, stop)})
        return Work(block, [rows.slice(i, self.batch) for i in range(0, len(rows), self.batch)], {})


def advance(work: Work, opened: list[tuple[Stage, Compute]]) -> Work:
    """Apply stages to each batch of a block, one batch after the other."""
    batches, spent = [], dict(work.spent)
    for rows in work.batches:
        for stage, compute in opened:
            count, begun = len(rows), time.perf_counter()
            rows = compute(rows)
            seconds = time.perf_counter() - begun
            used = Spent(count, len(rows), count * stage.evaluations, seconds)
            spent[stage.name] = spent.get(stage.name, Spent()) + used
        batches.append(rows)
    return Work(work.block, batches, spent)


def finish(segment: Segment, work: Work) -> Outcome:
    """Write the file of a block."""
    spent = {name: one._asdict() for name, one in work.spent.items()}
    write_rows(segment.path(work.block), pa.concat_tables(work.batches), {**segment.head(work.block), "spent": spent})
    return Outcome(work.block)


def failed(block: int, error: Exception) -> Outcome:
    """Return the outcome of a block that raised an error."""
    return Outcome(block, (str(error) if isinstance(error, FmwcError) else one_line(error, 500)) or "unknown")


def run_local(segment: Segment, todo: list[int]) -> Iterator[Outcome]:
    """Compute blocks in this process; yield their outcomes."""
    opened = [(stage, stage.open()) for stage in segment.stages]
    for block in todo:
        try:
            yield finish(segment, advance(segment.begin(block), opened))
        except Exception as error:  # the other blocks may still succeed
            yield failed(block, error)


# ---- files -----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: pa.Table, about: Mapping[str, Any]) -> None:
    """Write rows with a description and checksums, atomically."""
    about = {**about, "rows": len(rows), "columns": _types(rows.schema)}
    rows = rows.replace_schema_metadata({ABOUT: json.dumps(about).encode()})
    with written(path) as file:
        # Names inside lists stay as they are, so that the types that are read are those that were written.
        pq.write_table(rows, file, compression="zstd", write_page_checksum=True, use_compliant_nested_type=False)


def read_rows(path: Path, most: int, columns: list[str] | None = None) -> pa.Table:
    """Return the rows of a block file, which must have at most `most`."""
    with _opened(path, most) as (parquet, _):
        return parquet_table(parquet, shown(path), columns=columns).replace_schema_metadata()


@contextmanager
def _opened(path: Path, most: int = CELLS) -> Iterator[tuple[pq.ParquetFile, dict[str, Any]]]:
    """Open a block file with at most `most` rows, after checking what it declares; yield it and its description."""
    try:
        with open_regular(path, LARGEST) as file:
            parquet = open_parquet(file, shown(path))
            described = parquet.metadata
            if described.num_rows > most:
                raise DataError(f"{shown(path)} has {described.num_rows:,} rows, which is too many")
            content = (described.metadata or {}).get(ABOUT, b"").decode(errors="replace")
            about = check(parse_json(content, "its description"), _ABOUT, shown(path))
            if (about["rows"], about["columns"]) != (described.num_rows, _types(parquet.schema_arrow)):
                raise DataError(
                    f"{shown(path)} has other rows or columns than it had; delete it and repeat the command"
                )
            yield parquet, about
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(f"{shown(path)} is damaged ({reason}); delete it and repeat the command") from error


def _types(schema: pa.Schema) -> dict[str, str]:
    """Return the types of columns by name. Text may be read as indices into its distinct values."""
    kinds = zip(schema.names, schema.types, strict=True)
    return {name: str(kind.value_type if pa.types.is_dictionary(kind) else kind) for name, kind in kinds}
