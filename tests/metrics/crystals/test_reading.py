"""Reading structures: a reason for each file that cannot be read."""

import pytest

from fmwc.errors import DataError
from fmwc.metrics.crystals import read

from .conftest import rock_salt


def test_a_file_that_is_not_there_and_one_of_another_kind(tmp_path):
    (tmp_path / "it.pdf").write_bytes(b"%PDF")
    (tmp_path / "empty.cif").write_text("")
    found = read([tmp_path / "none.cif", tmp_path / "it.pdf", tmp_path / "empty.cif"])
    assert [one.name for one in found] == ["none.cif", "it.pdf", "empty.cif"]
    assert "no such file" in found[0].problem
    assert "no known kind" in found[1].problem
    assert found[2].problem


def test_several_structures_in_a_cif(tmp_path):
    text = rock_salt().structure().to(fmt="cif")
    (tmp_path / "two.cif").write_text(text + "\n" + text.replace("data_NaCl", "data_again"))
    assert [one.name for one in read(tmp_path / "two.cif")] == ["two.cif#0", "two.cif#1"]


def test_binary_rubbish_is_said(tmp_path):
    for name in ("a.cif", "b.xyz", "POSCAR"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 10)
    assert all(one.problem for one in read(tmp_path))


def test_disorder_is_said(tmp_path):
    from pymatgen.core import Lattice, Structure

    shared = Structure(Lattice.cubic(4), [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]])
    (tmp_path / "a.cif").write_text(shared.to(fmt="cif"))
    assert "shared" in read(tmp_path)[0].problem


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="holds no CIF"):
        read(tmp_path)
    with pytest.raises(DataError, match="no structure"):
        read([])
