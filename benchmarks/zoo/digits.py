"""Digits with their judges: those of scikit-learn, and MNIST at 14 × 14, rotated, inverted or with wrong labels.

Judges are classifiers trained on the right labels. Those of MNIST are the same for all seeds. They are cached in the
folder `FMWC_ZOO_JUDGES` if that is set.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Generator, Tensor, nn

from benchmarks.zoo.networks import Classifier
from fmwc.files import write_bytes
from fmwc.mnist.data import load, unit
from fmwc.modes import evaluating
from fmwc.randomness import derive
from fmwc.training import TrainingConfig, train

JUDGES = "FMWC_ZOO_JUDGES"  # the environment variable that names the folder of trained judges
COUNT, HELD_OUT = 20_000, 2_000
TURN = math.pi / 3  # the largest angle
WRONG = 0.2  # the share of labels that are replaced
REAL = 0.015  # the share of real digits that the unconditional rule may fail
JUDGE = TrainingConfig(3_000, 128, 1e-3, "cosine")
CHUNK = 2_000


class Pictures(NamedTuple):
    """Images in [−1, 1] with labels, and the rule that judges samples of them."""

    x: Tensor
    y: Tensor
    held_out: Tensor
    held_out_y: Tensor
    rule: Callable[..., Tensor]
    notes: Mapping[str, float]


def small(generator: Generator) -> Pictures:
    """Return the digits of scikit-learn: 1,000 to train the flow, and the other 797 to train the judge."""
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    found = load_digits()
    x, y = torch.tensor(found.data).float() / 8 - 1, torch.tensor(found.target)
    order = torch.randperm(len(x), generator=generator)
    a, b = order[:1000], order[1000:]
    judge = SVC(C=10.0).fit(x[b].numpy(), y[b].numpy())

    def rule(x: Tensor, y: Tensor) -> Tensor:
        taken = judge.predict(x.cpu().flatten(1).clamp(-1, 1).numpy())
        return torch.from_numpy(taken) != y.cpu()

    pictures = x.reshape(-1, 1, 8, 8)
    accuracy = 1 - float(rule(x[a], y[a]).float().mean())
    return Pictures(pictures[a], y[a], pictures[b], y[b], rule, {"judge_accuracy": accuracy})


# ---- MNIST -------------------------------------------------------------------------------------------------------


@cache
def _split(split: str) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 28, 28) in [0, 1], and labels."""
    digits = load(split=split)
    return unit(digits.x), digits.y


def _turned(x: Tensor, generator: Generator) -> Tensor:
    angle = (2 * torch.rand(len(x), generator=generator) - 1) * TURN
    cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
    matrix = torch.stack([torch.stack([cos, -sin, none], 1), torch.stack([sin, cos, none], 1)], 1)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _shown(kind: str, x: Tensor, generator: Generator) -> Tensor:
    """Return images in the form of a kind of flow: 14 × 14, in [−1, 1]."""
    x = _turned(x, generator) if kind == "rotated" else x
    x = 2 * F.avg_pool2d(x, 2) - 1
    return -x if kind == "inverted" else x


def mnist(kind: str, generator: Generator, device: torch.device) -> Pictures:
    """Return MNIST for a flow: `plain`, `rotated`, `inverted`, `noisy` (wrong labels) or `unconditional`."""
    (x, y), (held_x, held_y) = _split("train"), _split("test")
    index = torch.randperm(len(x), generator=generator)[:COUNT]
    held = torch.randperm(len(held_x), generator=generator)[:HELD_OUT]
    x, y, held_x, held_y = x[index], y[index], held_x[held], held_y[held]
    x, held_x = _shown(kind, x, generator), _shown(kind, held_x, generator)
    if kind == "noisy":
        y, held_y = _replaced(y, generator), _replaced(held_y, generator)
    rule, notes = _judge({"noisy": "plain"}.get(kind, kind), device)
    return Pictures(x, y, held_x, held_y, rule, notes)


def _replaced(y: Tensor, generator: Generator) -> Tensor:
    """Replace some labels by any of the other nine."""
    other = (y + torch.randint(1, 10, y.shape, generator=generator)) % 10
    return torch.where(torch.rand(y.shape, generator=generator) < WRONG, other, y)


def _judge(kind: str, device: torch.device) -> tuple[Callable[..., Tensor], dict[str, float]]:
    """Return the failure rule of a kind of images, and the held-out accuracy of its classifier."""
    generator = Generator().manual_seed(derive(0, "judge", kind))
    images, labels = _split("test")
    test = _shown(kind, images, generator)
    network = _classifier(kind, device, generator)
    digits = _logits(network, test)[:, :10]
    notes = {"judge_accuracy": float((digits.argmax(1) == labels).float().mean())}
    if kind != "unconditional":
        return lambda x, y: _logits(network, x).argmax(1) != y.cpu(), notes
    least = float(_surest(network, test).quantile(REAL))
    return lambda x: _surest(network, x) < least, {**notes, "least_probability": least}


def _classifier(kind: str, device: torch.device, generator: Generator) -> nn.Module:
    """Load the network of a judge, or train it on all of MNIST with the right labels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(0, "judge", kind, "weights"))
        network = Classifier(11 if kind == "unconditional" else 10).to(device)
    folder = os.environ.get(JUDGES)
    path = Path(folder) / f"{kind}.safetensors" if folder else None
    if path and path.exists():
        network.load_state_dict(load_file(path))
        return network.eval()
    x, y = _split("train")
    x = _shown(kind, x, generator)
    if kind == "unconditional":
        bad = _spoilt(x, generator)
        x, y = torch.cat([x, bad]), torch.cat([y, torch.full((len(bad),), 10)])

    def loss(x1: Tensor, randomness: object, beta: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(network(x1), cond["y"])

    train(network, loss, x, JUDGE, cond={"y": y})
    if path:
        write_bytes(path, save({k: v.detach().cpu().contiguous() for k, v in network.state_dict().items()}))
    return network.eval()


def _spoilt(x: Tensor, generator: Generator) -> Tensor:
    """Return images that are not digits: joined halves of two digits, two digits on top of each other, and noise."""
    third = len(x) // 6
    a, b = (x[torch.randperm(len(x), generator=generator)[: 2 * third]] for _ in range(2))
    half = x.shape[-1] // 2
    joined = torch.cat([a[:third, ..., :half], b[:third, ..., half:]], -1)
    tall = torch.cat([a[third:, ..., :half, :], b[third:, ..., half:, :]], -2)
    over = torch.maximum(a, b)
    noise = torch.randn(third, *x.shape[1:], generator=generator).clamp(-1, 1)
    return torch.cat([joined, tall, over, noise])


def _logits(network: nn.Module, x: Tensor) -> Tensor:
    """Return the logits of a judge for images, clamped to [−1, 1]."""
    device = next(network.parameters()).device
    with evaluating(network), torch.no_grad():
        return torch.cat([network(part.to(device).clamp(-1, 1)).float().cpu() for part in x.split(CHUNK)])


def _surest(network: nn.Module, x: Tensor) -> Tensor:
    """Return the largest probability of a digit; the eleventh class is for images that are not digits."""
    return _logits(network, x).softmax(1)[:, :10].amax(1)
