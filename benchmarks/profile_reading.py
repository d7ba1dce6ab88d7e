"""Measure one evaluation of a compiled field on a GPU without a sampler, and list the kernels that take most time.

    python -m benchmarks.profile_reading mnist --kernels 12 --out results/bench/h200/evaluations

Ratios are relative to the plain velocity of the same batch. `python -m experiments bench` measures whole runs.
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
from fmwc.estimators import Diagonal, Linearised
from fmwc.files import write_json
from fmwc.modes import tensor_float
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.randomness import Stream
from fmwc.registry import DOMAINS, domain_named
from fmwc.sampling import noise

CALLS = 10  # timed together


def estimators(usual: Linearised) -> dict[str, tuple[Any, bool]]:
    """Return estimators by name, each with whether it runs in half precision; `None` is the plain velocity."""
    single = {} if usual.probes in (None, 1) else {"linearised (1 probe)": Linearised(1)}
    diagonal = {"diagonal Taylor-1": Diagonal("taylor1"), "diagonal Gauss–Hermite": Diagonal()}
    table: dict[str, Any] = {"linearised": usual, **single, **diagonal}
    half = {f"{name} in bf16": (estimator, True) for name, estimator in table.items()}
    return {"plain": (None, False), **half, **{name: (estimator, False) for name, estimator in table.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=list(DOMAINS))
    parser.add_argument("-n", "--count", type=int, default=0, help="samples in the batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, help="print this many kernels that take most time")
    parser.add_argument("--tf32", action="store_true", help="use TensorFloat-32 for all matrix products")
    parser.add_argument("--only", default="", help="only estimators whose name contains this")
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
        table = estimators(setting.estimator(field))
        chosen = {name: case for name, case in table.items() if arguments.only in name or name == "plain"}
        tasks = {name: partial(evaluate, *case, CALLS) for name, case in chosen.items()}
        found = Meter(device, arguments.rounds, math.inf, say)(tasks, f"{CALLS} evaluations")
        for name, row in found.items():
            say(f"{name}: {1000 * row['seconds'] / CALLS:.2f} ms, {row['ratio']:.2f}× plain")
        for name, task in tasks.items() if arguments.kernels else ():
            with profile(activities=[kind]) as seen:
                task()
            kernels = seen.key_averages().table(
                sort_by=f"{kind.name.lower()}_time_total", row_limit=arguments.kernels, max_name_column_width=90
            )
            say(f"{name}\n{kernels}")
    if arguments.out:
        about = provenance(device, clock.seconds, samples=count, seeds=[0], tf32=arguments.tf32)
        name = f"{setting.name}-tf32.json" if arguments.tf32 else f"{setting.name}.json"
        write_json(arguments.out / name, {"provenance": about, "calls": CALLS, "evaluations": found})


if __name__ == "__main__":
    main()
