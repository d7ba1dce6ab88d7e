"""Train the flows of the zoo, score their samples and write the table.

python -m benchmarks.zoo --out runs/zoo --jobs 2
python -m benchmarks.zoo --device cuda --data zoo_data/mnist --out "$OUT" --jobs 8
python -m benchmarks.zoo --flows moons,waves --seeds 0 --only scores

For each flow and seed, `FLOW-SEED.safetensors` holds the weights and `FLOW-SEED.npz` failures and scores. Existing
files are kept; `--only scores` computes the scores again from the weights.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.zoo.digits import JUDGES
from benchmarks.zoo.flows import FLOWS, HALVES
from benchmarks.zoo.runner import run
from benchmarks.zoo.scores import COUNT
from benchmarks.zoo.table import write
from fmwc.provenance import Clock, pick_device, provenance

STAGES = ("train", "scores", "table")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--flows", default=",".join(FLOWS), help="names, separated by commas; or one of " + ", ".join(HALVES)
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/zoo"))
    parser.add_argument("--data", help="the folder of MNIST; default: FMWC_DATA or the cache")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with one thread")
    parser.add_argument("--only", choices=STAGES, help="only train, compute scores from weights, or write the table")
    parser.add_argument("--count", type=int, default=COUNT, help="samples of each flow and seed")
    arguments = parser.parse_args()
    names = [n for n, flow in FLOWS.items() if flow.half == arguments.flows]
    names = names or arguments.flows.split(",")
    if unknown := [name for name in names if name not in FLOWS]:
        parser.error(f"unknown flow '{unknown[0]}'; the flows are: {', '.join(FLOWS)}")
    device, out = pick_device(arguments.device), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    os.environ.setdefault(JUDGES, str(out / "judges"))
    if arguments.data:
        os.environ["FMWC_DATA"] = arguments.data
    clock, errors = Clock(device), 0
    if arguments.only != "table":
        tasks = [(name, int(seed)) for seed in arguments.seeds.split(",") for name in names]
        errors = run(tasks, arguments.jobs, str(device), out, arguments.only or "", arguments.count)
    if arguments.only != "train":
        write(out, out, provenance(device, clock.seconds, samples=arguments.count))
    if errors:
        raise SystemExit(f"{errors} of {len(tasks)} flows and seeds raised an error; the same command does them again")


if __name__ == "__main__":
    main()
