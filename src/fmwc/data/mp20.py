"""MP-20 crystals, at most 20 atoms a cell: from plain arrays, the public CSV files, or CIF files of one's own."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.data.crystals import ANGLES, ELEMENTS, Crystals, fold, pad, pymatgen_needed
from fmwc.data.parsers import MOST_ATOMS, Cell, cell_of, has_volume
from fmwc.data.sources import HELD, LABELS, OTHERS, SOURCES, SPLITS, Entry, dealt, entries_of, home_of, place_of
from fmwc.data.structures import cells
from fmwc.errors import DataError, OutputError, pick
from fmwc.files import write_bytes
from fmwc.readers import read_arrays

__all__ = ["LABELS", "MOST_ATOMS", "SPLITS", "Progress", "Report", "build", "energies", "load", "prototypes"]

FIELDS = ("num_atoms", "atomic_numbers", "frac_coords", "lengths", "angles", "material_id")
ENERGIES = "chgnet_energies.npz"
LARGEST = 1 << 30  # bytes of arrays; MP-20 takes 10 million
AGAIN = "a name that came before"
REBUILD = "copy it again, or build it anew (fmwc.data.mp20.build)"

Progress = Callable[[str, int, int], None]  # split, how many are done, of how many


@dataclass(frozen=True)
class Report:
    """What became of the structures of a source.

    Attributes:
        kept: How many, for each split.
        left_out: The names of those that cannot be used, for each reason.
    """

    kept: dict[str, int]
    left_out: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        kept = ", ".join(f"{count} {split}" for split, count in self.kept.items())
        reasons = [
            f"{len(names)} with {reason}: {', '.join(names[:3])}{', …' * (len(names) > 3)}"
            for reason, names in self.left_out.items()
        ]
        return f"kept {kept}; left out " + ("; ".join(reasons) if reasons else "none")


def load(where: str | Path | None = None, split: str = "train", *, progress: Progress | None = None) -> Crystals:
    """Reads one split of MP-20, or of a set of your own.

    Arguments:
        where: The folder of the data, or one above its `mp20`; else `FMWC_DATA`. Read is what it holds first of
            `{split}.npz`; the public `{split}.csv`; CIF files, in subfolders for the splits, or else dealt out 80:10:10
            by a hash of their names. CSV and CIF files are parsed each time: `build` does it once for all. The string
            `"prototypes"` stands for `prototypes(split)`.
        split: `"train"`, `"val"` or `"test"`.
        progress: Called now and then with the split, how many CIFs are read, and of how many.

    Structures that cannot be used are refused in an npz file, and left out of the others with a warning.
    """
    pick(SPLITS, split, "split")
    if where == "prototypes":
        return prototypes(split)
    kind, home = home_of(place_of(where), HELD)
    if kind == "npz":
        return _crystals(_arrays(home / f"{split}.npz"), str(home / f"{split}.npz"))
    arrays, left_out = _gathered(entries_of(kind, home, split), split, progress)
    report = Report({split: len(arrays["num_atoms"])}, left_out)
    if not report.kept[split]:
        raise DataError(f"{home} holds no {split} structure that can be used ({report}); {OTHERS}")
    if left_out:
        warnings.warn(f"{home}: {report}", stacklevel=2)
    return _crystals(arrays, str(home))


def build(source: str | Path, out: str | Path, *, progress: Progress | None = None) -> Report:
    """Writes `train.npz`, `val.npz` and `test.npz` of Niggli cells into a new folder: all of them, or none.

    Arguments:
        source: A folder with the public CSV files of MP-20, or with CIF files, as `load` takes it.
        out: The folder to write, new or empty.
        progress: As in `load`.

    A split without any structure is not written; the report says so.
    """
    kind, home = home_of(place_of(source), {kind: held for kind, held in HELD.items() if kind != "npz"})
    target = Path(os.path.expanduser(out)).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):  # before the work
        raise OutputError(f"{target} is a file, or a folder that is not empty, and was not touched; choose another")
    kept: dict[str, int] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    files: dict[str, bytes] = {}
    for split in SPLITS:
        entries = entries_of(kind, home, split) if HELD[kind](home, split) else []
        arrays, reasons = _gathered(entries, split, progress)
        kept[split] = len(arrays["num_atoms"])
        for reason, names in reasons.items():
            left_out[reason] = left_out.get(reason, ()) + names
        if kept[split]:
            packed = io.BytesIO()
            np.savez_compressed(packed, **arrays)
            files[f"{split}.npz"] = packed.getvalue()
    report = Report(kept, left_out)
    if not files:
        raise DataError(f"{home} holds no structure that can be used ({report}); give {SOURCES}")
    _write_whole(target, files)
    return report


def _write_whole(target: Path, files: dict[str, bytes]) -> None:
    """Into a folder beside it, which then takes its place."""
    half = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        half = target.parent / f".{target.name}.{secrets.token_hex(6)}"
        half.mkdir()
        for name, content in files.items():
            write_bytes(half / name, content)
        if target.exists():
            target.rmdir()  # empty, or it is somebody's work by now
        half.rename(target)
    except BaseException as error:
        if half is not None:
            shutil.rmtree(half, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise OutputError(f"{target} cannot be written ({reason}); choose another folder") from error
        raise


def energies(where: str | Path | None = None) -> tuple[tuple[str, ...], Tensor] | None:
    """The CHGNet energies beside the data, eV/atom, with the names they belong to; None where there are none."""
    if where == "prototypes":
        return None
    place = place_of(where)
    file = next((file for file in (place / ENERGIES, place / "mp20" / ENERGIES) if file.is_file()), None)
    if file is None:
        return None
    arrays = _arrays(file, ("material_id", "energy_per_atom"))
    values, names = arrays["energy_per_atom"], _names(arrays["material_id"], str(file))
    if values.dtype.kind != "f" or values.shape != (len(names),) or not np.isfinite(values).all():
        came = f"{values.dtype} {values.shape} for {len(names)} names"
        raise DataError(f"{file}: energy_per_atom must be one finite number for each name, got {came}; copy it again")
    return names, torch.from_numpy(values.astype(np.float32))


def prototypes(split: str = "train") -> Crystals:
    """The real prototype structures that come with pymatgen (AFLOW's library), dealt out as a folder of CIFs is."""
    pick(SPLITS, split, "split")
    with pymatgen_needed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the bibliographies' grammar
        from pymatgen.analysis.prototypes import AFLOW_PROTOTYPE_LIBRARY as LIBRARY

        found = {}
        for entry in LIBRARY:
            structure = entry["snl"].structure
            name = f"{structure.composition.reduced_formula}-{entry['tags']['aflow']}"
            if dealt(name) == split and isinstance(cell := cell_of(structure), Cell):
                found[name] = cell
    return _crystals(_flat(tuple(found), tuple(found.values())), "pymatgen's prototypes")


# From structures to arrays


def _gathered(
    entries: Sequence[Entry], split: str, progress: Progress | None
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """The arrays of those that can be used, and the names of the others by reason."""
    show = None if progress is None else lambda done, total: progress(split, done, total)
    kept: dict[str, tuple[Cell, dict[str, float]]] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    for entry, outcome in zip(entries, cells([entry.text for entry in entries], show), strict=True):
        reason = AGAIN if entry.name in kept else outcome
        if isinstance(reason, str):
            left_out[reason] = (*left_out.get(reason, ()), entry.name)
        else:
            kept[entry.name] = (reason, entry.labels)
    arrays = _flat(tuple(kept), tuple(cell for cell, _ in kept.values()))
    for field in entries[0].labels if entries else ():
        column = np.array([labels[field] for _, labels in kept.values()])
        kind = LABELS[field][1]
        arrays[field] = (column if kind is np.float32 else np.nan_to_num(column).clip(0, 255)).astype(kind)
    return arrays, left_out


def _flat(names: Sequence[str], those: Sequence[Cell]) -> dict[str, Any]:
    coords = np.concatenate([np.zeros((0, 3)), *(cell.coords for cell in those)])
    return {
        "num_atoms": np.array([len(cell.numbers) for cell in those], np.uint8),
        "atomic_numbers": np.concatenate([np.zeros(0), *(cell.numbers for cell in those)]).astype(np.uint8),
        "frac_coords": fold(torch.from_numpy(coords).float()).numpy(),
        "lengths": np.array([cell.lengths for cell in those], np.float32).reshape(-1, 3),
        "angles": np.array([cell.angles for cell in those], np.float32).reshape(-1, 3),
        "material_id": np.array([name.encode() for name in names], "S"),
    }


# From arrays to crystals


def _arrays(file: Path, needed: Sequence[str] = FIELDS) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise DataError(f"{file.parent} holds no {file.name}; {REBUILD}")
    try:
        arrays = read_arrays(file, LARGEST)
    except DataError as error:
        raise DataError(f"{error}; {REBUILD}") from error
    if missing := [name for name in needed if name not in arrays]:
        held = ", ".join(sorted(arrays)) or "no arrays"
        raise DataError(f"{file} holds {held[:200]}, and needs {', '.join(missing)}; {REBUILD}")
    return {name: arrays[name] for name in needed}


def _names(array: np.ndarray, source: str) -> tuple[str, ...]:
    if array.ndim != 1 or array.dtype.kind not in "SU":
        raise DataError(f"{source}: material_id must be strings (N,), got {array.dtype} {array.shape}; {REBUILD}")
    return tuple(array.tolist() if array.dtype.kind == "U" else (name.decode("utf-8", "replace") for name in array))


def _crystals(arrays: dict[str, np.ndarray], source: str) -> Crystals:
    """Each array checked on its own, then against the others."""

    def require(fields: str, kinds: str, *shape: int) -> None:
        for field in fields.split():
            array = arrays[field]
            if array.shape != shape or array.dtype.kind not in kinds or not array.size:
                wanted, came = f"{'floats' if kinds == 'f' else 'integers'} {shape}", f"{array.dtype} {array.shape}"
                raise DataError(f"{source}: {field} must be {wanted}, not empty, got {came}; {REBUILD}")

    def hold(rule: str, holds: Any, values: np.ndarray, whose: np.ndarray) -> None:
        if not holds.all():
            at = int(holds.argmin())
            raise DataError(f"{source}: a crystal has {rule}, and {names[whose[at]]} has {values[at]}; {REBUILD}")

    names = _names(arrays["material_id"], source)
    atoms, z, coords, lengths, angles = (arrays[field] for field in FIELDS[:-1])
    count, each = len(names), np.arange(len(names))
    require("num_atoms", "iu", count)
    require("lengths angles", "f", count, 3)
    hold(f"1 to {MOST_ATOMS} atoms", (atoms >= 1) & (atoms <= MOST_ATOMS), atoms, each)  # first: the sum is of them
    hold("lengths above 0", (np.isfinite(lengths) & (lengths > 0)).all(-1), lengths, each)
    inside = (angles > ANGLES[0]) & (angles < ANGLES[1])
    hold(f"angles of {ANGLES[0]}° to {ANGLES[1]}°", inside.all(-1), angles, each)
    hold("angles that can meet in a corner", has_volume(angles), angles, each)
    owner = np.repeat(each, atoms)
    require("atomic_numbers", "iu", len(owner))
    require("frac_coords", "f", len(owner), 3)
    hold(f"atomic numbers 1 to {ELEMENTS}", (z >= 1) & (z <= ELEMENTS), z, owner)
    hold("finite coordinates", np.isfinite(coords).all(-1), coords, owner)
    if len(set(names)) < count:
        raise DataError(
            f"{source}: material_id must be different for each, got {count - len(set(names))} twice; {REBUILD}"
        )
    counts = torch.from_numpy(atoms.astype(np.int64))
    return Crystals(
        pad(counts, torch.from_numpy(z.astype(np.int64)), MOST_ATOMS),
        pad(counts, fold(torch.from_numpy(coords.astype(np.float32))), MOST_ATOMS),
        torch.from_numpy(lengths.astype(np.float32)),
        torch.from_numpy(angles.astype(np.float32)),
        names,
    )
