"""Read samples and conditions from a file of named arrays, and hash a data set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import DataError
from fmwc.readers import read_arrays, read_pt, read_safetensors, shown
from fmwc.state import SINGLE, State, channels, tree_map

__all__ = ["READERS", "Samples", "fingerprint", "load", "read", "samples_of"]

LIMIT = 8 << 30  # maximum bytes of a file, and of its numbers in single precision


class Samples(NamedTuple):
    """Samples, if any, and conditions, with one row per sample."""

    x: State | None
    cond: dict[str, Tensor]


def _numpy(path: Path) -> dict[str, Tensor]:
    arrays = {name or SINGLE: value for name, value in read_arrays(path, LIMIT).items()}
    if odd := [name for name, value in arrays.items() if value.dtype.kind not in "fiub" or value.dtype.itemsize > 8]:
        raise DataError(f"{path}: '{odd[0][:60]}' has the type {arrays[odd[0]].dtype}; save numbers")
    try:
        return {name: torch.from_numpy(_native(value)) for name, value in arrays.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"{path} holds arrays that cannot be converted to tensors ({error})") from error


def _native(value: np.ndarray) -> np.ndarray:
    """Convert an array to this machine's byte order."""
    return np.ascontiguousarray(value, value.dtype.newbyteorder("="))


def _torch(path: Path) -> Any:
    content = read_pt(path, LIMIT)
    return {SINGLE: content} if isinstance(content, Tensor) else content


READERS: dict[str, Callable[[Path], Any]] = {
    ".npz": _numpy,
    ".npy": _numpy,
    ".safetensors": lambda path: read_safetensors(path, LIMIT)[0],
    ".pt": _torch,
    ".pth": _torch,
}


def read(path: str | Path) -> dict[str, Tensor]:
    """Read the tensors of a file, by name. The extension determines the format."""
    path = Path(path)
    if path.suffix not in READERS:
        raise DataError(f"{shown(path)} must have one of the extensions {', '.join(READERS)}")
    content = READERS[path.suffix](path)
    named = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not named or not content or not all(isinstance(value, Tensor) for value in content.values()):
        inner = [name for name, value in content.items() if isinstance(value, dict)] if named else []
        remedy = f"; save {inner[0][:60]!r} alone, or let the function load it" if inner else ""
        held = ", ".join(content)[:200] or "nothing" if named else type(content).__name__
        raise DataError(f"{shown(path)} must hold named tensors only, but holds {held}{remedy}")
    return dict(content)


def load(path: str | Path) -> Samples:
    """Read samples from `x`, or from `x.channel` for each channel. Every other array is a condition of that name."""
    return samples_of(read(path), path)


def samples_of(tensors: Mapping[str, Tensor], path: str | Path) -> Samples:
    """Split the tensors of a file into samples and conditions; raise if their sizes do not match."""
    parts = {name.removeprefix("x."): v for name, v in tensors.items() if name.startswith("x.")}
    if parts and SINGLE in tensors:
        raise DataError(f"{path} holds both x and x.{next(iter(parts))}; keep one of them")
    x: State | None = parts or tensors.get(SINGLE)
    cond = {name: v for name, v in tensors.items() if name != SINGLE and not name.startswith("x.")}
    rows = {name: len(v) if v.ndim else 0 for name, v in tensors.items()}
    if len(set(rows.values())) > 1 or 0 in rows.values():
        raise DataError(f"{path} needs one row per sample in every array, and at least one; got {rows}")
    if odd := [name for name, v in tensors.items() if v.is_complex() or v.is_quantized]:
        raise DataError(f"{path}: '{odd[0]}' has the type {tensors[odd[0]].dtype}; save real numbers")
    if (size := 4 * sum(v.numel() for v in channels(x).values()) if x is not None else 0) > LIMIT:
        raise DataError(f"{path} takes {size:,} bytes in single precision; give at most {LIMIT:,}")
    x = None if x is None else tree_map(Tensor.float, x)
    return Samples(x, {name: v.float() if v.dtype == torch.float64 else v for name, v in cond.items()})


def fingerprint(*data: State) -> str:
    """Return a short hash of training data."""
    digest = hashlib.sha256()
    for tensor in (value for row in data for value in channels(row).values()):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
