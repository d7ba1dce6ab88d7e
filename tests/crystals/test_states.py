"""Crystals as tensors and as states: what goes in comes out, and what cannot go in is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmwc.crystals.structures import ANGLES, BITS, ELEMENTS, Crystals, decode, encode, fold, pad
from fmwc.errors import DataError, ShapeError


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
    state["type"][empty] = 1.0  # as a flow would leave them
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
    assert ELEMENTS < crystals.numbers.max() <= 128  # left for a judge to refuse
    assert ((crystals.coords >= 0) & (crystals.coords < 1)).all()
    assert ((crystals.angles >= ANGLES[0]) & (crystals.angles <= 120.10001)).all()
    assert crystals.names[:2] == ("00000", "00001")


def test_fold():
    x = torch.tensor([-1e-9, -1e-20, -0.25, 0.0, 1.0, 0.99999994, 7.5, -3.0])
    assert fold(x).tolist() == [0.0, 0.0, 0.75, 0.0, 0.0, 0.9999999403953552, 0.5, 0.0]
    assert fold(torch.tensor([float("nan")])).isnan().all()
