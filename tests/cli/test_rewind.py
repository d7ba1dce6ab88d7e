"""`fmwc rewind`: evaluations, the samples that are kept, and wrong input."""

from dataclasses import replace

import pytest
import torch

import fmwc
from fmwc.checkerboard.data import misplaced
from fmwc.cli.edit import ranked_by_variance, within_condition
from fmwc.estimators import Linearised
from fmwc.registry import domain_named
from fmwc.sampling import Trajectory
from fmwc.sampling.trajectory import Standard
from fmwc.uses.continuation import with_states
from fmwc.uses.rewind import resample
from tests.command import call, one_line, rows

COUNT = 60


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """A folder that `fmwc sample checkerboard` wrote."""
    folder = tmp_path_factory.mktemp("points")
    call("sample", "checkerboard", "-n", COUNT, "--steps", 10, "--device", "cpu", "--out", folder)
    return folder


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """The same points, drawn with their variance."""
    folder = tmp_path_factory.mktemp("read")
    words = ("-n", COUNT, "--steps", 10, "--score", "temporal_ratio", "--device", "cpu")
    call("sample", "checkerboard", *words, "--out", folder)
    return folder


def test_rewinding_equals_the_library_function_and_the_table_describes_it(run, points, read, tmp_path):
    words = ("--extra", 3, "--share", 0.2, "--before", 0.3, "--scale", 0.4, "--seed", 1, "--device", "cpu")
    code, out, err = run("rewind", points, *words, "--out", tmp_path / "r")
    assert code == 0, err
    before, after, field = Trajectory.load(read), Trajectory.load(tmp_path / "r"), fmwc.load("checkerboard")
    whole, spent = with_states(field, before)
    expected = resample(field, whole, 3 * COUNT, share=0.2, before=0.3, scale=0.4, seed=1)
    torch.testing.assert_close(after.x, expected.run.x)
    table = rows(tmp_path / "r" / "rewound.csv")
    assert [int(row["branch"]) for row in table] == expected.branch.tolist()
    assert any(int(row["branch"]) > 1 for row in table)  # the number of the round
    for row in table:
        changed = float(row["score_after"]) < float(row["score_before"])
        assert changed == (row["branch"] != "0")
    assert [row["bad_after"] == "true" for row in table] == misplaced(after.x).tolist()
    assert f"{expected.evaluations / COUNT:.2f} of 3" in out
    assert f"{spent / COUNT:.0f} " in out
    assert "misplaced" in out
    assert len(rows(tmp_path / "r" / "samples.csv")) == COUNT
    code, _, err = run("rewind", tmp_path / "r", "--extra", 3, "--device", "cpu", "--out", tmp_path / "again")
    assert code == 2
    assert "come from fmwc rewind" in one_line(err)


@pytest.mark.parametrize("words", [(), ("--fresh",)], ids=["rewound", "anew"])
def test_the_variance_is_recomputed_if_it_was_computed_at_few_times(words, run, tmp_path):
    call("sample", "checkerboard", "-n", COUNT, "--adaptive", "--device", "cpu", "--out", tmp_path / "few")
    assert Trajectory.load(tmp_path / "few").made["few"]
    code, _, err = run("rewind", tmp_path / "few", "--extra", 10, *words, "--device", "cpu", "--out", tmp_path / "r")
    assert code == 0, err
    table = rows(tmp_path / "r" / "rewound.csv")
    assert any(row["branch"] != "0" for row in table)
    for row in table:
        assert (float(row["score_after"]) < float(row["score_before"])) == (row["branch"] != "0")


def test_samples_of_the_baseline_can_be_rewound_again(run, points, read, tmp_path):
    code, out, err = run("rewind", points, "--extra", 4, "--fresh", "--device", "cpu", "--out", tmp_path / "f")
    assert code == 0, err
    assert "recompute a trajectory" in out  # for the variance
    after = Trajectory.load(tmp_path / "f")
    moved = torch.tensor([row["branch"] != "0" for row in rows(tmp_path / "f" / "rewound.csv")])
    assert bool(moved.any())
    before = Trajectory.load(read)
    assert torch.equal((after.x0 != before.x0).any(1), moved)
    assert bool((after.score() <= before.score() + 1e-5).all())
    assert (after.made["propagation"], after.made["selected"]) == ("linearised", "rewind")
    code, _, err = run("edit", tmp_path / "f", "--scale", 0, "--device", "cpu", "--out", tmp_path / "e")
    assert code == 0, err
    torch.testing.assert_close(Trajectory.load(tmp_path / "e").x, after.x)


def test_digits_are_compared_within_their_class(run, tmp_path):
    words = ("-n", 4, "--steps", 4, "--device", "cpu", "--out", tmp_path / "d")
    assert run("sample", "mnist", *words)[0] == 0
    words = ("--extra", 2, "--share", 0.5, "--device", "cpu")
    code, out, err = run("rewind", tmp_path / "d", *words, "--out", tmp_path / "r")
    assert code == 0, err
    assert "failed" in out
    after = Trajectory.load(tmp_path / "r")
    assert after.cond["y"].tolist() == [0, 1, 2, 3]
    assert after.default_score == "integrated"
    table = rows(tmp_path / "r" / "rewound.csv")
    assert any(row["branch"] != "0" for row in table)
    for row in table:
        assert (float(row["score_after"]) < float(row["score_before"])) == (row["branch"] != "0")


def test_scores_are_standardised_within_classes_if_there_are_enough_samples():
    field, count = fmwc.load("checkerboard"), 40
    known = field.schedule.reference._replace(standard=Standard("y", torch.zeros(2), torch.ones(2)))
    field.schedule = replace(field.schedule, reference=known)
    run = fmwc.sample(field, count, steps=10, confidence=Linearised())
    run = replace(run, cond={"y": torch.arange(count) % 2})
    plain = ranked_by_variance(run, field, domain_named("checkerboard"))
    within = within_condition(plain, field)
    assert (plain.standard, within.default_score) == (None, "temporal_ratio")
    torch.testing.assert_close(within.score(), plain.score("temporal_ratio", within="y"))
    few = plain.take(torch.arange(6))
    assert within_condition(few, field) is few


BAD = {
    "extra": (("--extra", 0), "'--extra': Input should be"),
    "share": (("--extra", 2, "--share", 0), "(0, 1]"),
    "before": (("--extra", 2, "--before=-0.1"), "at least 0"),
    "scale": (("--extra", 2, "--scale", "nan"), "at least 0"),
    "checkpoint": (("--extra", 2, "--checkpoint", "checkerboard-joint"), "did not draw"),
    "judge": (("--extra", 2, "--judge", "me"), "needs no judge"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line_and_writes_nothing(case, run, points, tmp_path):
    words, expected = BAD[case]
    code, _, err = run("rewind", points, "--device", "cpu", "--out", tmp_path / "out", *words)
    assert code == 2
    assert expected in one_line(err)
    assert not (tmp_path / "out").exists()


def test_samples_without_a_score_cannot_be_rewound(run, tmp_path):
    words = ("-n", 5, "--steps", 5, "--propagation", "none", "--device", "cpu", "--out", tmp_path / "plain")
    assert run("sample", "checkerboard", *words)[0] == 0
    code, _, err = run("rewind", tmp_path / "plain", "--extra", 2, "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2
    assert "drawn without their variance" in one_line(err)
    assert not (tmp_path / "out").exists()
