"""Measure the peak memory of the transported dispersion by number of steps. Only the stored states should grow.

    python -m benchmarks.transport_memory [--out results/checkerboard/memory.json]

Each number of steps runs in a separate process, whose peak resident memory is read at the end. Large blocks are
returned to the system when freed (glibc's MALLOC_MMAP_THRESHOLD_), so memory that the allocator retains is not counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

import fmwc
from fmwc.files import write_json
from fmwc.provenance import provenance

COUNT = 1024


def measure(steps: int) -> float:
    """Return the peak resident memory of one run in MiB."""
    fmwc.sample(fmwc.load("checkerboard"), COUNT, steps=steps, confidence=None, transport=True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/checkerboard/memory.json"))
    parser.add_argument("--steps", type=int, help="measure one number of steps in this process, and print it")
    arguments = parser.parse_args()
    if arguments.steps:
        print(measure(arguments.steps))
        return
    start = time.perf_counter()
    rows = {}
    for steps in (1, 10, 50, 200):
        words = [sys.executable, __file__, "--steps", str(steps)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        peak = float(subprocess.run(words, check=True, capture_output=True, text=True, env=environment).stdout)
        states = (steps + 1) * COUNT * 2 * 4 / 2**20
        rows[steps] = {"peak_mib": round(peak, 1), "states_mib": round(states, 2)}
        print(f"{steps:4d} steps: {peak:7.1f} MiB, of which states {states:.2f} MiB")
    about = provenance(torch.device("cpu"), time.perf_counter() - start, samples=COUNT, seeds=[0])
    write_json(arguments.out, {"provenance": about, "steps": rows})


if __name__ == "__main__":
    main()
