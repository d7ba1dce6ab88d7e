"""The command line on crystals: sampling, editing and judging."""

import csv
import json
import re
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

pytest.importorskip("pymatgen.core", exc_type=ImportError)
pytest.importorskip("chgnet", exc_type=ImportError)

import fmwc
import fmwc.crystals.domain
from fmwc.__main__ import main
from fmwc.crystals import energies, mp20
from fmwc.crystals.files import cif_text, write_cifs
from fmwc.crystals.parsers import cell_of
from fmwc.crystals.structures import from_cells
from fmwc.domains import EditDefault
from tests.command import one_line
from tests.crystals.conftest import crystal, rock_salt

TINY = [
    "hidden=16", "layers=1", "frequencies=4", "time_features=8", "iterations=6", "batch=16", "noise_steps=2", "width=8",
    "references=16", "steps=4",
]  # fmt: skip
ROOT = Path(__file__).parents[2]
SETS = [part for change in TINY for part in ("--set", change)]


@pytest.fixture(autouse=True)
def _no_data_given(monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "model"
    words = ["train", "crystals", "--preset", "quick", "--data", "prototypes", "--device", "cpu", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fmwc", *words, *SETS])
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code
    return folder


@pytest.fixture
def no_picture(monkeypatch):
    """Skip the figures, which take longer than the rest."""
    monkeypatch.setattr(fmwc.crystals.domain, "sorted_by_confidence", lambda *args, **options: None)
    monkeypatch.setattr(fmwc.crystals.domain, "png", lambda picture: b"")


def table(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


# ---- train, sample, evaluate ----------------------------------------------------------------------------------------


def test_train_writes_a_checkpoint_of_crystals(trained):
    record = json.loads((trained / "recipe.json").read_text())
    assert (record["recipe"]["name"], record["recipe"]["hidden"]) == ("crystals", 16)
    assert not list(trained.glob("*.resume"))
    assert fmwc.load(trained).reference is not None


def test_sample_writes_cifs_and_a_table(run, trained, tmp_path):
    words = ("sample", trained, "-n", 6, "--steps", 4, "--device", "cpu")
    code, out, err = run(*words, "--out", tmp_path / "a")
    assert code == 0, err
    assert "samples.parquet" in out.replace("\n", "")
    rows = table(tmp_path / "a" / "samples.csv")
    assert [row["name"] for row in rows] == [f"{i:05d}" for i in range(6)]
    assert all(0 <= float(row["rank"]) <= 1 for row in rows)
    assert "confidence" not in rows[0]  # withheld: no score is better than chance on this network
    assert "confidence is withheld" in err
    written = {p.stem for p in (tmp_path / "a" / "cif").iterdir()}
    assert written == {row["name"] for row in rows if row["formula"]}  # atoms of known elements
    assert not (tmp_path / "a" / "parts").exists()
    loaded = fmwc.Trajectory.load(tmp_path / "a")
    assert len(loaded) == 6

    code, _, err = run(*words, "--out", tmp_path / "b", "--format", "extxyz", "--keep", 0.5)
    assert code == 0, err
    names = {p.name for p in (tmp_path / "b").iterdir()}
    assert {"samples.xyz", "samples.csv", "samples.parquet", "samples.safetensors"} <= names
    assert "cif" not in names
    surest = sorted(float(row["score"]) for row in rows)[:3]
    kept = sorted(float(row["score"]) for row in table(tmp_path / "b" / "samples.csv"))
    assert kept == pytest.approx(surest)


@pytest.mark.usefixtures("no_picture")
def test_every_format_has_the_same_crystals_and_the_doubt_of_each_atom(run, trained, tmp_path):
    words = ("sample", trained, "-n", 8, "--steps", 4, "--device", "cpu", "--format", "cif,extxyz,poscar,db")
    words = (*words, "--symmetrise", 0.1, "--atom-doubt", "--keep", 0.5, "--out", tmp_path / "a")
    code, _, err = run(*words)
    assert code == 0, err
    rows = {row["name"]: row for row in table(tmp_path / "a" / "samples.csv")}
    loaded = fmwc.Trajectory.load(tmp_path / "a")
    assert [*rows] == loaded.names != [f"{i:05d}" for i in range(4)]
    io = pytest.importorskip("ase.io")
    frames = {f"{int(frame.info['name']):05d}": frame for frame in io.read(tmp_path / "a" / "samples.xyz", index=":")}
    stored = {
        row.data.name: row for row in pytest.importorskip("ase.db").connect(tmp_path / "a" / "samples.db").select()
    }
    assert frames.keys() == stored.keys() == {name for name, row in rows.items() if row["formula"]}
    for name, frame in frames.items():
        doubt = loaded.evidence["atom_doubt"][loaded.names.index(name)]
        assert bool((doubt[: len(frame)] > 0).all())
        assert bool((doubt[len(frame) :] == 0).all())
        np.testing.assert_allclose(frame.arrays["doubt"], doubt[: len(frame)], rtol=1e-4)
        np.testing.assert_allclose(stored[name].data.doubt, doubt[: len(frame)], rtol=1e-6)
        assert stored[name].score == pytest.approx(float(rows[name]["score"]), rel=1e-5)
        for other in (io.read(tmp_path / "a" / "cif" / f"{name}.cif"), stored[name].toatoms()):
            assert other.get_chemical_formula() == frame.get_chemical_formula()
            np.testing.assert_allclose(other.get_scaled_positions(), frame.get_scaled_positions(), atol=1e-5)
        poscar = io.read(tmp_path / "a" / "poscar" / f"{name}.vasp")
        assert poscar.get_volume() == pytest.approx(frame.get_volume(), rel=1e-5)
    assert (tmp_path / "a" / "symmetrised").is_dir()
    code, _, err = run("filter", tmp_path / "a", "--budget", 2, "--out", tmp_path / "kept")
    assert code == 0, err
    kept = {row["name"] for row in table(tmp_path / "kept" / "samples.csv")}
    assert kept < rows.keys()
    assert {path.stem for path in (tmp_path / "kept" / "poscar").iterdir()} == kept & frames.keys()


@pytest.mark.usefixtures("no_picture")
def test_sample_by_the_score_of_one_channel(run, trained, tmp_path):
    words = ("sample", trained, "-n", 5, "--steps", 4, "--every", 2, "--device", "cpu", "--score", "lattice/integrated")
    code, _, err = run(*words, "--out", tmp_path)
    assert code == 0, err
    rows = table(tmp_path / "samples.csv")
    assert [row["score"] for row in rows] == [row["score_lattice"] for row in rows]
    assert sorted(float(row["rank"]) for row in rows) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=1e-6)


BAD = {
    "format": (("--format", "cif,poscer"), "did you mean 'poscar'"),
    "symmetry": (("--symmetrise", "-0.1"), "--symmetrise must be a tolerance of 0 to 1 Å"),
    "label": (("--label", "3"), "crystals has no classes"),
    "judge": (("--judge", "mase"), "did you mean 'mace'"),
    "score": (("--score", "type/peek"), "did you mean 'peak'"),
    "channel": (("--score", "typ/peak"), "unknown channel 'typ'; did you mean 'type'"),
    "window": (("--score", "integrated@late"), "a time window needs two times"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, run, trained, tmp_path):
    words, expected = BAD[case]
    code, _, err = run("sample", trained, "-n", 2, "--steps", 4, "--device", "cpu", "--out", tmp_path / "out", *words)
    assert code == 2
    assert expected in one_line(err)
    assert not (tmp_path / "out" / "samples.csv").exists()


def test_evaluate_prints_json(run, trained):
    code, out, err = run("evaluate", "crystals", "--checkpoint", trained, "-n", 4, "--device", "cpu", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["bit_for_bit"] is True
    assert found["quality"]["structures"] == 4


def test_demo_refuses_a_recipe(run, tmp_path):
    code, _, err = run("demo", "crystals", "--out", tmp_path / "demo", "--train", "--set", "hidden=8")
    assert code == 2
    assert "shows shipped weights" in one_line(err)
    assert not (tmp_path / "demo").exists()


def test_reproduce_refuses_unknown_tasks(run, tmp_path):
    words = ("reproduce", "crystals", "--data", "prototypes", "--device", "cpu", "--out", tmp_path / "out", *SETS)
    code, _, err = run(*words, "--only", "read:joynt")
    assert code == 2
    assert "unknown reading 'joynt'; did you mean 'joint'" in one_line(err)
    code, _, err = run(*words, "--only", "flow:0")
    assert code == 0, err
    assert [p.name for p in (tmp_path / "out" / "models").iterdir()] == ["flow-cosine-0.safetensors"]


# ---- edit -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    words = ["sample", trained, "-n", 4, "--steps", 4, "--device", "cpu", "--out", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fmwc.crystals.domain, "sorted_by_confidence", lambda *args, **options: None)
        patch.setattr(fmwc.crystals.domain, "png", lambda picture: b"")
        patch.setattr(sys, "argv", ["fmwc", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code
    return folder


@pytest.mark.usefixtures("no_picture")
def test_edit_of_a_channel_is_evaluated_by_the_papers_rules(run, drawn, tmp_path):
    words = ("--channel", "type", "--at", 0.25, "--scale", 3, "--doubtful", 2, "--replicates", 2, "--device", "cpu")
    code, out, err = run("edit", drawn, *words, "--out", tmp_path / "e")
    assert code == 0, err
    rows = table(tmp_path / "e" / "edits.csv")
    assert "chem-swap" in out
    assert "useful: metastable" in out
    for row in rows:
        changed = row["formula_before"] != row["formula_after"]
        assert row["change"] in (("substitution", "other", "") if changed else ("same", "polymorph", ""))
        wanted = row["change"] in ("polymorph", "substitution") and row["metastable_after"] == "true"
        assert (row["useful"] == "true") == wanted
        assert bool(row["matched_rmsd"]) == (row["change"] in ("same", "substitution"))
    assert [row["mode"] for row in rows] == ["chem-swap"] * 4
    assert all(row["chemistry_changed"] == "true" for row in rows)
    before = table(drawn / "samples.csv")
    assert [row["formula_before"] for row in rows] == [before[int(row["sample"])]["formula"] for row in rows]
    after = table(tmp_path / "e" / "samples.csv")
    for name, column in (("formula_after", "formula"), ("e_above_hull_after", "e_above_hull")):
        assert [row[name][:7] for row in rows] == [row[column][:7] for row in after]
    for row in rows:
        fine = row["e_above_hull_before"] and row["e_above_hull_after"] and float(row["coord_rmsd"]) > 0.1
        lower = fine and float(row["e_above_hull_after"]) < float(row["e_above_hull_before"])
        assert (row["success"] == "true") == bool(lower)
    assert (tmp_path / "e" / "edits.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("no_picture")
def test_edit_without_noise_returns_the_crystal(run, drawn, tmp_path):
    words = ("--channel", "lattice", "--at", 0.25, "--scale", 0, "--device", "cpu")
    code, _, err = run("edit", drawn, *words, "--out", tmp_path / "e")
    assert code == 0, err
    rows = table(tmp_path / "e" / "edits.csv")
    assert "mode" not in rows[0]  # the paper has no rule for the lattice
    assert all(row["formula_before"] == row["formula_after"] for row in rows)
    assert all(float(row["coord_rmsd"]) < 1e-4 for row in rows)
    before, after = (fmwc.Trajectory.load(folder) for folder in (drawn, tmp_path / "e"))
    assert before.made["checkpoint"] == after.made["checkpoint"]  # the absolute path of the folder
    assert before.default_score == "echo + 0.5 spread@0.6-1"
    assert after.default_score == "geometric@0.6-0.9"  # edits are ranked by their variance
    assert bool(after.score().isfinite().all())


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("words", [(), ("--at", "critical"), ("--before", 0.25)], ids=str)
def test_edits_are_useful_by_default_and_the_papers_time_is_named(run, drawn, tmp_path, words, monkeypatch):
    default = EditDefault(0.25, 0.07)
    monkeypatch.setattr(fmwc.crystals.domain.CrystalDomain, "edits", {"coord": default})
    words = ("--channel", "coord", *words, "--device", "cpu", "--out", tmp_path / "e")
    code, out, err = run("edit", drawn, *words)
    assert code == 0, err
    times = {float(row["time"]) for row in table(tmp_path / "e" / "edits.csv")}
    assert (times == {default.at}) == (len(words) == 6)
    assert f"{default.scale if len(words) == 6 else EditDefault().scale:g} in coord" in out


def test_every_kind_of_edit_of_a_crystal_has_a_default():
    defaults = fmwc.crystals.domain.CrystalDomain.edits
    assert defaults.keys() == {"type", "coord", "lattice", None}
    assert all(0 <= default.at < 1 and default.scale > 0 for default in defaults.values())


def test_unknown_channel_is_refused_with_a_suggestion(run, drawn, tmp_path):
    code, _, err = run("edit", drawn, "--channel", "typ", "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2
    assert "did you mean 'type'? Known: coord, lattice, type" in one_line(err)
    code, _, err = run("edit", drawn, "--label", 1, "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2
    assert "crystals has no classes" in one_line(err)
    assert not (tmp_path / "out").exists()


# ---- judge ----------------------------------------------------------------------------------------------------------


def write(folder, **structures):
    folder.mkdir()
    for name, candidate in structures.items():
        (folder / f"{name}.cif").write_text(candidate if isinstance(candidate, str) else cif_text(candidate))
    return folder


@pytest.fixture
def mixed(tmp_path):
    """One good structure and five bad ones, each for a different reason."""
    return write(
        tmp_path / "mixed",
        a_salt=rock_salt(),
        b_coincident=crystal([11, 17], [[0, 0, 0], [0.01, 0, 0]], [4, 4, 4]),
        c_collapsed=crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [1, 1, 1]),
        d_needle=crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [3, 3, 300]),
        e_radon=crystal([86], [[0, 0, 0]], [4.4, 4.4, 4.4]),
        f_text="this is no crystal\n",
    )


NAMES = ["a_salt.cif", "b_coincident.cif", "c_collapsed.cif", "d_needle.cif", "e_radon.cif", "f_text.cif"]
PROBLEMS = ["", "", "collapsed", "needle", "no reference for Rn", "contains no structure"]


def test_judge_writes_a_row_with_the_problem_of_each_structure(run, mixed, tmp_path):
    code, out, err = run("judge", mixed, "--json", "--out", tmp_path / "out")
    assert code == 1, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["name"] for row in rows] == NAMES
    for row, message in zip(rows, PROBLEMS, strict=True):
        assert message in row["problem"], row["name"]
        assert (row["problem"] == "") == (row["name"] == "a_salt.cif"), row["name"]
        assert (row["e_above_hull"] is None) == (row["name"] != "a_salt.cif")
        assert row["metastable"] is (row["name"] == "a_salt.cif")
    assert rows[0]["formula"] == "NaCl"
    assert abs(rows[0]["e_above_hull"]) < 0.02
    assert rows[0]["valid"] is True
    assert rows[0]["novel"] is None  # no known structures were given
    assert rows[4]["energy_per_atom"] is not None  # an energy without a reference
    kept = table(tmp_path / "out" / "judged.csv")
    assert [row["name"] for row in kept] == NAMES
    assert [row["problem"] for row in kept] == [row["problem"] for row in rows]
    assert (tmp_path / "out" / "judged.parquet").is_file()
    assert err.count("wrote ") == 2


def test_judge_prints_a_table_and_a_summary(run, mixed):
    code, out, _ = run("judge", mixed)
    assert code == 1
    assert "6 structures" in out
    assert "NaCl" in out
    assert "could not be judged" in out


def test_judge_of_good_structures_exits_with_0(run, tmp_path):
    folder = write(tmp_path / "fine", one=rock_salt(), two=rock_salt(5.7))
    code, out, err = run("judge", folder / "one.cif", folder / "two.cif", "--json")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["problem"] for row in rows] == ["", ""]
    assert [row["unique"] for row in rows] == [True, False]


def test_judge_after_relaxation(run, tmp_path):
    folder = write(tmp_path / "strained", salt=rock_salt(5.2))
    code, out, err = run("judge", folder, "--relax", 2, "--json")
    assert code == 0, err
    row = json.loads(out)
    assert row["energy_per_atom"] < row["energy_raw"] - 1e-3
    assert np.isfinite(row["rmsd"])


def test_judge_compares_a_set_with_the_test_split(run, tmp_path, monkeypatch):
    pytest.importorskip("matminer")
    pytest.importorskip("smact")
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path / "cache"))
    salts = [rock_salt(edge, z, 17, name=f"salt-{z}") for edge, z in ((5.6, 11), (6.3, 19), (6.6, 37))]
    write_cifs(tmp_path / "data" / "test", salts)
    write_cifs(tmp_path / "data" / "train", salts[:1])
    write_cifs(tmp_path / "cifs", salts[:2])
    words = ("judge", tmp_path / "cifs", "--statistics", "--relax", 1, "--out", tmp_path / "out")
    code, _, err = run(*words)
    assert code == 2
    assert "give --data FOLDER" in one_line(err)
    code, out, _ = run(*words, "--data", tmp_path / "data")
    assert code == 0
    numbers = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert [(name, found["structures"]) for name, found in numbers.items()] == [
        ("as given", 2),
        ("relaxed", 2),
        ("test split", 3),
    ]
    assert numbers["as given"]["coverage_precision"] == 1  # these are structures of the test split
    assert numbers["test split"]["compositionally_valid"] == 1
    assert "coverage recall" in out
    assert len(list((tmp_path / "cache" / "fingerprints").iterdir())) == 1  # of the test split


def test_judge_of_a_missing_file(run, tmp_path):
    code, out, _ = run("judge", tmp_path / "nowhere.cif", "--json")
    assert code == 1
    row = json.loads(out)
    assert (row["name"], row["problem"]) == ("nowhere.cif", "no such file")


def test_judge_of_a_folder_without_structures(run, tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    code, _, err = run("judge", tmp_path)
    assert code == 2
    assert "contains no CIF, extended XYZ or POSCAR file" in one_line(err)


def test_missing_calculator_names_its_package(run, mixed, monkeypatch, tmp_path):
    for name in ("mace", "mace.calculators"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = run("judge", mixed, "--calculator", "mace", "--out", tmp_path / "out")
    assert code == 2
    assert "pip install mace-torch" in one_line(err)
    assert out == ""
    assert not (tmp_path / "out").exists()
    code, _, err = run("judge", mixed, "--calculator", "chgent")
    assert code == 2
    assert "did you mean 'chgnet'" in one_line(err)


def test_judge_does_not_write_to_a_folder_in_use(run, tmp_path):
    folder = write(tmp_path / "fine", one=rock_salt())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "judged.csv").write_text("mine")
    code, _, err = run("judge", folder, "--out", tmp_path / "out")
    assert code == 2
    assert "not empty" in one_line(err)
    assert (tmp_path / "out" / "judged.csv").read_text() == "mine"


@pytest.mark.usefixtures("no_picture")
def test_sampled_structures_can_be_judged_again(run, trained, tmp_path):
    assert run("sample", trained, "-n", 12, "--steps", 4, "--device", "cpu", "--out", tmp_path / "a")[0] == 0
    rows = {row["name"]: row for row in table(tmp_path / "a" / "samples.csv")}
    _, out, _ = run("judge", tmp_path / "a" / "cif", "--json")
    again = {row["name"].removesuffix(".cif"): row for row in map(json.loads, out.splitlines())}
    assert again.keys() <= rows.keys()
    judged_names = [name for name in again if rows[name]["e_above_hull"]]
    assert judged_names
    for name in judged_names:
        assert again[name]["e_above_hull"] == pytest.approx(float(rows[name]["e_above_hull"]), abs=1e-3)


# ---- the page of samples ---------------------------------------------------------------------------------------------


def gallery_of(page):
    data = json.loads(re.search(r'class="gallery-data">(.*?)</script>', page.read_text())[1])
    return data, load(b64decode(data["tensors"]))


def test_report_of_samples_uses_their_table_and_links_to_their_files(run, trained, tmp_path, no_picture, monkeypatch):
    words = ("sample", trained, "-n", 6, "--steps", 4, "--device", "cpu", "--atom-doubt")
    assert run(*words, "--elements", "Na,Cl,O", "--out", tmp_path / "a")[0] == 0
    monkeypatch.setattr(fmwc.crystals.domain, "judge", None)  # no structure is judged again
    rows = table(tmp_path / "a" / "samples.csv")
    rows[2]["e_above_hull"] = "0.0625"
    with (tmp_path / "a" / "samples.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    code, out, err = run("report", tmp_path / "a")
    assert code == 0, err
    assert "elements=Na,Cl,O" in out
    data, tensors = gallery_of(tmp_path / "a" / "report" / "report.html")
    assert data["table"]["columns"]["name"] == [row["name"] for row in rows]
    assert data["table"]["columns"]["e_above_hull"][2] == tensors["e_above_hull"][2] == 0.0625
    assert tensors["failed"][2] == 0
    assert all((tmp_path / "a" / "report" / link).is_file() for link in data["about"]["links"])
    assert len(data["about"]["links"]) == 6
    assert len(tensors["doubt"]) == len(tensors["species"])
    assert sorted(tensors["doubt"]) == pytest.approx(np.linspace(0, 1, len(tensors["doubt"])), abs=1e-6)
    assert run("report", tmp_path / "a")[0] == 0  # again

    assert run("filter", tmp_path / "a", "--keep", 0.5, "--out", tmp_path / "b")[0] == 0
    code, out, err = run("report", tmp_path / "b", "--out", tmp_path / "page")
    assert code == 0, err
    data, _ = gallery_of(tmp_path / "page" / "report.html")
    assert [Path(link).stem for link in data["about"]["links"]] == data["table"]["columns"]["name"]
    assert data["about"]["links"][0].startswith("../b/cif/")


def test_samples_without_a_table_are_judged_for_their_page(run, trained, tmp_path, no_picture):
    assert run("sample", trained, "-n", 3, "--steps", 4, "--device", "cpu", "--out", tmp_path / "a")[0] == 0
    energy = [float(row["e_above_hull"] or "nan") for row in table(tmp_path / "a" / "samples.csv")]
    for path in ("samples.csv", "cif/00001.cif"):
        (tmp_path / "a" / path).unlink(missing_ok=True)
    assert run("report", tmp_path / "a")[0] == 0
    data, tensors = gallery_of(tmp_path / "a" / "report" / "report.html")
    np.testing.assert_allclose(tensors["e_above_hull"], energy, rtol=1e-4)
    assert data["about"]["links"][1] == ""


# ---- controls of chemistry -------------------------------------------------------------------------------------------


def formulas(folder):
    return [row["formula"] for row in table(folder / "samples.csv")]


def test_sample_with_a_formula_records_it(run, trained, tmp_path, no_picture):
    words = ("sample", trained, "-n", 5, "--steps", 4, "--device", "cpu", "--formula", "NaCl", "--out", tmp_path / "a")
    code, _, err = run(*words)
    assert code == 0, err
    assert "confidence is withheld" in err
    assert formulas(tmp_path / "a") == ["NaCl"] * 5
    assert "restricted to NaCl, because the network was not trained with given types" in err
    made = fmwc.Trajectory.load(tmp_path / "a").made
    assert made["controls"] == "formula=NaCl"
    code, _, err = run(*words[:-4], "--formula", "KCl", "--out", tmp_path / "a")
    assert code != 0
    assert one_line(err)
    code, _, err = run("check", tmp_path / "a", "--out", tmp_path / "checks", "--device", "cpu")
    assert code == 0, err


def test_sample_of_a_system_has_exactly_its_elements(run, trained, tmp_path, no_picture):
    words = ("sample", trained, "-n", 4, "--steps", 4, "--device", "cpu", "--system", "Li-O", "--atoms", "3-5")
    code, _, err = run(*words, "--out", tmp_path / "a", "--best-of", 2, "--score", "geometric", "--every", 1)
    assert code == 0, err
    numbers = fmwc.crystals.structures.crystals_of(fmwc.Trajectory.load(tmp_path / "a")).numbers
    assert all({*row.tolist()} - {0} == {3, 8} for row in numbers)
    assert all(3 <= int(row["atoms"]) <= 5 for row in table(tmp_path / "a" / "samples.csv"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("crystals", "--elements", "Li,Xx"), "'Xx' is not the symbol of an element"),
        (("crystals", "--formula", "LiFePO4", "--atoms", "28"), "at most 20"),
        (("crystals", "--system", "Li-O", "--exclude", "O"), "system already fixes the elements"),
        (("checkerboard", "--formula", "NaCl"), "checkerboard has no chemistry; leave out --formula"),
    ],
)
def test_wrong_controls_give_one_line(run, tmp_path, words, problem):
    code, _, err = run("sample", *words, "--out", tmp_path / "a", "--device", "cpu")
    assert code != 0
    assert problem in err
    assert one_line(err)
    assert not (tmp_path / "a").exists()


# ---- references, novelty, several judges -----------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A small data set in three splits, with CHGNet energies."""
    monkeypatch.setenv("FMWC_CACHE", str(tmp_path / "cache"))
    salts = {"train": rock_salt(), "val": rock_salt(4.2, 12, 8), "test": rock_salt(6.3, 19, 17)}
    folder, names, values = tmp_path / "data", [], []
    folder.mkdir()
    for split, salt in salts.items():
        made = from_cells({f"mp-{split}": cell_of(salt.structure())}, 20)
        np.savez(folder / f"{split}.npz", **mp20._arrays_of(made))
        names += made.names
        values += energies(made).per_atom.tolist()
    np.savez(folder / mp20.ENERGIES, material_id=np.array(names, "S"), energy_per_atom=np.array(values, np.float32))
    return folder


def rows_of(out):
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("given", ["option", "variable"])
def test_novelty_against_all_splits(run, tmp_path, data, monkeypatch, given):
    monkeypatch.setenv("FMWC_DATA", str(data) if given == "variable" else "")
    option = ("--data", data) if given == "option" else ()
    folder = write(tmp_path / "some", a=rock_salt(6.3, 19), b=rock_salt(4.2, 12, 8), c=rock_salt(4.4, 22, 6))
    code, out, err = run("judge", folder, "--json", *option)
    assert code == 0, err
    found = [(row["novel"], row["twin"], row["twin_split"]) for row in rows_of(out)]
    assert found == [(False, "mp-test", "test"), (False, "mp-val", "val"), (True, "", "")]
    code, out, _ = run("judge", folder, *option)
    assert "novel is unknown" not in out


def test_the_table_says_why_novelty_is_unknown(run, tmp_path):
    code, out, _ = run("judge", write(tmp_path / "some", a=rock_salt()))
    assert code == 0
    assert "novel is unknown" in out
    assert "FMWC_DATA" in out


def test_stability_without_references_is_unknown(run, tmp_path):
    """ThF3 is far below its elements, and MP-20 has no compound of thorium and fluorine."""
    coords = [[0, 0, 0], [0.5, 0, 0], [0, 0.5, 0], [0, 0, 0.5]]
    folder = write(tmp_path / "some", thf3=crystal([90, 9, 9, 9], coords, [4.3] * 3))
    code, out, err = run("judge", folder, "--json")
    assert code == 0, err
    (row,) = rows_of(out)
    assert row["e_above_hull"] is row["stable"] is row["metastable"] is row["sun"] is None
    assert (row["competing_phases"], row["own_phases"], row["sparse_hull"]) == (0, 0, "only elements compete")
    assert row["decomposition"] == "0.75 F2 + 0.25 Th"
    code, out, _ = run("judge", folder)
    assert out.count("0 (0.0%); unknown for 1") == 2  # stable and metastable


def test_judge_reads_a_folder_of_samples(run, tmp_path, drawn):
    folder, other = drawn, write(tmp_path / "other", z=rock_salt())
    names = [row["name"] for row in table(folder / "samples.csv")]
    _, out, err = run("judge", folder, "--json")
    assert [row["name"] for row in rows_of(out)] == names, err
    _, out, _ = run("judge", folder, other, "--json")
    assert [row["name"] for row in rows_of(out)] == [*(f"{folder}/{name}" for name in names), "z.cif"]


def test_samples_of_another_domain_are_refused(run, tmp_path):
    code, _, err = run("sample", "checkerboard", "-n", 4, "--steps", 2, "--device", "cpu", "--out", tmp_path / "points")
    assert code == 0, err
    code, _, err = run("judge", tmp_path / "points")
    assert code == 2
    assert "not crystals" in one_line(err)


def test_no_rows_are_left_out_silently(run, tmp_path, monkeypatch):
    monkeypatch.setattr("fmwc.cli.judge.SHOWN", 2)
    folder = write(tmp_path / "some", a=rock_salt(), b=rock_salt(5.7), c=rock_salt(5.5))
    code, out, _ = run("judge", folder)
    assert code == 0
    assert "the first 2 of 3 structures; print all with --json, or write all with --out" in out
    code, out, _ = run("judge", folder, "--out", tmp_path / "out")
    assert f"all are in {tmp_path / 'out' / 'judged.csv'}" in " ".join(out.split())
    assert len(table(tmp_path / "out" / "judged.csv")) == 3


def test_the_cut_and_its_errors(run, tmp_path):
    folder = write(tmp_path / "some", a=rock_salt(5.2))
    for cut, expected in ((0.001, False), (5, True)):
        code, out, err = run("judge", folder, "--cut", cut, "--json")
        assert code == 0, err
        assert rows_of(out)[0]["metastable"] is expected
    code, _, err = run("judge", folder, "--cut", -1)
    assert code == 2
    assert "cut must be" in one_line(err)


def test_two_judges_and_their_consensus(run, tmp_path, data):
    model = "tests.crystals.test_energy:lennard_jones"
    folder = write(tmp_path / "some", a=rock_salt(5.8), b=rock_salt(5.0))
    words = ("--calculator", f"chgnet,{model}", "--data", data, "--out", tmp_path / "out", "--relax", 1)
    code, out, err = run("judge", folder, "--json", *words)
    assert code == 0, err
    rows = rows_of(out)
    for row in rows:
        assert row[f"energy_per_atom_{model}"] != row["energy_per_atom"]
        verdicts = {row["metastable"], row[f"metastable_{model}"]}
        assert row["consensus"] == (verdicts.pop() if len(verdicts) == 1 else None)
    assert (tmp_path / "out" / "relaxed").is_dir()
    assert len([path for path in (tmp_path / "out").iterdir() if path.name.startswith("relaxed-")]) == 1
    for wrong in ("chgnet,chgnet", ","):
        code, _, err = run("judge", folder, "--calculator", wrong)
        assert code == 2
        assert "name each energy model once" in one_line(err)
