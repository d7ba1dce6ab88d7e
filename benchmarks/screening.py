"""Measure campaigns: rates of the stages, workers, the cost of Ray, memory, a lost node; and predict large ones.

python -m benchmarks.screening                                    # everything, into results/screening
python -m benchmarks.screening --rates --device cuda --out $OUT   # on a GPU: how fast samples are drawn and judged
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fmwc.crystals import calculator, judge
from fmwc.crystals.structures import crystals_of
from fmwc.files import write_json
from fmwc.provenance import pick_device, provenance
from fmwc.registry import open_checkpoint
from fmwc.sampling import SamplingConfig, Trajectory

RESULTS = Path("results/screening")
STEPS = 50
DRAWS = (("crystals", 1.0), ("crystals", 0.2), ("mnist", 1.0), ("mnist", 0.2))  # shares of the default batch
JUDGED = 512  # crystals; on a CPU, one batch


# ---- rates of the stages on one device ---------------------------------------------------------------------------


def rates(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure how many samples one process draws per second, and how many crystals a core judges and relaxes."""
    device = pick_device(arguments.device)
    found: dict[str, Any] = {"draw": [draw_rate(*case, device, arguments.seconds) for case in DRAWS]}
    if find_spec("chgnet") is None:
        return found | {"judge": "not measured: chgnet is not installed"}
    domain, field = open_checkpoint("crystals", device)
    count = min(JUDGED, domain.batch(device))
    run = domain.draw(field, count, 1, None, steps=STEPS, config=SamplingConfig(batch=count))
    with TemporaryDirectory() as folder:
        file = run.save(Path(folder) / "samples.safetensors")
        return found | {"judge": [judge_rate(file, jobs, arguments.seconds) for jobs in (1, os.cpu_count() or 1)]}


def draw_rate(name: str, share: float, device: torch.device, seconds: float) -> dict[str, Any]:
    """Draw batches of a share of the default size as a campaign does, for about the given time."""
    domain, field = open_checkpoint(name, device)
    batch = round(share * domain.batch(device))

    def draw(first: int) -> None:
        config = SamplingConfig(first=first, batch=batch)
        domain.draw(field, batch, 0, None, steps=STEPS, config=config).score().cpu()  # waits for the device

    draw(0)  # warms up
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun, count = time.perf_counter(), 0
    while not count or time.perf_counter() - begun < seconds:
        count += batch
        draw(count)
    spent = time.perf_counter() - begun
    row = {
        "samples": name,
        "batch": batch,
        "steps": STEPS,
        "drawn": count,
        "seconds": spent,
        "per_second": count / spent,
    }
    if device.type == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    print(row, flush=True)
    return row


def judge_rate(file: Path, jobs: int, seconds: float) -> dict[str, Any]:
    """Judge and relax crystals in several processes at once, one core each; return the rates of all together."""
    row: dict[str, Any] = {"processes": jobs}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for what in ("judge", "relax"):
            row[f"{what}_per_second"] = sum(pool.map(_judge, [(file, what, seconds)] * jobs))
    print(row, flush=True)
    return row


def _judge(task: tuple[Path, str, float]) -> float:
    file, what, seconds = task
    torch.set_num_threads(1)
    crystals, model = crystals_of(Trajectory.load(file)), calculator("chgnet")
    size, options = {"judge": (32, {}), "relax": (8, {"relax": 200})}[what]
    judge(crystals.take(range(4)), calculator=model, **options)  # loads the model and the references
    begun, count = time.perf_counter(), 0
    while count + size <= len(crystals) and (not count or time.perf_counter() - begun < seconds):
        judge(crystals.take(range(count, count + size)), calculator=model, **options)
        count += size
    return count / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", action="store_true", help="only the rates of the stages on one device")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=30, help="time per rate")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    begun, device = time.perf_counter(), pick_device(arguments.device)
    found = rates(arguments)
    about = provenance(device, time.perf_counter() - begun, steps=STEPS, seeds=[0, 1])
    write_json(arguments.out / f"rates-{device.type}.json", {"provenance": about, "cores": os.cpu_count(), **found})


if __name__ == "__main__":
    main()
