"""A tiny study of the uses of confidence, and its filter and certificates by hand."""

import json

import numpy as np
import pytest
import torch

import experiments.uses.drawing as drawing
import experiments.uses.evaluate as evaluate
from experiments.checkerboard.experiment import CheckerboardExperiment
from experiments.common.experiment import OWN, Sizes
from experiments.uses.evaluate import READINGS, read_trust
from experiments.uses.folder import NUMBERS
from experiments.uses.report import USES, write_study
from experiments.uses.study import study
from fmwc.registry import domain_named
from tests.conftest import mlp_field


@pytest.fixture(scope="module")
def points():
    sizes = Sizes(samples=60, edited=4, replicates=2, swept=8, guided=4)
    return CheckerboardExperiment(domain_named("checkerboard"), mlp_field(hidden=8, depth=1), sizes)


def test_a_study_is_drawn_read_and_reported(points, tmp_path, monkeypatch):
    for name, value in {"SWEEP": (2, 5), "FIXED": (0.0, 0.4)}.items():
        monkeypatch.setattr(drawing, name, value)
    monkeypatch.setattr(evaluate, "LABELLED", (30,))
    monkeypatch.setattr(evaluate, "SPLITS", 10)
    said = []
    study(points, tmp_path, seeds=(200, 201), say=said.append)
    found = json.loads((tmp_path / NUMBERS).read_text())
    assert list(found["numbers"]) == list(READINGS)
    assert found["provenance"]["seeds"] == [200, 201]
    monkeypatch.setattr(CheckerboardExperiment, "draw", None)  # a second call draws nothing
    study(points, tmp_path, seeds=(200, 201), say=said.append)
    assert json.loads((tmp_path / NUMBERS).read_text())["numbers"] == found["numbers"]
    write_study(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert all(USES[use].title in text for use in READINGS)
    assert list((tmp_path / "figures").glob("*.png"))
    assert (tmp_path / "report.html").exists()


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
    monkeypatch.setattr(evaluate, "SPLITS", 10)
    (found,) = read_trust(points, samples(score.tolist(), bad, aa=(-score).tolist()))["promises"]
    assert found["given"] == found["splits"]
    assert found["broken"] == 0
    assert found["achieved"] <= 0.1
    assert 0.5 < found["kept"] <= 1
