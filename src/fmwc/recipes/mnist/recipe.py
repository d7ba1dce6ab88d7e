"""The MNIST recipe: the paper's second setting (tab:network-hyperparams, tab:training-hyperparams)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.checkpoint import load_network
from fmwc.choosing import fit_confidence
from fmwc.data import mnist
from fmwc.errors import DataError, UsageError, pick
from fmwc.field import Field, Reference, attach
from fmwc.flow import Space, euclidean
from fmwc.metrics.images import failed
from fmwc.nets import UNet
from fmwc.randomness import derive
from fmwc.recipes.recipe import plan_of
from fmwc.sampling import sample
from fmwc.sampling.scores import FEWEST
from fmwc.training import Plan

__all__ = ["JUDGE", "PRESETS", "SCORE", "WITHIN", "Mnist", "batch_for", "labels"]

JUDGE = "mnist-judge"  # the shipped classifier
REFERENCED = 20_000  # images that the choice of the confidence looks at
SCORE, WITHIN = "integrated", "y"  # the best label-free reading on validation seed 100 (results/mnist/NOTES.md)


def labels(count: int, classes: int = 10) -> Tensor:
    """The classes asked for: each in turn."""
    return torch.arange(count) % classes


def batch_for(device: torch.device) -> int:
    """Digits integrated together: what fills a GPU, and what two cores do in the time between two looks at the bar."""
    return 2500 if device.type == "cuda" else 25


@dataclass(frozen=True)
class Mnist:
    """One training run. Numbers are the paper's unless a reason stands beside them."""

    method: str = "retrofit"  # retrofit: train the flow, then fit the noise to it; joint: both at once, as the paper
    seed: int = 0
    base: int = 32
    blocks: int = 1  # not in the paper: residual blocks a stage
    cond: int = 128
    iterations: int = 12_000  # the paper's 50,000 at 1e-4, undecayed, have the worse FID on validation seed 100
    batch: int = 256
    lr: float = 1e-3
    decay: str = "cosine"
    beta: float = 1e-3
    prior_rate: float = 0.3
    cycles: int = 4
    warmup: float = 0.1
    exclude: str = ""  # a glob over layer names that carry no noise: "first" for the ablation
    width: int = 64  # of the inference networks
    noise_steps: int = 1_000  # of the retrofit; 600 sufficed on validation seed 100, more cost seconds
    noise_lr: float = 1e-3
    precision: str = "bf16"  # a GPU's; the step is bound by memory
    compiled: bool = True
    save_every: int = 2_000
    references: int = 2_000  # digits the confidence is read against, 200 a class
    data: str = ""  # a folder or file; FMWC_DATA or the cache if empty
    own: bool = False  # whether it is a data set of one's own
    classes: int = 10

    def __post_init__(self) -> None:
        pick({"retrofit": 0, "joint": 0}, self.method, "method")
        for name in ("base", "blocks", "cond", "width", "noise_steps", "references", "classes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.references < FEWEST * self.classes:
            raise UsageError(
                f"references are at least {FEWEST} a class, {FEWEST * self.classes}; got {self.references}"
            )
        if self.cond % 2:
            raise UsageError(f"cond is even (sines and cosines), got {self.cond}")
        if not 0 < self.prior_rate < 1:
            raise UsageError(f"prior_rate lies strictly between 0 and 1, got {self.prior_rate}")

    @property
    def name(self) -> str:
        return "mnist"

    @property
    def plan(self) -> Plan:
        return plan_of(self)

    def images(self, split: str = "train") -> mnist.Images:
        where = self.data or os.environ.get("FMWC_DATA", "")  # part of the key below
        return _images(where, split, self.own, self.classes)

    def space(self) -> Space:
        return euclidean(self.images().x.shape[1:])

    def rows(self) -> tuple[Tensor, dict[str, Any]]:
        images = self.images()
        side = tuple(images.x.shape[-2:])
        if side[0] % 4 or side[1] % 4:
            raise UsageError(f"the UNet halves an image twice, so its sides are multiples of 4; these are {side}")
        absent = sorted(set(range(self.classes)) - set(images.y.unique().tolist()))
        if absent:
            raise DataError(f"no image is of class {absent[0]}; say how many classes there are: --set classes=N")
        return mnist.unit(images.x), {"y": images.y}

    def network(self, heads: int = 1) -> UNet:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "network"))
            return UNet(
                1, self.base, (1, 2, 4), self.blocks, self.cond, self.classes, outputs=heads if heads > 1 else None
            )

    def attach(self, network: nn.Module) -> Field:
        return attach(
            network,
            exclude=[self.exclude] if self.exclude else [],
            space=self.space(),
            prior_rate=self.prior_rate,
            width=self.width,
            seed=derive(self.seed, "noise"),
        )

    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Digits of a seed of their own, as many of each class."""
        x, rows = self.rows()
        few = slice(0, REFERENCED)
        reference = fit_confidence(
            field,
            x[few],
            cond={WITHIN: rows[WITHIN][few]},
            pilot=self.references,
            seed=derive(self.seed, "reference"),
            batch=batch_for(field.device),
            conventions=False,
        )
        if self.own:
            return reference, {}
        y = labels(self.references, self.classes).to(field.device)
        samples = sample(
            field, len(y), seed=derive(self.seed, "judged"), batch=batch_for(field.device), check=False, y=y
        )
        return reference, {"failure": float(failed(load_network(JUDGE), samples.x, y).mean())}


PRESETS: dict[str, Mnist] = {
    # Train the flow as usual, then fit the noise: the samples of the plain flow.
    "recommended": Mnist(),
    # As printed: joint training at a constant rate.
    "paper": Mnist(method="joint", iterations=50_000, lr=1e-4, decay="constant"),
    # Something to look at on two cores, in a quarter of an hour.
    "quick": Mnist(base=16, iterations=2_000, batch=64, lr=2e-3, noise_steps=200, references=200),
}


@lru_cache(maxsize=4)
def _images(path: str, split: str, own: bool, classes: int) -> mnist.Images:
    return mnist.load(path or None, split, own=own, classes=classes)
