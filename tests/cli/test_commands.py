"""Tiny runs of `fmwc train`, `demo` and `report`, and wrong input to any command."""

import contextlib
import io
import json
import re
from base64 import b64decode

import numpy as np
import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import load_file

import fmwc
from fmwc.checkerboard.data import misplaced
from fmwc.files import WORK
from tests.command import call

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


BAD = {
    "preset": (("train", "checkerboard", "--preset", "papr", "--out", "{out}"), "paper"),
    "value": (
        ("train", "checkerboard", "--set", "hidden=wide", "--out", "{out}"),
        "wide",
    ),
    "no value": (("train", "checkerboard", "--set", "hidden", "--out", "{out}"), "key=value"),
    "checkpoint": (("sample", "chekerboard", "--out", "{out}"), "checkerboard"),
    "steps": (
        ("sample", "checkerboard", "--steps", "0", "--out", "{out}"),
        "--steps",
    ),
    "verb": (("sampel",), "sample"),
    "no option": (("sample", "checkerboard"), "Missing"),
    "demo's recipe": (("demo", "--set", "hidden=8", "--out", "{out}"), "--train"),
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
    assert "seed: 0 before, 1 now" in err
    assert (trained / "recipe.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_output_path_that_is_a_file_is_rejected(run, trained, tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for words in (("train", "checkerboard", *SETS), ("sample", trained, "--device", "cpu")):
            code, _, err = run(*words, "--out", out)
            assert code == 2
            assert len([line for line in err.splitlines() if line.startswith("fmwc:")]) == 1
    assert (tmp_path / "file").read_text() == "mine"
