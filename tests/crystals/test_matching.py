"""Uniqueness and novelty of structures, and the paper's rules for the success of an edit."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fmwc.crystals import Candidate, Known, candidates, unique
from fmwc.crystals.matching import (
    MODES,
    change_of,
    changes,
    chemistry_changed,
    coordinate_rmsd,
    success,
    useful,
)
from fmwc.crystals.structures import Crystals
from fmwc.errors import ShapeError, UnknownNameError

from .conftest import FACES, crystal, rock_salt

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


# ---- success of edits ------------------------------------------------------------------------------------------------


def crystals(numbers, coords):
    count = len(numbers)
    there = (torch.tensor(numbers) > 0)[..., None]
    return Crystals(
        torch.tensor(numbers),
        torch.tensor(coords).remainder(1.0) * there,
        torch.full((count, 3), 4.0),
        torch.full((count, 3), 90.0),
        tuple(str(i) for i in range(count)),
    )


ROCK_SALT = [[0.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]


def test_chemistry_is_the_reduced_formula():
    seeds = crystals([[11, 17, 0], [11, 17, 0], [8, 8, 1]], [ROCK_SALT] * 3)
    edits = crystals([[17, 11, 0], [19, 17, 0], [8, 1, 1]], [ROCK_SALT] * 3)
    assert chemistry_changed(seeds, edits).tolist() == [False, True, True]


def test_rmsd_is_periodic_and_ignores_translations():
    seed = [[0.05, 0.0, 0.0], [0.5, 0.5, 0.5]]
    shifted = [[0.05 + 0.3, 0.7, 0.1], [0.8, 0.2, 0.6]]  # the whole crystal by (0.3, 0.7, 0.1)
    across = [[-0.05, 0.0, 0.0], [0.5, 0.5, 0.5]]  # one atom by 0.1, over the face
    seeds = crystals([[1, 2]] * 3, [seed] * 3)
    found = coordinate_rmsd(seeds, crystals([[1, 2]] * 3, [seed, shifted, across]))
    # One of two atoms moves by 0.1, so each is 0.05 from their common shift.
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.05]).double(), atol=1e-6, rtol=0)


def test_rmsd_of_padding_and_of_single_atoms_is_zero():
    seeds = crystals([[3, 0], [3, 4]], [[[0.1] * 3, [0.0] * 3], [[0.1] * 3, [0.2] * 3]])
    edits = crystals([[3, 0], [3, 4]], [[[0.6] * 3, [0.0] * 3], [[0.1] * 3, [0.4] * 3]])
    found = coordinate_rmsd(seeds, edits)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.1 * math.sqrt(3)]).double(), atol=1e-6, rtol=0)


def test_change_of_names_what_happened_to_a_crystal():
    shaken = replace(CAESIUM, coords=np.array([[0.3, 0.1, 0.74], [0.8, 0.6, 0.2]]))
    found = change_of(CAESIUM, shaken)  # a translation, and one of two atoms moved by 0.04 of 3.5 Å
    assert (found.kind, found.rmsd) == ("same", pytest.approx(0.04 * 3.5 / 2, rel=1e-3))  # from their mean
    salt = rock_salt()
    blende = replace(salt, coords=np.concatenate([FACES, FACES + 0.25]))
    assert change_of(salt, replace(salt, coords=salt.coords[[4, 5, 6, 7, 0, 1, 2, 3]])).kind == "same"  # by symmetry
    assert change_of(salt, blende).kind == "polymorph"
    assert math.isnan(change_of(salt, blende).rmsd)
    larger = change_of(salt, rock_salt(6.6, cation=19, anion=35))  # KBr, of another volume
    assert (larger.kind, larger.rmsd) == ("substitution", pytest.approx(0, abs=1e-3))
    assert change_of(salt, replace(blende, numbers=np.array([30] * 4 + [16] * 4))).kind == "other"
    uneven = replace(salt, numbers=np.array([11] * 3 + [19] + [17] * 4))
    assert change_of(salt, uneven).kind == "other"


def test_useful_edits_are_metastable_and_change_one_thing():
    salt = rock_salt()
    blende = replace(salt, coords=np.concatenate([FACES, FACES + 0.25]))
    other = replace(blende, numbers=np.array([30] * 4 + [16] * 4))
    edits = [salt, blende, rock_salt(6.6, cation=19, anion=35), other, blende]
    found = changes([salt] * 5, edits)
    assert [change.kind for change in found] == ["same", "polymorph", "substitution", "other", "polymorph"]
    assert useful(found, [True] * 4 + [False]).tolist() == [False, True, True, False, False]


def test_change_of_crystals_that_cannot_be_compared():
    salt = rock_salt()
    assert change_of(salt, replace(salt, cell=salt.cell * 1e-3)).kind == ""
    many = crystal(list(range(3, 13)), np.random.default_rng(0).random((10, 3)).tolist(), [9, 9, 9])
    swapped = replace(many, numbers=many.numbers + 10)  # ten elements have 3.6 million assignments
    begin = time.perf_counter()
    assert change_of(many, swapped).kind == "other"
    assert time.perf_counter() - begin < 5


FAR = [[0.0, 0.0, 0.0], [0.2, 0.5, 0.5]]  # 0.15 each from the common shift
NEAR = [[0.0, 0.0, 0.0], [0.4, 0.5, 0.5]]  # 0.05


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # same and far, changed and far, same and near, changed and near, higher energy, unknown energy
        ("chem-swap", [False, True, False, False, False, False]),
        ("polymorph", [True, False, False, False, False, False]),
        ("all-channels", [True, True, False, False, False, False]),
    ],
)
def test_success_needs_intent_movement_and_a_lower_energy(mode, expected):
    seeds = crystals([[11, 17]] * 6, [ROCK_SALT[:2]] * 6)
    salt, other = [11, 17], [19, 17]
    kind = other if mode == "chem-swap" else salt
    edits = crystals([salt, other, salt, other, kind, kind], [FAR, FAR, NEAR, NEAR, FAR, FAR])
    before, after = [0.1] * 6, [0.05, 0.05, 0.05, 0.05, 0.2, math.nan]
    assert success(mode, seeds, edits, before, after).tolist() == expected


def test_every_mode_names_its_channel():
    assert {name: mode.channel for name, mode in MODES.items()} == {
        "chem-swap": "type",
        "polymorph": "coord",
        "all-channels": None,
    }


def test_errors():
    seeds = crystals([[11, 17]] * 2, [ROCK_SALT[:2]] * 2)
    with pytest.raises(UnknownNameError, match="polymorph"):
        success("polymorf", seeds, seeds, [0, 0], [0, 0])
    with pytest.raises(ShapeError, match="one energy per crystal"):
        success("polymorph", seeds, seeds, [0.0], [0.0, 0.0])
    with pytest.raises(ShapeError, match="one seed per edit"):
        chemistry_changed(seeds, seeds.take([0]))
    with pytest.raises(ShapeError, match="same number of atoms"):
        coordinate_rmsd(seeds, crystals([[11, 17], [11, 0]], [ROCK_SALT[:2]] * 2))
