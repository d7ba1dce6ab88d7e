"""Guards section 3 of issue 30: the check of a crystal does not depend on its cell or its place in a folder, and every
file with symmetry reads back as the crystal that was written."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from fmwc.crystals.sandbox import cells
from fmwc.crystals.structures import quiet

pytest.importorskip("pymatgen")
pytest.importorskip("ase")


# ---- the cell of a crystal -------------------------------------------------------------------------------------------


def _cells_of_one_crystal(name: str) -> dict[str, str]:
    """Return CIFs of one crystal: its primitive cell, a copy, its conventional cell, supercells, another origin."""
    from pymatgen.core import Lattice, Structure
    from pymatgen.symmetry.analyzer import SpacegroupAnalyzer

    with quiet():
        salt = Structure.from_spacegroup("Fm-3m", Lattice.cubic(5.64), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
        layers = Structure.from_spacegroup(
            "P-3m1", Lattice.hexagonal(4.24, 6.84), ["Cd", "I"], [[0, 0, 0], [1 / 3, 2 / 3, 0.25]]
        )
        one = {"salt": salt, "layers": layers}[name].get_primitive_structure().get_reduced_structure()
        conventional = SpacegroupAnalyzer(one).get_conventional_standard_structure()
        large, oblique = (
            one.copy().make_supercell([2, 1, 1]),
            one.copy().make_supercell([[1, 1, 0], [0, 1, 0], [0, 0, 1]]),
        )
        oblique.translate_sites([*range(len(oblique))], [0.13, 0.27, 0.41])
        given = {"one": one, "copy": one, "conventional": conventional, "large": large, "oblique": oblique}
        return {f"{name}-{of}.cif": structure.to(fmt="cif") for of, structure in given.items()}


@pytest.mark.parametrize("name", ["salt", "layers"])
def test_every_cell_of_a_crystal_is_read_as_the_same_cell(name):
    first, *others = cells([*_cells_of_one_crystal(name).values()], keep=True)
    for other in others:
        assert sorted(other.numbers) == sorted(first.numbers)
        np.testing.assert_allclose(other.lengths, first.lengths, atol=1e-3)
        np.testing.assert_allclose(other.angles, first.angles, atol=1e-2)


def test_the_check_of_a_crystal_does_not_depend_on_its_cell_or_its_place(run, tmp_path):
    folder = tmp_path / "cif"
    folder.mkdir()
    for file, text in _cells_of_one_crystal("layers").items():
        (folder / file).write_text(text)
    words = ("check", folder, "--checkpoint", "crystals", "--device", "cpu", "--out", tmp_path / "out")
    code, _, err = run(*words)
    assert code == 0, err
    with (tmp_path / "out" / "checks.csv").open() as file:
        rows = {row["name"].split("-")[1]: row for row in csv.DictReader(file)}
    confidence = {of: float(row["confidence"]) for of, row in rows.items()}
    assert confidence["copy.cif"] == pytest.approx(confidence["one.cif"], abs=1e-3)
    assert max(confidence.values()) - min(confidence.values()) < 0.15
    score, error = ([float(row[name]) for row in rows.values()] for name in ("score", "standard_error"))
    assert max(error) < 0.2  # of a spread of 0.9 among the reference samples
    assert max(score) - min(score) < 4 * math.hypot(*error[:2])
