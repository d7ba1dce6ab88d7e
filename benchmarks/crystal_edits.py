"""Compare times and strengths of edits of crystals, by the paper's rules and as a chemist judges them.

python -m benchmarks.crystal_edits --seeds 100 --out OUT

An edit is *useful* if its result is metastable (at most 0.1 eV/atom above the hull) and is either another crystal of
the same formula, or another formula on the same prototype. `OUT/edits.json` holds one row per kind of edit, time and
strength. A stopped run continues at the first row that is missing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fmwc
from fmwc.crystals import Judgement, judge
from fmwc.crystals.matching import MODES, USEFUL, change_of, success
from fmwc.crystals.structures import candidates, crystals_of
from fmwc.files import write_json
from fmwc.provenance import Clock, provenance
from fmwc.registry import domain_named
from fmwc.sampling import Schedule, Trajectory
from fmwc.uses.continuation import with_states
from fmwc.uses.edit import critical_time, edit, random_times

TIMES = (0.2, 0.4, 0.6, 0.8)
SCALES = {"type": (0.1, 0.3, 1.0), "coord": (0.1, 0.3), "lattice": (1.0,), "all": (1.0, 2.0)}
RULES = {mode.channel or "all": name for name, mode in MODES.items()}


def draw(domain: Any, field: Any, count: int, seed: int) -> tuple[Trajectory, Judgement]:
    """Return samples with their states and variance, and their judgement."""
    how = {"confidence": domain.estimator(field), "schedule": Schedule.every(domain.every), "check": False}
    run = with_states(field, domain.draw(field, count, seed, None, **how))[0]
    return run, judge(crystals_of(run))


def times_of(run: Trajectory, at: Any, channel: str | None, seed: int) -> Any:
    """Return the time of each edit: the paper's t*, a random time, or one time for all."""
    if at == "critical":
        return critical_time(run, channel)
    return random_times(run, seed) if at == "random" else at


def measured(run: Trajectory, before: Judgement, edited: Trajectory, channel: str) -> dict[str, list[Any]]:
    """Return the outcome of each edit."""
    seeds, results = crystals_of(run), crystals_of(edited)
    after = judge(results)
    found = [change_of(*pair) for pair in zip(candidates(seeds), candidates(results), strict=True)]
    rule = RULES.get(channel)
    energies = before["e_above_hull"], after["e_above_hull"]
    return {
        "kind": [one.kind for one in found],
        "rmsd": [None if math.isnan(one.rmsd) else one.rmsd for one in found],
        "metastable": after["metastable"],
        "before": before["metastable"],
        "above": [None if math.isnan(value) else value for value in after["e_above_hull"]],
        "paper": success(rule, seeds, results, *energies).tolist() if rule else [None] * len(found),
    }


def shares(outcome: dict[str, list[Any]], resamples: int = 1000) -> dict[str, Any]:
    """Return the shares of an outcome in %, with 90 % intervals for the useful edits."""
    stable = np.array(outcome["metastable"], bool)
    useful = np.isin(outcome["kind"], USEFUL) & stable
    drawn = np.random.default_rng(0).integers(0, len(useful), (resamples, len(useful)))
    low, high = np.quantile(useful[drawn].mean(1), (0.05, 0.95))
    known = [value for value in outcome["above"] if value is not None]
    rmsd = [value for value in outcome["rmsd"] if value is not None]
    paper = [value for value in outcome["paper"] if value is not None]

    def percent(value: Any) -> float:
        return round(100 * float(value), 1)

    return {
        "edits": len(useful),
        "useful": percent(useful.mean()),
        "interval": [percent(low), percent(high)],
        "useful, of metastable": percent(useful[np.array(outcome["before"], bool)].mean()),
        "paper": percent(np.mean(paper)) if paper else None,
        "metastable": percent(stable.mean()),
        **{kind: percent(np.mean([one == kind for one in outcome["kind"]])) for kind in ("same", *USEFUL, "other")},
        "median above": round(float(np.median(known)), 3) if known else None,
        "median rmsd": round(float(np.median(rmsd)), 3) if rmsd else None,
    }


def rows() -> Iterator[tuple[str, Any, float]]:
    """Yield channel, time and scale of each row."""
    for channel, scales in SCALES.items():
        yield from ((channel, at, scale) for scale in scales for at in TIMES)


def compare(seeds: Sequence[int], count: int, out: Path) -> Path:
    domain, field = domain_named("crystals"), fmwc.load("crystals")
    clock, path = Clock(field.device), out / "edits.json"
    content = json.loads(path.read_text()) if path.exists() else {"outcomes": {}, "seconds": 0.0}
    outcomes, earlier = content["outcomes"], content["seconds"]
    for seed in seeds:
        missing = [row for row in rows() if f"{seed} {row}" not in outcomes]
        if not missing:
            continue
        run, before = draw(domain, field, count, seed)
        outcomes[f"{seed} seeds"] = {"metastable": before["metastable"]}
        for row in missing:
            channel, at, scale = row
            name = None if channel == "all" else channel
            times = times_of(run, at, name, seed)
            edited = edit(field, run, name, at=times, scale=scale, seed=seed, confidence=None, together=False)
            outcomes[f"{seed} {row}"] = measured(run, before, edited, channel)
            if isinstance(times, Tensor):
                outcomes[f"{seed} {row}"]["time"] = float(times.mean())
            write_json(path, {"outcomes": outcomes, "seconds": earlier + clock.seconds})
            print(seed, row, shares(outcomes[f"{seed} {row}"]), flush=True)
    table = []
    for row in rows():
        parts = [outcomes[f"{seed} {row}"] for seed in seeds]
        joined = {name: [v for part in parts for v in part[name]] for name in parts[0] if name != "time"}
        at = np.mean([part["time"] for part in parts]) if "time" in parts[0] else row[1]
        table.append({"channel": row[0], "at": row[1], "scale": row[2], "time": round(float(at), 3), **shares(joined)})
    about = provenance(field.device, earlier + clock.seconds, seeds=list(seeds), count=count)
    return write_json(path, {"table": table, "provenance": about, "outcomes": outcomes, "seconds": about["seconds"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(compare(options.seeds, options.count, options.out))


if __name__ == "__main__":
    main()
