"""Fingerprints have known values for ideal coordination, are invariant, and resume."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("matminer")

from fmwc.crystals import fingerprints as module
from fmwc.crystals.fingerprints import featurizers, fingerprints
from fmwc.errors import DataError

from .conftest import BAD, FACES, crystal, rock_salt


def by_label(row):
    return dict(zip(featurizers()[0].feature_labels(), row, strict=True))


def test_ideal_coordination():
    caesium_chloride = crystal([55, 17], [[0, 0, 0], [0.5, 0.5, 0.5]], [4.1, 4.1, 4.1])
    diamond = replace(rock_salt(3.57, 6, 6), coords=np.concatenate([FACES, FACES + 0.25]) % 1)
    found = fingerprints([rock_salt(), caesium_chloride, diamond])
    assert found.usable.all()
    assert found.complete
    expected = ["wt CN_6", "octahedral CN_6"], ["wt CN_8", "body-centered cubic CN_8"], ["wt CN_4", "tetrahedral CN_4"]
    for row, labels in zip(found.sites, expected, strict=True):
        weight, order = (by_label(row)[label] for label in labels)
        assert weight > 0.9  # of the coordination number, by distances and radii
        assert order == pytest.approx(weight, rel=0.02)  # the shape is ideal


def test_statistics_of_the_elements():
    labels = featurizers()[1].feature_labels()
    row = dict(zip(labels, fingerprints([rock_salt()]).compositions[0], strict=True))
    assert row["MagpieData mean Number"] == 14
    assert row["MagpieData range Number"] == 6
    assert row["MagpieData avg_dev Number"] == 3


def test_translations_and_supercells_have_the_same_fingerprint():
    salt = rock_salt()
    shifted = replace(salt, coords=(salt.coords + np.array([0.1, 0.23, 0.37])) % 1)
    coords = np.concatenate([salt.coords / [2, 1, 1], salt.coords / [2, 1, 1] + [0.5, 0, 0]])
    twice = replace(salt, numbers=np.tile(salt.numbers, 2), coords=coords, cell=salt.cell * [[2], [1], [1]])
    found = fingerprints([salt, shifted, twice])
    np.testing.assert_allclose(found.sites[1:], found.sites[[0, 0]], atol=1e-6)
    np.testing.assert_allclose(found.compositions[1:], found.compositions[[0, 0]])


def test_structures_without_fingerprint_have_a_reason():
    given = [candidate for candidate, _ in BAD.values()]
    found = fingerprints([*given, rock_salt()])
    assert found.problems[-1] == ""
    for row, problem in zip(found.sites, found.problems, strict=True):
        assert np.isnan(row).all() == bool(problem)
    problems = dict(zip(BAD, found.problems, strict=False))
    assert "collapsed" in problems["collapsed"]
    assert "needle" in problems["needle"]  # which would take a minute


def test_an_interrupted_call_resumes(tmp_path, monkeypatch):
    given = [rock_salt(edge, name=f"{edge}") for edge in (5.5, 5.6, 5.7)]
    monkeypatch.setattr(module, "TOGETHER", 2)
    compute, done, path = module._fingerprint, [], tmp_path / "kept.npz"

    def stops(candidate):
        if candidate.name == "5.7":
            raise KeyboardInterrupt
        return compute(candidate)

    monkeypatch.setattr(module, "_fingerprint", stops)
    with pytest.raises(KeyboardInterrupt):
        fingerprints(given, kept=path)
    half = module.read_fingerprints(path, given)
    assert half.usable.tolist() == [True, True, False]
    assert not half.complete
    monkeypatch.setattr(module, "_fingerprint", lambda candidate: done.append(candidate.name) or compute(candidate))
    rest = fingerprints(given, kept=path)
    assert rest.complete
    assert done == ["5.7"]
    np.testing.assert_allclose(rest.sites, fingerprints(given).sites, rtol=1e-6)


def test_a_file_of_other_structures_is_refused(tmp_path):
    path = tmp_path / "kept.npz"
    fingerprints([rock_salt()], kept=path)
    for other in (rock_salt(name="other"), rock_salt(5.0), rock_salt(cation=19)):
        with pytest.raises(DataError, match="choose another file"):
            fingerprints([other], kept=path)


def test_several_processes_agree_with_one():
    given = [rock_salt(edge) for edge in (5.5, 5.6, 5.7, 5.8)]
    np.testing.assert_array_equal(fingerprints(given, jobs=2).sites, fingerprints(given).sites)
