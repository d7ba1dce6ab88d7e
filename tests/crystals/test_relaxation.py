"""Batched relaxation agrees with ASE, isolates failures, and resumes."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fmwc.crystals import calculator, candidates, energies, judge, relax, relax_all
from fmwc.crystals.energy import Forces
from fmwc.crystals.relaxation import LARGEST_FORCE, TOGETHER
from fmwc.crystals.structures import need, quiet
from fmwc.errors import DataError

from .conftest import BAD, crystal, rock_salt
from .test_energy import broken  # noqa: F401  (named as a calculator)


def lennard_jones():
    from ase.calculators.lj import LennardJones

    return LennardJones(sigma=2.5, epsilon=0.1, rc=6.0, smooth=True)


def shaken(candidate, size=0.08, seed=0):
    """Return the structure with displaced atoms and a strained cell."""
    generator = np.random.default_rng(seed)
    strain = np.eye(3) + 0.05 * generator.normal(size=(3, 3))
    moved = candidate.coords + size * generator.normal(size=candidate.coords.shape) / 5
    return replace(candidate, coords=moved % 1, cell=candidate.cell @ strain)


@pytest.fixture(scope="module")
def mixed(prototypes):
    """Structures of several sizes, all displaced."""
    small = [c for c in candidates(prototypes) if len(c) <= 6][:4]
    return [shaken(c, seed=i) for i, c in enumerate([*small, rock_salt(5.4)])]


def by_ase(candidate, steps, calculator):
    """Return the energy per atom and the number of steps of ASE's own FIRE."""
    with quiet():
        atoms = candidate.atoms()
        atoms.calc = calculator
        optimizer = need("ase.optimize").FIRE(need("ase.filters").FrechetCellFilter(atoms), logfile=None)
        optimizer.run(fmax=LARGEST_FORCE, steps=steps)
        return float(atoms.get_potential_energy()) / len(atoms), optimizer.nsteps


# ---- forces ------------------------------------------------------------------------------------------------------


def test_forces_agree_with_chgnet(chgnet, mixed):
    from chgnet.model import CHGNet

    with quiet():
        model = CHGNet.load(use_device="cpu", verbose=False)
        theirs = [model.predict_structure(one.structure(), task="efs") for one in mixed]
    for ours, one in zip(chgnet.forces(mixed), theirs, strict=True):
        assert ours.energy == pytest.approx(float(one["e"]), abs=1e-5)
        np.testing.assert_allclose(ours.forces, one["f"], atol=2e-4)
        np.testing.assert_allclose(ours.stress * 160.21766208, one["s"], atol=2e-3)  # in GPa


def test_forces_are_derivatives_of_the_energy(chgnet, mixed):
    one, step = mixed[0], 0.01
    found = chgnet.forces([one])[0]
    direction = np.random.default_rng(1).normal(size=one.coords.shape)
    moved = [replace(one, coords=one.coords + sign * step * direction @ np.linalg.inv(one.cell)) for sign in (1, -1)]
    up, down = energies(moved, chgnet).per_atom * len(one)
    assert -(found.forces * direction).sum() == pytest.approx((up - down) / (2 * step), rel=0.02)
    strain = np.random.default_rng(2).normal(size=(3, 3))
    bent = [replace(one, cell=one.cell @ (np.eye(3) + sign * step * strain / 5)) for sign in (1, -1)]
    up, down = energies(bent, chgnet).per_atom * len(one)
    assert (found.stress * strain / 5).sum() * one.volume == pytest.approx((up - down) / (2 * step), rel=0.02)


# ---- relaxation --------------------------------------------------------------------------------------------------


def test_batched_relaxation_agrees_with_ase(mixed):
    model = calculator(f"{__name__}:lennard_jones")
    for one, after in zip(mixed, relax_all(mixed, model, 12), strict=True):
        energy, steps = by_ase(one, 12, lennard_jones())
        assert after.steps == steps
        assert after.energy == pytest.approx(energy, abs=1e-9)


def test_relaxation_does_not_depend_on_the_batch(chgnet, mixed):
    together = relax_all(mixed, chgnet, 6)
    for one, after in zip(mixed, together, strict=True):
        alone = relax(one, chgnet, 6)
        assert after.energy == pytest.approx(alone.energy, abs=2e-4)
        assert after.rmsd == pytest.approx(alone.rmsd, abs=2e-3)


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
    assert abs(chgnet.forces([long.candidate])[0].forces).max() < LARGEST_FORCE


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
    """A model that pulls the structure `wild` apart, cannot evaluate `dark`, and gives NaN for `numb`."""

    name, highest = "unruly", 94

    def __init__(self):
        self.calls = 0

    def forces(self, given):
        self.calls += 1
        flat = np.zeros((3, 3))
        found = []
        for one in given:
            pull = np.diag([1e4, 1e4, 1e4]) if one.name == "wild" else flat
            energy = np.nan if one.name == "numb" else -1.0
            forces = np.zeros((len(one), 3)) + (0.1 if one.name == "slow" else 0)
            found.append("no light" if one.name == "dark" else Forces(energy, forces, pull))
        return found


def test_a_failure_does_not_harm_the_others():
    names = ("fine", "wild", "dark", "numb", "slow")
    found = relax_all([rock_salt(name=name) for name in names], Unruly(), 200)
    fine, wild, dark, numb, slow = found
    assert (fine.problem, fine.converged, fine.steps, fine.energy) == ("", True, 0, -1.0)
    assert "during the relaxation, its cell has collapsed" in wild.problem
    assert 0 < wild.steps < 200
    assert dark.problem == "relaxation failed after 0 steps: no light"
    assert "not finite" in numb.problem
    assert (slow.problem, slow.converged, slow.steps) == ("", False, 200)


def test_an_interrupted_run_resumes(tmp_path):
    salts = [rock_salt(5 + i / 100, name=f"{i}") for i in range(2 * TOGETHER + 3)]
    salts[1] = BAD["coincident"][0]

    def interrupt(stage, done, total):
        assert (stage, total) == ("relaxation", len(salts))
        if done > TOGETHER:
            raise KeyboardInterrupt

    first = Unruly()
    with pytest.raises(KeyboardInterrupt):
        relax_all(salts, first, 5, kept=tmp_path, progress=interrupt)
    second, all_at_once = Unruly(), Unruly()
    resumed = relax_all(salts, second, 5, kept=tmp_path)
    fresh = relax_all(salts, all_at_once, 5)
    assert first.calls + second.calls == all_at_once.calls
    for a, b in zip(resumed, fresh, strict=True):
        assert (a.problem, a.steps, a.converged, a.candidate.name) == (
            b.problem,
            b.steps,
            b.converged,
            b.candidate.name,
        )
        np.testing.assert_array_equal([a.energy, a.rmsd], [b.energy, b.rmsd])
        np.testing.assert_array_equal(a.candidate.coords, b.candidate.coords)
        np.testing.assert_array_equal(a.candidate.cell, b.candidate.cell)
    third = Unruly()
    relax_all(salts, third, 6, kept=tmp_path)  # other settings
    assert third.calls > 0


def test_damaged_results_are_refused(tmp_path):
    relax_all([rock_salt()], Unruly(), 5, kept=tmp_path)
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text())
    for content in ([], [{**rows[0], "coords": [[0, 0, 0]]}], [{"steps": 1, "problem": ""}]):
        path.write_text(json.dumps(content))
        with pytest.raises(DataError, match="delete it"):
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
