"""Data of the zoo and its failure rules, apart from MNIST's. All numbers come from an explicit generator."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import torch
from torch import Generator, Tensor

from fmwc.flow import FlatTorus

__all__ = [
    "BONDS",
    "CENTRES",
    "NOTES",
    "TONES",
    "arms",
    "board",
    "bonded",
    "broken",
    "circles",
    "melodies",
    "moon_curves",
    "nearest",
    "off_circle",
    "points_on",
    "ring_curves",
    "torus_curve",
    "waves",
    "wrong_notes",
    "wrong_tones",
]

PLACES = 400  # of a curve, which distances are measured to


# ---- curves in the plane -----------------------------------------------------------------------------------------


def _circle(start: float, end: float, radius: float = 1.0) -> Tensor:
    angle = torch.linspace(start, end, PLACES)
    return radius * torch.stack([angle.cos(), angle.sin()], 1)


def moon_curves() -> Tensor:  # (2, P, 2)
    """Two interleaved half circles, about the origin."""
    upper = _circle(0, math.pi) - torch.tensor([0.5, 0.25])
    return torch.stack([upper, -upper])


def ring_curves() -> Tensor:  # (2, P, 2)
    """Two concentric circles."""
    return torch.stack([_circle(0, 2 * math.pi, radius) for radius in (0.7, 1.7)])


def arms(count: int, turns: float, inner: float, outer: float) -> Tensor:  # (count, P, 2)
    """Spiral arms that go round by so many turns from an inner to an outer radius."""
    radius = torch.linspace(inner, outer, PLACES)
    angle = 2 * math.pi * (torch.arange(count)[:, None] / count + turns * (radius - inner) / (outer - inner))
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)


def torus_curve() -> Tensor:  # (1, P, 2)
    """A closed curve that winds once round one circle of the torus and twice round the other."""
    s = torch.linspace(0, 1, PLACES)
    return torch.stack([s, 2 * s + 0.1 * (2 * math.pi * s).sin()], 1).remainder(1)[None]


def board() -> Tensor:  # (2, 8, 2): a curve may be a few points
    """The fields of a board of four by four, black and white."""
    place = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    return torch.stack([place[place.sum(1) % 2 == colour] for colour in (0, 1)]) - 1.5


CENTRES = 2 * _circle(0, 2 * math.pi)[:: PLACES // 8][:8, None]  # (8, 1, 2)


def points_on(curves: Tensor, count: int, noise: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Points near curves: (count, 2), and which curve each is of; all as likely, and evenly along it."""
    which = torch.randint(len(curves), (count,), generator=generator)
    place = torch.randint(curves.shape[1], (count,), generator=generator)
    return curves[which, place] + noise * torch.randn(count, 2, generator=generator), which


def nearest(x: Tensor, curves: Tensor, which: Tensor | None = None, torus: bool = False) -> Tensor:  # (B, 2) -> (B,)
    """The distance from each point to the curves, or to its own one."""
    x = x.cpu()
    found = []
    for curve in curves:
        apart = curve[None] - x[:, None]
        apart = FlatTorus().logmap(torch.zeros_like(apart), apart) if torus else apart
        found.append(apart.square().sum(-1).amin(1).sqrt())
    distance = torch.stack(found, 1)  # (B, curves)
    return distance.amin(1) if which is None else distance.gather(1, which.cpu()[:, None])[:, 0]


# ---- waves -------------------------------------------------------------------------------------------------------

LENGTH = 64
TONES = ((2, 7), (3, 11), (5, 9))  # the pairs of frequencies, in periods per wave, that go together
NOTES = ((2, 5), (5, 2), (3, 8), (8, 3))  # the frequencies of either half of a melody, in periods per half, by class


def _tone(frequency: Tensor, length: int, generator: Generator) -> Tensor:  # (B,) -> (B, length)
    phase = torch.rand(len(frequency), generator=generator)
    return (2 * math.pi * (frequency[:, None] * torch.arange(length) / length + phase[:, None])).sin()


def waves(count: int, generator: Generator) -> Tensor:  # (count, 1, 64)
    """Sums of two tones that go together, each with a phase of its own."""
    pair = torch.tensor(TONES)[torch.randint(len(TONES), (count,), generator=generator)]
    both = _tone(pair[:, 0], LENGTH, generator) + _tone(pair[:, 1], LENGTH, generator)
    return (both + 0.05 * torch.randn(count, LENGTH, generator=generator))[:, None]


def wrong_tones(x: Tensor) -> Tensor:  # (B, 1, 64) -> (B,)
    """Whether the two strongest frequencies do not go together, or hold less than 85 % of the energy."""
    energy = torch.fft.rfft(x.cpu()[:, 0]).abs().square()[:, 1:]
    top, index = energy.topk(2, 1)
    pairs = (index + 1).sort(1).values
    known = (pairs[:, None] == torch.tensor(TONES)).all(2).any(1)
    return ~known | (top.sum(1) < 0.85 * energy.sum(1))


def melodies(count: int, generator: Generator) -> tuple[Tensor, Tensor]:  # (count, 1, 64), (count,)
    """Two notes one after the other; the class says which."""
    y = torch.randint(len(NOTES), (count,), generator=generator)
    pair, half = torch.tensor(NOTES)[y], LENGTH // 2
    both = torch.cat([_tone(pair[:, 0], half, generator), _tone(pair[:, 1], half, generator)], 1)
    return (both + 0.05 * torch.randn(count, LENGTH, generator=generator))[:, None], y


def wrong_notes(x: Tensor, y: Tensor) -> Tensor:  # (B, 1, 64), (B,) -> (B,)
    """Whether either half's strongest frequency is not the one asked for, or holds less than 75 % of its energy."""
    energy = torch.fft.rfft(x.cpu()[:, 0].reshape(len(x), 2, -1)).abs().square()[..., 1:]
    asked = energy.gather(2, torch.tensor(NOTES)[y.cpu()][..., None] - 1)[..., 0]
    return ((asked < energy.amax(2)) | (asked < 0.75 * energy.sum(2))).any(1)


# ---- sets and graphs of points -----------------------------------------------------------------------------------

POINTS = 8


def circles(count: int, generator: Generator) -> Tensor:  # (count, 8, 2)
    """Sets of points, evenly spaced on a circle of any place and size."""
    centre = 0.5 * torch.randn(count, 1, 2, generator=generator)
    radius = 0.6 + torch.rand(count, 1, 1, generator=generator)
    steps = torch.arange(POINTS) + 0.1 * torch.randn(count, POINTS, generator=generator)
    angle = 2 * math.pi * (steps / POINTS + torch.rand(count, 1, generator=generator))
    on = centre + radius * torch.stack([angle.cos(), angle.sin()], -1)
    return on + 0.02 * torch.randn(count, POINTS, 2, generator=generator)


def off_circle(x: Tensor, tolerance: float = 0.15) -> Tensor:  # (B, 8, 2) -> (B,)
    """Whether a point's distance to the best circle is more than a share of that circle's radius.

    The circle is the least-squares one: x² + y² = 2ax + 2by + c.
    """
    x = x.cpu().double()
    left = torch.cat([2 * x, torch.ones_like(x[..., :1])], -1)
    solved = torch.linalg.lstsq(left, x.square().sum(-1, keepdim=True)).solution[..., 0]
    centre, radius = solved[:, :2], (solved[:, 2] + solved[:, :2].square().sum(1)).clamp_min(1e-12).sqrt()
    away = ((x - centre[:, None]).norm(dim=-1) - radius[:, None]).abs().amax(1)
    return away > tolerance * radius


NODES = 6
_EDGES = (  # of a ring, a chain, and a star of three short arms
    ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)),
    ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)),
    ((0, 1), (0, 2), (0, 3), (1, 4), (2, 5)),
)


def _adjacency() -> Tensor:
    bonds = torch.zeros(len(_EDGES), NODES, NODES)
    for kind, edges in enumerate(_EDGES):
        for i, j in edges:
            bonds[kind, i, j] = bonds[kind, j, i] = 1
    return bonds


BONDS = _adjacency()  # (3, 6, 6)


def _skeletons() -> Tensor:  # (3, 6, 2)
    """A flat drawing of every graph with bonds of length 1."""
    turn = [torch.tensor([math.cos(a), math.sin(a)]) for a in np.arange(12) * math.pi / 6]  # every 30°
    ring = torch.stack([turn[2 * i] for i in range(6)])
    chain = torch.stack([torch.tensor([i * math.cos(math.pi / 6), (i % 2) * 0.5]) for i in range(6)])
    star = torch.stack([0 * turn[0], turn[0], turn[4], turn[8], turn[0] + turn[2], turn[4] + turn[6]])
    return torch.stack([ring, chain, star]).float()


def bonded(count: int, generator: Generator) -> tuple[Tensor, Tensor]:  # (count, 6, 2), (count,)
    """Graphs of six nodes in the plane with bonds of length 1, turned at random; the class is the graph."""
    y = torch.randint(len(BONDS), (count,), generator=generator)
    x = _skeletons()[y]
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([cos, sin], 1), torch.stack([-sin, cos], 1)], 1)
    x = (x - x.mean(1, keepdim=True)) @ turn
    return x + 0.03 * torch.randn(count, NODES, 2, generator=generator), y


def broken(x: Tensor, y: Tensor) -> Tensor:  # (B, 6, 2), (B,) -> (B,)
    """Whether a bond is not 0.7 to 1.3 long, or two nodes without a bond are nearer than 0.7."""
    apart, bonds = torch.cdist(x.cpu(), x.cpu()), BONDS[y.cpu()].bool()
    pairs = torch.tensor(list(combinations(range(NODES), 2)))
    apart, bonds = apart[:, pairs[:, 0], pairs[:, 1]], bonds[:, pairs[:, 0], pairs[:, 1]]
    return torch.where(bonds, (apart - 1).abs() > 0.3, apart < 0.7).any(1)
