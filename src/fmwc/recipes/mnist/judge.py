"""The judge's recipe: a LeNet trained on MNIST with small random shifts, turns and scalings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.checkpoint import load_network, save_network
from fmwc.data import fingerprint
from fmwc.data.mnist import Images, unit
from fmwc.errors import UsageError
from fmwc.files import Folder, claimed
from fmwc.metrics.images import accuracy
from fmwc.nets import LeNet
from fmwc.randomness import Stream, derive
from fmwc.recipes.recipe import Clock, provenance, runtime
from fmwc.training import Plan, train

__all__ = ["Judge", "fit_judge"]


@dataclass(frozen=True)
class Judge:
    """How the judge is trained. It sees the training split only; the test split says how good it is."""

    seed: int = 0
    iterations: int = 6_000  # 26 epochs: its accuracy has long levelled off
    batch: int = 256
    lr: float = 2e-3
    turn: float = 12.0  # degrees, either way: digits are written at a slant
    scale: float = 0.12
    shift: float = 0.08  # of the image's side, either way
    data: str = ""  # a folder or file; FMWC_DATA or the cache if empty
    own: bool = False  # whether it is a data set of one's own
    classes: int = 10

    @property
    def plan(self) -> Plan:
        return Plan(self.iterations, self.batch, self.lr, "cosine", seed=derive(self.seed, "judge"))


def jitter(x: Tensor, recipe: Judge, randomness: Stream) -> Tensor:  # (B, 1, H, W)
    """Each image turned, scaled and shifted a little, by an amount of its own."""

    def spread(size: float) -> Tensor:
        return (2 * randomness.uniform(x[:, 0, 0, 0]) - 1) * size

    angle, size = spread(recipe.turn * math.pi / 180), 1 + spread(recipe.scale)
    cos, sin = angle.cos() * size, angle.sin() * size
    rows = [torch.stack([cos, -sin, spread(2 * recipe.shift)], 1), torch.stack([sin, cos, spread(2 * recipe.shift)], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def fit_judge(
    recipe: Judge,
    data: Images,
    test: Images,
    out: Path,
    device: torch.device,
    progress: Callable[[int, float], None] | None = None,
    *,
    force: bool = False,
) -> LeNet:
    """Train a judge and write it to a folder, with its accuracy on the test split. Resumes if interrupted."""
    clock = Clock(device)
    if data.x.shape[-1] != data.x.shape[-2]:
        raise UsageError(f"the judge looks at square images, got {tuple(data.x.shape[-2:])}")
    seen = {"data": fingerprint(data.x, data.y), "test": fingerprint(test.x, test.y)}
    about = {**{k: v for k, v in asdict(recipe).items() if k != "data"}, **seen, **runtime(device)}
    with claimed(out, "train", about, force=force, resumes=True) as folder:
        if folder.finished:
            found: LeNet = load_network(out, device=device)
            return found
        return _fit(recipe, data, test, folder, device, clock, progress)


def _fit(
    recipe: Judge,
    data: Images,
    test: Images,
    folder: Folder,
    device: torch.device,
    clock: Clock,
    progress: Callable[[int, float], None] | None,
) -> LeNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(recipe.seed, "judge's first weights"))
        judge = LeNet(recipe.classes, data.x.shape[-1]).to(device)

    def loss(x1: Tensor, randomness: Stream, beta: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(judge(jitter(x1, recipe, randomness)), y)

    judge.train()
    point = folder.work / "judge.resume"
    about = {k: v for k, v in asdict(recipe).items() if k != "data"}
    train(judge, loss, unit(data.x), recipe.plan, cond={"y": data.y}, resume=point, identity=about, progress=progress)
    found = accuracy(judge.eval(), unit(test.x), test.y)
    save_network(
        judge,
        folder.path,
        recipe={"name": "judge", **{k: v for k, v in asdict(recipe).items() if k != "data"}},
        data={"name": "mnist", "fingerprint": fingerprint(data.x, data.y)},
        metrics={"accuracy": found},
        provenance=provenance(device, clock.seconds, seeds=[recipe.seed]),
    )
    return judge
