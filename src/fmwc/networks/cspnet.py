"""Network for crystals: messages between all pairs of atoms in a cell (App. architectures; the paper's CSPNet).

A batch may mix crystals of different sizes. States are padded to the largest size; the network packs atoms and pairs
into flat lists, so that no arithmetic is spent on padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError
from fmwc.modes import compiling

ALIGN = 8  # tensor cores need inner sizes that are multiples of this
UNSURE = 1e-3  # the smallest probability of a bit that a prediction stands for


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
        capacity = int(atoms.sum()), max(1, int((atoms * (atoms - 1)).sum()))
    slot = _places(used.flatten(), capacity[0])
    place = _places(pairs.flatten(), capacity[1])
    # The index of each atom in the flat list; padding points past its end.
    number = torch.cat([used.flatten().cumsum(0) - 1, torch.full((1,), capacity[0], device=atoms.device)])
    end = count * width
    pair = place // width**2
    receiver = number[torch.where(pair < count, place // width, end)]
    sender = number[torch.where(pair < count, pair * width + place % width, end)]
    return Layout(slot, slot // width, receiver, sender, pair)


def codes(bits: int, device: torch.device | None = None) -> Tensor:  # -> (2 ** bits, bits)
    """Return the analog bits (±1) of the numbers 0, 1, …: row Z − 1 is the type of the element Z."""
    return (torch.arange(1 << bits, device=device)[:, None] >> torch.arange(bits, device=device) & 1) * 2.0 - 1


def allowed_types(x1: Tensor, t: Tensor, allowed: Tensor, table: Tensor) -> Tensor:  # (B, A, 7), (B,) -> (B, A, 7)
    """Return predicted types as the expected ones among allowed elements; for t = 1, as the nearest allowed element.

    A predicted bit in [−1, 1] is taken as the mean of an independent bit. The probability of an element is then the
    product of those of its bits, divided by its sum over the allowed elements.

    Arguments:
        x1: Predicted bits.
        t: The time of each sample.
        allowed: Which elements each atom may be, `(B, A, E)`, at least one.
        table: The bits of each element, `(E, 7)`.
    """
    share = ((1 + x1) / 2).clamp(UNSURE, 1 - UNSURE)
    match = torch.where((t < 1)[:, None, None], share.logit() / 2, x1) @ table.T
    match = match.masked_fill(~allowed, -torch.inf)
    return torch.where((t < 1)[:, None, None], match.softmax(-1) @ table, table[match.argmax(-1)])


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

    Two conditions restrict the types that samples end with (:func:`fmwc.flow.restriction_of`): `elements`, which
    elements a crystal may hold, `(B, E)`, and `types`, the atomic number of each atom, `(B, A)`, or 0 if it is not
    given.

    Arguments:
        hidden: The width of atoms and messages.
        layers: The number of message layers.
        frequencies: The number of sines and of cosines per axis of an offset.
        time_features: The size of the time embedding.
        types: The size of the encoding of an atom's type.
        width: The largest number of atoms in a cell.
        given: The share of training crystals whose types are given. If it is not 0, the network is told the types of
            crystals whose types are all given; it then predicts structures of known composition.
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
        given: float = 0.0,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {
            "hidden": hidden, "layers": layers, "frequencies": frequencies, "time_features": time_features,
            "types": types, "width": width, **({"given": given} if given else {}),
        }  # fmt: skip
        self.width, self.frequencies, self.given = width, frequencies, given
        # The numbers of rows for atoms and pairs by batch size, for graph capture, where shapes must not depend on
        # values. The caller must ensure that its batches fit.
        self.static_capacity: dict[int, tuple[int, int]] = {}
        plain = 6 * frequencies + 3
        self.padding = -plain % ALIGN
        self.time = nn.Linear(1, time_features, bias=False)
        self.kind = nn.Linear(types, hidden)
        self.start = nn.Linear(hidden + time_features, hidden)
        self.size = nn.Embedding(width + 1, hidden)
        self.layers = nn.ModuleList(Messages(hidden, plain + self.padding, hidden + 6) for _ in range(layers))
        if given:
            self.told = nn.Parameter(torch.zeros(hidden))  # added to atoms whose type is given
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

    def draw_sizes(self, count: int, seed: int = 0, weights: Tensor | None = None) -> Tensor:  # -> (count,)
        """Draw numbers of atoms with the frequencies of the training data, or with given weights of 0, 1, … atoms."""
        uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        share = (self.sizes if weights is None else weights).double().cpu().cumsum(0)
        return torch.searchsorted(share, uniform * share[-1], right=True).clamp_max(self.width)

    def restriction(
        self, *, atoms: Tensor, elements: Tensor | None = None, types: Tensor | None = None
    ) -> Callable[[Any, Tensor], Any] | None:
        """Return the function that restricts ends to the allowed types; `None` without a restriction.

        There is none either for a network that only ever saw given types, because it follows them by itself.
        """
        self._check_restrictions(len(atoms), elements, types)
        if elements is None and (types is None or (self.given == 1 and bool(self._told(atoms, types).all()))):
            return None
        table = codes(self.config["types"], atoms.device)
        used = torch.arange(self.width, device=atoms.device) < atoms[:, None]
        allowed = torch.ones(len(atoms), self.width, len(table), dtype=torch.bool, device=atoms.device)
        if elements is not None:
            known = F.pad(elements > 0, (0, len(table) - elements.shape[1]))
            if not bool(known.any(1).all()):
                raise UsageError("elements must allow at least one element for each crystal")
            allowed = allowed & known[:, None]
        if types is not None:
            given = torch.arange(1, len(table) + 1, device=atoms.device) == types[..., None]
            allowed = torch.where((types > 0)[..., None], given, allowed)
            used = used & ((types > 0) | (elements is not None))

        def restrict(x1: dict[str, Tensor], t: Tensor) -> dict[str, Tensor]:
            types = allowed_types(x1["type"], t, allowed, table.to(x1["type"].dtype))
            return {**x1, "type": torch.where(used[..., None], types, x1["type"])}

        return restrict

    def _check_restrictions(self, count: int, elements: Tensor | None, types: Tensor | None) -> None:
        most = 1 << self.config["types"]
        for name, value, width, high in (("elements", elements, most, None), ("types", types, self.width, most)):
            if value is None:
                continue
            fits = value.shape == (count, width) if high else value.ndim == 2 and value.shape[1] <= width
            if value.is_floating_point() or not fits or len(value) != count:
                raise ShapeError(
                    f"{name} must be integers of shape ({count}, {width}), got {value.dtype} of shape "
                    f"{tuple(value.shape)}"
                )
            if high and not 0 <= int(value.min()) <= int(value.max()) <= high:
                raise UsageError("types must be atomic numbers, or 0 for an atom whose type is not given")

    def _told(self, atoms: Tensor, types: Tensor) -> Tensor:  # -> (B,)
        """Return for which crystals the types of all atoms are given."""
        return (types > 0).sum(1) == atoms

    def rows(self, x: Any, t: Any, *, atoms: Tensor, **restrictions: Tensor) -> dict[str, Tensor | int]:
        """Return the crystal of each row that the layers see: pairs of atoms, crystals, or atoms."""
        at = self._layout(atoms)
        pairs = dict.fromkeys(("layers.*.from_offset", "layers.*.edge"), at.pair)
        crystals = dict.fromkeys(("time", "layers.*.from_cell", "to_lattice"), 1)
        return {**pairs, **crystals, "*": at.crystal}

    def _layout(self, atoms: Tensor) -> Layout:
        capacity = self.static_capacity.get(len(atoms))
        if not compiling():  # torch 2.11 cannot compile the question whether a graph is captured
            captured = atoms.is_cuda and torch.cuda.is_current_stream_capturing()
            if captured and capacity is None:
                raise RuntimeError(f"set net.static_capacity[{len(atoms)}] before capturing a graph of this batch size")
            capacity = capacity if captured else None
        return layout_of(atoms, self.width, capacity)

    def forward(
        self,
        x: dict[str, Tensor],
        t: Tensor,
        *,
        atoms: Tensor,
        elements: Tensor | None = None,
        types: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if not self.given:
            return self._velocity(x, t, atoms)
        if types is None:
            if self.given == 1:
                raise UsageError("this network was trained with given types; give cond={'types': ...} (--formula)")
            return self._velocity(x, t, atoms)
        used = torch.arange(self.width, device=atoms.device) < atoms[:, None]
        told = (self._told(atoms, types)[:, None] & used)[..., None].to(x["type"].dtype)
        known = codes(self.config["types"], atoms.device).to(told.dtype)[(types - 1).clamp_min(0)]
        v = self._velocity({**x, "type": x["type"] * (1 - told) + known * told}, t, atoms, told)
        # The velocity of the path that ends at the given types: exact, so it adds nothing to the loss.
        ahead = (known - x["type"]) / (1 - t.expand(len(atoms)).to(told)).clamp_min(1e-6)[:, None, None]
        return {**v, "type": v["type"] * (1 - told) + ahead * told}

    def _velocity(
        self, x: dict[str, Tensor], t: Tensor, atoms: Tensor, told: Tensor | None = None
    ) -> dict[str, Tensor]:
        at, count = self._layout(atoms), len(atoms)
        lattice, dtype = x["lattice"], x["coord"].dtype
        cell = torch.cat([(lattice - self.lattice_mean) / self.lattice_std, self.size(atoms)], -1)
        when = self.time(t.expand(count).to(dtype)[:, None])
        kind = self.kind(_rows(x["type"].flatten(0, 1), at.slot))
        if told is not None:
            kind = kind + _rows(told.flatten(0, 1), at.slot) * self.told
        h = self.start(torch.cat([kind, _rows(when, at.crystal)], -1))
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
