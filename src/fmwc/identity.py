"""Content hashes, which link checkpoints, references, schedules, samples and certificates.

A checkpoint's record holds the hash of each of its files and a hash of itself. A samples file holds the identity of its
checkpoint, its sampling configuration, and a hash of its content. A certificate holds the identity of what it is
valid for. Readers compare hashes and raise an error that names the difference.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.errors import MismatchError

__all__ = [
    "SEAL",
    "checksum",
    "difference",
    "digest",
    "digest_bytes",
    "digest_file",
    "digest_parts",
    "digest_tensors",
    "plain",
    "require_same",
    "seal",
    "sealed",
]

SEAL = "sha256"  # key of the hash of the record itself
CHUNK = 1 << 20
PIECE = 1 << 16  # values of a tensor that are added together
SHOWN = 3  # differences listed in a message


def plain(value: Any) -> Any:
    """Convert a value for JSON: tuples to lists, numpy numbers to Python numbers, infinities to text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_bytes(content: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def digest_tensors(tensors: Mapping[str, Any], about: Any = None) -> str:
    """Return the SHA-256 of named tensors (names, types, shapes, values) and of a JSON value."""
    import torch  # slow to import, and not needed to hash records

    def content(tensor: Any) -> Iterable[Any]:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return digest_parts({n: (str(t.dtype), tuple(t.shape), content(t)) for n, t in tensors.items()}, about)


def digest_parts(parts: Mapping[str, tuple[str, tuple[int, ...], Iterable[Any]]], about: Any = None) -> str:
    """Return the hash of :func:`digest_tensors` from the type, shape and pieces of the bytes of each tensor."""
    found = hashlib.sha256(digest(about).encode())
    for name in sorted(parts):
        dtype, shape, content = parts[name]
        found.update(f"{name}|{dtype}|{shape}|".encode())
        for piece in content:
            found.update(piece)
    return found.hexdigest()


def checksum(tensors: Mapping[str, Any]) -> int:
    """Return an integer that changes if a value of these tensors changes, computed on their device in milliseconds.

    Each value, in single precision and read as an integer, is multiplied by a fixed odd weight modulo 2³², and these
    products are added. The weights are irregular in the position: with regular ones, doubling all weights of a layer
    may not change the sum.
    """
    import torch

    total, weights = 0, {}
    for name in sorted(tensors):
        value = tensors[name]
        if not isinstance(value, torch.Tensor):
            continue  # state of a module that is not a tensor
        value = torch.view_as_real(value) if value.is_complex() else value
        value = value.detach().reshape(-1)
        bits = value.float().view(torch.int32) if value.is_floating_point() else value.int()
        if value.device not in weights:
            weights[value.device] = _irregular(torch.arange(PIECE, dtype=torch.int32, device=value.device))
        sums = [(piece * weights[value.device][: len(piece)]).sum() for piece in bits.split(PIECE)]
        for part in torch.stack(sums).tolist():
            total = (total * 6364136223846793005 + part) % (1 << 64)
    return total


def _irregular(positions: Any) -> Any:
    """Return an odd 32-bit integer for each position (the mixing steps of MurmurHash3)."""
    mixed = (positions + 1) * -2048144789
    mixed = (mixed ^ (mixed >> 13)) * -1028477387
    return (mixed ^ (mixed >> 16)) | 1


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with its hash added."""
    bare = {key: value for key, value in record.items() if key != SEAL}
    return {**bare, SEAL: digest(bare)}


def sealed(record: Mapping[str, Any]) -> bool:
    """Return whether a record's hash matches its content."""
    return record.get(SEAL) == digest({key: value for key, value in record.items() if key != SEAL})


def difference(expected: Any, found: Any, where: str = "") -> str:
    """Describe the differences between two JSON values; empty if they are equal.

    >>> difference({"steps": 50, "seed": 0}, {"steps": 5, "seed": 0})
    'steps: 50 before, 5 now'
    """
    rows = [*_differences(plain(expected), plain(found), where)]
    return "; ".join(rows[:SHOWN]) + (f"; and {len(rows) - SHOWN} more" if len(rows) > SHOWN else "")


def _differences(expected: Any, found: Any, where: str) -> Iterable[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in [*expected, *(key for key in found if key not in expected)]:
            inner = f"{where}.{key}" if where else key
            yield from _differences(expected.get(key), found.get(key), inner)
    elif expected != found or isinstance(expected, bool) != isinstance(found, bool):
        before, now = _short(expected), _short(found)
        yield f"{where or 'value'}: {before} before, {now if now != before else 'another one'} now"


def _short(value: Any) -> str:
    text = "none" if value is None or value == "" else value if isinstance(value, str) else json.dumps(value)
    if re.fullmatch("[0-9a-f]{64}", text):
        return text[:12]  # a hash
    return text if len(text) <= 60 else f"{text[:57]}…"


def require_same(expected: Any, found: Any, what: str) -> None:
    """Raise :class:`MismatchError` if two identities differ; `what` begins the message."""
    if rows := difference(expected, found):
        raise MismatchError(f"{what} ({rows})")
