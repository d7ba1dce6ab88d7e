"""Where steps go: the N-sweep of every controller on the Checkerboard, at exactly N evaluations of the network.

Every option below was chosen on the validation seed 100; the seeds of the sweep were looked at once. Misplacement alone
can be bought by dropping the outer cells (a long first step does that), so the symmetric KL of all seeds' points
together, and the share of the emptiest of the eight cells (12.5 % if all is well), stand beside it.

.venv/bin/python benchmarks/adaptive_steps.py
.venv/bin/python benchmarks/adaptive_steps.py --count 10000 --seeds 101 102 103 --out results/adaptive/long.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fmwc
from fmwc.data.checkerboard import CELL, HALF, inside
from fmwc.files import write_json
from fmwc.metrics.points import misplacement, symmetric_kl
from fmwc.recipes.recipe import provenance
from fmwc.sampling import Controller, Damped, Ema, Extrapolated, Grid, Uniform, sample, survey
from fmwc.sampling.controllers import needs_variance

STEPS = (5, 10, 20, 30, 50)
PILOT_SEED = 99
SHARED_POWER = 3.0  # of the fitted grid alone: 4 and more lower misplacement further, and the KL rises
WEIGHT = 0.75  # of extrapolation without variance: better than the second-order ½ at N = 5 and 10, not beyond

BLIND = (0.0, 0.71, 0.78, 0.84, 0.85, 1.0)  # found by a search for misplacement alone, on another network

Makes = dict[str, Callable[[int], Controller]]


def controllers(pilot: fmwc.Trajectory) -> Makes:
    """Each controller at N steps; the first is the baseline."""
    shared, own = (survey(None, pilot=pilot, power=power) for power in (SHARED_POWER, 2.0))
    return {
        "uniform": Uniform,
        "Ema (paper)": lambda steps: Ema(steps, rate=0.5, boost=0.5),
        "Damped (paper)": lambda steps: Damped(steps, late=0.7, rate=0.3, gain=0.05),
        "fitted grid": lambda steps: Grid(shared.grid(steps)),
        "uniform, extrapolated": lambda steps: Extrapolated(Uniform(steps), WEIGHT),
        "fitted grid, extrapolated": lambda steps: Extrapolated(Grid(own.grid(steps)), WEIGHT),
        "planned, extrapolated by variance": own.plan,
    }


def emptiest(x: torch.Tensor) -> float:
    """The share of points, in percent, in the cell that holds fewest."""
    cell = ((x + HALF) / CELL).floor().long()[inside(x)]
    counts = torch.bincount(cell[:, 0] * 4 + cell[:, 1], minlength=16).reshape(4, 4)
    board = torch.arange(4)[:, None] + torch.arange(4)
    return 100 * float(counts[board % 2 == 0].min()) / len(x)


def measure(field: fmwc.Field, make: Callable[[int], Controller], steps: int, count: int, seeds: list[int]) -> Any:
    """One cell of the table."""
    ends, rates, seconds = [], [], 0.0
    for seed in seeds:
        controller = make(steps)
        begin = time.process_time()
        run = sample(field, count, controller=controller, seed=seed, confidence=needs_variance(controller))
        seconds += time.process_time() - begin
        if run.evaluations != steps:
            raise SystemExit(f"{run.evaluations} evaluations were spent where {steps} were given")
        ends.append(run.x.cpu())
        rates.append(100 * misplacement(run.x))
    return {
        "misplaced": statistics.mean(rates),
        "std": statistics.stdev(rates) if len(rates) > 1 else None,
        "each": rates,
        "kl": symmetric_kl(torch.cat(ends), cells=100),
        "emptiest_cell": emptiest(torch.cat(ends)),
        "evaluations": steps,
        "seconds": seconds,
        "grid": [round(float(t), 3) for t in run.grid.mean(1)],
        "grid_std": [round(float(t), 3) for t in run.grid.std(1)],
    }


def said(cell: dict[str, Any]) -> str:
    spread = f" ± {cell['std']:.2f}" if cell["std"] is not None else ""
    return f"{cell['misplaced']:5.2f}{spread} ({cell['kl']:.2f}, {cell['emptiest_cell']:4.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/adaptive/checkerboard.json"))
    parser.add_argument("--count", type=int, default=1000, help="points a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103, 104])
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    start = time.perf_counter()
    field = fmwc.load("checkerboard", device=arguments.device)
    pilot = sample(field, 1000, seed=PILOT_SEED)
    table: dict[str, dict[str, Any]] = {}
    print("misplaced % ± std over seeds (symmetric KL, % in the emptiest cell) at N =", *STEPS)
    for name, make in [*controllers(pilot).items(), ("blind grid", lambda steps: Grid(BLIND))]:
        budgets = STEPS if name != "blind grid" else (len(BLIND) - 1,)
        table[name] = {str(n): measure(field, make, n, arguments.count, arguments.seeds) for n in budgets}
        print(f"{name:34s}", "  ".join(said(cell) for cell in table[name].values()), flush=True)
    unit = table["uniform"]
    cost = {
        name: sum(cell["seconds"] for cell in row.values()) / sum(unit[n]["seconds"] for n in row)
        for name, row in table.items()
    }
    print("time over uniform's:", {name: round(value, 2) for name, value in cost.items()})
    about = provenance(
        field.device,
        time.perf_counter() - start,
        samples=arguments.count,
        seeds=arguments.seeds,
        validation_seed=100,
        pilot={"samples": 1000, "steps": 50, "seed": PILOT_SEED},
    )
    write_json(arguments.out, {"provenance": about, "time_ratio": cost, "controllers": table})


if __name__ == "__main__":
    main()
