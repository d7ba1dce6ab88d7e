"""Crystals as tensors: one row a structure, padded with atoms of number 0; and as states of a flow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fmwc.data.parsers import ANGLES, ELEMENTS
from fmwc.errors import DataError, ShapeError

__all__ = [
    "ANGLES",
    "BITS",
    "ELEMENTS",
    "Crystals",
    "decode",
    "encode",
    "fold",
    "pad",
    "pymatgen_needed",
    "structure_of",
]

BITS = 7  # of Z − 1: 128 numbers hold the 118 elements


@dataclass(frozen=True)
class Crystals:
    """Creates a set of crystals.

    Attributes:
        numbers: Atomic numbers, `(N, A)` integers, atoms first; 0 where there is no atom.
        coords: Fractional coordinates in [0, 1), `(N, A, 3)`; 0 where there is no atom.
        lengths: a, b, c in ångström, `(N, 3)`.
        angles: α, β, γ in degrees, `(N, 3)`.
        names: What each is called, N strings.
    """

    numbers: Tensor
    coords: Tensor
    lengths: Tensor
    angles: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        rows = {f.name: len(getattr(self, f.name)) for f in fields(self)}
        if len(set(rows.values())) > 1:
            raise ShapeError(f"one row a crystal in every field, got {rows}")

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def atoms(self) -> Tensor:  # (N,)
        """How many atoms each has."""
        return (self.numbers > 0).sum(1)

    def take(self, index: Tensor | Sequence[int]) -> Crystals:
        """Some of them, in the order asked for."""
        rows = torch.as_tensor(index)
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        tensors = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "names"}
        return Crystals(**tensors, names=tuple(self.names[i] for i in rows.tolist()))


def pad(counts: Tensor, flat: Tensor, width: int) -> Tensor:  # (N,), (ΣA, *) -> (N, width, *)
    """Rows of varying number, one after another, as rows of one width, with zeros behind."""
    padded = flat.new_zeros(len(counts), width, *flat.shape[1:])
    padded[torch.arange(width) < counts[:, None]] = flat
    return padded


def fold(coords: Tensor) -> Tensor:
    """Fractional coordinates in [0, 1): a tiny negative one has the remainder 1, and is 0.

    >>> fold(torch.tensor([-0.25, -1e-9, 1.0, 2.5]))
    tensor([0.7500, 0.0000, 0.0000, 0.5000])
    """
    inside = coords.remainder(1.0)
    return inside * (inside < 1)


@contextmanager
def pymatgen_needed() -> Iterator[None]:
    """Says how to get pymatgen, where an import inside finds none."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"crystal structures are read and built with pymatgen ({error}); install it: pip install 'fmwc[crystals]'"
        ) from error


def encode(crystals: Crystals) -> tuple[dict[str, Tensor], Tensor]:
    """A flow's state, and the number of atoms of each crystal.

    `type` `(N, A, 7)`: the bits of Z − 1 as ±1. `coord` `(N, A, 3)`. `lattice` `(N, 6)`: the lengths in ångström and
    the logits of the angles' place between 59.9° and 120.1°. Where there is no atom there are zeros.
    """
    present = crystals.numbers > 0
    if bool(((crystals.numbers < 0) | (crystals.numbers > 1 << BITS)).any()):
        raise DataError(f"atomic numbers run from 1 to {ELEMENTS}, and 0 for no atom, got {crystals.numbers.max()}")
    bits = (crystals.numbers - 1).clamp_min(0)[..., None] >> torch.arange(BITS) & 1
    place = (crystals.angles - ANGLES[0]) / (ANGLES[1] - ANGLES[0])
    if bool(((place <= 0) | (place >= 1)).any()):
        raise DataError(f"a cell's angles lie between {ANGLES[0]}° and {ANGLES[1]}°; reduce the cells (Niggli) first")
    state = {
        "type": (bits * 2.0 - 1) * present[..., None],
        "coord": crystals.coords * present[..., None],
        "lattice": torch.cat([crystals.lengths, place.logit()], 1),
    }
    return {name: value.float() for name, value in state.items()}, present.sum(1)


def decode(state: dict[str, Tensor], atoms: Tensor, names: Sequence[str] | None = None) -> Crystals:
    """The crystals of a flow's states: bits by their sign. Numbers above 118 are left for a judge to refuse."""
    types, coords, lattice = (state[name].detach().cpu() for name in ("type", "coord", "lattice"))
    present = torch.arange(types.shape[1]) < atoms.cpu()[:, None]
    numbers = 1 + ((types > 0) << torch.arange(BITS)).sum(-1)
    low, high = ANGLES
    angles = low + (high - low) * lattice[:, 3:].sigmoid()
    width = max(5, math.ceil(math.log10(max(len(atoms), 1))))
    return Crystals(
        numbers * present,
        fold(coords) * present[..., None],
        lattice[:, :3],
        angles,
        tuple(names or (f"{i:0{width}d}" for i in range(len(atoms)))),
    )


def structure_of(crystals: Crystals, index: int) -> Any:
    """One of them as a pymatgen structure."""
    with pymatgen_needed():
        from pymatgen.core import Lattice, Structure

    count = int(crystals.atoms[index])
    numbers = crystals.numbers[index, :count].tolist()
    if strange := [z for z in numbers if not 1 <= z <= ELEMENTS]:
        raise DataError(f"atomic number {strange[0]} is none of the {ELEMENTS} elements")
    cell = Lattice.from_parameters(*crystals.lengths[index].tolist(), *crystals.angles[index].tolist())
    return Structure(cell, numbers, crystals.coords[index, :count].double().numpy())
