"""The recipe of the Checkerboard, the paper's first experiment (tab:network-hyperparams, tab:training-hyperparams)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from fmwc import checkerboard
from fmwc.calibration import fit_confidence
from fmwc.checkerboard.data import misplacement
from fmwc.errors import UsageError
from fmwc.field import Field
from fmwc.flow import Space, euclidean
from fmwc.networks import MLP
from fmwc.randomness import derive
from fmwc.recipes import Recipe
from fmwc.sampling import Reference, sample

__all__ = ["PRESETS", "SPACE", "Checkerboard"]

SPACE = euclidean((2,))


@dataclass(frozen=True)
class Checkerboard(Recipe):
    """Options of a training run. Values are the paper's unless a comment gives a reason."""

    name = "checkerboard"
    counts = ("points", "hidden", "depth", "time_features")

    points: int = 500_000  # training samples
    hidden: int = 512
    depth: int = 3
    time_features: int = 256  # not in the paper; 64, 128 and 256 misplaced 4.1, 3.5 and 3.1 % on validation seed 100
    iterations: int = 20_000
    batch: int = 4096
    lr: float = 1e-3
    decay: str = "cosine"  # the paper's rate is constant; decay is better for every method (results/checkerboard)
    layers: str = "*"  # glob pattern of layers with noise; "out" is the paper's output-only variant
    noise_steps: int = 2_000  # of the retrofit; 500 did as well on validation seed 100, but 2,000 take only seconds
    save_every: int = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time_features % 2:
            raise UsageError(f"time_features must be even (sines and cosines), got {self.time_features}")

    @property
    def include(self) -> str:  # type: ignore[override]
        return self.layers

    @property
    def noise_lr(self) -> float:  # type: ignore[override]
        return self.lr

    def space(self) -> Space:
        return SPACE

    def rows(self) -> tuple[Tensor, dict[str, Any]]:
        """Return points drawn with a fixed seed, the same in every run."""
        return _data(self.points), {}

    def build(self, heads: int) -> MLP:
        return MLP(2, self.hidden, self.depth, self.time_features, 2 * heads if heads > 1 else None)

    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Fit the reference to 10⁴ samples drawn with a separate seed."""
        seed = derive(self.seed, "reference")
        reference = fit_confidence(field, self.rows()[0], pilot=10_000, seed=seed, batch=16384, conventions=False)
        samples = sample(field, 10_000, seed=seed, confidence=None)
        return reference, {"misplacement": misplacement(samples.x)}


PRESETS: dict[str, Checkerboard] = {
    # Train the flow as usual, then fit the noise: better samples, identical to those of the plain flow.
    "recommended": Checkerboard(),
    # As in the paper: joint training at a constant rate.
    "paper": Checkerboard(method="joint", decay="constant"),
    # Small enough for a demo on two cores.
    "quick": Checkerboard(
        points=100_000, hidden=256, time_features=128, iterations=10_000, batch=1024, lr=2e-3, noise_steps=500
    ),
}


@lru_cache(maxsize=2)
def _data(points: int) -> Tensor:
    return checkerboard.sample(points, seed=derive("checkerboard", "training data"))
