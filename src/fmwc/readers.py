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
import pickletools
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "open_parquet",
    "open_regular",
    "optional",
    "parquet_table",
    "parse_json",
    "read_arrays",
    "read_bytes",
    "read_csv",
    "read_json",
    "read_parquet",
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
FREE_CELLS = 1_000_000  # a Parquet file may have this many cells, plus RATIO times its bytes
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


def open_parquet(file: BinaryIO, what: str, error: type[FmwcError] = DataError) -> Any:
    """Return a `pyarrow.parquet.ParquetFile` after checking the sizes that it declares (requires `pyarrow`).

    Columns of text are read as indices into their distinct values, because a small file may repeat a long text in each
    of many rows; :func:`parquet_table` decodes them.
    """
    from pyarrow import types
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(file, page_checksum_verification=True)
    described, schema = parquet.metadata, parquet.schema_arrow
    groups = [described.row_group(i) for i in range(described.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    cells = max(described.num_rows * described.num_columns, sum(column.num_values for column in columns))
    size = os.fstat(file.fileno()).st_size
    if (total := sum(column.total_uncompressed_size for column in columns)) > unpacked(size, TENSOR_LIMIT):
        raise error(f"{what} unpacks to {total:,} bytes, which is too many for a file of {size:,} bytes")
    if cells > FREE_CELLS + RATIO * size:
        raise error(f"{what} has {cells:,} cells, which is too many for a file of {size:,} bytes")
    if odd := [one.name for one in schema if types.is_nested(one.type) and not _of_numbers(one.type)]:
        raise error(
            f"{what} has the column '{shown(odd[0])[:60]}' of {schema.field(odd[0]).type}; write numbers or text"
        )
    texts = [one.name for one in schema if _is_text(one.type)]
    return ParquetFile(file, metadata=described, read_dictionary=texts, page_checksum_verification=True)


def parquet_table(
    parquet: Any, what: str, error: type[FmwcError] = DataError, columns: Sequence[str] | None = None
) -> Any:
    """Return the `pyarrow.Table` of a file of :func:`open_parquet`, or some columns, unless its text is too long."""
    import pyarrow as pa
    from pyarrow import compute, types

    table = parquet.read(None if columns is None else [*columns])
    longest = 0
    for place, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if not types.is_dictionary(column.type) or not _is_text(column.type.value_type):
            continue
        for piece in column.chunks:
            longest += compute.sum(compute.binary_length(piece.dictionary).take(piece.indices)).as_py() or 0
        if longest > TEXT_LIMIT:
            raise error(f"{what} holds more than {TEXT_LIMIT:,} bytes of text in '{shown(name)[:60]}'")
        table = table.set_column(place, pa.field(name, column.type.value_type), column.cast(column.type.value_type))
    return table


def read_parquet(path: str | Path, error: type[FmwcError] = DataError) -> Any:
    """Return the `pyarrow.Table` of a Parquet file (requires `pyarrow`)."""
    from pyarrow import ArrowException

    try:
        with open_regular(path, TEXT_LIMIT, error) as file:
            return parquet_table(open_parquet(file, shown(path), error), shown(path), error)
    except (ArrowException, OSError) as problem:
        raise error(f"{shown(path)} is not a Parquet file ({_reason(problem)[:100]})") from problem


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


def _of_numbers(kind: Any) -> bool:
    from pyarrow import types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(types.is_dictionary(kind) or (lists and types.is_primitive(kind.value_type)))


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
    """Return the content of a file of torch.save, which may hold only tensors and numbers in dicts and lists.

    What the file would build is checked before anything is built.
    """
    import torch

    try:
        with open_regular(path, limit, error) as file:
            with zipfile.ZipFile(file) as archive:  # torch.save writes no other format since version 1.6
                members = archive.infolist()
                size = sum(m.file_size for m in members)
                if size > limit or size > 2 * os.fstat(file.fileno()).st_size + MEBIBYTE:  # torch does not compress
                    raise ValueError(f"it unpacks to {size:,} bytes")
                (stream,) = (m for m in members if m.filename.split("/")[-1] == "data.pkl")
                _require_tensors(archive.read(stream))
            file.seek(0)
            found = torch.load(file, map_location="cpu", weights_only=True)
    except FmwcError:
        raise
    except Exception as problem:  # torch's message suggests unsafe loading
        reason = str(problem) if type(problem) is ValueError else type(problem).__name__
        raise error(
            f"{shown(path)} holds something other than tensors, or is truncated ({shown(reason)[:200]}); save the "
            "tensors alone, as .safetensors"
        ) from problem
    for leaf in _leaves(found):
        if isinstance(leaf, torch.Tensor) and leaf.numel() * leaf.element_size() > leaf.untyped_storage().nbytes():
            raise error(
                f"{shown(path)} holds a tensor of shape {tuple(leaf.shape)} with overlapping memory; save x.clone()"
            )
    return found


# Other functions that torch allows, such as bytearray and torch.Tensor, allocate as much as their arguments say.
_BUILDS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch device"
    r"|torch (?!Untyped|Typed)[A-Za-z0-9]+Storage|torch (bool|(uint|int|float|bfloat|complex)\d+)"
)


def _require_tensors(stream: bytes) -> None:
    """Raise unless a pickle calls only functions that build tensors from the file, and repeats no tuple.

    Tuples of repeated tuples, used as a key, take exponential time to hash.
    """
    tuples: set[Any] = set()
    before = ""
    for op, value, _ in pickletools.genops(stream):
        if op.name == "GLOBAL" and not _BUILDS.fullmatch(str(value)):
            raise ValueError(f"it calls {str(value).replace(' ', '.')}")
        if op.name in ("BINPUT", "LONG_BINPUT") and before.startswith("TUPLE"):
            tuples.add(value)
        if op.name == "DUP" or (op.name in ("BINGET", "LONG_BINGET") and value in tuples):
            raise ValueError("it repeats a tuple")
        before = op.name


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield what dicts, lists and tuples hold, each container once: few bytes can repeat one very often."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping | list | tuple):
            if id(one) not in seen:
                seen.add(id(one))
                waiting += one.values() if isinstance(one, Mapping) else one
        else:
            yield one


def _reason(problem: Exception) -> str:
    lines = str(problem).splitlines()
    return shown(lines[0])[:200] if lines else type(problem).__name__
