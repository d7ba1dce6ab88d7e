"""The reader of structure files: files that are too large or malformed give a row with the reason."""

import os

import numpy as np
import pytest

from fmwc.crystals import parsers, read

pytest.importorskip("pymatgen.core")
pytest.importorskip("ase")

CIF = """data_x
_cell_length_a {a}
_cell_length_b 4
_cell_length_c 4
_cell_angle_alpha 90
_cell_angle_beta {beta}
_cell_angle_gamma 90
_symmetry_space_group_name_H-M 'P 1'
loop_
_atom_site_label
_atom_site_type_symbol
_atom_site_fract_x
_atom_site_fract_y
_atom_site_fract_z
{sites}
"""
SALT = "Na1 Na 0 0 0\nCl1 Cl 0.5 0.5 0.5"
POSCAR = "x\n1\n4 0 0\n0 4 0\n0 0 4\n{symbols}\n{counts}\ndirect\n0 0 0\n0.5 0.5 0.5\n"
XYZ = '{count}\nLattice="{lattice}" Properties=species:S:1:pos:R:3\nNa 0 0 0\nCl 2 2 2\n'
CUBE = "4 0 0 0 4 0 0 0 4"


def cif(a="4", beta="90", sites=SALT):
    return CIF.format(a=a, beta=beta, sites=sites)


def many(count):
    rng = np.random.default_rng(0)
    return "\n".join(f"Na{i} Na {x:.5f} {y:.5f} {z:.5f}" for i, (x, y, z) in enumerate(rng.random((count, 3))))


GOOD = {
    "a.cif": cif(),
    "POSCAR": POSCAR.format(symbols="Na Cl", counts="1 1"),
    "a.xyz": XYZ.format(count=2, lattice=CUBE),
    "latin.cif": b"# by J. M\xfcller\n" + cif().encode(),
    "bom.cif": b"\xef\xbb\xbf" + cif().encode(),
    "charges.cif": cif(sites="Na1 Na1+ 0 0 0\nCl1 Cl1- 0.5 0.5 0.5"),
}
BAD = {
    "nul.cif": (cif(sites="Na1 N\0a 0 0 0"), "control character"),
    "other.cif": (cif(sites="Na1 N\x01a 0 0 0"), "control character"),
    "byte.cif": (cif(sites="Na1 Na 0 0 0").encode().replace(b" Na ", b" N\xffa "), "not the symbol of an element"),
    "element.cif": (cif(sites="Na1 Zz 0 0 0"), "not the symbol of an element"),
    "negative.cif": (cif(a="-4"), "invalid length: a = -4"),
    "zero.cif": (cif(a="0.0(1)"), "invalid length: a = 0.0"),
    "nan.cif": (cif(a="nan"), "invalid length: a = nan"),
    "angle.cif": (cif(beta="0"), "it cannot be read|not finite|do not form a cell|edges"),
    "sites.cif": (cif(a="400", sites=many(parsers.MOST + 1)), "has 1,001 atoms"),
    "claims.poscar": (POSCAR.format(symbols="Na Cl", counts="1 1000000000"), "1,000,000,000 atoms"),
    "negative.poscar": (POSCAR.format(symbols="Na Cl", counts="-1 3"), "-1 atoms"),
    "cut.poscar": (POSCAR.format(symbols="Na Cl", counts="1 900"), "cannot be read"),
    "nameless.poscar": (POSCAR.format(symbols="1 1", counts="").replace("\n\n", "\n"), "does not name its elements"),
    "claims.xyz": (XYZ.format(count=10**8, lattice=CUBE), "100,000,000 atoms"),
    "more.xyz": (XYZ.format(count=10**30, lattice=CUBE), "atoms; the maximum"),
    "cut.xyz": (XYZ.format(count=3, lattice=CUBE), "cannot be read"),
    "flat.xyz": (XYZ.format(count=2, lattice="4 0 0 0 4 0 0 0 0"), "no cell"),
    "nan.xyz": (XYZ.format(count=2, lattice="nan 0 0 0 4 0 0 0 4"), "cell"),
    "empty.cif": ("", "no structure"),
    "rubbish.cif": (bytes(range(256)), "control character"),
}


def write(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def test_good_files_are_read_among_bad_ones(tmp_path):
    for name, content in {**GOOD, **{name: content for name, (content, _) in BAD.items()}}.items():
        write(tmp_path, name, content)
    os.symlink("/dev/zero", tmp_path / "device.cif")
    os.mkfifo(tmp_path / "fifo.cif")
    os.symlink("nowhere", tmp_path / "dangling.cif")
    with (tmp_path / "huge.cif").open("wb") as file:
        file.truncate(parsers.BYTES + 1)  # sparse
    found = {one.name: one for one in read(tmp_path)}
    for name in GOOD:
        assert found[name].problem == ""
        assert sorted(found[name].numbers.tolist()) == [11, 17]
        assert np.allclose(found[name].cell, 4 * np.eye(3))
    for name, (_, reason) in BAD.items():
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found[name].problem)
        assert "\n" not in found[name].problem
    assert "not a file" in found["device.cif"].problem
    assert "not a file" in found["fifo.cif"].problem
    assert "cannot be read" in found["dangling.cif"].problem
    assert "bytes" in found["huge.cif"].problem


def test_file_names_that_are_not_unicode(tmp_path):
    name = os.fsdecode(b"a\xff\x1b[31m.cif")
    write(tmp_path, name, cif())
    (one,) = read(tmp_path)
    assert one.problem == ""
    assert one.name.isprintable()
