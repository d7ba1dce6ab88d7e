"""The criteria of an edit on crystals written down."""

import math

import pytest
import torch

from fmwc.crystals.matching import MODES, chemistry_changed, coordinate_rmsd, success
from fmwc.crystals.structures import Crystals
from fmwc.errors import ShapeError, UnknownNameError


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
    # An atom of two moves by 0.1: each is 0.05 from their common shift.
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.05]).double(), atol=1e-6, rtol=0)


def test_rmsd_of_padding_and_of_single_atoms_is_zero():
    seeds = crystals([[3, 0], [3, 4]], [[[0.1] * 3, [0.0] * 3], [[0.1] * 3, [0.2] * 3]])
    edits = crystals([[3, 0], [3, 4]], [[[0.6] * 3, [0.0] * 3], [[0.1] * 3, [0.4] * 3]])
    found = coordinate_rmsd(seeds, edits)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.1 * math.sqrt(3)]).double(), atol=1e-6, rtol=0)


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
