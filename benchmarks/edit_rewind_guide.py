"""What the variance is good for on the Checkerboard: edits, rewinding and guidance, each beside its baseline.

.venv/bin/python benchmarks/edit_rewind_guide.py

The shipped field on one CPU core. The literals below were chosen by scans on seed 100, which are not kept; what is
reported is from other seeds. Evaluations are those of the network for velocities; what reading the variance costs comes
on top, and is in `seconds`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fmwc
from fmwc.confidence.editing import critical_time, edit, random_times
from fmwc.confidence.guidance import Guidance
from fmwc.confidence.rewinding import best_of, resample, rewind
from fmwc.data import checkerboard
from fmwc.files import write_json
from fmwc.metrics.points import misplacement
from fmwc.recipes.recipe import Clock, provenance

STEPS = 50
EVERY = 5  # the variance is read at every 5th step: the ranking hardly changes, and reading is most of the cost
EDITED, REPLICATES = 300, 2
EDIT_SCALE = 0.2  # a fifth of a square: smaller turns few samples anywhere, larger is a fresh start
BEFORE, SCALE = 0.2, 0.2  # seed 100: among the best of before 0.1, 0.2, 0.3, 0.5 and scale 0.1 to 0.4
GUIDES = {  # seed 100: the fewest misplaced; and what keeps the squares' edges best at less than 1 %
    "0.2 for 0.5 ≤ t < 0.9": Guidance(0.2, early=0.5, late=0.9),
    "0.5 for 0.5 ≤ t < 0.7": Guidance(0.5, early=0.5, late=0.7),
}
EXTRA = (2, 5, 10)  # evaluations a sample on top of the first run's
FIXED = (0.0, 0.2, 0.4, 0.6, 0.8)
MARGIN = 0.05  # a point this near a square's edge, from inside, is at its edge
AT_EDGE = 1 - (1 - 2 * MARGIN) ** 2  # the share of the data that is


def square(x: Tensor) -> Tensor:  # (B, 2) -> (B,)
    """The number of the square a point is in, of 16; the nearest for a point off the board."""
    cell = ((x + checkerboard.HALF) / checkerboard.CELL).floor().clamp(0, 3).long()
    return cell[:, 0] * 4 + cell[:, 1]


def quality(x: Tensor) -> dict[str, float]:
    """Misplaced %, the distance of the squares' occupancy from even, and the share at the squares' edges."""
    inside = x[checkerboard.inside(x)]
    even = torch.zeros(16)
    even[square(checkerboard.sample(1000, 0)).unique()] = 1 / 8
    share = torch.bincount(square(inside), minlength=16) / len(inside)
    place = inside - inside.floor()
    edge = ((place < MARGIN) | (place >= 1 - MARGIN)).any(1)
    return {
        "misplaced_percent": 100 * misplacement(x),
        "occupancy_total_variation": float((share - even).abs().sum() / 2),
        "at_edges": float(edge.float().mean()),
    }


def edits(field: fmwc.Field, seed: int) -> dict[str, dict[str, float]]:
    """Which share of edits ends in another square, and inside it."""
    run = fmwc.sample(field, EDITED, seed=seed, steps=STEPS, keep_states=True, transport=True)
    peak, made = critical_time(run), critical_time(run, kind="transported")
    times: dict[str, float | Tensor] = {
        "random": random_times(run, seed, REPLICATES),
        "variance": peak,
        "transported": made,
        "0.2 before variance": (peak - 0.2).clamp_min(0),
        "0.2 before transported": (made - 0.2).clamp_min(0),
        **{f"t = {t}": t for t in FIXED},
    }
    start = run.x.repeat_interleave(REPLICATES, 0)
    rows = {}
    for name, at in times.items():
        end = edit(field, run, None, at=at, scale=EDIT_SCALE, seed=seed, replicates=REPLICATES, confidence=False).x
        inside, other = checkerboard.inside(end), square(end) != square(start)
        rows[name] = {
            "turned_percent": 100 * float((inside & other).float().mean()),
            "inside_percent": 100 * float(inside.float().mean()),
            "time": float(torch.as_tensor(at, dtype=torch.float32).mean()),
        }
    return rows


def rewinding(field: fmwc.Field, seed: int, count: int) -> dict[str, dict[str, float]]:
    """Quality against evaluations a sample kept, those of the first run included."""
    rows: dict[str, dict[str, float]] = {}

    def row(name: str, make: Callable[[], tuple[Tensor, float]], before: float = 0.0) -> None:
        begin = time.perf_counter()
        x, evaluations = make()
        rows[name] = {"evaluations": evaluations, **quality(x), "seconds": before + time.perf_counter() - begin}

    def again(extra: int, **options: Any) -> tuple[Tensor, float]:
        done = resample(field, run, extra * count, before=BEFORE, scale=SCALE, seed=seed, **options)
        return done.run.x, STEPS + done.evaluations / count

    def once() -> tuple[Tensor, float]:
        doubtful = run.score().argsort(descending=True)[: count // 10]
        done = rewind(field, run, doubtful, before=BEFORE, scale=SCALE, branches=4, seed=seed)
        return done.run.x, STEPS + done.evaluations / count

    def surest(extra: int) -> tuple[Tensor, float]:
        drawn = count * (STEPS + extra) // STEPS
        return pool.take(torch.arange(drawn)).surest(count / drawn).x, STEPS * drawn / count

    def more(steps: int) -> tuple[Tensor, float]:
        return fmwc.sample(field, count, seed=seed, steps=steps, confidence=False).x, steps

    def best(steps: int) -> tuple[Tensor, float]:
        done = best_of(field, count, 2, seed=seed, steps=steps, schedule=EVERY)
        return done.run.x, done.evaluations / count

    row("plain, 50 steps", lambda: more(STEPS))
    begin = time.perf_counter()
    pool = fmwc.sample(
        field, count * (STEPS + EXTRA[-1]) // STEPS, seed=seed, steps=STEPS, schedule=EVERY, keep_states=True
    )
    first = (time.perf_counter() - begin) * count / len(pool)
    run = pool.take(torch.arange(count))
    row("rewind the doubtful tenth once, 4 branches", once, first)
    for extra in EXTRA:
        row(f"rewind the most doubtful, +{extra}", lambda: again(extra), first)  # noqa: B023
        row(f"start the most doubtful anew, +{extra}", lambda: again(extra, fresh=True), first)  # noqa: B023
        row(f"draw more and drop the most doubtful, +{extra}", lambda: surest(extra), first * (1 + extra / STEPS))  # noqa: B023
    row("60 steps", lambda: more(60))
    row("best of 2, 30 steps each", lambda: best(30))
    row("best of 2, 50 steps each", lambda: best(STEPS))
    row("100 steps", lambda: more(2 * STEPS))
    return rows


def guiding(field: fmwc.Field, seed: int, count: int) -> dict[str, dict[str, float]]:
    """The same noise with and without steering."""
    rows = {}
    for name, decoder in {"none": "map", **GUIDES}.items():
        begin = time.perf_counter()
        x = fmwc.sample(field, count, seed=seed, steps=STEPS, confidence=False, decoder=decoder).x
        rows[name] = {"evaluations": STEPS, **quality(x), "seconds": time.perf_counter() - begin}
    return rows


def gathered(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and standard deviation over seeds, of every number of every row."""

    def summary(values: list[float]) -> dict[str, float]:
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        return {"mean": statistics.mean(values), "std": spread}

    return {name: {key: summary([run[name][key] for run in runs]) for key in runs[0][name]} for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/uses/checkerboard.json"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[200, 201, 202, 203, 204])
    parser.add_argument("--count", type=int, default=1500, help="samples a seed for rewinding")
    parser.add_argument("--guided", type=int, default=800, help="samples a seed for guidance, which is slow")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    field = fmwc.load("checkerboard", device="cpu")
    clock = Clock(field.device)
    parts: dict[str, Any] = {
        "edits": gathered([edits(field, seed) for seed in arguments.seeds]),
        "rewinding": gathered([rewinding(field, seed, arguments.count) for seed in arguments.seeds]),
        "guidance": gathered([guiding(field, seed, arguments.guided) for seed in arguments.seeds]),
    }
    for part, rows in parts.items():
        print(f"\n{part}")
        for name, row in rows.items():
            said = "  ".join(f"{key} {value['mean']:.3g} ± {value['std']:.2g}" for key, value in row.items())
            print(f"  {name:45s} {said}")
    about = provenance(
        field.device,
        clock.seconds,
        seeds=arguments.seeds,
        validation_seed=100,
        samples={"edits": EDITED * REPLICATES, "rewinding": arguments.count, "guidance": arguments.guided},
        steps=STEPS,
        read_every=EVERY,
        edit_scale=EDIT_SCALE,
        rewind={"before": BEFORE, "scale": SCALE},
        guidance={name: str(guide) for name, guide in GUIDES.items()},
        at_edges_of_the_data=AT_EDGE,
    )
    write_json(arguments.out, {"provenance": about, **parts})


if __name__ == "__main__":
    main()
