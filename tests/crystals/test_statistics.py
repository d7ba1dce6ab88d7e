"""Statistics of sets of crystals have closed forms on small sets, and agree with published values on real ones."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fmwc.crystals.fingerprints import Fingerprints
from fmwc.crystals.hull import composition
from fmwc.crystals.statistics import (
    coverage,
    properties,
    space_group,
    statistics,
)
from fmwc.crystals.structures import balanced
from fmwc.errors import ShapeError

from .conftest import BAD, crystal, rock_salt


def prints(places, compositions=None):
    """Fingerprints that are points on a line; None has none."""
    compositions = places if compositions is None else compositions
    rows = [[math.nan if p is None else float(p), 0.0] for p in places]
    others = [[math.nan if p is None else float(p), 1.0] for p in compositions]
    return Fingerprints(np.array(rows), np.array(others), tuple("" if p is not None else "failed" for p in places))


# ---- coverage --------------------------------------------------------------------------------------------------------


def test_coverage_of_points_on_a_line():
    # Of the real points 0, 1, 2, 3 two are near a generated point; of the generated points three of four are.
    real, ours = prints([0, 1, 2, 3]), prints([0.05, 0.95, 1.05, 9])
    found = coverage(ours, real, (0.1, 10))
    assert found.recall == 0.5
    assert found.precision == 0.75


def test_structures_without_fingerprint_are_not_covered():
    real = prints([0, 1])
    assert coverage(prints([0, 1, None, None]), real, (0.1, 10)) == (1.0, 0.5)
    assert coverage(prints([None]), real, (0.1, 10)) == (0.0, 0.0)
    assert coverage(real, prints([0, 1, None]), (0.1, 10)) == (1.0, 1.0)


def test_structure_and_composition_must_both_be_near():
    real = prints([0, 1], [0, 1])
    far = prints([0, 1], [0, 100])
    scale = 0.5  # the standard deviation of the real compositions
    assert coverage(far, real, (0.1, 0.1 / scale)) == (0.5, 0.5)


def test_the_nearest_structure_and_composition_are_found_separately():
    real = prints([0, 5], [0, 5])
    crossed = prints([0, 5], [5, 0])  # each structure has a twin, each composition another one
    assert coverage(crossed, real, (0.1, 0.1)) == (1.0, 1.0)


def test_rows_in_parts_give_the_same_coverage(monkeypatch):
    generator = np.random.default_rng(0)
    real, ours = prints(list(generator.random(50))), prints(list(generator.random(70)))
    whole = coverage(ours, real, (0.01, 0.05))
    monkeypatch.setattr("fmwc.crystals.statistics.ROWS", 7)
    assert 0 < whole.recall < 1
    assert coverage(ours, real, (0.01, 0.05)) == whole


# ---- single structures -----------------------------------------------------------------------------------------------


def test_compositions_by_smact():
    pytest.importorskip("smact")
    assert all(balanced(composition(formula)) for formula in ("NaCl", "Fe2O3", "Fe3Al", "Si", "LiFePO4"))
    # Charges of NaCl2 cannot balance. Those of KF could with K− and F+, but fluorine is the more electronegative.
    assert not any(balanced(composition(formula)) for formula in ("NaCl2", "K2F", "CsNe"))


def test_space_groups():
    salt = rock_salt()
    assert space_group(salt, 0.01) == 225
    assert space_group(crystal([55, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [4.1, 4.1, 4.1]), 0.01) == 221
    shaken = replace(salt, coords=salt.coords + 0.002 * np.random.default_rng(0).normal(size=salt.coords.shape))
    assert space_group(shaken, 0.1) == 225
    assert space_group(shaken, 0.001) == 1
    assert space_group(BAD["collapsed"][0], 0.1) is None


def test_properties():
    pytest.importorskip("smact")
    found = properties([rock_salt(), BAD["no atoms"][0], BAD["no element"][0], BAD["cell not finite"][0]])
    assert found["density"][0] == pytest.approx(2.16, abs=0.01)  # halite
    assert np.isnan(found["density"][1:]).all()
    assert found["elements"] == [2, 0, 2, 2]
    assert found["smact_ok"] == [True, False, False, True]
    assert found["space_group_0.01"] == [225, None, 221, None]  # unknown elements differ from known ones


# ---- sets ------------------------------------------------------------------------------------------------------------


def columns(**changes):
    base = {
        "apart_ok": [True] * 4,
        "smact_ok": [True] * 4,
        "density": [1.0, 2.0, 3.0, 4.0],
        "elements": [2, 2, 3, 3],
        "energy_per_atom": [-1.0, -2.0, -3.0, -4.0],
        "space_group_0.1": [1, 1, 2, None],
        "space_group_0.01": [1, 1, 1, 1],
    }
    return {**base, **changes}


def test_equal_sets_have_no_distance():
    found = statistics(columns(), columns())
    assert [found[f"wasserstein_{name}"] for name in ("density", "elements", "energy")] == [0, 0, 0]
    assert [found[f"space_group_distance_{symprec}"] for symprec in ("0.1", "0.01")] == [0, 0]
    assert found["p1_0.1"] == pytest.approx(2 / 3)
    assert found["space_groups_0.1"] == 2


def test_distances_are_shifts_of_the_valid_structures():
    shifted = columns(density=[1.5, 2.5, 3.5, 99.0], elements=[3, 3, 4, 9], apart_ok=[True, True, True, False])
    real = columns(density=[1.0, 2.0, 3.0], elements=[2, 2, 3], energy_per_atom=[-1.0, -2.0, -3.0])
    found = statistics(shifted, real)
    assert found["wasserstein_density"] == pytest.approx(0.5)
    assert found["wasserstein_elements"] == pytest.approx(1)
    assert found["wasserstein_energy"] == pytest.approx(0)
    assert (found["structurally_valid"], found["valid"]) == (0.75, 0.75)


def test_disjoint_space_groups_have_distance_one():
    other = {f"space_group_{symprec}": [225] * 4 for symprec in ("0.1", "0.01")}
    assert statistics(columns(), columns(**other))["space_group_distance_0.1"] == 1


def test_a_structure_without_fingerprint_is_not_valid():
    found = statistics(columns(), columns(), prints([0, 1, 2, None]), prints([0, 1, 2]))
    assert (found["structurally_valid"], found["compositionally_valid"], found["valid"]) == (1, 1, 0.75)
    assert (found["coverage_recall"], found["coverage_precision"]) == (1, 0.75)
    with pytest.raises(ShapeError, match="3 fingerprints for 4"):
        statistics(columns(), columns(), prints([0, 1, 2]), prints([0, 1, 2]))
