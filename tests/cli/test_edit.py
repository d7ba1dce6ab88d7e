"""`fmwc edit` on points and digits, on runs with different samplers, and with wrong input."""

import pytest
import torch

import fmwc
from fmwc.checkerboard.data import misplaced, squares
from fmwc.registry import domain_named
from fmwc.sampling import Trajectory
from fmwc.uses.continuation import with_states
from fmwc.uses.edit import critical_time, edit
from tests.command import call, one_line, rows
from tests.conftest import mlp_field

COUNT, STEPS = 30, 10


def draw(folder, *words):
    call("sample", "checkerboard", "-n", COUNT, "--steps", STEPS, "--device", "cpu", "--out", folder, *words)
    return folder


@pytest.fixture(autouse=True)
def _small_pilot(monkeypatch):
    monkeypatch.setattr(type(domain_named("checkerboard")), "pilot", lambda self, device: 50)


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """A folder that `fmwc sample checkerboard` wrote."""
    return draw(tmp_path_factory.mktemp("points"))


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The same points, drawn with their variance."""
    return draw(tmp_path_factory.mktemp("read"), "--score", "temporal_ratio")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    call("sample", "mnist", "-n", 3, "--steps", 4, "--seed", 5, "--device", "cpu", "--out", folder)
    return folder


def is_picture(path):
    return path.read_bytes()[:4] == b"\x89PNG"


# ---- what is written ---------------------------------------------------------------------------------------------


def test_edits_equal_the_library_function_and_the_table_describes_them(run, points, read, tmp_path):
    words = ("--before", 0.2, "--scale", 0.5, "--replicates", 2, "--seed", 3, "--device", "cpu")
    code, out, err = run("edit", points, "--out", tmp_path / "e", *words)
    assert code == 0, err
    assert "in another square" in out
    before, after = Trajectory.load(read), Trajectory.load(tmp_path / "e")
    torch.testing.assert_close(before.x, Trajectory.load(points).x)
    field = fmwc.load("checkerboard")
    start = (critical_time(before) - 0.2).clamp_min(0)
    expected = edit(field, before, None, at=start, scale=0.5, replicates=2, seed=3)
    torch.testing.assert_close(after.x, expected.x)
    torch.testing.assert_close(after.score(), expected.score())

    table = rows(tmp_path / "e" / "edits.csv")
    index = torch.arange(COUNT).repeat_interleave(2)
    assert [int(row["sample"]) for row in table] == index.tolist()
    assert [row["square_before"] for row in table] == squares(before.x[index])
    assert [row["square_after"] for row in table] == squares(after.x)
    assert [row["misplaced_after"] == "true" for row in table] == misplaced(after.x).tolist()
    assert {row["turned"] for row in table} == {"true", "false"}
    times = torch.tensor([float(row["time"]) for row in table])
    assert bool(((start[index] - times > -1e-4) & (start[index] - times < 1 / STEPS)).all())  # at the start of a step
    assert len(rows(tmp_path / "e" / "samples.csv")) == 2 * COUNT
    assert is_picture(tmp_path / "e" / "edits.png")


RUNS = {
    "default": (),
    "stepper": ("--stepper", "midpoint"),
    "times per sample": ("--controller", "ema"),
    "guided": ("--guide", 0.3, "--guide-window", "0.2-0.8"),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_edit_without_noise_reproduces_the_run(name, run, tmp_path):
    draw(tmp_path / "a", *RUNS[name])
    draw(tmp_path / "read", *RUNS[name], "--score", "temporal_ratio")
    code, _, err = run("edit", tmp_path / "a", "--scale", 0, "--at", 0.3, "--device", "cpu", "--out", tmp_path / "b")
    assert code == 0, err
    before, after, read = (Trajectory.load(tmp_path / name) for name in ("a", "b", "read"))
    torch.testing.assert_close(after.x, before.x, rtol=0, atol=1e-5)
    torch.testing.assert_close(after.score(), read.score(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--only", "7,3"), [7, 3]),
        (("--surest", 2), "surest"),
        (("--doubtful", 2), "doubtful"),
        (("--at", "random", "--only", "1"), [1]),
    ],
)
def test_only_the_chosen_samples_are_edited(words, expected, run, points, tmp_path):
    code, _, err = run("edit", points, *words, "--device", "cpu", "--out", tmp_path / "e")
    assert code == 0, err
    order = Trajectory.load(points).score().argsort(stable=True).tolist()
    expected = {"surest": order[:2], "doubtful": order[::-1][:2]}.get(str(expected), expected)
    assert [int(row["sample"]) for row in rows(tmp_path / "e" / "edits.csv")] == expected


def test_a_digit_changes_its_class(run, digits, tmp_path):
    words = ("--label", 3, "--scale", 0, "--device", "cpu")
    code, out, err = run("edit", digits, "--at", 0, *words, "--out", tmp_path / "all")
    assert code == 0, err
    assert "classified as requested" in out
    call(
        "sample", "mnist", "-n", 3, "--steps", 4, "--seed", 5, "--label", 3, "--device", "cpu", "--out", tmp_path / "3"
    )
    edited, drawn = Trajectory.load(tmp_path / "all"), Trajectory.load(tmp_path / "3")
    torch.testing.assert_close(edited.x, drawn.x, rtol=0, atol=1e-4)  # an edit at t = 0 draws a sample of that class
    assert edited.cond["y"].tolist() == [3, 3, 3]
    table = rows(tmp_path / "all" / "edits.csv")
    assert [(row["asked_before"], row["asked_after"]) for row in table] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert float(table[0]["pixel_distance"]) > 0.01
    assert is_picture(tmp_path / "all" / "edits.png")
    assert run("edit", digits, "--at", 0.8, *words, "--out", tmp_path / "late")[0] == 0
    assert (Trajectory.load(tmp_path / "late").x - edited.x).abs().max() > 0.1  # a late edit keeps earlier decisions


# ---- where samples come from -------------------------------------------------------------------------------------


def test_samples_that_cannot_be_recomputed_are_rejected(run, points, tmp_path):
    def refused(source, expected, *words):
        code, _, err = run("edit", source, "--device", "cpu", "--out", tmp_path / "out", *words)
        assert code == 2
        assert expected in one_line(err)
        assert not (tmp_path / "out").exists()

    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((points / "samples.safetensors").read_bytes()[:500])
    refused(broken, "truncated")
    refused(points, "draw", "--checkpoint", "checkerboard-joint")
    own = tmp_path / "own"
    own.mkdir()
    fmwc.sample(mlp_field(), 4, steps=3).save(own)
    refused(own, "network")
    draw(tmp_path / "plain", "--propagation", "none")
    refused(tmp_path / "plain", "variance")
    draw(tmp_path / "damped", "--controller", "damped")
    refused(tmp_path / "damped", "damped")


# ---- bad input ---------------------------------------------------------------------------------------------------

BAD = {
    "channel": (("--channel", "type"), "channel"),
    "time": (("--at", "critcal"), "critical"),
    "replicates": (("--replicates", 0), "greater"),
    "two ways": (("--surest", 3, "--only", "1"), "contradict"),
    "twice": (("--only", "1,1"), "distinct"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_and_writes_nothing(case, run, points, tmp_path):
    words, expected = BAD[case]
    code, _, err = run("edit", points, "--out", tmp_path / "out", *words)
    assert code == 2
    assert expected in one_line(err)
    assert not (tmp_path / "out").exists()


def test_another_field_than_the_recorded_one_is_detected(points):
    with pytest.raises(fmwc.errors.UsageError, match="different"):
        with_states(fmwc.load("checkerboard-joint"), Trajectory.load(points))
