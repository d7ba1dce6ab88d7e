"""The batches of a run, kept as they are drawn, so that an interrupted run draws only the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fmwc.errors import FmwcError, UsageError
from fmwc.files import written
from fmwc.identity import SEAL, digest_parts
from fmwc.sampling.trajectory import Trajectory

__all__ = ["Parts", "growing"]


# ---- parts -----------------------------------------------------------------------------------------------------------


class Parts:
    """A folder with one file per batch of a run.

    The caller makes sure that it belongs to the run (:func:`fmwc.files.claimed`). A file that cannot be read counts as
    missing, so that its batch is drawn again.

    Arguments:
        folder: The folder; created when the first batch is saved.
        compact: Keep one variance per sample and channel in place of one per coordinate.
    """

    def __init__(self, folder: str | Path, *, compact: bool = False) -> None:
        self.folder, self.compact = Path(folder), compact

    def get(self, first: int, most: int, device: torch.device | str = "cpu") -> Trajectory | None:
        """Return the batch that begins with sample `first`, if it is there and holds at most `most` samples."""
        path = self._path(first)
        if not path.is_file():
            return None
        try:
            part = Trajectory.load(path)
        except FmwcError:
            return None
        whole = part.index is not None and torch.equal(part.index, torch.arange(first, first + len(part)))
        return part.to(device) if whole and len(part) <= most else None

    def put(self, part: Trajectory) -> Trajectory:
        """Save a batch; return it as it was saved."""
        part = part.compact() if self.compact else part
        assert part.index is not None
        part.save(self._path(int(part.index[0])))
        return part

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:09d}.safetensors"


# ---- growing ---------------------------------------------------------------------------------------------------------
# A file of samples that grows a batch at a time: the one that :meth:`Trajectory.save` writes, laid out beforehand.
#
# A safetensors file says at its beginning where each tensor is. Of a run that kept its scores alone every tensor has a
# row a sample, so its place is known once the number of samples is, and a batch is written into it.

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
BLANK = "0" * 64  # where the hash of the content will stand
PIECE = 1 << 24  # bytes that are hashed at a time
ROWS_SECOND = ("times", "mean", "var", "grid")  # at most one row before them, so that samples follow one another


@contextmanager
def growing(path: Path, count: int) -> Iterator[Callable[[Trajectory], None]]:
    """Inside, a function that adds the samples of a part; the file appears when all `count` of them are there."""
    with written(path) as file:
        places: dict[str, tuple[int, int]] = {}  # where a tensor begins, and the bytes that a sample takes
        done, kinds, header = 0, None, b""
        about: dict[str, Any] = {}
        entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}

        def add(part: Trajectory) -> None:
            nonlocal done, kinds, header, about, entries
            tensors, about = part.tensors(), about or part.about()
            tensors.pop("rank", None)  # which is among all samples, not among those of a part
            own = {name: (t.dtype, t.nbytes // (1 if _shared(name) else len(part))) for name, t in tensors.items()}
            kinds = kinds or own
            if own != kinds:
                unlike = next(name for name in (*kinds, *own) if own.get(name) != kinds.get(name))
                raise UsageError(
                    f"'{unlike}' of a part has another type or size than that of the first; keep them alike"
                )
            if not places:
                header, found, entries = _layout(tensors, len(part), count, about)
                places.update(found)
                file.write(header)
            for name, (begin, size) in places.items():
                file.seek(begin + done * size)
                file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
            done += len(part)

        yield add
        if done != count:
            raise UsageError(f"{path} was laid out for {count} samples, and {done} came")
        parts = {
            name: (dtype, shape, _pieces(file, begin, end)) for name, (dtype, shape, begin, end) in entries.items()
        }
        seal = digest_parts(parts, about)
        file.seek(0)
        file.write(header.replace(BLANK.encode(), seal.encode(), 1))


def _pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """The bytes of a tensor that was written, piece by piece."""
    file.seek(begin)
    while begin < end:
        piece = file.read(min(PIECE, end - begin))
        begin += len(piece)
        yield piece


def _shared(name: str) -> bool:
    """Whether a tensor is of all samples, and not a row of each."""
    return name.partition(".")[0] in ("reference", "standard")


def _layout(
    tensors: dict[str, Tensor], here: int, count: int, about: dict[str, Any]
) -> tuple[bytes, dict[str, tuple[int, int]], dict[str, tuple[str, tuple[int, ...], int, int]]]:
    """The beginning of the file with a blank for its hash; the places in it; each tensor's type, shape and range."""
    entries: dict[str, Any] = {"__metadata__": {"fmwc": json.dumps({**about, SEAL: BLANK})}}
    places, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # so that each is aligned
        shape = list(tensor.shape)
        rows = name.partition(".")[0] in ROWS_SECOND
        if tensor.dtype not in TYPES:
            raise UsageError(f"'{name}' is of type {tensor.dtype}, which a file of samples does not hold; convert it")
        if rows and shape[0] > 1:
            raise UsageError("only runs that keep their scores alone are written as they come: record='score'")
        each = not _shared(name)
        if each:
            shape[int(rows)] = count
        size = tensor.element_size() * tensor.numel() // here if each else 0
        places[name] = (end, size)
        begin, end = end, end + (size * count if each else tensor.element_size() * tensor.numel())
        entries[name] = {"dtype": TYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    found = {}
    for name, tensor in tensors.items():
        begin, end = (len(header) + at for at in entries[name]["data_offsets"])
        found[name] = (str(tensor.dtype), tuple(entries[name]["shape"]), begin, end)
    return header, {name: (len(header) + begin, size) for name, (begin, size) in places.items()}, found
