"""Energies agree with those of the packages; each missing energy has a reason."""

import numpy as np
import pytest

from fmwc.crystals import CALCULATORS, calculator, energies
from fmwc.crystals.energy import PACKAGES, mp2020_correction, version
from fmwc.crystals.structures import need, quiet
from fmwc.errors import UnknownNameError, UsageError

from .conftest import BAD, crystal, rock_salt, structure_of


def lennard_jones():
    from ase.calculators.lj import LennardJones

    return LennardJones(sigma=2.5, epsilon=0.1, rc=6.0)


def broken():
    class Broken:
        def get_potential_energy(self, atoms):
            if len(atoms) == 8:
                raise RuntimeError("no power\nat all")
            return float("nan")

    return Broken()


def nothing():
    return 3


def test_energies_agree_with_chgnet(chgnet, prototypes):
    from chgnet.model import CHGNet

    with quiet():
        model = CHGNet.load(use_device="cpu", verbose=False)
        theirs = model.predict_structure([structure_of(prototypes, i) for i in range(len(prototypes))], task="e")
    found = energies(prototypes, chgnet)
    assert not any(found.problems)
    np.testing.assert_allclose(found.per_atom, [float(one["e"]) for one in theirs], atol=1e-5)


def test_energies_do_not_depend_on_the_batch(chgnet):
    salt = rock_salt()
    alone, among = energies([salt], chgnet).per_atom[0], energies([rock_salt(5), salt, rock_salt(6)], chgnet).per_atom
    assert abs(among[1] - alone) < 1e-5
    assert among[1] < min(among[0], among[2])


def test_bad_structures_have_a_reason_and_the_others_an_energy(chgnet):
    seen = []
    mixed = [one for candidate, _ in BAD.values() for one in (candidate, rock_salt())]
    found = energies(mixed, chgnet, progress=lambda *step: seen.append(step))
    good = energies([rock_salt()], chgnet).per_atom[0]
    for (_, message), problem in zip(BAD.values(), found.problems[::2], strict=True):
        assert message in problem
    assert np.isnan(found.per_atom[::2]).all()
    assert not any(found.problems[1::2])
    np.testing.assert_allclose(found.per_atom[1::2], good, atol=1e-5)
    assert seen[-1] == ("energies", len(mixed), len(mixed))


def test_no_structures(chgnet):
    assert energies([], chgnet).per_atom.shape == (0,)


def test_a_failing_batch_is_tried_one_by_one(chgnet, monkeypatch):
    predict = chgnet.model.forward

    def moody(graphs, **options):
        if any(len(one.atomic_number) == 1 for one in graphs):
            raise RuntimeError("out of memory")
        return predict(graphs, **options)

    monkeypatch.setattr(chgnet.model, "forward", moody)
    found = energies([rock_salt(), crystal([29], [[0, 0, 0]], [2.5, 2.5, 2.5]), rock_salt()], chgnet)
    assert found.problems == ("", "chgnet failed: RuntimeError: out of memory", "")


def test_own_calculator(prototypes):
    ours = calculator(f"{__name__}:lennard_jones")
    found = energies([rock_salt()], ours)
    assert found.problems == ("",)
    expected = lennard_jones().get_potential_energy(rock_salt().atoms()) / 8
    assert found.per_atom[0] == pytest.approx(expected)


def test_errors_of_a_calculator_are_reasons():
    found = energies([rock_salt(), crystal([29], [[0, 0, 0]], [2.5, 2.5, 2.5])], f"{__name__}:broken")
    assert found.problems[0].endswith("failed: RuntimeError: no power at all")
    assert "the energy by" in found.problems[1]


@pytest.mark.parametrize("name", [name for name in CALCULATORS if name != "chgnet"])
def test_missing_model_names_its_package(name):
    if version(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(UsageError, match=f"is not installed; install it with: pip install {PACKAGES[name]}"):
        calculator(name)


def test_every_model_has_a_package():
    assert set(PACKAGES) == set(CALCULATORS)
    assert version("chgnet")
    assert not version("a:b")


def test_unknown_calculators():
    with pytest.raises(UnknownNameError, match="did you mean 'chgnet'"):
        calculator("chgnett")
    with pytest.raises(UsageError, match="cannot be imported"):
        calculator("no.module:function")
    with pytest.raises(UsageError, match="must return an ASE calculator"):
        calculator(f"{__name__}:nothing")
    with pytest.raises(UsageError, match=r"pip install 'fmwc\[crystals\]'"):
        need("no_such_package")


def test_corrections_of_the_materials_project():
    """By hand from pymatgen's table: chlorides −0.614 per Cl, oxides −0.687 per O, iron in oxides −2.256 per Fe."""
    assert mp2020_correction(rock_salt()) == pytest.approx(-0.614 / 2)
    assert mp2020_correction(rock_salt(4.2, 12, 8)) == pytest.approx(-0.687 / 2)
    assert mp2020_correction(rock_salt(4.3, 26, 8)) == pytest.approx((-0.687 - 2.256) / 2)
    assert mp2020_correction(rock_salt(2.9, 26, 13)) == 0  # alloys and elements have none
    assert mp2020_correction(crystal([26], [[0, 0, 0]], [2.5] * 3)) == 0
    with quiet():
        peroxide = crystal([3, 3, 8, 8], [[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0.5, 0, 0.85]], [3.2, 3.2, 4.1])
    assert mp2020_correction(peroxide) == pytest.approx(-0.465 / 2)


def test_sevennet_is_a_second_judge(chgnet):
    """Its corrected energies agree with those of CHGNet, which learned corrected energies; those of CoO differ by 1."""
    pytest.importorskip("sevenn", exc_type=ImportError)
    sevennet = calculator("sevennet", "cpu")
    structures = [rock_salt(), rock_salt(4.26, 27, 8), rock_salt(5.2), crystal([84], [[0, 0, 0]], [3.3] * 3)]
    ours, theirs = energies(structures, chgnet), energies(structures, sevennet)
    assert theirs.per_atom[:3] == pytest.approx(ours.per_atom[:3], abs=0.06)
    assert abs(mp2020_correction(structures[1])) > 1
    assert theirs.problems[:3] == ("", "", "")
    assert "sevennet failed" in theirs.problems[3]  # it does not know polonium
    assert "\n" not in theirs.problems[3]
