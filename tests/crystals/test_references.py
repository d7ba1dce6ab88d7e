"""The job that relaxes the references of the package's hull."""

import sys

import numpy as np
import pytest

pytest.importorskip("chgnet", exc_type=ImportError)

from benchmarks import references
from fmwc.crystals import Hull, energies, mp20, relax
from fmwc.crystals.hull import composition, make_shipped
from fmwc.crystals.structures import candidates

from .conftest import rock_salt


@pytest.fixture
def data(tmp_path, chgnet):
    """Three salts, the elements of which are missing, so that each is on the hull of its own system."""
    from fmwc.crystals.parsers import cell_of
    from fmwc.crystals.structures import from_cells

    salts = [rock_salt(5.6, name="mp-1"), rock_salt(6.2, cation=19, name="mp-2"), rock_salt(6.3, 19, name="mp-3")]
    crystals = from_cells({one.name: cell_of(one.structure()) for one in salts}, 20)
    np.savez(tmp_path / "test.npz", **mp20._arrays_of(crystals))
    stored = energies(crystals, chgnet).per_atom.astype(np.float32)
    np.savez(tmp_path / "chgnet_energies.npz", material_id=np.array(crystals.names, "S"), energy_per_atom=stored)
    return tmp_path


def call(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["references", *map(str, options)])
    references.main()


def test_references_are_relaxed_in_order_and_resume(data, monkeypatch, capsys, chgnet):
    out = data / "out.npz"
    always = ("--data", data, "--out", out, "--relax", 4, "--within", 0.05, "--chunk", 1)
    call(monkeypatch, *always, "--minutes", 1e-9)
    assert len(references.read(out)) == 0
    call(monkeypatch, *always, "--count", 1)
    first = references.read(out)
    call(monkeypatch, *always)
    assert "3 references, 1 of them" in capsys.readouterr().out
    rows = references.read(out)
    assert rows[:1] == first
    assert [row[4] for row in rows] == sorted(row[4] for row in rows)  # the nearest to the hull first
    expected = {one.name: relax(one, chgnet, 4) for one in candidates(mp20.load(data, "test"))}
    for name, split, formula, energy, _, relaxed, _, steps, converged in rows:
        assert (split, formula) == ("test", "NaCl" if name == "mp-1" else "ClK")
        assert relaxed == pytest.approx(expected[name].energy, abs=1e-6)
        assert (steps, converged) == (expected[name].steps, expected[name].converged)
        assert relaxed < energy


def test_relaxed_energies_become_part_of_the_shipped_references(data, monkeypatch):
    out = data / "out.npz"
    call(monkeypatch, "--data", data, "--out", out, "--relax", 2, "--within", 0.05, "--count", 1)
    (row,) = references.read(out)
    hull = Hull.load(make_shipped(data, out, data / "hull.npz"))
    key, other = sorted((composition(name) for name in ("NaCl", "KCl")), key=lambda key: key != composition(row[2]))
    assert hull.relaxed.energy(key)[0] == pytest.approx(min(row[5], hull.energy(key)[0]), abs=1e-6)
    assert hull.relaxed.energy(key)[0] < hull.energy(key)[0]
    assert hull.relaxed.energy(other)[0] == hull.energy(other)[0]
    assert Hull.load(make_shipped(data, path=data / "raw.npz")).relaxed is None


def test_several_processes_give_the_same_energies(data, monkeypatch):
    for jobs in (1, 2):
        out = data / f"{jobs}.npz"
        call(monkeypatch, "--data", data, "--out", out, "--relax", 1, "--chunk", 1, "--count", 2, "--jobs", jobs)
    alone, shared = (sorted(references.read(data / f"{jobs}.npz")) for jobs in (1, 2))
    assert alone == shared
