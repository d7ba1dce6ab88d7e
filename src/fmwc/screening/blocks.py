"""Blocks: what is computed and written at a time, the files that hold them, and the record of their attempts.

A block is a whole number of batches. Its file is written atomically and holds the identity of the campaign, so a block
is done if its file is whole and has that identity. Before a block begins, its attempt is written to disk; a block that
failed three times, by an exception or by the death of its worker, is set aside.

If the driver itself dies, the block that it was computing may be the cause or not. It is then computed alone, in a
process of its own, whose death counts.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
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
    anything,
    check,
    mapping,
    number,
    open_parquet,
    open_regular,
    parquet_table,
    parse_json,
    read_json,
    record,
    shown,
    text,
    whole,
)
from fmwc.screening.rows import INDEX
from fmwc.screening.stages import Compute, Stage

__all__ = [
    "MOST",
    "Outcome",
    "Segment",
    "SetAsideError",
    "Spent",
    "Work",
    "Worker",
    "advance",
    "begin",
    "failed",
    "finish",
    "read_about",
    "read_rows",
    "write_rows",
]

MOST = 3  # attempts of a block
FOLDER = "blocks"
LARGEST = 1 << 34  # bytes of a block file
CELLS = 1 << 28  # values in a block file
ABOUT = b"fmwc"  # metadata key
KILLED = "its worker was killed"

_SPENT = record({"rows_in": whole(), "rows_out": whole(), "evaluations": whole(), "seconds": number(0)})
_ABOUT = record(
    {
        "identity": text(64),
        "start": whole(),
        "stop": whole(),
        "driver": text(64),
        "spent": mapping(_SPENT, 10),
        "rows": whole(),
        "columns": mapping(text(200), 1000),  # their types by name
    }
)
_ATTEMPT = record(
    {"identity": text(64), "start": whole(), "stop": whole(), "driver": text(64), "reason": text(1000)},
    {"since": anything, "pid": anything},
)


class SetAsideError(FmwcError):
    """Block that failed too often, or whose rows cannot be read."""


class Spent(NamedTuple):
    """What a stage did: rows in and out, network evaluations, and seconds."""

    rows_in: int = 0
    rows_out: int = 0
    evaluations: int = 0
    seconds: float = 0.0

    def __add__(self, other: Any) -> Spent:
        return Spent(*(a + b for a, b in zip(self, other, strict=True)))


class Work(NamedTuple):
    """A block on its way through the stages.

    Attributes:
        block: Its number.
        batches: The rows of each batch.
        spent: What each stage did.
    """

    block: int
    batches: list[pa.Table]
    spent: dict[str, Spent]


class Outcome(NamedTuple):
    """The end of an attempt.

    Attributes:
        block: The number of the block.
        rows: The number of rows that were drawn or read.
        problem: Why the attempt failed; empty if the file of the block is whole.
    """

    block: int
    rows: int = 0
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

    def about(self, block: int, name: str = "", *, whole: bool = False) -> dict[str, Any] | None:
        """Return the description of a block if it is done; with `whole`, read all of its file."""
        try:
            about = read_about(self.path(block, name), whole=whole)
        except (FmwcError, OSError):
            return None
        return about if self.owns(block, about) else None

    def head(self, block: int) -> dict[str, Any]:
        """Return what tells a block from those of other segments."""
        start, stop = self.spans[block]
        return {"identity": self.identity, "start": start, "stop": stop}

    def owns(self, block: int, about: Mapping[str, Any]) -> bool:
        """Return whether a file or an attempt belongs to a block."""
        return block < len(self.spans) and about.items() >= self.head(block).items()

    def batches(self, block: int) -> list[pa.Table]:
        """Return the rows of each batch before the first stage."""
        start, stop = self.spans[block]
        if self.source:
            rows = read_rows(self.path(block, self.source), stop - start)
        else:
            rows = pa.table({INDEX: np.arange(start, stop)})
        return [rows.slice(i, self.batch) for i in range(0, len(rows), self.batch)]

    # ---- attempts ----

    def attempts(self, block: int) -> list[dict[str, Any]]:
        """Return the attempts that did not end well, in order, or that have not ended; none of other segments."""
        found: list[dict[str, Any]] = []
        while (one := read_attempt(self._attempt(block, len(found)))) and self.owns(block, one):
            found.append(one)
        return found

    def _attempt(self, block: int, number: int) -> Path:
        return self.path(block).with_suffix(f".attempt-{number + 1}")

    def note(self, block: int, number: int, driver: str, reason: str = "") -> None:
        """Record the beginning of an attempt, or with a reason, that it failed."""
        with written(self._attempt(block, number)) as file:
            content = {"driver": driver, "reason": reason[:1000], "since": time.time(), "pid": os.getpid()}
            file.write(json.dumps({**self.head(block), **content}).encode())

    def alone(self, block: int) -> Path:
        """Return the file that marks a block to be computed in a process of its own."""
        return self.path(block).with_suffix(".alone")

    def forget(self, block: int, since: int = 0) -> None:
        """Delete the record of attempts, from number `since`."""
        for last in reversed(range(since, MOST)):
            self._attempt(block, last).unlink(missing_ok=True)


def read_attempt(path: Path) -> dict[str, Any]:
    """Return the record of an attempt; empty if there is none, or none that can be read."""
    with suppress(FmwcError, OSError):
        found: dict[str, Any] = read_json(path, _ATTEMPT, 1 << 14)
        return found
    return {}


# ---- files -----------------------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: pa.Table, about: Mapping[str, Any]) -> None:
    """Write rows with a description and checksums, atomically."""
    about = {**about, "rows": len(rows), "columns": _types(rows.schema)}
    rows = rows.replace_schema_metadata({ABOUT: json.dumps(about).encode()})
    with written(path) as file:
        # Names inside lists stay as they are, so that the types that are read are those that were written.
        pq.write_table(rows, file, compression="zstd", write_page_checksum=True, use_compliant_nested_type=False)


def read_about(path: Path, *, whole: bool = False) -> dict[str, Any]:
    """Return the description in a block file; with `whole`, read all of it and compare its checksums."""
    with _opened(path) as (parquet, about):
        for _ in parquet.iter_batches() if whole else ():
            pass
        return about


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


# ---- one block -------------------------------------------------------------------------------------------------------


def begin(segment: Segment, block: int, driver: str) -> Work:
    """Record an attempt on disk and return the block's rows.

    Raise :class:`SetAsideError` after too many attempts, or if the rows cannot be read.
    """
    before = segment.attempts(block)
    if before and not before[-1]["reason"]:
        segment.note(block, len(before) - 1, before[-1]["driver"], KILLED)
    if len(before) >= MOST:
        raise SetAsideError(f"failed {MOST} times; the last time: {before[-1]['reason'] or KILLED}")
    segment.note(block, len(before), driver)
    try:
        return Work(block, segment.batches(block), {})
    except Exception as error:
        raise SetAsideError(failed(segment, block, driver, error).problem) from error


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


def finish(segment: Segment, work: Work, driver: str) -> Outcome:
    """Write the file of a block and forget its attempts."""
    start, stop = segment.spans[work.block]
    spent = {name: one._asdict() for name, one in work.spent.items()}
    about = {**segment.head(work.block), "driver": driver, "spent": spent}
    write_rows(segment.path(work.block), pa.concat_tables(work.batches), about)
    segment.forget(work.block)
    segment.alone(work.block).unlink(missing_ok=True)
    return Outcome(work.block, stop - start)


def failed(segment: Segment, block: int, driver: str, error: BaseException) -> Outcome:
    """Record why the last attempt of a block failed."""
    reason = one_line(error, 500) if not isinstance(error, FmwcError) else str(error)
    if not isinstance(error, SetAsideError):
        segment.note(block, len(segment.attempts(block)) - 1, driver, reason or "unknown")
    return Outcome(block, 0, reason)


class Worker:
    """Compute blocks from the first to the last stage. Stages are opened with the first block.

    Arguments:
        segment: The segment.
        driver: The name of this run of the driver.
    """

    def __init__(self, segment: Segment, driver: str) -> None:
        self.segment, self.driver = segment, driver
        self.opened: list[tuple[Stage, Compute]] = []

    def __call__(self, block: int) -> Outcome:
        self.opened = self.opened or [(stage, stage.open()) for stage in self.segment.stages]
        try:
            work = begin(self.segment, block, self.driver)
        except SetAsideError as error:
            return failed(self.segment, block, self.driver, error)
        try:
            work = advance(work, self.opened)
        except Exception as error:
            return failed(self.segment, block, self.driver, error)
        except BaseException:  # Ctrl-C is no fault of the block
            self.segment.forget(block, len(self.segment.attempts(block)) - 1)
            raise
        return finish(self.segment, work, self.driver)


def run_local(segment: Segment, todo: list[int], driver: str) -> Iterator[Outcome]:
    """Compute blocks in this process, and those that may end it each in a process of its own; yield the outcomes."""
    worker = Worker(segment, driver)
    for block in todo:
        yield _alone(segment, block, driver) if segment.alone(block).exists() else worker(block)


_ALONE = """
import os, pickle, sys, threading
from fmwc.modes import one_thread
from fmwc.screening.blocks import Worker
segment, block, driver = pickle.load(sys.stdin.buffer)  # trusted bytes: _alone wrote them to this pipe
threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(1)), daemon=True).start()  # until the driver ends
with one_thread():
    Worker(segment, driver)(block)
"""


def _alone(segment: Segment, block: int, driver: str) -> Outcome:
    """Compute a block in a process of its own."""
    content, path = pickle.dumps((segment, block, driver)), os.pathsep.join(sys.path)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", _ALONE], env={**os.environ, "PYTHONPATH": path}, **pipes) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(content)
            process.stdin.flush()
        process.wait()
    if (about := segment.about(block)) is not None:
        return Outcome(block, about["stop"] - about["start"])
    attempts = segment.attempts(block)
    if attempts and not attempts[-1]["reason"]:
        segment.note(block, len(attempts) - 1, driver, KILLED)
    return Outcome(block, 0, (attempts[-1]["reason"] if attempts else "") or KILLED)


_NAME = re.compile(r"(?P<name>[a-z]+)-(?P<block>\d{5,})\.attempt-(?P<number>\d)")


def set_aside(segment: Segment) -> dict[int, str]:
    """Return the blocks of a segment that failed too often, and why."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for entry in os.scandir(segment.folder / FOLDER):
            match = _NAME.fullmatch(entry.name)
            if match and match["name"] == segment.name and int(match["number"]) == MOST:
                last = read_attempt(Path(entry.path))
                if segment.owns(block := int(match["block"]), last):
                    found[block] = last["reason"] or KILLED
    return dict(sorted(found.items()))
