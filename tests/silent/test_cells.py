"""Guards section 3 of issue 30: the check of a crystal does not depend on its cell or its place in a folder, and every
file with symmetry reads back as the crystal that was written."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from fmwc.crystals import read
from fmwc.crystals.files import symmetrised_cif_text, write_structures
from fmwc.crystals.parsers import cells, read_structures
from fmwc.crystals.structures import Candidate, quiet

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


# ---- files with symmetry ---------------------------------------------------------------------------------------------

# Crystals of MP-20 with noise of 0.02 Å, as a flow draws them: atomic numbers, fractional coordinates, cell.
# With pymatgen's symmetric CIF they read back as Se40Br3, CaGe at twice the density, and PdAu4.
DRAWN = {
    "Se3Br": (
        [34, 34, 34, 35],
        [[0.2608, 0.7591, 0.4997], [0.7608, 0.245, 0.5009], [0.5027, 0.4991, 0.9995], [0.9999, 0.0044, 0.0006]],
        [[3.7993, 0.0, 0.0], [-0.019, 3.7881, 0.0], [-1.8979, -1.9187, 8.4654]],
    ),
    "CaGe": (
        [20, 20, 32, 32],
        [[0.2564, 0.3588, 0.724], [0.7692, 0.6272, 0.2714], [0.2476, 0.066, 0.1433], [0.7628, 0.9076, 0.8397]],
        [[4.0097, 0.0, 0.0], [0.0235, 4.6223, 0.0], [0.0241, -2.3129, 5.4536]],
    ),
    "PdAu3": (
        [46, 79, 79, 79],
        [[0.9923, 0.998, 0.9985], [0.7611, 0.2531, 0.5056], [0.2475, 0.7533, 0.499], [0.5003, 0.5013, 0.9931]],
        [[4.1337, 0.0, 0.0], [-0.0018, 4.1265, 0.0], [-2.0726, -2.0891, 4.0513]],
    ),
}


def _drawn(name: str) -> Candidate:
    return Candidate(name, *(np.array(part) for part in DRAWN[name]))


def _density(candidate: Candidate) -> float:
    return len(candidate) / candidate.volume


@pytest.mark.parametrize("name", DRAWN)
def test_a_file_with_symmetry_reads_back_as_the_crystal_that_was_written(tmp_path, name):
    drawn = _drawn(name)
    write_structures(tmp_path, [drawn], symprec=0.1)
    (found,) = read(tmp_path / "symmetrised")
    assert found.formula == drawn.formula == name
    assert _density(found) == pytest.approx(_density(drawn), rel=0.05)
    assert "'P 1'" not in (tmp_path / "symmetrised" / f"{name}.cif").read_text()  # there is symmetry to find


def test_a_symmetry_that_gives_another_crystal_is_not_written(monkeypatch):
    from pymatgen.symmetry.analyzer import SpacegroupAnalyzer

    monkeypatch.setattr(SpacegroupAnalyzer, "get_refined_structure", lambda _: _drawn("CaGe").structure())
    drawn = _drawn("PdAu3")
    text = symmetrised_cif_text(drawn, {"confidence": 0.5}, symprec=0.1)
    assert "'P 1'" in text
    assert "# symmetry:" in text
    (found,) = read_structures("cif", text)
    assert sorted(found.numbers) == sorted(drawn.numbers)
