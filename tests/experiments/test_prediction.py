"""Structure prediction and the cost of controls on a tiny network: the matcher, choices by hand, and the commands."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("pymatgen.core", exc_type=ImportError)
pytest.importorskip("chgnet", exc_type=ImportError)

from experiments.crystals import controlled
from experiments.crystals.prediction import compositions, matched, summary, table
from fmwc.crystals import Controls
from tests.crystals.conftest import crystal, rock_salt
from tests.crystals.test_cli import trained  # noqa: F401

# ---- the matcher -----------------------------------------------------------------------------------------------------


def test_a_structure_matches_itself_and_a_disturbed_copy_but_no_other_structure():
    salt = rock_salt()
    assert matched(salt, salt) == pytest.approx(0, abs=1e-6)
    moved = np.array(salt.coords)
    moved[0, 0] += 0.02
    disturbed = crystal(salt.numbers.tolist(), moved.tolist(), [5.64] * 3)
    assert 0 < matched(disturbed, salt) < 0.1
    squeezed = crystal(salt.numbers.tolist(), (np.array(salt.coords) * 0.5).tolist(), [5.64] * 3)
    assert matched(squeezed, salt) is None
    assert matched(rock_salt(cation=19), salt) is None
    assert matched(crystal([11, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [1e-3, 4, 4]), salt) is None


# ---- the summary -----------------------------------------------------------------------------------------------------


def pieces(rms, scores, energy, valid):
    """Return one piece per candidate, of tables with one row per composition."""
    return [
        {
            "candidate": k,
            "names": [f"c{i}" for i in range(len(rms))],
            "rms": [row[k] for row in rms],
            "valid": [row[k] for row in valid],
            "energy": [row[k] for row in energy],
            "scores": {"s": [row[k] for row in scores]},
        }
        for k in range(len(rms[0]))
    ]


def test_choices_are_counted_as_they_should_be():
    rms = [[None] * 20 for _ in range(4)]
    rms[0][0], rms[1][3], rms[2][5] = 0.1, 0.2, 0.4
    score = [[1.0] * 20 for _ in range(4)]
    score[1][3] = score[2][4] = 0.0  # right for the second composition, wrong for the third
    energy = [[1.0] * 20 for _ in range(4)]
    energy[2][5], energy[0][0], energy[3] = -1.0, None, [None] * 20
    valid = [[True] * 20 for _ in range(4)]
    valid[1][3] = False
    drawn = pieces(rms, score, energy, valid)
    alone = {"candidate": 0, "names": ["c4"], "rms": [0.3], "valid": [True], "energy": [0.0], "scores": {"s": [0.0]}}
    result = summary([drawn[0], alone, *drawn[1:], drawn[3]])  # one candidate of another composition; one file twice
    assert (result["compositions"], result["compositions with several candidates"], result["candidates"]) == (5, 4, 20)
    found = result["all matches"]
    assert found["first candidate"]["match_rate"] == pytest.approx(2 / 5)
    assert found["first of 20"]["match_rate"] == 0.25
    assert found["surest by s of 20"]["match_rate"] == 0.5  # ties go to the first candidate
    assert found["surest by s of 20"]["rmse"] == pytest.approx(0.15)
    assert found["lowest energy of 20"]["match_rate"] == 0.25
    assert found["best (oracle) of 20"]["match_rate"] == 0.75
    assert found["random of 20"]["match_rate"] == pytest.approx(3 / 80)
    assert found["first of 20"]["gain"] == pytest.approx(0.25 - 3 / 80)
    counted = result["valid matches"]
    assert counted["surest by s of 20"]["match_rate"] == 0.25
    assert counted["best (oracle) of 20"]["match_rate"] == 0.5
    assert counted["first candidate"]["match_rate"] == pytest.approx(2 / 5)
    rows = {row[""]: row for row in table(result)}
    assert rows["surest by s of 20"]["match rate, %"].startswith("50.0 [")
    assert rows["surest by s of 20"]["match rate if valid, %"].startswith("25.0 [")


# ---- the commands ----------------------------------------------------------------------------------------------------


def test_predict(run, trained, tmp_path):  # noqa: F811
    out = tmp_path / "a"
    words = ("experiments", "predict", "draw", "--checkpoint", trained, "--data", "prototypes", "--out", out)
    options = ("--split", "val", "--device", "cpu", "--batch", 2, "--seed", 3, "--steps", 20)
    code, _, err = run(*words, *options, "-n", 2, "--each", 2)
    assert code == 0, err
    before = {path.name: path.read_bytes() for path in sorted((out / "draws").iterdir())}
    code, _, err = run(*words, *options, "-n", 3, "--each", 2)  # one more composition
    assert code == 0, err
    after = {path.name: path.read_bytes() for path in sorted((out / "draws").iterdir())}
    assert before.items() < after.items()
    assert len(after) == 4
    drawn = [load_file(out / "draws" / name) for name in after]
    truth = compositions("prototypes", "val", 3, 3).numbers
    assert torch.equal(drawn[0]["numbers"].long(), truth[:2])
    assert torch.equal(drawn[1]["numbers"].long(), truth[2:])
    assert not torch.equal(drawn[0]["coords"], drawn[2]["coords"])  # another candidate has other noise
    code, _, err = run("experiments", "predict", "match", out, "--data", "prototypes", "--jobs", 2)
    assert code == 0, err
    numbers = json.loads((out / "numbers.json").read_text())
    assert (numbers["compositions"], numbers["candidates"]) == (3, 2)
    found = numbers["all matches"]
    assert found["best (oracle) of 2"]["match_rate"] >= found["surest by echo of 2"]["match_rate"]
    kept = {path: path.stat().st_mtime_ns for path in (out / "matches").iterdir()}
    assert run("experiments", "predict", "match", out, "--data", "prototypes")[0] == 0
    assert kept == {path: path.stat().st_mtime_ns for path in (out / "matches").iterdir()}
    assert json.loads((out / "numbers.json").read_text())["all matches"] == found


@pytest.fixture
def few(monkeypatch):
    """Draw few crystals per file."""
    monkeypatch.setattr(controlled, "EACH", 4)


def test_control(run, trained, tmp_path, few, monkeypatch):  # noqa: F811
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
