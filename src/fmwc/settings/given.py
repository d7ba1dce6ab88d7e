"""Finished samples from anywhere: files of ours, arrays, images in folders named by class, CIF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmwc.data import arrays, mnist
from fmwc.data.crystals import Crystals, encode, fold, pad
from fmwc.data.structures import CIF_BYTES, cells, read_text_of
from fmwc.errors import DataError, FmwcError, UsageError
from fmwc.readers import shown
from fmwc.sampling import Trajectory
from fmwc.state import State, batch_size

__all__ = ["KINDS", "Given", "kind_of", "read_given"]

OURS = "samples.safetensors"
KINDS = (
    "a folder that fmwc sample wrote or its samples.safetensors, an array file (.npz, .npy, .safetensors, .pt), a "
    "folder of images with one subfolder for each class, or CIF files"
)
RUN = {"x0", "grid", "times"}  # tensors of a samples file of ours, beside the samples
OTHER_NAMES = {"images": "x", "labels": "y"}  # as image data sets have them


class Given(NamedTuple):
    """Samples to check.

    Attributes:
        x: The samples.
        cond: Their conditions.
        names: The name of each.
        made: How they were made, for samples of ours.
        problems: Why samples that were found cannot be checked, by name.
    """

    x: State
    cond: dict[str, Tensor]
    names: list[str]
    made: dict[str, Any]
    problems: dict[str, str]


def kind_of(path: Path) -> str:
    """What a path holds: `run`, `arrays`, `images` or `cif`."""
    if not path.exists():
        raise DataError(f"{shown(path)} does not exist; give {KINDS}")
    if path.is_dir():
        inside = [p for p in path.iterdir() if not p.name.startswith(".")]
        if (path / OURS).is_file():
            return "run"
        if any(p.suffix.lower() == ".cif" for p in inside):
            return "cif"
        if any(p.is_dir() for p in inside):
            return "images"
        raise DataError(f"{shown(path)} holds no samples; give {KINDS}")
    if path.suffix.lower() == ".cif":
        return "cif"
    if path.suffix not in arrays.READERS:
        raise DataError(f"{shown(path)} is of a kind that is not read; give {KINDS}")
    return "run" if path.suffix == ".safetensors" and arrays.read(path).keys() >= RUN else "arrays"


def read_given(path: Path, *, classes: int = 10, pixels: bool = False, rows: int = 0) -> Given:
    """Read samples.

    Arguments:
        path: A file or a folder.
        classes: The number of classes, where images lie in folders named by class.
        pixels: Whether the network was trained on images with values from 0 to 1, so that whole numbers are pixels from
            0 to 255.
        rows: Atoms of a crystal, at most, that the network takes; 0 where it takes no crystals.
    """
    kind = kind_of(path)
    if kind == "run":
        run = Trajectory.load(path)
        return Given(run.x, run.cond, run.names, run.made, {})
    if kind == "arrays":
        return _arrays(path, pixels)
    if kind == "images":
        if not pixels:
            raise UsageError(f"{shown(path)} holds image files, and the network was not trained on such images")
        found, names = mnist.pictures(path, classes)
        return Given(mnist.unit(found.x), {"y": found.y}, list(names), {}, {})
    if not rows:
        raise UsageError(f"{shown(path)} is of crystals, and the network takes none")
    return _crystals(path, rows)


def _arrays(path: Path, pixels: bool) -> Given:
    found = arrays.read(path)
    if "x" not in found:
        found = {OTHER_NAMES.get(name, name): value for name, value in found.items()}
    whole = "x" in found and not found["x"].is_floating_point()
    x, cond = arrays.samples_of(found, path)
    if x is None:
        raise DataError(f"{shown(path)} holds {', '.join(found)[:200]}, and no samples; name them x, or x.channel")
    if pixels and isinstance(x, Tensor):
        x = x[:, None] if x.ndim == 3 else x
        x = x / 255 if whole else x
    return Given(x, cond, _numbered(batch_size(x)), {}, {})


def _numbered(count: int) -> list[str]:
    return [f"{i:05d}" for i in range(count)]


def _crystals(path: Path, rows: int) -> Given:
    """Niggli cells, as the training data are; those that cannot be used say why."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix.lower() == ".cif" and not p.name.startswith("."))
    texts: list[str] = []
    problems: dict[str, str] = {}
    read: list[Path] = []
    for file in files:
        try:
            texts.append(read_text_of(file, CIF_BYTES))
            read.append(file)
        except FmwcError as error:
            problems[shown(file.name)] = str(error)
    kept = {}
    for file, cell in zip(read, cells(texts), strict=True):
        name = shown(file.name)
        if isinstance(cell, str):
            problems[name] = cell
        elif len(cell.numbers) > rows:
            problems[name] = f"{len(cell.numbers)} atoms, and the network takes at most {rows}"
        else:
            kept[name] = cell
    if not kept:
        name, why = next(iter(problems.items()))
        raise DataError(f"none of {len(files)} structures in {shown(path)} can be checked; {name}: {why}")
    counts = torch.tensor([len(cell.numbers) for cell in kept.values()])
    numbers = torch.cat([torch.from_numpy(cell.numbers).long() for cell in kept.values()])
    coords = torch.cat([torch.from_numpy(cell.coords).float() for cell in kept.values()])
    crystals = Crystals(
        pad(counts, numbers, rows),
        pad(counts, fold(coords), rows),
        torch.stack([torch.from_numpy(cell.lengths).float() for cell in kept.values()]),
        torch.stack([torch.from_numpy(cell.angles).float() for cell in kept.values()]),
        tuple(kept),
    )
    x, atoms = encode(crystals)
    return Given(x, {"atoms": atoms}, list(kept), {}, problems)
