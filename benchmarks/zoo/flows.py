"""The flows of the zoo: data, failure rule, network and training of each.

A half says what had been seen when a flow was made: `choose` was tuned on; `report` had been seen when the rule was
changed; `fresh` and `fresh3` were made by people who had seen no score. A rule returns (B,), true for failed samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import max_pool1d, max_pool2d, one_hot

from benchmarks.zoo import networks
from fmwc.flow import Channel, FlatTorus, Space, euclidean
from fmwc.state import SINGLE

PLACES = 400  # points of a curve; distances are measured to these
TURN = 2 * math.pi


class Flow(NamedTuple):
    half: str
    about: str
    network: Callable[[], nn.Module]
    space: Space
    data: Callable[[int, Generator], Any]  # samples, or samples and classes
    failed: Callable[..., Tensor]
    steps: int  # of Adam with a cosine decay of the learning rate
    batch: int = 256
    lr: float = 1e-3
    classes: int = 0
    pairs: str | None = None  # the coupling of training


def _circle(start: float, end: float, radius: float = 1.0) -> Tensor:  # (P, 2)
    angle = torch.linspace(start, end, PLACES)
    return radius * torch.stack([angle.cos(), angle.sin()], 1)


_UPPER = _circle(0, math.pi) - torch.tensor([0.5, 0.25])
_S = TURN * torch.arange(PLACES)[:, None] / PLACES
CURVES = {  # (curves, places, dimensions)
    "moons": torch.stack([_UPPER, -_UPPER]),
    "rings": torch.stack([_circle(0, TURN, radius) for radius in (0.7, 1.7)]),
    "centres": 2 * _circle(0, TURN)[:: PLACES // 8][:8, None],
    "lissajous": 1.5 * (torch.tensor([2.0, 3, 5]) * _S + torch.tensor([0, 0.5, 0.2])).sin()[None],
}


def _curves(half: str, name: str, noise: float, tolerance: float, **more: Any) -> Flow:
    """Return a flow of points near curves, of which those off the curves fail."""
    curves, words = CURVES[name], f"residual MLP; farther than {tolerance} from the {name}"

    def failed(x: Tensor) -> Tensor:
        return torch.stack([(c[None] - x[:, None]).square().sum(-1).amin(1) for c in curves]).amin(0).sqrt() > tolerance

    def data(count: int, g: Generator) -> Tensor:  # curves are equally likely
        which = torch.randint(len(curves), (count,), generator=g)
        place = torch.randint(curves.shape[1], (count,), generator=g)
        return curves[which, place] + noise * torch.randn(count, curves.shape[2], generator=g)

    dim = curves.shape[2]
    return Flow(half, words, lambda: networks.ResidualMLP(dim), euclidean((dim,)), data, failed, **more)


def discs(count: int, g: Generator) -> Tensor:  # (count, 5, 2), centres of discs in a box that do not overlap
    x, fits = torch.full((2 * count, 5, 2), math.inf), torch.ones(2 * count, dtype=torch.bool)
    for i in range(5):
        tried = 1.15 * (2 * torch.rand(2 * count, 40, 2, generator=g) - 1)
        free = (torch.cdist(tried, x[:, :i]) >= 0.7).all(2)
        x[:, i] = tried[torch.arange(2 * count), free.long().argmax(1)]
        fits &= free.any(1)
    return x[fits][:count]


def overlapping(x: Tensor) -> Tensor:  # or out of the box, by more than 20 % of the diameter
    apart = torch.cdist(x, x) + torch.diag(torch.full((5,), math.inf))
    return (x.abs().amax((1, 2)) > 1.15 + 0.2 * 0.7) | (apart.amin((1, 2)) < 0.8 * 0.7)


def maps(count: int, g: Generator) -> Tensor:  # (count, 16, 4): 4 × 4 fields, one-hot; neighbours differ
    x = torch.zeros(count, 5, 5, 4)  # with an empty row above and an empty column on the left
    for row in range(1, 5):
        for column in range(1, 5):
            free = 1 - torch.maximum(x[:, row - 1, column], x[:, row, column - 1])
            x[:, row, column] = one_hot(torch.multinomial(free, 1, generator=g)[:, 0], 4).float()
    return x[:, 1:, 1:].flatten(1, 2)


def same_neighbours(x: Tensor) -> Tensor:
    colour = x.argmax(2).reshape(-1, 4, 4)
    beside, below = colour[:, :, 1:] == colour[:, :, :-1], colour[:, 1:] == colour[:, :-1]
    return beside.flatten(1).any(1) | below.flatten(1).any(1)


def rivers(count: int, g: Generator) -> Tensor:  # (count, 1, 12, 12): a line from the left to the right edge
    steps = torch.randint(-2, 3, (count, 12), generator=g)
    level = torch.randint(12, (count,), generator=g)
    rows, x = torch.arange(12), -torch.ones(count, 1, 12, 12)
    for column in range(12):
        later = (level + steps[:, column]).clamp(0, 11)
        low, high = torch.minimum(level, later)[:, None], torch.maximum(level, later)[:, None]
        x[:, 0, :, column][(low <= rows) & (rows <= high)] = 1.0
        level = later
    return x + 0.1 * torch.randn(x.shape, generator=g)


def broken_river(x: Tensor) -> Tensor:  # not one piece from left to right, or a column has more than three pixels
    ink = (x > 0).float()
    reached = ink.clone()
    reached[..., 1:] = 0
    for _ in range(72):
        reached = ink * max_pool2d(reached, 3, 1, 1)
    column = reached[:, 0].sum(1)
    return (reached != ink).flatten(1).any(1) | (column[:, -1] == 0) | (column.amax(1) > 3)


def gears(count: int, g: Generator) -> tuple[Tensor, Tensor]:  # (count, 2, 2): the second turns 1 + class times as fast
    y = torch.randint(5, (count,), generator=g)
    angle = TURN * torch.rand(count, 1, generator=g)
    angle = torch.cat([angle, (y[:, None] + 1) * angle], 1)
    rim = torch.stack([angle.cos(), angle.sin()], -1)
    return rim + 0.01 * torch.randn(count, 2, 2, generator=g), y


def slipped(x: Tensor, y: Tensor) -> Tensor:  # not at its angle within 35°, or a radius is not 0.7 to 1.3
    angle = torch.atan2(x[..., 1], x[..., 0])
    off = (angle[:, 1] - (y + 1) * angle[:, 0] + math.pi).remainder(TURN) - math.pi
    return (off.abs().rad2deg() > 35) | ((x.norm(dim=2) - 1).abs() > 0.3).any(1)


def beats(count: int, g: Generator) -> Tensor:  # (count, 1, 64): 4 % have one early beat; the beat after it is in time
    apart = 9 + 5 * torch.rand(count, 1, generator=g)
    place = apart * (torch.rand(count, 1, generator=g) + torch.arange(8))  # (count, 8)
    inner = (place[:, 1:] < 63).sum(1) - 1  # beats that have one before and one after them
    early = (1 + inner * torch.rand(count, generator=g)).long()
    there = torch.rand(count, generator=g) < 0.04
    place = place - 0.35 * apart * ((torch.arange(8) == early[:, None]) & there[:, None])
    since = torch.arange(64)[:, None] - place[:, None]
    x = 2 * (-since.square() / 2).exp() - 0.6 * (-(since - 3).square() / 3).exp()
    return (x.sum(2) + 0.05 * torch.randn(count, 64, generator=g))[:, None]


def _irregular(places: Tensor) -> bool:
    if len(places) < 4:
        return True
    gaps = places.diff()
    usual = gaps.median()
    late = gaps - usual
    if places[0] > usual + 2 or 63 - places[-1] > usual + 2:
        return True
    odd = (late.abs() > 2).nonzero()[:, 0].tolist()
    if len(odd) != 2:
        return bool(odd)
    return odd[1] != odd[0] + 1 or bool(late[odd[0]] > 0) or bool(late[odd].sum().abs() > 3)


def irregular(x: Tensor) -> Tensor:  # a beat is missing or out of time; one early beat is right if the next is in time
    peaks = (x == max_pool1d(x, 5, 1, 2)) & (x > 1)
    return torch.tensor([_irregular(row.nonzero()[:, 0]) for row in peaks[:, 0]])


GOALS = torch.tensor([[2.0, 1.0], [-1.0, 2.5], [0.5, -1.5]])  # of the hand, by class


def reaches(count: int, g: Generator) -> tuple[Tensor, Tensor]:  # (count, 4): directions of four rods to the goal
    y = torch.randint(3, (6 * count,), generator=g)
    first = TURN * torch.rand(6 * count, 2, generator=g)
    rest = GOALS[y] - torch.stack([first.cos(), first.sin()], -1).sum(1)
    bend = (rest.norm(dim=1) / 2).acos() * (1 - 2 * torch.randint(2, (6 * count,), generator=g))  # nan: out of reach
    along = torch.atan2(rest[:, 1], rest[:, 0])
    turns = torch.cat([first, torch.stack([along + bend, along - bend], 1)], 1) / TURN
    kept = bend.isfinite().nonzero()[:count, 0]
    return (turns[kept] + 0.003 * torch.randn(count, 4, generator=g)).remainder(1), y[kept]


def missed(x: Tensor, y: Tensor) -> Tensor:  # the hand is farther than 0.3 from its goal
    return (torch.stack([(TURN * x).cos(), (TURN * x).sin()], -1).sum(1) - GOALS[y]).norm(dim=1) > 0.3


# ---- the table -------------------------------------------------------------------------------------------------------

FLOWS = {
    "moons": _curves("choose", "moons", 0.06, 0.25, steps=1500),
    "moons-ot": _curves("report", "moons", 0.06, 0.25, steps=2500, batch=128, pairs="ot"),
    "rings": _curves("report", "rings", 0.04, 0.15, steps=4000),
    "undertrained": _curves("choose", "centres", 0.2, 0.7, steps=400),
    "lissajous": _curves("fresh", "lissajous", 0.05, 0.3, steps=4000),
    "maps": Flow(
        "fresh3", "coloured maps; MLP-Mixer, cross entropy; neighbours of one colour",
        lambda: networks.LetterMixer(16, 4), euclidean((16, 4)), maps, same_neighbours, 2500, 128, 3e-3,
    ),
    "rivers": Flow(
        "fresh3", "lines from edge to edge, 12 × 12; UNet; not one thin piece", networks.SmallUNet,
        euclidean((1, 12, 12)), rivers, broken_river, 2500, 64, 2e-3,
    ),
    "gears": Flow(
        "fresh3", "two wheels; mixture of MLPs that predicts noise; the second is not at its angle",
        lambda: networks.NoisePrediction(networks.Experts(4, 5)), euclidean((2, 2)), gears, slipped, 6000, 256, 4e-3,
        classes=5,
    ),
    "beats": Flow(
        "fresh3", "heartbeats, 4 % with an early beat; UNet for series; a beat is missing or out of time",
        networks.ConvUNet, euclidean((1, 64)), beats, irregular, 2000, 128, 2e-3,
    ),
    "reaches": Flow(
        "fresh3", "four rods on a flat torus; MLP of sines, stopped early; the hand misses its goal",
        lambda: networks.ResidualMLP(4, 96, 2, 3, periodic=True),
        Space({SINGLE: Channel((4,), FlatTorus(), "uniform")}), reaches, missed, 1200, classes=3,
    ),
    "discs-ot": Flow(
        "fresh3", "five discs in a box; network that sees only means; overlap", lambda: networks.DeepSet(2),
        euclidean((5, 2)), discs, overlapping, 3000, 128, 2e-3, pairs="ot",
    ),
}  # fmt: skip
