"""The judge and the rules of validity."""

import math

import numpy as np
import pytest

from fmwc.crystals import Hull, judge, read, shipped_hull, validity
from fmwc.crystals.judge import Judgement, with_consensus
from fmwc.errors import UsageError

from .conftest import BAD, crystal, rock_salt

COLUMNS = [
    "name", "formula", "atoms", "energy_per_atom", "e_above_hull", "distances_ok", "apart_ok", "charge_ok",
    "density_ok", "valid", "unique", "novel", "stable", "metastable", "sun", "msun", "competing_phases", "own_phases",
    "decomposition", "sparse_hull", "twin", "twin_split", "problem",
]  # fmt: skip


def test_good_and_bad_structures(chgnet):
    bad = [candidate for candidate, _ in BAD.values()]
    structures = [rock_salt(name="first"), *bad, rock_salt(name="again"), rock_salt(4.8, name="hot")]
    found = judge(structures, calculator=chgnet, known=[rock_salt(cation=19)])
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
    found = judge([crystal([86], [[0, 0, 0]], [4.4, 4.4, 4.4]), rock_salt()], calculator=chgnet)
    assert found["problem"] == ["no reference for Rn", ""]
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
    assert "cannot be read" in found["problem"][6]
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
    assert summary["charge_ok_share"] > 0.8
    assert summary["mean_e_above_hull"] < 0.015
    known = [verdict for verdict in found["metastable"] if verdict is not None]
    assert len(known) >= 0.95 * len(found["metastable"])  # the others have incomplete references
    assert np.mean(known) >= 0.98


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


SPARSE = Hull(["Na", "Cl", "K", "F", "KCl"], [-1.3, -1.8, -1.1, -1.9, -3.5], "chgnet")


def test_stability_is_unknown_where_only_elements_compete(chgnet):
    """Cold salt is far below its elements; without references in its system, that proves nothing."""
    structures = [rock_salt(), rock_salt(6.3, cation=19), rock_salt(3.4, name="hot"), BAD["flat"][0]]
    found = judge(structures, calculator=chgnet, hull=SPARSE, known=[rock_salt(5, 3, 9)])
    assert np.isnan(found["e_above_hull"]).tolist() == [True, False, True, True]
    for name in ("stable", "metastable", "sun", "msun"):
        assert found[name] == [None, True, False, False]
    assert found["competing_phases"] == [0, 1, 0, 0]
    assert found["own_phases"] == [0, 1, 0, 0]
    assert found["decomposition"] == ["0.5 Na + 0.5 Cl2", "1 KCl", *["0.5 Na + 0.5 Cl2"] * 2]
    assert found["sparse_hull"][0] == "only elements compete"
    assert found["sparse_hull"][1] == ""
    summary = found.summary()
    assert (summary["stable"], summary["stable_unknown"], summary["sun"], summary["sun_unknown"]) == (1, 1, 1, 1)
    assert summary["stable_share"] == 0.25


def test_the_twin_of_a_structure_and_its_split_are_named(chgnet):
    known = {"train": [rock_salt(6.3, 19, name="mp-1")], "test": [rock_salt(5.6, name="mp-2"), rock_salt(name="mp-3")]}
    structures = [rock_salt(), rock_salt(6.2, 19), rock_salt(4.2, 12, 8), BAD["flat"][0]]
    found = judge(structures, calculator=chgnet, known=known)
    assert found["novel"] == [False, False, True, False]
    assert found["twin"] == ["mp-2", "mp-1", "", ""]
    assert found["twin_split"] == ["test", "train", "", ""]
    unknown = judge(structures[:1], calculator=chgnet)
    assert (unknown["novel"], unknown["twin"], unknown["twin_split"]) == ([None], [""], [""])
    assert unknown.summary()["sun_unknown"] is None


def test_relaxed_structures_are_compared_with_relaxed_references(chgnet):
    salt = rock_salt(5.5)
    before = judge([salt], calculator=chgnet)["energy_per_atom"][0]
    after = judge([salt], calculator=chgnet, relax=100)["energy_per_atom"][0]
    elements = ["Na", "Cl", "NaCl"], [0.0, 0.0, before], "chgnet"
    found = judge([salt], calculator=chgnet, hull=Hull(*elements, [np.nan, np.nan, after]), relax=100)
    assert found["e_above_hull_raw"][0] == pytest.approx(0, abs=1e-6)
    assert found["e_above_hull"][0] == pytest.approx(0, abs=1e-6)
    assert found.notes == ()
    raw = judge([salt], calculator=chgnet, hull=Hull(*elements), relax=100)
    assert raw["e_above_hull"][0] == pytest.approx(after - before)
    assert "not relaxed" in raw.notes[0]


def test_the_cut_of_metastability(chgnet):
    structures, hull = [rock_salt(), rock_salt(5.2)], shipped_hull()
    low, high = sorted(judge(structures, calculator=chgnet, hull=hull)["e_above_hull"])
    assert 0 <= low < high
    between = judge(structures, calculator=chgnet, hull=hull, cut=(low + high) / 2)
    assert sorted(between["metastable"]) == [False, True]
    assert between.summary()["metastable"] == 1
    for cut in (-0.1, math.nan, math.inf):
        with pytest.raises(UsageError, match="cut must be"):
            judge(structures, calculator=chgnet, hull=hull, cut=cut)


def test_the_consensus_of_two_models():
    def opinion(metastable, problem=("",) * 4):
        names = ("energy_per_atom", "e_above_hull", "stable", "sun", "msun")
        columns = {name: [0.0] * 4 for name in names} | {"metastable": list(metastable), "problem": list(problem)}
        return Judgement(columns, tuple(rock_salt() for _ in range(4)), ("a note",))

    first, second = opinion((True, True, False, False)), opinion((True, False, False, False), ("", "", "", "failed"))
    found = with_consensus({"a": first, "b": second})
    assert found["consensus"] == [True, None, False, None]
    assert found["metastable"] == first["metastable"]
    assert found["metastable_b"] == second["metastable"]
    assert found["problem_b"] == second["problem"]
    assert found.notes == ("a: a note", "b: a note")
    with pytest.raises(UsageError, match="same structures"):
        with_consensus({"a": first, "b": Judgement(second.columns, second.candidates[:3])})
