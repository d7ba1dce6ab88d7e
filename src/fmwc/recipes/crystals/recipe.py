"""The crystals' recipe: the paper's third setting (tab:network-hyperparams, tab:training-hyperparams)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.choosing import FEWEST_PILOT, fit_confidence
from fmwc.data import mp20
from fmwc.data.crystals import BITS, Crystals, encode
from fmwc.errors import UsageError, pick
from fmwc.field import Field, Reference, attach
from fmwc.flow import Channel, FlatTorus, Lattice, Space
from fmwc.nets import CSPNet
from fmwc.propagate import Linearised
from fmwc.randomness import Stream, derive
from fmwc.recipes.recipe import plan_of
from fmwc.sampling import sample
from fmwc.sampling.scores import parsed
from fmwc.training import Plan

__all__ = ["EVERY", "PRESETS", "READ_BY", "SCORE", "Mp20", "batch_for"]

WIDTH = mp20.MOST_ATOMS
EVERY = 5  # steps between two readings of the variance, by default
READ_BY = Linearised(1)
SCORE = "geometric@0.6-0.9"  # the best label-free reading on validation seed 100 (results/crystals/NOTES.md)


def batch_for(device: torch.device) -> int:
    """Crystals integrated together: what fills a GPU, and what two cores do between two looks at the bar."""
    return 2_500 if device.type == "cuda" else 50


@dataclass(frozen=True)
class Mp20:
    """One training run. Numbers are the paper's unless a reason stands beside them."""

    method: str = "retrofit"  # retrofit: train the flow, then fit the noise to it; joint: both at once, as the paper
    seed: int = 0
    hidden: int = 512
    layers: int = 6
    frequencies: int = 128
    time_features: int = 256
    iterations: int = 75_000  # 875 epochs; the paper has 2,000, for which the lease of the GPU was too short
    batch: int = 256
    lr: float = 5e-4
    last_lr: float = 1e-5
    decay: str = "cosine"
    weight_decay: float = 5e-3
    average: float = 0.999
    clip: float = 0.5  # of each gradient's entries, as FlowMM
    beta: float = 1e-3
    prior_rate: float = 0.1
    cycles: int = 4
    warmup: float = 0.1
    type_weight: float = 40.0  # in the loss, as FlowMM
    coord_weight: float = 400.0
    exclude: str = "*.from_offset"  # a glob over layers without noise: the waves of a pair, half of the cost of noise
    width: int = 64  # of the inference networks
    noise_steps: int = 2_000  # of the retrofit
    noise_batch: int = 256
    noise_lr: float = 1e-3
    precision: str = "bf16"  # a GPU's
    compiled: bool = True
    noise_compiled: bool = True
    eightbit: bool = True  # weights are rounded to what can be shipped before anything is read from them
    stratified: bool = True  # batches of one size, which a captured graph needs
    save_every: int = 5_000
    minutes: float = 0.0  # stop training after so long; 0 is never
    enough: float = 1.0  # the share of its steps from which a network that the clock stopped is taken as it is
    flow: str = ""  # a checkpoint whose flow is taken as it is, in place of training one
    steps: int = 50  # of sampling
    anneal: float = 20.0  # coordinates are followed at 1 + s·t times their speed (results/crystals/NOTES.md)
    references: int = 500  # crystals the confidence is read against
    data: str = ""  # a folder; FMWC_DATA if empty

    def __post_init__(self) -> None:
        pick({"retrofit": 0, "joint": 0}, self.method, "method")
        for name in (
            "hidden",
            "layers",
            "frequencies",
            "time_features",
            "width",
            "noise_steps",
            "noise_batch",
            "steps",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.references < FEWEST_PILOT:
            raise UsageError(f"references is at least {FEWEST_PILOT}, got {self.references}")
        if not 0 < self.enough <= 1 or self.minutes < 0 or self.anneal < 0:
            raise UsageError("enough lies in (0, 1], and minutes and anneal are not negative")
        if not 0 < self.prior_rate < 1:
            raise UsageError(f"prior_rate lies strictly between 0 and 1, got {self.prior_rate}")

    @property
    def name(self) -> str:
        return "crystals"

    @property
    def plan(self) -> Plan:
        return plan_of(self)

    def crystals(self, split: str = "train") -> Crystals:
        return _crystals(self.data or os.environ.get("FMWC_DATA", ""), split)

    def space(self) -> Space:
        return _space(self.crystals(), self.type_weight, self.coord_weight, self.anneal)

    def rows(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Sorted by size, so that a stratified batch always has about the same number of pairs."""
        state, atoms = encode(self.crystals())
        order = atoms.argsort(stable=True)
        return {name: value[order] for name, value in state.items()}, {"atoms": atoms[order]}

    def source(self) -> tuple[Tensor, ...]:
        """What `rows` are computed from."""
        data = self.crystals()
        return data.numbers, data.coords, data.lengths, data.angles

    def network(self, heads: int = 1) -> CSPNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "network"))
            network = CSPNet(self.hidden, self.layers, self.frequencies, self.time_features, BITS, WIDTH)
        _scale(network, self)
        if self.stratified:
            sizes = self.rows()[1]["atoms"]
            network.rooms |= {batch: _room(sizes, batch) for batch in (self.batch, min(self.noise_batch, len(sizes)))}
        return network

    def attach(self, network: nn.Module) -> Field:
        # Said before anything is trained: afterwards the reference is read with these steps.
        _, _, window = parsed(SCORE)
        read_at = [step / self.steps for step in range((self.steps - 1) % EVERY, self.steps, EVERY)]
        if not any(window["early"] <= t < window["late"] for t in read_at):
            raise UsageError(f"with {self.steps} steps nothing is read in the window of {SCORE}; take 20 or more")
        return attach(
            network,
            exclude=[self.exclude] if self.exclude else [],
            space=self.space(),
            prior_rate=self.prior_rate,
            width=self.width,
            seed=derive(self.seed, "noise"),
        )

    def draw(self, field: Any, count: int, seed: int, **options: Any) -> Any:
        """Crystals with as many atoms as the data has; FlowMM's anti-annealing."""
        network = getattr(field, "network", field)
        device = next(network.parameters()).device
        atoms = network.draw_sizes(count, derive(seed, "atoms"))
        options = {"steps": self.steps, "batch": batch_for(device), **options}
        return sample(field, count, seed=seed, space=self.space(), atoms=atoms.to(device), **options)

    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Crystals of a seed of their own."""
        network: Any = field.network
        atoms = network.draw_sizes(self.references, derive(self.seed, "atoms"))
        reference = fit_confidence(
            field,
            cond={"atoms": atoms},
            steps=self.steps,
            pilot=self.references,
            seed=derive(self.seed, "reference"),
            batch=batch_for(field.device),
        )
        return reference, {}


def _space(crystals: Crystals, type_weight: float, coord_weight: float, anneal: float) -> Space:
    logarithm = crystals.lengths.log()
    mean, std = (tuple(round(v, 4) for v in f.tolist()) for f in (logarithm.mean(0), logarithm.std(0)))
    return Space(
        {
            "type": Channel((WIDTH, BITS), rows="atoms", weight=type_weight),
            "coord": Channel(
                (WIDTH, 3), FlatTorus(), "uniform", rows="atoms", centred=True, weight=coord_weight, anneal=anneal
            ),
            "lattice": Channel((6,), Lattice(mean, std), "own"),
        }
    )


def _scale(network: CSPNet, recipe: Mp20) -> None:
    """The scales of what the network sees and gives, from the data: paths of many crystals at random times."""
    state, cond = recipe.rows()
    space = recipe.space().given(cond)
    randomness = Stream(torch.Generator().manual_seed(derive("scales")))
    count = len(cond["atoms"])
    t = randomness.uniform(torch.empty(count))
    x_t, u = space.path(space.noise(count, randomness), state, t)
    network.lattice_mean.copy_(x_t["lattice"].mean(0))
    network.lattice_std.copy_(x_t["lattice"].std(0).clamp_min(1e-3))
    network.velocity_mean.copy_(u["lattice"].mean(0))
    network.velocity_std.copy_(u["lattice"].std(0).clamp_min(1e-3))
    there = space.present["coord"].expand_as(u["coord"])
    network.coord_std.copy_(u["coord"][there].square().mean().sqrt())
    network.sizes.copy_(torch.bincount(cond["atoms"], minlength=WIDTH + 1))


def _room(atoms: Tensor, batch: int) -> tuple[int, int]:
    """The most atoms and pairs a stratified batch of sorted sizes can have: the last of every slice."""
    ends = ((torch.arange(batch) + 1) * (len(atoms) / batch)).ceil().long().clamp_max(len(atoms) - 1)
    most = atoms[ends]
    rows = -(-int(most.sum()) // 64) * 64
    pairs = -(-max(1, int((most * (most - 1)).sum())) // 64) * 64
    while pairs in (batch, rows):  # rows of crystals, atoms and pairs are told apart by their number
        pairs += 64
    return rows, pairs


PRESETS: dict[str, Mp20] = {
    # Train the flow as usual, then fit the noise: the samples of the plain flow.
    "recommended": Mp20(),
    # As printed: joint training.
    "paper": Mp20(method="joint"),
    # Something to look at on two cores.
    "quick": Mp20(hidden=64, layers=3, frequencies=16, time_features=32, iterations=2_000, batch=64, noise_steps=200),
}


@lru_cache(maxsize=4)
def _crystals(path: str, split: str) -> Crystals:
    return mp20.load(path or None, split)
