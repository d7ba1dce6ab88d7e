"""Relax drawn crystals with CHGNet in several processes, and keep the relaxed structures in one file.

python -m benchmarks.relaxations SAMPLES.safetensors --out relaxed.npz --count 2000 --jobs 16 --minutes 9

Resumes if interrupted: results are written every 20 seconds, and the same command continues. The exit status is 3 if
structures are left. Give one process per CPU core on a GPU, preferably with CUDA's MPS, because the graphs are built
on the CPU. The packages are those of `benchmarks.references`.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import benchmarks.references  # noqa: F401  (replaces packages that a bare machine lacks)
from benchmarks.fingerprints import structures_of
from experiments.crystals.relaxations import CHUNK, relax_in_processes
from fmwc.crystals import candidates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("structures", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=0, help="the first so many only; 0 for all")
    parser.add_argument("--steps", type=int, default=200, help="maximum number of steps")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the GPU if there is one")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="structures relaxed together")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no chunk starts after this time")
    parser.add_argument("--calculator", default="chgnet")
    arguments = parser.parse_args()
    given = candidates(structures_of(arguments.structures))[: arguments.count or None]
    options = {"steps": arguments.steps, "jobs": arguments.jobs, "chunk": arguments.chunk, "minutes": arguments.minutes}
    done = relax_in_processes(given, arguments.out, model=arguments.calculator, **options)
    print(f"{arguments.out}: {done} of {len(given)} structures")
    return 0 if done == len(given) else 3


if __name__ == "__main__":
    sys.exit(main())
