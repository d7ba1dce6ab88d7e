"""Structures as arrays, and what is refused before anything slow is tried."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fmwc.crystals import candidates
from fmwc.crystals.structures import Crystals, key_of, neighbours, refusal, symbol
from fmwc.errors import DataError, UsageError

from .conftest import BAD, rock_salt, structure_of


def test_the_symbols_are_those_of_pymatgen():
    from pymatgen.core import Element

    assert [Element.from_Z(z).symbol for z in range(1, 119)] == [symbol(z) for z in range(1, 119)]


def test_crystals_pymatgen_and_ase_give_the_same_candidate(prototypes):
    for i, ours in enumerate(candidates(prototypes)):
        theirs = structure_of(prototypes, i)
        for other in (theirs, theirs.to_ase_atoms()):
            (one,) = candidates([other])
            assert one.numbers.tolist() == ours.numbers.tolist()
            assert one.formula == ours.formula == theirs.composition.reduced_formula
            np.testing.assert_allclose(one.volume, ours.volume, rtol=1e-6)
            a, b = (np.sort(neighbours(c, 4.0).distance) for c in (ours, one))
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_impossible_angles_are_reported():
    wrong = Crystals(
        torch.tensor([[11, 17]]), torch.zeros(1, 2, 3), torch.full((1, 3), 4.0),
        torch.tensor([[60.0, 60.0, 125.0]]), ("wrong",),
    )  # fmt: skip
    assert "do not form a cell" in refusal(candidates(wrong)[0])


def test_shared_sites_are_reported():
    from pymatgen.core import Lattice, Structure

    shared = Structure(Lattice.cubic(4), [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]])
    assert "shared by several elements" in candidates([shared])[0].problem


def test_other_types_are_refused():
    with pytest.raises(DataError, match="not dict"):
        candidates([{}])


def test_an_import_loads_nothing_heavy():
    code = "import sys, fmwc.crystals; print('\\n'.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {line.split(".")[0] for line in found.stdout.splitlines()}
    assert not loaded & {"pymatgen", "ase", "chgnet", "pyarrow", "pandas"}


def test_keys_are_reduced():
    assert key_of([8, 26, 8, 26, 8, 8, 8, 26, 26, 8]) == ((8, 3), (26, 2))
    assert rock_salt().key == ((11, 1), (17, 1))


@pytest.mark.parametrize("which", BAD)
def test_bad_cells_are_refused_quickly(which):
    candidate, said = BAD[which]
    start = time.perf_counter()
    reason = refusal(candidate, 94)
    assert time.perf_counter() - start < 1
    assert said in reason or which == "isolated"
    assert not refusal(rock_salt(), 94)


def test_neighbours_of_rock_salt():
    found = neighbours(rock_salt(), 4.0)  # 6 at a/2 = 2.82, 12 at a/√2 = 3.99
    assert len(found.distance) == 8 * 18
    np.testing.assert_allclose(np.unique(found.distance.round(3)), [2.82, 3.988])


def test_the_pymatgen_structure_of_rock_salt(monkeypatch):
    structure = rock_salt().structure()
    assert structure.composition.reduced_formula == "NaCl"
    assert structure.get_distance(0, 6) == pytest.approx(5.64 / 2)
    assert structure.density == pytest.approx(2.164, abs=0.005)  # g/cm³, of the salt on the table
    monkeypatch.setitem(sys.modules, "pymatgen.core", None)
    with pytest.raises(UsageError, match=r"pip install 'fmwc\[crystals\]'"):
        rock_salt().structure()
