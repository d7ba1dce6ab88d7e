"""Small crystals with known answers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pymatgen.core", exc_type=ImportError)

from fmwc.crystals import Candidate, calculator, candidates, mp20
from fmwc.crystals.structures import Crystals

REAL = [Path(os.environ.get("FMWC_DATA") or "nowhere"), Path(__file__).parents[3] / "shared" / "data" / "mp20-full"]
FACES = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])


def rock_salt(edge: float = 5.64, cation: int = 11, anion: int = 17, name: str = "salt") -> Candidate:
    """The conventional cell, 8 atoms."""
    coords = np.concatenate([FACES, FACES + 0.5]) % 1
    return Candidate(name, np.array([cation] * 4 + [anion] * 4), coords, np.eye(3) * edge)


def structure_of(crystals: Crystals, index: int):
    """Return one structure as a pymatgen structure."""
    return candidates(crystals.take([index]))[0].structure()


def crystal(numbers: list[int], coords: list[list[float]], cell: list[float], name: str = "it") -> Candidate:
    """Atoms in a right-angled cell."""
    return Candidate(name, np.array(numbers), np.array(coords, float).reshape(-1, 3), np.diag(np.array(cell, float)))


BAD = {  # by name: the structure, and a part of its problem
    "coincident": (crystal([11, 17], [[0, 0, 0], [0, 0, 0]], [4, 4, 4]), "coincide: 0 Å"),
    "close": (crystal([11, 17], [[0, 0, 0], [0.05, 0, 0]], [4, 4, 4]), "Na and Cl"),
    "collapsed": (crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [1e-3, 1e-3, 1e-3]), "collapsed"),
    "no volume": (crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [0, 4, 4]), "collapsed"),
    "flat": (crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [1e-3, 300, 300]), "flat"),
    "needle": (crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [3, 3, 300]), "needle"),
    "empty cell": (crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [1e7, 1e7, 1e7]), "nearly empty"),
    "isolated": (crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [14, 14, 14]), "isolated atom"),
    "no atoms": (crystal([], [], [4, 4, 4]), "no atoms"),
    "no element": (crystal([11, 121], [[0, 0, 0], [0.5, 0.5, 0.5]], [4, 4, 4]), "121 is not one of the 118"),
    "unknown": (crystal([11, 98], [[0, 0, 0], [0.5, 0.5, 0.5]], [4, 4, 4]), "does not support Cf"),
    "not finite": (crystal([11, 17], [[0, 0, 0], [np.nan, 0, 0]], [4, 4, 4]), "not finite"),
    "cell not finite": (crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [4, 4, np.inf]), "not finite"),
}


@pytest.fixture(scope="session")
def chgnet():
    pytest.importorskip("chgnet", exc_type=ImportError)
    return calculator("chgnet", "cpu")


@pytest.fixture(scope="session")
def library():
    """All prototypes of pymatgen that are small enough, in three splits."""
    return {split: mp20.prototypes(split) for split in mp20.SPLITS}


@pytest.fixture(scope="session")
def prototypes(library):
    found = library["train"]
    return found.take((found.numbers.max(1).values <= 94).nonzero()[:40, 0])


@pytest.fixture(scope="session")
def mp20_folder() -> Path:
    found = next((folder for folder in REAL if (folder / "test.npz").is_file()), None)
    if found is None:
        pytest.skip("MP-20 is not on this machine: set FMWC_DATA to its folder")
    return found
