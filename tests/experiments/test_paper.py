"""Tiny runs of `reproduce` and `evaluate`: every task gives finite numbers, no sample changes, tables are made."""

import functools
import json
import math

import pytest

import experiments.checkerboard.reproduce as board
import experiments.mnist.evaluate as reading
import experiments.mnist.reproduce as images
import fmwc.mnist.recipe as recipes
from experiments.common.store import read_results
from experiments.mnist.tables import tables as mnist_tables
from fmwc.metrics import ranking
from fmwc.sampling import sample
from tests.options import arguments
from tests.recipes.conftest import CPU, digits, digits_file, judge_folder  # noqa: F401

TINY = ("hidden=16", "time_features=8", "iterations=40", "batch=64", "noise_steps=10", "points=2000", "save_every=20")
SETS = [part for change in TINY for part in ("--set", change)]


def quiet(text):
    pass


def numbers(value):
    if isinstance(value, dict):
        return [n for v in value.values() for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, float) else []


def test_checkerboard(run, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.checkerboard.evaluate.POINTS", 20)
    monkeypatch.setattr("experiments.checkerboard.evaluate.DRAWS", 16)
    monkeypatch.setattr(board, "SCHEDULES", {"cosine": board.SCHEDULES["cosine"]})
    short = functools.partial(board.reproduce, steps=15)
    monkeypatch.setattr("experiments.checkerboard.experiment.reproduce", short)
    words = ("reproduce", "checkerboard", "--out", tmp_path, "--seeds", "0", "-n", 300, "--draws", 5, "--device", "cpu")
    code, _, err = run(*words, *SETS)
    assert code == 0, err
    assert (tmp_path / "tables.md").read_text().count("## ") == 13
    path = tmp_path / "cells" / "cosine-0.json"
    found, before = json.loads(path.read_text())["numbers"], path.read_bytes()
    assert found["retrofit"]["bit_for_bit"]
    assert found["retrofit"]["misplacement"] == found["fm"]["misplacement"]
    code, _, err = run(*words, *SETS)
    assert code == 0
    assert "skipped" in err
    assert path.read_bytes() == before
    assert run("experiments", "report", tmp_path)[0] == 0
    model = tmp_path / "models" / "checkerboard"
    words = ("evaluate", "checkerboard", "--checkpoint", model, "-n", 200, "--device", "cpu", "--json")
    assert json.loads(run(*words)[1])["bit_for_bit"] is True


def test_digits(digits, judge_folder, tmp_path, monkeypatch):  # noqa: F811
    for name, value in {"STATES": 8, "HUTCHINSON": 2, "PROBES": 2, "STEPS": (2,), "DRAWS": 4}.items():
        monkeypatch.setattr(reading, name, value)
    for place in (reading, recipes, images):
        monkeypatch.setattr(place, "batch_for", lambda device: 160)
    monkeypatch.setattr(recipes, "sample", lambda *a, steps, **k: sample(*a, **arguments(steps=2, **k)))
    size = {"count": 160, "steps": 6, "draws": 5, "few": 80}
    paths = images.reproduce(digits, tmp_path, CPU, judge=judge_folder, say=quiet, **size)
    assert paths == [tmp_path / "cells" / "0.json"]
    found = read_results(tmp_path)[0]["numbers"]
    assert found.keys() == images.TASKS.keys()
    for name, part in found.items():
        assert numbers(part), name
        assert all(math.isfinite(value) for value in numbers(part)), name
    assert found["retrofit"]["bit_for_bit"]
    assert found["joint"]["bit_for_bit"]
    for key in ("fid", "failure"):  # a retrofit samples as the flow does
        assert found["retrofit"][key] == pytest.approx(found["plain"][key], rel=1e-4)
    assert all(path.exists() for path in mnist_tables(tmp_path))


def test_crystals(tmp_path, monkeypatch):
    for package in ("pymatgen.core", "chgnet", "matminer", "smact"):
        pytest.importorskip(package, exc_type=ImportError)
    from experiments.crystals import reproduce as module
    from experiments.crystals.tables import tables
    from tests.recipes.test_crystals import TINY

    monkeypatch.delenv("FMWC_DATA", raising=False)
    for name, value in {"SAMPLERS": ((5, 0.0),), "SCREENED": 1, "RELAX_STEPS": 2, "cores": lambda: 1}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(ranking, "RESAMPLES", 50)
    module.reproduce(TINY, tmp_path, CPU, say=quiet, count=24, draws=2, few=6, ks=(1, 2, 4))
    found = read_results(tmp_path)[0]["numbers"]
    assert found.keys() == module.READINGS.keys()
    for kind in ("retrofit", "joint"):
        assert found[kind]["bit_for_bit"]
        assert math.isfinite(found[kind]["quality"]["mean_e_above_hull"])
    rows = found["hutchinson"]
    assert [row["K"] for row in rows[:3]] == [1, 2, 4]
    assert {row["name"] for row in rows} >= {"Hutchinson", "linearised", "diagonal"}
    assert found["screening"]["sets"]["drawn"]["structures"] == 24
    assert "ours, relaxed" in tables(tmp_path)[1].read_text()
