"""Relax drawn crystals in several processes, and keep the relaxed structures in one file; resumes if interrupted."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fmwc.crystals import Candidate, Relaxed, calculator, relax_all
from fmwc.errors import DataError, MismatchError
from fmwc.files import write_bytes
from fmwc.readers import read_arrays

__all__ = ["Relaxations", "read_relaxed", "relax_in_processes"]

CHUNK = 64  # structures relaxed together; on a GPU they share its evaluations
WRITE_EVERY = 20.0  # seconds
LARGEST = 1 << 30  # maximum bytes of a file

Found = dict[int, Relaxed]  # by the index of the structure


class Relaxations(NamedTuple):
    """Relaxed structures, in the order of the drawn ones; the model that relaxed them, and the limit of its steps."""

    rows: tuple[Relaxed, ...]
    model: str
    limit: int


def relax_in_processes(
    structures: Sequence[Candidate],
    path: Path,
    *,
    model: str = "chgnet",
    steps: int = 200,
    jobs: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Relax structures for at most `steps` steps in `jobs` processes; write the results to an npz file as they come."""
    about = {"of": _digest(structures), "model": model, "limit": steps}
    found, known = _read(path) if path.exists() else ({}, about)
    if known != about:
        raise MismatchError(f"{path} holds relaxations of other structures or by {known}, not {about}; delete it")
    rest = [i for i in range(len(structures)) if i not in found]
    tasks = [
        ([(i, structures[i]) for i in rest[first : first + CHUNK]], model, steps)
        for first in range(0, len(rest), CHUNK)
    ]
    written = time.monotonic()
    for part in _in_processes(tasks, jobs):
        found |= part
        failed = sum(bool(one.problem) for one in found.values())
        say(f"relaxed {len(found)} of {len(structures)}, {failed} failed")
        if time.monotonic() - written > WRITE_EVERY:
            _write(path, found, about)
            written = time.monotonic()
    _write(path, found, about)


Task = tuple[list[tuple[int, Candidate]], str, int]


def _in_processes(tasks: list[Task], jobs: int) -> Iterator[Found]:
    if jobs <= 1:
        yield from map(_relax_chunk, tasks)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_relax_chunk, tasks)


def _relax_chunk(task: Task) -> Found:
    chunk, model, steps = task
    torch.set_num_threads(1)
    relaxed = relax_all([candidate for _, candidate in chunk], calculator(model), steps)
    return dict(zip((i for i, _ in chunk), relaxed, strict=True))


def _digest(structures: Sequence[Candidate]) -> str:
    """Return a hash of structures that survives rounding."""
    known = [(one.name, one.numbers.tolist(), np.round(one.coords, 3).tolist()) for one in structures]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _write(path: Path, found: Found, about: dict[str, Any]) -> None:
    rows = [found[i] for i in sorted(found)]
    facts = [[one.candidate.name, one.energy, one.rmsd, one.steps, one.problem, one.converged] for one in rows]
    content = io.BytesIO()
    np.savez_compressed(
        content,
        about=np.array(json.dumps({**about, "done": sorted(found), "rows": facts})),
        atoms=np.array([len(one.candidate) for one in rows], np.int64),
        numbers=np.concatenate([np.zeros(0, np.int64), *(one.candidate.numbers for one in rows)]),
        coords=np.concatenate([np.zeros((0, 3)), *(one.candidate.coords for one in rows)]),
        cells=np.array([one.candidate.cell for one in rows]).reshape(-1, 3, 3),
    )
    write_bytes(path, content.getvalue())


def _read(path: Path) -> tuple[Found, dict[str, Any]]:
    arrays = read_arrays(path, LARGEST)
    if "about" not in arrays:
        raise DataError(f"{path} is not a file of relaxed structures; delete it")
    about = json.loads(str(arrays["about"]))
    ends = np.cumsum(arrays["atoms"])[:-1]
    numbers, coords = (np.split(arrays[name], ends) for name in ("numbers", "coords"))
    rows = zip(about.pop("done"), about.pop("rows"), numbers, coords, arrays["cells"], strict=True)
    return {i: Relaxed(Candidate(name, z, x, cell), *facts) for i, (name, *facts), z, x, cell in rows}, about


def read_relaxed(path: Path) -> Relaxations:
    """Return the relaxed structures of a file: all of them, or the first ones up to a gap.

    Chunks finish out of order. Those after a gap are left out, because hard structures take longer and would be
    missing among them.
    """
    found, about = _read(path)
    rows = tuple(found[i] for i in takewhile(found.__contains__, count()))
    return Relaxations(rows, about["model"], about["limit"])
