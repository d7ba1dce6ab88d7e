"""`fmwc learn`: from labels to a head, and the head in `fmwc sample` and `fmwc filter`."""

import json

import numpy as np
import pytest
import torch

import fmwc
from fmwc.checkerboard.data import misplaced
from fmwc.checkpoint import about
from fmwc.files import write_text
from fmwc.sampling import Trajectory
from fmwc.uses.heads import EvidenceHead, cross_validated
from tests.command import call, one_line, rows

COUNT, STEPS = 400, 4  # few steps misplace many points


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


def draw(folder, seed, *words, steps=STEPS):
    words = ("--steps", steps, "--seed", seed, "--device", "cpu", *words)
    call("sample", "checkerboard", "-n", COUNT, "--out", folder, *words)
    return folder


@pytest.fixture(scope="module")
def rounds(tmp_path_factory):
    """A first round of samples, a head fitted to 200 of its labels, and a second round that the head ranks."""
    base = tmp_path_factory.mktemp("rounds")
    bad = misplaced(Trajectory.load(draw(base / "first", 0)).x)
    lines = [f"{i:05d},{0.3 if b else 0.01}\n" for i, b in enumerate(bad)][:200]
    write_text(base / "dft.csv", "name,energy\n" + "".join(lines))
    call("learn", base / "first", "--labels", base / "dft.csv", "--good", "energy <= 0.1", "--out", base / "head")
    draw(base / "second", 1, "--head", base / "head")
    return base


def test_a_head_is_fitted_to_labels_and_written(run, rounds, tmp_path):
    first = Trajectory.load(rounds / "first")
    bad = misplaced(first.x)[:200]
    assert 20 < bad.sum() < 180
    code, out, err = run(
        "learn", rounds / "first", "--labels", rounds / "dft.csv", "--bad", "energy > 0.1", "--out", tmp_path / "head"
    )
    assert code == 0, err
    assert (tmp_path / "head" / "head.json").read_bytes() == (rounds / "head" / "head.json").read_bytes()
    head = EvidenceHead.load(tmp_path / "head")
    assert (head.labelled, head.failed, head.seed) == (200, int(bad.sum()), 0)
    table = rows(tmp_path / "head" / "learn.csv")
    assert [row["failed"] == "true" for row in table] == bad.tolist()
    held = cross_validated(first.take(torch.arange(200)), bad)
    np.testing.assert_allclose([float(row["score"]) for row in table], held, rtol=1e-5)
    assert f"200 of {COUNT} samples; {bad.sum()} failed" in out
    fewest = sorted(range(200), key=lambda i: held[i])[:40]
    assert f"{bad[fewest].sum() / 40:.1%} [" in out  # failures among the surest 20 %
    assert "against the default score, nearest" in out


def test_a_head_ranks_new_samples_and_their_labels_make_a_promise(run, rounds, tmp_path):
    second, head = Trajectory.load(rounds / "second"), EvidenceHead.load(rounds / "head")
    plain = Trajectory.load(draw(tmp_path / "plain", 1))
    torch.testing.assert_close(second.x, plain.x)  # the samples are the same; only their order is new
    np.testing.assert_allclose(second.score(), head.score(plain), rtol=1e-5)
    words = ("--max-risk", 0.5, "--labels", "misplaced")
    code, out, err = run("filter", rounds / "second", *words, "--out", tmp_path / "kept")
    assert code == 0, err
    assert "samples with head ≤" in out
    code, out, err = run("filter", tmp_path / "plain", *words, "--head", rounds / "head", "--out", tmp_path / "later")
    assert code == 0, err
    promises = [json.loads((tmp_path / name / "promise.json").read_text()) for name in ("kept", "later")]
    assert promises[0] == promises[1]
    assert promises[0]["for"]["head"] == head.identity
    code, _, err = run("filter", tmp_path / "plain", "--promise", tmp_path / "kept", "--out", tmp_path / "without")
    assert code == 2
    assert "was made for other samples" in one_line(err)


def test_ranking_by_a_head_needs_no_new_draw_but_guarantees_need_one(run, rounds, tmp_path):
    words = ("filter", rounds / "first", "--head", rounds / "head")
    code, _, err = run(*words, "--budget", 20, "--out", tmp_path / "kept")
    assert code == 0, err
    first, head = Trajectory.load(rounds / "first"), EvidenceHead.load(rounds / "head")
    surest = head.score(first).argsort()[:20].sort().values
    assert torch.equal(Trajectory.load(tmp_path / "kept").x, first.x[surest])
    code, _, err = run(*words, "--max-risk", 0.5, "--labels", "misplaced", "--out", tmp_path / "promise")
    assert code == 2
    assert "the head was fitted to samples of seed 0, so it guarantees nothing for them" in one_line(err)


WRONG_SAMPLES = {
    "the same seed": (("--seed", 0), "fitted to samples of seed 0; draw new ones with another --seed"),
    "other steps": (("--seed", 1, "--steps", 5), "drawn differently (steps: 4 before, 5 now)"),
    "a score": (("--seed", 1, "--score", "nearest"), "leave out --score, --best-of and --budget"),
    "no head": (("--seed", 1, "--head", "{out}/none"), "cannot be read"),
}


@pytest.mark.parametrize("case", WRONG_SAMPLES)
def test_heads_refuse_samples_that_they_were_not_fitted_for(case, run, rounds, tmp_path):
    words, expected = WRONG_SAMPLES[case]
    given = ("--head", rounds / "head", "--steps", STEPS, *(str(word).format(out=tmp_path) for word in words))
    code, _, err = run("sample", "checkerboard", "-n", 8, *given, "--device", "cpu", "--out", tmp_path / "out")
    assert code == 2
    assert expected in one_line(err)


WRONG_LABELS = {
    "none": ((), "add --labels FILE"),
    "too few": (("--labels", "{few}"), "at least 10 failed and 10 good labelled samples, got 3 and 7"),
    "one-sided": (("--labels", "{bad}"), f"got {COUNT} and 0"),
    "empty": (("--labels", "{empty}"), "got 0 and 0"),
    "twice": (("--labels", "{twice}"), "names 00001 more than once"),
    "unknown": (("--labels", "{unknown}"), "names none of the samples"),
    "not a number": (("--labels", "{few}", "--good", "bad <= x"), "needs a number"),
    "another column": (("--labels", "{few}", "--column", "stable"), "has no column 'stable'"),
}


@pytest.mark.parametrize("case", WRONG_LABELS)
def test_wrong_labels_are_one_line_and_write_nothing(case, run, rounds, tmp_path):
    words, expected = WRONG_LABELS[case]
    files = {
        "few": "name,bad\n" + "".join(f"{i:05d},{int(i < 3)}\n" for i in range(10)),
        "bad": "1\n" * COUNT,
        "empty": "name,bad\n",
        "twice": "name,bad\n00001,0\n00001,1\n",
        "unknown": "name,bad\nmp-1,0\n",
    }
    places = {name: write_text(tmp_path / f"{name}.csv", text) for name, text in files.items()}
    given = (str(word).format(**places) for word in words)
    code, _, err = run("learn", rounds / "first", *given, "--out", tmp_path / "out")
    assert code == 2
    assert expected in one_line(err)
    assert not (tmp_path / "out").exists()


def test_samples_without_a_checkpoint_are_refused(run, tmp_path):
    field = fmwc.load("checkerboard")
    assert about("checkerboard")
    fmwc.sample(field, 30, steps=2).save(write_text(tmp_path / "run" / "x", "").parent)
    code, _, err = run("learn", tmp_path / "run", "--labels", tmp_path / "run" / "x", "--out", tmp_path / "out")
    assert code == 2
    assert "does not record which checkpoint drew its samples" in one_line(err)
