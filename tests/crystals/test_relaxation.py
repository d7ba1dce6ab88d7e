"""Relaxation lowers energies, isolates failures, and resumes."""

import json
import math

import numpy as np
import pytest

from fmwc.crystals import calculator, candidates, energies, judge, relax, relax_all
from fmwc.crystals.relaxation import LARGEST_FORCE
from fmwc.crystals.structures import quiet
from fmwc.errors import DataError

from .conftest import BAD, crystal, rock_salt
from .test_energy import broken  # noqa: F401  (named as a calculator)


def test_forces_agree_with_chgnet(chgnet, prototypes):
    """Those of the package take two backward passes."""
    from chgnet.model.dynamics import CHGNetCalculator

    with quiet():
        theirs = CHGNetCalculator(chgnet.model, use_device="cpu", on_isolated_atoms="error")
        for one in [c for c in candidates(prototypes) if len(c) <= 6][:3]:
            atoms, found = one.atoms(), []
            atoms.rattle(0.05, seed=0)
            for atoms.calc in (chgnet.ase, theirs):
                found.append((atoms.get_potential_energy(), atoms.get_forces(), atoms.get_stress()))
            for ours, expected in zip(*found, strict=True):
                np.testing.assert_allclose(ours, expected, atol=3e-4)


# ---- relaxation --------------------------------------------------------------------------------------------------


def test_relaxation_lowers_the_energy(chgnet):
    squeezed = rock_salt(5.2)
    before = energies([squeezed], chgnet).per_atom[0]
    after = relax(squeezed, chgnet, 15)
    assert not after.problem
    assert 0 < after.steps <= 15
    assert after.energy < before - 0.01
    assert after.candidate.volume > squeezed.volume
    assert after.rmsd < 0.05  # by symmetry, the atoms do not move within the cell
    assert after.energy == pytest.approx(energies([after.candidate], chgnet).per_atom[0], abs=1e-5)


def test_converged_means_small_forces(chgnet):
    short, long = relax(rock_salt(5.5), chgnet, 1), relax(rock_salt(5.5), chgnet, 60)
    assert (short.converged, short.steps) == (False, 1)
    assert long.converged
    assert 1 < long.steps < 60
    again = relax(long.candidate, chgnet, 60)  # the deformation is measured from another cell, but forces stay small
    assert (again.converged, again.steps) == (True, 0)
    atoms = long.candidate.atoms()
    atoms.calc = chgnet.ase
    assert abs(atoms.get_forces()).max() < LARGEST_FORCE


def test_failed_relaxations_have_a_reason(chgnet):
    for candidate, message in BAD.values():
        after = relax(candidate, chgnet, 5)
        assert message in after.problem
        assert np.isnan(after.energy)
        assert after.candidate is candidate


def test_relaxation_with_a_broken_calculator():
    after = relax(rock_salt(), calculator(f"{__name__}:broken"), 5)
    assert "relaxation failed after 0 steps" in after.problem


class Unruly:
    """A model that pulls lithium apart, cannot evaluate potassium, and gives NaN for rubidium; caesium moves on."""

    name, highest = "unruly", 94

    def __init__(self):
        from ase.calculators.calculator import Calculator

        class Ase(Calculator):
            implemented_properties = ("energy", "forces", "stress")
            calls = 0

            def calculate(self, atoms=None, properties=None, system_changes=None):
                super().calculate(atoms, properties, system_changes)
                self.calls += 1
                first = atoms.symbols[0]
                if first == "K":
                    raise RuntimeError("no light")
                self.results["energy"] = math.nan if first == "Rb" else -1.0 * len(atoms)
                self.results["forces"] = np.zeros((len(atoms), 3)) + (0.1 if first == "Cs" else 0)
                self.results["stress"] = np.array([1e4, 1e4, 1e4, 0, 0, 0]) * (first == "Li")

        self.ase = Ase()

    def correction(self, candidate):
        return 0.0


def test_a_failure_does_not_harm_the_others():
    found = relax_all([rock_salt(6, z, 17) for z in (11, 3, 19, 37, 55)], Unruly(), 200)
    fine, wild, dark, numb, slow = found
    assert (fine.problem, fine.converged, fine.steps, fine.energy) == ("", True, 0, -1.0)
    assert "during the relaxation, its cell has collapsed" in wild.problem
    assert 0 < wild.steps < 200
    assert dark.problem == "relaxation failed after 0 steps: RuntimeError: no light"
    assert "not finite" in numb.problem
    assert (slow.problem, slow.converged, slow.steps) == ("", False, 200)


def test_an_interrupted_run_resumes(tmp_path):
    salts = [rock_salt(5 + i / 100, 55 if i % 2 else 11, name=f"{i}") for i in range(7)]
    salts[1] = BAD["coincident"][0]

    def interrupt(stage, done, total):
        assert (stage, total) == ("relaxation", len(salts))
        if done > 3:
            raise KeyboardInterrupt

    first = Unruly()
    with pytest.raises(KeyboardInterrupt):
        relax_all(salts, first, 5, kept=tmp_path, progress=interrupt)
    second, all_at_once = Unruly(), Unruly()
    resumed = relax_all(salts, second, 5, kept=tmp_path)
    fresh = relax_all(salts, all_at_once, 5)
    assert first.ase.calls + second.ase.calls == all_at_once.ase.calls
    for a, b in zip(resumed, fresh, strict=True):
        told = ("problem", "steps", "converged")
        assert [getattr(a, name) for name in told] == [getattr(b, name) for name in told]
        assert a.candidate.name == b.candidate.name
        np.testing.assert_array_equal([a.energy, a.rmsd], [b.energy, b.rmsd])
        np.testing.assert_array_equal(a.candidate.coords, b.candidate.coords)
        np.testing.assert_array_equal(a.candidate.cell, b.candidate.cell)
    third = Unruly()
    relax_all(salts, third, 6, kept=tmp_path)  # other settings
    assert third.ase.calls > 0


def test_damaged_results_are_refused(tmp_path):
    relax_all([rock_salt()], Unruly(), 5, kept=tmp_path)
    (path,) = tmp_path.iterdir()
    row = json.loads(path.read_text())
    for content in ([], {**row, "coords": [[0, 0, 0]]}, {"steps": 1, "problem": ""}):
        path.write_text(json.dumps(content))
        with pytest.raises(DataError):
            relax_all([rock_salt()], Unruly(), 5, kept=tmp_path)


def test_judge_reports_the_relaxation(chgnet):
    lone = crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [14, 14, 14])
    found = judge([rock_salt(5.3), lone], calculator=chgnet, relax=8)
    assert found["relax_steps"] == [8, 0]
    assert found["converged"] == [False, False]
    raw, after = np.array(found["e_above_hull_raw"]), np.array(found["e_above_hull"])
    assert np.isfinite(raw).tolist() == np.isfinite(after).tolist() == [True, False]
    drop = found["energy_raw"][0] - found["energy_per_atom"][0]
    assert drop > 0.01
    assert raw[0] - after[0] == pytest.approx(drop, abs=1e-6)
