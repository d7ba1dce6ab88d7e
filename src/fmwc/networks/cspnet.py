"""Network for crystals: messages between all pairs of atoms in a cell (App. architectures; the paper's CSPNet).

A batch may mix crystals of different sizes. States are padded to the largest size; the network packs atoms and pairs
into flat lists, so that no arithmetic is spent on padding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.modes import compiling

ALIGN = 8  # tensor cores need inner sizes that are multiples of this


class Layout(NamedTuple):
    """Flat lists of atoms and pairs of a padded batch. Unused rows hold the index after the last valid one.

    Attributes:
        slot: The position of each atom in the padded batch, `(N,)`; `B·A` if unused.
        crystal: The crystal of each atom, `(N,)`; `B` if unused.
        receiver, sender: The two atoms of each ordered pair, `(E,)`; `N` if unused.
        pair: The crystal of each pair, `(E,)`; `B` if unused.
    """

    slot: Tensor
    crystal: Tensor
    receiver: Tensor
    sender: Tensor
    pair: Tensor


def _places(mask: Tensor, size: int) -> Tensor:  # (M,) -> (size,)
    """Return the indices where the mask is true, padded with M: `nonzero` with a static shape."""
    rank = mask.cumsum(0) - 1
    target = torch.where(mask & (rank < size), rank, size)
    indices = torch.full((size + 1,), len(mask), device=mask.device)
    return indices.scatter(0, target, torch.arange(len(mask), device=mask.device))[:size]


def _rounded_up(rows: int) -> int:
    """Round up to a multiple of `ALIGN`, or of about a sixteenth of `rows` if that is larger.

    >>> _rounded_up(3), _rounded_up(1000), _rounded_up(1025)
    (8, 1024, 1088)
    """
    grain = max(ALIGN, 1 << max(0, rows.bit_length() - 5))
    return max(grain, -(-rows // grain) * grain)


def layout_of(atoms: Tensor, width: int, capacity: tuple[int, int] | None = None) -> Layout:  # (B,)
    """Return the layout of crystals with these numbers of atoms.

    Arguments:
        atoms: The number of atoms of each crystal.
        width: The number of atoms per crystal in the padded batch, A.
        capacity: The numbers of rows for atoms and pairs; if `None`, the exact numbers, which requires a GPU
            synchronisation.
    """
    count, each = len(atoms), torch.arange(width, device=atoms.device)
    used = each < atoms[:, None]  # (B, A)
    pairs = used[:, :, None] & used[:, None, :] & (each[:, None] != each)
    if capacity is None:
        total = int(atoms.sum())
        edges = max(1, int((atoms * (atoms - 1)).sum()))
        while edges in (count, total):  # rows of crystals, atoms and pairs are recognised by their number
            edges += 1
        capacity = total, edges
    slot = _places(used.flatten(), capacity[0])
    place = _places(pairs.flatten(), capacity[1])
    # The index of each atom in the flat list; padding points past its end.
    number = torch.cat([used.flatten().cumsum(0) - 1, torch.full((1,), capacity[0], device=atoms.device)])
    end = count * width
    pair = place // width**2
    receiver = number[torch.where(pair < count, place // width, end)]
    sender = number[torch.where(pair < count, pair * width + place % width, end)]
    return Layout(slot, slot // width, receiver, sender, pair)


class Messages(nn.Module):
    """Message-passing layer.

    The first edge layer is linear in a concatenation, so it is split: the terms of an atom or a cell are computed once
    and copied to its pairs. This computes the same function with a third of the arithmetic.
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
        receiver = self.from_receiver(normed) + _rows(self.from_cell(cell), at.crystal)
        message = _rows(receiver, at.receiver) + _rows(self.from_sender(normed), at.sender) + self.from_offset(offset)
        message = F.silu(self.edge(F.silu(message)))
        received = h.new_zeros(len(h) + 1, h.shape[1]).index_add(0, at.receiver, message.to(h.dtype))[:-1] / neighbours
        return h + F.silu(self.update(F.silu(self.gather(torch.cat([normed, received], -1)))))


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Return rows by index. Indices past the end (of unused rows) give an arbitrary row."""
    return table[index.clamp_max(len(table) - 1)]


class CSPNet(nn.Module):
    """Velocity network `v(x, t, atoms)` for crystals, with the channels `type`, `coord` and `lattice`.

    The velocity is equivariant to permutations of the atoms, and invariant to a shift of all atoms and to a shift of
    one atom by a period (except for pairs exactly half a period apart, whose direction has two signs).

    Arguments:
        hidden: The width of atoms and messages.
        layers: The number of message layers.
        frequencies: The number of sines and of cosines per axis of an offset.
        time_features: The size of the time embedding.
        types: The size of the encoding of an atom's type.
        width: The largest number of atoms in a cell.
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
            "hidden": hidden, "layers": layers, "frequencies": frequencies, "time_features": time_features,
            "types": types, "width": width,
        }  # fmt: skip
        self.width, self.frequencies = width, frequencies
        # The numbers of rows for atoms and pairs by batch size, for graph capture, where shapes must not depend on
        # values. The caller must ensure that its batches fit (reserve).
        self.static_capacity: dict[int, tuple[int, int]] = {}
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
        self.register_buffer("sizes", torch.ones(width + 1))  # the number of training crystals of each size
        self.sizes[0] = 0

    def draw_sizes(self, count: int, seed: int = 0) -> Tensor:  # -> (count,)
        """Draw numbers of atoms with the frequencies of the training data."""
        uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        share = self.sizes.double().cpu().cumsum(0)
        return torch.searchsorted(share, uniform * share[-1], right=True).clamp_max(self.width)

    def rows(self, x: Any, t: Any, *, atoms: Tensor) -> list[Tensor]:
        """Return the crystal index of each atom and of each pair of atoms, in the order of the layers' rows."""
        at = self._layout(atoms)
        return [at.crystal, at.pair]

    def reserve(self, *, atoms: Tensor) -> tuple[int, int]:
        """Reserve rows for crystals of these sizes, rounded up so that most batches of the same size fit.

        Call this before every batch that runs compiled or captured: rows beyond the capacity would be lost.
        """
        need = int(atoms.sum()), int((atoms * (atoms - 1)).sum())
        capacity = self.static_capacity.get(len(atoms))
        if capacity is None or capacity[0] < need[0] or capacity[1] < need[1]:
            rows, pairs = map(_rounded_up, need)
            while rows == len(atoms):
                rows += ALIGN
            while pairs in (len(atoms), rows):  # kinds of rows are recognised by their number
                pairs += ALIGN
            capacity = self.static_capacity[len(atoms)] = rows, pairs
        return capacity

    def _layout(self, atoms: Tensor) -> Layout:
        captured = atoms.is_cuda and torch.cuda.is_current_stream_capturing()
        capacity = self.static_capacity.get(len(atoms)) if captured or compiling() else None
        if captured and capacity is None:
            raise RuntimeError(f"set net.static_capacity[{len(atoms)}] before capturing a graph of this batch size")
        return layout_of(atoms, self.width, capacity)

    def forward(self, x: dict[str, Tensor], t: Tensor, *, atoms: Tensor) -> dict[str, Tensor]:
        at, count = self._layout(atoms), len(atoms)
        lattice, dtype = x["lattice"], x["coord"].dtype
        cell = torch.cat([(lattice - self.lattice_mean) / self.lattice_std, self.size(atoms)], -1)
        when = self.time(t.expand(count).to(dtype)[:, None])
        h = self.start(torch.cat([self.kind(_rows(x["type"].flatten(0, 1), at.slot)), _rows(when, at.crystal)], -1))
        h = h.to(dtype)  # sums over layers are in full precision, also under autocast
        offset = self._offset(_rows(x["coord"].flatten(0, 1), at.slot), lattice, at)
        neighbours = _rows((atoms - 1).clamp_min(1).to(dtype), at.crystal)[:, None]
        for layer in self.layers:
            h = layer(h, offset, cell, neighbours, at)
        h = self.norm(h)
        total = h.new_zeros(count + 1, h.shape[1]).index_add(0, at.crystal, h)[:count]
        coord = self._padded(self.to_coord(h), at, count)
        used = (torch.arange(self.width, device=atoms.device) < atoms[:, None])[..., None]
        drift = coord.sum(1, keepdim=True) / atoms[:, None, None]
        pooled = self.to_lattice(torch.cat([total / atoms[:, None], total], -1))
        return {
            "type": self._padded(self.to_type(h), at, count),
            "coord": (coord - drift) * used * self.coord_std,
            "lattice": pooled * self.velocity_std + self.velocity_mean,
        }

    def _offset(self, coord: Tensor, lattice: Tensor, at: Layout) -> Tensor:  # (N, 3), (B, 6) -> (E, 6K + 3 + padding)
        """Return the features of pairs: sines and cosines of the fractional offset, and its direction in the metric."""
        delta = _rows(coord, at.sender) - _rows(coord, at.receiver)
        angle = 2 * math.pi * delta
        near = torch.atan2(angle.sin(), angle.cos()) / (2 * math.pi)  # the shortest image
        direction = torch.einsum("eij,ej->ei", _rows(metric(lattice), at.pair), near)
        direction = F.normalize(direction, dim=-1, eps=1e-6)  # 0/0 where two atoms meet
        k = torch.arange(1, self.frequencies + 1, device=coord.device, dtype=coord.dtype)
        turns = (delta[..., None] * k).flatten(1)
        waves = 2 * math.pi * (turns - turns.round())  # small angles: faster, and equal for all periodic images
        return F.pad(torch.cat([waves.sin(), waves.cos(), direction], -1), (0, self.padding))

    def _padded(self, rows: Tensor, at: Layout, count: int) -> Tensor:  # (N, D) -> (B, A, D)
        flat = rows.new_zeros(count * self.width + 1, rows.shape[1]).index_add(0, at.slot, rows)[:-1]
        return flat.unflatten(0, (count, self.width))


def metric(lattice: Tensor, angles: tuple[float, float] = (59.9, 120.1)) -> Tensor:  # (B, 6) -> (B, 3, 3)
    """Return the metric L Lᵀ of a cell: a_i a_j cos(angle between edges i and j)."""
    low, high = angles
    cos = torch.deg2rad(low + (high - low) * lattice[:, 3:].sigmoid()).cos()
    alpha, beta, gamma = cos.unbind(1)
    one = torch.ones_like(alpha)
    angle = torch.stack([one, gamma, beta, gamma, one, alpha, beta, alpha, one], 1).unflatten(1, (3, 3))
    return lattice[:, :3, None] * lattice[:, None, :3] * angle
