"""Relaxations in several processes agree with those of the library, stop after a time limit, and resume."""

import time

import numpy as np
import pytest

from experiments.crystals import relaxations as module
from experiments.crystals.relaxations import read_relaxed, relax_in_processes
from fmwc.crystals import calculator, relax_all
from fmwc.errors import DataError, MismatchError

from .conftest import BAD, rock_salt

MODEL = "tests.crystals.test_relaxation:lennard_jones"
STEPS = 8


def structures():
    salts = [rock_salt(edge, name=f"{edge}") for edge in (5.0, 5.2, 5.4, 5.6)]
    return [salts[0], BAD["collapsed"][0], *salts[1:]]


def quietly(given, path, **options):
    return relax_in_processes(given, path, model=MODEL, steps=STEPS, chunk=2, say=lambda line: None, **options)


@pytest.mark.parametrize("jobs", [1, 2])
def test_agrees_with_the_library(tmp_path, jobs):
    path, given = tmp_path / "relaxed.npz", structures()
    assert quietly(given, path, jobs=jobs) == len(given)
    found, *about = read_relaxed(path)
    assert about == [MODEL, STEPS]
    expected = relax_all(given, calculator(MODEL), STEPS)
    assert [one.problem[:20] for one in found] == [one.problem[:20] for one in expected]
    assert [(one.steps, one.converged) for one in found] == [(one.steps, one.converged) for one in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.candidate.name == b.candidate.name
        np.testing.assert_allclose(a.candidate.coords, b.candidate.coords)
        np.testing.assert_allclose(a.candidate.cell, b.candidate.cell)
        np.testing.assert_allclose([a.energy, a.rmsd], [b.energy, b.rmsd])


def test_stops_after_the_time_limit_and_resumes(tmp_path, monkeypatch):
    path, given, started = tmp_path / "relaxed.npz", structures(), []

    def slow(part, *rest):
        started.append([one.name for one in part])
        time.sleep(0.05)
        return relax_all(part, *rest)

    monkeypatch.setattr(module, "relax_all", slow)
    assert quietly(given, path, minutes=0.01 / 60) == 2
    assert len(read_relaxed(path).rows) == 2
    assert quietly(given, path) == len(given)
    assert started == [["5.0", "it"], ["5.2", "5.4"], ["5.6"]]  # none twice


def test_structures_after_a_gap_are_left_out(tmp_path):
    path, given = tmp_path / "relaxed.npz", structures()
    quietly(given, path)
    found = module._read(path, given, MODEL, STEPS)
    del found[2]
    module._write(path, given, found, MODEL, STEPS)
    assert [one.candidate.name for one in read_relaxed(path).rows] == ["5.0", "it"]


def test_a_file_of_something_else_is_refused(tmp_path):
    path, given = tmp_path / "relaxed.npz", structures()
    quietly(given, path)
    with pytest.raises(DataError, match="other file"):
        quietly(given[:2], path)
    with pytest.raises(MismatchError, match="at most 8 steps"):
        relax_in_processes(given, path, model=MODEL, steps=STEPS + 1)
    np.savez(path, done=np.arange(3))
    with pytest.raises(DataError, match="lacks"):
        read_relaxed(path)
