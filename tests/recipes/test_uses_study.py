"""The study of the uses of confidence: drawing, resuming, judging elsewhere, and the numbers by hand."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch

import experiments.uses.drawing as drawing
import experiments.uses.evaluate as evaluate
from experiments.checkerboard.experiment import CheckerboardExperiment
from experiments.common.experiment import OWN
from experiments.uses.evaluate import READINGS, gather, read_edit, read_filter, read_trust
from experiments.uses.folder import NUMBERS, drawn_at, judged_at
from experiments.uses.study import study
from fmwc.errors import CheckpointError, MismatchError, UnknownNameError, UsageError
from tests.conftest import mlp_field
from tests.recipes import studies
from tests.recipes.studies import SEEDS, SIZES, hasty, numbers_in, quiet, shorten


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def points():
    return studies.points(mlp_field(hidden=8, depth=1))


@pytest.fixture(scope="module")
def done(points, tmp_path_factory):
    """The folder of a finished study."""
    out = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        study(points, out, seeds=SEEDS, say=quiet)
    return out


def copied(done, tmp_path):
    return shutil.copytree(done, tmp_path / "copy")


# ---- the study ------------------------------------------------------------------------------------------------------


def test_everything_is_drawn_judged_and_evaluated(done, points):
    found = json.loads((done / NUMBERS).read_text())
    assert list(found["numbers"]) == list(READINGS)
    assert found["provenance"]["seeds"] == list(SEEDS)
    assert {p["sizes"]["samples"] for p in found["provenance"]["pieces"].values()} == {SIZES.samples}
    assert list(found["metrics"]) == list(points.metrics)
    assert found["intents"]["turn"]["words"] == points.intents["turn"].words
    for name in drawing.DRAWINGS:
        for seed in SEEDS:
            assert drawn_at(done, name, seed).exists()
            assert judged_at(done, name, seed).exists()


def test_second_call_draws_and_judges_nothing(done, points, tmp_path, monkeypatch):
    out = copied(done, tmp_path)
    before = numbers_in(out)

    def never(*args, **options):
        raise AssertionError("drawn again")

    monkeypatch.setattr(CheckerboardExperiment, "draw", never)
    monkeypatch.setattr(CheckerboardExperiment, "judge", never)
    said = []
    study(points, out, seeds=SEEDS, say=said.append)
    assert numbers_in(out) == before
    assert any("already exists; skipped" in text for text in said)


def test_interrupted_study_resumes(done, points, tmp_path, monkeypatch):
    out = tmp_path / "killed"
    whole = drawing.DRAWINGS["edit"]

    def dies(experiment, seed, wide):
        rows = whole(experiment, seed, wide)
        yield next(rows)
        raise KeyboardInterrupt

    monkeypatch.setitem(drawing.DRAWINGS, "edit", dies)
    with pytest.raises(KeyboardInterrupt):
        study(points, out, seeds=SEEDS[:1], only="draw:samples,draw:edit,read:filter,read:edit", say=quiet)
    assert drawn_at(out, "samples", 200).exists()
    assert not drawn_at(out, "edit", 200).exists()
    monkeypatch.setitem(drawing.DRAWINGS, "edit", whole)
    said = []
    study(points, out, seeds=SEEDS[:1], only="draw:samples,draw:edit,read:filter,read:edit", say=said.append)
    assert "200-draw-samples.json already exists; skipped" in said
    assert any(text.startswith("seed 200, edit: drew turn, variance in ") for text in said)
    alone = study(points, copied(done, tmp_path), seeds=SEEDS[:1], only="read:filter,read:edit", say=quiet)
    assert numbers_in(out) == json.loads(alone.read_text())["numbers"]


def test_drawings_of_another_machine_are_judged_with_their_own_sizes(done, points, tmp_path):
    out = tmp_path / "here"
    shutil.copytree(done / "draws", out / "draws")
    shutil.copytree(done / "pieces", out / "pieces")
    smaller = studies.points(points.field, dataclasses.replace(SIZES, edited=1, samples=1))
    path = study(smaller, out, seeds=SEEDS, only="read:edit,read:filter", say=quiet)
    found = json.loads(path.read_text())
    assert {name: found["numbers"][name] for name in ("filter", "edit")} == {
        name: numbers_in(done)[name] for name in ("filter", "edit")
    }
    assert found["provenance"]["pieces"]["edit-200"]["sizes"]["edited"] == SIZES.edited


def test_uses_of_separate_calls_are_combined(done, points, tmp_path):
    out = copied(done, tmp_path)
    (out / NUMBERS).unlink()
    for only in ("read:guide", "read:filter", "read:edit"):
        study(points, out, seeds=SEEDS, only=only, say=quiet)
    found = numbers_in(out)
    assert list(found) == ["filter", "edit", "guide"]
    assert found["edit"] == numbers_in(done)["edit"]
    study(points, out, seeds=SEEDS[:1], only="read:filter", say=quiet)  # other samples are not combined
    assert list(numbers_in(out)) == ["filter"]


def test_drawing_alone_writes_no_numbers(points, tmp_path):
    assert study(points, tmp_path, seeds=(1,), only="draw:guide", say=quiet) is None
    assert not (tmp_path / NUMBERS).exists()


def test_changed_samples_are_judged_again(done, points, tmp_path):
    out = copied(done, tmp_path)
    other = drawn_at(out, "guide", 201).read_bytes()
    drawn_at(out, "guide", 200).write_bytes(other)
    study(points, out, seeds=SEEDS, only="read:guide", say=quiet)
    each = numbers_in(out)["guide"]["none"]["misplaced"]["each"]
    assert each[0] == each[1]


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("read:samples", "unknown reading 'samples'"),
        ("edit", "unknown task 'edit'"),
    ],
)
def test_unknown_tasks_are_refused_before_anything_is_written(only, message, points, tmp_path):
    with pytest.raises(UnknownNameError, match=message):
        study(points, tmp_path, only=only, say=quiet)
    assert not list(tmp_path.iterdir())


def test_results_of_other_settings_are_refused(done, points, tmp_path):
    with pytest.raises(UsageError, match="at least one seed"):
        study(points, tmp_path, seeds=(), say=quiet)
    with pytest.raises(CheckpointError, match="holds no draw:edit of seed 7; draw it first"):
        study(points, done, seeds=(7,), only="read:edit", say=quiet)
    larger = studies.points(points.field, dataclasses.replace(SIZES, edited=5))
    with pytest.raises(MismatchError, match=r"made with other settings \(.*sizes"):
        study(larger, done, seeds=SEEDS, say=quiet)
    with pytest.raises(MismatchError, match=r"made with other settings \(.*field"):
        study(studies.points(mlp_field(hidden=8, depth=1, seed=3), SIZES), done, seeds=SEEDS, say=quiet)
    with pytest.raises(MismatchError, match=r"made with other settings \(.*wide"):
        study(points, done, seeds=SEEDS, only="read:edit", wide=True, say=quiet)
    with pytest.raises(UsageError, match="got edited=0"):
        dataclasses.replace(SIZES, edited=0)


def test_wide_study_draws_all_options(points, tmp_path):
    few = studies.points(
        points.field, dataclasses.replace(SIZES, edited=2, replicates=1), hasty(CheckerboardExperiment)
    )
    few.every = 1  # few steps, all read
    study(few, tmp_path, seeds=(100,), only="draw:edit,read:edit,draw:rewind,read:rewind", wide=True, say=quiet)
    found = numbers_in(tmp_path)
    assert "turn, scale 0.1, 0.4 before variance" in found["edit"]
    assert "rewind +5, scale 0.4, 0.1 before" in found["rewind"]


# ---- readings -------------------------------------------------------------------------------------------------------


def test_own_score_comes_first(done):
    found = numbers_in(done)
    assert next(iter(found["filter"]["compared"])).endswith(OWN)
    assert next(iter(found["filter"]["retention"])).endswith(OWN)


def samples(score, bad, **others):
    """Return the judged samples of one seed, whose own score is not the first by name."""
    kept = {f"score zz{OWN}": torch.tensor(score), "confidence": -torch.tensor(score).argsort().argsort().float()}
    kept |= {f"score {name}": torch.tensor(value) for name, value in others.items()}
    kept["confidence"] = (kept["confidence"] - kept["confidence"].min()) / len(score)
    row = drawing.Drawn({name: kept[name] for name in sorted(kept)}, {})
    return {0: {"samples": (row, {"bad": np.asarray(bad)})}}


def test_certificates_hold_and_use_the_own_score(points, monkeypatch):
    """The tenth with the highest own score is bad. Another score, first by name, is reversed."""
    score = np.linspace(0, 1, 600)
    bad = score > 0.9
    monkeypatch.setattr(CheckerboardExperiment, "risks", (0.1,))
    monkeypatch.setattr(evaluate, "LABELLED", (200,))
    (found,) = read_trust(points, samples(score.tolist(), bad, aa=(-score).tolist()))["promises"]
    assert found["given"] == found["splits"]
    assert found["broken"] == 0
    assert found["achieved"] <= 0.1
    assert found["achieved_range"][0] <= found["achieved"] <= found["achieved_range"][1]
    assert 0.5 < found["kept"] <= 1


def test_filter_by_hand(points):
    score, bad = [0.1, 0.2, 0.3, 0.4], [False, False, False, True]
    found = read_filter(points, samples(score, bad, aa=[0.4, 0.3, 0.2, 0.1]))
    assert (found["samples"], found["bad"]) == (4, 0.25)
    assert list(found["compared"]) == [f"zz{OWN}", "aa"]
    assert found["compared"][f"zz{OWN}"]["auprc"]["value"] == 1
    assert found["retention"][f"zz{OWN}"][74] == 0
    assert found["retention"]["aa"][24] == 1
    assert read_filter(points, samples(score, [False] * 4))["compared"] == {}  # nothing to find


def test_edits_by_hand(points, monkeypatch):
    """Two samples with two edits each, at random times and at the peak."""
    home, other, off = [-1.5, -1.5], [0.5, 0.5], [-0.5, -1.5]  # one square, another square, and outside the board
    info = {"time": 0.5, "scale": 0.1}

    def row(*x):
        kept = {"x": torch.tensor(x)}
        return drawing.Drawn(kept, info), points.judge(kept)

    seen = {0: {"seeds": row(home, home), "turn, random": row(home, other, home, home)}}
    seen[0]["turn, variance"] = row(other, other, off, other)
    found = read_edit(points, seen)
    assert found["turn, random"]["success"] == 0.25
    assert found["turn, variance"]["success"] == 0.75
    assert found["turn, variance"]["gain"] == 0.5
    assert found["turn, variance"]["gain_interval"] == [0.5, 0.5]  # the same for both samples
    assert found["turn, variance"]["shown"] == [True, False]
    assert (found["turn, random"]["samples"], found["turn, random"]["replicates"]) == (2, 2)
    assert "surest" not in found["turn, random"]  # drawn without a score

    seen[0]["turn, random"][0].tensors["score"] = torch.tensor([2.0, 1.0, 1.0, 2.0])
    seen[0]["turn, variance"][0].tensors["score"] = torch.tensor([1.0, 2.0, 2.0, 1.0])
    found = read_edit(points, seen)
    assert found["turn, random"]["surest"] == 0.5  # of the first sample the second edit, of the second the first
    assert found["turn, variance"]["surest"] == 1.0
    assert found["turn, variance"]["surest_interval"] == [1.0, 1.0]
    assert "useful" not in found["turn, variance"]

    monkeypatch.setattr(
        points, "useful", lambda before, after: after["x"][:, 0] > 0
    )  # as crystals have, beside the paper's success
    found = read_edit(points, seen)["turn, variance"]
    assert (found["useful"], found["useful_interval"]) == (0.75, [0.5, 1.0])


def test_metrics_of_a_row_by_hand(points):
    rows = [np.array([True, False, False, False]), np.array([False] * 4)]
    seen = {}
    for seed, bad in enumerate(rows):
        outcome = {"bad": bad, "x": np.random.default_rng(seed).uniform(-2, -1, (4, 2)), "only once": np.zeros(1)}
        seen[seed] = {"plain": (drawing.Drawn({}, {"seconds": 1.0 + seed, "grid": [0.0, 1.0]}), outcome)}
    found = gather(points, seen)["plain"]
    assert found["seconds"] == 1.5
    assert found["grid"] == [0.0, 1.0]
    assert found["samples"] == 8
    assert found["misplaced"]["each"] == [25, 0]
    assert found["misplaced"]["mean"] == 12.5
    assert found["misplaced"]["std"] == pytest.approx(25 / math.sqrt(2))
    assert "interval" not in found["kl"]


def test_seeds_of_different_fields_or_sizes_are_refused(points, tmp_path):
    study(points, tmp_path, seeds=(1,), only="draw:guide", say=quiet)
    other = studies.points(mlp_field(hidden=8, depth=2), SIZES)
    study(other, tmp_path, seeds=(2,), only="draw:guide", say=quiet)
    study(
        studies.points(points.field, dataclasses.replace(SIZES, guided=SIZES.guided + 1)),
        tmp_path,
        seeds=(3,),
        only="draw:guide",
        say=quiet,
    )
    study(points, tmp_path, seeds=(1,), only="read:guide", say=quiet)
    with pytest.raises(CheckpointError, match="differ in their field"):
        study(points, tmp_path, seeds=(1, 2), only="read:guide", say=quiet)
    with pytest.raises(CheckpointError, match="differ in their sizes"):
        study(points, tmp_path, seeds=(1, 3), only="read:guide", say=quiet)
