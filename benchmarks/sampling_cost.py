"""What confidence costs, as ratios to plain sampling: one process, interleaved, medians.

.venv/bin/python benchmarks/sampling_cost.py
.venv/bin/python benchmarks/sampling_cost.py --checkpoint mnist --count 25 --steps 10
.venv/bin/python benchmarks/sampling_cost.py --checkpoint crystals --count 16 --steps 10
.venv/bin/python benchmarks/sampling_cost.py --checkpoint crystals --device cuda --count 1000 --only linearised
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fmwc
from fmwc.baselines import stochastic_ends
from fmwc.files import write_json
from fmwc.propagate import Diagonal, MonteCarlo, Tangent
from fmwc.recipes.recipe import provenance
from fmwc.sampling import noise
from fmwc.settings import SETTINGS


def cases(field: fmwc.Field, name: str, count: int, steps: int) -> dict[str, Callable[[], object]]:
    """Each way to sample `count` points; the first is the unit."""
    setting = SETTINGS[name]
    cond = {k: v.to(field.device) for k, v in setting.conditions(field, count).items()}
    x0 = noise(field.space, count, 0, field.device, **cond)
    read = {"confidence": setting.reading}
    common = {"steps": steps, "batch": setting.batch(field.device), **cond}

    def run(**options: object) -> Callable[[], object]:
        return lambda: fmwc.sample(field, x0=x0, **common, **options)

    return {
        "plain": run(confidence=False),
        "linearised, every step": run(**read),
        "linearised, every 5th step": run(**read, schedule=5),
        "linearised, every 10th step": run(**read, schedule=10),
        "tangent (1 probe), every step": run(confidence=Tangent()),
        "diagonal Taylor-1, every step": run(confidence=Diagonal("taylor1")),
        "diagonal Gauss–Hermite, every step": run(confidence=Diagonal()),
        "Monte Carlo variance (k = 5), every step": run(confidence=MonteCarlo(5)),
        "transported dispersion": run(confidence=False, transport=True),
        "dispersion of 5 stochastic trajectories": lambda: stochastic_ends(field, x0, 5, **common),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="checkerboard", choices=list(SETTINGS))
    parser.add_argument("--out", type=Path, help="results/CHECKPOINT/cost.json if not given")
    parser.add_argument("--count", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="the cases whose name holds this, beside plain sampling")
    arguments = parser.parse_args()
    field = fmwc.load(arguments.checkpoint, device=arguments.device)
    table = cases(field, arguments.checkpoint, arguments.count, arguments.steps)
    table = {name: run for name, run in table.items() if name == "plain" or arguments.only in name}
    seconds: dict[str, list[float]] = {name: [] for name in table}
    start = time.perf_counter()
    for round_ in range(arguments.rounds + 1):  # the first round warms up and is not counted
        for name, run in table.items():
            begin = time.perf_counter()
            run()
            if field.device.type == "cuda":
                torch.cuda.synchronize()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    unit = statistics.median(seconds["plain"])
    rows = {
        name: {
            "seconds": statistics.median(values),
            "ratio": statistics.median(values) / unit,
            "lowest": min(values) / unit,
            "highest": max(values) / unit,
        }
        for name, values in seconds.items()
    }
    for name, row in rows.items():
        print(f"{name:42s} {row['seconds']:7.2f} s  {row['ratio']:5.2f}× ({row['lowest']:.2f}–{row['highest']:.2f})")
    about = provenance(
        field.device, time.perf_counter() - start, samples=arguments.count, steps=arguments.steps, seeds=[0]
    )
    write_json(
        arguments.out or Path("results") / arguments.checkpoint / "cost.json",
        {"provenance": about, "rounds": arguments.rounds, "cases": rows},
    )


if __name__ == "__main__":
    main()
