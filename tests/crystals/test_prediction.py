"""Structure prediction and controlled sampling on a tiny network: files that resume, choices, and honest rates."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("pymatgen.core", exc_type=ImportError)
pytest.importorskip("chgnet", exc_type=ImportError)

from experiments.crystals import controlled, prediction
from experiments.crystals.prediction import CANDIDATES, match, summary
from fmwc.crystals import Controls
from fmwc.sampling import Trajectory
from tests.command import one_line
from tests.crystals.conftest import crystal, rock_salt
from tests.crystals.test_cli import trained  # noqa: F401

# ---- the matcher -----------------------------------------------------------------------------------------------------


def test_a_structure_matches_itself_and_a_disturbed_copy_but_no_other_structure():
    salt = rock_salt()
    assert match(salt, salt) == pytest.approx(0, abs=1e-6)
    moved = np.array(salt.coords)
    moved[0, 0] += 0.02
    disturbed = crystal(salt.numbers.tolist(), moved.tolist(), [5.64] * 3)
    assert 0 < match(disturbed, salt) < 0.1
    squeezed = crystal(salt.numbers.tolist(), (np.array(salt.coords) * 0.5).tolist(), [5.64] * 3)
    assert match(squeezed, salt) is None
    assert match(rock_salt(cation=19), salt) is None
    assert match(crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [1e-3, 4, 4]), salt) is None


# ---- the summary -----------------------------------------------------------------------------------------------------


def test_choices_are_counted_as_they_should_be():
    rms = [[None] * CANDIDATES for _ in range(4)]
    rms[0][0], rms[1][3], rms[2][5] = 0.1, 0.2, 0.4
    score = [[1.0] * CANDIDATES for _ in range(4)]
    score[1][3] = score[2][4] = 0.0  # right for the second composition, wrong for the third
    energy = [[1.0] * CANDIDATES for _ in range(4)]
    energy[2][5], energy[0][0], energy[3] = -1.0, None, [None] * CANDIDATES
    found = summary([{"rms": rms, "scores": {"s": score}, "energy": energy}])["chosen"]
    assert found["first"]["match_rate"] == 0.25
    assert found["surest by s"]["match_rate"] == 0.5  # ties go to the first candidate
    assert found["surest by s"]["rmse"] == pytest.approx(0.15)
    assert found["lowest energy"]["match_rate"] == 0.25
    assert found["any of 20"]["match_rate"] == 0.75
    assert found["random candidate"]["match_rate"] == pytest.approx(3 / 80)
    assert found["first"]["gain"] == pytest.approx(0.25 - 3 / 80)


# ---- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    """Draw few candidates in few steps."""
    for module, values in ((prediction, {"CANDIDATES": 3, "EACH": 2}), (controlled, {"EACH": 4})):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def test_predict_resumes_and_its_candidates_have_the_given_compositions(run, trained, tmp_path, few):  # noqa: F811
    words = ("experiments", "predict", "--checkpoint", trained, "--data", "prototypes", "--out", tmp_path / "a")
    options = ("--split", "val", "--device", "cpu", "--seed", 3)
    code, _, err = run(*words, *options, "-n", 2)
    assert code == 0, err
    first = (tmp_path / "a" / "draws" / "00000.safetensors").read_bytes()
    code, _, err = run(*words, *options, "-n", 3)
    assert code == 0, err
    assert (tmp_path / "a" / "draws" / "00000.safetensors").read_bytes() == first
    numbers = json.loads((tmp_path / "a" / "numbers.json").read_text())
    assert numbers["compositions"] == 3
    assert numbers["chosen"]["any of 3"]["match_rate"] >= numbers["chosen"]["first"]["match_rate"]
    for path in sorted((tmp_path / "a" / "draws").iterdir()):
        drawn = Trajectory.load(path)
        types = 1 + ((drawn.x["type"] > 0) << torch.arange(7)).sum(-1)
        used = torch.arange(20) < drawn.cond["atoms"][:, None]
        assert torch.equal(types * used, drawn.cond["types"])
    code, _, err = run(*words, *options[:-1], 4, "-n", 2)
    assert code != 0
    assert one_line(err)


def test_control_counts_no_violation_and_resumes(run, trained, tmp_path, few, monkeypatch):  # noqa: F811
    sets = {
        "free": Controls(),
        "elements": Controls(elements="Li,O,Fe"),
        "system": Controls(system="Na-Cl", atoms="2-4"),
    }
    monkeypatch.setattr(controlled, "SETS", sets)
    words = ("experiments", "control", "--checkpoint", trained, "--out", tmp_path / "a", "--device", "cpu")
    code, _, err = run(*words, "-n", 5, "--pool", 6)
    assert code == 0, err
    numbers = json.loads((tmp_path / "a" / "numbers.json").read_text())["sets"]
    assert [numbers[name]["violations"] for name in ("elements", "system")] == [0, 0]
    assert numbers["elements"]["drawn"]["structures"] == 5
    assert len(list((tmp_path / "a" / "draws").iterdir())) == 6
    code, _, err = run(*words, "-n", 5, "--pool", 6, "--seed", 1)
    assert code != 0
    assert one_line(err)
