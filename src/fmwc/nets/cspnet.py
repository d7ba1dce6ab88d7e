"""The crystal backbone: messages between all pairs of atoms of a cell (App. architectures; the paper's CSPNet).

A batch holds crystals of any mix of sizes. States are padded to the largest; inside, atoms and pairs are compacted to
flat lists, so that no arithmetic is spent on padding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.modes import compiling

__all__ = ["CSPNet", "Layout", "layout_of"]

ALIGN = 8  # tensor cores take products whose inner size is a multiple of this


class Layout(NamedTuple):
    """Where the atoms and pairs of a padded batch are in flat lists.

    Attributes:
        slot: The place of each atom in the padded batch, `(N,)`; `B·A` for a row that is no atom.
        crystal: The crystal of each atom, `(N,)`; `B` for none.
        receiver, sender: The two atoms of each ordered pair, `(E,)`; `N` for a row that is no pair.
        pair: The crystal of each pair, `(E,)`; `B` for none.
    """

    slot: Tensor
    crystal: Tensor
    receiver: Tensor
    sender: Tensor
    pair: Tensor


def _places(mask: Tensor, size: int) -> Tensor:  # (M,) -> (size,)
    """The places where the mask is true, in order, then M: `nonzero` with a shape that does not depend on values."""
    where = mask.cumsum(0) - 1
    where = torch.where(mask & (where < size), where, size)
    found = torch.full((size + 1,), len(mask), device=mask.device)
    return found.scatter(0, where, torch.arange(len(mask), device=mask.device))[:size]


def _rounded_up(rows: int) -> int:
    """The next of numbers at most a sixteenth apart, or `ALIGN`.

    >>> _rounded_up(3), _rounded_up(1000), _rounded_up(1025)
    (8, 1024, 1088)
    """
    grain = max(ALIGN, 1 << max(0, rows.bit_length() - 5))
    return max(grain, -(-rows // grain) * grain)


def layout_of(atoms: Tensor, width: int, room: tuple[int, int] | None = None) -> Layout:  # (B,)
    """The layout of crystals with so many atoms.

    Arguments:
        width: The number of places for atoms in the padded batch, A.
        room: Rows to make for atoms and for pairs; just enough if `None`, which asks the device how many there are.
    """
    count, each = len(atoms), torch.arange(width, device=atoms.device)
    there = each < atoms[:, None]  # (B, A)
    pairs = there[:, :, None] & there[:, None, :] & (each[:, None] != each)
    if room is None:
        total = int(atoms.sum())
        edges = max(1, int((atoms * (atoms - 1)).sum()))
        while edges in (count, total):  # rows of crystals, atoms and pairs are told apart by their number
            edges += 1
        room = total, edges
    slot = _places(there.flatten(), room[0])
    place = _places(pairs.flatten(), room[1])
    # The number of an atom in the flat list; whatever is no atom points behind the list.
    number = torch.cat([there.flatten().cumsum(0) - 1, torch.full((1,), room[0], device=atoms.device)])
    end = count * width
    pair = place // width**2
    receiver = number[torch.where(pair < count, place // width, end)]
    sender = number[torch.where(pair < count, pair * width + place % width, end)]
    return Layout(slot, slot // width, receiver, sender, pair)


class Messages(nn.Module):
    """Creates one layer of messages.

    The first edge layer is linear in a concatenation, so it is split: what belongs to an atom or to a cell is computed
    once for it and handed to its pairs, which is the same function at a third of the arithmetic.
    """

    def __init__(self, hidden: int, offset: int, cell: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.from_receiver = nn.Linear(hidden, hidden, bias=False)
        self.from_sender = nn.Linear(hidden, hidden, bias=False)
        self.from_cell = nn.Linear(cell, hidden)
        self.from_offset = nn.Linear(offset, hidden, bias=False)
        self.edge = nn.Linear(hidden, hidden)
        self.gather = nn.Linear(2 * hidden, hidden)
        self.update = nn.Linear(hidden, hidden)

    def forward(self, h: Tensor, offset: Tensor, cell: Tensor, neighbours: Tensor, at: Layout) -> Tensor:
        normed = self.norm(h)
        here = self.from_receiver(normed) + _rows(self.from_cell(cell), at.crystal)
        message = _rows(here, at.receiver) + _rows(self.from_sender(normed), at.sender) + self.from_offset(offset)
        message = F.silu(self.edge(F.silu(message)))
        heard = h.new_zeros(len(h) + 1, h.shape[1]).index_add(0, at.receiver, message.to(h.dtype))[:-1] / neighbours
        return h + F.silu(self.update(F.silu(self.gather(torch.cat([normed, heard], -1)))))


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows by index; any row where the index points behind the table, for it will not be read."""
    return table[index.clamp_max(len(table) - 1)]


class CSPNet(nn.Module):
    """Creates a velocity network of crystals: `v(x, t, atoms)` with the channels `type`, `coord` and `lattice`.

    Its velocity turns with the order of the atoms, and does not change when all atoms are shifted, or any by
    a period (but for pairs exactly half a period apart, whose direction has two signs).

    Arguments:
        hidden: The width of atoms and messages.
        layers: Layers of messages.
        frequencies: Sines and cosines of an offset, on each axis.
        time_features: The size of the time's embedding.
        types: Numbers that say what an atom is.
        width: The most atoms in a cell.
    """

    lattice_mean: Tensor
    lattice_std: Tensor
    velocity_mean: Tensor
    velocity_std: Tensor
    coord_std: Tensor
    sizes: Tensor

    def __init__(
        self,
        hidden: int = 512,
        layers: int = 6,
        frequencies: int = 128,
        time_features: int = 256,
        types: int = 7,
        width: int = 20,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "hidden": hidden,
            "layers": layers,
            "frequencies": frequencies,
            "time_features": time_features,
            "types": types,
            "width": width,
        }
        self.width, self.frequencies = width, frequencies
        # Rows for atoms and for pairs by the number of crystals, where shapes must not depend on values: in a captured
        # graph. Whoever captures one sees to it that its batches fit.
        self.rooms: dict[int, tuple[int, int]] = {}
        plain = 6 * frequencies + 3
        self.padding = -plain % ALIGN
        self.time = nn.Linear(1, time_features, bias=False)
        self.kind = nn.Linear(types, hidden)
        self.start = nn.Linear(hidden + time_features, hidden)
        self.size = nn.Embedding(width + 1, hidden)
        self.layers = nn.ModuleList(Messages(hidden, plain + self.padding, hidden + 6) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.to_coord = nn.Linear(hidden, 3, bias=False)
        self.to_type = nn.Linear(hidden, types)
        self.to_lattice = nn.Linear(2 * hidden, 6)
        for name in ("lattice", "velocity"):
            self.register_buffer(f"{name}_mean", torch.zeros(6))
            self.register_buffer(f"{name}_std", torch.ones(6))
        self.register_buffer("coord_std", torch.tensor(1.0))
        self.register_buffer("sizes", torch.ones(width + 1))  # how many crystals of each size it was trained on
        self.sizes[0] = 0

    def draw_sizes(self, count: int, seed: int = 0) -> Tensor:  # -> (count,)
        """Numbers of atoms, as often as among what it was trained on; a longer draw starts with the same."""
        uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        share = self.sizes.double().cpu().cumsum(0)
        return torch.searchsorted(share, uniform * share[-1], right=True).clamp_max(self.width)

    def rows(self, x: Any, t: Any, *, atoms: Tensor) -> list[Tensor]:
        """The crystal each atom, and each pair of atoms, belongs to, in the order the layers see them."""
        at = self._layout(atoms)
        return [at.crystal, at.pair]

    def reserve(self, *, atoms: Tensor) -> tuple[int, int]:
        """Makes room for crystals of these sizes, and a little more, so that most batches as large fit; says how much.

        Whoever compiles or captures asks before every batch: rows without room would be lost.
        """
        need = int(atoms.sum()), int((atoms * (atoms - 1)).sum())
        room = self.rooms.get(len(atoms))
        if room is None or room[0] < need[0] or room[1] < need[1]:
            rows, pairs = map(_rounded_up, need)
            while rows == len(atoms):
                rows += ALIGN
            while pairs in (len(atoms), rows):  # rows of crystals, atoms and pairs are told apart by their number
                pairs += ALIGN
            room = self.rooms[len(atoms)] = rows, pairs
        return room

    def _layout(self, atoms: Tensor) -> Layout:
        captured = atoms.is_cuda and torch.cuda.is_current_stream_capturing()
        room = self.rooms.get(len(atoms)) if captured or compiling() else None
        if captured and room is None:
            raise RuntimeError(f"a captured graph of {len(atoms)} crystals needs to know their most rows: net.rooms")
        return layout_of(atoms, self.width, room)

    def forward(self, x: dict[str, Tensor], t: Tensor, *, atoms: Tensor) -> dict[str, Tensor]:
        at, count = self._layout(atoms), len(atoms)
        lattice, dtype = x["lattice"], x["coord"].dtype
        cell = torch.cat([(lattice - self.lattice_mean) / self.lattice_std, self.size(atoms)], -1)
        when = self.time(t.expand(count).to(dtype)[:, None])
        h = self.start(torch.cat([self.kind(_rows(x["type"].flatten(0, 1), at.slot)), _rows(when, at.crystal)], -1))
        h = h.to(dtype)  # in reduced precision, layers are; what they add up to is not
        offset = self._offset(_rows(x["coord"].flatten(0, 1), at.slot), lattice, at)
        neighbours = _rows((atoms - 1).clamp_min(1).to(dtype), at.crystal)[:, None]
        for layer in self.layers:
            h = layer(h, offset, cell, neighbours, at)
        h = self.norm(h)
        total = h.new_zeros(count + 1, h.shape[1]).index_add(0, at.crystal, h)[:count]
        coord = self._padded(self.to_coord(h), at, count)
        there = (torch.arange(self.width, device=atoms.device) < atoms[:, None])[..., None]
        drift = coord.sum(1, keepdim=True) / atoms[:, None, None]
        pooled = self.to_lattice(torch.cat([total / atoms[:, None], total], -1))
        return {
            "type": self._padded(self.to_type(h), at, count),
            "coord": (coord - drift) * there * self.coord_std,
            "lattice": pooled * self.velocity_std + self.velocity_mean,
        }

    def _offset(self, coord: Tensor, lattice: Tensor, at: Layout) -> Tensor:  # (N, 3), (B, 6) -> (E, 6K + 3 + padding)
        """What a pair sees of where the other is: waves of the fractional offset, and its direction in the metric."""
        delta = _rows(coord, at.sender) - _rows(coord, at.receiver)
        angle = 2 * math.pi * delta
        near = torch.atan2(angle.sin(), angle.cos()) / (2 * math.pi)  # the shorter way round
        direction = torch.einsum("eij,ej->ei", _rows(metric(lattice), at.pair), near)
        direction = F.normalize(direction, dim=-1, eps=1e-6)  # 0/0 where two atoms meet
        k = torch.arange(1, self.frequencies + 1, device=coord.device, dtype=coord.dtype)
        turns = (delta[..., None] * k).flatten(1)
        waves = 2 * math.pi * (turns - turns.round())  # small angles: quicker, and the same for every image
        return F.pad(torch.cat([waves.sin(), waves.cos(), direction], -1), (0, self.padding))

    def _padded(self, rows: Tensor, at: Layout, count: int) -> Tensor:  # (N, D) -> (B, A, D)
        flat = rows.new_zeros(count * self.width + 1, rows.shape[1]).index_add(0, at.slot, rows)[:-1]
        return flat.unflatten(0, (count, self.width))


def metric(lattice: Tensor, angles: tuple[float, float] = (59.9, 120.1)) -> Tensor:  # (B, 6) -> (B, 3, 3)
    """L Lᵀ, the products of the cell's edges: a_i a_j cos(angle between them)."""
    low, high = angles
    cos = torch.deg2rad(low + (high - low) * lattice[:, 3:].sigmoid()).cos()
    alpha, beta, gamma = cos.unbind(1)
    one = torch.ones_like(alpha)
    angle = torch.stack([one, gamma, beta, gamma, one, alpha, beta, alpha, one], 1).unflatten(1, (3, 3))
    return lattice[:, :3, None] * lattice[:, None, :3] * angle
