"""What is the same structure and what is not."""

from dataclasses import replace

import numpy as np

from fmwc.crystals import Candidate, Known, candidates, unique

from .conftest import crystal, rock_salt

SUPER = Candidate(
    "super",
    np.tile(rock_salt().numbers, 2),
    np.concatenate([rock_salt().coords, rock_salt().coords + np.array([1, 0, 0])]) / [2, 1, 1],
    rock_salt().cell * [[2], [1], [1]],
)
CAESIUM = crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [3.5, 3.5, 3.5])


def moved() -> Candidate:
    return replace(rock_salt(), coords=(rock_salt().coords + np.array([0.13, 0.27, 0.4])) % 1, name="moved")


def test_copies_are_not_unique():
    assert unique([rock_salt(), SUPER, moved(), CAESIUM, rock_salt(cation=19)]) == [True, False, False, True, True]


def test_unusable_structures_are_not_unique():
    assert unique([rock_salt(), rock_salt()], [False, True]) == [False, True]


def test_prototypes_are_unique(prototypes):
    seen = []
    assert sum(unique(prototypes, progress=seen.append)) >= 0.9 * len(prototypes)
    assert seen[-1] == len(prototypes)


def test_novelty(prototypes):
    known = Known(prototypes)
    assert len(known) == len(prototypes)
    for candidate in candidates(prototypes)[:10]:
        assert known.holds(candidate)
    assert not Known([rock_salt()]).holds(CAESIUM)
    assert Known([rock_salt(), CAESIUM]).holds(SUPER)
    assert not Known([rock_salt()]).holds(rock_salt(cation=19))
