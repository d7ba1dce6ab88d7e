"""Load MP-20, or your own crystals, with at most 20 atoms per cell from npz, CSV or CIF files."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmwc.crystals.parsers import CIF_BYTES, MOST_ATOMS, cell_of, cells, read_text_of
from fmwc.crystals.structures import ANGLES, ELEMENTS, Cell, Crystals, from_cells, from_flat, has_volume, need, quiet
from fmwc.errors import DataError, OutputError, pick
from fmwc.files import write_bytes
from fmwc.identity import digest, digest_file
from fmwc.readers import read_arrays, read_csv

__all__ = [
    "ENERGIES",
    "MOST_ATOMS",
    "SPLITS",
    "Progress",
    "Report",
    "build",
    "content",
    "energies",
    "folder_given",
    "load",
    "load_all",
    "prototypes",
    "published_energies",
    "split_of",
]

SPLITS = {"train": range(8), "val": range(8, 9), "test": range(9, 10)}  # tenths of a data set without splits
FIELDS = ("num_atoms", "atomic_numbers", "frac_coords", "lengths", "angles", "material_id")
COLUMNS = ("material_id", "cif")
ENERGIES = "chgnet_energies.npz"
PUBLISHED = "mlip_reference_energies.npz"
PUBLISHED_MODELS = ("uma", "mace", "orb")
LARGEST = 1 << 30  # maximum bytes of arrays; MP-20 takes 10 million
DUPLICATE = "a duplicate name"
REBUILD = "copy it again, or build it with fmwc.crystals.mp20.build"
SOURCES = "MP-20's train.csv, val.csv and test.csv (or your own CIF files, as *.cif or in train/, val/ and test/)"
OTHERS = f"give a folder with train.npz, val.npz and test.npz, or with {SOURCES}; or 'prototypes' for a small example"

Progress = Callable[[str, int, int], None]  # split, number done, total


@dataclass(frozen=True)
class Report:
    """The numbers of structures that were kept, and the names of those that were left out.

    Attributes:
        kept: The number of structures per split.
        left_out: The names of unusable structures, by reason.
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
    """Read one split of MP-20, or of your own data set.

    CSV and CIF files are parsed in each call; `build` converts them once. Unusable structures raise an error if they
    are in an npz file; otherwise they are left out with a warning.

    Arguments:
        where: The folder of the data, or the parent of its folder `mp20`; by default, the environment variable
            `FMWC_DATA`. It is searched for `{split}.npz`, then the public `{split}.csv`, then CIF files. These are in
            one subfolder per split, or are split 80:10:10 by a hash of their names. `"prototypes"` stands for
            `prototypes(split)`.
        split: `"train"`, `"val"` or `"test"`.
        progress: Called with the split, the number of CIFs done and the total.
    """
    pick(SPLITS, split, "split")
    if where == "prototypes":
        return prototypes(split)
    kind, home = _home(_folder(where), FORMATS)
    if kind == "npz":
        return _crystals(_arrays(home / f"{split}.npz"), str(home / f"{split}.npz"))
    kept, left_out = _gathered(kind, home, split, progress)
    report = Report({split: len(kept)}, left_out)
    if not kept:
        raise DataError(f"{home} contains no usable {split} structure ({report}); {OTHERS}")
    if left_out:
        warnings.warn(f"{home}: {report}", stacklevel=2)
    return from_cells(kept, MOST_ATOMS)


def load_all(where: str | Path | None = None, *, progress: Progress | None = None) -> dict[str, Crystals]:
    """Read all splits that a data set has, by name; see `load`."""
    if where == "prototypes":
        return {split: prototypes(split) for split in SPLITS}
    kind, home = _home(_folder(where), FORMATS)
    return {split: load(where, split, progress=progress) for split in SPLITS if FORMATS[kind](home, split)}


def content(where: str | Path) -> str:
    """Return a hash of the files of a data set that `load` and `energies` read; raise if there is none."""
    if where == "prototypes":
        return where
    kind, home = _home(_folder(where), FORMATS)
    files = {file for suffix in ("npz", kind) for file in home.glob(f"*.{suffix}")}
    files |= {file for split in SPLITS for file in (_cifs(home, split) if kind == "cif" else ())}
    try:
        return digest({str(file.relative_to(home)): digest_file(file) for file in files if file.is_file()})
    except OSError as error:
        raise DataError(f"{error.filename or home} cannot be read ({error.strerror or error})") from error


def build(source: str | Path, out: str | Path, *, progress: Progress | None = None) -> Report:
    """Convert structures to Niggli cells and write `train.npz`, `val.npz` and `test.npz` to a new folder.

    On an error, nothing is written. Splits without structures have no file; the report shows their count as 0.

    Arguments:
        source: A folder with the public CSV files of MP-20, or with CIF files, as for `load`.
        out: A new or empty folder.
        progress: As for `load`.
    """
    kind, home = _home(_folder(source), {kind: find for kind, find in FORMATS.items() if kind != "npz"})
    target = Path(os.path.expanduser(out)).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):  # checked before the work
        raise OutputError(
            f"{target} is a file or a folder that is not empty, and was not changed; choose another folder"
        )
    counts = dict.fromkeys(SPLITS, 0)
    left_out: dict[str, tuple[str, ...]] = {}
    files: dict[str, bytes] = {}
    for split in SPLITS:
        kept, reasons = _gathered(kind, home, split, progress) if FORMATS[kind](home, split) else ({}, {})
        counts[split] = len(kept)
        for reason, names in reasons.items():
            left_out[reason] = left_out.get(reason, ()) + names
        if kept:
            packed = io.BytesIO()
            np.savez_compressed(packed, **_arrays_of(from_cells(kept, MOST_ATOMS)))
            files[f"{split}.npz"] = packed.getvalue()
    report = Report(counts, left_out)
    if not files:
        raise DataError(f"{home} contains no usable structure ({report}); give {SOURCES}")
    _write_whole(target, files)
    return report


def _write_whole(target: Path, files: Mapping[str, bytes]) -> None:
    """Write the files to a temporary folder next to the target, and rename it."""
    half = target.parent / f".{target.name}.{secrets.token_hex(6)}"
    try:
        half.mkdir(parents=True)
        for name, content in files.items():
            write_bytes(half / name, content)
        if target.exists():
            target.rmdir()  # fails if it is no longer empty
        half.rename(target)
    except BaseException as error:
        shutil.rmtree(half, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise OutputError(f"{target} cannot be written ({reason}); choose another folder") from error
        raise


def energies(where: str | Path | None = None) -> tuple[tuple[str, ...], Tensor] | None:
    """Return the names and CHGNet energies (eV/atom) stored beside the data; `None` if there are none."""
    found = _stored(where, ENERGIES, "energy_per_atom")
    return None if found is None else (found[0], torch.from_numpy(found[1].astype(np.float32)))


def published_energies(where: str | Path | None, model: str) -> dict[str, float]:
    """Return the energies (eV/atom) by name of another model, from the file published with LeMat-GenBench.

    The file has energies by UMA, MACE and ORB; for other models, and without the file, there are none.
    """
    if model not in PUBLISHED_MODELS or (found := _stored(where, PUBLISHED, f"{model}_energy_per_atom")) is None:
        return {}
    return dict(zip(found[0], found[1].tolist(), strict=True))


def _homes(place: Path) -> tuple[Path, ...]:
    """Return where the data may lie: in the folder, or in one of these names in it."""
    return place, place / "mp20-full", place / "mp20"


def _stored(where: str | Path | None, name: str, field: str) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return names and energies from a file beside the data; `None` if there is no such file."""
    if where == "prototypes":
        return None
    place = _folder(where)
    file = next((file for home in _homes(place) if (file := home / name).is_file()), None)
    if file is None:
        return None
    arrays = _arrays(file, ("material_id", field))
    values, names = arrays[field], _names(arrays["material_id"], str(file))
    if values.dtype.kind != "f" or values.shape != (len(names),) or not np.isfinite(values).all():
        got = f"{values.dtype} {values.shape} for {len(names)} names"
        raise DataError(f"{file}: {field} must be one finite number for each name, got {got}; copy it again")
    return names, values


def prototypes(split: str = "train") -> Crystals:
    """Return pymatgen's prototype structures (AFLOW's library), split by name like a folder of CIFs."""
    pick(SPLITS, split, "split")
    with quiet():  # importing bibliographies emits warnings
        kept = {}
        for entry in need("pymatgen.analysis.prototypes").AFLOW_PROTOTYPE_LIBRARY:
            structure = entry["snl"].structure
            name = f"{structure.composition.reduced_formula}-{entry['tags']['aflow']}"
            if split_of(name) == split and isinstance(cell := cell_of(structure), Cell):
                kept[name] = cell
    return from_cells(kept, MOST_ATOMS)


# ---- finding the data --------------------------------------------------------------------------------------------


def folder_given(where: str | Path | None = None) -> str | Path | None:
    """Return the given folder, or that of `FMWC_DATA`, or `None`."""
    return where or os.environ.get("FMWC_DATA") or None


def _folder(where: str | Path | None) -> Path:
    """Return the given folder, or that of `FMWC_DATA`."""
    given = folder_given(where)
    if given is None:
        raise DataError(f"no data folder given; use --data or set FMWC_DATA; {OTHERS}")
    place = Path(os.path.expanduser(given))
    if not place.is_dir():
        raise DataError(f"{place} {'is a file' if place.exists() else 'does not exist'}; {OTHERS}")
    return place


def _home(place: Path, kinds: Mapping[str, Callable[[Path, str], Any]]) -> tuple[str, Path]:
    """Return the format and the folder for all splits, so that two data sets are never mixed."""
    try:
        for kind, held in kinds.items():
            for home in _homes(place):
                if any(held(home, split) for split in SPLITS):
                    return kind, home
    except OSError as error:
        raise DataError(f"{error.filename or place} cannot be read ({error.strerror or error})") from error
    raise DataError(f"{place} contains no crystals; {OTHERS if 'npz' in kinds else 'give ' + SOURCES}")


def split_of(name: str) -> str:
    """Return the split of a structure in a data set without splits. It depends only on the name."""
    tenth = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 10
    return next(split for split, tenths in SPLITS.items() if tenth in tenths)


def _name(file: Path) -> str:
    return file.stem.encode("utf-8", "replace").decode()  # file names may be invalid Unicode


def _cifs(folder: Path, split: str) -> list[Path]:
    """Return the CIF files of a split, from its subfolder or by a hash of their names."""

    def inside(place: Path) -> list[Path]:
        files = sorted(place.iterdir(), key=lambda file: file.name) if place.is_dir() else []
        return [f for f in files if f.suffix.lower() == ".cif" and not f.name.startswith(".") and f.is_file()]

    if any(inside(folder / part) for part in SPLITS):
        return inside(folder / split)
    return [file for file in inside(folder) if split_of(_name(file)) == split]


FORMATS: dict[str, Callable[[Path, str], Any]] = {  # in order of preference
    "npz": lambda home, split: (home / f"{split}.npz").is_file(),
    "csv": lambda home, split: (home / f"{split}.csv").is_file(),
    "cif": _cifs,
}


def _text(file: Path) -> str:
    """Return the text of a CIF; empty if it cannot be read, so that it counts as unreadable."""
    try:
        return read_text_of(file, CIF_BYTES)
    except DataError:
        return ""


def _rows(file: Path) -> list[tuple[str, str]]:
    """Return the name and the CIF of each row of a CSV file; missing cells are empty."""
    rows = read_csv(file)
    header = next(rows, [])
    if missing := [column for column in COLUMNS if column not in header]:
        raise DataError(
            f"{file} has the columns {', '.join(header)[:200] or 'none'}, but needs {' and '.join(missing)}; "
            "use the CSV files of MP-20"
        )
    name, text = (header.index(column) for column in COLUMNS)
    padded = ([*row, *[""] * len(header)] for row in rows if row)
    return [(row[name], row[text]) for row in padded]


# ---- structures to arrays ----------------------------------------------------------------------------------------


def _gathered(
    kind: str, home: Path, split: str, progress: Progress | None
) -> tuple[dict[str, Cell], dict[str, tuple[str, ...]]]:
    """Return the usable structures of a split by name, and the names of unusable ones by reason."""
    if kind == "cif":
        entries = [(_name(file), _text(file)) for file in _cifs(home, split)]
    else:
        entries = _rows(home / f"{split}.csv")
    show = None if progress is None else lambda done, total: progress(split, done, total)
    kept: dict[str, Cell] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    for (name, _), outcome in zip(entries, cells([text for _, text in entries], show), strict=True):
        reason = DUPLICATE if name in kept else outcome
        if isinstance(reason, str):
            left_out[reason] = (*left_out.get(reason, ()), name)
        else:
            kept[name] = reason
    return kept, left_out


def _arrays_of(crystals: Crystals) -> dict[str, Any]:
    """Return the arrays of an npz file. The atoms of all crystals are concatenated."""
    present = crystals.numbers > 0
    return {
        "num_atoms": crystals.atoms.numpy().astype(np.uint8),
        "atomic_numbers": crystals.numbers[present].numpy().astype(np.uint8),
        "frac_coords": crystals.coords[present].numpy(),
        "lengths": crystals.lengths.numpy(),
        "angles": crystals.angles.numpy(),
        "material_id": np.array([name.encode() for name in crystals.names], "S"),
    }


# ---- arrays to crystals ------------------------------------------------------------------------------------------


def _arrays(file: Path, needed: Sequence[str] = FIELDS) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise DataError(f"{file.parent} contains no {file.name}; {REBUILD}")
    try:
        arrays = read_arrays(file, LARGEST)
    except DataError as error:
        raise DataError(f"{error}; {REBUILD}") from error
    if missing := [name for name in needed if name not in arrays]:
        names = ", ".join(sorted(arrays)) or "no arrays"
        raise DataError(f"{file} contains {names[:200]}, but needs {', '.join(missing)}; {REBUILD}")
    return {name: arrays[name] for name in needed}


def _names(array: np.ndarray, source: str) -> tuple[str, ...]:
    if array.ndim != 1 or array.dtype.kind not in "SU":
        raise DataError(f"{source}: material_id must be strings (N,), got {array.dtype} {array.shape}; {REBUILD}")
    return tuple(array.tolist() if array.dtype.kind == "U" else (name.decode("utf-8", "replace") for name in array))


def _crystals(arrays: Mapping[str, np.ndarray], source: str) -> Crystals:
    """Return crystals, after checking each array and their consistency."""

    def require_shape(field: str, kinds: str, *shape: int) -> None:
        array = arrays[field]
        if array.shape != shape or array.dtype.kind not in kinds or not array.size:
            wanted, got = f"{'floats' if kinds == 'f' else 'integers'} {shape}", f"{array.dtype} {array.shape}"
            raise DataError(f"{source}: {field} must be {wanted}, not empty, got {got}; {REBUILD}")

    def require(rule: str, holds: Any, values: np.ndarray, owner: np.ndarray) -> None:
        if not holds.all():
            first = int(holds.argmin())
            raise DataError(
                f"{source}: a crystal must have {rule}, but {names[owner[first]]} has {values[first]}; {REBUILD}"
            )

    names = _names(arrays["material_id"], source)
    atoms, z, coords, lengths, angles = (arrays[field] for field in FIELDS[:-1])
    count, each = len(names), np.arange(len(names))
    require_shape("num_atoms", "iu", count)
    require_shape("lengths", "f", count, 3)
    require_shape("angles", "f", count, 3)
    require(f"1 to {MOST_ATOMS} atoms", (atoms >= 1) & (atoms <= MOST_ATOMS), atoms, each)  # before they are summed
    require("lengths above 0", (np.isfinite(lengths) & (lengths > 0)).all(-1), lengths, each)
    inside = (angles > ANGLES[0]) & (angles < ANGLES[1])
    require(f"angles of {ANGLES[0]}° to {ANGLES[1]}°", inside.all(-1), angles, each)
    require("angles that form a cell", has_volume(angles), angles, each)
    owner = np.repeat(each, atoms)
    require_shape("atomic_numbers", "iu", len(owner))
    require_shape("frac_coords", "f", len(owner), 3)
    require(f"atomic numbers 1 to {ELEMENTS}", (z >= 1) & (z <= ELEMENTS), z, owner)
    require("finite coordinates", np.isfinite(coords).all(-1), coords, owner)
    if twice := count - len(set(names)):
        raise DataError(f"{source}: every material_id must be unique, but {twice} are repeated; {REBUILD}")
    return from_flat(atoms, z, coords, lengths, angles, names, MOST_ATOMS)
