"""What sampling with confidence costs as it comes, in units of plain sampling: the best of three runs of each.

python benchmarks/default_cost.py --device cuda --out results/lifts/timing.json
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from fmwc import load, sample
from fmwc.files import write_json
from fmwc.sampling import Compiled

COUNTS = {
    "mnist": {"cuda": 1000, "cpu": 25},
    "checkerboard": {"cuda": 10_000, "cpu": 10_000},
    "crystals": {"cuda": 500, "cpu": 20},
}


def conditions(field: Any, name: str, count: int) -> dict[str, Any]:
    if name == "mnist":
        return {"y": torch.arange(count, device=field.device) % 10}
    return {"atoms": field.network.draw_sizes(count, 1).to(field.device)} if name == "crystals" else {}


def best(field: Any, count: int, **options: Any) -> float:
    """The seconds of the quickest of three runs."""
    found = []
    for _ in range(3):
        begun = time.perf_counter()
        sample(field, count, steps=50, seed=1, batch=count, **options)
        if field.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for name, counts in COUNTS.items():
        for compiled in (False, True) if args.device == "cuda" else (False,):
            field: Any = load(name, device=args.device)
            score, count = field.reference.score, counts[args.device]
            cond = conditions(field, name, count)
            field = Compiled(field) if compiled else field
            plain = best(field, count, confidence=False, check=False, **cond)
            plain = min(plain, best(field, count, confidence=False, check=False, **cond))  # the first was warming up
            default, no_check = best(field, count, **cond), best(field, count, check=False, **cond)
            row = {"name": name, "compiled": compiled, "n": count, "plain_s": round(plain, 4), "score": score}
            rows.append({**row, "default": round(default / plain, 3), "no_check": round(no_check / plain, 3)})
            print(rows[-1], flush=True)
    write_json(args.out, rows)


if __name__ == "__main__":
    main()
