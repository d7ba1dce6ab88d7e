"""Small crystals for tests: a padded batch of cells with different numbers of atoms, and a network for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmwc.field import Field, attach
from fmwc.flow import Channel, FlatTorus, Lattice, Space
from fmwc.networks import CSPNet
from tests.conftest import awaken

WIDTH, TYPES = 5, 3


def space(width: int = WIDTH) -> Space:
    return Space(
        {
            "type": Channel((width, TYPES), rows="atoms", weight=40.0),
            "coord": Channel((width, 3), FlatTorus(), "uniform", rows="atoms", centred=True, weight=400.0),
            "lattice": Channel((6,), Lattice(), "own"),
        }
    )


def small(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> CSPNet:
    torch.manual_seed(seed)
    size = {"hidden": 32, "layers": 2, "frequencies": 8, "time_features": 16, "types": TYPES, "width": WIDTH}
    net = CSPNet(**{**size, **options})
    for value in (net.lattice_mean, net.velocity_mean):
        value.normal_()
    for value in (net.lattice_std, net.velocity_std, net.coord_std):
        value.uniform_(0.5, 2.0)
    return net.to(dtype)


def batch(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> tuple[Any, ...]:
    """x, t and the numbers of atoms. The numbers of a crystal depend only on its position in the batch."""
    generator = torch.Generator().manual_seed(seed)
    count, atoms = len(sizes), torch.tensor(sizes)
    there = (torch.arange(width) < atoms[:, None])[..., None]

    def draw(*shape: int, uniform: bool = False) -> Tensor:
        return (torch.rand if uniform else torch.randn)(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = {
        "type": draw(count, width, TYPES) * there,
        "coord": draw(count, width, 3, uniform=True) * there,
        "lattice": torch.cat([3 + 4 * draw(count, 3, uniform=True), draw(count, 3)], 1),
    }
    return x, draw(count, uniform=True), atoms


def alone(x: Any, t: Tensor, atoms: Tensor, i: int) -> tuple[Any, ...]:
    """One crystal of a batch."""
    return {name: value[i : i + 1] for name, value in x.items()}, t[i : i + 1], atoms[i : i + 1]


def field(dtype: torch.dtype = torch.float64, size: float = 0.5, seed: int = 0, **options: Any) -> Field:
    """The network with noise that depends on its input."""
    made = attach(small(seed, torch.float32), space=space(), width=8, **options)
    return awaken(made, size).to(dtype)


def present(atoms: Tensor, width: int = WIDTH) -> Tensor:  # -> (B, A)
    return torch.arange(width) < atoms[:, None]
