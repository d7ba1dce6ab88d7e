"""Measure how fast crystals are judged: energies by CHGNet, and everything else, on real structures.

python -m benchmarks.judging_speed --data FOLDER                            # MP-20's test split
python -m benchmarks.judging_speed --relax samples.safetensors --count 64   # relaxations, in a batch and one by one

`--relax` relaxes drawn crystals twice: together, and one after the other as ASE would.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from fmwc.crystals import calculator, candidates, energies, hull_for, judge, mp20
from fmwc.crystals.relaxation import relax_all
from fmwc.crystals.structures import crystals_of
from fmwc.files import write_json
from fmwc.provenance import provenance
from fmwc.sampling import Trajectory

RESULTS = Path("results/crystals")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="default: FMWC_DATA")
    parser.add_argument("--count", type=int, default=2500)
    parser.add_argument("--out", type=Path, help="default: judging.json or relaxing.json in results/crystals")
    parser.add_argument("--relax", type=Path, help="samples to relax instead")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    (relaxing if arguments.relax else judging)(arguments)


def relaxing(arguments: argparse.Namespace) -> None:
    """Relax samples in a batch, and one by one."""
    given = candidates(crystals_of(Trajectory.load(arguments.relax)))[: arguments.count]
    model, seconds, found = calculator("chgnet"), {}, {}
    relax_all(given[:2], model, 2)  # loads the model
    for name, parts in (("batch", [given]), ("one by one", [[one] for one in given])):
        start = time.perf_counter()
        found[name] = [one for part in parts for one in relax_all(part, model, arguments.steps)]
        seconds[name] = time.perf_counter() - start
    numbers = {
        "structures": len(given),
        "most_steps": arguments.steps,
        "relaxations_per_second": {name: len(given) / value for name, value in seconds.items()},
        "mean_steps": {name: sum(one.steps for one in ones) / len(given) for name, ones in found.items()},
        "converged": {name: sum(one.converged for one in ones) for name, ones in found.items()},
    }
    write(numbers, arguments.out or RESULTS / "relaxing.json", sum(seconds.values()))


def judging(arguments: argparse.Namespace) -> None:
    """Judge real structures."""
    crystals = mp20.load(arguments.data, "test")
    crystals = crystals.take(
        torch.randperm(len(crystals), generator=torch.Generator().manual_seed(0))[: arguments.count]
    )
    start = time.perf_counter()
    hull = hull_for("chgnet")
    energies(crystals.take(range(8)))  # loads the model
    loaded = time.perf_counter()
    energies(crystals)
    computed = time.perf_counter()
    found = judge(crystals, hull=hull)
    judged = time.perf_counter()
    numbers = {
        "structures": len(crystals),
        "load_seconds": loaded - start,
        "energies_per_second": len(crystals) / (computed - loaded),
        "judge_seconds": judged - computed,  # energies again, hulls, validity, uniqueness
        "mean_e_above_hull": found.summary()["mean_e_above_hull"],
        "below_0.1": found.summary()["metastable_share"],
    }
    write(numbers, arguments.out or RESULTS / "judging.json", judged - start)


def write(numbers: dict[str, Any], path: Path, seconds: float) -> None:
    print(numbers)
    write_json(path, {"numbers": numbers, "provenance": provenance(torch.device("cpu"), seconds)})


if __name__ == "__main__":
    main()
