"""One reader for structure files: CIF, POSCAR and extended XYZ, with limits on bytes, atoms, seconds and memory.

Files are parsed in a process of their own, which serves one file after another. A file that takes too long ends that
process and no other file: the next one gets a new process.
"""

from __future__ import annotations

import atexit
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

from fmwc.data import parsers
from fmwc.data.parsers import MEMORY_CODE, OUT_OF_MEMORY, UNREADABLE, Cell, Row, receive, send
from fmwc.errors import DataError
from fmwc.readers import read_bytes

__all__ = ["BYTES", "MOST", "SECONDS", "cells", "kind_of", "read_structures", "read_text_of"]

BYTES = 64 << 20  # of a file
CIF_BYTES = 1 << 20  # of a structure to train on, which has at most 20 atoms
MOST = 1_000  # atoms of a structure: CHGNet and the comparison of structures take seconds for as many
SECONDS = 20.0  # of a file, and
SPEED = 100_000  # bytes that add another second (parsers read ten times as many), up to
MORE = 100.0  # seconds
MEMORY = 2 << 30  # bytes of a file, beyond those of the libraries
PAYS = 500  # structures, at 2 ms each, from which on a second process is worth its start
CHUNK = 50  # structures between two reports of progress
WORKERS = 8
PATIENCE = 5.0  # seconds that a process has to end after its last word

SUFFIXES = {".cif": "cif", ".xyz": "xyz", ".extxyz": "xyz", ".vasp": "poscar", ".poscar": "poscar"}
NAMES = ("POSCAR", "CONTCAR")
KNOWN = ", ".join([*SUFFIXES, *(f"{name}*" for name in NAMES)])
PROGRAM = "import runpy, sys; sys.path[:] = sys.argv[3:]; runpy.run_path(sys.argv[2], run_name='__main__')"


def kind_of(path: Path) -> str | None:
    """The format of a file, by its name."""
    return "poscar" if path.name.upper().startswith(NAMES) else SUFFIXES.get(path.suffix.lower())


def read_text_of(path: Path, limit: int = BYTES) -> str:
    """The text of a structure file. Authors' names need not be UTF-8; elements are ASCII."""
    return read_bytes(path, limit).decode("utf-8-sig", "replace")


class _Process:
    """The process that parses; it is started when it is first needed, and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            # Not by multiprocessing: fork copies a process with threads, and others run the user's script again.
            # The paths are this process's own, without the working directory.
            paths = [path for path in sys.path if path]
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(MEMORY), str(Path(parsers.__file__)), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            self._owner = os.getpid()
        return self._process

    def ask(self, kind: str, text: str, most: int, seconds: float) -> list[Any]:
        """The answers to a request. The last one is a problem where the process had to be ended."""
        answers: list[Any] = []
        late = threading.Event()
        with self._lock:
            try:
                process = self._started()

                def end() -> None:
                    late.set()
                    process.kill()

                timer = threading.Timer(seconds, end)
                timer.daemon = True
                timer.start()
                try:
                    send(process.stdin, {"kind": kind, "text": text, "most": most})  # type: ignore[arg-type]
                    while (answer := receive(process.stdout)) is not None:  # type: ignore[arg-type]
                        answers.append(answer)
                        if isinstance(answer, dict) and "end" in answer:
                            break
                    else:
                        process.wait(PATIENCE)  # it ended by itself
                except (OSError, ValueError, subprocess.TimeoutExpired):
                    pass  # it ended while it was written to, or in the middle of an answer
                finally:
                    timer.cancel()
                    timer.join()  # so that it cannot end the process in the middle of the next request
            finally:
                if late.is_set() or not (answers and isinstance(answers[-1], dict) and "end" in answers[-1]):
                    code = self.close()
        if answers and isinstance(answers[-1], dict) and "end" in answers[-1]:
            if missing := answers.pop()["end"]:
                raise DataError(
                    f"structures are read with pymatgen and ASE ({missing}); install them: pip install 'fmwc[crystals]'"
                )
            return answers
        crashed = OUT_OF_MEMORY if code == MEMORY_CODE else f"its parser crashed (code {code})"
        problem = f"reading it takes more than {seconds:.0f} s" if late.is_set() else crashed
        return [*answers, {"problem": problem}]

    def close(self) -> int | None:
        """End the process; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        own = self._owner == os.getpid()  # else this process is a copy, and the other goes on with it
        code = process.poll() if own else None
        if own:
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        return process.wait() if own and code is None else code


_SHARED = _Process()
atexit.register(_SHARED.close)


def read_structures(kind: str, text: str, *, most: int = MOST, seconds: float = SECONDS) -> list[Row]:
    """Each structure of a text: `numbers`, `coords` and `cell`, or the `problem` with it.

    Arguments:
        kind: `"cif"`, `"poscar"` or `"xyz"`.
        text: The content of a file.
        most: Atoms of a structure, at most.
        seconds: How long a short file may take; long files get more.
    """
    return _SHARED.ask(kind, text, most, seconds + min(len(text) / SPEED, MORE))


def cells(texts: Sequence[str], progress: Callable[[int, int], None] | None = None) -> list[Cell | str]:
    """The Niggli cell of the structure in each CIF, or why it cannot be used; in several processes where it pays."""
    count = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, WORKERS)
    several = count if len(texts) >= PAYS else 1
    processes = [_SHARED] if several == 1 else [_Process() for _ in range(several)]
    found: list[Cell | str] = []
    try:
        with ThreadPoolExecutor(several) as pool:
            free = list(processes)

            def cell(text: str) -> Cell | str:
                process = free.pop()
                try:
                    return _cell(process, text)
                finally:
                    free.append(process)

            try:
                for outcome in pool.map(cell, texts):
                    found.append(outcome)
                    if progress and (len(found) % CHUNK == 0 or len(found) == len(texts)):
                        progress(len(found), len(texts))
            finally:
                pool.shutdown(cancel_futures=True)
    finally:
        for process in processes:
            if process is not _SHARED:
                process.close()
    return found


def _cell(process: _Process, text: str) -> Cell | str:
    if len(text) > CIF_BYTES:
        return UNREADABLE
    answer = process.ask("niggli", text, 0, SECONDS)[0]
    if isinstance(answer, list):
        numbers, coords, lengths, angles = answer
        return Cell(np.array(numbers), np.array(coords).reshape(-1, 3), np.array(lengths), np.array(angles))
    return answer if isinstance(answer, str) else UNREADABLE
