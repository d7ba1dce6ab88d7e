"""Small training runs, in one process or in several. Run by torchrun, this file writes the results of each process.

A case is a function that trains and returns the weights. `point` is a file to resume from, and `stop` a step at which
training is interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import fmwc.training
from fmwc.flow import elbo_loss, euclidean, flow_matching_loss
from fmwc.networks import MLP
from fmwc.processes import joined
from fmwc.training import TrainingConfig, fit_noise, train
from tests import cells
from tests.conftest import dict_field, mlp_field

Weights = dict[str, Tensor]
STEPS = 12
ROWS = torch.randn(46, 2, generator=torch.Generator().manual_seed(8)) * 0.3 + 1
CHANNELS = {
    "place": torch.rand(46, 2, generator=torch.Generator().manual_seed(9)),
    "shape": torch.randn(46, 3, generator=torch.Generator().manual_seed(10)),
}
CRYSTALS, _, ATOMS = cells.batch(*(1 + i // 5 for i in range(25)), dtype=torch.float32)


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label, self.out = nn.Embedding(3, 4), nn.Linear(7, 2)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.cat([x, t[:, None], self.label(y)], 1))


class ByIndex(Dataset[Any]):
    """Rows with a class; it records which were looked up."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> Any:
        self.seen.append(i)
        return ROWS[i], {"y": i % 3}


def weights_of(module: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def stopping(loss: Any, at: int) -> Any:
    steps = 0

    def stopped(*args: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == at:
            raise KeyboardInterrupt
        return loss(*args)

    return stopped


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "all options": {"average": 0.9, "weight_decay": 0.1, "clip": 0.02, "stratified": True, "last_lr": 1e-3},
}


def flow(options: str = "", batch: int = 16, point: Path | None = None, stop: int = 0) -> Weights:
    """Train a network, as a flow."""
    torch.manual_seed(0)
    net = MLP(2, 16, 2, 8)
    net.unused = nn.Linear(2, 2)  # weight decay must not change it
    config = TrainingConfig(STEPS, batch=batch, lr=1e-2, seed=3, save_every=5, **OPTIONS[options])
    space = euclidean((2,))

    def loss(x1: Tensor, randomness: Any, beta: Tensor, cond: Any) -> Tensor:
        return flow_matching_loss(net, space, x1, seed=randomness)

    with suppress(KeyboardInterrupt):
        train(net, stopping(loss, stop), ROWS, config, resume=point)
    return weights_of(net)


def joint(build: Callable[[], Any] = mlp_field, data: Any = ROWS, batch: int = 16) -> Weights:
    """Train a flow and its noise together."""
    field = build()

    def loss(x1: Any, randomness: Any, beta: Tensor, cond: Any) -> Tensor:
        return elbo_loss(field, x1, 10 * beta, seed=randomness)

    train(field, loss, data, TrainingConfig(STEPS, batch=batch, lr=1e-2, seed=4))
    return weights_of(field)


def noise(data: Any = lambda: ROWS, build: Any = None, **options: Any) -> Weights:
    """Fit the noise of a network."""
    torch.manual_seed(0)
    field = mlp_field() if build is None else fmwc.attach(build(), space=(2,), width=8)
    fit_noise(field, data(), STEPS, batch=15, lr=1e-2, confidence=False, conventions=False, **options)
    return weights_of(field.noise)


def crystals(joint: bool) -> Weights:
    """Train on samples with different numbers of rows: atoms and pairs of atoms."""
    field = cells.field(torch.float32)
    if not joint:
        fit_noise(field, CRYSTALS, 4, cond={"atoms": ATOMS}, batch=9, stratified=True, confidence=False)
        return weights_of(field.noise)

    def loss(x1: Any, randomness: Any, beta: Tensor, cond: Any) -> Tensor:
        return elbo_loss(field, x1, 10 * beta, seed=randomness, cond=cond)

    train(field, loss, CRYSTALS, TrainingConfig(4, batch=14, seed=4), cond={"atoms": ATOMS})
    return weights_of(field)


CASES: dict[str, Callable[[], Weights]] = {
    "flow, all options": partial(flow, "all options"),
    "flow, uneven batch": partial(flow, batch=13),
    "joint, channels, uneven batch": partial(joint, dict_field, CHANNELS, 13),
    "joint, crystals": partial(crystals, joint=True),
    "noise": noise,
    "noise of crystals, uneven batch": partial(crystals, joint=False),
    "noise, optimal transport": partial(noise, pairs="ot"),
    "noise, loader": partial(noise, lambda: DataLoader(ByIndex(), 12, shuffle=True), Labelled),
}


def main(out: Path) -> None:
    """Run all cases in this process of torchrun, and write their results."""
    with joined("cpu"):
        index = int(os.environ["RANK"])
        for name, case in CASES.items():
            save_file(case(), out / f"{name}.{index}")
        flow(point=out / "of two", stop=8)  # interrupted; one process resumes it
        save_file(flow(point=out / "of one"), out / f"resumed.{index}")
        data = ByIndex()
        noise(lambda: DataLoader(data, 12, shuffle=True), Labelled)
        (out / f"seen.{index}").write_text(json.dumps(data.seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
