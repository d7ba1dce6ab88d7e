"""Tiny runs of `fmwc train`, `demo` and `report`, and wrong input to any command."""

import contextlib
import io
import json
import re
import shutil
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import load_file, save_file

import fmwc
from fmwc.checkerboard.data import misplaced
from fmwc.checkpoint import shipped
from fmwc.files import WORK
from fmwc.identity import seal
from tests.command import call, one_line
from tests.options import reader

TINY = ["hidden=16", "time_features=8", "iterations=40", "batch=64", "noise_steps=10", "points=2000", "save_every=20"]
SETS = [part for change in TINY for part in ("--set", change)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "model"
    call("train", "checkerboard", "--preset", "quick", "--device", "cpu", "--out", folder, *SETS)
    return folder


def test_train_records_its_recipe_and_provenance(trained):
    record = json.loads((trained / "recipe.json").read_text())
    assert record["recipe"]["hidden"] == 16
    assert record["data"]["fingerprint"]
    assert {"commit", "device", "seconds", "seeds"} <= record["provenance"].keys()
    assert not list(trained.glob("*.resume"))
    assert fmwc.load(trained).reference is not None


def test_train_joint(run, tmp_path):
    code, _, err = run("train", "checkerboard", "--preset", "paper", "--device", "cpu", "--out", tmp_path / "m", *SETS)
    assert code == 0, err
    assert json.loads((tmp_path / "m" / "recipe.json").read_text())["recipe"]["method"] == "joint"


def test_train_resumes_after_a_kill(run, tmp_path, monkeypatch):
    from fmwc import training

    calls = 0
    real = training.save_point

    def killed(*args):
        nonlocal calls
        calls += 1
        real(*args)
        if calls == 1:
            raise KeyboardInterrupt

    words = ("train", "checkerboard", "--preset", "quick", "--device", "cpu", *SETS)
    monkeypatch.setattr(training, "save_point", killed)
    assert run(*words, "--out", tmp_path / "stopped")[0] != 0
    assert list((tmp_path / "stopped" / WORK).glob("*.resume"))
    monkeypatch.setattr(training, "save_point", real)
    assert run(*words, "--out", tmp_path / "stopped")[0] == 0
    assert run(*words, "--out", tmp_path / "straight")[0] == 0
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("stopped", "straight"))
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize(
    ("words", "columns"),
    [
        ((), "name,x_0,x_1,score,rank,confidence,misplaced"),  # a check, valid for any number of steps
        (("--score", "temporal_ratio"), "name,x_0,x_1,score,rank,misplaced"),  # no reference, so no confidence
    ],
    ids=str,
)
def test_sample_writes_a_table_and_a_samples_file(words, columns, run, trained, tmp_path):
    small = ("-n", 50, "--steps", 10, "--keep", 0.8, "--device", "cpu")
    code, _, err = run("sample", trained, *small, *words, "--out", tmp_path)
    assert code == 0, err
    lines = (tmp_path / "samples.csv").read_text().splitlines()
    assert lines[0] == columns
    assert len(lines) == 41
    assert len(fmwc.Trajectory.load(tmp_path)) == 40


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    """A folder that `fmwc demo` wrote, and the text that it printed."""
    folder = tmp_path_factory.mktemp("demo") / "demo"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        call("demo", "--out", folder, "--device", "cpu", "-n", 400)
    return folder, printed.getvalue()


def test_demo_ranks_by_confidence_and_writes_one_page(demonstration):
    folder, out = demonstration
    made = fmwc.Trajectory.load(folder)
    as_it_comes = fmwc.sample(fmwc.load("checkerboard"), 400)
    assert made.default_score == "nearest"
    torch.testing.assert_close(made.confidence, as_it_comes.confidence, atol=2e-3, rtol=0)
    for name in ("nearest", "temporal_ratio"):
        assert f"AUPRC of {name}" in out
    rows = {row[""]: row["value"] for row in json.loads((folder / "numbers.json").read_text())["numbers"]}
    assert rows["nearest: the confidence"] == "distance to the nearest training samples"
    assert rows["temporal_ratio: the variance"] == "late / early uncertainty"
    # The curves, the table and the gallery show the same ranking.
    page = (folder / "report.html").read_text()
    assert 'src="http' not in page
    data = json.loads(re.search(r'class="gallery-data">(.*?)</script>', page)[1])
    tensors = load(b64decode(data["tensors"]))
    bad = tensors["failed"][tensors["order"]] > 0
    worst = misplaced(made.x)[made.score().argsort(descending=True, stable=True)[:40].numpy()]
    assert bad[-40:].sum() == worst.sum()
    expected = made.ranked_by("temporal_ratio").rank
    np.testing.assert_allclose(data["table"]["columns"]["variance"], expected.numpy(), atol=1e-4)


def test_report_of_a_checkpoint(run, trained, tmp_path):
    code, _, err = run("report", trained, "--out", tmp_path, "-n", 200, "--device", "cpu")
    assert code == 0, err
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_report_of_samples(run, trained, tmp_path):
    words = ("sample", trained, "-n", 60, "--steps", 6, "--device", "cpu", "--out", tmp_path / "a")
    assert run(*words)[0] == 0
    code, out, err = run("report", tmp_path / "a", "--device", "cpu")
    assert code == 0, err
    assert "drawn with" in out
    page = (tmp_path / "a" / "report" / "report.html").read_text()
    data = json.loads(re.search(r'class="gallery-data">(.*?)</script>', page)[1])
    run_x = fmwc.Trajectory.load(tmp_path / "a").x.numpy()
    np.testing.assert_array_equal(load(b64decode(data["tensors"]))["x"], run_x)


def test_report_of_samples_of_another_checkpoint_is_refused(run, trained, tmp_path):
    assert run("sample", trained, "-n", 5, "--steps", 6, "--device", "cpu", "--out", tmp_path / "a")[0] == 0
    for words, problem in (
        (("--checkpoint", "checkerboard"), "did not draw"),
        (("--checkpoint", "nothing"), "unknown checkpoint"),
        (("--seed", 1), "--count and --seed are for the page of a checkpoint"),
        (("--out", tmp_path / "a"), "is the folder of the samples"),
    ):
        code, _, err = run("report", tmp_path / "a", "--device", "cpu", *words)
        assert code != 0
        assert problem in one_line(err)
    assert not (tmp_path / "a" / "report").exists()
    code, _, err = run("report", trained, "--checkpoint", "mnist", "--out", tmp_path / "p")
    assert "is not a folder of samples" in one_line(err)


@pytest.mark.parametrize("name", ["checkerboard", "checkerboard-joint"])
def test_shipped_weights_load_and_sample(name):
    field = fmwc.load(name)
    on, off = (fmwc.sample(field, 200, steps=50, seed=1, confidence=reader(c)) for c in (True, False))
    assert torch.equal(on.x, off.x)
    assert on.reference is not None
    assert 0 <= float(on.confidence.min()) <= float(on.confidence.max()) <= 1
    assert set(shipped()) >= {name}


BAD = {
    "recipe": (("train", "checkboard", "--out", "{out}"), "did you mean 'checkerboard'"),
    "preset": (("train", "checkerboard", "--preset", "papr", "--out", "{out}"), "did you mean 'paper'"),
    "field": (("train", "checkerboard", "--set", "hiden=3", "--out", "{out}"), "did you mean 'hidden'"),
    "value": (
        ("train", "checkerboard", "--set", "hidden=wide", "--out", "{out}"),
        "'hidden' must be a whole number of at most 64 bits, got 'wide'",
    ),
    "no value": (("train", "checkerboard", "--set", "hidden", "--out", "{out}"), "key=value"),
    "zero": (("train", "checkerboard", "--set", "hidden=0", "--out", "{out}"), "must lie between 1 and"),
    "odd": (("train", "checkerboard", "--set", "time_features=7", "--out", "{out}"), "even"),
    "prior": (("train", "checkerboard", "--set", "prior_rate=2", "--out", "{out}"), "between 0 and 1"),
    "score": (("sample", "checkerboard", "--score", "peek", "--out", "{out}"), "did you mean 'peak'"),
    "dispersion": (("sample", "checkerboard", "--score", "dispersion", "--out", "{out}"), "add --transport"),
    "other device": (("sample", "checkerboard", "--device", "meta", "--out", "{out}"), "auto, cpu or cuda"),
    "decay": (("train", "checkerboard", "--set", "decay=cosin", "--out", "{out}"), "did you mean 'cosine'"),
    "device": (("sample", "checkerboard", "--device", "cdua", "--out", "{out}"), "auto, cpu or cuda"),
    "checkpoint": (("sample", "chekerboard", "--out", "{out}"), "did you mean 'checkerboard'"),
    "propagation": (
        ("sample", "checkerboard", "--propagation", "linear", "--out", "{out}"),
        "did you mean 'linearised'",
    ),
    "stepper": (("sample", "checkerboard", "--stepper", "eulr", "--out", "{out}"), "did you mean 'euler'"),
    "keep": (("sample", "checkerboard", "--keep", "1.5", "--out", "{out}"), "(0, 1]"),
    "steps": (
        ("sample", "checkerboard", "--steps", "0", "--out", "{out}"),
        "'--steps': Input should be greater than or equal to 1",
    ),
    "seeds": (("reproduce", "checkerboard", "--seeds", "a,b", "--out", "{out}"), "integers separated by commas"),
    "results": (("report", "{out}/nothing"), "unknown checkpoint"),
    "demo's recipe": (("demo", "--set", "hidden=8", "--out", "{out}"), "add --train"),
    "verb": (("sampel",), "Did you mean 'sample'"),
    "option": (("demo", "--sede", "1"), "see fmwc demo --help"),
    "type": (("sample", "checkerboard", "-n", "many", "--out", "{out}"), "valid integer"),
    "no option": (("sample", "checkerboard"), "Missing option"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_and_exit_code_2(case, run, tmp_path):
    words, expected = BAD[case]
    code, _, err = run(*(w.format(out=tmp_path / "out") for w in words))
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("fmwc:")]
    assert len(lines) == 1
    assert expected in lines[0]


def test_files_in_a_folder_that_is_not_empty_are_not_changed(run, trained, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for words in (
        ("sample", trained, "--device", "cpu", "--out", tmp_path),
        ("train", "checkerboard", "--out", tmp_path, *SETS),
        ("demo", "--out", tmp_path),
        ("report", trained, "--out", tmp_path),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert "not empty" in err
    before = (trained / "recipe.json").read_bytes()
    words = ("train", "checkerboard", "--preset", "quick", "--device", "cpu", "--out", trained, *SETS)
    assert run(*words)[0] == 0  # already finished
    code, _, err = run(*words, "--seed", 1)
    assert code == 2
    assert "fmwc train was finished there: seed: 0 before, 1 now" in err
    assert (trained / "recipe.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_second_demo_replaces_only_the_files_of_the_first(run, demonstration, tmp_path):
    folder = tmp_path / "demo"
    shutil.copytree(demonstration[0], folder)
    ours = {p.name for p in folder.iterdir()}
    (folder / "thesis.txt").write_text("mine")
    (folder / "report.html").unlink()
    code, _, err = run("demo", "--train", "--seed", 1, "--out", folder, "--device", "cpu", "-n", 50, *SETS)
    assert code == 0, err
    assert {p.name for p in folder.iterdir()} == {*ours, "model", "thesis.txt"}
    assert (folder / "thesis.txt").read_text() == "mine"
    assert json.loads((folder / "model" / "recipe.json").read_text())["recipe"]["seed"] == 1


def test_demo_does_not_write_into_a_folder_with_other_files(run, tmp_path):
    (tmp_path / ".fmwc-demo").write_text("")  # written by an earlier version
    (tmp_path / "samples.csv").write_text("mine")  # a name that fmwc demo also writes
    code, _, err = run("demo", "--out", tmp_path, "--device", "cpu", "-n", 50)
    assert code == 2
    assert "not empty" in err
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {".fmwc-demo": "", "samples.csv": "mine"}


def test_demo_does_not_replace_a_file_of_the_user_with_a_name_it_needs(run, demonstration, tmp_path):
    folder = tmp_path / "demo"
    shutil.copytree(demonstration[0], folder)
    (folder / "model").mkdir()
    (folder / "model" / "recipe.json").write_text("mine")
    code, _, err = run("demo", "--train", "--out", folder, "--device", "cpu", "-n", 50, *SETS)
    assert code == 2, err
    assert (folder / "model" / "recipe.json").read_text() == "mine"


def test_an_output_path_that_is_a_file_is_rejected(run, trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for words in (("train", "checkerboard", *SETS), ("sample", trained, "--device", "cpu")):
            code, _, err = run(*words, "--out", out)
            assert code == 2
            assert len([line for line in err.splitlines() if line.startswith("fmwc:")]) == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_damaged_checkpoints_are_rejected(run, trained, tmp_path):
    def copy(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in trained.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    cut = copy("cut")
    (cut / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:1000])
    newer = copy("newer")
    record = json.loads((trained / "recipe.json").read_text())
    (newer / "recipe.json").write_text(json.dumps(seal(record | {"format": 99})))
    other, edited = copy("other"), copy("edited")
    record["network"]["config"]["hidden"] = 17
    (other / "recipe.json").write_text(json.dumps(seal(record)))
    (edited / "recipe.json").write_text(json.dumps(record))
    nan = copy("nan")
    weights = load_file(trained / "model.safetensors")
    weights["network.out.bias"][0] = float("nan")
    save_file(weights, nan / "model.safetensors")
    wanted = {
        cut: "truncated",
        newer: "upgrade fmwc",
        other: "another architecture",
        edited: "was changed after it was written",
        nan: "is not the file that was saved",
    }
    for folder, expected in wanted.items():
        code, _, err = run("sample", folder, "--device", "cpu", "--out", tmp_path / "out")
        assert code == 2
        assert expected in err
        assert not (tmp_path / "out").exists()


def test_shipped_weights_are_small():
    assert all(p.stat().st_size < 6e6 for p in Path(fmwc.weights.__file__).parent.rglob("*.safetensors"))
