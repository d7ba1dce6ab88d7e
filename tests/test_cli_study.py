"""`python -m experiments study` and `fmwc report` on its folder from the command line."""

import json

import pytest

from experiments.uses.study import REPORTED, VALIDATION, study
from fmwc.files import MANIFEST
from tests.command import one_line

SIZES = "samples=20,edited=2,replicates=1,swept=2,rewound=2,guided=4"
WORDS = ("--set", SIZES, "--device", "cpu")


def test_a_study_is_drawn_read_and_reported(run, tmp_path):
    out = tmp_path / "study"
    words = ("--seeds", "200,201", "--only", "draw:guide,read:guide")
    code, text, err = run("study", "checkerboard", *words, *WORDS, "--out", out)
    assert code == 0, err
    assert "seed 201, guide: drew none in" in err
    assert "wrote 201-draw-guide.json" in err
    assert "tables.md" in text
    assert "Guidance" in (out / "tables.md").read_text()
    names = {path.name for path in out.iterdir() if path.name != MANIFEST}
    assert names == {"draws", "outcomes", "pieces", "figures", "uses.json", "tables.md", "report.html"}
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    (out / "tables.md").unlink()
    code, text, err = run("experiments", "report", out)
    assert code == 0, err
    assert (out / "report.html").read_bytes() == page
    assert (out / "tables.md").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", "draw:edits"), "unknown drawing 'edits'; did you mean 'edit'?"),
        (("--only", "paint:edit"), "unknown task 'paint'"),
        (("--seeds", "1,two"), "--seeds must be integers separated by commas, got '1,two'"),
        (("--set", "edit=3"), "unknown size 'edit'; did you mean 'edited'?"),
        (("--set", "edited=few"), "size 'edited' must be a whole number"),
        (("--set", "edited=0"), "size 'edited' must lie between 1 and"),
        (("--data", "here"), "checkerboard generates its data"),
        (("--checkpoint", "mnist"), "mnist is a checkpoint of mnist; use python -m experiments study mnist"),
        (("--judge", "mnist-judge"), "needs no judge"),
    ],
)
def test_wrong_options_are_reported_in_one_line_and_create_no_folder(words, message, run, tmp_path):
    code, _, err = run("study", "checkerboard", *words, "--device", "cpu", "--out", tmp_path / "s")
    assert code == 2
    assert message in one_line(err)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("reproduce", "checkerboard", "--only", "flow:0", "--out"), "not split into tasks; leave out --only"),
        (("evaluate", "checkerboard", "--data"), "generates its data; leave out --data"),
    ],
    ids=["tasks", "data"],
)
def test_options_that_the_checkerboard_does_not_use_are_refused(words, message, run, tmp_path):
    code, _, err = run(*words, tmp_path / "s")
    assert code == 2
    assert message in err
    assert not (tmp_path / "s").exists()


def test_other_folders_and_other_sizes_are_left_alone(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").write_text("mine")
    code, _, err = run("study", "checkerboard", *WORDS, "--out", tmp_path / "mine")
    assert code == 2
    assert "is not empty (work.txt) and nothing in it was changed" in one_line(err)
    out, only = tmp_path / "s", ("--only", "draw:guide", "--seeds", "1", "--device", "cpu")
    code, _, err = run("study", "checkerboard", *only, "--set", "guided=2", "--out", out)
    assert code == 0, err
    assert not (out / "uses.json").exists()
    code, _, err = run("study", "checkerboard", *only, "--set", "guided=3", "--out", out)
    assert code == 2
    assert "made with other settings (sizes." in one_line(err)
    code, _, err = run("study", "checkerboard", "--only", "read:edit", "--seeds", "1", "--out", out)
    assert code == 2
    assert "holds no draw:edit of seed 1" in one_line(err)


@pytest.mark.parametrize(("words", "seeds"), [((), REPORTED), (("--wide",), VALIDATION), (("--seeds", "7"), [7])])
def test_default_seeds_were_not_used_to_choose_anything(words, seeds, run, tmp_path, monkeypatch):
    asked = {}

    def instead(experiment, out, **options):
        asked.update(options)

    monkeypatch.setattr("experiments.uses.study.study", instead)
    code, _, err = run("study", "checkerboard", *words, *WORDS, "--out", tmp_path)
    assert code == 0, err
    assert list(asked["seeds"]) == list(seeds)
    assert asked["wide"] is ("--wide" in words)


def test_study_without_the_test_split_of_digits_reports_it(run, tmp_path, monkeypatch):
    monkeypatch.delenv("FMWC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = []
    monkeypatch.setattr("experiments.uses.study.study", lambda experiment, out, **options: asked.append(experiment))
    code, _, err = run("study", "mnist", *WORDS, "--out", tmp_path / "s")
    assert code == 0, err
    assert "FID not computed" in err
    assert "fid" not in asked[0].metrics
    assert asked[0].sizes.samples == 20


def test_the_command_gives_the_numbers_of_the_function(run, tmp_path):
    from experiments.common.experiment import Sizes
    from fmwc.checkpoint import load
    from tests.recipes.studies import points

    only = "draw:guide,read:guide"
    code, _, err = run("study", "checkerboard", "--seeds", "1", "--only", only, *WORDS, "--out", tmp_path / "a")
    assert code == 0, err
    experiment = points(load("checkerboard"), Sizes(20, 2, 1, 2, 2, 4))
    study(experiment, tmp_path / "b", seeds=(1,), only=only, say=lambda text: None)
    found = [json.loads((tmp_path / name / "uses.json").read_text())["numbers"] for name in "ab"]
    for numbers in found:
        for row in numbers["guide"].values():
            del row["seconds"]
    assert found[0] == found[1]
