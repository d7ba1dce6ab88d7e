"""Hulls checked by hand and against pymatgen, and hull files."""

import warnings

import numpy as np
import pytest

from fmwc.crystals import Hull, folder_hull, hull_for, mp20, reference_hull, relax, shipped_hull
from fmwc.crystals.hull import SHIPPED, TRIED, composition, make_shipped
from fmwc.crystals.structures import key_of, symbol
from fmwc.errors import DataError, ShapeError, UsageError

from .conftest import crystal, rock_salt


@pytest.fixture
def salt():
    """Na, Cl and NaCl, 2 eV/atom below its elements, and a worse NaCl."""
    return Hull(["Na", "Cl", "NaCl", "Na2Cl2", "Na3Cl"], [-1.0, -2.0, -3.5, -3.0, -1.5], "model")


def formula(key):
    return "".join(f"{symbol(z)}{count}" for z, count in key)


class counting:
    """An energy model that counts structures; it gives all of them the same energy, up to a number of structures."""

    name, highest = "tests-counting", 118

    def __init__(self, energy, most=1000):
        self.energy, self.most, self.evaluated = energy, most, 0

    def correction(self, candidate):
        return 0.0

    def batches(self, candidates):
        for _ in candidates:
            if self.evaluated == self.most:
                raise KeyboardInterrupt
            self.evaluated += 1
            yield [self.energy]


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
    assert again.model == "model"
    assert dict(zip(again.keys, again.energies, strict=True)) == dict(zip(salt.keys, salt.energies, strict=True))
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
    assert hull.above("NaRn", 0.0)[1] == "no reference for Rn"
    # PBE has −3.38 eV/atom; MP2020's correction of a chloride, −0.614 eV/Cl, is in the network's output.
    assert hull.energy(composition("NaCl"))[0] == pytest.approx(-3.38 - 0.614 / 2, abs=0.05)


def test_reference_energies_are_cached(prototypes, tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    name = "tests.crystals.test_energy:lennard_jones"
    some, seen = prototypes.take(range(6)), []
    first = reference_hull(some, name, progress=lambda *step: seen.append(step))
    (kept,) = (path for path in (tmp_path / "hulls").iterdir() if path.suffix != ".lock")
    assert seen == [("reference energies, given", 6, 6)]
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


def test_only_the_chemical_systems_at_hand_are_computed(tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    salts = [rock_salt(), rock_salt(6.3, cation=19), crystal([11], [[0, 0, 0]], [3.7] * 3), rock_salt(4.2, 12, 8)]
    model, seen = counting(-1.0), []
    first = reference_hull(salts, model, systems=[composition("Na3Cl")], progress=lambda *step: seen.append(step))
    assert {formula(key) for key in first.keys} == {"Na1Cl1", "Na1"}
    assert model.evaluated == 2
    assert seen == [("reference energies, given", 2, 2)]
    again = reference_hull(salts, model, systems=[composition("NaCl"), composition("KCl")])
    assert {formula(key) for key in again.keys} == {"Na1Cl1", "Na1", "Cl1K1"}
    assert model.evaluated == 3  # the others are cached


def test_references_of_a_composition_of_many_elements_are_found_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    alloy = key_of(range(1, 61))  # 2⁶⁰ sets of elements
    hull = reference_hull([rock_salt(), rock_salt(6.3, cation=87)], counting(-1.0), systems=[alloy])
    assert [formula(key) for key in hull.keys] == ["Na1Cl1"]


def test_references_that_failed_are_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    salts = [rock_salt(), rock_salt(6.3, cation=19)]
    assert len(reference_hull(salts, counting("out of memory"))) == 0
    repaired = counting(-1.0)
    assert len(reference_hull(salts, repaired)) == 2
    reference_hull(salts, repaired)
    assert repaired.evaluated == 2


def test_an_interrupted_computation_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    monkeypatch.setattr("fmwc.crystals.hull.WRITE_EVERY", 1)
    salts, model = [rock_salt(edge) for edge in (5.4, 5.6, 5.8)], counting(-1.0, most=2)
    with pytest.raises(KeyboardInterrupt):
        reference_hull(salts, model)
    model.most = 100
    reference_hull(salts, model)
    assert model.evaluated == 2 + 1


def test_references_near_the_hull_are_relaxed_when_relaxed_structures_are_judged(tmp_path, monkeypatch, chgnet):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    strained, same = rock_salt(5.4), rock_salt(5.4, name="again")
    hull = reference_hull([strained, same], chgnet, relax=True)
    key = strained.key
    assert hull.relaxed.energy(key)[0] == pytest.approx(relax(strained, chgnet, 100).energy, abs=1e-5)
    assert hull.relaxed.energy(key)[0] < hull.energy(key)[0] - 1e-4
    assert reference_hull([strained], chgnet).relaxed is None


@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_published_energies_are_used_if_they_fit(tmp_path, monkeypatch, offset):
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path))
    salts = [rock_salt(5 + i / 100, name=f"mp-{i}") for i in range(9)]
    model, published = counting(-1.0), {f"mp-{i}": -1.0 - i / 1000 + offset for i in range(8)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hull = reference_hull(salts, model, published=published)
    lowest = min(published.values()) if offset == 0 else -1.0
    assert hull.energy(salts[0].key)[0] == pytest.approx(lowest)
    assert model.evaluated == TRIED + (1 if offset == 0 else 9)  # the one that is not published, or all
    assert [str(one.message) for one in caught if "so they are not used" in str(one.message)] == (
        [] if offset == 0 else [str(caught[0].message)]
    )


def test_published_energies_belong_to_their_model(tmp_path):
    names = np.array([b"mp-1", b"mp-2"])
    energies = {f"{model}_energy_per_atom": np.full(2, -float(i)) for i, model in enumerate(("uma", "mace", "orb"))}
    np.savez(tmp_path / mp20.PUBLISHED, material_id=names, **energies)
    assert mp20.published_energies(tmp_path, "mace") == {"mp-1": -1.0, "mp-2": -1.0}
    assert mp20.published_energies(tmp_path, "orb")["mp-1"] == -2.0
    for other in ("chgnet", "sevennet", "mattersim", "my:model"):
        assert mp20.published_energies(tmp_path, other) == {}


def test_relaxed_references_have_a_hull_of_their_own(salt, tmp_path):
    assert salt.relaxed is None
    hull = Hull(["Na", "Cl", "NaCl", "NaCl"], [-1, -2, -3.5, -3.4], "model", [np.nan, -2.1, -3.6, -3.7])
    assert hull.above("NaCl", -3.7) == (pytest.approx(-0.2), "")
    assert hull.relaxed.above("NaCl", -3.7) == (pytest.approx(0), "")  # another polymorph relaxes further
    assert hull.relaxed.energy(composition("Na"))[0] == -1  # not relaxed: its energy is an upper bound
    assert hull.relaxed.energy(composition("Cl"))[0] == -2.1
    again = Hull.load(hull.save(tmp_path / "hull.npz"))
    assert again.relaxed.energy(composition("NaCl"))[0] == pytest.approx(-3.7)
    both = salt.with_references(hull)
    assert both.relaxed.energy(composition("Cl"))[0] == -2.1
    assert both.mixture("Na3Cl").competing == 2
    with pytest.raises(UsageError, match="cannot be mixed"):
        salt.with_references(Hull(["Na"], [0.0], "other"))


def test_a_mixture_names_its_phases_and_counts_the_competitors():
    names = ["Na", "Cl", "K", "F", "W", "NaCl", "Na3Cl", "KCl", "NaKCl2", "KF"]
    hull = Hull(names, [0, 0, 0, 0, 0, -2, 1, -2, -1, -3], "model")
    mixture = hull.mixture("Na3Cl")
    assert (str(mixture), mixture.competing, mixture.own, mixture.gap) == ("0.5 Na + 0.5 NaCl", 2, 2, "")
    assert sum(share for _, share in mixture.parts) == pytest.approx(1)
    assert (hull.mixture("NaKCl3").competing, hull.mixture("NaKCl3").own) == (4, 1)
    assert (hull.mixture("Na").competing, hull.mixture("Na").own, hull.mixture("Na").gap) == (1, 1, "")
    # Only elements compete.
    assert hull.mixture("WF4").gap == "only elements compete"
    assert hull.mixture("WF4").competing == 0
    # KF competes, but tungsten is left over, and nobody knows whether it would react with fluorine.
    assert str(hull.mixture("KWF5")) == "0.57 F2 + 0.29 KF + 0.14 W"
    assert hull.mixture("KWF5").gap.endswith("F and W")
    missing = hull.mixture("NaO")
    assert (missing.problem, missing.parts, missing.gap) == ("no reference for O", (), "")


def test_other_models_need_references(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)
    with pytest.raises(DataError, match="FMWC_DATA"):
        hull_for("tests.crystals.test_energy:lennard_jones")
    with pytest.raises(UsageError, match="cannot be imported"):
        hull_for("no.module:function")


def test_energies_of_mp20_above_the_hull(mp20_folder, tmp_path):
    stored = mp20.energies(mp20_folder)
    if stored is None:
        pytest.skip("no stored energies")
    crystals, shipped = mp20.load(mp20_folder, "test"), shipped_hull()
    known = dict(zip(stored[0], stored[1].tolist(), strict=True))
    keys = [key_of(row) for row in crystals.numbers.tolist()]
    above = np.array([shipped.above(k, known[n])[0] for k, n in zip(keys, crystals.names, strict=True)])
    assert above.mean() == pytest.approx(0.0091, abs=1e-4)
    assert (above <= 0.1).mean() == pytest.approx(0.996, abs=1e-3)
    assert above.min() > -1e-9
    whole = folder_hull(mp20_folder)
    for key in keys[::40]:
        assert whole.energy(key)[0] == pytest.approx(shipped.energy(key)[0], abs=1e-9)


def test_the_shipped_file_is_made_from_a_folder(tmp_path, prototypes):
    with pytest.raises(DataError):
        make_shipped(tmp_path, tmp_path / "hull.npz")
    assert not (tmp_path / "hull.npz").exists()
