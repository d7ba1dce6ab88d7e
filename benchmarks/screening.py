"""Measure campaigns: rates of the stages, workers, the cost of Ray, memory; and predict large ones.

    python -m benchmarks.screening                                    # everything on two cores, into results/screening
    python -m benchmarks.screening --rates --device cuda --out $OUT   # on a GPU: how fast samples are drawn and judged
    python -m benchmarks.screening --model                            # only the prediction and the tables, from files

Campaigns are commands in processes of their own; the memory of all processes is sampled while they run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fmwc.crystals import calculator, judge
from fmwc.crystals.structures import crystals_of
from fmwc.files import write_json, write_text
from fmwc.provenance import pick_device, provenance
from fmwc.registry import open_checkpoint
from fmwc.report.table import Table
from fmwc.sampling import SamplingConfig, Trajectory

RESULTS, SPEED = Path("results/screening"), Path("results/speed")
STEPS = 50
DRAWS = (("crystals", 1.0), ("mnist", 1.0))  # shares of the default batch
DRAWS_ON_GPU = (*DRAWS, ("crystals", 0.2), ("mnist", 0.2))
SMALL = {"hidden": 64, "layers": 2, "frequencies": 16, "iterations": 6, "batch": 16, "noise_steps": 2, "width": 8}
SMALL |= {"references": 16, "steps": 4}  # a network of crystals that is fast enough for 10,000 of them on two cores


# ---- campaigns -------------------------------------------------------------------------------------------------------


def campaign(out: Path, checkpoint: str, count: int, *options: str) -> Row:
    """Run a campaign; return its wall time, the seconds of its stages, and the memory of its processes."""
    words = ["screen", checkpoint, "-n", str(count), "--out", str(out), "--device", "cpu", "--judge", "none"]
    command = [sys.executable, "-m", "fmwc", *words, "--budget", "0", *options]
    begun = time.perf_counter()
    with out.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    memory = Memory(process.pid)
    while process.poll() is None:
        memory.sample()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.25)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {out.with_suffix('.log').read_text()}")
    seconds = time.perf_counter() - begun
    stages = {row["stage"]: row["seconds"] for row in json.loads((out / "funnel.json").read_text())["stages"]}
    blocks = sorted(path.stat().st_mtime for path in out.glob("blocks/draw-*.parquet"))
    row = {
        "samples": count,
        "options": " ".join(options),
        "seconds": seconds,
        "stage_seconds": stages,
        "seconds_between_first_and_last_block": blocks[-1] - blocks[0],
        "blocks": len(blocks),
        "memory_mib": memory.found(),
    }
    print(row, flush=True)
    return row


Row = dict[str, Any]


class Memory:
    """Resident memory of a driver, of its workers, and of Ray's other processes, which include shared memory."""

    def __init__(self, pid: int) -> None:
        import psutil

        self.gone, self.driver = psutil.Error, psutil.Process(pid)
        self.series: list[tuple[float, float, float]] = []

    def sample(self) -> None:
        sizes = {"driver": 0.0, "worker": 0.0, "others": 0.0}
        try:
            for process in (self.driver, *self.driver.children(recursive=True)):
                kind = "driver" if process == self.driver else "worker" if "MapWorker" in process.name() else "others"
                size = process.memory_info().rss / 2**20
                sizes[kind] = max(sizes[kind], size) if kind == "worker" else sizes[kind] + size
        except self.gone:  # a process that just ended
            return
        self.series.append((sizes["driver"], sizes["worker"], sizes["others"]))

    def found(self) -> Row:
        """Return the peaks (of the largest worker), and the driver and the largest worker over the run."""
        peaks = dict(zip(("driver", "worker", "others"), map(max, zip(*self.series, strict=True)), strict=True))
        tenths = [self.series[(len(self.series) - 1) * i // 10] for i in range(1, 10)]
        return {
            "peak": peaks,
            "driver_at_tenths": [a for a, *_ in tenths],
            "worker_at_tenths": [b for _, b, _ in tenths],
        }


def points(folder: Path) -> Row:
    """Compare this process with one and two workers on Ray: 100,000 points."""
    return compared(folder, "checkerboard", 100_000)


def crystals(folder: Path) -> Row:
    """Compare them on 10,000 crystals of a small network."""
    words = [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "fmwc", "train", "crystals", "--data", "prototypes", "--device", "cpu", *words]
    subprocess.run([*command, "--out", str(folder / "small")], check=True, capture_output=True)
    found = compared(folder, str(folder / "small"), 10_000, "--score", "integrated")
    return found | {"network": {name: value for name, value in SMALL.items() if name in ("hidden", "layers")}}


def compared(folder: Path, checkpoint: str, count: int, *options: str) -> Row:
    runs, tables = {}, set()
    ray = ("--address", "local", "--workers")
    for name, more in (("this process", ()), ("one worker", (*ray, "1")), ("two workers", (*ray, "2"))):
        out = folder / name.replace(" ", "-")
        runs[name] = campaign(out, checkpoint, count, *options, *more)
        tables.add((out / "results.parquet").read_bytes())
    if len(tables) > 1:
        raise SystemExit("the tables differ")
    return {"runs": runs}


def memory(folder: Path) -> Row:
    """Measure the memory of two workers over a million points, drawn in two steps."""
    return {"runs": {"two workers": campaign(folder / "many", "checkerboard", 10**6, "--steps", "2", "--workers", "2")}}


# ---- rates of the stages on one device ---------------------------------------------------------------------------


def rates(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure how many samples one process draws per second, and how many crystals a core judges and relaxes."""
    device, drawn, runs = pick_device(arguments.device), [], {}
    for name, share in DRAWS_ON_GPU if device.type == "cuda" else DRAWS:
        row, runs[name] = draw_rate(name, share, device, arguments.seconds)
        drawn.append(row)
    found: dict[str, Any] = {"draw": drawn}
    if find_spec("chgnet") is None:
        return found | {"judge": "not measured: chgnet is not installed"}
    with TemporaryDirectory() as folder:
        file = runs["crystals"].save(Path(folder) / "samples.safetensors")
        return found | {"judge": [judge_rate(file, jobs, arguments.seconds) for jobs in (1, os.cpu_count() or 1)]}


def draw_rate(name: str, share: float, device: torch.device, seconds: float) -> tuple[Row, Trajectory]:
    """Draw batches of a share of the default size as a campaign does, for about the given time; return the last too."""
    domain, field = open_checkpoint(name, device)
    batch = round(share * domain.batch(device))

    def draw(first: int) -> Trajectory:
        run = domain.draw(field, batch, 0, None, steps=STEPS, config=SamplingConfig(first=first, batch=batch))
        run.score().cpu()  # waits for the device
        return run

    if device.type == "cuda":
        draw(0)  # warms up
        torch.cuda.reset_peak_memory_stats()
    begun, count = time.perf_counter(), 0
    while not count or time.perf_counter() - begun < seconds:
        count += batch
        run = draw(count)
    spent = time.perf_counter() - begun
    row: Row = {"samples": name, "batch": batch, "steps": STEPS, "drawn": count, "seconds": spent}
    row["per_second"] = count / spent
    if device.type == "cuda":
        row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    print(row, flush=True)
    return row, run


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
    crystals, model = crystals_of(Trajectory.load(file)), calculator("chgnet", "cpu")
    size, options = {"judge": (32, {}), "relax": (8, {"relax": 200})}[what]
    judge(crystals.take(range(4)), calculator=model, **options)  # loads the model and the references
    begun, count = time.perf_counter(), 0
    while count + size <= len(crystals) and (not count or time.perf_counter() - begun < seconds):
        judge(crystals.take(range(count, count + size)), calculator=model, **options)
        count += size
    return count / (time.perf_counter() - begun)


# ---- prediction and tables -------------------------------------------------------------------------------------------

STRUCTURES, GPUS, CORES = 10**7, 8, 512
KEPT = 0.1  # the share that is relaxed
SUREST = (
    "The surest crystals need fewer steps to relax than those that were measured (results/crystals/screening), so the "
    "time to relax them is an upper bound."
)


def read(out: Path, name: str) -> Row | None:
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def model(out: Path) -> Row | None:
    """Predict a campaign of ten million crystals from measured rates: hours of each stage, and which one limits it."""
    gpu, judged, relaxed = read(out, "rates-cuda"), read(SPEED, "judging"), read(SPEED, "relaxing")
    if gpu is None or judged is None or relaxed is None:
        return None
    drawn = max(row["per_second"] for row in gpu["draw"] if row["samples"] == "crystals")
    per_core = {  # of one core of the development machine, over more crystals than `rates` judges
        "judge": judged["numbers"]["structures"] / judged["numbers"]["judge_seconds"],
        "relax": relaxed["numbers"]["relaxations_per_second"]["batch"],
    }
    hours = {
        "draw all": STRUCTURES / (GPUS * drawn) / 3600,
        "judge all": STRUCTURES / (CORES * per_core["judge"]) / 3600,
        "relax and judge the surest tenth": KEPT * STRUCTURES / (CORES * per_core["relax"]) / 3600,
        "relax and judge all": STRUCTURES / (CORES * per_core["relax"]) / 3600,
    }
    plans = {
        "draw and judge all": (("draw all", "judge all"), max),
        "draw all, then relax and judge the surest tenth (--keep 0.1 --relax 200)": (
            ("draw all", "relax and judge the surest tenth"),
            sum,  # the choice waits for the last draw
        ),
        "draw, relax and judge all (--relax 200)": (("draw all", "relax and judge all"), max),
    }
    rows = [
        {
            "campaign": name,
            "hours": total([hours[one] for one in stages]),
            "limited by": max(stages, key=hours.__getitem__),
        }
        for name, (stages, total) in plans.items()
    ]
    rates = {"drawn_per_second_and_gpu": drawn, **{f"{n}_per_second_and_core": v for n, v in per_core.items()}}
    return {
        "structures": STRUCTURES,
        "gpus": GPUS,
        "cores": CORES,
        "rates": rates,
        "stage_hours": hours,
        "campaigns": rows,
    }


def tables(out: Path) -> None:
    """Write the tables from the files."""
    parts = ["# Campaigns", "Written by `python -m benchmarks.screening` from the files in this folder."]
    for name, title in (("points", "100,000 points"), ("crystals", "10,000 crystals of a small network")):
        if (found := read(out, name)) is not None:
            parts.append(_workers(found, title))
    if (found := read(out, "memory")) is not None:
        parts.append(_memory(found))
    for device in ("cpu", "cuda"):
        if (found := read(out, f"rates-{device}")) is not None:
            parts += _rates(found)
    if (found := model(out)) is not None:
        write_json(out / "model.json", found)
        said = ", ".join(f"{n.replace('_', ' ')}: {v:.3g}" for n, v in found["rates"].items())
        note = f"Predicted, not run ({said}; of a core: {SPEED}/judging.json and relaxing.json). "
        note += f"Checks, files and Ray are neglected. {SUREST}"
        title = f"Prediction: {STRUCTURES:,} structures on {GPUS} H200 and {CORES} cores"
        parts.append(Table(found["campaigns"], title, note).section())
        parts.append(Table([{"stage": n, "hours": v} for n, v in found["stage_hours"].items()], "Its stages").section())
    write_text(out / "tables.md", "\n\n".join(part.strip() for part in parts) + "\n")


def _about(found: Row) -> str:
    about = found["provenance"]
    said = f"{about['device']}, torch {about['torch']}, commit {about['commit']}, {about['date']}"
    said += f", {about['seconds']} s, seeds {about['seeds']}" if "seeds" in about else ""
    said += f"; load average of the machine before: {found['load']:.1f}" if "load" in found else ""
    return f"{said}. {about.get('note', '')}".strip()


def _workers(found: Row, title: str) -> str:
    alone = found["runs"]["this process"]["seconds"]
    rows = [
        {
            "": name,
            "seconds": run["seconds"],
            "samples per second": run["samples"] / run["seconds"],
            "of the time in this process": f"{run['seconds'] / alone:.2f}×",
            "stages, seconds of all workers": sum(run["stage_seconds"].values()),
            "seconds outside the stages": run["seconds"] - sum(run["stage_seconds"].values()) / (1 + ("two" in name)),
            "peak MiB of the driver": run["memory_mib"]["peak"]["driver"],
            "of a worker": run["memory_mib"]["peak"]["worker"] or None,
            "of Ray's processes": run["memory_mib"]["peak"]["others"] or None,
        }
        for name, run in found["runs"].items()
    ]
    return Table(rows, title, _about(found) + " The tables are the same byte for byte.").section()


def _memory(found: Row) -> str:
    rows = [
        {
            "": name,
            "seconds": run["seconds"],
            "peak MiB of the driver": run["memory_mib"]["peak"]["driver"],
            "of the largest worker": run["memory_mib"]["peak"]["worker"],
            "of Ray's processes": run["memory_mib"]["peak"]["others"],
            "driver after 10, 30, … 90 % of the run": _range(run["memory_mib"]["driver_at_tenths"]),
            "largest worker": _range(run["memory_mib"]["worker_at_tenths"]),
        }
        for name, run in found["runs"].items()
    ]
    return Table(rows, "Memory over 1,000,000 points", _about(found)).section()


def _range(series: list[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in series[::2])


def _rates(found: Row) -> list[str]:
    columns = ("samples", "batch", "steps", "per_second", "peak_mib")
    drawn = [{name: row.get(name) for name in columns} for row in found["draw"]]
    parts = [Table(drawn, f"Draws on {found['provenance']['device']}, one process", _about(found)).section()]
    if found["provenance"]["device"].startswith("CPU"):
        title = "Judged by CHGNet, and relaxed in at most 200 steps first, one core per process, all processes together"
        parts.append(Table(found["judge"], title).section())
    return parts


# ---- command ---------------------------------------------------------------------------------------------------------

PARTS = {"points": points, "crystals": crystals, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", action="store_true", help="only the rates of the stages on one device")
    parser.add_argument("--model", action="store_true", help="only the prediction and the tables, from the files")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[], help="only these campaigns")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=30, help="time per rate")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not (arguments.model or arguments.only):
        device = pick_device(arguments.device)
        measured(arguments.out / f"rates-{device.type}.json", device, lambda: rates(arguments), [0, 1], steps=STEPS)
    for name in [] if arguments.model or arguments.rates else arguments.only or PARTS:
        with TemporaryDirectory() as folder:
            where = Path(folder)
            measured(arguments.out / f"{name}.json", torch.device("cpu"), lambda: PARTS[name](where), [0])  # noqa: B023
    tables(arguments.out)


def measured(path: Path, device: torch.device, measure: Callable[[], Row], seeds: list[int], **more: Any) -> None:
    """Write what a function measures, with how it was measured."""
    load, begun = os.getloadavg()[0], time.perf_counter()
    found = measure()
    about = provenance(device, time.perf_counter() - begun, seeds=seeds, **more)
    write_json(path, {"provenance": about, "load": load, "cores": os.cpu_count(), **found})


if __name__ == "__main__":
    main()
