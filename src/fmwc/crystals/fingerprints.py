"""Fingerprints of structures and compositions, by which coverage compares generated crystals with real ones.

The structure fingerprint is the mean over the sites of matminer's `CrystalNNFingerprint` with the preset `ops`. The
composition fingerprint is matminer's `ElementProperty` with the preset `magpie`. Both are those of CDVAE (Xie et al.,
arXiv:2110.06197). They take about 0.1 s per structure and core, so results can be kept in a file as they come.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fmwc.crystals.energy import Progress
from fmwc.crystals.structures import (
    Candidate,
    Crystals,
    candidates,
    need,
    needle,
    one_line,
    quiet,
    symbol,
    unmeasurable,
)
from fmwc.errors import DataError
from fmwc.files import write_bytes
from fmwc.readers import read_arrays

__all__ = ["INSTALL", "Fingerprints", "featurizers", "fingerprints", "identity", "read_fingerprints", "require_same"]

INSTALL = "'fmwc[tables]'"
SITE, COMPOSITION = 61, 132  # lengths of the fingerprints
TOGETHER = 64  # structures per process between two writes of the file
LARGEST = 1 << 30  # maximum bytes of a file
NEAR = 1e-3  # relative difference of volumes of the same structure read on two machines
WORDS = 200  # characters of a problem that are kept
PENDING = "not computed yet"


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of a set of structures, in their order.

    Attributes:
        sites: The mean over the sites of a structure, `(N, 61)`; NaN if it cannot be computed.
        compositions: Statistics of the elements' properties, `(N, 132)`; a property without data is NaN.
        problems: The reason for each missing fingerprint; empty if there is one.
    """

    sites: np.ndarray
    compositions: np.ndarray
    problems: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, count: int) -> Fingerprints:
        """Return the fingerprints of the first structures."""
        return Fingerprints(self.sites[:count], self.compositions[:count], self.problems[:count])

    @property
    def usable(self) -> np.ndarray:  # (N,)
        """Which structures have both fingerprints."""
        return np.array([not problem for problem in self.problems], bool)

    @property
    def complete(self) -> bool:
        """Whether all structures were tried."""
        return PENDING not in self.problems


def fingerprints(
    structures: Crystals | Sequence[Any],
    *,
    jobs: int = 1,
    kept: str | Path | None = None,
    progress: Progress | None = None,
) -> Fingerprints:
    """Compute the fingerprints of structures.

    A structure whose fingerprint cannot be computed has a problem, for example if its cell has collapsed.

    Arguments:
        structures: Crystals, pymatgen structures, ASE atoms or candidates.
        jobs: The number of processes.
        kept: An npz file for the results. Structures whose results are there are not computed again.
        progress: Called with the stage, the number done and the total.
    """
    given, path = candidates(structures), None if kept is None else Path(kept)
    found = read_fingerprints(path, given) if path is not None and path.exists() else _nothing(len(given))
    sites, compositions, problems = found.sites, found.compositions, list(found.problems)
    pending = [i for i, problem in enumerate(problems) if problem == PENDING]
    batch = TOGETHER * jobs
    for start in range(0, len(pending), batch):
        rows = pending[start : start + batch]
        for i, outcome in zip(rows, _computed([given[i] for i in rows], jobs), strict=True):
            sites[i], compositions[i], problems[i] = outcome
        if path is not None:
            _write(path, given, Fingerprints(sites, compositions, tuple(problems)))
        if progress is not None:
            progress("fingerprints", len(given) - len(pending) + start + len(rows), len(given))
    return Fingerprints(sites, compositions, tuple(problems))


Outcome = tuple[np.ndarray, np.ndarray, str]


def _computed(given: list[Candidate], jobs: int) -> Iterator[Outcome]:
    joblib = need("joblib", INSTALL)
    featurizers()  # a missing package is reported by this process
    yield from joblib.Parallel(n_jobs=jobs)(joblib.delayed(_fingerprint)(candidate) for candidate in given)


@functools.lru_cache(maxsize=1)
def featurizers() -> tuple[Any, Any]:
    """Return matminer's featurizers of a site and of a composition."""
    site = need("matminer.featurizers.site.fingerprint", INSTALL).CrystalNNFingerprint.from_preset("ops")
    with quiet():  # it warns that properties without data are NaN
        return site, need("matminer.featurizers.composition.composite", INSTALL).ElementProperty.from_preset("magpie")


def _fingerprint(candidate: Candidate) -> Outcome:
    unknown = "" if candidate.known else "it has an unknown element"
    if reason := unmeasurable(candidate) or unknown or needle(candidate):
        return np.full(SITE, np.nan), np.full(COMPOSITION, np.nan), reason
    site, element = featurizers()
    try:
        with quiet():
            structure = candidate.structure()
            composition = np.array(element.featurize(structure.composition), float)
            found = np.mean([site.featurize(structure, i) for i in range(len(structure))], axis=0)
        if np.isfinite(found).all():
            return found, composition, ""
        reason = "its structure fingerprint is not finite"
    except Exception as error:  # affects only this structure, which CDVAE counts as invalid
        reason = one_line(error)
    return np.full(SITE, np.nan), np.full(COMPOSITION, np.nan), reason[:WORDS]


# ---- results on disk -------------------------------------------------------------------------------------------------


def _nothing(count: int) -> Fingerprints:
    return Fingerprints(np.full((count, SITE), np.nan), np.full((count, COMPOSITION), np.nan), (PENDING,) * count)


def identity(given: Sequence[Candidate]) -> dict[str, np.ndarray]:
    """Return what a file of results keeps, to recognise the structures that they belong to; see `require_same`."""
    lines = "\n".join(f"{one.name} {' '.join(map(symbol, one.numbers))}" for one in given)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return {"digest": np.array(digest), "volumes": np.array([one.volume for one in given])}


def require_same(path: Path, arrays: Mapping[str, np.ndarray], given: Sequence[Candidate]) -> None:
    """Raise an error if a file of results belongs to other structures.

    Names and elements must be equal; volumes only nearly, because cells that are decoded on another machine differ by
    rounding.
    """
    own = identity(given)
    same = own.keys() <= arrays.keys() and str(arrays["digest"]) == str(own["digest"])
    same = same and arrays["volumes"].shape == own["volumes"].shape
    if not same or not np.allclose(arrays["volumes"], own["volumes"], rtol=NEAR, equal_nan=True):
        raise DataError(f"{path} does not hold results of these {len(given)} structures; choose another file")


def _write(path: Path, given: Sequence[Candidate], found: Fingerprints) -> None:
    content = io.BytesIO()
    arrays: dict[str, Any] = {
        **identity(given),
        "sites": found.sites.astype(np.float32),
        "compositions": found.compositions.astype(np.float32),
        "problems": np.array([problem.encode() for problem in found.problems], f"S{4 * WORDS}"),
    }
    np.savez_compressed(content, **arrays)
    write_bytes(path, content.getvalue())


def read_fingerprints(path: Path, given: Sequence[Candidate]) -> Fingerprints:
    """Return the fingerprints of structures from a file that `fingerprints` wrote."""
    arrays = read_arrays(path, LARGEST)
    require_same(path, arrays, given)
    shapes = {"sites": (len(given), SITE), "compositions": (len(given), COMPOSITION), "problems": (len(given),)}
    if wrong := [name for name, shape in shapes.items() if name not in arrays or arrays[name].shape != shape]:
        raise DataError(f"{path} is not a file of fingerprints: it lacks {wrong[0]} of every structure; delete it")
    problems = tuple(text.decode("utf-8", "replace") for text in arrays["problems"].tolist())
    return Fingerprints(arrays["sites"].astype(float), arrays["compositions"].astype(float), problems)
