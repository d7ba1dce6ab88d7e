"""The flows of the zoo: data, network, path, failure rule and training length of each.

Every flow belongs to one half, named here beforehand: scores are chosen on `choose` and reported on `report`. Both
halves hold low-dimensional, sequence and image flows, with and without conditions. The rule that chooses confidence was
changed once after `report` had been seen. The flows of `fresh` were added after that change, with training lengths
chosen by the share of failures alone. The flows of `fresh2` were added later by somebody who had seen no score; sizes
of data and networks, tolerances and training lengths were chosen by the share of failures alone. The flows of `fresh3`
were made in the same way by a third person. Two of them are weak on purpose, as `about` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.zoo import digits, shapes
from benchmarks.zoo.networks import (
    ConvGru,
    ConvUNet,
    DeepSet,
    Denoiser,
    Dilated,
    Endpoint,
    Equivariant,
    Experts,
    GatedMLP,
    GraphNet,
    Guided,
    Mixer,
    NoisePrediction,
    PatchTransformer,
    Recurrent,
    ResidualMLP,
    SetTransformer,
    SmallUNet,
)
from fmwc.flow import Channel, FlatTorus, Space, euclidean
from fmwc.randomness import Randomness, derive
from fmwc.state import SINGLE, State, tree_map
from fmwc.training import TrainingConfig, train

HALVES = ("choose", "report", "fresh", "fresh2", "fresh3")
DATA, HELD_OUT = 10_000, 2_000  # for flows whose data are drawn
# Rivals need other networks, trained on the same data: from other initial weights, or a fifth as long.
OTHERS = ("early", "second", "third")
EARLY = 0.2


class Training(NamedTuple):
    """How long a flow trains: Adam, with a cosine decay of the learning rate."""

    steps: int
    batch: int = 256
    lr: float = 1e-3


TRAINING = {
    "moons": Training(1500),
    "moons-ot": Training(2500, 128),
    "moons-vp": Training(3000),
    "rings": Training(4000),
    "spirals": Training(4000),
    "torus": Training(1500),
    "undertrained": Training(400),
    "overtrained": Training(10_000, 200),
    "waves": Training(1300, 128, 2e-3),
    "melodies": Training(330, 128),
    "circles": Training(1500, 128),
    "graphs": Training(3000, 128, 2e-3),
    "digits": Training(350, 128),
    "mnist-rotated": Training(5000, 128, 2e-3),
    "mnist-inverted": Training(4000, 128, 2e-3),
    "mnist-noisy": Training(6000, 128, 2e-3),
    "mnist-unconditional": Training(5000, 128, 2e-3),
    "mnist-guided": Training(900, 128, 2e-3),
    "squares": Training(6500),
    "lissajous": Training(4000),
    "clouds": Training(400),
    "segments": Training(1000, 128),
    "triangles-ot": Training(2000, 128),
    "pulses": Training(1200, 128, 2e-3),
    "octahedra": Training(5000, 64, 3e-3),
    "brackets": Training(4000, 128, 3e-3),
    "hunts": Training(2500, 128, 2e-3),
    "rare-ot": Training(5000, 64, 2e-3),
    "emblems": Training(4000, 64, 2e-3),
    "maps": Training(2500, 128, 3e-3),
    "rivers": Training(2500, 64, 2e-3),
    "gears": Training(6000, 256, 4e-3),
    "beats": Training(2000, 128, 2e-3),
    "reaches": Training(1200),
    "discs-ot": Training(3000, 128, 2e-3),
}


@dataclass(frozen=True)
class Trained:
    """A trained flow, and the rule that judges its samples.

    Attributes:
        network: Called as `network(x, t, **cond)`; noise at t = 0, data at t = 1; in evaluation mode.
        space: The space of the states.
        data, cond: The training data, `(N, *)`, and their conditions.
        held_out, held_out_cond: Held-out data and their conditions.
        conditions: The conditions for n samples: classes in turn, or nothing.
        failed: The failure rule: `(state, conditions) -> (B,)`, true where a sample failed.
        pairs: The coupling of training, `(x1, randomness) -> x0`; `None` if noise and data are independent.
        notes: Numbers about the failure rule, such as the held-out accuracy of its classifier.
        others: Networks of `OTHERS`, by name.
    """

    network: nn.Module
    space: Space
    data: State
    cond: dict[str, Tensor]
    held_out: State
    held_out_cond: dict[str, Tensor]
    conditions: Callable[[int], dict[str, Tensor]]
    failed: Callable[[State, dict[str, Tensor]], Tensor]
    pairs: Callable[[Tensor, Randomness], Tensor] | None = None
    notes: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, nn.Module] = field(default_factory=dict)


Build = Callable[[torch.Generator, torch.device], Trained]


@dataclass(frozen=True)
class Flow:
    """A flow of the zoo.

    Attributes:
        name: Its name in tables and files.
        half: `choose`, `report`, `fresh`, `fresh2` or `fresh3`.
        about: Data, network and path in one line.
        rule: When a sample counts as failed, in one line.
        build: Returns data, rule and the untrained network, given a generator for the data and a device.
    """

    name: str
    half: str
    about: str
    rule: str
    build: Build

    def untrained(self, seed: int, device: torch.device, other: str = "") -> Trained:
        """Return the flow before training. The same seed gives the same data on every device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, self.name, "weights", *_member(other)))
            made = self.build(torch.Generator().manual_seed(derive(seed, self.name, "data")), device)
        conditions = {n: {k: v.to(device) for k, v in getattr(made, n).items()} for n in ("cond", "held_out_cond")}
        return replace(
            made,
            network=made.network.to(device).eval(),
            data=tree_map(lambda c: c.to(device), made.data),
            held_out=tree_map(lambda c: c.to(device), made.held_out),
            **conditions,
        )

    def train(
        self,
        seed: int,
        device: torch.device,
        other: str = "",
        progress: Callable[[int, float], None] | None = None,
    ) -> Trained:
        """Train the flow, or one of `OTHERS`, with the settings of `TRAINING`."""
        made, how = self.untrained(seed, device, other), TRAINING[self.name]
        space, network, pairs = made.space, made.network, made.pairs
        objective = getattr(network, "objective", None)

        def loss(x1: Tensor, randomness: Any, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
            x0 = pairs(x1, randomness) if pairs else space.noise(len(x1), randomness, x1.device)
            t = randomness.uniform(torch.empty(len(x1), device=x1.device))
            if objective is not None:
                return objective(space, x0, x1, t, randomness, **cond)
            x_t, u_t = space.path(x0, x1, t)
            return space.squared_error(network(x_t, t, **cond), u_t)

        plan = TrainingConfig(
            max(1, round(EARLY * how.steps)) if other == "early" else how.steps,
            how.batch,
            how.lr,
            "cosine",
            seed=derive(seed, self.name, "train", *_member(other)),
            captured=pairs is None,  # an assignment is solved on the CPU
        )
        train(network, loss, made.data, plan, cond=made.cond, progress=progress)
        for parameter in network.parameters():
            parameter.grad = None
        return made

    def restore(
        self,
        seed: int,
        device: torch.device,
        weights: Mapping[str, Tensor],
        others: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> Trained:
        """Return the trained flow, and others, from the weights of an earlier training with the same seed."""
        made = self.untrained(seed, device)
        made.network.load_state_dict(dict(weights))
        networks = {name: copy.deepcopy(made.network) for name in others or {}}
        for name, network in networks.items():
            network.load_state_dict(dict((others or {})[name]))
        return replace(made, others=networks)


def _member(other: str) -> tuple[str, ...]:
    """Return the names that seed a network. The early one differs from the flow only in its training length."""
    return () if other in ("", "early") else (other,)


# ---- building blocks ---------------------------------------------------------------------------------------------

Rule = Callable[..., Tensor]  # (x) or (x, y) -> (B,) on the CPU


def _drawn(
    network: Callable[[], nn.Module],
    space: Space | tuple[int, ...],
    draw: Callable[[int, torch.Generator], Tensor | tuple[Tensor, Tensor]],
    rule: Rule,
    classes: int = 0,
    *,
    count: int = DATA,
    pairs: Callable[[Tensor, Randomness], Tensor] | None = None,
) -> Build:
    """Return the builder of a flow whose data are drawn, with a class per sample if there are classes."""

    def rows(count: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = draw(count, generator)
        return (drawn[0], {"y": drawn[1]}) if isinstance(drawn, tuple) else (drawn, {})

    def build(generator: torch.Generator, device: torch.device) -> Trained:
        return Trained(
            network(),
            euclidean(space) if isinstance(space, tuple) else space,
            *rows(count, generator),
            *rows(HELD_OUT, generator),
            _in_turn(classes, device),
            _judged(rule),
            pairs=pairs,
        )

    return build


def _in_turn(classes: int, device: torch.device) -> Callable[[int], dict[str, Tensor]]:
    def conditions(count: int) -> dict[str, Tensor]:
        return {"y": torch.arange(count, device=device) % classes} if classes else {}

    return conditions


def _judged(rule: Rule) -> Callable[[State, dict[str, Tensor]], Tensor]:
    def failed(x: State, cond: dict[str, Tensor]) -> Tensor:
        assert isinstance(x, Tensor)
        return rule(x, *cond.values()).to(x.device)

    return failed


def optimal_pairs(x1: Tensor, randomness: Randomness) -> Tensor:
    """Return noise for a batch of data, assigned so that the sum of squared distances is least (minibatch OT)."""
    from scipy.optimize import linear_sum_assignment

    x0 = randomness.normal(x1)
    cost = torch.cdist(x1.flatten(1), x0.flatten(1)).square()
    return x0[torch.as_tensor(linear_sum_assignment(cost.cpu().numpy())[1], device=x1.device)]


def _curves(
    curves: Tensor,
    noise: float,
    tolerance: float,
    *,
    labelled: bool = False,
    wrap: Callable[[nn.Module], nn.Module] = lambda network: network,
    **options: Any,
) -> Build:
    """Return the builder of a flow of points near curves. Points off the curves (or that of their class) fail."""
    classes, dim = len(curves) if labelled else 0, curves.shape[2]

    def draw(count: int, generator: torch.Generator) -> Any:
        points, which = shapes.points_on(curves, count, noise, generator)
        return (points, which) if labelled else points

    def rule(x: Tensor, y: Tensor | None = None) -> Tensor:
        return shapes.nearest(x, curves, y) > tolerance

    return _drawn(lambda: wrap(ResidualMLP(dim, 128, 3, classes)), (dim,), draw, rule, classes, **options)


def _mnist(kind: str, network: Callable[[], nn.Module], labelled: bool = True) -> Build:
    def build(generator: torch.Generator, device: torch.device) -> Trained:
        return _pictures(network(), digits.mnist(kind, generator, device), 10 if labelled else 0, device)

    return build


def _digits(generator: torch.Generator, device: torch.device) -> Trained:
    pictures = digits.small(generator)
    return _pictures(ResidualMLP(64, 256, 3, 10), pictures, 10, device)


def _pictures(network: nn.Module, pictures: digits.Pictures, classes: int, device: torch.device) -> Trained:
    labels = [{"y": y} if classes else {} for y in (pictures.y, pictures.held_out_y)]
    return Trained(
        network,
        euclidean(pictures.x.shape[1:]),
        pictures.x,
        labels[0],
        pictures.held_out,
        labels[1],
        _in_turn(classes, device),
        _judged(pictures.rule),
        notes=pictures.notes,
    )


TORUS, CLOUDS, RARE = shapes.torus_curve(), shapes.cloud_centres(), shapes.cloud_centres(4, 5, 20)
MOONS = shapes.moon_curves()
OFF = "farther than {} from {}"
TAKEN = "a classifier trained on the right labels ({}) reads another digit"

FLOWS = {
    flow.name: flow
    for flow in (
        Flow(
            "moons",
            "choose",
            "two moons; residual MLP with LayerNorm; straight path, independent noise",
            OFF.format(0.25, "the moons' curves"),
            _curves(MOONS, 0.06, 0.25),
        ),
        Flow(
            "moons-ot",
            "report",
            "two moons; residual MLP with LayerNorm; straight path, minibatch optimal transport",
            OFF.format(0.25, "the moons' curves"),
            _curves(MOONS, 0.06, 0.25, pairs=optimal_pairs),
        ),
        Flow(
            "moons-vp",
            "report",
            "two moons; data-prediction denoiser; variance-preserving path, cosine schedule",
            OFF.format(0.25, "the moons' curves"),
            _curves(MOONS, 0.06, 0.25, wrap=Denoiser),
        ),
        Flow(
            "rings",
            "report",
            "two concentric rings; residual MLP; straight path",
            OFF.format(0.15, "the rings"),
            _curves(shapes.ring_curves(), 0.04, 0.15),
        ),
        Flow(
            "spirals",
            "choose",
            "two spiral arms, the class; residual MLP; straight path",
            OFF.format(0.2, "the arm of its class"),
            _curves(shapes.arms(2, 1.5, 0.2, 2.0), 0.05, 0.2, labelled=True),
        ),
        Flow(
            "torus",
            "choose",
            "a closed curve on a flat torus; MLP of sines and cosines; geodesics from uniform noise",
            OFF.format(0.06, "the curve"),
            _drawn(
                lambda: ResidualMLP(2, 96, 2, periodic=True),
                Space({SINGLE: Channel((2,), FlatTorus(), "uniform")}),
                lambda count, generator: shapes.points_on(TORUS, count, 0.015, generator)[0].remainder(1),
                lambda x: shapes.nearest(x, TORUS, torus=True) > 0.06,
            ),
        ),
        Flow(
            "undertrained",
            "choose",
            "eight Gaussians on a circle; residual MLP, stopped early; straight path",
            OFF.format(0.7, "the nearest centre (3.5 standard deviations)"),
            _curves(shapes.CENTRES, 0.2, 0.7),
        ),
        Flow(
            "overtrained",
            "report",
            "200 points on a 4 × 4 board, the class its colour; residual MLP that memorises them; straight path",
            OFF.format(0.32, "the centre of a field of its class (4 standard deviations)"),
            _curves(shapes.board(), 0.08, 0.32, labelled=True, count=200),
        ),
        Flow(
            "waves",
            "choose",
            "sums of two tones that form a pair, length 64; convolutions and a GRU; straight path",
            "the two strongest frequencies are not a pair, or hold less than 85 % of the energy",
            _drawn(ConvGru, (1, shapes.LENGTH), shapes.waves, shapes.wrong_tones),
        ),
        Flow(
            "melodies",
            "report",
            "two notes one after the other, the class, length 64; dilated convolutions; straight path",
            "either half's strongest frequency is not the requested note, or holds less than 75 % of its energy",
            _drawn(
                lambda: Dilated(len(shapes.NOTES)),
                (1, shapes.LENGTH),
                shapes.melodies,
                shapes.wrong_notes,
                len(shapes.NOTES),
            ),
        ),
        Flow(
            "circles",
            "report",
            "sets of eight points on a circle of any position and size; transformer without positions; straight path",
            "a point is off the best circle by more than 15 % of its radius",
            _drawn(lambda: SetTransformer(2), (shapes.POINTS, 2), shapes.circles, shapes.off_circle),
        ),
        Flow(
            "graphs",
            "choose",
            "six nodes in the plane, with the bonds of the class; graph network; straight path",
            "a bond is not 0.7 to 1.3 long, or two nodes without a bond are nearer than 0.7",
            _drawn(
                lambda: GraphNet(shapes.BONDS, 2), (shapes.NODES, 2), shapes.bonded, shapes.broken, len(shapes.BONDS)
            ),
        ),
        Flow(
            "digits",
            "report",
            "scikit-learn's 8 × 8 digits with their class; residual MLP; straight path",
            "a support vector machine trained on the held-out digits reads another digit",
            _digits,
        ),
        Flow(
            "mnist-rotated",
            "choose",
            "MNIST, 14 × 14, turned by −60° to 60°, with its class; small UNet; straight path",
            TAKEN.format("turned digits"),
            _mnist("rotated", lambda: SmallUNet(10)),
        ),
        Flow(
            "mnist-inverted",
            "report",
            "MNIST, 14 × 14, dark on light, with its class; small UNet; straight path",
            TAKEN.format("inverted digits"),
            _mnist("inverted", lambda: SmallUNet(10)),
        ),
        Flow(
            "mnist-noisy",
            "choose",
            "MNIST, 14 × 14, a fifth of the labels replaced; small UNet; straight path",
            TAKEN.format("plain digits"),
            _mnist("noisy", lambda: SmallUNet(10)),
        ),
        Flow(
            "mnist-unconditional",
            "choose",
            "MNIST, 14 × 14, without classes; small UNet; straight path",
            "a classifier of digits and non-digits gives no digit the probability that 98.5 % of real digits reach",
            _mnist("unconditional", lambda: SmallUNet(), labelled=False),
        ),
        Flow(
            "mnist-guided",
            "report",
            "MNIST, 14 × 14; small UNet trained with 15 % of labels dropped; classifier-free guidance, w = 2",
            TAKEN.format("plain digits"),
            _mnist("plain", lambda: Guided(SmallUNet(11), none=10)),
        ),
        Flow(
            "squares",
            "fresh",
            "outlines of three squares; residual MLP; straight path",
            OFF.format(0.15, "the outlines"),
            _curves(shapes.square_curves(), 0.03, 0.15),
        ),
        Flow(
            "lissajous",
            "fresh",
            "a closed Lissajous curve in space; residual MLP; straight path",
            OFF.format(0.3, "the curve"),
            _curves(shapes.lissajous(), 0.05, 0.3),
        ),
        Flow(
            "clouds",
            "fresh",
            "two Gaussian clouds in 4-D for each of six classes, partly overlapping; residual MLP; straight path",
            "another class's centre is nearer than both of its own by more than 0.4 (a standard deviation)",
            _drawn(
                lambda: ResidualMLP(4, 96, 2, len(CLOUDS)),
                (4,),
                lambda count, generator: shapes.points_on(CLOUDS, count, 0.4, generator),
                lambda x, y: shapes.nearer_another(x, y, CLOUDS, 0.4),
                len(CLOUDS),
            ),
        ),
        Flow(
            "segments",
            "fresh",
            "sets of six points on a line segment; transformer without positions; straight path",
            "a point is farther than 0.2 from the best line",
            _drawn(lambda: SetTransformer(2), (6, 2), shapes.segments, shapes.off_line),
        ),
        Flow(
            "triangles-ot",
            "fresh",
            "right-angled triangles in the plane; residual MLP; straight path, minibatch optimal transport",
            "the angle is not 90° ± 12°, or a leg is not 0.7 to 2.1 long",
            _drawn(lambda: ResidualMLP(6, 128, 3), (3, 2), shapes.triangles, shapes.not_right, pairs=optimal_pairs),
        ),
        Flow(
            "pulses",
            "fresh",
            "one to four pulses on a track, the class their number, length 32; dilated convolutions; straight path",
            "the number of pulses is not the requested one",
            _drawn(
                lambda: Dilated(shapes.PULSES, dilations=(1, 2, 4, 1)),
                (1, shapes.TRACK),
                shapes.pulses,
                shapes.wrong_count,
                shapes.PULSES,
            ),
        ),
        Flow(
            "octahedra",
            "fresh2",
            "six directions to the corners of an octahedron; rotation-equivariant network; geodesics of spheres",
            "a corner's inner products with the others are not an octahedron's within 0.3",
            _drawn(
                Equivariant,
                Space({SINGLE: Channel((len(shapes.CORNERS), 3), shapes.Sphere())}),
                shapes.octahedra,
                shapes.no_octahedron,
            ),
        ),
        Flow(
            "brackets",
            "fresh2",
            "balanced words of two kinds of brackets, one-hot; MLP-Mixer trained by cross entropy; straight path",
            "the largest numbers do not spell a balanced word",
            _drawn(
                lambda: Endpoint(Mixer(shapes.WORD, shapes.LETTERS)),
                (shapes.WORD, shapes.LETTERS),
                shapes.brackets,
                shapes.unbalanced,
            ),
        ),
        Flow(
            "hunts",
            "fresh2",
            "Lotka–Volterra series of prey and predators, length 16; LSTM layers; straight path",
            "a state is farther than 0.3 from the solution that starts at the previous state",
            _drawn(lambda: Recurrent(2), (shapes.STEPS, 2), shapes.hunts, shapes.no_hunt),
        ),
        Flow(
            "rare-ot",
            "fresh2",
            "five Gaussians in 20-D for each of four classes, the rarest 3 %; gated MLP; minibatch optimal transport",
            OFF.format(1.7, "the nearest centre of its class (6.8 standard deviations; 4.5 are usual)"),
            _drawn(
                lambda: GatedMLP(20, len(RARE), 192, 4),
                (20,),
                lambda count, generator: shapes.rare(RARE, count, 0.25, generator),
                lambda x, y: shapes.nearest(x, RARE, y) > 1.7,
                len(RARE),
                pairs=optimal_pairs,
            ),
        ),
        Flow(
            "emblems",
            "fresh2",
            "coloured figures, 3 × 12 × 12, the class figure and colour; transformer over patches; straight path",
            "the nearest drawing is of another class, or differs by more than 0.2 (root mean square)",
            _drawn(
                lambda: PatchTransformer(3, shapes.SIDE, 4, shapes.EMBLEMS),
                (3, shapes.SIDE, shapes.SIDE),
                shapes.emblems,
                shapes.wrong_emblem,
                shapes.EMBLEMS,
            ),
        ),
        Flow(
            "maps",
            "fresh3",
            "coloured maps of 4 × 4 fields, one-hot; MLP-Mixer over fields trained by cross entropy; straight path",
            "two fields that share a side have the same colour",
            _drawn(
                lambda: Endpoint(Mixer(shapes.FIELDS**2, shapes.COLOURS)),
                (shapes.FIELDS**2, shapes.COLOURS),
                shapes.maps,
                shapes.same_neighbours,
            ),
        ),
        Flow(
            "rivers",
            "fresh3",
            "a line from the left to the right edge, 12 × 12; small UNet; straight path",
            "the bright pixels are not one piece from the left to the right edge, or a column has more than three",
            _drawn(SmallUNet, (1, shapes.SIDE, shapes.SIDE), shapes.rivers, shapes.broken_river),
        ),
        Flow(
            "gears",
            "fresh3",
            "two wheels, the class their gear; easy and hard gears; mixture of MLPs; predicts noise on DDPM's path",
            "the second wheel is not at the angle of its gear within 35°, or a radius is not 0.7 to 1.3",
            _drawn(
                lambda: NoisePrediction(Experts(4, len(shapes.RATIOS))),
                (2, 2),
                shapes.gears,
                shapes.slipped,
                len(shapes.RATIOS),
            ),
        ),
        Flow(
            "beats",
            "fresh3",
            "regular heartbeats, length 64, 4 % with an early beat, which is correct; UNet for series; straight path",
            "a beat is missing or out of time; one early beat is right if the beat after it is in time",
            _drawn(ConvUNet, (1, shapes.LENGTH), shapes.beats, shapes.irregular),
        ),
        Flow(
            "reaches",
            "fresh3",
            "directions of four rods that lead to the goal of the class; MLP of sines, stopped early; flat torus",
            "the hand is farther than 0.3 from its goal",
            _drawn(
                lambda: ResidualMLP(4, 96, 2, len(shapes.GOALS), periodic=True),
                Space({SINGLE: Channel((4,), FlatTorus(), "uniform")}),
                shapes.reaches,
                shapes.missed,
                len(shapes.GOALS),
            ),
        ),
        Flow(
            "discs-ot",
            "fresh3",
            "five discs in a box; small network that sees only means; minibatch optimal transport",
            "two discs overlap, or one sticks out of the box, by more than 20 % of their diameter",
            _drawn(lambda: DeepSet(2), (shapes.DISCS, 2), shapes.packed, shapes.overlapping, pairs=optimal_pairs),
        ),
    )
}
