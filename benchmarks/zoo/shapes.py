"""Data and failure rules of the zoo, except those of digits. All random numbers come from an explicit generator."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import torch
from torch import Generator, Tensor

from fmwc.flow import FlatTorus

PLACES = 400  # points of a curve; distances are measured to these


# ---- curves ------------------------------------------------------------------------------------------------------


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
    """Return spiral arms with a number of turns from an inner to an outer radius."""
    radius = torch.linspace(inner, outer, PLACES)
    angle = 2 * math.pi * (torch.arange(count)[:, None] / count + turns * (radius - inner) / (outer - inner))
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)


def torus_curve() -> Tensor:  # (1, P, 2)
    """A closed curve that winds once round one circle of the torus and twice round the other."""
    s = torch.linspace(0, 1, PLACES)
    return torch.stack([s, 2 * s + 0.1 * (2 * math.pi * s).sin()], 1).remainder(1)[None]


def square_curves() -> Tensor:  # (3, P, 2)
    """The outlines of three squares with sides of 1.4 that do not touch; the upper one stands on a corner."""
    side = torch.linspace(-1, 1, PLACES // 4 + 1)[:-1]
    one = torch.ones_like(side)
    pairs = ((side, -one), (one, side), (-side, one), (-one, -side))
    outline = 0.7 * torch.cat([torch.stack(pair, 1) for pair in pairs])
    turned = outline @ torch.tensor([[1.0, 1.0], [-1.0, 1.0]]) / math.sqrt(2)
    lower = [outline + torch.tensor([place, -0.9]) for place in (-1.1, 1.1)]
    return torch.stack([*lower, turned + torch.tensor([0.0, 1.0])])


def lissajous() -> Tensor:  # (1, P, 3)
    """A closed Lissajous curve in space that does not meet itself."""
    s = 2 * math.pi * torch.arange(PLACES)[:, None] / PLACES
    return 1.5 * (torch.tensor([2.0, 3.0, 5.0]) * s + torch.tensor([0.0, 0.5, 0.2])).sin()[None]


def cloud_centres(classes: int = 6, each: int = 2, dim: int = 4) -> Tensor:  # (classes, each, dim)
    """The centres of Gaussian clouds, a few for each class; neighbours are one to two apart."""
    return 1.2 * torch.randn(classes, each, dim, generator=Generator().manual_seed(0))


def board() -> Tensor:  # (2, 8, 2)
    """The centres of the fields of a 4 × 4 board, black and white."""
    place = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    return torch.stack([place[place.sum(1) % 2 == colour] for colour in (0, 1)]) - 1.5


CENTRES = 2 * _circle(0, 2 * math.pi)[:: PLACES // 8][:8, None]  # (8, 1, 2)


def points_on(curves: Tensor, count: int, noise: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return points near curves, `(count, D)`, and the curve of each. Curves are equally likely."""
    which = torch.randint(len(curves), (count,), generator=generator)
    place = torch.randint(curves.shape[1], (count,), generator=generator)
    return curves[which, place] + noise * torch.randn(count, curves.shape[2], generator=generator), which


def nearest(x: Tensor, curves: Tensor, which: Tensor | None = None, torus: bool = False) -> Tensor:  # (B, D) -> (B,)
    """Return the distance from each point to the nearest curve, or to the curve in `which`."""
    x = x.cpu()
    found = []
    for curve in curves:
        apart = curve[None] - x[:, None]
        apart = FlatTorus().logmap(torch.zeros_like(apart), apart) if torus else apart
        found.append(apart.square().sum(-1).amin(1).sqrt())
    distance = torch.stack(found, 1)  # (B, curves)
    return distance.amin(1) if which is None else distance.gather(1, which.cpu()[:, None])[:, 0]


def nearer_another(x: Tensor, which: Tensor, curves: Tensor, margin: float) -> Tensor:  # (B, D), (B,) -> (B,)
    """Return whether another curve is nearer than that in `which` by more than a margin."""
    every = torch.stack([nearest(x, curve[None]) for curve in curves], 1)
    own = torch.arange(len(curves)) == which.cpu()[:, None]
    return every[own] > every.masked_fill(own, math.inf).amin(1) + margin


# ---- waves -------------------------------------------------------------------------------------------------------

LENGTH = 64
TONES = ((2, 7), (3, 11), (5, 9))  # pairs of frequencies, in periods per wave
NOTES = ((2, 5), (5, 2), (3, 8), (8, 3))  # the frequencies of either half of a melody, in periods per half, by class


def _tone(frequency: Tensor, length: int, generator: Generator) -> Tensor:  # (B,) -> (B, length)
    phase = torch.rand(len(frequency), generator=generator)
    return (2 * math.pi * (frequency[:, None] * torch.arange(length) / length + phase[:, None])).sin()


def waves(count: int, generator: Generator) -> Tensor:  # (count, 1, 64)
    """Sums of two tones that form a pair, each with a random phase."""
    pair = torch.tensor(TONES)[torch.randint(len(TONES), (count,), generator=generator)]
    both = _tone(pair[:, 0], LENGTH, generator) + _tone(pair[:, 1], LENGTH, generator)
    return (both + 0.05 * torch.randn(count, LENGTH, generator=generator))[:, None]


def wrong_tones(x: Tensor) -> Tensor:  # (B, 1, 64) -> (B,)
    """Return whether the two strongest frequencies are not a pair, or hold less than 85 % of the energy."""
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
    """Return whether the strongest frequency of a half is not its note, or holds less than 75 % of its energy."""
    energy = torch.fft.rfft(x.cpu()[:, 0].reshape(len(x), 2, -1)).abs().square()[..., 1:]
    asked = energy.gather(2, torch.tensor(NOTES)[y.cpu()][..., None] - 1)[..., 0]
    return ((asked < energy.amax(2)) | (asked < 0.75 * energy.sum(2))).any(1)


# ---- pulses ------------------------------------------------------------------------------------------------------

PULSES, TRACK = 4, 32  # the most pulses of a track, and its length
_APART = 6  # the least distance of two pulses


def pulses(count: int, generator: Generator) -> tuple[Tensor, Tensor]:  # (count, 1, 32), (count,)
    """One to four pulses of any place and height on a track; the class is their number less 1."""
    y = torch.randint(PULSES, (count,), generator=generator)
    there = torch.arange(PULSES) <= y[:, None]
    room = TRACK - 5 - _APART * y[:, None]
    place = torch.rand(count, PULSES, generator=generator).masked_fill(~there, 1.0).sort(1).values * room
    place = place + 2 + _APART * torch.arange(PULSES)
    height = torch.where(there, 1.5 + 0.5 * torch.rand(count, PULSES, generator=generator), 0.0)
    bumps = (-(torch.arange(TRACK)[:, None] - place[:, None]).square() / (2 * 1.2**2)).exp()
    x = (height[:, None] * bumps).sum(2)
    return (x + 0.05 * torch.randn(count, TRACK, generator=generator))[:, None], y


def wrong_count(x: Tensor, y: Tensor, level: float = 0.75) -> Tensor:  # (B, 1, 32), (B,) -> (B,)
    """Return whether the number of rises above a level (half the height of a low pulse) is not that of the class."""
    above = x.cpu()[:, 0] > level
    rises = above[:, 0].long() + (above[:, 1:] & ~above[:, :-1]).sum(1)
    return rises != y.cpu() + 1


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
    """Return whether a point's distance to the best circle is more than a share of that circle's radius.

    The circle is the least-squares one: x² + y² = 2ax + 2by + c.
    """
    x = x.cpu().double()
    left = torch.cat([2 * x, torch.ones_like(x[..., :1])], -1)
    solved = torch.linalg.lstsq(left, x.square().sum(-1, keepdim=True)).solution[..., 0]
    centre, radius = solved[:, :2], (solved[:, 2] + solved[:, :2].square().sum(1)).clamp_min(1e-12).sqrt()
    away = ((x - centre[:, None]).norm(dim=-1) - radius[:, None]).abs().amax(1)
    return away > tolerance * radius


def _directions(count: int, generator: Generator) -> Tensor:  # (count, 2)
    angle = 2 * math.pi * torch.rand(count, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1)


def segments(count: int, generator: Generator) -> Tensor:  # (count, 6, 2)
    """Sets of six points anywhere on a line segment of any place, direction and length."""
    centre = 0.4 * torch.randn(count, 1, 2, generator=generator)
    along = _directions(count, generator) * (2 + 2 * torch.rand(count, 1, generator=generator))
    on = centre + (torch.rand(count, 6, 1, generator=generator) - 0.5) * along[:, None]
    return on + 0.02 * torch.randn(count, 6, 2, generator=generator)


def off_line(x: Tensor, tolerance: float = 0.2) -> Tensor:  # (B, N, 2) -> (B,)
    """Return whether a point is farther from the line of least squared distances than a tolerance."""
    x = x.cpu().double()
    x = x - x.mean(1, keepdim=True)
    across = torch.linalg.eigh(x.transpose(1, 2) @ x).eigenvectors[..., 0]
    return (x @ across[..., None])[..., 0].abs().amax(1) > tolerance


def triangles(count: int, generator: Generator) -> Tensor:  # (count, 3, 2)
    """Right-angled triangles of any place and direction with legs of 0.8 to 2; the right angle is at the first vertex,
    and the second leg is to the left of the first."""
    along = _directions(count, generator)
    legs = 0.8 + 1.2 * torch.rand(count, 2, 1, generator=generator)
    left = torch.stack([-along[:, 1], along[:, 0]], 1)
    x = torch.stack([torch.zeros_like(along), legs[:, 0] * along, legs[:, 1] * left], 1)
    x = x - x.mean(1, keepdim=True) + 0.3 * torch.randn(count, 1, 2, generator=generator)
    return x + 0.02 * torch.randn(count, 3, 2, generator=generator)


def not_right(x: Tensor, degrees: float = 12) -> Tensor:  # (B, 3, 2) -> (B,)
    """Return whether the counterclockwise angle at the first vertex is not 90° within some degrees, or a leg is not 0.7
    to 2.1 long."""
    legs = x.cpu()[:, 1:] - x.cpu()[:, :1]
    turned = torch.atan2(legs[..., 1], legs[..., 0])
    angle = (turned[:, 1] - turned[:, 0]).remainder(2 * math.pi).rad2deg()
    length = legs.norm(dim=2)
    return ((angle - 90).abs() > degrees) | ((length < 0.7) | (length > 2.1)).any(1)


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
    """Return whether a bond is not 0.7 to 1.3 long, or two nodes without a bond are nearer than 0.7."""
    apart, bonds = torch.cdist(x.cpu(), x.cpu()), BONDS[y.cpu()].bool()
    pairs = torch.tensor(list(combinations(range(NODES), 2)))
    apart, bonds = apart[:, pairs[:, 0], pairs[:, 1]], bonds[:, pairs[:, 0], pairs[:, 1]]
    return torch.where(bonds, (apart - 1).abs() > 0.3, apart < 0.7).any(1)


# ---- vectors on a sphere -----------------------------------------------------------------------------------------


class Sphere:
    """The unit sphere of the last dimension; normalised Gaussian noise is uniform on it."""

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        size = u.square().sum(-1, keepdim=True).clamp_min(1e-20).sqrt()
        return size.cos() * x + size.sin() / size * u

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        across = self.proju(x, y)
        size = across.square().sum(-1, keepdim=True).clamp_min(1e-20).sqrt()
        return torch.atan2(size, (x * y).sum(-1, keepdim=True)) / size * across

    def projx(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).clamp_min(1e-20).sqrt()

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u - (x * u).sum(-1, keepdim=True) * x


CORNERS = torch.cat([torch.eye(3), -torch.eye(3)])  # (6, 3)


def octahedra(count: int, generator: Generator) -> Tensor:  # (count, 6, 3)
    """The corners of an octahedron, as directions from its centre, turned at random and in any order."""
    turn = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator)).Q
    order = torch.rand(count, len(CORNERS), generator=generator).argsort(1)
    return Sphere().projx(CORNERS[order] @ turn + 0.02 * torch.randn(count, len(CORNERS), 3, generator=generator))


def no_octahedron(x: Tensor, tolerance: float = 0.3) -> Tensor:  # (B, 6, 3) -> (B,)
    """Return whether a corner's sorted inner products with the others are not an octahedron's within a tolerance."""
    found, wanted = ((c @ c.transpose(-1, -2)).sort(-1).values for c in (x.cpu(), CORNERS))
    return (found - wanted).abs().amax((1, 2)) > tolerance


# ---- words -------------------------------------------------------------------------------------------------------

WORD, LETTERS = 8, 4  # the length of a word, and its letters: ( [ ) ]


def brackets(count: int, generator: Generator) -> Tensor:  # (count, 8, 4)
    """Balanced words of two kinds of brackets, one-hot."""
    opens = torch.rand(count, WORD, generator=generator) < 0.5
    kinds = torch.randint(2, (count, WORD), generator=generator)
    words, stack, depth, rows = torch.zeros_like(kinds), torch.zeros_like(kinds), kinds[:, 0] * 0, torch.arange(count)
    for i in range(WORD):
        opened = (depth == 0) | (opens[:, i] & (depth < WORD - i))  # every open bracket can still be closed
        top = (depth - 1).clamp_min(0)
        words[:, i] = torch.where(opened, kinds[:, i], 2 + stack[rows, top])
        stack[rows, depth] = torch.where(opened, kinds[:, i], stack[rows, depth])
        depth = depth + torch.where(opened, 1, -1)
    return torch.nn.functional.one_hot(words, LETTERS).float()


def unbalanced(x: Tensor) -> Tensor:  # (B, 8, 4) -> (B,)
    """Return whether the largest numbers do not spell a balanced word."""

    def wrong(word: list[int]) -> bool:
        stack: list[int] = []
        for letter in word:
            if letter < 2:
                stack.append(letter)
            elif not stack or stack.pop() != letter - 2:
                return True
        return bool(stack)

    return torch.tensor([wrong(word) for word in x.cpu().argmax(2).tolist()])


# ---- hunters and their prey --------------------------------------------------------------------------------------

STEPS = 16  # of a series, each 0.4 units of time


def _later(x: Tensor) -> Tensor:  # (..., 2)
    """Logarithms of prey and hunters one step later, by Lotka and Volterra's equations (two Runge–Kutta steps)."""

    def speed(x: Tensor) -> Tensor:
        return torch.stack([1 - x[..., 1].exp(), x[..., 0].exp() - 1], -1)

    for _ in range(2):
        a = speed(x)
        b = speed(x + 0.1 * a)
        c = speed(x + 0.1 * b)
        x = x + 0.2 / 6 * (a + 2 * b + 2 * c + speed(x + 0.2 * c))
    return x


def hunts(count: int, generator: Generator) -> Tensor:  # (count, 16, 2)
    """Series of the logarithms of prey and hunters from any start near their balance."""
    found = [_directions(count, generator) * (0.5 + torch.rand(count, 1, generator=generator))]
    for _ in range(STEPS - 1):
        found.append(_later(found[-1]))
    return torch.stack(found, 1) + 0.02 * torch.randn(count, STEPS, 2, generator=generator)


def no_hunt(x: Tensor, tolerance: float = 0.3) -> Tensor:  # (B, 16, 2) -> (B,)
    """Return whether a state is farther than a tolerance from the solution that starts at the previous state."""
    x = x.cpu().double().clamp(-5, 5)
    return (x[:, 1:] - _later(x[:, :-1])).norm(dim=2).amax(1) > tolerance


# ---- rare modes --------------------------------------------------------------------------------------------------


def rare(
    centres: Tensor, count: int, noise: float, generator: Generator
) -> tuple[Tensor, Tensor]:  # (C, M, D) -> (count, D), (count,)
    """Points around the centres of a class; each centre is half as likely as the previous one."""
    y = torch.randint(len(centres), (count,), generator=generator)
    shares = 0.5 ** torch.arange(centres.shape[1])
    mode = torch.multinomial(shares, count, replacement=True, generator=generator)
    return centres[y, mode] + noise * torch.randn(count, centres.shape[2], generator=generator), y


# ---- emblems -----------------------------------------------------------------------------------------------------

SIDE = 12
EMBLEMS = 9  # three figures in three colours
_AT = torch.arange(SIDE) + 0.5


def _figures(place: Tensor, size: Tensor) -> Tensor:  # (B, 2), (B,) -> (B, 3, 12, 12)
    """Masks of a disc, two bars and a cross, with soft edges."""
    right, down = (_AT - place[:, :1])[:, None].abs(), (_AT - place[:, 1:])[:, :, None].abs()
    size = size[:, None, None]
    disc = size - (right.square() + down.square()).sqrt()
    bars = torch.minimum(size - right, 0.8 - (down - size + 0.8).abs())
    cross = torch.minimum(size - torch.maximum(right, down), 0.8 - torch.minimum(right, down))
    return (4 * torch.stack([disc, bars, cross], 1)).sigmoid()


def _coloured(mask: Tensor, colour: Tensor) -> Tensor:  # (B, 12, 12), (B,) -> (B, 3, 12, 12)
    ink = 2 * torch.nn.functional.one_hot(colour, 3) - 0.5  # 1.5 of its own colour less 0.5 of the others
    return mask[:, None] * ink[:, :, None, None]


def emblems(count: int, generator: Generator) -> tuple[Tensor, Tensor]:  # (count, 3, 12, 12), (count,)
    """A disc, two bars or a cross of any place and size in one of three colours; the class is figure and colour."""
    y = torch.randint(EMBLEMS, (count,), generator=generator)
    place = 4 + 4 * torch.rand(count, 2, generator=generator)
    size = 2.5 + torch.rand(count, generator=generator)
    mask = _figures(place, size)[torch.arange(count), y // 3]
    return _coloured(mask, y % 3) + 0.05 * torch.randn(count, 3, SIDE, SIDE, generator=generator), y


def wrong_emblem(x: Tensor, y: Tensor, tolerance: float = 0.2) -> Tensor:  # (B, 3, 12, 12), (B,) -> (B,)
    """Return whether the nearest drawing is of another class, or differs by more than a tolerance (root mean square).

    Drawings are on a grid of places half a pixel apart, in five sizes.
    """
    half = torch.linspace(4, 8, 9)
    grid = torch.cartesian_prod(half, half, torch.linspace(2.5, 3.5, 5))
    masks = _figures(grid[:, :2], grid[:, 2])  # (G, 3, 12, 12)
    apart = torch.stack(
        [
            torch.cdist(
                x.cpu().flatten(1), _coloured(masks[:, kind // 3], torch.full((len(grid),), kind % 3)).flatten(1)
            ).amin(1)
            for kind in range(EMBLEMS)
        ],
        1,
    )  # (B, 9)
    nearest, kind = apart.min(1)
    return (kind != y.cpu()) | (nearest > tolerance * math.sqrt(3 * SIDE * SIDE))


# ---- maps --------------------------------------------------------------------------------------------------------

FIELDS, COLOURS = 4, 4  # the fields of a side, and their colours


def maps(count: int, generator: Generator) -> Tensor:  # (count, 16, 4)
    """Square maps of four by four fields, one-hot, row by row; fields that share a side have different colours."""
    x = torch.zeros(count, FIELDS + 1, FIELDS + 1, COLOURS)  # with an empty row above and an empty column on the left
    for row in range(1, FIELDS + 1):
        for column in range(1, FIELDS + 1):
            free = 1 - torch.maximum(x[:, row - 1, column], x[:, row, column - 1])
            colour = torch.multinomial(free, 1, generator=generator)[:, 0]
            x[:, row, column] = torch.nn.functional.one_hot(colour, COLOURS)
    return x[:, 1:, 1:].flatten(1, 2)


def same_neighbours(x: Tensor) -> Tensor:  # (B, 16, 4) -> (B,)
    """Return whether two fields that share a side have the same colour, that of their largest number."""
    colour = x.cpu().argmax(2).reshape(-1, FIELDS, FIELDS)
    beside, below = colour[:, :, 1:] == colour[:, :, :-1], colour[:, 1:] == colour[:, :-1]
    return beside.flatten(1).any(1) | below.flatten(1).any(1)


# ---- rivers ------------------------------------------------------------------------------------------------------


def rivers(count: int, generator: Generator) -> Tensor:  # (count, 1, 12, 12)
    """A line that goes from the left to the right edge, up to two pixels up or down for each column."""
    steps = torch.randint(-2, 3, (count, SIDE), generator=generator)
    level = torch.randint(SIDE, (count,), generator=generator)
    rows, x = torch.arange(SIDE), -torch.ones(count, 1, SIDE, SIDE)
    for column in range(SIDE):
        later = (level + steps[:, column]).clamp(0, SIDE - 1)
        low, high = torch.minimum(level, later)[:, None], torch.maximum(level, later)[:, None]
        x[:, 0, :, column][(low <= rows) & (rows <= high)] = 1.0
        level = later
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def broken_river(x: Tensor) -> Tensor:  # (B, 1, 12, 12) -> (B,)
    """Return whether the bright pixels are not one piece from left to right, or a column has more than three."""
    ink = (x.cpu() > 0).float()
    reached = ink.clone()
    reached[..., 1:] = 0
    for _ in range(SIDE * SIDE // 2):
        reached = ink * torch.nn.functional.max_pool2d(reached, 3, 1, 1)
    column = reached[:, 0].sum(1)
    return (reached != ink).flatten(1).any(1) | (column[:, -1] == 0) | (column.amax(1) > 3)


# ---- gears -------------------------------------------------------------------------------------------------------

RATIOS = (1, 2, 3, 4, 5)  # the turns of the second wheel for one turn of the first, by class


def gears(count: int, generator: Generator) -> tuple[Tensor, Tensor]:  # (count, 2, 2), (count,)
    """A point on the rim of each of two wheels; the second turns as many times as fast as the class says."""
    y = torch.randint(len(RATIOS), (count,), generator=generator)
    angle = 2 * math.pi * torch.rand(count, 1, generator=generator)
    angle = torch.cat([angle, torch.tensor(RATIOS)[y][:, None] * angle], 1)
    rim = torch.stack([angle.cos(), angle.sin()], -1)
    return rim + 0.01 * torch.randn(count, 2, 2, generator=generator), y


def slipped(x: Tensor, y: Tensor, degrees: float = 35) -> Tensor:  # (B, 2, 2), (B,) -> (B,)
    """Return whether the second wheel is not at its angle within some degrees, or a radius is not 0.7 to 1.3."""
    x = x.cpu()
    angle = torch.atan2(x[..., 1], x[..., 0])
    off = (angle[:, 1] - torch.tensor(RATIOS)[y.cpu()] * angle[:, 0] + math.pi).remainder(2 * math.pi) - math.pi
    return (off.abs().rad2deg() > degrees) | ((x.norm(dim=2) - 1).abs() > 0.3).any(1)


# ---- heartbeats --------------------------------------------------------------------------------------------------

EARLY = 0.04  # the share of series with an early beat


def beats(count: int, generator: Generator) -> Tensor:  # (count, 1, 64)
    """Regular heartbeats of any rate. A few series have one beat that comes early; the beat after it is in time."""
    apart = 9 + 5 * torch.rand(count, 1, generator=generator)
    place = apart * (torch.rand(count, 1, generator=generator) + torch.arange(8))  # (count, 8)
    inner = (place[:, 1:] < LENGTH - 1).sum(1) - 1  # beats that have one before and one after them
    early = (1 + inner * torch.rand(count, generator=generator)).long()
    there = torch.rand(count, generator=generator) < EARLY
    place = place - 0.35 * apart * ((torch.arange(8) == early[:, None]) & there[:, None])
    since = torch.arange(LENGTH)[:, None] - place[:, None]
    x = 2 * (-since.square() / 2).exp() - 0.6 * (-(since - 3).square() / 3).exp()
    return (x.sum(2) + 0.05 * torch.randn(count, LENGTH, generator=generator))[:, None]


def irregular(x: Tensor, tolerance: int = 2) -> Tensor:  # (B, 1, 64) -> (B,)
    """Return whether a beat is missing or out of time. One early beat is right if the beat after it is in time.

    Beats are the largest of five numbers and more than 1, half their height; times are right within a tolerance.
    """

    def wrong(places: Tensor) -> bool:
        if len(places) < 4:
            return True
        gaps = places.diff()
        usual = gaps.median()
        late = gaps - usual
        if places[0] > usual + tolerance or LENGTH - 1 - places[-1] > usual + tolerance:
            return True
        odd = (late.abs() > tolerance).nonzero()[:, 0].tolist()
        if len(odd) != 2:
            return bool(odd)
        first, second = odd
        return second != first + 1 or bool(late[first] > 0) or bool(late[odd].sum().abs() > tolerance + 1)

    x = x.cpu()
    peaks = (x == torch.nn.functional.max_pool1d(x, 5, 1, 2)) & (x > 1)
    return torch.tensor([wrong(row.nonzero()[:, 0]) for row in peaks[:, 0]])


# ---- arms that reach ---------------------------------------------------------------------------------------------

GOALS = torch.tensor([[2.0, 1.0], [-1.0, 2.5], [0.5, -1.5]])  # of the hand, by class


def reaches(count: int, generator: Generator) -> tuple[Tensor, Tensor]:  # (count, 4), (count,)
    """Directions, in turns, of four rods of length 1 that lead from the origin to the goal of the class.

    The first two have any direction that leaves the goal in reach of the last two.
    """
    many = 6 * count
    y = torch.randint(len(GOALS), (many,), generator=generator)
    first = 2 * math.pi * torch.rand(many, 2, generator=generator)
    rest = GOALS[y] - torch.stack([first.cos(), first.sin()], -1).sum(1)
    bend = (rest.norm(dim=1) / 2).acos() * (1 - 2 * torch.randint(2, (many,), generator=generator))  # nan: out of reach
    along = torch.atan2(rest[:, 1], rest[:, 0])
    turns = torch.cat([first, torch.stack([along + bend, along - bend], 1)], 1) / (2 * math.pi)
    kept = bend.isfinite().nonzero()[:count, 0]
    return (turns[kept] + 0.003 * torch.randn(count, 4, generator=generator)).remainder(1), y[kept]


def missed(x: Tensor, y: Tensor, tolerance: float = 0.3) -> Tensor:  # (B, 4), (B,) -> (B,)
    """Return whether the hand is farther from its goal than a tolerance."""
    angle = 2 * math.pi * x.cpu()
    return (torch.stack([angle.cos(), angle.sin()], -1).sum(1) - GOALS[y.cpu()]).norm(dim=1) > tolerance


# ---- discs in a box ----------------------------------------------------------------------------------------------

DISCS, ACROSS, WALL = 5, 0.7, 1.15  # number and diameter of the discs, and the largest coordinate of a centre


def packed(count: int, generator: Generator) -> Tensor:  # (count, 5, 2)
    """The centres of discs in a square box that do not overlap, placed one after the other."""
    many = 2 * count
    x, fits = torch.full((many, DISCS, 2), math.inf), torch.ones(many, dtype=torch.bool)
    for i in range(DISCS):
        tried = WALL * (2 * torch.rand(many, 40, 2, generator=generator) - 1)
        free = (torch.cdist(tried, x[:, :i]) >= ACROSS).all(2)
        x[:, i] = tried[torch.arange(many), free.long().argmax(1)]
        fits &= free.any(1)
    return x[fits][:count]


def overlapping(x: Tensor, tolerance: float = 0.2) -> Tensor:  # (B, 5, 2) -> (B,)
    """Return whether two discs overlap, or one sticks out of the box, by more than a share of their diameter."""
    x = x.cpu()
    apart = torch.cdist(x, x) + torch.diag(torch.full((DISCS,), math.inf))
    out = x.abs().amax((1, 2)) > WALL + tolerance * ACROSS
    return out | (apart.amin((1, 2)) < (1 - tolerance) * ACROSS)
