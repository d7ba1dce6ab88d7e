"""Compare settings of the sampler of crystals: draws of a validation seed, judged without relaxation.

python -m benchmarks.crystal_samplers CHECKPOINT --draw --judge --count 2000 --out OUT --jobs 16

`--draw` needs a GPU, and writes `OUT/NAME.npz` for each setting. `--judge` adds CHGNet's energies above the shipped
hull (`OUT/NAME.csv`), and prints a table. Settings that have their files are not repeated.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import fmwc
from fmwc.crystals.energy import calculator, energies
from fmwc.crystals.hull import shipped_hull
from fmwc.crystals.judge import METASTABLE, above_hull, validity
from fmwc.crystals.recipe import Mp20, batch_for
from fmwc.crystals.structures import Crystals, candidates, crystals_of
from fmwc.files import write_bytes, write_text
from fmwc.provenance import pick_device
from fmwc.report.table import Table
from fmwc.sampling import Grid, SamplingConfig

SEED = 100  # of validation
CHUNK = 125  # structures per job


def warped(power: float, steps: int = 50) -> Grid:
    """Return times i/n, raised to a power: above 1, steps are shorter at the start."""
    return Grid([(i / steps) ** power for i in range(steps + 1)])


SETTINGS: dict[str, dict[str, Any]] = {
    "coord-20": {"anneal": {"coord": 20.0}},
    "coord-10": {"anneal": {"coord": 10.0}},
    "coord-40": {"anneal": {"coord": 40.0}},
    "coord-80": {"anneal": {"coord": 80.0}},
    "type-1": {"anneal": {"coord": 20.0, "type": 1.0}},
    "type-3": {"anneal": {"coord": 20.0, "type": 3.0}},
    "lattice-1": {"anneal": {"coord": 20.0, "lattice": 1.0}},
    "lattice-3": {"anneal": {"coord": 20.0, "lattice": 3.0}},
    "coord-80-type-0.3": {"anneal": {"coord": 80.0, "type": 0.3}},
    "coord-80-type-0.5": {"anneal": {"coord": 80.0, "type": 0.5}},
    "coord-80-type-1": {"anneal": {"coord": 80.0, "type": 1.0}},
    "all": {"anneal": {"coord": 40.0, "type": 1.0, "lattice": 1.0}},
    "grid-1.3": {"anneal": {"coord": 20.0}, "controller": warped(1.3)},
    "grid-0.8": {"anneal": {"coord": 20.0}, "controller": warped(0.8)},
    "heun-25": {"anneal": {"coord": 20.0}, "stepper": "heun", "steps": 25},
    "steps-100": {"anneal": {"coord": 20.0}, "steps": 100},
    "steps-200": {"anneal": {"coord": 20.0}, "steps": 200},
}


def draw(network: Any, name: str, count: int, recipe: Mp20, given: dict[str, Any]) -> Crystals:
    """Return the crystals of a setting."""
    options = {"batch": batch_for(next(network.parameters()).device), **given}
    steps = options.pop("steps", None if "controller" in options else recipe.steps)
    run = recipe.draw(network, count, SEED, confidence=None, steps=steps, config=SamplingConfig(**options))
    return crystals_of(run)


def rows_of(path: Path) -> Crystals:
    with np.load(path, allow_pickle=False) as arrays:
        parts = [torch.from_numpy(arrays[name]) for name in ("numbers", "coords", "lengths", "angles")]
    return Crystals(*parts, tuple(map(str, range(len(parts[0])))))


def judged(path: Path, first: int) -> dict[str, list[Any]]:
    """Return energies above the hull and validity of `CHUNK` structures of a file."""
    torch.set_num_threads(1)
    chosen = rows_of(path)
    given = candidates(chosen.take(torch.arange(first, min(first + CHUNK, len(chosen)))))
    above = above_hull(given, energies(given, calculator("chgnet", "cpu")), shipped_hull())[0]
    rules = [validity(candidate) for candidate in given]
    return {
        "formula": [candidate.formula for candidate in given],
        "e_above_hull": above,
        "distances": [rule.distances for rule in rules],
        "charge": [rule.charge for rule in rules],
    }


def judge_all(out: Path, jobs: int) -> Iterator[str]:
    """Judge the files that have no table; return their names."""
    todo = [path for path in sorted(out.glob("*.npz")) if not path.with_suffix(".csv").exists()]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        parts = {path: [pool.submit(judged, path, i) for i in range(0, len(rows_of(path)), CHUNK)] for path in todo}
        for path, futures in parts.items():
            found = [future.result() for future in futures]
            columns = {name: [value for part in found for value in part[name]] for name in found[0]}
            write_text(path.with_suffix(".csv"), Table.from_columns(columns).csv())
            yield path.stem


def summary(out: Path) -> str:
    """Return a table with one row per setting."""
    rows = []
    for path in sorted(out.glob("*.csv")):
        table = pd.read_csv(path)
        above = table["e_above_hull"]
        rows.append(
            {
                "setting": path.stem,
                "mean": f"{above.mean():.3f}",
                "median": f"{above.median():.3f}",
                "metastable": f"{(above <= METASTABLE).mean():.1%}",
                "valid": f"{table['distances'].mean():.1%}",
                "charge": f"{table['charge'].mean():.1%}",
                "formulas": f"{table['formula'].nunique() / len(table):.1%}",
            }
        )
    return pd.DataFrame(rows).to_string(index=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", default="", help="the folder of MP-20; FMWC_DATA if empty")
    parser.add_argument("--only", default="", help="settings, separated by commas")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    recipe = Mp20(data=options.data)
    if options.draw:
        network = fmwc.load(options.checkpoint, device=pick_device("auto")).network
        for name, given in SETTINGS.items():
            path = options.out / f"{name}.npz"
            if path.exists() or (options.only and name not in options.only.split(",")):
                continue
            began = time.monotonic()
            found = draw(network, name, options.count, recipe, dict(given))
            fields = ("numbers", "coords", "lengths", "angles")
            content = io.BytesIO()
            np.savez(content, **{field: getattr(found, field).cpu().numpy() for field in fields})
            write_bytes(path, content.getvalue())
            print(f"{name}: {len(found)} crystals in {time.monotonic() - began:.1f} s", flush=True)
    if options.judge:
        for name in judge_all(options.out, options.jobs):
            print(f"judged {name}", flush=True)
        print(summary(options.out))


if __name__ == "__main__":
    main()
