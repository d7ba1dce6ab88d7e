"""The recipe of MNIST, the paper's second experiment (tab:network-hyperparams, tab:training-hyperparams)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fmwc.calibration import fit_confidence
from fmwc.checkpoint import load_network
from fmwc.errors import DataError, UsageError
from fmwc.field import Field
from fmwc.flow import Space, euclidean
from fmwc.mnist import data as mnist
from fmwc.mnist.classifier import failed
from fmwc.networks import UNet
from fmwc.randomness import derive
from fmwc.recipes import Recipe
from fmwc.sampling import Reference, SamplingConfig, sample
from fmwc.sampling.trajectory import FEWEST

__all__ = ["JUDGE", "PRESETS", "SCORE", "WITHIN", "Mnist", "batch_for", "labels"]

JUDGE = "mnist-judge"  # the shipped classifier
REFERENCED = 20_000  # training images used to choose the confidence score
SCORE, WITHIN = "integrated", "y"  # the best label-free reading on validation seed 100 (results/mnist/NOTES.md)


def labels(count: int, classes: int = 10, first: int = 0) -> Tensor:
    """Return classes in turn, from that of sample `first`."""
    return torch.arange(first, first + count) % classes


def batch_for(device: torch.device) -> int:
    """Return the batch size of sampling: large for a GPU, small for frequent progress on two cores."""
    return 2500 if device.type == "cuda" else 25


@dataclass(frozen=True)
class Mnist(Recipe):
    """Options of a training run. Values are the paper's unless a comment gives a reason."""

    name = "mnist"
    counts = ("base", "blocks", "cond", "references", "classes")

    base: int = 32
    blocks: int = 1  # not in the paper: residual blocks per stage
    cond: int = 128
    iterations: int = 12_000  # the paper's 50,000 at a constant 1e-4 have a worse FID on validation seed 100
    batch: int = 256
    lr: float = 1e-3
    decay: str = "cosine"
    exclude: str = ""  # glob pattern of layers without noise; "first" for the ablation
    noise_steps: int = 1_000  # of the retrofit; 600 sufficed on validation seed 100, but more take only seconds
    noise_lr: float = 1e-3
    precision: str = "bf16"  # on a GPU, where memory bandwidth limits a step
    compiled: bool = True
    save_every: int = 2_000
    references: int = 2_000  # digits of the pilot run, 200 per class
    data: str = ""  # a folder or file; FMWC_DATA or the cache if empty
    own: bool = False  # read your own data instead of MNIST
    classes: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.references < FEWEST * self.classes:
            raise UsageError(
                f"references must be at least {FEWEST} per class, {FEWEST * self.classes}; got {self.references}"
            )
        if self.cond % 2:
            raise UsageError(f"cond must be even (sines and cosines), got {self.cond}")

    def images(self, split: str = "train") -> mnist.Images:
        path = self.data or os.environ.get("FMWC_DATA", "")  # part of the cache key
        return _images(path, split, self.own, self.classes)

    def space(self) -> Space:
        return euclidean(self.images().x.shape[1:])

    def rows(self) -> tuple[Tensor, dict[str, Any]]:
        images = self.images()
        side = tuple(images.x.shape[-2:])
        if side[0] % 4 or side[1] % 4:
            raise UsageError(f"the UNet halves an image twice, so its sides must be multiples of 4; these are {side}")
        absent = sorted(set(range(self.classes)) - set(images.y.unique().tolist()))
        if absent:
            raise DataError(f"no image is of class {absent[0]}; give the number of classes: --set classes=N")
        return mnist.unit(images.x), {"y": images.y}

    def build(self, heads: int) -> UNet:
        outputs = heads if heads > 1 else None
        return UNet(1, self.base, (1, 2, 4), self.blocks, self.cond, self.classes, outputs=outputs)

    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Fit the reference to equally many samples per class, and judge other samples. Both use separate seeds."""
        x, rows = self.rows()
        first = slice(0, REFERENCED)
        reference = fit_confidence(
            field,
            x[first],
            cond={WITHIN: rows[WITHIN][first]},
            pilot=self.references,
            seed=derive(self.seed, "reference"),
            batch=batch_for(field.device),
            conventions=False,
        )
        if self.own:
            return reference, {}
        y = labels(self.references, self.classes).to(field.device)
        samples = sample(
            field,
            len(y),
            seed=derive(self.seed, "judged"),
            check=False,
            cond={"y": y},
            config=SamplingConfig(batch=batch_for(field.device)),
        )
        return reference, {"failure": float(failed(load_network(JUDGE), samples.x, y).mean())}


PRESETS: dict[str, Mnist] = {
    # Train the flow as usual, then fit the noise: samples are identical to those of the plain flow.
    "recommended": Mnist(),
    # As in the paper: joint training at a constant rate.
    "paper": Mnist(method="joint", iterations=50_000, lr=1e-4, decay="constant"),
    # A quarter of an hour on two cores.
    "quick": Mnist(base=16, iterations=2_000, batch=64, lr=2e-3, noise_steps=200, references=200),
}


@lru_cache(maxsize=4)
def _images(path: str, split: str, own: bool, classes: int) -> mnist.Images:
    return mnist.load(path or None, split, own=own, classes=classes)
