"""The costs of confidence: every case is measured, or listed as omitted. Durations are not tested."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import fmwc
from experiments.checkerboard.tables import cost_table
from experiments.cli import app
from experiments.cost import costs
from experiments.cost.costs import CASES, PLAIN, TRAINING, measure
from experiments.cost.meter import Meter
from experiments.cost.tables import write_costs
from fmwc.errors import FmwcError
from fmwc.estimators import Linearised
from fmwc.networks import MLP

DOMAIN = SimpleNamespace(name="checkerboard", estimator=lambda field: Linearised(), conditions=lambda field, count: {})


@pytest.fixture
def field():
    return fmwc.attach(MLP(2, 8, 2), space=(2,))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(costs.SIZES, "checkerboard", {"cpu": (8, (4,))})
    monkeypatch.setattr(costs, "STEPS", 1)


def measured(field, **options):
    return measure(DOMAIN, field, steps=2, rounds=1, backend="eager", say=lambda text: None, **options)


def test_every_kind_of_case_is_measured_both_ways(field, tmp_path, monkeypatch):
    for name in list(CASES):  # one case of each kind; the others differ only in their estimator or schedule
        if "10th" in name or "5th" in name or "Gauss" in name or "Taylor" in name or "Monte" in name:
            monkeypatch.delitem(CASES, name)
    before = [p.clone() for p in field.parameters()]
    found = measured(field)
    assert not found["left_out"]
    assert list(found["cases"]) == [name for name, case in CASES.items() if not case.half]
    assert list(found["compiled"]) == [name for name, case in CASES.items() if case.compiles]
    for rows in (found["cases"], found["compiled"], *found["sweep"].values()):
        assert rows[PLAIN]["ratio"] == pytest.approx(1)
        for row in rows.values():
            assert row["lowest"] <= row["ratio"] <= row["highest"]
            assert row["peak_mib"] > 1
            assert row["rounds"] == 1
    assert list(found["training"]) == list(TRAINING)
    assert list(found["sweep"]) == ["4 samples, uncompiled", "4 samples, compiled"]
    assert all(torch.equal(p, b) for p, b in zip(field.parameters(), before, strict=True))  # a copy was trained

    table, text = write_costs(tmp_path, "checkerboard", found)
    assert json.loads(table.read_text()) == json.loads(json.dumps(found))
    assert all(name in text.read_text() for name in (*CASES, *TRAINING, "4 samples, compiled"))
    uncompiled = len(found["cases"])
    assert cost_table(found).markdown().count("×") == uncompiled  # the table of the documentation has the same source


def test_cases_that_do_not_fit_the_time_are_listed(field, tmp_path):
    found = measured(field, minutes=0)
    assert "cases" not in found
    sampled = sum((not case.half) + case.compiles for case in CASES.values())
    assert len(found["left_out"]) == sampled + len(TRAINING) + 2 * len(costs.SWEPT)
    assert "uncompiled linearised, every 5th step" in write_costs(tmp_path, "checkerboard", found)[1].read_text()


def test_a_task_whose_rounds_would_not_fit_is_left_out_and_shorter_ones_are_not():
    meter = Meter(torch.device("cpu"), 100, time.perf_counter() + 20, lambda text: None)
    assert list(meter({"short": int, "long": lambda: time.sleep(0.25), "other": int}, "x")) == ["short", "other"]
    assert meter.left_out == ["x: long"]


def test_some_cases_or_parts_only(field):
    found = measured(field, only="tangent")
    assert list(found["cases"]) == [PLAIN, "tangent (1 probe), every step"]
    assert "training" not in found
    assert "cases" not in measured(field, only="training")


def test_tf32_is_reset_after_measuring(field, tmp_path):
    found = measured(field, only="tangent", tf32=True)
    assert found["provenance"]["tf32"]
    assert ", TF32, commit" in write_costs(tmp_path, "checkerboard", found)[1].read_text()
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_command_writes_a_table(tmp_path):
    options = [
        *["-n", "4", "--steps", "1", "--rounds", "1", "--backend", "eager", "--device", "cpu", "--only"],
        "every 10th",
    ]
    result = CliRunner().invoke(app, ["bench", "checkerboard", "--out", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert "linearised, every 10th step" in (tmp_path / "checkerboard.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--only", "linearized"), "did you mean 'linearised'"), ((), "is not empty"), (("--out", "a.json"), "is a file")],
)
def test_wrong_options_are_reported_before_measuring(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    monkeypatch.setattr(costs, "measure", None)
    result = CliRunner().invoke(app, ["bench", "checkerboard", "--device", "cpu", "--out", str(tmp_path), *words])
    assert result.exit_code != 0
    assert isinstance(result.exception, FmwcError)
    assert said in str(result.exception)
    assert (tmp_path / "a.json").read_text() == "{}"
