"""Whether an edit of a crystal is a success (paper, editing)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fmwc.data.crystals import Crystals
from fmwc.errors import ShapeError, pick
from fmwc.metrics.crystals.candidates import key_of

__all__ = ["MODES", "MOVED", "Mode", "chemistry_changed", "coordinate_rmsd", "success"]

MOVED = 0.10  # the RMSD of fractional coordinates above which a structure has moved (paper)


class Mode(NamedTuple):
    """One row of the table: the channel that gets the noise, and whether chemistry is to change (`None`: either)."""

    channel: str | None
    changed: bool | None


MODES = {
    "chem-swap": Mode("type", True),
    "polymorph": Mode("coord", False),
    "all-channels": Mode(None, None),
}


def chemistry_changed(seed: Crystals, edited: Crystals) -> Tensor:  # (N,)
    """Whether the reduced formula is another."""
    _paired(seed, edited)
    pairs = zip(seed.numbers.tolist(), edited.numbers.tolist(), strict=True)
    return torch.tensor([key_of([z for z in a if z]) != key_of([z for z in b if z]) for a, b in pairs])


def coordinate_rmsd(seed: Crystals, edited: Crystals) -> Tensor:  # (N,)
    """√(mean over atoms of ‖Δ‖²) in fractional coordinates, atoms matched by index, Δ the shorter way round.

    The common shift is taken off first: Δ's circular mean in each direction, then the mean of what is left, because a
    crystal moved as a whole is the same crystal.
    """
    _paired(seed, edited)
    present = (seed.numbers > 0)[..., None].double()
    atoms = present.sum(1, keepdim=True).clamp_min(1)
    delta = (edited.coords.double() - seed.coords.double()) * 2 * math.pi
    shift = torch.atan2((delta.sin() * present).sum(1, keepdim=True), (delta.cos() * present).sum(1, keepdim=True))
    left = _wrapped((delta - shift) / (2 * math.pi)) * present
    left = _wrapped(left - left.sum(1, keepdim=True) / atoms) * present
    return (left.square().sum((1, 2)) / atoms[:, 0, 0]).sqrt()


def success(
    mode: str,
    seed: Crystals,
    edited: Crystals,
    seed_energy: ArrayLike | Tensor,
    edited_energy: ArrayLike | Tensor,
    *,
    moved: float = MOVED,
) -> Tensor:  # (N,)
    """The chemistry is as the mode intends, the RMSD is above `moved`, and the energy above hull is below the seed's.

    An energy that could not be found (NaN) is no success.

    Arguments:
        mode: `chem-swap`, `polymorph` or `all-channels`.
        seed, edited: One seed for each edit, in the same order.
        seed_energy, edited_energy: Above the hull, eV/atom.
    """
    intent = pick(MODES, mode, "mode").changed
    before, after = (torch.as_tensor(e, dtype=torch.float64) for e in (seed_energy, edited_energy))
    if before.shape != (len(seed),) or after.shape != (len(seed),):
        raise ShapeError(f"one energy a crystal: {len(seed)} edits, got {tuple(before.shape)} and {tuple(after.shape)}")
    good = (coordinate_rmsd(seed, edited) > moved) & (after < before)
    return good if intent is None else good & (chemistry_changed(seed, edited) == intent)


def _wrapped(fraction: Tensor) -> Tensor:
    return fraction - fraction.round()


def _paired(seed: Crystals, edited: Crystals) -> None:
    if len(seed) != len(edited):
        raise ShapeError(f"one seed for each edit, in the same order: got {len(seed)} seeds and {len(edited)} edits")
    if seed.numbers.shape != edited.numbers.shape or not torch.equal(seed.atoms, edited.atoms):
        raise ShapeError("a seed and its edit have the same number of atoms, matched by index")
