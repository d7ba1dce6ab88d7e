"""Samples of a user's own from one file: arrays by name, the samples and what goes with each."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from fmwc.errors import DataError
from fmwc.state import SINGLE, State

__all__ = ["READERS", "Samples", "load", "read"]


class Samples(NamedTuple):
    """Samples, if there are any, and conditions, one row a sample."""

    x: State | None
    cond: dict[str, Tensor]


def _npz(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:  # numpy leaves open what it cannot read
        return {name: torch.from_numpy(np.ascontiguousarray(file[name])) for name in file.files}


def _npy(path: Path) -> dict[str, Tensor]:
    return {SINGLE: torch.from_numpy(np.ascontiguousarray(np.load(path, allow_pickle=False)))}


def _torch(path: Path) -> dict[str, Tensor]:
    found = torch.load(path, map_location="cpu", weights_only=True)  # tensors, and nothing that could run
    return {SINGLE: found} if isinstance(found, Tensor) else dict(found)


READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".safetensors": load_file,
    ".pt": _torch,
    ".pth": _torch,
}


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, by what its name ends with."""
    path = Path(path)
    if path.suffix not in READERS:
        raise DataError(f"{path} is none of {', '.join(READERS)}")
    try:
        found = READERS[path.suffix](path)
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read ({reason})") from error
    except Exception as error:  # what a file that is none of its kind makes the libraries raise
        raise DataError(f"{path} holds something else than tensors ({type(error).__name__})") from error
    if not found or not all(isinstance(value, Tensor) for value in found.values()):
        inner = [name for name, value in found.items() if isinstance(value, dict)]
        do = f"; save {inner[0]!r} alone, or let the function load it" if inner else ""
        raise DataError(
            f"{path} holds something else than tensors by name: {', '.join(map(str, found)) or 'nothing'}{do}"
        )
    return found


def load(path: str | Path) -> Samples:
    """Reads samples: `x`, or `x.channel` for each channel, and every other array as a condition of that name."""
    found = read(path)
    parts = {name.removeprefix("x."): v for name, v in found.items() if name.startswith("x.")}
    if parts and SINGLE in found:
        raise DataError(f"{path} holds both x and x.{next(iter(parts))}; samples are one or the other")
    x: State | None = parts or found.get(SINGLE)
    cond = {name: v for name, v in found.items() if name != SINGLE and not name.startswith("x.")}
    rows = {name: len(v) if v.ndim else 0 for name, v in found.items()}
    if len(set(rows.values())) > 1 or 0 in rows.values():
        raise DataError(f"{path} has one row a sample in every array, at least one; got {rows}")
    return Samples(_floats(x), {name: v.float() if v.dtype == torch.float64 else v for name, v in cond.items()})


def _floats(x: State | None) -> State | None:
    if isinstance(x, dict):
        return {name: value.float() for name, value in x.items()}
    return None if x is None else x.float()
