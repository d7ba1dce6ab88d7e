"""Draw crystals with confidence and save them; needs none of the packages of chemistry.

python -m benchmarks.draw_crystals crystals --out samples.safetensors --count 10000   # a shipped name or a folder
python -m benchmarks.draw_crystals results/crystals/weights/flow-1 --anneal coord=80 --anneal type=1 --out OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fmwc
from fmwc.crystals import Controls
from fmwc.crystals.recipe import batch_for
from fmwc.provenance import pick_device
from fmwc.sampling import SamplingConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--anneal", action="append", help="CHANNEL=S, instead of the checkpoint's anti-annealing")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    field = fmwc.load(arguments.checkpoint, device=pick_device(arguments.device))
    sizes = Controls().conditions(field, arguments.count, arguments.seed)
    cond = {name: value.to(field.device) for name, value in sizes.items()}
    anneal = {name: float(s) for name, s in (entry.split("=") for entry in arguments.anneal or [])} or None
    options = {"cond": cond, "config": SamplingConfig(batch=batch_for(field.device), anneal=anneal)}
    run = fmwc.sample(field, arguments.count, steps=arguments.steps, seed=arguments.seed, **options)
    print(f"wrote {run.compact().save(arguments.out)}, ranked by {run.default_score}")


if __name__ == "__main__":
    main()
