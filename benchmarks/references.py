"""Relax the reference structures of the package's hull with CHGNet, and write their energies.

python -m benchmarks.references --data FOLDER --out references.npz   # all splits of MP-20, with chgnet_energies.npz

References on the hull of the stored energies come first, then those above it up to `--within`; with `--first`, those of
the chemical systems of some samples before all others. Energies are written
after every few chunks; the same command resumes, and `--minutes` ends a run early. On two CPU cores, a structure takes
8 steps of 20 ms on average. On a GPU, the graphs and the steps of FIRE take the time: give one process per CPU core
(`--jobs`), preferably with CUDA's MPS.

A bare machine needs, besides torch, numpy, scipy, safetensors and filelock, only chgnet, pymatgen-core, ase, monty,
spglib and orjson. Other packages that these import but never use here may be missing.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import io
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from fmwc.crystals import mp20
from fmwc.crystals.energy import calculator
from fmwc.crystals.hull import folder_hull
from fmwc.crystals.relaxation import relax_all
from fmwc.crystals.structures import Candidate, Crystals, candidates, crystals_of, symbol
from fmwc.errors import DataError
from fmwc.files import write_bytes
from fmwc.readers import read_arrays
from fmwc.sampling import Trajectory

UNUSED = {"lxml", "matplotlib", "nvidia_smi", "palettable", "ruamel", "tabulate", "tqdm"}
WRITE_EVERY = 20.0  # seconds
COLUMNS = {  # NaN: the relaxation failed
    "material_id": "S16",
    "split": "S5",
    "formula": "S64",
    "energy": np.float32,  # eV/atom, as stored with the data
    "e_above_hull": np.float32,  # eV/atom, by these energies
    "relaxed": np.float32,  # eV/atom
    "rmsd": np.float32,  # Å
    "steps": np.uint16,
    "converged": bool,
}

Row = tuple[Any, ...]


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Replaces packages that are imported but not used."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        unused = name.partition(".")[0] in UNUSED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="default: FMWC_DATA")
    parser.add_argument("--out", type=Path, default=Path("references.npz"))
    parser.add_argument("--relax", type=int, default=100, help="maximum number of steps")
    parser.add_argument("--within", type=float, default=0.1, help="eV/atom above the hull")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no chunk after this time; 0 for no limit")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the GPU if there is one")
    parser.add_argument("--chunk", type=int, default=256, help="structures relaxed together")
    parser.add_argument("--count", type=int, default=0, help="the first so many only; 0 for all")
    parser.add_argument("--first", type=Path, help="samples.safetensors of crystals whose chemical systems come first")
    parser.add_argument("--calculator", default="chgnet")
    arguments = parser.parse_args()
    begin = time.monotonic()
    deadline = begin + 60 * arguments.minutes if arguments.minutes else float("inf")
    found = read(arguments.out) if arguments.out.exists() else []
    chosen = references(arguments.data, arguments.within)
    if arguments.first:
        wanted = systems(crystals_of(Trajectory.load(arguments.first)))
        chosen.sort(key=lambda one: frozenset(one[1].numbers.tolist()) not in wanted)  # stable: near the hull first
        print(f"{sum(frozenset(one.numbers.tolist()) in wanted for _, one in chosen)} references come first")
    chosen = chosen[: arguments.count or None]
    known = {row[0] for row in found}
    rest = [one for one in chosen if one[0][0] not in known]
    print(f"{len(chosen)} references, {len(chosen) - len(rest)} of them in {arguments.out}", flush=True)
    chunks = [rest[start : start + arguments.chunk] for start in range(0, len(rest), arguments.chunk)]
    before, written = len(found), time.monotonic()
    options = arguments.calculator, arguments.relax, deadline
    for rows in filter(None, relaxed(chunks, options, arguments.jobs)):
        found += rows
        took = time.monotonic() - begin
        done = [row for row in found if np.isfinite(row[5])]
        print(
            f"{len(found)} of {len(chosen)} after {took:.0f} s ({(len(found) - before) / took:.1f}/s): "
            f"{len(found) - len(done)} failed, {np.mean([row[8] for row in done] or [0]):.1%} converged, "
            f"{np.mean([row[7] for row in done] or [0]):.1f} steps, "
            f"energies change by {1000 * np.mean([row[5] - row[3] for row in done] or [0]):.2f} meV/atom",
            flush=True,
        )
        if time.monotonic() - written > WRITE_EVERY:
            write(arguments.out, found)
            written = time.monotonic()
    write(arguments.out, found)
    print(f"{arguments.out}: {len(found)} of {len(chosen)} references")


def references(data: str | None, within: float) -> list[tuple[Row, Candidate]]:
    """Return the references near the hull, the nearest first: the first columns of each row, and its structure."""
    stored = mp20.energies(data)
    if stored is None:
        raise DataError(f"{data or 'FMWC_DATA'} contains no {mp20.ENERGIES}")
    energy, hull = dict(zip(stored[0], stored[1].tolist(), strict=True)), folder_hull(data)
    chosen = []
    for split, crystals in mp20.load_all(data).items():
        for one in candidates(crystals):
            above = hull.above(one.key, energy[one.name])[0] if one.name in energy else np.inf
            if above <= within:
                chosen.append(((one.name, split, formula(one), energy[one.name], max(above, 0.0)), one))
    return sorted(chosen, key=lambda one: one[0][4])


def systems(crystals: Crystals) -> set[frozenset[int]]:
    """Return the chemical systems of crystals with all their subsystems."""
    found = {frozenset(row) - {0} for row in crystals.numbers.tolist()}
    return {frozenset(part) for one in found for size in range(1, len(one) + 1) for part in combinations(one, size)}


def formula(candidate: Candidate) -> str:
    """Return the reduced composition as a formula."""
    return "".join(f"{symbol(z)}{count if count > 1 else ''}" for z, count in candidate.key)


def relaxed(
    chunks: Sequence[Sequence[tuple[Row, Candidate]]], options: tuple[str, int, float], jobs: int
) -> Iterator[list[Row]]:
    """Relax chunks in several processes, and yield the rows of each as it is finished."""
    if jobs <= 1:
        yield from (relax_chunk(chunk, *options) for chunk in chunks)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_job, [(chunk, *options) for chunk in chunks])


def _job(task: Any) -> list[Row]:
    return relax_chunk(*task)


def relax_chunk(chunk: Sequence[tuple[Row, Candidate]], model: str, steps: int, deadline: float) -> list[Row]:
    """Return the rows of relaxed structures; none after the deadline."""
    if time.monotonic() > deadline:  # this clock is the same in all processes
        return []
    torch.set_num_threads(1)
    found = relax_all([candidate for _, candidate in chunk], calculator(model), steps)
    return [(*row, one.energy, one.rmsd, one.steps, one.converged) for (row, _), one in zip(chunk, found, strict=True)]


def write(path: Path, rows: Sequence[Row]) -> None:
    columns = zip(*rows, strict=True) if rows else [[]] * len(COLUMNS)
    content = io.BytesIO()
    np.savez_compressed(
        content,
        **{name: np.array(list(c), kind) for (name, kind), c in zip(COLUMNS.items(), columns, strict=True)},
    )
    write_bytes(path, content.getvalue())


def read(path: Path) -> list[Row]:
    arrays = read_arrays(path)
    if missing := [name for name in COLUMNS if name not in arrays]:
        raise DataError(f"{path} is not a file of this command: it lacks {missing[0]}; delete it")
    columns = [arrays[name] for name in COLUMNS]
    columns = [column.astype(str) if column.dtype.kind == "S" else column for column in columns]
    return list(zip(*(column.tolist() for column in columns), strict=True))


sys.meta_path.append(_Missing())  # asked last, so only for packages that are not installed

if __name__ == "__main__":
    main()
