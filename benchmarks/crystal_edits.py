"""Choose the time and the strength of edits of crystals on one seed, and report the choice on another.

python -m benchmarks.crystal_edits --out OUT

An edit is *useful* if its result is metastable (at most 0.1 eV/atom above the hull) and is either another crystal of
the same formula, or another formula on the same prototype. The edited crystals are the surest half of those drawn, as
in `fmwc edit --surest`. For each kind of edit, a time and a strength are chosen on the validation seed: of those whose
share of useful edits is within one standard error of the best, the one with most metastable results. The report
compares them, on a fresh seed, with the paper's critical time and with random times.
`OUT/edits.json` holds both tables. A stopped run continues at the first row that is missing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fmwc
from fmwc.checkpoint import identity
from fmwc.cli.verbs import print_table
from fmwc.crystals import Judgement, judge
from fmwc.crystals.matching import MODES, USEFUL, changes, success
from fmwc.crystals.structures import crystals_of
from fmwc.errors import UsageError
from fmwc.files import write_json
from fmwc.provenance import Clock, provenance
from fmwc.registry import domain_named
from fmwc.sampling import Schedule, Trajectory, reread
from fmwc.uses.continuation import with_states
from fmwc.uses.edit import critical_time, edit, random_times

TIMES = (0.2, 0.4, 0.6, 0.8, 0.9)
CRITICAL, RANDOM = "critical", "random"
PAPER = 0.2  # strength of the paper's edits
SCALES = {
    "type": (0.1, 0.3, 0.6),
    "coord": (0.03, 0.1, 0.3),
    "lattice": (0.3, 1.0),
    "all": (0.3, 1.0, 2.0),
}
RULES = {mode.channel or "all": name for name, mode in MODES.items()}


def draw(domain: Any, field: Any, count: int, seed: int) -> tuple[Trajectory, Judgement]:
    """Return the surest half of 2·count samples, with their states and variance, and their judgement."""
    run = with_states(field, domain.draw(field, 2 * count, seed, None).surest(0.5))[0]
    run = reread(field, run, domain.estimator(field), schedule=Schedule.every(domain.every), batch=count)
    return run, judge(crystals_of(run))


def times_of(run: Trajectory, at: Any, channel: str | None, seed: int) -> Any:
    """Return the time of each edit: the paper's t*, a random time, or one time for all."""
    if at == CRITICAL:
        return critical_time(run, channel)
    return random_times(run, seed) if at == RANDOM else at


def measured(run: Trajectory, before: Judgement, edited: Trajectory, channel: str) -> dict[str, list[Any]]:
    """Return the outcome of each edit."""
    seeds, results = crystals_of(run), crystals_of(edited)
    after = judge(results)
    found = changes(seeds, results)
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


Row = tuple[str, Any, float]  # channel, time and strength
TRIED = [(channel, at, scale) for channel, scales in SCALES.items() for scale in scales for at in (*TIMES, CRITICAL)]


@cache
def seeds_of(count: int, seed: int, device: str) -> tuple[Any, Trajectory, Judgement]:
    """Return the field, and the crystals of a seed with their judgement; each process draws them once."""
    field = fmwc.load("crystals", device=device)
    return field, *draw(domain_named("crystals"), field, count, seed)


def outcome(count: int, seed: int, device: str, row: Row) -> dict[str, Any]:
    """Edit the crystals of a seed and return the outcome of each edit."""
    torch.set_num_threads(1)
    field, run, before = seeds_of(count, seed, device)
    channel, at, scale = row
    name = None if channel == "all" else channel
    times = times_of(run, at, name, seed)
    edited = edit(field, run, name, at=times, scale=scale, seed=seed, confidence=None, together=False)
    mean = float(times.mean()) if isinstance(times, Tensor) else times
    return {**measured(run, before, edited, channel), "time": mean}


class Outcomes:
    """The outcomes of edits, kept in a file.

    Arguments:
        path: The file.
        count: The number of edited crystals of each seed.
        device: The device that edits them.
        jobs: The number of processes.
    """

    def __init__(self, path: Path, count: int, device: str = "cpu", jobs: int = 1) -> None:
        self.path, self.count, self.device, self.jobs = path, count, torch.device(device), jobs
        self.clock = Clock(self.device)
        self.about = {"checkpoint": identity("crystals"), "count": count}
        content = json.loads(path.read_text()) if path.exists() else {"about": self.about, "outcomes": {}, "seconds": 0}
        if content["about"] != self.about:
            raise UsageError(f"{path} is of another checkpoint or count; choose another --out")
        self.outcomes, self.earlier = content["outcomes"], content["seconds"]

    def table(self, seed: int, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Edit crystals of a seed in several ways; return one line per row."""
        missing = [row for row in rows if f"{seed} {row}" not in self.outcomes]
        made = partial(outcome, self.count, seed, str(self.device))
        with ProcessPoolExecutor(self.jobs, get_context("spawn")) as pool:
            for row, found in zip(missing, pool.map(made, missing), strict=True):
                self.outcomes[f"{seed} {row}"] = found
                self.save()
                print(seed, row, shares(found), flush=True)
        return [{**dict(zip(("channel", "at", "scale"), row, strict=True)), **self._shares(seed, row)} for row in rows]

    def _shares(self, seed: int, row: Row) -> dict[str, Any]:
        outcome = self.outcomes[f"{seed} {row}"]
        return {"time": round(outcome["time"], 3), **shares(outcome)}

    def save(self, **tables: Any) -> Path:
        seconds = self.earlier + self.clock.seconds
        about = provenance(self.device, seconds, **self.about)
        content = {**tables, "provenance": about, "about": self.about, "seconds": seconds, "outcomes": self.outcomes}
        return write_json(self.path, content)


def chosen(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the line with most metastable results among those within one standard error of the most useful edits."""
    share = max(line["useful"] for line in lines) / 100
    least = 100 * (share - math.sqrt(share * (1 - share) / lines[0]["edits"]))
    return max((line for line in lines if line["useful"] >= least), key=lambda line: line["metastable"])


def compare(validation: int, fresh: int, outcomes: Outcomes) -> Path:
    """Choose times and strengths on one seed and report them on another; return the file with both tables."""
    tried = outcomes.table(validation, TRIED)
    compared: list[Row] = []
    for channel in SCALES:
        best = chosen([line for line in tried if line["channel"] == channel and line["at"] != CRITICAL])
        at, scale = best["at"], best["scale"]
        compared += [
            (channel, at, scale),
            (channel, CRITICAL, PAPER),
            (channel, RANDOM, PAPER),
            (channel, RANDOM, scale),
        ]
    reported = outcomes.table(fresh, list(dict.fromkeys(compared)))
    for title, table in ((f"validation, seed {validation}", tried), (f"report, seed {fresh}", reported)):
        print_table([{name: str(value) for name, value in line.items()} for line in table], title)
    return outcomes.save(validation=tried, report=reported, seeds=[validation, fresh])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validation", type=int, default=100, help="Seed on which times and strengths are chosen.")
    parser.add_argument("--fresh", type=int, default=200, help="Seed on which they are reported.")
    parser.add_argument("--count", type=int, default=60, help="Edited crystals of each seed.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="Processes that edit and judge, with one thread each.")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    outcomes = Outcomes(options.out / "edits.json", options.count, options.device, options.jobs)
    print(compare(options.validation, options.fresh, outcomes))


if __name__ == "__main__":
    main()
