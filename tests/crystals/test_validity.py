"""Validity, by structures whose answer is known."""

import numpy as np
import pytest

from fmwc.crystals import validity
from fmwc.crystals.hull import composition
from fmwc.crystals.judge import balanced

from .conftest import BAD, crystal, rock_salt


def test_rock_salt_is_valid_and_squeezed_it_is_not():
    assert validity(rock_salt()).valid
    squeezed = validity(rock_salt(2.6))  # Na–Cl at 1.3 Å; the radii are 1.8 and 1.0
    assert not squeezed.distances
    assert squeezed.apart
    assert squeezed.charge
    assert not squeezed.valid


def test_the_bound_is_half_the_sum_of_the_radii():
    half = (1.8 + 1.0) / 2
    for factor, kept in ((1.001, True), (0.999, False)):
        assert validity(rock_salt(2 * half * factor)).distances is kept


def test_distances_to_own_images():
    assert not validity(crystal([29], [[0, 0, 0]], [1.2, 5, 5])).distances


@pytest.mark.parametrize(
    ("formula", "ok"),
    [
        ("NaCl", True), ("Fe2O3", True), ("CaTiO3", True), ("NaF2", False), ("MgO2", True), ("CuZn", True),
        ("Si", True), ("Ne", True), ("NaAr", False), ("Al2O3", True), ("CsF7", False),
    ],
)  # fmt: skip
def test_charges(formula, ok):
    assert balanced(composition(formula)) is ok


def test_density():
    assert not validity(rock_salt(80)).density  # 0.0008 g/cm³
    assert not validity(crystal([76, 76], [[0, 0, 0], [0.5, 0.5, 0.5]], [2, 2, 2])).density
    assert validity(rock_salt()).density


@pytest.mark.parametrize("which", BAD)
def test_bad_structures_do_not_crash(which):
    rules = validity(BAD[which][0])
    assert all(type(rule) in (bool, np.bool_) for rule in rules)
    if which in ("coincident", "close", "collapsed", "no volume", "flat", "no atoms", "no element", "not finite"):
        assert not rules.distances
        assert not rules.apart
        assert not rules.valid
