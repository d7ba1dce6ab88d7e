"""The classifier that judges images: its training recipe, its predictions, and which samples fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.checkpoint import load_network, save_network
from fmwc.data.arrays import fingerprint
from fmwc.errors import ShapeError, UsageError
from fmwc.mnist.data import Images, unit
from fmwc.modes import evaluating
from fmwc.networks import LeNet
from fmwc.processes import Processes, resumed_by_first
from fmwc.provenance import Clock, provenance, runtime
from fmwc.randomness import Stream, derive
from fmwc.training import TrainingConfig, train

__all__ = [
    "Classifier",
    "accuracy",
    "activations",
    "failed",
    "fit_classifier",
    "predictions",
]


@dataclass(frozen=True)
class Classifier:
    """Options of the classifier's training. It is trained on the training split and evaluated on the test split."""

    seed: int = 0
    iterations: int = 6_000  # 26 epochs; the accuracy levels off much earlier
    batch: int = 256
    lr: float = 2e-3
    turn: float = 12.0  # maximum rotation in degrees, in either direction
    scale: float = 0.12
    shift: float = 0.08  # maximum shift as a share of the image's side, in either direction
    data: str = ""  # a folder or file; FMWC_DATA or the cache if empty
    own: bool = False  # read your own data instead of MNIST
    classes: int = 10

    @property
    def plan(self) -> TrainingConfig:
        return TrainingConfig(self.iterations, self.batch, self.lr, "cosine", seed=derive(self.seed, "judge"))


def distort(x: Tensor, recipe: Classifier, randomness: Stream) -> Tensor:  # (B, 1, H, W)
    """Rotate, scale and shift each image by a small random amount."""

    def spread(size: float) -> Tensor:
        return (2 * randomness.uniform(x[:, 0, 0, 0]) - 1) * size

    angle, size = spread(recipe.turn * math.pi / 180), 1 + spread(recipe.scale)
    cos, sin = angle.cos() * size, angle.sin() * size
    rows = [torch.stack([cos, -sin, spread(2 * recipe.shift)], 1), torch.stack([sin, cos, spread(2 * recipe.shift)], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def fit_classifier(
    recipe: Classifier,
    data: Images,
    test: Images,
    out: Path,
    device: torch.device,
    progress: Callable[[int, float], None] | None = None,
    *,
    force: bool = False,
) -> LeNet:
    """Train a classifier and write it to a folder, with its accuracy on the test split. Resumes if interrupted."""
    clock = Clock(device)
    if data.x.shape[-1] != data.x.shape[-2]:
        raise UsageError(f"the classifier needs square images, got {tuple(data.x.shape[-2:])}")
    literals = {k: v for k, v in asdict(recipe).items() if k != "data"}
    known = fingerprint(data.x, data.y)
    about = {**literals, "data": known, "test": fingerprint(test.x, test.y), **runtime(device)}
    network: LeNet
    with resumed_by_first(out, {"command": "train", **about}, force=force) as folder:
        if folder.finished:
            network = load_network(out, device=device)
            return network
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(recipe.seed, "judge's first weights"))
            network = LeNet(recipe.classes, data.x.shape[-1]).to(device)

        def loss(x1: Tensor, randomness: Stream, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(network(distort(x1, recipe, randomness)), cond["y"])

        network.train()
        point, x = folder.work / "judge.resume", unit(data.x)
        train(network, loss, x, recipe.plan, cond={"y": data.y}, resume=point, identity=literals, progress=progress)
        network.eval()
        if Processes().first:
            save_network(
                network,
                folder.path,
                recipe={"name": "judge", **literals},
                data={"name": "mnist", "fingerprint": known},
                metrics={"accuracy": accuracy(network, unit(test.x), test.y)},
                provenance=provenance(device, clock.seconds, seeds=[recipe.seed]),
            )
    return network


CHUNK = 2000  # images per batch of the classifier


def _classify(classifier: Any, x: Tensor, method: str) -> Tensor:
    device = next(classifier.parameters()).device
    with evaluating(classifier), torch.no_grad():
        # Clamp as a display does: pixels outside [0, 1] appear black or white.
        return torch.cat([getattr(classifier, method)(part.to(device).clamp(0, 1)).cpu() for part in x.split(CHUNK)])


def predictions(classifier: Any, x: Tensor) -> Tensor:  # (B, 1, H, W) -> (B,)
    """Return the predicted class of each image."""
    return _classify(classifier, x, "forward").argmax(1)


def failed(classifier: Any, x: Tensor, y: Tensor) -> np.ndarray:  # (B, 1, H, W), (B,) -> (B,)
    """Return `True` for each image whose predicted class is not the requested one."""
    if len(x) != len(y):
        raise ShapeError(f"expected one class per image, got {len(y)} for {len(x)} images")
    return (predictions(classifier, x) != y.cpu()).numpy()


def accuracy(classifier: Any, x: Tensor, y: Tensor) -> float:
    """Return the fraction of images that are classified as the requested class."""
    return 1 - float(failed(classifier, x, y).mean())


def activations(classifier: Any, x: Tensor) -> np.ndarray:  # (B, 1, H, W) -> (B, F)
    """Return the activations of the classifier's penultimate layer, in double precision."""
    return _classify(classifier, x, "features").double().numpy()
