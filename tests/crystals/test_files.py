"""Tables and structure files, written and read."""

import csv
import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from fmwc.crystals import Candidate, read
from fmwc.crystals.files import (
    cif_text,
    copy_database,
    extxyz_text,
    poscar_text,
    symmetrised_cif_text,
    write_cifs,
    write_database,
    write_extxyz,
    write_structures,
    write_table,
)
from fmwc.crystals.parsers import cells
from fmwc.crystals.structures import cell_matrix
from fmwc.errors import DataError, ShapeError, UsageError

from .conftest import rock_salt

COLUMNS = {
    "name": ["a", "b, c"],
    "atoms": [8, 0],
    "e_above_hull": [0.25, math.nan],
    "valid": [True, False],
    "novel": [None, None],
    "problem": ["", 'it says "no"'],
}
TILTED = np.array([[4.0, 0, 0], [1.0, 5.0, 0], [-0.5, 0.3, 6.0]])
CANDIDATE = Candidate("x/1.cif", np.array([11, 17, 8]), np.array([[0, 0, 0], [0.5, 0.4, 0.3], [0.2, 0.9, 0.7]]), TILTED)


# ---- tables ------------------------------------------------------------------------------------------------------


def test_both_tables_contain_the_same(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table, other = write_table(tmp_path / "sub" / "crystals.v1", COLUMNS)
    assert (table.name, other.name) == ("crystals.v1.csv", "crystals.v1.parquet")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert rows[0] == {"name": "a", "atoms": "8", "e_above_hull": "0.25", "valid": "true", "novel": "", "problem": ""}
    assert rows[1]["e_above_hull"] == ""
    assert rows[1]["problem"] == 'it says "no"'
    found = parquet.read_table(other).to_pydict()
    assert found["name"] == COLUMNS["name"]
    assert found["e_above_hull"] == [0.25, None]
    assert found["valid"] == [True, False]
    with pytest.raises(ShapeError, match="equal lengths"):
        write_table(tmp_path / "t", {"a": [1], "b": [1, 2]})


def test_without_pyarrow_the_csv_is_written_and_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"fmwc\[crystals\]"):
        write_table(tmp_path / "t", COLUMNS)
    assert (tmp_path / "t.csv").is_file()


# ---- structures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cif", "extxyz"])
def test_structures_are_read_back(tmp_path, kind):
    pytest.importorskip("pymatgen.core", exc_type=ImportError)
    text = cif_text(CANDIDATE, {"e": 0.1}) if kind == "cif" else extxyz_text([CANDIDATE])
    (tmp_path / f"it.{kind}").write_text(text)
    (again,) = read(tmp_path)
    assert not again.problem
    assert sorted(again.numbers.tolist()) == [8, 11, 17]
    assert again.volume == pytest.approx(CANDIDATE.volume, rel=1e-6)
    first, second = (
        np.sort(np.linalg.norm((c.coords[:, None] - c.coords) @ c.cell, axis=-1), None) for c in (CANDIDATE, again)
    )
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_extxyz_carries_the_columns(tmp_path):
    ase = pytest.importorskip("ase.io")
    bad = Candidate("bad", problem="unreadable")
    columns = {
        "confidence": [0.5, 0.1], "e_above_hull": [np.float64(0.25), math.nan], "stable": [False, None],
        "problem": ['says "no" = never', "gone"],
    }  # fmt: skip
    path = write_extxyz(tmp_path / "all.extxyz", [CANDIDATE, bad], columns)
    (frame,) = ase.read(path, index=":")
    assert frame.info["name"] == "x/1.cif"
    assert frame.info["confidence"] == 0.5
    assert frame.info["e_above_hull"] == 0.25
    assert frame.info["stable"] in (False, np.False_)
    np.testing.assert_allclose(frame.get_scaled_positions(), CANDIDATE.coords, atol=1e-6)


def test_cifs_of_all_that_can_be_written(tmp_path):
    same = Candidate("X/1", CANDIDATE.numbers, CANDIDATE.coords, CANDIDATE.cell)
    strange = Candidate("z", np.array([121]), np.zeros((1, 3)), TILTED)
    written = write_cifs(tmp_path, [CANDIDATE, strange, same], {"e_above_hull": [0.1, 0.2, math.nan]})
    assert [path and path.name for path in written] == ["x_1.cif", None, "X_1-2.cif"]
    assert written[0] is not None
    assert written[0].read_text().startswith("# e_above_hull: 0.1\ndata_x_1.cif\n")
    with pytest.raises(DataError, match="z cannot be written"):
        cif_text(strange)


def test_files_of_similar_names_do_not_replace_each_other(tmp_path):
    written = write_cifs(tmp_path, [replace(CANDIDATE, name=name) for name in ("a-2", "a", "A")])
    assert len({path.name.lower() for path in written}) == len([*tmp_path.iterdir()]) == 3


# ---- files that cannot be read -----------------------------------------------------------------------------------


def test_missing_files_and_unknown_formats_are_reported(tmp_path):
    (tmp_path / "it.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty.cif").write_text("")
    found = read([tmp_path / "none.cif", tmp_path / "it.pdf", tmp_path / "empty.cif"])
    assert [one.name for one in found] == ["none.cif", "it.pdf", "empty.cif"]
    assert "no such file" in found[0].problem
    assert "unknown format" in found[1].problem
    assert found[2].problem


def test_several_structures_in_a_cif(tmp_path):
    text = rock_salt().structure().to(fmt="cif")
    (tmp_path / "two.cif").write_text(text + "\n" + text.replace("data_NaCl", "data_again"))
    assert [one.name for one in read(tmp_path / "two.cif")] == ["two.cif#0", "two.cif#1"]


def test_disorder_is_reported(tmp_path):
    core = pytest.importorskip("pymatgen.core")
    shared = core.Structure(core.Lattice.cubic(4), [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]])
    (tmp_path / "a.cif").write_text(shared.to(fmt="cif"))
    assert "shared" in read(tmp_path)[0].problem


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="contains no CIF"):
        read(tmp_path)
    with pytest.raises(DataError, match="no structures to read"):
        read([])


# ---- doubt per atom, symmetry, databases -------------------------------------------------------------------------


DOUBTED = replace(CANDIDATE, name="00012", doubt=np.array([0.125, 0.5, 2.0]))
NOTES = {"confidence": 0.93, "formula": "NaClO", "novel": True, "charge": "1e5", "problem": ""}


def test_a_cif_holds_confidence_and_doubt_as_data():
    cif = pytest.importorskip("pymatgen.io.cif")
    text = cif_text(DOUBTED, NOTES)
    (block,) = cif.CifFile.from_str(text).data.values()
    assert [float(value) for value in block.data["_fmwc_atom_doubt"]] == [0.125, 0.5, 2.0]
    assert float(block.data["_fmwc_confidence"]) == 0.93
    assert "_fmwc_novel" not in text
    found = cif.CifParser.from_str(text).parse_structures(primitive=False)[0]
    np.testing.assert_allclose(found.frac_coords, CANDIDATE.coords, atol=1e-7)
    (block,) = cif.CifFile.from_str(cif_text(CANDIDATE, NOTES)).data.values()
    assert float(block.data["_fmwc_confidence"]) == 0.93
    assert "_fmwc_atom_doubt" not in block.data


def test_a_poscar_is_read_by_pymatgen_and_ase(tmp_path):
    structure = pytest.importorskip("pymatgen.core").Structure
    (tmp_path / "a.vasp").write_text(poscar_text(DOUBTED, {"confidence": 0.93}))
    assert (tmp_path / "a.vasp").read_text().splitlines()[0] == "00012 confidence=0.93"
    for found in (structure.from_file(tmp_path / "a.vasp"), read(tmp_path / "a.vasp")[0].structure()):
        assert found.formula == "Na1 Cl1 O1"
        np.testing.assert_allclose(found.lattice.matrix, TILTED, atol=1e-9)
        pairs = {site.specie.symbol: site.frac_coords for site in found}
        np.testing.assert_allclose(pairs["O"], [0.2, 0.9, 0.7], atol=1e-9)


def test_a_database_can_be_selected_from(tmp_path):
    ase = pytest.importorskip("ase.db")
    columns = {"confidence": [0.9, 0.2], "formula": ["NaClO"] * 2, "novel": [True, None], "label": ["12", "twelve"]}
    broken = replace(CANDIDATE, name="none", cell=TILTED * np.nan)
    path = write_database(tmp_path / "some.db", [DOUBTED, replace(CANDIDATE, name="second")], columns)
    rows = [*ase.connect(path).select()]
    assert [row.data.get("name", row.get("name")) for row in rows] == ["00012", "second"]
    assert [row.confidence for row in ase.connect(path).select("confidence>0.5")] == [0.9]
    np.testing.assert_allclose(rows[0].data.doubt, DOUBTED.doubt)
    np.testing.assert_allclose(rows[0].toatoms().cell[:], TILTED)
    np.testing.assert_allclose(rows[0].toatoms().get_scaled_positions(), CANDIDATE.coords)
    assert (rows[0].data.label, rows[1].label) == ("12", "twelve")  # ASE refuses text that reads as a number
    assert "novel" not in rows[1]
    assert len([*ase.connect(write_database(tmp_path / "none.db", [broken])).select()]) == 0
    copy = copy_database(path, tmp_path / "copy.db", ["second", "third"])
    (row,) = ase.connect(copy).select()
    assert (row.name, row.confidence, row.natoms) == ("second", 0.2, 3)
    (tmp_path / "text.db").write_text("no database " * 100)
    with pytest.raises(DataError, match=r"text\.db is not an ASE database"):
        copy_database(tmp_path / "text.db", tmp_path / "copy.db", ["second"])


def test_symmetry_depends_on_the_tolerance(tmp_path):
    cif = pytest.importorskip("pymatgen.io.cif")
    salt = rock_salt()
    shaken = replace(salt, coords=salt.coords + np.random.default_rng(0).normal(0, 0.002, (8, 3)))

    def parsed(symprec):
        return cif.CifFile.from_str(symmetrised_cif_text(shaken, NOTES, symprec=symprec)).data.popitem()[1].data

    loose, tight = parsed(0.1), parsed(1e-4)
    assert (loose["_symmetry_Int_Tables_number"], len(loose["_atom_site_type_symbol"])) == ("225", 2)
    assert (tight["_symmetry_Int_Tables_number"], len(tight["_atom_site_type_symbol"])) == ("1", 8)
    flat = replace(salt, name="flat", cell=salt.cell * [[1], [1], [0]] + 1e-9)
    written = write_structures(tmp_path, [shaken, flat], {"confidence": [0.5, 0.5]}, "poscar, cif,cif", symprec=0.1)
    assert [path.name for path in written] == ["poscar", "cif", "symmetrised"]
    assert [path.name for path in (tmp_path / "symmetrised").iterdir()] == ["salt.cif"]  # spglib cannot read the other
    assert "# confidence: 0.5" in (tmp_path / "symmetrised" / "salt.cif").read_text()
    assert read(tmp_path / "symmetrised")[0].formula == "NaCl"


# ---- own cells read back -----------------------------------------------------------------------------------------

NEARLY = {  # lengths and angles as a flow draws them
    "rhombohedral": ([4.001, 3.995, 4.02], [60.02, 59.95, 60.08]),  # its Niggli cell may have angles of 120°
    "cubic": ([5.62, 5.6, 5.64], [90.3, 89.8, 90.1]),
    "monoclinic": ([3.2, 5.1, 7.7], [90.2, 104.0, 89.9]),
}


@pytest.mark.parametrize("name", NEARLY)
def test_a_drawn_cell_is_read_back_as_it_was_written(name):
    lengths, angles = (np.array(part) for part in NEARLY[name])
    coords = np.random.default_rng(0).random((6, 3))
    drawn = Candidate(name, np.array([8, 11, 8, 17, 11, 8]), coords, cell_matrix(lengths, angles))
    (cell,) = cells([cif_text(drawn)], keep=True)
    assert cell.numbers.tolist() == [8, 11, 8, 17, 11, 8]  # pymatgen sorts by element
    np.testing.assert_allclose(cell.coords, coords, atol=1e-4)  # pymatgen rounds to thirds
    np.testing.assert_allclose(cell.lengths, lengths, atol=1e-6)
    np.testing.assert_allclose(cell.angles, angles, atol=1e-5)


FAR_FROM_NIGGLI = {
    "long": ([4.0, 5.0, 9.0], [90, 90, 150]),
    "not in order": ([9.0, 5.0, 4.0], [90, 95, 90]),
    "two kinds of angles": ([4.0, 5.0, 6.0], [80, 100, 90]),
}


@pytest.mark.parametrize("name", FAR_FROM_NIGGLI)
def test_other_cells_are_reduced(name):
    cell = cell_matrix(*(np.array(part, float) for part in FAR_FROM_NIGGLI[name]))
    text = cif_text(Candidate(name, np.array([11, 17]), np.array([[0, 0, 0], [0.4, 0.3, 0.2]]), cell))
    (reduced,), (kept,) = cells([text]), cells([text], keep=True)
    np.testing.assert_allclose(kept.lengths, reduced.lengths)
    np.testing.assert_allclose(kept.angles, reduced.angles)
