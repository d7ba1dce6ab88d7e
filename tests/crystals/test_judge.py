"""The judge and the rules of validity."""

import math

import numpy as np
import pytest

from fmwc.crystals import Hull, judge, read, shipped_hull, validity
from fmwc.crystals.hull import composition
from fmwc.crystals.judge import balanced
from fmwc.errors import UsageError

from .conftest import BAD, crystal, rock_salt

COLUMNS = [
    "name", "formula", "atoms", "energy_per_atom", "e_above_hull", "distances_ok", "apart_ok", "charge_ok",
    "density_ok", "valid", "unique", "novel", "stable", "metastable", "sun", "msun", "problem",
]  # fmt: skip


def test_good_and_bad_structures(chgnet):
    bad = [candidate for candidate, _ in BAD.values()]
    structures = [rock_salt(name="first"), *bad, rock_salt(name="again"), rock_salt(4.8, name="hot")]
    found = judge(structures, calculator=chgnet, training=[rock_salt(cation=19)])
    assert list(found.columns) == COLUMNS
    assert found["name"] == [candidate.name for candidate in structures]
    rows = found.rows()
    assert rows[0]["formula"] == "NaCl"
    assert rows[0]["atoms"] == 8
    assert rows[0]["e_above_hull"] == pytest.approx(0, abs=0.02)
    assert rows[0]["msun"] is rows[0]["novel"] is rows[0]["unique"] is True
    for row, (_, message) in zip(rows[1:-2], BAD.values(), strict=True):
        assert message in row["problem"]
        assert math.isnan(row["e_above_hull"])
        assert not any(row[name] for name in ("stable", "metastable", "sun", "msun"))
    assert rows[-2]["metastable"]
    assert not rows[-2]["unique"]
    assert not rows[-2]["msun"]
    assert rows[-1]["e_above_hull"] > 0.1
    assert not rows[-1]["metastable"]


def test_the_summary_counts_over_all(chgnet):
    found = judge([rock_salt(), BAD["coincident"][0], BAD["collapsed"][0], rock_salt(4.8)], calculator=chgnet)
    summary = found.summary()
    assert (summary["structures"], summary["problems"], summary["judged"]) == (4, 2, 2)
    above = [value for value in found["e_above_hull"] if not math.isnan(value)]
    assert summary["mean_e_above_hull"] == pytest.approx(np.mean(above))
    assert summary["distances_ok_share"] == 0.5
    assert summary["metastable"] == 1
    assert summary["metastable_share"] == 0.25
    assert summary["novel"] is summary["msun_share"] is None  # no training set
    assert found["msun"] == [None, False, False, False]


def test_nothing_to_judge(chgnet):
    summary = judge([], calculator=chgnet).summary()
    assert summary["structures"] == 0
    assert math.isnan(summary["mean_e_above_hull"])


def test_an_element_without_a_reference(chgnet):
    found = judge([crystal([10], [[0, 0, 0]], [3.2, 3.2, 3.2]), rock_salt()], calculator=chgnet)
    assert found["problem"] == ["no reference for Ne", ""]
    assert math.isnan(found["e_above_hull"][0])
    assert math.isfinite(found["energy_per_atom"][0])
    assert found["unique"] == [True, True]


def test_hulls_of_other_models_are_refused(chgnet):
    with pytest.raises(UsageError, match="cannot be compared"):
        judge([rock_salt()], calculator=chgnet, hull=Hull(["Na", "Cl"], [0, 0], "mace"))
    with pytest.raises(UsageError, match="number of steps"):
        judge([rock_salt()], calculator=chgnet, relax=-1)


def test_relaxation(chgnet):
    structures = [rock_salt(5.3), BAD["coincident"][0]]
    found = judge(structures, calculator=chgnet, relax=8)
    assert found["energy_per_atom"][0] < found["energy_raw"][0]
    assert found["rmsd"][0] < 0.05
    assert "coincide" in found["problem"][1]
    assert found.candidates[0].volume > structures[0].volume
    assert list(found.columns)[-1] == "problem"


def test_files_with_broken_ones(chgnet, tmp_path):
    from pymatgen.io.ase import AseAtomsAdaptor

    salt = rock_salt().structure()
    (tmp_path / "a.cif").write_text(salt.to(fmt="cif"))
    (tmp_path / "b.cif").write_text("data_broken\n_cell_length_a oops\n")
    (tmp_path / "POSCAR_c").write_text(salt.to(fmt="poscar"))
    (tmp_path / "notes.txt").write_text("not a structure")
    atoms = AseAtomsAdaptor.get_atoms(salt)
    atoms.write(tmp_path / "d.extxyz", format="extxyz")
    good = (tmp_path / "d.extxyz").read_text()
    (tmp_path / "e.xyz").write_text(good + good + "8\nLattice")
    (tmp_path / "f.xyz").write_text("1\nno cell\nNa 0 0 0\n")
    found = judge(read(tmp_path), calculator=chgnet)
    assert found["name"] == ["POSCAR_c", "a.cif", "b.cif", "d.extxyz", "e.xyz#0", "e.xyz#1", "e.xyz#2", "f.xyz"]
    fine = [not problem for problem in found["problem"]]
    assert fine == [True, True, False, True, True, True, False, False]
    assert "truncated" in found["problem"][6]
    assert "no cell" in found["problem"][7]
    energies = np.array(found["energy_per_atom"])
    np.testing.assert_allclose(energies[fine], energies[0], atol=1e-5)
    assert shipped_hull().model == "chgnet"


def test_mp20_by_recomputed_energies(chgnet, mp20_folder):
    from fmwc.crystals import mp20

    test = mp20.load(mp20_folder, "test")
    found = judge(test.take(range(0, len(test), 42)), calculator=chgnet)
    summary = found.summary()
    assert summary["problems"] == 0
    assert summary["distances_ok_share"] == summary["density_ok_share"] == 1
    assert summary["charge_ok_share"] > 0.85
    assert summary["mean_e_above_hull"] < 0.015
    assert summary["metastable_share"] >= 0.98


# ---- validity --------------------------------------------------------------------------------------------------------


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
