"""Measure time and peak memory of `fmwc sample` for many Checkerboard points; the memory is bounded.

    python -m benchmarks.million [--counts 10000 100000 1000000] [--every-step]

Each number of samples runs in a separate process. The operating system reports its peak resident memory, which
includes torch. Small runs are kept in memory, large ones are written batch by batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fmwc.files import write_json
from fmwc.provenance import provenance

COUNTS = (10_000, 100_000, 1_000_000)


def measure(count: int, options: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "fmwc", "sample", "checkerboard", "-n", str(count), "--device", "cpu"]
        begin = time.perf_counter()
        child = subprocess.Popen([*words, *options, "--out", folder], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"fmwc sample ended with {child.returncode}")
        size = sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20
    return {"seconds": round(seconds, 1), "peak_mib": round(used.ru_maxrss / 1024, 1), "written_mib": round(size, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--every-step", action="store_true", help="read the variance at every step, not at a few")
    parser.add_argument("--out", type=Path, default=Path("results/bench/million.json"))
    arguments = parser.parse_args()
    options = ["--every", "1"] if arguments.every_step else []  # few readings are the default
    begin, rows = time.perf_counter(), {}
    for count in arguments.counts:
        rows[str(count)] = row = measure(count, options)
        print(f"{count:>9,} samples: {row['seconds']:8.1f} s, peak {row['peak_mib']:7.1f} MiB", flush=True)
        about = provenance(torch.device("cpu"), time.perf_counter() - begin, steps=50, seeds=[0])
        about["threads"] = torch.get_num_threads()
        write_json(arguments.out, {"provenance": about, "options": options, "samples": rows})


if __name__ == "__main__":
    main()
