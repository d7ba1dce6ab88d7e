"""Structures as arrays, and what is refused before anything slow is tried."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fmwc.data.crystals import Crystals, structure_of
from fmwc.errors import DataError
from fmwc.metrics.crystals import candidates
from fmwc.metrics.crystals.candidates import SYMBOLS, key_of
from fmwc.metrics.crystals.geometry import neighbours, refusal

from .conftest import BAD, rock_salt


def test_the_symbols_are_those_of_pymatgen():
    from pymatgen.core import Element

    assert tuple(Element.from_Z(z).symbol for z in range(1, 119)) == SYMBOLS


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


def test_angles_that_close_no_cell_are_said():
    wrong = Crystals(
        torch.tensor([[11, 17]]), torch.zeros(1, 2, 3), torch.full((1, 3), 4.0),
        torch.tensor([[60.0, 60.0, 125.0]]), ("wrong",),
    )  # fmt: skip
    assert "close no cell" in refusal(candidates(wrong)[0])


def test_a_structure_of_shared_sites_is_said():
    from pymatgen.core import Lattice, Structure

    shared = Structure(Lattice.cubic(4), [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]])
    assert "shared by several elements" in candidates([shared])[0].problem


def test_something_else_is_refused():
    with pytest.raises(DataError, match="not dict"):
        candidates([{}])


def test_an_import_loads_nothing_heavy():
    code = "import sys, fmwc.metrics.crystals; print('\\n'.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {line.split(".")[0] for line in found.stdout.splitlines()}
    assert not loaded & {"pymatgen", "ase", "chgnet", "pyarrow", "pandas"}


def test_keys_are_reduced():
    assert key_of([8, 26, 8, 26, 8, 8, 8, 26, 26, 8]) == ((8, 3), (26, 2))
    assert rock_salt().key == ((11, 1), (17, 1))


@pytest.mark.parametrize("which", BAD)
def test_bad_cells_are_refused_at_once(which):
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
