"""Where hulls come from: the file in this package, a data folder, or energies computed once and kept in the cache.

The file `chgnet_hull.npz` holds the corners of the hull of CHGNet 0.3.0 energies of the Materials Project structures
that `data/mp20` collects: compositions and computed energies, no structures. The materials are those of the Materials
Project (A. Jain et al., APL Materials 1, 011002, 2013), whose data are under CC BY 4.0.
"""

from __future__ import annotations

import functools
import io
import os
import re
from pathlib import Path

import numpy as np
import torch

from fmwc.data import fingerprint, mp20
from fmwc.data.crystals import Crystals
from fmwc.errors import DataError, UsageError
from fmwc.files import write_bytes
from fmwc.metrics.crystals.candidates import key_of
from fmwc.metrics.crystals.energy import Progress, calculator, energies, version
from fmwc.metrics.crystals.hull import LARGEST, Hull
from fmwc.readers import read_arrays

__all__ = ["SHIPPED", "cache_folder", "folder_hull", "hull_for", "make_shipped", "reference_hull", "shipped_hull"]

SHIPPED = Path(__file__).with_name("chgnet_hull.npz")
KEPT_EVERY = 1000  # energies between two writings of the cache
NOTES = {
    "source": "Corners of the convex hull of CHGNet 0.3.0 energies (eV/atom) of Materials Project structures (MP-20)",
    "attribution": "Materials Project, A. Jain et al., APL Materials 1, 011002 (2013), https://materialsproject.org",
    "licence": "CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
}


def cache_folder() -> Path:
    """`FMWC_CACHE`, or fmwc's folder in the user's cache."""
    return Path(
        os.path.expanduser(os.environ.get("FMWC_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fmwc"))
    )


@functools.lru_cache(maxsize=1)
def shipped_hull() -> Hull:
    """The hull of CHGNet energies that comes with the package."""
    return Hull.load(SHIPPED)


def _held(data: str | Path | None) -> list[Crystals]:
    """All splits of a folder: a hull is of everything that is known."""
    found, reason = [], None
    for split in mp20.SPLITS:
        try:
            found.append(mp20.load(data, split))
        except DataError as error:
            reason = error
    if not found and reason is not None:
        raise reason
    return found


def folder_hull(data: str | Path | None = None) -> Hull:
    """The hull of the CHGNet energies that lie beside the data (`FMWC_DATA` if no folder is given)."""
    stored = mp20.energies(data)
    if stored is None:
        raise DataError(f"{data or 'FMWC_DATA'} holds no {mp20.ENERGIES}; leave it out for the hull of the package")
    energy = dict(zip(stored[0], stored[1].tolist(), strict=True))
    keys, values = [], []
    for crystals in _held(data):
        for name, numbers in zip(crystals.names, crystals.numbers.tolist(), strict=True):
            if name in energy:
                keys.append(key_of([z for z in numbers if z > 0]))
                values.append(energy[name])
    return Hull(keys, values, "chgnet")


def make_shipped(data: str | Path | None = None, path: str | Path = SHIPPED) -> Path:
    """Writes the file that comes with the package from a data folder: the corners alone, and where they are from."""
    return folder_hull(data).corners().save(path, NOTES)


def _cached(path: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Energies so far, and which are done; a file that cannot be read is begun anew."""
    try:
        found = read_arrays(path, LARGEST)
        values, done = found["energies"], found["done"]
        if values.shape == done.shape == (count,) and values.dtype == np.float64 and done.dtype == bool:
            return values, done
    except (DataError, KeyError):
        pass
    return np.full(count, np.nan), np.zeros(count, bool)


def reference_hull(crystals: Crystals, model: str = "chgnet", *, progress: Progress | None = None) -> Hull:
    """The hull of a model's own energies of some reference crystals.

    They are computed once and kept in the cache as they come, so that a run that was cut off goes on where it was.
    References that have no energy by the model are left out.
    """
    mark = fingerprint(crystals.numbers, crystals.coords, crystals.lengths, crystals.angles)
    label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{model}-{version(model)}" if version(model) else model)
    path = cache_folder() / "hulls" / f"{label}-{mark}.npz"
    values, done = _cached(path, len(crystals))
    left = np.flatnonzero(~done)
    for start in range(0, len(left), KEPT_EVERY):
        rows = left[start : start + KEPT_EVERY]
        values[rows], done[rows] = energies(crystals.take(rows.tolist()), model).per_atom, True
        content = io.BytesIO()
        np.savez_compressed(content, energies=values, done=done)
        write_bytes(path, content.getvalue())
        if progress is not None:
            progress("reference energies", int(done.sum()), len(done))
    usable = np.flatnonzero(np.isfinite(values))
    if not len(usable):
        raise UsageError(f"{model} has no energy for any of the {len(crystals)} reference structures")
    keys = [key_of([z for z in numbers if z > 0]) for numbers in crystals.numbers[usable].tolist()]
    return Hull(keys, values[usable], model)


def hull_for(model: str = "chgnet", data: str | Path | None = None, *, progress: Progress | None = None) -> Hull:
    """The hull that a model's energies are to be held against.

    For CHGNet it is the one of the package, or that of the data folder if one is given. For any other model the
    energies of the references in the folder (or in `FMWC_DATA`) are computed once.
    """
    if model == "chgnet" and data is None:
        return shipped_hull()
    if model == "chgnet" and mp20.energies(data) is not None:
        return folder_hull(data)
    calculator(model)  # a model that is missing is said before a folder that is missing
    parts = _held(data)
    width = max(part.numbers.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(part.numbers, (0, width - part.numbers.shape[1])) for part in parts]
    coords = [torch.nn.functional.pad(part.coords, (0, 0, 0, width - part.coords.shape[1])) for part in parts]
    return reference_hull(
        Crystals(
            torch.cat(padded),
            torch.cat(coords),
            torch.cat([part.lengths for part in parts]),
            torch.cat([part.angles for part in parts]),
            tuple(name for part in parts for name in part.names),
        ),
        model,
        progress=progress,
    )
