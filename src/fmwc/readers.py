"""Readers of JSON, text and tensor files, which check types, ranges and sizes before they allocate memory.

Only regular files up to a size limit are read. Sizes that a file declares (shapes, numbers of entries, sizes inside an
archive) are checked first. Invalid files raise a one-line error.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fmwc.errors import DataError, FmwcError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Check",
    "array",
    "boolean",
    "check",
    "choice",
    "mapping",
    "number",
    "open_regular",
    "optional",
    "parse_json",
    "read_arrays",
    "read_bytes",
    "read_csv",
    "read_json",
    "read_pt",
    "read_safetensors",
    "read_text",
    "record",
    "text",
    "unpacked",
    "whole",
]

MEBIBYTE = 1 << 20
TEXT_LIMIT = 256 * MEBIBYTE  # tables and other text
JSON_LIMIT = 64 * MEBIBYTE
TENSOR_LIMIT = 16 << 30  # limit of a tensor file and of its unpacked content
FREE = 64 * MEBIBYTE  # an archive may unpack to this many bytes, plus
RATIO = 100  # this many times its size; images and crystals are compressed 5 to 40 times, archive bombs 1,000 times
COLUMNS = 1000  # of a table
CELLS = 20_000_000
NAMES = 100_000  # tensors per file
DIMENSIONS = 16


# ---- files -------------------------------------------------------------------------------------------------------


def open_regular(path: str | Path, limit: int, error: type[FmwcError] = DataError) -> BinaryIO:
    """Open a regular file of at most `limit` bytes; raise for a pipe or a device, without waiting for it."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as problem:
        raise error(f"{shown(path)} cannot be read ({getattr(problem, 'strerror', '') or problem})") from problem
    file = os.fdopen(handle, "rb") if stat.S_ISREG((found := os.fstat(handle)).st_mode) else None
    if file is None:
        os.close(handle)
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "device, pipe or socket"
        raise error(f"{shown(path)} is a {kind}, not a file")
    if found.st_size > limit:
        file.close()
        raise error(f"{shown(path)} has {found.st_size:,} bytes; at most {limit:,} are read")
    return file


def read_bytes(path: str | Path, limit: int = TEXT_LIMIT, error: type[FmwcError] = DataError) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    with open_regular(path, limit, error) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # the file has grown, or its size was unknown (/proc)
        raise error(f"{shown(path)} has more than {limit:,} bytes")
    return content


def read_text(path: str | Path, limit: int = TEXT_LIMIT, error: type[FmwcError] = DataError) -> str:
    """Return the text of a UTF-8 file, with or without a byte-order mark."""
    try:
        return read_bytes(path, limit, error).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{shown(path)} is not UTF-8 text ({problem.reason} at byte {problem.start})") from problem


def unpacked(size: int, limit: int) -> int:
    """Return the number of bytes that an archive of `size` bytes may unpack to."""
    return min(limit, FREE + RATIO * size)


def read_csv(path: str | Path, limit: int = TEXT_LIMIT, error: type[FmwcError] = DataError) -> Iterator[list[str]]:
    """Yield the rows of a UTF-8 CSV file with a bounded number of columns and cells."""
    content = read_text(path, limit, error)
    if "\0" in content:
        raise error(f"{shown(path)} holds NUL bytes, so it is not a CSV file")
    cells = 0
    try:
        for row in csv.reader(io.StringIO(content, newline=""), strict=True):
            cells += len(row)
            if len(row) > COLUMNS or cells > CELLS:
                raise error(
                    f"{shown(path)} has {len(row):,} columns in a row, or more than {CELLS:,} cells in all; at most "
                    f"{COLUMNS:,} columns are read"
                )
            yield row
    except csv.Error as problem:
        raise error(f"{shown(path)} is truncated or not a CSV file ({problem}); copy it again") from problem


def shown(path: str | Path) -> str:
    """Return a path with unprintable characters replaced, for messages."""
    return "".join(c if c.isprintable() else "?" for c in str(path))


# ---- JSON --------------------------------------------------------------------------------------------------------

Check = Callable[[Any, str], Any]  # (value, where) -> value; raises DataError


def parse_json(content: str, what: str, error: type[FmwcError] = DataError) -> Any:
    """Parse JSON; raise for NaN and infinity, which Python would accept."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a number")

    try:
        return json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else problem
        raise error(f"{what} is not JSON ({reason})") from problem


def read_json(path: str | Path, schema: Check, limit: int = JSON_LIMIT, error: type[FmwcError] = DataError) -> Any:
    """Return the content of a JSON file; raise if it does not pass a schema."""
    return check(parse_json(read_text(path, limit, error), shown(path), error), schema, shown(path), error)


def check(value: Any, schema: Check, what: str, error: type[FmwcError] = DataError) -> Any:
    """Return the value if it passes the schema; otherwise raise `error` with the location and the reason."""
    try:
        return schema(value, "")
    except DataError as problem:
        raise error(f"{what}: {problem}") from problem


def _wrong(where: str, expected: str, value: Any) -> DataError:
    simple = isinstance(value, (int, float, str))
    got = "nothing" if value is None else repr(value) if simple else type(value).__name__
    return DataError(f"{where or 'the content'} must be {expected}, got {got[:60]}")


def _leaf(expected: str, passes: Callable[[Any], bool]) -> Check:
    """Return a check of a single value."""

    def run(value: Any, where: str) -> Any:
        if not passes(value):
            raise _wrong(where, expected, value)
        return value

    return run


def number(low: float = -math.inf, high: float = math.inf, *, open_low: bool = False, open_high: bool = False) -> Check:
    """Check for a finite number in a range."""
    expected = "a finite number"
    if low > -math.inf or high < math.inf:
        expected += f" in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"

    def passes(value: Any) -> bool:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e300:
            return False
        return low <= value <= high and not (open_low and value == low) and not (open_high and value == high)

    return _leaf(expected, passes)


def whole(low: int = 0, high: int = 1 << 62) -> Check:
    """Check for an integer in a range."""
    expected = f"{low}" if low == high else f"a whole number from {low} to {high}"
    return _leaf(expected, lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high)


boolean = _leaf("true or false", lambda v: isinstance(v, bool))


def text(longest: int = 10_000, pattern: str = "") -> Check:
    """Check for a string."""
    expected = f"text like {pattern}" if pattern else f"text of at most {longest} characters"
    fits = re.compile(pattern or ".*", 0 if pattern else re.DOTALL).fullmatch
    return _leaf(expected, lambda v: isinstance(v, str) and len(v) <= longest and fits(v) is not None)


def choice(*names: str) -> Check:
    """Check for one of several strings."""
    return _leaf(f"one of {', '.join(names)}", lambda v: isinstance(v, str) and v in names)


def optional(inner: Check) -> Check:
    """Check for null or a value that passes another check."""
    return lambda value, where: None if value is None else inner(value, where)


def array(inner: Check, least: int = 0, most: int = 1_000_000, *, rising: bool = False) -> Check:
    """Check for a list; with `rising`, it must be sorted."""

    def run(value: Any, where: str) -> Any:
        if not isinstance(value, list) or not least <= len(value) <= most:
            size = f"{len(value)} entries" if isinstance(value, list) else value
            raise _wrong(where, f"a list of {least} to {most} entries", size)
        items = [inner(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if rising and any(b < a for a, b in pairwise(items)):
            raise DataError(f"{where or 'the list'} must be sorted")
        return items

    return run


def mapping(inner: Check, most: int = 100_000) -> Check:
    """Check for an object with any keys whose values all pass a check."""

    def run(value: Any, where: str) -> Any:
        if not isinstance(value, dict) or len(value) > most:
            raise _wrong(where, f"an object of at most {most} entries", value)
        return {key: inner(item, f"{where}.{key}" if where else key) for key, item in value.items()}

    return run


def anything(value: Any, where: str) -> Any:
    """Accept any JSON value."""
    return value


def record(needed: Mapping[str, Check], may: Mapping[str, Check] | None = None, *, more: bool = False) -> Check:
    """Check for an object with these keys.

    Arguments:
        needed: Required keys.
        may: Optional keys; null counts as absent.
        more: Whether other keys are allowed.
    """

    def run(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        if missing := [key for key in needed if key not in value]:
            raise DataError(f"{where or 'the content'} lacks '{missing[0]}'")
        if not more and (unknown := [key for key in value if key not in needed and key not in (may or {})]):
            raise DataError(f"{where or 'the content'} has an unknown entry '{unknown[0][:60]}'")
        checked = dict(value)
        for key, inner in {**{k: optional(c) for k, c in (may or {}).items()}, **needed}.items():
            if key in value:
                checked[key] = inner(value[key], f"{where}.{key}" if where else key)
        return checked

    return run


# ---- tensors -----------------------------------------------------------------------------------------------------


def read_safetensors(
    path: str | Path, limit: int = TENSOR_LIMIT, error: type[FmwcError] = DataError
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a .safetensors file."""
    from safetensors import safe_open

    open_regular(path, limit, error).close()
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if len(names) > NAMES:
                raise ValueError(f"it holds {len(names)} tensors")
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except Exception as problem:  # the library raises various types
        raise error(f"{shown(path)} is not a safetensors file, or is truncated ({_reason(problem)})") from problem


def read_arrays(path: str | Path, limit: int = TENSOR_LIMIT, error: type[FmwcError] = DataError) -> dict[str, Any]:
    """Return the arrays of an .npz file by name, or the array of an .npy file under the name "".

    The declared sizes are checked against the limits before anything is unpacked.
    """
    try:
        with open_regular(path, limit, error) as file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                return {"": _npy(file, os.fstat(file.fileno()).st_size)}
            with zipfile.ZipFile(file) as archive:
                members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
                size = sum(m.file_size for m in members)
                if size > (most := unpacked(os.fstat(file.fileno()).st_size, limit)):
                    raise error(
                        f"{shown(path)} unpacks to {size:,} bytes; at most {most:,} are read from a file of its size"
                    )
                if len(members) > NAMES or len({m.filename for m in members}) < len(members):
                    raise ValueError("it has too many entries, or entries with equal names")
                found = {}
                for member in members:
                    with archive.open(member) as inner:
                        found[member.filename.removesuffix(".npy")] = _npy(inner, member.file_size)
                return found
    except FmwcError:
        raise
    except Exception as problem:
        raise error(f"{shown(path)} is not an .npy or .npz file, or is truncated ({_reason(problem)})") from problem


def _npy(file: Any, size: int) -> np.ndarray:
    """Read one array; raise if its header declares more than `size` bytes."""
    version = np.lib.format.read_magic(file)
    if version == (3, 0):
        raise ValueError("it is a structured array")
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"its format version {version} is not known")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    if len(shape) > DIMENSIONS or any(n < 0 for n in shape):
        raise ValueError(f"its shape is {shape}")
    count = math.prod(shape)
    if count * dtype.itemsize > size:
        raise ValueError(f"its header declares {count * dtype.itemsize:,} bytes, but it has {size:,}")
    found = np.empty(count * dtype.itemsize, np.uint8)
    done = 0
    while done < len(found):  # in pieces, so that memory holds only one copy
        piece = file.read(min(16 * MEBIBYTE, len(found) - done))
        if not piece:
            raise ValueError("it is truncated")
        found[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
        done += len(piece)
    return found.view(dtype).reshape(shape, order="F" if fortran else "C")


def read_pt(path: str | Path, limit: int = TENSOR_LIMIT, error: type[FmwcError] = DataError) -> Any:
    """Return the content of a file of torch.save, which may hold only tensors in dicts and lists."""
    import torch
    from torch.utils._pytree import tree_leaves

    try:
        with open_regular(path, limit, error) as file:
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    size = sum(m.file_size for m in archive.infolist())
                    if size > limit or size > 2 * os.fstat(file.fileno()).st_size + MEBIBYTE:  # torch does not compress
                        raise ValueError(f"it unpacks to {size:,} bytes")
            file.seek(0)
            found = torch.load(file, map_location="cpu", weights_only=True)
    except FmwcError:
        raise
    except Exception as problem:  # torch's message suggests unsafe loading
        raise error(
            f"{shown(path)} holds something other than tensors, or is truncated ({type(problem).__name__})"
        ) from problem
    for leaf in tree_leaves(found):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            if leaf.numel() * leaf.element_size() > leaf.untyped_storage().nbytes():
                raise error(
                    f"{shown(path)} holds a tensor of shape {tuple(leaf.shape)} with overlapping memory; save x.clone()"
                )
        elif isinstance(leaf, torch.Tensor):
            raise error(f"{shown(path)} holds a tensor of layout {leaf.layout}; save it dense")
    return found


def _reason(problem: Exception) -> str:
    lines = str(problem).splitlines()
    return shown(lines[0])[:200] if lines else type(problem).__name__
