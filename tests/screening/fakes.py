"""Stages for tests: they sleep, fail, or kill their process at given batches. Workers import this module."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from fmwc.errors import UsageError
from fmwc.screening.blocks import Segment
from fmwc.screening.rows import INDEX

BATCH = 4


@dataclass(frozen=True)
class Fake:
    """Stage that adds a column with twice the index."""

    name: str
    device: str = "cpu"
    seconds: float = 0.0
    kills: tuple[int, ...] = ()
    raises: tuple[int, ...] = ()
    opening: str = ""  # "raises"
    evaluations: int = 1

    def open(self) -> Any:
        if self.opening == "raises":
            raise UsageError("the weights are gone; restore them")
        return self.run

    def run(self, rows: pa.Table) -> pa.Table:
        time.sleep(self.seconds)
        number = rows[INDEX][0].as_py() // BATCH
        if number in self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if number in self.raises:
            raise ValueError(f"batch {number} is poisoned")
        return rows.append_column(self.name, pa.array([2 * i for i in rows[INDEX].to_pylist()]))


def segment(folder: Path, *stages: Fake, blocks: int = 6) -> Segment:
    """Return a segment of blocks of one batch each."""
    (folder / "blocks").mkdir(exist_ok=True)
    spans = tuple((BATCH * i, BATCH * (i + 1)) for i in range(blocks))
    return Segment(folder, "draw", "0" * 64, stages, BATCH, spans)  # type: ignore[arg-type]
