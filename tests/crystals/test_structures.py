"""Structures as arrays, their checks, and their encoding as states of a flow."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.crystals import candidates
from fmwc.crystals.structures import (
    ANGLES,
    BITS,
    ELEMENTS,
    Crystals,
    decode,
    encode,
    fold,
    key_of,
    neighbours,
    pad,
    refusal,
    symbol,
)
from fmwc.errors import DataError, ShapeError, UsageError

from .conftest import BAD, rock_salt, structure_of


def test_the_symbols_are_those_of_pymatgen():
    from pymatgen.core import Element

    assert [Element.from_Z(z).symbol for z in range(1, 119)] == [symbol(z) for z in range(1, 119)]


def test_crystals_pymatgen_and_ase_give_the_same_candidate(prototypes):
    for i, ours in enumerate(candidates(prototypes)):
        theirs = structure_of(prototypes, i)
        for other in (theirs, theirs.to_ase_atoms()):
            (one,) = candidates([other])
            assert one.numbers.tolist() == ours.numbers.tolist()
            assert one.formula == ours.formula == theirs.composition.reduced_formula
            np.testing.assert_allclose(one.volume, ours.volume, rtol=1e-6)
            a, b = (np.sort(neighbours(c, 4.0).distance) for c in (ours, one))
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_impossible_angles_are_reported():
    wrong = Crystals(
        torch.tensor([[11, 17]]), torch.zeros(1, 2, 3), torch.full((1, 3), 4.0),
        torch.tensor([[60.0, 60.0, 125.0]]), ("wrong",),
    )  # fmt: skip
    assert "do not form a cell" in refusal(candidates(wrong)[0])


def test_shared_sites_are_reported():
    from pymatgen.core import Lattice, Structure

    shared = Structure(Lattice.cubic(4), [{"Na": 0.5, "K": 0.5}], [[0, 0, 0]])
    assert "shared by several elements" in candidates([shared])[0].problem


def test_other_types_are_refused():
    with pytest.raises(DataError, match="not dict"):
        candidates([{}])


def test_import_loads_no_heavy_modules():
    code = "import sys, fmwc.crystals; print('\\n'.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {line.split(".")[0] for line in found.stdout.splitlines()}
    assert not loaded & {"pymatgen", "ase", "chgnet", "pyarrow", "pandas"}


def test_keys_are_reduced():
    assert key_of([8, 26, 8, 26, 8, 8, 8, 26, 26, 8]) == ((8, 3), (26, 2))
    assert rock_salt().key == ((11, 1), (17, 1))


@pytest.mark.parametrize("which", BAD)
def test_bad_cells_are_refused_quickly(which):
    candidate, message = BAD[which]
    start = time.perf_counter()
    reason = refusal(candidate, 94)
    assert time.perf_counter() - start < 1
    assert message in reason or which == "isolated"
    assert not refusal(rock_salt(), 94)


def test_neighbours_of_rock_salt():
    found = neighbours(rock_salt(), 4.0)  # 6 at a/2 = 2.82, 12 at a/√2 = 3.99
    assert len(found.distance) == 8 * 18
    np.testing.assert_allclose(np.unique(found.distance.round(3)), [2.82, 3.988])


def test_the_pymatgen_structure_of_rock_salt(monkeypatch):
    structure = rock_salt().structure()
    assert structure.composition.reduced_formula == "NaCl"
    assert structure.get_distance(0, 6) == pytest.approx(5.64 / 2)
    assert structure.density == pytest.approx(2.164, abs=0.005)  # g/cm³, the density of table salt
    monkeypatch.setitem(sys.modules, "pymatgen.core", None)
    with pytest.raises(UsageError, match=r"pip install 'fmwc\[crystals\]'"):
        rock_salt().structure()


# ---- crystals as tensors and as states -------------------------------------------------------------------------------


def some(count=12, width=6, seed=0):
    """Random crystals of 1 to `width` atoms."""
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.arange(count) % width + 1
    present = torch.arange(width) < atoms[:, None]
    return Crystals(
        torch.randint(1, ELEMENTS + 1, (count, width), generator=generator) * present,
        torch.rand(count, width, 3, generator=generator) * present[..., None],
        2 + 5 * torch.rand(count, 3, generator=generator),
        60 + 60 * torch.rand(count, 3, generator=generator),
        tuple(f"c{i}" for i in range(count)),
    )


def salt():
    """Rock salt in its primitive cell."""
    return Crystals(
        torch.tensor([[11, 17, 0]]),
        torch.tensor([[[0.0] * 3, [0.5] * 3, [0.0] * 3]]),
        torch.full((1, 3), 5.64 / 2**0.5),
        torch.full((1, 3), 60.0),
        ("NaCl",),
    )


def alone(z):
    return Crystals(torch.tensor([[z]]), torch.zeros(1, 1, 3), torch.ones(1, 3), torch.full((1, 3), 90.0), ("x",))


def test_rows_must_agree():
    good = some(3)
    with pytest.raises(ShapeError, match="'names': 2"):
        Crystals(good.numbers, good.coords, good.lengths, good.angles, ("a", "b"))
    with pytest.raises(ShapeError, match="one row per crystal"):
        Crystals(good.numbers, good.coords[:2], good.lengths, good.angles, good.names)


def test_atoms_are_counted():
    assert some().atoms.tolist() == [1, 2, 3, 4, 5, 6] * 2
    assert len(some(7)) == 7


def test_take():
    whole = some()
    part = whole.take([5, 2, 2])
    assert part.names == ("c5", "c2", "c2")
    for field in ("numbers", "coords", "lengths", "angles"):
        assert torch.equal(getattr(part, field), getattr(whole, field)[[5, 2, 2]])
    assert whole.take(whole.atoms == 6).names == ("c5", "c11")
    assert whole.take(torch.tensor([], dtype=torch.long)).names == ()


@pytest.mark.parametrize("tail", [(), (3,)])
def test_pad(tail):
    counts = torch.tensor([2, 0, 3])
    flat = torch.arange(1, 6).reshape(5, *[1] * len(tail)).expand(5, *tail)
    padded = pad(counts, flat, 4)
    assert padded.shape == (3, 4, *tail)
    for row, wanted in zip(padded, [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 0]], strict=True):
        assert row.reshape(4, -1)[:, -1].tolist() == wanted
    assert padded.dtype == flat.dtype


def test_bits_of_every_element():
    everything = Crystals(
        torch.arange(1, ELEMENTS + 1)[:, None],
        torch.zeros(ELEMENTS, 1, 3),
        torch.ones(ELEMENTS, 3),
        torch.full((ELEMENTS, 3), 90.0),
        tuple(map(str, range(ELEMENTS))),
    )
    bits = encode(everything)[0]["type"][:, 0]
    assert bits.dtype == torch.float32
    assert bits.abs().eq(1).all()
    for z, row in enumerate(bits.tolist(), 1):
        assert "".join("1" if bit > 0 else "0" for bit in reversed(row)) == f"{z - 1:07b}"
    again = decode(*encode(everything))
    assert torch.equal(again.numbers, everything.numbers)


@given(st.integers(0, 10_000))
def test_decode_is_the_inverse_of_encode(seed):
    before = some(seed=seed)
    state, atoms = encode(before)
    after = decode(state, atoms, before.names)
    assert torch.equal(after.numbers, before.numbers)
    assert torch.equal(after.coords, before.coords)
    assert torch.equal(after.lengths, before.lengths)
    assert torch.allclose(after.angles, before.angles, atol=1e-4)
    assert after.names == before.names
    assert torch.equal(atoms, before.atoms)


def test_the_state():
    state, atoms = encode(salt())
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "type": (1, 3, BITS),
        "coord": (1, 3, 3),
        "lattice": (1, 6),
    }
    assert all(value.dtype == torch.float32 for value in state.values())
    assert state["type"][0].tolist() == [
        [-1, 1, -1, 1, -1, -1, -1],
        [-1, -1, -1, -1, 1, -1, -1],
        [0] * 7,
    ]  # 10, 16, none
    place = (60 - 59.9) / (120.1 - 59.9)
    assert state["lattice"][0].tolist() == pytest.approx([3.98808] * 3 + [np.log(place / (1 - place))] * 3, rel=1e-4)
    assert atoms.tolist() == [2]


def test_padding_is_zero():
    dirty = some()
    dirty.coords[dirty.numbers == 0] = 0.5
    state, atoms = encode(dirty)
    empty = torch.arange(6) >= atoms[:, None]
    assert empty.any()
    assert state["type"][empty].eq(0).all()
    assert state["coord"][empty].eq(0).all()
    state["type"][empty] = 1.0  # as a flow would return them
    state["coord"][empty] = 0.7
    after = decode(state, atoms)
    assert after.numbers[empty].eq(0).all()
    assert after.coords[empty].eq(0).all()


@pytest.mark.parametrize("angle", [59.89, 120.11, 30.0, 150.0, float("-inf")])
def test_angles_out_of_bounds(angle):
    crystals = some(3)
    crystals.angles[1, 2] = angle
    with pytest.raises(DataError, match=r"between 59\.9° and 120\.1°.*Niggli"):
        encode(crystals)


@pytest.mark.parametrize("z", [-1, 129, 200])
def test_numbers_that_the_bits_cannot_hold(z):
    with pytest.raises(DataError, match="1 to 118"):
        encode(alone(z))


def test_arbitrary_states_decode():
    generator = torch.Generator().manual_seed(0)
    state = {
        "type": torch.randn(200, 4, BITS, generator=generator),
        "coord": 9 * torch.randn(200, 4, 3, generator=generator),
        "lattice": 30 * torch.randn(200, 6, generator=generator),
    }
    crystals = decode(state, torch.full((200,), 4))
    assert crystals.numbers.min() >= 1
    assert ELEMENTS < crystals.numbers.max() <= 128  # the judge refuses it
    assert ((crystals.coords >= 0) & (crystals.coords < 1)).all()
    assert ((crystals.angles >= ANGLES[0]) & (crystals.angles <= 120.10001)).all()
    assert crystals.names[:2] == ("00000", "00001")


def test_fold():
    x = torch.tensor([-1e-9, -1e-20, -0.25, 0.0, 1.0, 0.99999994, 7.5, -3.0])
    assert fold(x).tolist() == [0.0, 0.0, 0.75, 0.0, 0.0, 0.9999999403953552, 0.5, 0.0]
    assert fold(torch.tensor([float("nan")])).isnan().all()
