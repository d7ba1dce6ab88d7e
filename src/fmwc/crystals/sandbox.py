"""Read untrusted structure files (CIF, POSCAR, extended XYZ) with limits on bytes, atoms, time and memory.

pymatgen and ASE parse the files in a separate process, one file after another. If a file takes too long, the process
is killed, and a new one is started for the next file.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.crystals import parsers
from fmwc.crystals.parsers import MEMORY_CODE, OUT_OF_MEMORY, UNREADABLE, Cell, Row
from fmwc.errors import DataError
from fmwc.readers import read_bytes

__all__ = ["BYTES", "CIF_BYTES", "MOST", "SECONDS", "cells", "read_structures", "read_text_of"]

BYTES = 64 << 20  # maximum per file
CIF_BYTES = 1 << 20  # maximum per structure of training data, which has at most 20 atoms
MOST = 1_000  # maximum atoms per structure: CHGNet and the comparison of structures take seconds for as many
SECONDS = 20.0  # time limit of a short file
SPEED = 100_000  # bytes that add a second to the time limit (parsers read ten times as many per second)
MORE = 100.0  # maximum seconds added
MEMORY = 2 << 30  # maximum bytes per file, in addition to the libraries
PAYS = 500  # minimum number of structures, at 2 ms each, to start more than one process
CHUNK = 50  # structures between two reports of progress
WORKERS = 8
PATIENCE = 5.0  # seconds for a process to end after its last answer
PROGRAM = "import runpy, sys; sys.path[:] = sys.argv[3:]; runpy.run_path(sys.argv[2], run_name='__main__')"


def read_text_of(path: Path, limit: int = BYTES) -> str:
    """Return the text of a structure file. Invalid UTF-8, as in names of authors, is replaced."""
    return read_bytes(path, limit).decode("utf-8-sig", "replace")


class _Process:
    """The parsing process. It starts with the first request, and restarts after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def forget(self) -> None:
        """Forget the process without killing it, because after a fork it belongs to the parent."""
        self._lock, self._process = threading.Lock(), None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # Not multiprocessing: fork copies a process with threads, and spawn runs the user's script again.
            # The search path is that of this process, without the working directory.
            paths = [path for path in sys.path if path]
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(MEMORY), str(Path(parsers.__file__)), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        return self._process

    def ask(self, kind: str, text: str, most: int, seconds: float) -> list[Any]:
        """Return the answers to a request. If the process had to be killed, the last answer is a problem."""
        answers: list[Any] = []
        end = code = None
        with self._lock:
            process, late = self._started(), threading.Event()
            assert process.stdin is not None
            assert process.stdout is not None

            def stop() -> None:
                late.set()
                process.kill()

            timer = threading.Timer(seconds, stop)
            timer.daemon = True
            timer.start()
            try:
                process.stdin.write(json.dumps({"kind": kind, "text": text, "most": most}).encode() + b"\n")
                process.stdin.flush()
                for line in process.stdout:
                    answer = json.loads(line)
                    if isinstance(answer, dict) and "end" in answer:
                        end = answer["end"]
                        break
                    answers.append(answer)
                else:
                    process.wait(PATIENCE)
            except (OSError, ValueError, subprocess.TimeoutExpired):
                pass  # the process ended during a request or an answer
            finally:
                timer.cancel()
                timer.join()  # so that it cannot kill the process during the next request
                if late.is_set() or end is None:
                    code = self.close()
        if end:
            raise DataError(
                f"reading structures needs pymatgen and ASE ({end}); install them with: pip install 'fmwc[crystals]'"
            )
        if end is None:
            crashed = OUT_OF_MEMORY if code == MEMORY_CODE else f"its parser crashed (code {code})"
            answers.append({"problem": f"reading it takes more than {seconds:.0f} s" if late.is_set() else crashed})
        return answers

    def close(self) -> int | None:
        """Kill the process; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.kill()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        return process.wait()


_SHARED = _Process()
atexit.register(_SHARED.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SHARED.forget)


def read_structures(kind: str, text: str, *, most: int = MOST, seconds: float = SECONDS) -> list[Row]:
    """Return each structure of a text as `numbers`, `coords` and `cell`, or its `problem`.

    Arguments:
        kind: `"cif"`, `"poscar"` or `"xyz"`.
        text: The content of a file.
        most: The maximum number of atoms per structure.
        seconds: The time limit of a short file; long files get more time.
    """
    return _SHARED.ask(kind, text, most, seconds + min(len(text) / SPEED, MORE))


def cells(
    texts: Sequence[str], progress: Callable[[int, int], None] | None = None, *, keep: bool = False
) -> list[Cell | str]:
    """Return the Niggli cell of the structure in each CIF, or the reason why it cannot be used.

    Many structures are read by several processes.

    Arguments:
        texts: The CIFs.
        progress: Called with the number done and the total.
        keep: Whether to keep cells that are nearly Niggli cells, as a flow draws them, and the order of their atoms.
    """
    count = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, WORKERS)
    processes = [_Process() for _ in range(count)] if len(texts) >= PAYS and count > 1 else [_SHARED]
    free = list(processes)

    def cell(text: str) -> Cell | str:
        process = free.pop()
        try:
            return _cell(process, text, "own cell" if keep else "niggli")
        finally:
            free.append(process)

    outcomes: list[Cell | str] = []
    pool = ThreadPoolExecutor(len(processes))
    try:
        for outcome in pool.map(cell, texts):
            outcomes.append(outcome)
            if progress and (len(outcomes) % CHUNK == 0 or len(outcomes) == len(texts)):
                progress(len(outcomes), len(texts))
    finally:
        pool.shutdown(cancel_futures=True)
        for process in processes:
            if process is not _SHARED:
                process.close()
    return outcomes


def _cell(process: _Process, text: str, kind: str) -> Cell | str:
    if len(text) > CIF_BYTES:
        return UNREADABLE
    answer = process.ask(kind, text, 0, SECONDS)[0]
    if isinstance(answer, list):
        numbers, coords, lengths, angles = answer
        return Cell(np.array(numbers), np.array(coords).reshape(-1, 3), np.array(lengths), np.array(angles))
    return answer if isinstance(answer, str) else UNREADABLE
