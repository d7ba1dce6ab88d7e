"""CHGNet's graph of a structure, built with whole arrays.

The package's own converter makes a Python object for every bond, which takes a third of the time of a prediction;
and writes a file into the working directory when it fails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fmwc.errors import DataError
from fmwc.metrics.crystals.candidates import SYMBOLS, Candidate
from fmwc.metrics.crystals.extras import need
from fmwc.metrics.crystals.geometry import Neighbours, neighbours

__all__ = ["graph"]


def _reversed(pairs: Neighbours, atoms: int) -> np.ndarray:  # (E,)
    """For each pair the place of the same pair seen from the other atom; −1 where that is missing."""
    reach = int(abs(pairs.image).max()) + 1
    base = 2 * reach + 1

    def code(centre: np.ndarray, other: np.ndarray, image: np.ndarray) -> np.ndarray:
        x, y, z = (image.astype(np.int64) + reach).T
        return (((centre * atoms + other) * base + x) * base + y) * base + z

    forward = code(pairs.centre, pairs.other, pairs.image)
    backward = code(pairs.other, pairs.centre, -pairs.image)
    order = np.argsort(forward)
    place = order[np.searchsorted(forward[order], backward).clip(max=len(order) - 1)]
    return np.where(forward[place] == backward, place, -1)


def _angles(centre: np.ndarray, short: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All ordered pairs of different short bonds that leave the same atom."""
    short = short[np.argsort(centre[short], kind="stable")]
    _, start, counts = np.unique(centre[short], return_index=True, return_counts=True)
    per_bond = np.repeat(counts, counts)  # how many bonds leave the atom that this bond leaves
    first = np.repeat(np.arange(len(short)), per_bond)
    offset = np.arange(len(first)) - np.repeat(np.cumsum(per_bond) - per_bond, per_bond)
    second = np.repeat(np.repeat(start, counts), per_bond) + offset
    different = first != second
    return short[first[different]], short[second[different]]


def graph(candidate: Candidate, cutoff: float, bond_cutoff: float) -> Any:
    """The `CrystalGraph` of a structure that is not refused."""
    pairs = neighbours(candidate, cutoff)
    if len(pairs.centre):
        back = _reversed(pairs, len(candidate))
        if (back < 0).any():  # a bond that rounding puts within the cutoff one way and beyond it the other
            pairs = Neighbours(*(part[back >= 0] for part in pairs))
            back = _reversed(pairs, len(candidate))
    alone = np.setdiff1d(np.arange(len(candidate)), pairs.centre)
    if len(alone):
        element = SYMBOLS[candidate.numbers[alone[0]] - 1]
        raise DataError(f"{element} (atom {alone[0]}) is isolated: no neighbour within {cutoff:g} Å")
    once = np.flatnonzero(np.arange(len(back)) < back)
    undirected = np.empty(len(back), np.int64)
    undirected[once] = undirected[back[once]] = np.arange(len(once))
    first, second = _angles(pairs.centre, np.flatnonzero(pairs.distance < bond_cutoff))
    bonds = np.stack([pairs.centre[first], undirected[first], first, undirected[second], second], 1)

    def integers(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))

    return need("chgnet.graph.crystalgraph").CrystalGraph(
        atomic_number=integers(candidate.numbers),
        atom_frac_coord=torch.from_numpy((candidate.coords % 1.0).astype(np.float32)),
        atom_graph=integers(np.stack([pairs.centre, pairs.other], 1)),
        atom_graph_cutoff=cutoff,
        neighbor_image=torch.from_numpy(pairs.image.astype(np.float32)),
        directed2undirected=integers(undirected),
        undirected2directed=integers(once),
        bond_graph=integers(bonds),
        bond_graph_cutoff=bond_cutoff,
        lattice=torch.from_numpy(candidate.cell.astype(np.float32)),
    )
