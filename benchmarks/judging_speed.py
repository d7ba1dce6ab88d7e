"""Measure how fast crystals are judged: energies by CHGNet, and everything else, on real structures.

python -m benchmarks.judging_speed --data FOLDER   # MP-20's test split
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from fmwc.crystals import energies, hull_for, judge, mp20
from fmwc.files import write_json
from fmwc.provenance import provenance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="default: FMWC_DATA")
    parser.add_argument("--count", type=int, default=2500)
    parser.add_argument("--out", type=Path, default=Path("results/crystals/judging.json"))
    arguments = parser.parse_args()
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
    print(numbers)
    write_json(arguments.out, {"numbers": numbers, "provenance": provenance(torch.device("cpu"), judged - start)})


if __name__ == "__main__":
    main()
