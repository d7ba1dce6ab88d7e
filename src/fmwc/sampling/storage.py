"""Files of samples: batches of an interrupted run, files that are written batch by batch, and validation on loading."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fmwc.errors import CheckpointError, FmwcError, UsageError, require_finite
from fmwc.estimators import Transported
from fmwc.files import read_tensors, written
from fmwc.identity import SEAL, digest_parts
from fmwc.readers import anything, array, choice, mapping, number, record, text, whole
from fmwc.sampling.trajectory import DISPERSION, EVIDENCE, SAMPLES, SCORES, Standard, Trajectory, names_of, parsed
from fmwc.state import channels

# ---- a file that grows -----------------------------------------------------------------------------------------------
# The file that Trajectory.save writes, laid out for all samples and filled batch by batch. A safetensors file begins
# with the offset of each tensor. If a run keeps only its scores, each tensor has one row per sample, so the number of
# samples determines all offsets.

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BLANK = "0" * 64  # placeholder of the hash
PIECE = 1 << 24  # bytes that are hashed at a time


class _Place(NamedTuple):
    """Position of a tensor in the file, in bytes.

    Attributes:
        kind: The type, and the bytes per sample (of the whole tensor if all samples share it).
        shape: The shape of the whole tensor.
        begin, end: The byte range.
        stride: The bytes between samples; 0 if all samples share the tensor.
    """

    kind: tuple[torch.dtype, int]
    shape: tuple[int, ...]
    begin: int
    end: int
    stride: int


def _is_shared(name: str) -> bool:
    return name.partition(".")[0] in ("reference", "standard")


def _kind(name: str, tensor: Tensor, samples: int) -> tuple[torch.dtype, int]:
    return tensor.dtype, tensor.nbytes if _is_shared(name) else tensor.nbytes // samples


@contextmanager
def growing(path: Path, count: int) -> Iterator[Callable[[Trajectory], None]]:
    """Yield a function that appends a part of the samples; the file appears once all `count` samples are written."""
    with written(path) as file:
        places: dict[str, _Place] = {}
        header, about, done = b"", {}, 0

        def add(part: Trajectory) -> None:
            nonlocal header, about, done
            tensors = part.tensors()
            tensors.pop("rank", None)  # the rank within this part, not among all samples
            if not places:
                about = part.about()
                places.update(_layout(tensors, len(part), count))
                header = _header(places, about)
                file.write(header)
            kinds = {name: _kind(name, tensor, len(part)) for name, tensor in tensors.items()}
            for name in (*places, *kinds):
                if name not in places or places[name].kind != kinds.get(name):
                    raise UsageError(f"'{name}' of a part differs in type or size from that of the first part")
            for name, place in places.items():
                file.seek(len(header) + place.begin + done * place.stride)
                file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
            done += len(part)

        yield add
        if done != count:
            raise UsageError(f"{path} needs {count} samples, got {done}")
        parts = {
            name: (str(place.kind[0]), place.shape, _pieces(file, len(header) + place.begin, len(header) + place.end))
            for name, place in places.items()
        }
        seal = digest_parts(parts, about)
        file.seek(0)
        file.write(header.replace(BLANK.encode(), seal.encode(), 1))


def _layout(tensors: Mapping[str, Tensor], samples: int, count: int) -> dict[str, _Place]:
    """Return the positions of tensors that have `samples` rows in this part and `count` rows in the file."""
    places: dict[str, _Place] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # keeps each aligned
        if tensor.dtype not in TYPES:
            raise UsageError(f"'{name}' has type {tensor.dtype}, which a samples file cannot hold; convert it")
        kind, shape, shared = _kind(name, tensor, samples), list(tensor.shape), _is_shared(name)
        if not shared:
            axis = SAMPLES.get(name.partition(".")[0], 0)
            if axis and shape[0] > 1:  # the samples of a part would not be contiguous
                raise UsageError("only batches of fmwc.sampling.stream can be written batch by batch")
            shape[axis] = count
        size = kind[1] * (1 if shared else count)
        places[name] = _Place(kind, tuple(shape), end, end + size, 0 if shared else kind[1])
        end += size
    return places


def _header(places: Mapping[str, _Place], about: Mapping[str, Any]) -> bytes:
    """Return the header of the file, with a placeholder for its hash."""
    entries: dict[str, Any] = {"__metadata__": {"fmwc": json.dumps({**about, SEAL: BLANK})}}
    for name, place in places.items():
        entries[name] = {"dtype": TYPES[place.kind[0]], "shape": place.shape, "data_offsets": [place.begin, place.end]}
    content = json.dumps(entries).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def _pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a range, piece by piece."""
    file.seek(begin)
    while begin < end:
        piece = file.read(min(PIECE, end - begin))
        begin += len(piece)
        yield piece


# ---- the checks of a loaded run --------------------------------------------------------------------------------------


def _row_of(value: Any, where: str) -> Any:
    cond, tied = array(anything, 2, 2)(value, where)
    return text(1000)(cond, where), whole(0, 1)(tied, where)


def _known_score(value: Any, where: str) -> Any:
    for name in names_of(text(1000)(value, where)):
        choice(*SCORES, DISPERSION, *EVIDENCE)(parsed(name)[1], where)
    return value


_ABOUT = record(
    {
        "seed": whole(-(1 << 63), 1 << 64),
        "default_score": _known_score,
        "evaluations": whole(),
        "units": mapping(number(0, open_low=True), 100),
        "rows": mapping(_row_of, 100),
        "layers": array(text(1000), most=100_000),
        SEAL: text(64),
    },
    {
        "within": text(1000),
        "standardised_by": choice("checkpoint", "run"),
        "without": text(10_000),
        "made": mapping(anything, 100),
    },
    more=True,
)


class _Shape(NamedTuple):
    """Schema of a tensor.

    Attributes:
        dims: One letter per dimension; equal letters mean equal sizes. `*` stands for any further dimensions.
        kind: `float`, `int`, or empty for any type.
        low, high: The range of its values.
        rises: Whether its values are sorted.
        finite: Whether its values must be finite.
    """

    dims: str
    kind: str = ""
    low: float | None = None
    high: float | None = None
    rises: bool = False
    finite: bool = True


# B samples, R readings, G times of the run, S steps. The channels of a state and the conditions have keys with a dot.
_STATES = {
    "x": _Shape("B*", "float"),
    "x0": _Shape("B*", "float"),
    "mean": _Shape("RB*", "float"),
    "var": _Shape("RB*", "float", low=0),
}
_TENSORS = {
    **_STATES,
    **{f"{name}.*": schema for name, schema in _STATES.items()},
    "times": _Shape("RB", "float", 0, 1),
    "grid": _Shape("GB", "float", 0, 1),
    **dict.fromkeys(("scores", "score", "confidence", "rank"), _Shape("B")),
    "index": _Shape("B", "int", low=0),
    "cond.*": _Shape("B*"),
    "evidence.*": _Shape("B*"),
    "reference": _Shape("Q", "float", rises=True),
    "ranks": _Shape("N", "float", rises=True),
    "standard.centre": _Shape("C", finite=False),
    "standard.spread": _Shape("C", finite=False),
    "transported.var": _Shape("BP"),
    "transported.profile": _Shape("SLB"),
}
_STORED = {*_STATES, "times", "grid", "scores", "index", "cond", "evidence", "reference", "ranks", "standard"}
_STORED |= {"transported", "rows"}
_DESCRIBED = {"seed", "default_score", "evaluations", "units", "made", "without"}
_NEVER_EMPTY = "BGQN"
_KNOWN = {name.partition(".")[0] for name in _TENSORS}
_KINDS = {"float": (torch.float32, torch.float64), "int": (torch.int64,)}


def load_run(path: Path) -> Trajectory:
    """Read a file written by :meth:`Trajectory.save`; raise if it is not a run or was modified."""
    path = path / "samples.safetensors" if path.is_dir() else path
    tensors, about = read_tensors(path, _ABOUT, "a samples file of fmwc")
    try:
        return _run_of(tensors, about)
    except FmwcError as error:
        raise CheckpointError(
            f"{path} is not a samples file of fmwc, or was modified ({error}); draw the samples again"
        ) from error


def _run_of(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Trajectory:
    groups: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for key, value in tensors.items():
        name, _, part = key.partition(".")
        if isinstance(groups.setdefault(name, {} if part else value), dict) != bool(part):
            raise CheckpointError(f"it holds '{name}' both as a tensor and as channels")
        if part:
            groups[name][part] = value
        if name in _KNOWN:
            schema = _TENSORS.get(key) or _TENSORS.get(f"{name}.*" if part else "")
            if schema is None:
                raise CheckpointError(f"it holds an unknown tensor '{key}'")
            _check_tensor(key, value, schema, sizes)
    _check_channels(groups)
    groups["rows"] = {name: (cond, tied) for name, (cond, tied) in about["rows"].items()}
    try:
        if ends := groups.pop("transported", None):
            groups["transported"] = Transported(ends["var"], ends["profile"], tuple(about["layers"]))
        if standard := groups.pop("standard", None):
            source = about.get("standardised_by") or "checkpoint"
            groups["standard"] = Standard(about["within"] or "", standard["centre"], standard["spread"], source)
    except KeyError as error:
        raise CheckpointError(f"it lacks {error}") from error
    # Each field comes from where it was checked: a tensor may not replace an entry of the description, nor the reverse.
    described = {name: value for name, value in about.items() if name in _DESCRIBED and value is not None}
    stored = {name: value for name, value in groups.items() if name in _STORED}
    return Trajectory(**described, **stored)


def _check_tensor(name: str, value: Tensor, schema: _Shape, sizes: dict[str, int]) -> None:
    """Raise if a tensor does not match its schema; add its dimensions to `sizes`."""
    letters = schema.dims.rstrip("*")
    fits = value.ndim == len(letters) or (value.ndim > len(letters) and letters != schema.dims)
    if not fits or any(sizes.setdefault(d, n) != n for d, n in zip(letters, value.shape, strict=False)):
        known = ", ".join(f"{d} = {sizes[d]}" for d in letters if d in sizes)
        raise CheckpointError(f"'{name}' has shape {tuple(value.shape)}, not ({', '.join(schema.dims)}) with {known}")
    if any(sizes[d] < 1 for d in letters if d in _NEVER_EMPTY):
        raise CheckpointError(f"'{name}' is empty")
    if schema.kind and value.dtype not in _KINDS[schema.kind]:
        raise CheckpointError(f"'{name}' holds {value.dtype}, not {schema.kind} numbers")
    if schema.finite:
        require_finite(value, f"'{name}'")
    if schema.low is not None and bool((value < schema.low).any()):
        raise CheckpointError(f"'{name}' holds a value below {schema.low:g}")
    if schema.high is not None and bool((value > schema.high).any()):
        raise CheckpointError(f"'{name}' holds a value above {schema.high:g}")
    if schema.rises and bool((value[1:] < value[:-1]).any()):
        raise CheckpointError(f"'{name}' is not sorted")


def _check_channels(groups: Mapping[str, Any]) -> None:
    """Raise if states are missing or inconsistent."""
    if missing := [name for name in (*_STATES, "times", "grid") if name not in groups]:
        raise CheckpointError(f"it lacks '{missing[0]}'")
    x, x0, mean, var = (channels(groups[name]) for name in _STATES)
    alike = len({isinstance(groups[name], dict) for name in _STATES}) == 1
    if not alike or not x.keys() == x0.keys() == mean.keys() == var.keys():
        raise CheckpointError("'x', 'x0', 'mean' and 'var' do not have the same channels")
    for name in x:
        if x0[name].shape != x[name].shape:
            raise CheckpointError(f"'x0' and 'x' differ in shape in channel '{name}'")
        wide, small = mean[name].shape, var[name].shape
        if len(wide) != len(small) or any(b not in (1, a) for a, b in zip(wide, small, strict=True)):
            raise CheckpointError(f"'var' has shape {tuple(small)}, and 'mean' {tuple(wide)}, in channel '{name}'")
