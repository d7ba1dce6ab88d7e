"""The shown command and Python lines make exactly what is on the screen."""

import shlex

import numpy as np
import pytest

from fmwc.sampling import Trajectory
from tests.command import call


def performed(lines, folder, monkeypatch):
    """Run the commands of a recipe in a folder; return the samples of the last one."""
    monkeypatch.chdir(folder)
    for line in lines.splitlines():
        program, *words = shlex.split(line)
        assert program == "fmwc"
        call(*words)
    out = words[words.index("--out") + 1]
    return Trajectory.load(folder / out / "samples.safetensors")


def evaluated(lines):
    """Run the Python lines of a recipe; return their variables."""
    names = {}
    exec(lines, names)
    return names


DRAWN = [
    ("checkerboard", {"count": 30, "steps": 6, "seed": 3}, 11),
    ("checkerboard", {"count": 12, "steps": 5, "propagation": "linearised", "stepper": "heun"}, None),
    ("mnist", {"count": 4, "steps": 3, "label": "2"}, 3),
    ("crystals", {"count": 2, "steps": 3, "formula": "NaCl", "atoms": "2-4"}, None),
]


@pytest.mark.parametrize(("field", "options", "kept"), DRAWN)
def test_command_and_python_make_the_run(studio, field, options, kept, tmp_path, monkeypatch):
    run = studio.draw(field, **options)
    found = studio.post(f"runs/{run['id']}/recipe", {"kept": kept or run["count"]})
    ours = Trajectory.load(studio.served.studio.runs[run["id"]].samples / "samples.safetensors")
    order = studio.tensors(f"runs/{run['id']}/samples")["order"]
    names = sorted(ours.names[i] for i in order[:kept])
    made, lines = performed(found["command"], tmp_path, monkeypatch), evaluated(found["python"])
    assert made.names == lines["surest" if kept else "run"].names == names
    for other in (made, lines["surest" if kept else "run"]):
        for name, value in other.tensors().items():
            if name.partition(".")[0] in ("x", "confidence", "score"):
                index = [ours.names.index(one) for one in names]
                np.testing.assert_array_equal(value, ours.tensors()[name][index], err_msg=name)


def test_command_and_python_make_an_edit(studio, tmp_path, monkeypatch):
    run = studio.draw("mnist", count=3, steps=4)
    edit = studio.edit(run, 1, at=0.3, scale=0.4, seed=6, label="8")
    expected = studio.tensors(f"runs/{edit['id']}/samples")["x"]
    found = studio.post(f"runs/{edit['id']}/recipe")
    for made in (performed(found["command"], tmp_path, monkeypatch), evaluated(found["python"])["run"]):
        shown = (255 * made.x[:, 0].clamp(0, 1)).round().numpy()
        assert np.abs(shown - expected).max() <= 1
    assert found["command"].count("\n") == 1
