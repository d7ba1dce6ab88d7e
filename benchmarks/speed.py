"""Measure time and memory: numbers of docs/results.md and docs/faq.md that `python -m experiments bench` does not make.

python -m benchmarks.speed default --device cuda      # sampling with the default confidence, relative to plain sampling
python -m benchmarks.speed million                    # time and peak memory of a million Checkerboard points
python -m benchmarks.speed transport                  # peak memory of the transported dispersion by number of steps
python -m benchmarks.speed judging --data FOLDER      # crystals judged per second: MP-20's test split
python -m benchmarks.speed relaxing --samples FILE    # crystals relaxed per second: in a batch, and one by one

Writes results/speed/NAME.json. Peaks are the resident memory that the operating system reports for a process of its
own, which includes torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fmwc
from fmwc.crystals import calculator, energies, hull_for, judge, mp20, relax_all
from fmwc.crystals.structures import candidates, crystals_of
from fmwc.files import write_json
from fmwc.provenance import Clock, pick_device, provenance
from fmwc.registry import domain_named
from fmwc.sampling import SamplingConfig, Trajectory

RESULTS = Path("results/speed")
COUNTS = {  # samples, drawn in one batch
    "mnist": {"cuda": 1000, "cpu": 25},
    "checkerboard": {"cuda": 10_000, "cpu": 10_000},
    "crystals": {"cuda": 500, "cpu": 20},
}
ROUNDS = 7  # the fastest is reported
POINTS = (100_000, 1_000_000)
STEPS, TRANSPORTED = (1, 10, 50, 200), 1024  # transport: steps, and samples
JUDGED, RELAXED, MOST = 2500, 32, 200  # crystals, and the maximum steps of a relaxation
TRANSPORT = "import fmwc, sys; fmwc.sample(fmwc.load('checkerboard'), {}, steps={}, confidence=None, transport=True)"


def default(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of plain sampling, and the default relative to it. Cases are interleaved."""
    device, rows = pick_device(arguments.device), []
    cases: dict[str, dict[str, Any]] = {"plain": {"confidence": None, "check": False}, "default": {}}
    for name, counts in COUNTS.items():
        field, count = fmwc.load(name, device=device), counts[device.type]
        cond = {k: v.to(device) for k, v in domain_named(name).conditions(field, count, seed=1).items()}
        seconds: dict[str, list[float]] = {case: [] for case in cases}
        for _ in range(ROUNDS + 1):  # the first round warms up
            for case, options in cases.items():
                clock = Clock(device)
                fmwc.sample(field, count, steps=50, seed=1, cond=cond, config=SamplingConfig(batch=count), **options)
                seconds[case].append(clock.seconds)
        plain, whole = (min(each[1:]) for each in seconds.values())
        row = {"name": name, "n": count, "plain_s": round(plain, 4), "default": round(whole / plain, 3)}
        rows.append(row | {"score": field.reference.score})
    return rows


def peak(words: list[str], **environment: str) -> dict[str, float]:
    """Return the seconds and the peak memory of a command."""
    begun = time.perf_counter()
    child = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=os.environ | environment)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {child.returncode}")
    return {"seconds": round(time.perf_counter() - begun, 1), "peak_mib": round(used.ru_maxrss / 1024, 1)}


def million(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return time and peak memory of `fmwc sample` by number of points."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "fmwc", "sample", "checkerboard", "--device", "cpu", "--out"]
        return {str(count): peak([*words, f"{folder}/{count}", "-n", str(count)]) for count in POINTS}


def transport(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the peak memory by number of steps; only the stored states should grow."""
    # Return large blocks to the system when they are freed, so that what the allocator retains is not counted.
    given = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return {str(steps): peak(["-c", TRANSPORT.format(TRANSPORTED, steps)], **given) for steps in STEPS}


def judging(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how fast real structures are judged: their energies, and everything."""
    crystals = mp20.load(arguments.data, "test")
    crystals = crystals.take(torch.randperm(len(crystals), generator=torch.Generator().manual_seed(0))[:JUDGED])
    hull = hull_for("chgnet")
    energies(crystals.take(range(8)))  # loads the model
    begun = time.perf_counter()
    energies(crystals)
    computed = time.perf_counter()
    judge(crystals, hull=hull)  # energies again, hulls, validity, uniqueness
    judged = time.perf_counter()
    rate = len(crystals) / (computed - begun)
    return {"structures": len(crystals), "energies_per_second": rate, "judge_seconds": judged - computed}


def relaxing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how many drawn crystals are relaxed per second."""
    given = candidates(crystals_of(Trajectory.load(arguments.samples)))[:RELAXED]
    model = calculator("chgnet")
    relax_all(given[:2], model, 2)  # loads the model
    begun = time.perf_counter()
    found = relax_all(given, model, MOST)
    rate = len(given) / (time.perf_counter() - begun)
    steps = sum(one.steps for one in found) / len(given)
    return {"structures": len(given), "most_steps": MOST, "relaxations_per_second": rate, "mean_steps": steps}


PARTS = {"default": default, "million": million, "transport": transport, "judging": judging, "relaxing": relaxing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cpu", help="of default")
    parser.add_argument("--data", help="of judging: the folder of MP-20; default: FMWC_DATA")
    parser.add_argument("--samples", type=Path, help="of relaxing: samples.safetensors of crystals")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    clock = Clock(device)
    found = PARTS[arguments.part](arguments)
    print(found)
    name = f"{arguments.part}-{device.type}" if arguments.part == "default" else arguments.part
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / f"{name}.json", {"numbers": found, "provenance": provenance(device, clock.seconds)})


if __name__ == "__main__":
    main()
