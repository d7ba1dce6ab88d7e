"""Statistics of a set of crystals compared with real ones, as papers on generated crystals report them.

Validity, coverage and distances follow CDVAE (Xie et al., arXiv:2110.06197), whose definitions FlowMM, DiffCSP and
others use. Space groups are those of spglib.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fmwc.crystals import mp20
from fmwc.crystals.fingerprints import Fingerprints
from fmwc.crystals.judge import density_of, validity
from fmwc.crystals.structures import Candidate, Crystals, balanced, candidates, need, quiet, unmeasurable
from fmwc.errors import ShapeError

__all__ = [
    "PRECISIONS",
    "Coverage",
    "coverage",
    "properties",
    "real_structures",
    "space_group",
    "statistics",
]

CUTOFFS = (0.4, 10.0)  # of distances between structure and between composition fingerprints, for MP-20
PRECISIONS = (0.1, 0.01)  # Å, tolerances of space groups
ROWS = 512  # rows of a matrix of distances that are computed together
os.environ.setdefault("SPGLIB_WARNING", "OFF")  # it prints failures, which are results here

Columns = Mapping[str, Sequence[Any]]


# ---- single structures -----------------------------------------------------------------------------------------------


def space_group(candidate: Candidate, symprec: float) -> int | None:
    """Return the number of the space group; `None` if spglib finds none.

    Arguments:
        candidate: The structure.
        symprec: How far atoms may lie from their symmetric positions, in Å.
    """
    if unmeasurable(candidate):
        return None
    try:
        with quiet():
            cell = candidate.cell, candidate.coords, candidate.numbers
            found = need("spglib").get_symmetry_dataset(cell, symprec=symprec)
            return None if found is None else int(found.number)
    except Exception:  # collapsed cells fail in many ways
        return None


def properties(structures: Crystals | Sequence[Any]) -> dict[str, list[Any]]:
    """Return columns with one entry per structure: validity by SMACT, density, number of elements, space groups."""
    given = candidates(structures)
    return {
        "smact_ok": [one.known and balanced(one.key) for one in given],
        "density": [density_of(one) for one in given],
        "elements": [len(one.key) for one in given],
        **{f"space_group_{symprec}": [space_group(one, symprec) for one in given] for symprec in PRECISIONS},
    }


def real_structures(data: str | Path | None = None, split: str = "test") -> tuple[Crystals, dict[str, list[Any]]]:
    """Return a split of the data, and its columns for `statistics`, with the CHGNet energies stored beside the data."""
    crystals = mp20.load(data, split)
    stored = mp20.energies(data)
    energies = {} if stored is None else dict(zip(stored[0], stored[1].tolist(), strict=True))
    given = candidates(crystals)
    return crystals, {
        "name": list(crystals.names),
        "energy_per_atom": [energies.get(name, math.nan) for name in crystals.names],
        "apart_ok": [validity(one).apart for one in given],
        **properties(given),
    }


# ---- sets of structures ----------------------------------------------------------------------------------------------


class Coverage(NamedTuple):
    """How well two sets of structures cover each other.

    Attributes:
        recall: The share of real structures that are near a generated structure and near a generated composition.
        precision: The share of generated structures that are near a real structure and near a real composition.
    """

    recall: float
    precision: float


def coverage(generated: Fingerprints, real: Fingerprints, cutoffs: tuple[float, float] = CUTOFFS) -> Coverage:
    """Return the coverage of real structures by generated ones.

    As in CDVAE's code, the nearest structure and the nearest composition are found separately, and a generated
    structure without fingerprint is not near. Compositions are divided by the standard deviations of the real ones;
    CDVAE uses constants, which are 4 % smaller (median).

    Arguments:
        generated, real: The fingerprints.
        cutoffs: The largest distances of structures and of compositions that are near.
    """
    ours, theirs = generated.usable, real.usable
    if not theirs.any():
        raise ShapeError("no real structure has a fingerprint, so coverage is not defined")
    scale = np.nan_to_num(np.nanstd(real.compositions[theirs], 0))
    known = scale > 0

    def scaled(rows: np.ndarray) -> np.ndarray:
        centred = rows[:, known] - np.nanmean(real.compositions[theirs], 0)[known]
        return np.nan_to_num(centred / scale[known])  # a property without data counts as average

    pairs = (
        (generated.sites[ours], real.sites[theirs], cutoffs[0]),
        (scaled(generated.compositions[ours]), scaled(real.compositions[theirs]), cutoffs[1]),
    )
    found = [_nearest(a, b, cutoff) for a, b, cutoff in pairs]
    precise, recalled = (np.logical_and(*part) for part in zip(*found, strict=True))
    return Coverage(float(recalled.mean()), float(precise.sum() / max(len(generated), 1)))


def _nearest(a: np.ndarray, b: np.ndarray, cutoff: float) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows of `a` are near a row of `b`, and which rows of `b` are near a row of `a`."""
    cdist = need("scipy.spatial.distance", "'fmwc[crystals]'").cdist
    near_a, near_b = np.zeros(len(a), bool), np.zeros(len(b), bool)
    for first in range(0, len(a), ROWS):
        near = cdist(a[first : first + ROWS], b) <= cutoff
        near_a[first : first + ROWS] = near.any(1)
        near_b |= near.any(0)
    return near_a, near_b


def _wasserstein(ours: Any, theirs: Any) -> float:
    """Return the Wasserstein distance of two samples; NaN if one has no finite value."""
    a, b = (np.array(values, float) for values in (ours, theirs))
    a, b = a[np.isfinite(a)], b[np.isfinite(b)]
    distance = need("scipy.stats", "'fmwc[crystals]'").wasserstein_distance
    return float(distance(a, b)) if len(a) and len(b) else math.nan


def statistics(
    columns: Columns,
    real: Columns,
    fingerprints: Fingerprints | None = None,
    real_fingerprints: Fingerprints | None = None,
) -> dict[str, float]:
    """Return the statistics of generated structures, with real ones for comparison.

    The Wasserstein distances are those of the valid structures. The energies of both sets must be by the same model.

    Arguments:
        columns: The generated structures, with the columns `apart_ok` and `energy_per_atom` of a judgement and those of
            `properties`.
        real: The real structures, with the same columns except `apart_ok` and `smact_ok`.
        fingerprints, real_fingerprints: For coverage; without them, a structure without fingerprint counts as valid.
    """
    structural, compositional = (np.array(columns[name], bool) for name in ("apart_ok", "smact_ok"))
    valid = structural & compositional
    if fingerprints is not None:
        if len(fingerprints) != len(valid):
            raise ShapeError(f"got {len(fingerprints)} fingerprints for {len(valid)} structures")
        valid = valid & fingerprints.usable
    found = {
        "structures": len(valid),
        "structurally_valid": float(structural.mean()),
        "compositionally_valid": float(compositional.mean()),
        "valid": float(valid.mean()),
    }
    if fingerprints is not None and real_fingerprints is not None:
        covered = coverage(fingerprints, real_fingerprints)
        found |= {"coverage_recall": covered.recall, "coverage_precision": covered.precision}
    for name, column in {"density": "density", "elements": "elements", "energy": "energy_per_atom"}.items():
        ours = np.array(columns[column], float)[valid]
        found[f"wasserstein_{name}"] = _wasserstein(ours, real[column])
    for symprec in PRECISIONS:
        groups = [group for group in columns[f"space_group_{symprec}"] if group is not None]
        theirs = [group for group in real[f"space_group_{symprec}"] if group is not None]
        found[f"p1_{symprec}"] = groups.count(1) / max(len(groups), 1)
        found[f"space_groups_{symprec}"] = len(set(groups))
        found[f"space_group_distance_{symprec}"] = _total_variation(groups, theirs)
    return found


def _total_variation(a: Sequence[int], b: Sequence[int]) -> float:
    """Return half the sum of the absolute differences of shares: 0 for equal distributions, 1 for disjoint ones."""
    if not a or not b:
        return math.nan
    counts = (np.bincount(groups, minlength=231) / len(groups) for groups in (a, b))
    return float(np.abs(np.subtract(*counts)).sum() / 2)
