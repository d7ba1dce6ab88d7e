"""What one evaluation of a compiled field costs on a GPU, without a sampler around it, and which kernels take the time.

    python -m benchmarks.profile_reading mnist --kernels 12 --out results/bench/h200/evaluations

Ratios are to the plain velocity of the same batch. What they come to in a run is for
`python -m experiments bench` to measure.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import fmwc
from experiments.cost.costs import SIZES
from experiments.cost.meter import Meter
from fmwc.compiled import Compiled
from fmwc.domains import DOMAINS, domain_named
from fmwc.estimators import Diagonal, Linearised
from fmwc.files import write_json
from fmwc.modes import tensor_float
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.randomness import Stream
from fmwc.sampling import noise

CALLS = 10  # timed together


def ways(own: Linearised) -> dict[str, tuple[Any, bool]]:
    """Estimators, by what they are called, and whether they are in half precision; none is the plain velocity."""
    found: dict[str, Any] = {"linearised": own, "linearised (1 probe)": Linearised(1)}
    found |= {"diagonal Taylor-1": Diagonal("taylor1"), "diagonal Gauss–Hermite": Diagonal()}
    if own.probes in (None, 1):
        del found["linearised (1 probe)"]
    half = {f"{name} in bf16": (way, True) for name, way in found.items()}
    return {"plain": (None, False), **half, **{name: (way, False) for name, way in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=list(DOMAINS))
    parser.add_argument("-n", "--count", type=int, default=0, help="samples in the batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, help="print those that take most of the time")
    parser.add_argument("--tf32", action="store_true", help="matrix products in TensorFloat-32, the plain ones too")
    parser.add_argument("--only", default="", help="what has this in its name, beside the plain velocity")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a folder")
    arguments = parser.parse_args()
    device, setting = pick_device(arguments.device), domain_named(arguments.setting)
    clock, field = Clock(device), fmwc.load(setting.name, device=device)
    count = arguments.count or SIZES[setting.name][device.type][0]
    cond = {k: v.to(device) for k, v in setting.conditions(field, count).items()}
    x, t = noise(field.space, count, 0, device, cond=cond), torch.full((count,), 0.5, device=device)
    by = [Compiled(field, half=half, cuda_graph=True) for half in (False, True)]

    def evaluate(estimator: Any, half: bool, calls: int) -> None:
        fast = by[half]
        for _ in range(calls):
            if estimator is None:
                fast(x, t, **cond)
            else:
                randomness = Stream(torch.Generator(device).manual_seed(0))
                fast.reader(estimator)(fast, x, t, cond, randomness)

    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    say = partial(print, flush=True)
    with torch.no_grad(), tensor_float(arguments.tf32), by[0].constant_weights(), by[1].constant_weights():
        chosen = {n: way for n, way in ways(setting.estimator(field)).items() if arguments.only in n or n == "plain"}
        tasks = {name: partial(evaluate, *way, CALLS) for name, way in chosen.items()}
        found = Meter(device, arguments.rounds, math.inf, say)(tasks, f"{CALLS} evaluations")
        for name, row in found.items():
            say(f"{name}: {1000 * row['seconds'] / CALLS:.2f} ms, {row['ratio']:.2f}× plain")
        for name, task in tasks.items() if arguments.kernels else ():
            with profile(activities=[kind]) as seen:
                task()
            table = seen.key_averages().table(
                sort_by=f"{kind.name.lower()}_time_total", row_limit=arguments.kernels, max_name_column_width=90
            )
            say(f"{name}\n{table}")
    if arguments.out:
        about = provenance(device, clock.seconds, samples=count, seeds=[0], tf32=arguments.tf32)
        name = f"{setting.name}-tf32.json" if arguments.tf32 else f"{setting.name}.json"
        write_json(arguments.out / name, {"provenance": about, "calls": CALLS, "evaluations": found})


if __name__ == "__main__":
    main()
