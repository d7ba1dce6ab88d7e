"""Relax drawn crystals in several processes, and keep the relaxed structures in one file.

This needs only the packages of the energy model; the tables are computed from the file on any machine.
"""

from __future__ import annotations

import io
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fmwc.crystals import Candidate, Relaxed, calculator, relax_all
from fmwc.crystals.fingerprints import identity, require_same
from fmwc.errors import DataError, MismatchError
from fmwc.files import write_bytes
from fmwc.readers import read_arrays

__all__ = ["Relaxations", "read_relaxed", "relax_in_processes"]

CHUNK = 64  # structures relaxed together; on a GPU they share its evaluations
WRITE_EVERY = 20.0  # seconds
WORDS = 200  # characters of a problem that are kept
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
    chunk: int = CHUNK,
    minutes: float = math.inf,
    say: Callable[[str], None] = print,
) -> int:
    """Relax structures, and write the results after every few chunks; return the number of structures done.

    Resumes if the file holds a part of the results.

    Arguments:
        structures: The drawn structures.
        path: An npz file.
        model: The energy model.
        steps: The maximum number of steps.
        jobs: The number of processes, which share the GPU if there is one.
        chunk: The number of structures that a process relaxes together.
        minutes: No chunk starts after this time.
        say: Called with a line after each chunk.
    """
    found = _read(path, structures, model, steps) if path.exists() else {}
    rest = [i for i in range(len(structures)) if i not in found]
    begin = written = time.monotonic()
    tasks = [
        ([(i, structures[i]) for i in rest[first : first + chunk]], model, steps, begin + 60 * minutes)
        for first in range(0, len(rest), chunk)
    ]
    for part in _in_processes(tasks, jobs):
        found |= part
        good = [one for one in found.values() if not one.problem]
        say(
            f"relaxed {len(found)} of {len(structures)} after {time.monotonic() - begin:.0f} s: "
            f"{len(found) - len(good)} failed, {np.mean([float(one.converged) for one in good] or [0]):.1%} converged, "
            f"{np.mean([one.steps for one in good] or [0]):.1f} steps"
        )
        if time.monotonic() - written > WRITE_EVERY:
            _write(path, structures, found, model, steps)
            written = time.monotonic()
    _write(path, structures, found, model, steps)
    return len(found)


Task = tuple[list[tuple[int, Candidate]], str, int, float]


def _in_processes(tasks: list[Task], jobs: int) -> Iterator[Found]:
    if jobs <= 1:
        yield from map(_relax_chunk, tasks)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_relax_chunk, tasks)


def _relax_chunk(task: Task) -> Found:
    chunk, model, steps, deadline = task
    if time.monotonic() > deadline:  # this clock is the same in all processes
        return {}
    torch.set_num_threads(1)
    relaxed = relax_all([candidate for _, candidate in chunk], calculator(model), steps)
    return dict(zip((i for i, _ in chunk), relaxed, strict=True))


# ---- the file --------------------------------------------------------------------------------------------------------


def _write(path: Path, structures: Sequence[Candidate], found: Found, model: str, steps: int) -> None:
    done = sorted(found)
    rows = [found[i] for i in done]
    content = io.BytesIO()
    arrays: dict[str, Any] = {
        **identity(structures),
        "model": np.array(model),
        "limit": np.array(steps),
        "done": np.array(done, np.int64),
        "names": np.array([one.candidate.name.encode() for one in rows], "S"),
        "atoms": np.array([len(one.candidate) for one in rows], np.int64),
        "numbers": np.concatenate([np.zeros(0, np.int64), *(one.candidate.numbers for one in rows)]),
        "coords": np.concatenate([np.zeros((0, 3)), *(one.candidate.coords for one in rows)]),
        "cells": np.array([one.candidate.cell for one in rows]).reshape(-1, 3, 3),
        "energies": np.array([one.energy for one in rows], float),
        "rmsd": np.array([one.rmsd for one in rows], float),
        "steps": np.array([one.steps for one in rows], np.int64),
        "converged": np.array([one.converged for one in rows], bool),
        "problems": np.array([one.problem.encode()[:WORDS] for one in rows], f"S{WORDS}"),
    }
    np.savez_compressed(content, **arrays)
    write_bytes(path, content.getvalue())


COLUMNS = ("cells", "energies", "rmsd", "steps", "converged", "problems")  # with one row per structure that is done
ARRAYS = {"digest", "volumes", "model", "limit", "done", "names", "atoms", "numbers", "coords", *COLUMNS}


def _arrays(path: Path) -> dict[str, Any]:
    arrays = read_arrays(path, LARGEST)
    if missing := sorted(ARRAYS - arrays.keys()):
        raise DataError(f"{path} is not a file of relaxed structures: it lacks {missing[0]}; delete it")
    count, total = len(arrays["done"]), int(arrays["atoms"].sum())
    rows = {len(arrays[name]) for name in (*COLUMNS, "names", "atoms")}
    if rows != {count} or {len(arrays[name]) for name in ("coords", "numbers")} != {total}:
        raise DataError(f"{path} is not a file of relaxed structures: its arrays do not fit together; delete it")
    return arrays


def _rows(arrays: dict[str, Any]) -> Found:
    ends = np.cumsum(arrays["atoms"])[:-1]
    names, parts = arrays["names"].tolist(), (np.split(arrays[name], ends) for name in ("numbers", "coords"))
    columns = zip(arrays["done"].tolist(), names, *parts, *(arrays[name] for name in COLUMNS), strict=True)
    return {
        i: Relaxed(
            Candidate(name.decode("utf-8", "replace"), numbers, coords, cell),
            float(energy),
            float(rmsd),
            int(steps),
            problem.decode("utf-8", "replace"),
            bool(converged),
        )
        for i, name, numbers, coords, cell, energy, rmsd, steps, converged, problem in columns
    }


def _read(path: Path, structures: Sequence[Candidate], model: str, steps: int) -> Found:
    arrays = _arrays(path)
    require_same(path, arrays, structures)
    if (made := (str(arrays["model"]), int(arrays["limit"]))) != (model, steps):
        raise MismatchError(
            f"{path} holds relaxations by {made[0]} of at most {made[1]} steps, not by {model} of {steps}; "
            "choose another file"
        )
    return _rows(arrays) if len(arrays["done"]) else {}


def read_relaxed(path: Path) -> Relaxations:
    """Return the relaxed structures of a file: all of them, or the first ones up to a gap.

    Chunks finish out of order. Those after a gap are left out, because hard structures take longer and would be
    missing among them.
    """
    arrays = _arrays(path)
    found = _rows(arrays) if len(arrays["done"]) else {}
    rows = [found[i] for i in itertools.takewhile(found.__contains__, itertools.count())]
    return Relaxations(tuple(rows), str(arrays["model"]), int(arrays["limit"]))
