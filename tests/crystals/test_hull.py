"""Hulls checked by hand and against pymatgen, and hull files."""

import warnings

import numpy as np
import pytest

from fmwc.crystals import Hull, folder_hull, hull_for, reference_hull, shipped_hull
from fmwc.crystals.hull import SHIPPED, composition, make_shipped
from fmwc.crystals.structures import key_of, symbol
from fmwc.errors import DataError, ShapeError, UsageError


@pytest.fixture
def salt():
    """Na, Cl and NaCl, 2 eV/atom below its elements, and a worse NaCl."""
    return Hull(["Na", "Cl", "NaCl", "Na2Cl2", "Na3Cl"], [-1.0, -2.0, -3.5, -3.0, -1.5], "model")


def formula(key):
    return "".join(f"{symbol(z)}{count}" for z, count in key)


def test_a_hull_by_hand(salt):
    assert len(salt) == 4
    assert salt.above("Na4Cl4", -3.5) == (pytest.approx(0), "")
    assert salt.above("NaCl", -3.6)[0] == pytest.approx(-0.1)
    # Na3Cl is 1/2 Na + 1/2 NaCl by atoms: (−1 − 3.5)/2 = −2.25
    assert salt.above("Na3Cl", -1.5)[0] == pytest.approx(0.75)
    assert salt.above("Na", -0.9)[0] == pytest.approx(0.1)
    assert [formula(key) for key in salt.corners().keys] == ["Na1", "Cl1", "Na1Cl1"]


def test_an_element_without_a_reference_is_named(salt):
    value, problem = salt.above("NaNe", -1.0)
    assert np.isnan(value)
    assert problem == "no reference for Ne"
    assert salt.above("K", 0.0)[1] == "no reference for K"


def test_other_structures_do_not_need_the_missing_reference():
    hull = Hull(["Na", "NaCl"], [-1.0, -3.5], "model")
    assert hull.above("Na3Cl", -2.25) == (pytest.approx(0), "")
    assert hull.above("NaCl3", -2.25)[1] == "no reference for Cl"


def test_hull_agrees_with_pymatgen():
    from pymatgen.analysis.phase_diagram import PDEntry, PhaseDiagram
    from pymatgen.core import Composition

    hull, generator = shipped_hull(), np.random.default_rng(0)
    systems = sorted({tuple(z for z, _ in key) for key in hull.keys if 1 < len(key) < 6})
    worst = 0.0
    for i in generator.choice(len(systems), 100, replace=False):
        elements = systems[i]
        inside = [n for n, key in enumerate(hull.keys) if {z for z, _ in key} <= set(elements)]
        # Random increases: some are then no corners, and some are above the hull.
        energies = [hull.energies[n] + generator.choice([0, 0.3]) * generator.random() for n in inside]
        keys = [hull.keys[n] for n in inside]
        whole = [Composition(formula(key)) for key in keys]
        entries = [PDEntry(one, e * one.num_atoms) for one, e in zip(whole, energies, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs, ours = PhaseDiagram(entries), Hull(keys, energies, "model")
        for _ in range(3):
            mixture = "".join(f"{symbol(z)}{generator.integers(1, 7)}" for z in elements)
            expected = theirs.get_hull_energy_per_atom(Composition(mixture))
            worst = max(worst, abs(ours.energy(composition(mixture))[0] - expected))
        entry = PDEntry(Composition(mixture), -20.0 * Composition(mixture).num_atoms)
        below = theirs.get_decomp_and_e_above_hull(entry, allow_negative=True)[1]
        assert ours.above(mixture, -20.0)[0] == pytest.approx(below, abs=1e-6)
    assert worst < 1e-6


def test_corners_give_the_same_hull(salt):
    generator = np.random.default_rng(1)
    names = ["Na", "Cl", "K", *(f"Na{a}Cl{b}K{c}" for a, b, c in generator.integers(1, 5, (60, 3)))]
    whole = Hull(names, generator.normal(size=len(names)), "model")
    corners = whole.corners()
    assert len(corners) < len(whole)
    for name in names:
        assert corners.energy(composition(name))[0] == pytest.approx(whole.energy(composition(name))[0])


def test_save_and_load(salt, tmp_path):
    path = salt.save(tmp_path / "hull.npz", {"licence": "mine"})
    again = Hull.load(path)
    assert (again.keys, again.model) == (salt.keys, "model")
    np.testing.assert_allclose(again.energies, salt.energies)
    with np.load(path) as file:
        assert str(file["licence"]) == "mine"


def test_files_that_are_not_hulls(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 no")
    np.savez(tmp_path / "b.npz", x=np.zeros(3))
    for name in ("a.npz", "b.npz", "c.npz"):
        with pytest.raises(DataError, match=r"not a hull|truncated|No such file"):
            Hull.load(tmp_path / name)


def test_wrong_references_are_refused():
    with pytest.raises(ShapeError, match="one energy"):
        Hull(["Na"], [1.0, 2.0], "model")
    with pytest.raises(UsageError, match="NaN"):
        Hull(["Na"], [np.nan], "model")
    for wrong in ("", "na", "Na(OH", "Xx", "Na0", "Na1.5"):
        with pytest.raises(UsageError):
            composition(wrong)


def test_shipped_hull_is_small_and_names_its_source():
    assert SHIPPED.stat().st_size < 400_000
    with np.load(SHIPPED) as file:
        assert "CC BY 4.0" in str(file["licence"])
        assert "Materials Project" in str(file["attribution"])
    hull = hull_for("chgnet")
    assert hull is shipped_hull()
    assert hull.model == "chgnet"
    assert hull.above("NaNe", 0.0)[1] == "no reference for Ne"
    # PBE has −3.38 eV/atom; MP2020's correction of a chloride, −0.614 eV/Cl, is in the network's output.
    assert hull.energy(composition("NaCl"))[0] == pytest.approx(-3.38 - 0.614 / 2, abs=0.05)


def test_reference_energies_are_cached(prototypes, tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    name = "tests.crystals.test_energy:lennard_jones"
    some, seen = prototypes.take(range(6)), []
    first = reference_hull(some, name, progress=lambda *step: seen.append(step))
    (kept,) = (tmp_path / "hulls").iterdir()
    assert seen == [("reference energies", 6, 6)]
    assert first.model == name

    def never(*_, **__):
        raise AssertionError("computed twice")

    monkeypatch.setattr("fmwc.crystals.hull.energies", never)
    again = reference_hull(some, name)
    assert again.keys == first.keys
    np.testing.assert_allclose(again.energies, first.energies)
    kept.write_bytes(b"cut")
    with pytest.raises(AssertionError, match="twice"):
        reference_hull(some, name)


def test_other_models_need_references(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)
    with pytest.raises(DataError, match="FMWC_DATA"):
        hull_for("tests.crystals.test_energy:lennard_jones")
    with pytest.raises(UsageError, match="cannot be imported"):
        hull_for("no.module:function")


def test_energies_of_mp20_above_the_hull(mp20_folder, tmp_path):
    from fmwc.crystals import mp20

    stored = mp20.energies(mp20_folder)
    if stored is None:
        pytest.skip("no stored energies")
    crystals, shipped = mp20.load(mp20_folder, "test"), shipped_hull()
    known = dict(zip(stored[0], stored[1].tolist(), strict=True))
    keys = [key_of(row) for row in crystals.numbers.tolist()]
    above = np.array([shipped.above(k, known[n])[0] for k, n in zip(keys, crystals.names, strict=True)])
    assert above.mean() == pytest.approx(0.0072, abs=1e-4)
    assert (above <= 0.1).mean() == pytest.approx(0.996, abs=1e-3)
    assert above.min() > -1e-9
    whole = folder_hull(mp20_folder)
    for key in keys[::40]:
        assert whole.energy(key)[0] == pytest.approx(shipped.energy(key)[0], abs=1e-9)


def test_the_shipped_file_is_made_from_a_folder(tmp_path, prototypes):
    with pytest.raises(DataError):
        make_shipped(tmp_path, tmp_path / "hull.npz")
    assert not (tmp_path / "hull.npz").exists()
