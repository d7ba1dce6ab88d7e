"""Compare training in several processes (torchrun) with training in one: weights, captured graphs, seconds.

    python benchmarks/several_processes.py                  # on a GPU if there is one
    python benchmarks/several_processes.py --device cpu

On one GPU: NCCL with one process must capture steps and give the weights of plain training; gloo with two processes on
the same GPU must give them up to rounding. `--compiled` adds compiled losses, which take minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fmwc.data.batches
import fmwc.training
from fmwc.checkerboard import sample as checkerboard
from fmwc.field import attach
from fmwc.flow import Channel, FlatTorus, Lattice, Space, elbo_loss, euclidean, flow_matching_loss
from fmwc.networks import MLP, CSPNet, UNet
from fmwc.processes import Processes, joined
from fmwc.training import TrainingConfig, train

STEPS = 200
PLAN = TrainingConfig(STEPS, batch=1000, lr=1e-3, decay="cosine", average=0.99, clip=0.5, seed=1, precision="full")
WIDTH = 8  # atoms per crystal, at most


def seeded(build: Callable[[], Any], device: torch.device) -> Any:
    torch.manual_seed(0)
    return build().to(device)


def flow(device: torch.device, plan: TrainingConfig) -> nn.Module:
    net = seeded(lambda: MLP(2, 256, 3, 64), device)

    def loss(x1: Tensor, randomness: Any, beta: Tensor, cond: Any) -> Tensor:
        return flow_matching_loss(net, euclidean((2,)), x1, seed=randomness)

    train(net, loss, checkerboard(20_000, seed=0), plan)
    return net


def joint(build: Callable[[], Any], data: Any, cond: dict[str, Tensor], device: torch.device, plan: Any) -> nn.Module:
    field = seeded(build, device)

    def loss(x1: Any, randomness: Any, beta: Tensor, cond: Any) -> Tensor:
        return elbo_loss(field, x1, beta, seed=randomness, cond=cond)

    with field.noise.keep_hooks():
        train(field, loss, data, plan, cond=cond)
    return field


def images(device: torch.device, plan: TrainingConfig) -> nn.Module:
    data = torch.rand(2_000, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    build = lambda: attach(UNet(base=16, classes=10), space=(1, 28, 28), width=16)  # noqa: E731
    return joint(build, data, {"y": torch.arange(2_000) % 10}, device, replace(plan, batch=64))


def crystals(device: torch.device, plan: TrainingConfig) -> nn.Module:
    """Samples with different numbers of rows, with the capacities that captured graphs need."""
    draw, count, batch = torch.Generator().manual_seed(0), 2_000, 64
    atoms = torch.randint(1, WIDTH + 1, (count,), generator=draw).sort().values
    there = (torch.arange(WIDTH) < atoms[:, None])[..., None]
    data = {
        "type": torch.randn(count, WIDTH, 7, generator=draw) * there,
        "coord": torch.rand(count, WIDTH, 3, generator=draw) * there,
        "lattice": torch.cat([3 + 4 * torch.rand(count, 3, generator=draw), torch.randn(count, 3, generator=draw)], 1),
    }
    space = Space(
        {
            "type": Channel((WIDTH, 7), rows="atoms"),
            "coord": Channel((WIDTH, 3), FlatTorus(), "uniform", rows="atoms", centred=True),
            "lattice": Channel((6,), Lattice(), "own"),
        }
    )

    def build() -> Any:
        net = CSPNet(64, 3, 16, 32, 7, WIDTH)
        net.static_capacity = {n: (WIDTH * n + 64, WIDTH**2 * n) for n in range(1, batch + 1)}
        return attach(net, space=space, width=16)

    return joint(build, data, {"atoms": atoms}, device, replace(plan, batch=batch, stratified=True))


def kept_on_the_host(device: torch.device, plan: TrainingConfig) -> nn.Module:
    """Train as if the data were too large for the GPU."""
    before, fmwc.data.batches.RESIDENT = fmwc.data.batches.RESIDENT, 0.0
    try:
        return flow(device, plan)
    finally:
        fmwc.data.batches.RESIDENT = before


CASES: dict[str, Callable[[torch.device, TrainingConfig], nn.Module]] = {
    "points": flow,
    "points on the CPU": kept_on_the_host,
    "points, bf16": lambda device, plan: flow(device, replace(plan, precision="bf16")),
    "points, uneven batch": lambda device, plan: flow(device, replace(plan, batch=999)),
    "images, bf16": lambda device, plan: images(device, replace(plan, precision="bf16")),
    "crystals": crystals,
}
COMPILED: dict[str, Callable[[torch.device, TrainingConfig], nn.Module]] = {
    "points, compiled": lambda device, plan: flow(device, replace(plan, compiled=True)),
    "crystals, compiled": lambda device, plan: crystals(device, replace(plan, compiled=True)),
}


def work(out: Path, device: str, captured: bool, compiled: bool) -> None:
    """Train all cases in this process; the first process writes weights and times."""
    graphs, capture = 0, fmwc.training._captured

    def counting(*given: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return capture(*given)

    fmwc.training._captured = counting
    about: dict[str, Any] = {}
    with joined(device) as place:
        for name, case in {**CASES, **(COMPILED if compiled else {})}.items():
            before, start = graphs, time.perf_counter()
            weights = {
                key: value.detach().cpu()
                for key, value in case(place, replace(PLAN, captured=captured)).state_dict().items()
            }
            about[name] = {"captured": graphs > before, "seconds": time.perf_counter() - start}
            if Processes().first:
                save_file(weights, out / f"{name}.safetensors")
    if "RANK" not in os.environ or os.environ["RANK"] == "0":
        (out / "about.json").write_text(json.dumps(about))


def run(out: Path, processes: int, device: str, captured: bool, compiled: bool) -> dict[str, Any]:
    """Train all cases in a number of processes (0: without torchrun)."""
    out.mkdir()
    launch = [sys.executable]
    if processes:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = ["--out", str(out), "--device", device]
    options += [f"--{name}" for name, on in (("captured", captured), ("compiled", compiled)) if on]
    environment = {**os.environ, "NVIDIA_TF32_OVERRIDE": "0"}  # TensorFloat-32 rounds coarsely
    subprocess.run([*launch, __file__, *options], check=True, env=environment)
    return {
        name: (about, load_file(out / f"{name}.safetensors"))
        for name, about in json.loads((out / "about.json").read_text()).items()
    }


def compare(title: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
    print(f"\n{title}")
    for name, (about, weights) in found.items():
        before, reference = expected[name]
        one, took = str(before["captured"]), before["seconds"]
        apart = max(float((weights[k].float() - reference[k].float()).abs().max()) for k in reference)
        print(
            f"  {name:22} largest difference of a weight {apart:8.1e}   captured {about['captured']!s:5} (one process "
            f"{one:5})   seconds {about['seconds']:5.1f} (one process {took:5.1f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--captured", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out:
        work(given.out, given.device, given.captured, given.compiled)
        return
    with tempfile.TemporaryDirectory() as folder:
        gpu, out = given.device != "cpu", Path(folder)
        one = run(out / "one", 0, given.device, False, given.compiled)
        if gpu:
            captured = run(out / "captured", 0, given.device, True, given.compiled)
            compare("one process, captured, and not captured", captured, one)
            compare("one process, data on the CPU and on the GPU", {"points": one["points on the CPU"]}, one)
            compare("NCCL, one process, and plain", run(out / "nccl", 1, given.device, True, given.compiled), captured)
        shared = "cuda:0" if gpu else "cpu"
        compare("gloo, two processes, and one", run(out / "gloo", 2, shared, gpu, given.compiled), one)


if __name__ == "__main__":
    main()
