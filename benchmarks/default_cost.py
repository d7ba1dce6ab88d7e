"""Measure the time of sampling with default confidence relative to plain sampling: the fastest of several runs.

python -m benchmarks.default_cost --device cuda --out results/lifts/timing.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from fmwc import load, sample
from fmwc.compiled import Compiled
from fmwc.files import write_json
from fmwc.sampling import SamplingConfig

COUNTS = {
    "mnist": {"cuda": 1000, "cpu": 25},
    "checkerboard": {"cuda": 10_000, "cpu": 10_000},
    "crystals": {"cuda": 500, "cpu": 20},
}


def conditions(field: Any, name: str, count: int) -> dict[str, Any]:
    if name == "mnist":
        return {"y": torch.arange(count, device=field.device) % 10}
    return {"atoms": field.network.draw_sizes(count, 1).to(field.device)} if name == "crystals" else {}


def fastest(field: Any, count: int, cond: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the seconds of the fastest run of each case. Cases are interleaved, so other load affects all of them."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {"confidence": None, "check": False},
        "default": {},
        "no_check": {"check": False},
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, options in cases.items():
            begun = time.perf_counter()
            sample(field, count, steps=50, seed=1, **options, cond=cond, config=SamplingConfig(batch=count))
            if field.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begun)
    return {name: min(each[1:]) for name, each in seconds.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7, help="runs per case; the fastest is reported")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name, counts in COUNTS.items():
        for compiled in (False, True) if args.device == "cuda" else (False,):
            field: Any = load(name, device=args.device)
            score, count = field.reference.score, counts[args.device]
            cond = conditions(field, name, count)
            field = Compiled(field, cuda_graph=True) if compiled else field
            seconds = fastest(field, count, cond, args.rounds)
            row = {
                "name": name,
                "compiled": compiled,
                "n": count,
                "plain_s": round(seconds["plain"], 4),
                "score": score,
            }
            rows.append(row | {case: round(seconds[case] / seconds["plain"], 3) for case in ("default", "no_check")})
            print(rows[-1], flush=True)
    write_json(args.out, rows)


if __name__ == "__main__":
    main()
