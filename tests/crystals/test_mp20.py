"""MP-20 and other training data: where they are found, how they are checked, and one-line errors."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fmwc import readers
from fmwc.crystals import mp20, parsers
from fmwc.crystals.structures import encode
from fmwc.data.arrays import fingerprint
from fmwc.errors import DataError, OutputError, UnknownNameError, UsageError

from .conftest import structure_of

SPLITS = ("train", "val", "test")
REAL = [Path(os.environ.get("FMWC_DATA") or "nowhere"), Path(__file__).parents[3] / "shared" / "data" / "mp20-full"]
HEADER = ("", "material_id", "formation_energy_per_atom", "band_gap", "pretty_formula", "e_above_hull", "elements")
HEADER = (*HEADER, "cif", "spacegroup.number")  # of the public files


@pytest.fixture(autouse=True)
def _no_data_given(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)


@pytest.fixture(scope="module")
def real():
    here = next((place for place in REAL if list(place.glob("**/train.npz"))), None)
    if here is None:
        pytest.skip("MP-20 is not on this machine: set FMWC_DATA to its folder")
    return here


@pytest.fixture(scope="module")
def texts(library):
    """Prototypes as CIFs by name: nine of the split train, one of val, one of test."""
    few = [(library["train"], i) for i in range(0, 90, 10)] + [(library["val"], 0), (library["test"], 0)]
    return {crystals.names[i]: structure_of(crystals, i).to(fmt="cif") for crystals, i in few}


@pytest.fixture
def arrays():
    """Two small crystals in the layout of the npz files: rock salt, and iron."""
    return {
        "num_atoms": np.array([2, 1], np.uint8),
        "atomic_numbers": np.array([11, 17, 26], np.uint8),
        "frac_coords": np.array([[0, 0, 0], [0.5, 0.5, 0.5], [0.25, 0.5, 0.75]], np.float32),
        "lengths": np.array([[3.99] * 3, [2.48] * 3], np.float32),
        "angles": np.array([[60.0] * 3, [109.47] * 3], np.float32),
        "material_id": np.array([b"mp-22862", b"mp-13"]),
        "e_above_hull": np.array([0.0, np.nan], np.float32),
    }


def write_cifs(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.cif").write_text(text)
    return folder


def write_csv(folder, split, texts, header=HEADER):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{split}.csv").open("w", newline="") as stream:
        rows = csv.DictWriter(stream, header, extrasaction="ignore")
        rows.writeheader()
        for at, (name, text) in enumerate(texts.items()):
            rows.writerow({"": at, "material_id": name, "cif": text, "spacegroup.number": 225 - at})
    return folder


def changed(text, pattern, new):
    after, times = re.subn(pattern, new, text)
    assert times
    return after


def refused(match, *args, call=mp20.load, error=DataError, **options):
    with pytest.raises(error, match=match) as raised:
        call(*args, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def same(a, b, atol=0.0):
    assert a.names == b.names
    assert torch.equal(a.numbers, b.numbers)
    apart = (a.coords - b.coords + 0.5).remainder(1.0) - 0.5
    assert apart.abs().max() <= atol
    assert torch.allclose(a.lengths, b.lengths, atol=atol, rtol=0)
    assert torch.allclose(a.angles, b.angles, atol=100 * atol, rtol=0)
    return True


# The real data


@pytest.mark.parametrize(
    ("split", "count", "atoms", "first", "of", "digest"),
    [
        ("train", 27119, 280337, "mp-1", {55: 1}, "eb90a7717050b32f"),
        ("val", 9047, 93512, "mp-10015", {14: 1, 76: 1}, "6716045c55b167a3"),
        ("test", 9046, 93158, "mp-10009", {31: 4, 52: 4}, "57a80aaefd2210c6"),
    ],
)
def test_facts_about_mp20(real, split, count, atoms, first, of, digest):
    crystals = mp20.load(real, split)
    assert len(crystals) == len(set(crystals.names)) == count
    assert crystals.numbers.shape == (count, 20)
    assert crystals.numbers.dtype == torch.int64
    assert (int(crystals.atoms.min()), int(crystals.atoms.max()), int(crystals.atoms.sum())) == (1, 20, atoms)
    assert crystals.names[0] == first
    assert (
        dict(zip(*np.unique(crystals.numbers[0], return_counts=True), strict=True)) == {0: 20 - sum(of.values())} | of
    )
    assert bool((crystals.numbers == 10).any()) == (split == "train")  # neon
    assert fingerprint(crystals.numbers, crystals.coords, crystals.lengths, crystals.angles) == digest
    assert all(value.isfinite().all() for value in encode(crystals)[0].values())


def test_a_known_material(real):
    pytest.importorskip("pymatgen.core")
    crystals = mp20.load(real, "test")
    iron = structure_of(crystals, crystals.names.index("mp-13"))
    assert iron.composition.reduced_formula == "Fe"
    assert len(iron) == 1
    assert iron.volume == pytest.approx(11.5, abs=0.5)  # Å³, body-centred


def test_no_material_is_in_two_splits_and_all_have_energies(real):
    names = [set(mp20.load(real, split).names) for split in SPLITS]
    assert len(set.union(*names)) == 45212
    of, values = mp20.energies(real)
    assert set(of) == set.union(*names)
    assert values.dtype == torch.float32
    assert values.double().mean().item() == pytest.approx(-5.9838, abs=1e-3)


def test_the_environment_names_the_folder_above(real, monkeypatch):
    above = real if (real / "mp20-full").is_dir() else real.parent
    monkeypatch.setenv("FMWC_DATA", str(above))
    assert len(mp20.load(split="val")) == 9047
    assert len(mp20.energies()[0]) == 45212


def test_reading_arrays_needs_no_pymatgen(real):
    code = (
        "import sys; sys.modules['pymatgen'] = None\n"
        f"from fmwc.crystals import mp20; print(len(mp20.load({str(real)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "27119"


def test_real_crystals_survive_cifs(real, tmp_path):
    pytest.importorskip("pymatgen.core")
    all_of_them = mp20.load(real, "val")
    before = all_of_them.take(list(range(0, len(all_of_them), 200)))
    write_cifs(tmp_path / "in" / "val", {n: structure_of(before, i).to(fmt="cif") for i, n in enumerate(before.names)})
    after = mp20.load(tmp_path / "in", "val")
    assert sorted(before.names) == list(after.names)
    for i, name in enumerate(before.names):
        a, b = structure_of(before, i), structure_of(after, after.names.index(name))
        assert a.composition == b.composition
        assert b.volume == pytest.approx(a.volume, rel=1e-4)
        assert b.lattice.abc == pytest.approx(a.lattice.abc, abs=0.02)  # equal up to ties in Niggli's reduction


# Prototypes


def test_the_prototypes(library):
    counts = {split: len(crystals) for split, crystals in library.items()}
    assert sum(counts.values()) == 250
    assert counts["train"] > 180
    assert min(counts.values()) > 15
    assert len({name for crystals in library.values() for name in crystals.names}) == 250
    for split, crystals in library.items():
        assert crystals.numbers.shape[1] == 20
        assert {mp20.split_of(name) for name in crystals.names} == {split}
        assert all(value.isfinite().all() for value in encode(crystals)[0].values())
    assert same(mp20.load("prototypes", "val"), library["val"])


def test_rock_salt_prototype(library):
    crystals = next(c for c in library.values() if "NaCl-AB_cF8_225_a_b" in c.names)
    salt = structure_of(crystals, crystals.names.index("NaCl-AB_cF8_225_a_b"))
    assert sorted(site.specie.Z for site in salt) == [11, 17]
    assert salt.density == pytest.approx(2.16, abs=0.05)
    assert salt.lattice.angles == pytest.approx([60] * 3)


# CIF files


def test_cifs_are_split_by_name(tmp_path, library, texts):
    write_cifs(tmp_path, texts)
    (tmp_path / "notes.txt").write_text("about")
    (tmp_path / "._hidden.cif").write_text("no CIF")
    for split in SPLITS:
        names = sorted(name for name in texts if mp20.split_of(name) == split)
        assert names
        found = mp20.load(tmp_path, split)
        assert list(found.names) == names
        rows = [library[split].names.index(name) for name in names]
        assert torch.equal(found.atoms, library[split].take(rows).atoms)
    train = mp20.load(tmp_path).names
    next(tmp_path.glob(f"{train[0]}.cif")).unlink()
    assert mp20.load(tmp_path).names == train[1:]  # the others keep their positions


def test_split_by_name_is_fixed():
    splits = [mp20.split_of(f"mp-{i}") for i in range(5000)]
    assert [splits.count(split) / 5000 for split in SPLITS] == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    assert [i for i in range(40) if splits[i] == "val"] == [13, 17, 31, 35]
    assert [i for i in range(40) if splits[i] == "test"] == [14, 24, 32, 39]


def test_subfolders_are_splits(tmp_path, texts):
    parts = [dict(list(texts.items())[i::3]) for i in range(3)]
    for split, part in zip(SPLITS, parts, strict=True):
        write_cifs(tmp_path / "mp20" / split, part)
    (tmp_path / "mp20" / "loose.cif").write_text("not looked at")
    for place in (tmp_path, tmp_path / "mp20"):
        for split, part in zip(SPLITS, parts, strict=True):
            assert set(mp20.load(place, split).names) == set(part)


def test_build_from_cifs_and_load(tmp_path, texts):
    write_cifs(tmp_path / "in", texts)
    seen = []
    report = mp20.build(tmp_path / "in", tmp_path / "new" / "out", progress=lambda *now: seen.append(now))
    assert report.left_out == {}
    assert sum(report.kept.values()) == len(texts)
    assert str(report) == f"kept 9 train, {report.kept['val']} val, {report.kept['test']} test; left out none"
    assert seen == [(split, count, count) for split, count in report.kept.items()]
    assert [file.name for file in sorted((tmp_path / "new").rglob("*"))] == ["out", "test.npz", "train.npz", "val.npz"]
    for split in SPLITS:
        assert same(mp20.load(tmp_path / "new" / "out", split), mp20.load(tmp_path / "in", split))
        with np.load(tmp_path / "new" / "out" / f"{split}.npz") as held:
            assert set(held) == {"num_atoms", "atomic_numbers", "frac_coords", "lengths", "angles", "material_id"}
            assert held["num_atoms"].dtype == held["atomic_numbers"].dtype == np.uint8


def test_a_cell_is_reduced(tmp_path):
    core = pytest.importorskip("pymatgen.core")
    skew = core.Structure(core.Lattice([[4, 0, 0], [8, 5, 0], [4, 10, 6]]), ["Na", "Cl"], [[0] * 3, [-0.25, 1.5, 0.5]])
    write_cifs(tmp_path / "train", {"skew": skew.to(fmt="cif")})
    cell = mp20.load(tmp_path)
    assert cell.lengths[0].tolist() == pytest.approx([4, 5, 6])
    assert cell.angles[0].tolist() == pytest.approx([90] * 3)
    apart = structure_of(cell, 0).get_distance(0, 1)
    assert apart == pytest.approx(skew.get_distance(0, 1), rel=1e-5)


def test_unusable_cifs_are_left_out_with_a_reason(tmp_path, library, texts):
    core = pytest.importorskip("pymatgen.core")
    name = next(name for name in texts if name.startswith("HgS"))
    good = texts[name]
    big = core.Structure(core.Lattice.cubic(9), ["Po"] * 27, np.indices((3, 3, 3)).reshape(3, -1).T / 3)
    bad = {
        "cut": good[: len(good) // 2],
        "empty": "",
        "text": "not a CIF at all",
        "binary": "\x00\x01\x02" * 50,
        "flat": changed(good, r"(_cell_length_c +)[0-9.]+", r"\g<1>0.0"),
        "big": big.to(fmt="cif"),
        "half": changed(good, r"(Hg0 .*) 1\n", r"\1 0.5\n"),
        "full": changed(good, r"(Hg0 .*) 1\n", r"\1 1.5\n"),
        "twice": good + changed(good, "data_HgS", "data_again"),
        "bare": changed(good, "'Hg3 S3'", "'Hg3 S3 H6'"),
        "uneven": changed(good, "'Hg3 S3'", "'Hg1 S2'"),
        "nameless": changed(good, r"Hg(\d| )", r"Qq\1"),
    }
    write_cifs(tmp_path / "in" / "train", {"good": good, **bad})
    report = mp20.build(tmp_path / "in", tmp_path / "out")
    assert report.kept == {"train": 1, "val": 0, "test": 0}
    reasons = {name: reason for reason, names in report.left_out.items() for name in names}
    assert reasons.keys() == bad.keys()
    assert {n for n, r in reasons.items() if r == parsers.UNREADABLE} >= {
        "cut",
        "empty",
        "text",
        "binary",
        "flat",
        "full",
    }
    assert reasons["big"].startswith("more than 20 atoms")
    assert reasons["half"] == "disordered sites"
    assert reasons["twice"] == "several structures in one CIF"
    assert reasons["bare"] == reasons["uneven"] == parsers.FORMULA
    assert "left out" in str(report)
    assert "1 with disordered sites: half" in str(report)
    assert not (tmp_path / "out" / "val.npz").exists()
    refused("contains no val.npz", tmp_path / "out", "val")
    with pytest.warns(UserWarning, match="kept 1 train; left out .*disordered sites: half") as warned:
        crystals = mp20.load(tmp_path / "in")
    assert len(warned) == 1
    assert same(crystals, mp20.load(tmp_path / "out"))


def test_cells_without_a_reduction(monkeypatch):
    core = pytest.importorskip("pymatgen.core")
    salt = core.Structure(core.Lattice.cubic(4), ["Na", "Cl"], [[0] * 3, [0.5] * 3])
    assert isinstance(parsers.cell_of(salt), parsers.Cell)
    sharp = core.Structure(core.Lattice.from_parameters(4, 4, 4, 50, 90, 90), ["Na"], [[0] * 3])
    monkeypatch.setattr(core.Structure, "get_reduced_structure", lambda self: self)
    assert parsers.cell_of(sharp) == parsers.NO_CELL
    monkeypatch.setattr(core.Structure, "get_reduced_structure", lambda self: 1 / 0)
    assert parsers.cell_of(salt) == parsers.NO_CELL


def test_dummy_species_are_refused():
    core = pytest.importorskip("pymatgen.core")
    assert (
        parsers.cell_of(core.Structure(core.Lattice.cubic(4), [core.DummySpecies("X")], [[0] * 3])) == parsers.UNKNOWN
    )


# CSV files


def test_build_from_csvs_and_load(tmp_path, texts):
    items = list(texts.items())
    for split, part in zip(SPLITS, (items[:6], items[6:9], items[9:]), strict=True):
        write_csv(tmp_path / "in", split, dict(part))
    report = mp20.build(tmp_path / "in", tmp_path / "out")
    assert report == mp20.Report({"train": 6, "val": 3, "test": 2}, {})
    for split in SPLITS:
        assert same(mp20.load(tmp_path / "out", split), mp20.load(tmp_path / "in", split))
    assert mp20.load(tmp_path / "out").names == tuple(name for name, _ in items[:6])  # in the order of the file
    with np.load(tmp_path / "out" / "train.npz") as held:
        assert set(held) == set(mp20.FIELDS)
    ordered = dict(sorted(texts.items()))
    write_csv(tmp_path / "a", "train", ordered, ("material_id", "cif"))
    write_cifs(tmp_path / "b" / "train", ordered)
    assert same(mp20.load(tmp_path / "a"), mp20.load(tmp_path / "b"))


def test_rows_that_cannot_be_used(tmp_path, texts):
    (name, text), (other, second) = list(texts.items())[:2]
    write_csv(tmp_path, "train", {name: text, "bad": "no CIF", other: second})
    with (tmp_path / "train.csv").open("a") as stream:
        stream.write(f'9,{name},0,0,,0,,"{text}",1\n10,short\n')
    with pytest.warns(UserWarning, match="no readable CIF: bad, short.*a duplicate name: " + name):
        crystals = mp20.load(tmp_path)
    assert crystals.names == (name, other)


def test_bad_csvs(tmp_path, texts):
    file = write_csv(tmp_path, "train", texts, ("material_id", "pretty_formula")) / "train.csv"
    refused("has the columns material_id, pretty_formula, but needs cif", tmp_path)
    file.write_text("")
    refused("has the columns none, but needs material_id and cif", tmp_path)
    write_csv(tmp_path, "train", texts)
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.rindex(b"Hg") if b"Hg" in whole[-300:] else -200])
    refused("truncated or not a CSV file .unexpected end", tmp_path)
    file.write_bytes(b"material_id,cif\n\xff\xfe,\n")
    refused("is not UTF-8 text", tmp_path)
    file.write_text("material_id,cif\nmp-1,nothing\n")
    refused("contains no usable train structure .kept 0 train; left out 1 with no readable CIF: mp-1", tmp_path)
    refused("val.csv cannot be read", tmp_path, "val")
    refused("contains no usable structure", tmp_path, tmp_path / "out", call=mp20.build)
    assert not (tmp_path / "out").exists()


# Writing


def test_build_overwrites_nothing(tmp_path, texts):
    write_cifs(tmp_path / "in", texts)
    (tmp_path / "out").mkdir()
    assert mp20.build(tmp_path / "in", tmp_path / "out").kept["train"] == 9  # empty: taken
    before = (tmp_path / "out" / "train.npz").read_bytes()
    refused("is not empty", tmp_path / "in", tmp_path / "out", call=mp20.build, error=OutputError)
    refused("is not empty", tmp_path / "in", tmp_path / "in", call=mp20.build, error=OutputError)
    refused("is a file", tmp_path / "in", tmp_path / "out" / "val.npz", call=mp20.build, error=OutputError)
    assert (tmp_path / "out" / "train.npz").read_bytes() == before
    refused("contains no crystals; give MP-20's train.csv", tmp_path / "out", tmp_path / "b", call=mp20.build)  # npz
    mp20.build(tmp_path / "in", tmp_path / "again")
    assert (tmp_path / "again" / "train.npz").read_bytes() == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_build_is_atomic(tmp_path, texts, monkeypatch, error):
    write_cifs(tmp_path / "in", texts)
    write = mp20.write_bytes

    def fail(path, content):
        if path.name == "test.npz":
            raise error
        return write(path, content)

    monkeypatch.setattr(mp20, "write_bytes", fail)
    with pytest.raises((OutputError, KeyboardInterrupt)) as raised:
        mp20.build(tmp_path / "in", tmp_path / "out")
    assert isinstance(raised.value, OutputError) == isinstance(error, OSError)
    assert isinstance(error, KeyboardInterrupt) or "out cannot be written (No space left on device)" in str(
        raised.value
    )
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


# Arrays


def test_small_arrays(tmp_path, arrays):
    arrays["frac_coords"][0] = [-0.25, 1.0, -1e-9]
    np.savez(tmp_path / "train.npz", **arrays)
    crystals = mp20.load(tmp_path)
    assert crystals.numbers[:, :3].tolist() == [[11, 17, 0], [26, 0, 0]]
    assert crystals.numbers.shape == (2, mp20.MOST_ATOMS)
    assert crystals.coords[:, :2].tolist() == [[[0.75, 0, 0], [0.5] * 3], [[0.25, 0.5, 0.75], [0] * 3]]
    assert crystals.names == ("mp-22862", "mp-13")
    arrays["material_id"] = np.array(["häm", "ätit"])
    for kind in (arrays["material_id"], np.char.encode(arrays["material_id"], "utf-8")):
        np.savez(tmp_path / "train.npz", **arrays | {"material_id": kind})
        assert mp20.load(tmp_path).names == ("häm", "ätit")


@pytest.mark.parametrize("field", ["num_atoms", "atomic_numbers", "frac_coords", "lengths", "angles", "material_id"])
def test_every_field_is_needed(tmp_path, arrays, field):
    del arrays[field]
    np.savez(tmp_path / "train.npz", **arrays)
    refused(rf"train.npz contains .*, but needs {field}; copy it again, or build", tmp_path)


@pytest.mark.parametrize(
    ("field", "change", "match"),
    [
        ("num_atoms", lambda a: a[:1], r"num_atoms must be integers \(2,\).*got uint8 \(1,\)"),
        ("num_atoms", lambda a: a + 1, r"atomic_numbers must be integers \(5,\), not empty, got uint8 \(3,\)"),
        ("num_atoms", lambda a: a * 1.0, "num_atoms must be integers .*float64"),
        ("num_atoms", lambda a: a[:, None], r"num_atoms must be integers .*\(2, 1\)"),
        ("num_atoms", lambda a: np.array([3, 0]), "1 to 20 atoms, but mp-13 has 0"),
        ("num_atoms", lambda a: np.array([4, -1]), "1 to 20 atoms, but mp-13 has -1"),
        ("atomic_numbers", lambda a: a[1:], r"atomic_numbers must be integers \(3,\)"),
        ("atomic_numbers", lambda a: a * 0, "atomic numbers 1 to 118, but mp-22862 has 0"),
        ("atomic_numbers", lambda a: a + np.array([0, 0, 93]), "atomic numbers 1 to 118, but mp-13 has 119"),
        ("frac_coords", lambda a: a[:2], r"frac_coords must be floats \(3, 3\)"),
        ("frac_coords", lambda a: a[:, :2], r"frac_coords must be floats \(3, 3\)"),
        ("frac_coords", lambda a: a.astype(int), "frac_coords must be floats"),
        ("frac_coords", lambda a: np.where(a == 0.75, np.nan, a), r"finite coordinates, but mp-13 has \[0.25 0.5"),
        ("frac_coords", lambda a: np.where(a == 0.5, np.inf, a), "finite coordinates, but mp-22862"),
        ("lengths", lambda a: a.T, r"lengths must be floats \(2, 3\).*\(3, 2\)"),
        ("lengths", lambda a: a * [[1], [0]], "lengths above 0, but mp-13"),
        ("lengths", lambda a: a * np.nan, "lengths above 0, but mp-22862"),
        ("angles", lambda a: a[:1], "angles must be floats"),
        ("angles", lambda a: np.radians(a), r"angles of 59.9° to 120.1°, but mp-22862 has \[1.04"),
        ("angles", lambda a: a * np.nan, "angles of 59.9"),
        ("angles", lambda a: np.array([[60, 60, 120.0]] * 2), "angles that form a cell, but mp-22862"),
        ("material_id", lambda a: a[:1], r"num_atoms must be integers \(1,\)"),
        ("material_id", lambda a: a[:0], "not empty"),
        ("material_id", lambda a: np.arange(2), "material_id must be strings .*int64"),
        ("material_id", lambda a: a[[0, 0]], "must be unique, but 1 are repeated"),
    ],
)
def test_bad_arrays(tmp_path, arrays, field, change, match):
    np.savez(tmp_path / "train.npz", **arrays | {field: change(arrays[field])})
    message = refused(match, tmp_path)
    assert message.startswith(str(tmp_path / "train.npz"))
    assert "copy it again" in message


def test_more_than_20_atoms(tmp_path, arrays):
    arrays["num_atoms"] = np.array([20, 21])
    arrays["atomic_numbers"] = np.ones(41, int)
    arrays["frac_coords"] = np.random.default_rng(0).random((41, 3))
    np.savez(tmp_path / "train.npz", **arrays)
    refused("1 to 20 atoms, but mp-13 has 21", tmp_path)


def test_malformed_npz_files(tmp_path, arrays):
    file = tmp_path / "train.npz"
    np.savez_compressed(file, **arrays)
    whole = file.read_bytes()
    middle = bytearray(whole)
    middle[60:90] = bytes(30)
    np.save(tmp_path / "one.npy", arrays["lengths"])
    for content in (
        b"",
        whole[:-30],
        whole[: len(whole) // 2],
        bytes(middle),
        (tmp_path / "one.npy").read_bytes(),
        b"?",
    ):
        file.write_bytes(content)
        refused(r"not an \.npy or \.npz file, or is truncated|but needs num_atoms", tmp_path)


def test_pickle_is_refused(tmp_path, arrays):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    arrays["lengths"] = np.array([Trap()] * 2, dtype=object)
    np.savez(tmp_path / "train.npz", **arrays)
    refused("Python objects", tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_cannot_be_opened(tmp_path, arrays, monkeypatch):
    np.savez(tmp_path / "train.npz", **arrays)

    def fail(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(readers.os, "open", fail)
    refused("train.npz cannot be read .Permission denied", tmp_path)


# Energies


def test_energies(tmp_path):
    assert mp20.energies(tmp_path) is None
    assert mp20.energies("prototypes") is None
    file = tmp_path / "mp20" / "chgnet_energies.npz"
    file.parent.mkdir()
    np.savez(file, material_id=np.array([b"mp-1", b"mp-2"]), energy_per_atom=np.array([-1.5, -2.0]))
    names, values = mp20.energies(tmp_path)
    assert names == ("mp-1", "mp-2")
    assert values.tolist() == [-1.5, -2.0]
    for bad in ([-1.5], [-1.5, np.nan], [1, 2], [[-1.5], [-2.0]]):
        np.savez(file, material_id=np.array([b"mp-1", b"mp-2"]), energy_per_atom=np.array(bad))
        refused("one finite number for each name", tmp_path, call=mp20.energies)
    np.savez(file, material_id=np.array([b"mp-1", b"mp-2"]))
    refused("needs energy_per_atom", tmp_path, call=mp20.energies)


# Where


def test_order_of_preference_of_formats(tmp_path, arrays, texts):
    write_cifs(tmp_path, texts)
    assert len(mp20.load(tmp_path)) == 9
    write_csv(tmp_path, "train", dict(list(texts.items())[:4]))
    assert len(mp20.load(tmp_path)) == 4
    (tmp_path / "mp20").mkdir()
    np.savez(tmp_path / "mp20" / "train.npz", **arrays)
    assert len(mp20.load(tmp_path)) == 2
    refused("mp20 contains no val.npz", tmp_path, "val")  # does not use files of another format


def test_missing_data(tmp_path):
    refused("no data folder given; use --data or set FMWC_DATA")
    refused("nowhere does not exist", tmp_path / "nowhere")
    refused("contains no crystals; give a folder with train.npz", tmp_path)
    (tmp_path / "a.csv").write_text("")
    refused("a.csv is a file; give a folder", tmp_path / "a.csv")
    with pytest.raises(UnknownNameError, match="did you mean 'train'"):
        mp20.load(tmp_path, "trian")
    with pytest.raises(UnknownNameError, match="split 'all'"):
        mp20.prototypes("all")


def test_without_pymatgen(tmp_path, monkeypatch):
    write_cifs(tmp_path / "in" / "train", {"a": "data_a"})
    monkeypatch.setitem(sys.modules, "pymatgen.io.cif", None)
    refused(r"pip install 'fmwc\[crystals\]'", tmp_path / "in", error=UsageError)
    monkeypatch.setitem(sys.modules, "pymatgen.analysis.prototypes", None)
    refused(r"pip install 'fmwc\[crystals\]'", "prototypes", error=UsageError)
