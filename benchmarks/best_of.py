"""Compare more steps, dropping, rewinding, best of n and early stopping at equal numbers of evaluations.

python -m benchmarks.best_of checkerboard --count 2000 --seeds 0 1 2 --out OUT
python -m benchmarks.best_of mnist --count 2000 --seeds 100 --device cuda --out OUT
python -m benchmarks.best_of crystals --count 500 --seeds 100 --device cuda --out OUT   # writes samples
python -m benchmarks.best_of crystals --judge --out OUT                # judges them, on a machine with CHGNet

A candidate takes 50 evaluations and its final check. Plain sampling takes 50 evaluations per sample, and every other
method twice as many as a candidate. The column `evaluations` counts velocities and checks. Methods that rank by the
variance also read it, which is not counted.

Early stopping integrates n candidates to t_stop, keeps the one with the best signal, and continues it alone. The
signals are `variance`: the standard deviation of the velocity, summed over the readings so far; `last`: that of the
last step; `change`: how far the predicted end moved between 0.6 t_stop and t_stop; `check`: the check of the predicted
end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fmwc
from experiments.checkerboard.evaluate import symmetric_kl
from fmwc.checkerboard.data import misplaced
from fmwc.checks import Contest, Echo, run_checks
from fmwc.randomness import derive
from fmwc.registry import domain_named
from fmwc.sampling import Sampler, SamplingConfig, Schedule, Trajectory, default_estimator, noise, sample
from fmwc.state import batch_size, channels, select, tree_map
from fmwc.uses.best_of import best_of
from fmwc.uses.rewind import resample

STEPS = 50
STOPS = (0.3, 0.5, 0.8)


@dataclass(frozen=True)
class Subject:
    """A domain with its field, the check that ranks its samples, and the rule that judges them."""

    name: str
    field: Any
    check: Any = None  # ranks finished samples; without one, the variance does
    every: int = 1  # steps between readings of the variance, for methods that need them
    batch: int = 16384
    bad: Callable[[Trajectory], np.ndarray] | None = None
    extra: Callable[[Trajectory], dict[str, float]] = field(default=lambda run: {})

    @property
    def cost(self) -> int:
        return STEPS + (self.check.evaluations if self.check else 0)

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"config": SamplingConfig(batch=self.batch), "check": self.check or False}
        if self.check:
            return {**options, "confidence": None}
        return {**options, "confidence": default_estimator(self.field.space), "schedule": Schedule.every(self.every)}

    @property
    def score(self) -> str:
        return self.check.name if self.check else "temporal_ratio"

    def conditions(self, count: int, seed: int) -> dict[str, Tensor]:
        cond = domain_named(self.name).conditions(self.field, count, seed=seed)
        return {name: value.to(self.field.device) for name, value in cond.items()}


def subject_of(name: str, device: torch.device) -> Subject:
    field = fmwc.load(name, device=device)
    if name == "checkerboard":
        return Subject(name, field, bad=lambda run: misplaced(run.x), extra=lambda run: {"kl": symmetric_kl(run.x)})
    if name == "mnist":
        from fmwc.checkpoint import load_network
        from fmwc.mnist.classifier import failed

        judge = load_network("mnist-judge", device=device)
        contest = Contest.planned("y", torch.arange(10), 19)
        batch = 2048 if device.type == "cuda" else 64
        return Subject(name, field, contest, 5, batch, bad=lambda run: failed(judge, run.x, run.cond["y"]))
    return Subject(name, field, Echo((0.7, 0.8)), 5, 512 if device.type == "cuda" else 32)


# ---- methods -----------------------------------------------------------------------------------------------------


def checked(subject: Subject, x: Any, cond: dict[str, Tensor], seed: int) -> Tensor:
    parts = []
    for rows in torch.arange(batch_size(x), device=subject.field.device).split(subject.batch):
        of_batch = select(x, rows), {k: v[rows] for k, v in cond.items()}, seed, int(rows[0])
        parts.append(run_checks({"check": subject.check}, subject.field, subject.field.space, *of_batch)["check"])
    return torch.cat(parts)


def rewound(subject: Subject, count: int, seed: int, cond: dict[str, Tensor]) -> tuple[Trajectory, float]:
    """Return a run with its most doubtful samples rewound, and its evaluations per sample."""
    per_check = subject.check.evaluations if subject.check else 0
    run = sample(
        subject.field,
        count,
        seed=seed,
        confidence=default_estimator(subject.field.space),
        schedule=Schedule.every(subject.every),
        check=False,
        cond=cond,
        config=SamplingConfig(keep_states=True, batch=subject.batch),
    )
    known: dict[int, Tensor] = {}  # the check of each sample
    checks = 0

    def cached(samples: Trajectory) -> Tensor:
        """Return the check of each sample, and check new samples only."""
        nonlocal checks
        keys = [hash(row.tobytes()) for row in next(iter(channels(samples.x).values())).cpu().numpy()]
        if fresh := [i for i, key in enumerate(keys) if key not in known]:
            part = samples.take(torch.tensor(fresh, device=subject.field.device))
            known.update(zip([keys[i] for i in fresh], checked(subject, part.x, part.cond, seed), strict=True))
            checks += len(fresh)
        return torch.stack([known[key] for key in keys])

    if not per_check:
        options: dict[str, Any] = {"score": subject.score, "seed": seed, "config": SamplingConfig(batch=subject.batch)}
        done = resample(subject.field, run, count * STEPS, **options)
        return done.run, STEPS + done.evaluations / count
    cached(run)
    spent, turn, few = STEPS * count, 0, max(1, count // 20) * STEPS  # velocities so far, rounds, velocities per round
    # A round takes at most `few` velocities. Each new branch takes at least one step, and one check.
    while spent + checks * per_check + few + few // 10 * per_check <= 2 * subject.cost * count:
        turn += 1
        done = resample(
            subject.field,
            run,
            few,
            share=0.1,
            score=cached,
            seed=derive(seed, "round", turn),
            config=SamplingConfig(batch=subject.batch),
        )
        run, spent = done.run, spent + done.evaluations
    return run, (spent + checks * per_check) / count


@dataclass(frozen=True)
class Until:
    """A controller of the first `steps` of `total` equal steps."""

    steps: int
    total: int = STEPS
    foreseen = True

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return torch.full_like(t, (step + 1) / self.total)


SIGNALS = ("variance", "last", "change", "check")


def stopped(
    subject: Subject, count: int, n: int, stop: float, signal: str, seed: int, cond: dict[str, Tensor]
) -> tuple[Trajectory, float]:
    """Return the candidates with the best signal at t_stop, integrated to their end, and the evaluations per sample."""
    field, space, k = subject.field, subject.field.space, round(stop * STEPS)
    steps_read = {"variance": [*range(k - 1, -1, -subject.every)][::-1], "last": [k - 1]}
    read = steps_read.get(signal, sorted({round(0.6 * k), k - 1}))
    estimator = default_estimator(space)
    least, best, start, spent = None, None, None, 0
    for number in range(n):
        at = derive(seed, "candidate", number) if number else seed
        x0 = noise(space, count, at, field.device, cond=cond)
        config = SamplingConfig(controller=Until(k), batch=subject.batch, keep_states=True)
        sampler = Sampler(field, config, estimator=estimator, schedule=Schedule.steps(read))
        run = sampler(x0, seed=at, cond=cond)
        spent += k
        assert run.states is not None
        if signal in ("variance", "last"):
            doubt = run.std.sum(0)
        else:
            present = space.given(run.cond)
            ends = [
                present.advance(run.states[step], select(run.mean, row), 1 - run.times[row])
                for row, step in enumerate(read)
            ]
            if signal == "check":
                doubt = checked(subject, ends[-1], run.cond, at)
                spent += subject.check.evaluations
            else:
                moved = [
                    c.manifold.logmap(channels(ends[0])[name], channels(ends[1])[name]).square().flatten(1).mean(1)
                    for name, c in space.channels.items()
                ]
                doubt = torch.stack(moved).clamp_min(1e-30).log().mean(0)
        if least is None:
            least, best, start = doubt, run.x, x0
            continue
        better = doubt < least
        least = torch.where(better, doubt, least)
        best, start = (
            tree_map(lambda a, b: torch.where(better.reshape(-1, *[1] * (a.ndim - 1)), b, a), *pair)  # noqa: B023
            for pair in ((best, run.x), (start, x0))
        )
    config = SamplingConfig(controller=fmwc.sampling.Uniform(STEPS - k), batch=subject.batch, start=k / STEPS)
    return Sampler(field, config)(best, seed=seed, cond=cond), spent + STEPS - k


def _classes(y: Tensor) -> list[Tensor]:
    return [(y == label).nonzero()[:, 0] for label in y.unique()]


def methods(subject: Subject, count: int, seed: int, stops: list[float]) -> Iterator[tuple[str, Trajectory, float]]:
    """Yield the name of each method, its samples, and its evaluations per kept sample."""
    field, cond, budget = subject.field, subject.conditions(count, seed), 2 * subject.cost
    options: dict[str, Any] = {"seed": seed, "cond": cond, "config": SamplingConfig(batch=subject.batch)}
    for name, steps in (("plain", STEPS), ("more steps", budget)):
        yield name, sample(field, count, steps=steps, confidence=None, check=False, **options), steps
    twice = {name: torch.cat([value, value]) for name, value in cond.items()}
    pool = sample(field, 2 * count, steps=STEPS, seed=seed, **subject.options, cond=twice)
    yield "drop half", pool.surest(0.5, subject.score), budget
    if "y" in cond:
        keep = [rows[pool.score(subject.score)[rows].argsort()[: len(rows) // 2]] for rows in _classes(pool.cond["y"])]
        yield "drop half of each class", pool.take(torch.cat(keep)), budget
    run, spent = rewound(subject, count, seed, cond)
    yield "rewind", run, spent
    done = best_of(field, count, 2, score=subject.score, seed=seed, steps=STEPS, **subject.options, cond=cond)
    yield "best of 2", done.run, done.evaluations / count
    for stop in stops:
        for signal in SIGNALS[: 4 if subject.check else 3]:
            k = round(stop * STEPS)
            per_candidate = k + (subject.check.evaluations if signal == "check" else 0)
            n = (budget - (STEPS - k)) // per_candidate
            if n > 1:
                run, spent = stopped(subject, count, n, stop, signal, seed, cond)
                yield f"early stop at {stop} by {signal}, {n} candidates", run, spent


# ---- tables ------------------------------------------------------------------------------------------------------


def judged(folder: Path) -> list[dict[str, Any]]:
    """Judge crystals that were drawn on another machine."""
    from fmwc.crystals import judge
    from fmwc.crystals.structures import crystals_of

    rows = json.loads((folder / "crystals.json").read_text())
    for row in rows:
        run = Trajectory.load(folder / row["file"])
        found = judge(crystals_of(run))
        row["bad"] = float((~found.good).mean())
        row["unique"] = float(np.mean(found["unique"]))
        print(row["method"], row["bad"], row["unique"], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | evaluations | failed, % | |", "|---|---:|---:|---|"]
    for name in dict.fromkeys(row["method"] for row in rows):
        group = [row for row in rows if row["method"] == name]
        bad = [100 * row["bad"] for row in group if "bad" in row]
        more = {k: np.mean([row[k] for row in group]) for k in group[0] if k in ("kl", "unique")}
        words = f"{np.mean(bad):.2f} ± {np.std(bad, ddof=1) if len(bad) > 1 else 0:.2f}" if bad else "–"
        spent = np.mean([row["evaluations"] for row in group])
        lines.append(f"| {name} | {spent:.0f} | {words} | {', '.join(f'{k} {v:.4f}' for k, v in more.items())} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=("checkerboard", "mnist", "crystals"))
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--stops", type=float, nargs="*", default=list(STOPS))
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.judge:
        rows = judged(args.out)
    else:
        subject, rows = subject_of(args.setting, torch.device(args.device)), []
        for seed in args.seeds:
            began = time.perf_counter()
            for number, (name, run, spent) in enumerate(methods(subject, args.count, seed, args.stops)):
                seconds = time.perf_counter() - began
                row = {"setting": args.setting, "seed": seed, "method": name, "evaluations": spent, "seconds": seconds}
                if subject.bad:
                    row |= {"bad": float(subject.bad(run).mean()), **subject.extra(run)}
                else:
                    row["file"] = f"{args.setting}-{seed}-{number}.safetensors"
                    run.scored("echo").to("cpu").save(args.out / row["file"])
                rows.append(row)
                print(f"{seed}: {name}: {spent:.1f} evaluations, {seconds:.1f} s, {row.get('bad', '')}", flush=True)
                began = time.perf_counter()
    (args.out / f"{args.setting}.json").write_text(json.dumps(rows, indent=1))
    (args.out / f"{args.setting}.md").write_text(table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
