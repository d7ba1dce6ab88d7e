"""Random changes of JSON values, bytes and tensors, drawn from a given generator."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["NUMBERS", "WORDS", "change_bytes", "change_json", "change_lines", "change_tensors", "json_text", "reseal"]

NUMBERS: list[Any] = [
    0, 1, -1, 2, 255, 2**31, 2**53, 2**63, 2**70, 10**30, -(10**30), 0.5, -0.5, 1e-320, 1e308, -1e308, 30_000_000,
    float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
WORDS = ["", " ", "\0", "nan", "1e400", "../../etc/passwd", "/dev/zero", "é\u2028\x1b[31m", "a" * 5_000, "[/x]", "name"]


def _value(rng: random.Random) -> Any:
    nest: Any = rng.choice(NUMBERS)
    for _ in range(rng.randrange(4)):
        nest = [nest] * rng.randrange(3) if rng.random() < 0.5 else {rng.choice(WORDS): nest}
    return rng.choice([None, True, False, rng.choice(NUMBERS), rng.choice(WORDS), [], {}, nest])


def change_json(rng: random.Random, value: Any) -> Any:
    """Return the value with a few parts replaced, removed, repeated or of another type."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        parent, key = _place(rng, value)
        if parent is None:
            return _value(rng)
        old = parent[key]
        action = rng.randrange(6)
        if action == 0:
            del parent[key]
        elif action == 1 and isinstance(parent, dict):
            parent[rng.choice(WORDS)] = old
        elif action == 2 and isinstance(old, (int, float)) and not isinstance(old, bool):
            parent[key] = rng.choice([-old, old + 1, float(old), str(old), [old], old * 1e6])
        elif action == 3 and isinstance(old, list) and old:
            parent[key] = rng.choice([old[::-1], old[:-1], old * 2, old[0], dict(enumerate(map(str, old)))])
        elif action == 4 and isinstance(old, dict):
            parent[key] = rng.choice([list(old), list(old.values()), str(old)[:200]])
        else:
            parent[key] = _value(rng)
    return value


def _place(rng: random.Random, value: Any) -> tuple[Any, Any]:
    """Return a random part of a JSON value as (parent, key), chosen level by level favouring upper levels."""
    parent, key = None, None
    while isinstance(value, (dict, list)) and value and (parent is None or rng.random() < 0.75):
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        parent, value = value, value[key]
    return parent, key


def json_text(rng: random.Random, value: Any) -> bytes:
    """Return the value as text; sometimes text that is not JSON, or is deeply nested."""
    text = json.dumps(value).encode()
    action = rng.randrange(30)
    if action == 0:
        return b"[" * 200_000
    if action == 1:
        return b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    if action == 2:
        return b"9" * 10_000
    if action == 3:
        return b"\xef\xbb\xbf" + text
    return change_bytes(rng, text) if action < 7 else text


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with bits flipped, or with pieces removed, repeated, zeroed or randomised."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(found)) if found else 0
        # Prefer the beginning and the end, where headers are.
        at = min(at, rng.choice([len(found), 64, 512])) if rng.random() < 0.7 else at
        size = rng.choice([1, 2, 8, 64, 1000])
        action = rng.randrange(7)
        if action == 0 and found:
            found[min(at, len(found) - 1)] ^= 1 << rng.randrange(8)
        elif action == 1:
            del found[at:]
        elif action == 2:
            del found[at : at + size]
        elif action == 3:
            found[at:at] = found[at : at + size]
        elif action == 4:
            found[at : at + size] = bytes(size)
        elif action == 5:
            found[at : at + size] = rng.randbytes(size)
        else:
            found[at : at + 8] = rng.choice([2**63 - 1, 2**32, 0, 2**64 - 1]).to_bytes(8, "little")
    return bytes(found)


def change_lines(rng: random.Random, text: str) -> bytes:
    """Return text with words and lines replaced, or with its bytes changed."""
    if rng.random() < 0.3:
        return change_bytes(rng, text.encode())
    lines = text.split("\n")
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(lines))
        words = lines[at].split(rng.choice([" ", ","]))
        action = rng.randrange(6)
        if action == 0:
            lines[at] = ""
        elif action == 1:
            lines.insert(at, lines[at])
        elif action == 2:
            lines[at] = rng.choice(['"', ",,,,", "'", ";", "loop_", "data_x", "_cell_length_a -4", "1" * 500, "# é"])
        elif action == 3:
            lines[at] += rng.choice([",", " ", "\r", "\0", "é", ",1"])
        else:
            words[rng.randrange(len(words))] = str(rng.choice([*NUMBERS, *WORDS]))
            lines[at] = ("," if "," in lines[at] else " ").join(words)
    return "\n".join(lines).encode("utf-8", "replace")


def _retyped(rng: random.Random, tensor: Tensor) -> Tensor:
    types = [torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.bfloat16, torch.complex64]
    types.append(torch.float8_e4m3fn)
    return tensor.to(rng.choice(types))


def _poisoned(rng: random.Random, tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    if tensor.numel():
        value = rng.choice([float("nan"), float("inf"), -1.0, 1e30])
        tensor.view(-1)[rng.randrange(tensor.numel())] = value if tensor.is_floating_point() else -(2**7)
    return tensor


TENSOR_CHANGES: list[Callable[[random.Random, Tensor], Tensor]] = [
    _retyped,
    _poisoned,
    lambda rng, t: t[:-1].clone() if t.ndim else t[None],
    lambda rng, t: t[None].clone(),
    lambda rng, t: t.flatten().clone(),
    lambda rng, t: t.transpose(0, -1).contiguous() if t.ndim > 1 else t,
    lambda rng, t: torch.zeros(rng.choice([(), (0,), (3,), (0, 3), (1,) * 9]), dtype=t.dtype),
    lambda rng, t: torch.cat([t, t]) if t.ndim else t,
]


def change_tensors(rng: random.Random, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with other shapes, types, values or names."""
    found = dict(tensors)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not found:
            break
        name = rng.choice(list(found))
        action = rng.randrange(len(TENSOR_CHANGES) + 2)
        if action == 0:
            del found[name]
        elif action == 1:
            found[rng.choice(["x", "x.y", "cond.a", "standard.b", "..", "é", "a" * 300])] = found[name].clone()
        else:
            found[name] = TENSOR_CHANGES[action - 2](rng, found[name])
    return found


def reseal(record: Any) -> Any:
    """Return a record with the hash of its changed content, so that the code behind the hash check is tested too."""
    if not isinstance(record, dict) or "sha256" not in record:
        return record
    try:
        from fmwc.identity import seal

        return seal(record)
    except (ImportError, ValueError, RecursionError, OverflowError):
        return {**record, "sha256": hashlib.sha256(b"").hexdigest()}
