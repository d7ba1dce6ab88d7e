"""The costs of confidence, end to end at tiny size: every case is measured, or listed as omitted."""

import json

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.cost import costs
from experiments.cost.costs import CASES, PLAIN, TRAINING


def test_the_command_measures_every_case(tmp_path, monkeypatch):
    monkeypatch.setitem(costs.SIZES, "checkerboard", {"cpu": 8})
    monkeypatch.setattr(costs, "STEPS", 1)
    options = ["--steps", "2", "--rounds", "1", "--minutes", "10", "--device", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "checkerboard", *options])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "checkerboard.json").read_text())
    assert all(name in (tmp_path / "checkerboard.md").read_text() for name in (*CASES, *TRAINING))
    assert not found["left_out"]
    assert list(found["cases"]) == list(CASES)
    assert list(found["training"]) == list(TRAINING)
    assert found["cases"][PLAIN]["ratio"] == pytest.approx(1)
    for row in found["cases"].values():
        assert row["lowest"] <= row["ratio"] <= row["highest"]
        assert row["peak_mib"] > 1
