"""Compute the fingerprints of structures for coverage, in several processes.

python -m benchmarks.fingerprints SAMPLES.safetensors --out drawn.npz --jobs 16 --minutes 10
python -m benchmarks.fingerprints FOLDER/test.npz --out test.npz --jobs 16 --minutes 10   # a split of MP-20
python -m benchmarks.fingerprints relaxed.npz --out f.npz --jobs 16   # structures that benchmarks.relaxations relaxed
python -m benchmarks.fingerprints FILE.cif --out f.npz                # CIF, POSCAR or extended XYZ

Resumes if interrupted: results are written after every 64 structures per process, and a run with the same structures
and file continues. The last line says how many structures are done; the exit status is 3 if some are left.

Imports torch, safetensors and filelock for fmwc, and matminer with pymatgen (pymatgen-core), numpy, scipy, pandas,
scikit-learn, joblib, sympy, monty, ruamel.yaml, spglib, networkx, matplotlib, orjson, tabulate and tqdm.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

from experiments.crystals.relaxations import read_relaxed
from fmwc.crystals import Candidate, mp20, read
from fmwc.crystals.fingerprints import fingerprints
from fmwc.crystals.structures import Crystals, crystals_of
from fmwc.sampling import Trajectory


def structures_of(path: Path) -> Crystals | list[Candidate]:
    """Return the structures of a run, a split of MP-20, a file of `benchmarks.relaxations`, or structure files."""
    if path.suffix == ".safetensors":
        return crystals_of(Trajectory.load(path))
    if path.suffix == ".npz" and path.stem not in mp20.SPLITS:
        return [one.candidate for one in read_relaxed(path).rows]
    return mp20.load(path.parent, path.stem) if path.suffix == ".npz" else read(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("structures", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    arguments = parser.parse_args()
    start = time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        print(f"{stage}: {done} of {total} after {time.monotonic() - start:.0f} s", flush=True)

    found = fingerprints(
        structures_of(arguments.structures),
        jobs=arguments.jobs,
        kept=arguments.out,
        minutes=arguments.minutes,
        progress=show,
    )
    reasons = Counter(problem.split(":")[0] for problem in found.problems if problem)
    print(f"{len(found)} structures, {int(found.usable.sum())} with fingerprints; without: {dict(reasons)}")
    return 0 if found.complete else 3


if __name__ == "__main__":
    sys.exit(main())
