"""Spending evaluations on samples: more steps, dropping, rewinding, best of n and early stop, at equal evaluations.

python benchmarks/best_of.py checkerboard --count 2000 --seeds 0 1 2 --out OUT
python benchmarks/best_of.py mnist --count 2000 --seeds 100 --device cuda --out OUT
python benchmarks/best_of.py crystals --count 500 --seeds 100 --device cuda --out OUT   # writes samples
python benchmarks/best_of.py crystals --judge --out OUT                # judges them, on a machine with CHGNet

A candidate takes 50 evaluations and those of the check at its end; every method has twice as many per sample, but
plain sampling, which has 50. The columns `evaluations` are what was spent: velocities and checks. Reading the variance
comes on top where a method is ranked by it.

Early stop integrates n candidates to t_stop, keeps the one with the best signal there, and goes on with it alone:
`variance` is the standard deviation of the velocity summed over the readings so far, `last` that of the last step,
`change` how far the predicted end moved between 0.6 t_stop and t_stop, `check` the check of the predicted end.
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
from fmwc.checks import Contest, Echo, run_checks
from fmwc.metrics.points import misplaced, symmetric_kl
from fmwc.randomness import derive
from fmwc.sampling import Sampler, SamplingConfig, Schedule, Trajectory, default_estimator, noise, sample
from fmwc.state import channels, tree_map
from fmwc.uses.best_of import best_of
from fmwc.uses.rewind import resample

STEPS = 50
STOPS = (0.3, 0.5, 0.8)


@dataclass(frozen=True)
class Subject:
    """A setting: its field, what ranks its samples, and what they are judged by."""

    name: str
    field: Any
    check: Any = None  # of a finished sample, which ranks it; else the field's own score does
    every: int = 1  # steps between readings of the variance, where a method needs them
    batch: int = 16384
    bad: Callable[[Trajectory], np.ndarray] | None = None
    extra: Callable[[Trajectory], dict[str, float]] = field(default=lambda run: {})

    @property
    def cost(self) -> int:
        return STEPS + (self.check.evaluations if self.check else 0)

    @property
    def options(self) -> dict[str, Any]:
        how: dict[str, Any] = {"config": SamplingConfig(batch=self.batch), "check": self.check or False}
        return {**how, "confidence": None} if self.check else {**how, "schedule": Schedule.every(self.every)}

    @property
    def score(self) -> str | None:
        return self.check.name if self.check else None

    def conditions(self, count: int, seed: int) -> dict[str, Tensor]:
        device = self.field.device
        if self.name == "mnist":
            return {"y": torch.arange(count, device=device) % 10}
        if self.name == "crystals":
            return {"atoms": self.field.network.draw_sizes(count, derive(seed, "atoms")).to(device)}
        return {}


def subject_of(name: str, device: torch.device) -> Subject:
    own = fmwc.load(name, device=device)
    if name == "checkerboard":
        return Subject(name, own, bad=lambda run: misplaced(run.x), extra=lambda run: {"kl": symmetric_kl(run.x)})
    if name == "mnist":
        from fmwc.checkpoint import load_network
        from fmwc.metrics.images import failed

        judge = load_network("mnist-judge", device=device)
        contest = Contest.planned("y", torch.arange(10), 19)
        batch = 2048 if device.type == "cuda" else 64
        return Subject(name, own, contest, 5, batch, bad=lambda run: failed(judge, run.x, run.cond["y"]))
    return Subject(name, own, Echo((0.7, 0.8)), 5, 512 if device.type == "cuda" else 32)


# ---- methods -----------------------------------------------------------------------------------------------------


def checked(subject: Subject, x: Any, cond: dict[str, Tensor], seed: int) -> Tensor:
    parts = []
    for rows in torch.arange(len(next(iter(channels(x).values()))), device=subject.field.device).split(subject.batch):
        part, here = tree_map(lambda c: c[rows], x), {k: v[rows] for k, v in cond.items()}  # noqa: B023
        found = run_checks({"own": subject.check}, subject.field, subject.field.space, part, here, seed, int(rows[0]))
        parts.append(found["own"])
    return torch.cat(parts)


def rewound(subject: Subject, count: int, seed: int, cond: dict[str, Tensor]) -> tuple[Trajectory, float]:
    """The run with the most doubtful samples rewound, and its evaluations per sample."""
    own = subject.check.evaluations if subject.check else 0
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
    checks = 0

    def score(some: Trajectory) -> Tensor:
        nonlocal checks
        checks += len(some)
        return checked(subject, some.x, some.cond, seed)

    known: dict[int, Tensor] = {}

    def cached(some: Trajectory) -> Tensor:
        """Samples that were checked before are not checked again."""
        keys = [hash(row.tobytes()) for row in next(iter(channels(some.x).values())).cpu().numpy()]
        fresh = [i for i, key in enumerate(keys) if key not in known]
        if fresh:
            index = torch.tensor(fresh, device=subject.field.device)
            known.update(zip([keys[i] for i in fresh], score(some.take(index)), strict=True))
        return torch.stack([known[key] for key in keys])

    if not own:
        done = resample(subject.field, run, count * STEPS, seed=seed, config=SamplingConfig(batch=subject.batch))
        return done.run, STEPS + done.evaluations / count
    cached(run)
    spent, turn, few = STEPS * count, 0, max(1, count // 20) * STEPS  # velocities, rounds, and those of a round
    # A round ends within its velocities, and a branch of a step or more has one check.
    while spent + checks * own + few + few // 10 * own <= 2 * subject.cost * count:
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
    return run, (spent + checks * own) / count


@dataclass(frozen=True)
class Until:
    """The first steps of so many equal ones."""

    steps: int
    total: int = STEPS
    foreseen = True

    def next_time(self, step: int, t: Tensor, start: Tensor, moments: Any) -> Tensor:
        return torch.full_like(t, (step + 1) / self.total)


SIGNALS = ("variance", "last", "change", "check")


def stopped(
    subject: Subject, count: int, n: int, stop: float, signal: str, seed: int, cond: dict[str, Tensor]
) -> tuple[Trajectory, float]:
    """The candidate with the best signal at t_stop, integrated to its end, and the evaluations per sample."""
    own, space, k = subject.field, subject.field.space, round(stop * STEPS)
    read = (
        [*range(k - 1, -1, -subject.every)][::-1]
        if signal == "variance"
        else [k - 1]
        if signal == "last"
        else sorted({round(0.6 * k), k - 1})
    )
    estimator = default_estimator(space)
    least, best, start, spent = None, None, None, 0
    for number in range(n):
        at = derive(seed, "candidate", number) if number else seed
        x0 = noise(space, count, at, own.device, cond=cond)
        config = SamplingConfig(controller=Until(k), batch=subject.batch, keep_states=True)
        sampler = Sampler(own, config, estimator=estimator, schedule=Schedule.steps(read))
        run = sampler(x0, seed=at, cond=cond)
        spent += k
        assert run.states is not None
        if signal in ("variance", "last"):
            doubt = run.std.sum(0)
        else:
            given = space.given(run.cond)
            ends = [
                given.advance(run.states[step], tree_map(lambda c: c[row], run.mean), 1 - run.times[row])  # noqa: B023
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
    return Sampler(own, config)(best, seed=seed, cond=cond), spent + STEPS - k


def _classes(y: Tensor) -> list[Tensor]:
    return [(y == label).nonzero()[:, 0] for label in y.unique()]


def methods(subject: Subject, count: int, seed: int, stops: list[float]) -> Iterator[tuple[str, Trajectory, float]]:
    """Each method's name, its samples and its evaluations per sample that is kept."""
    own, cond, budget = subject.field, subject.conditions(count, seed), 2 * subject.cost
    plain = {
        "confidence": None,
        "check": False,
        "config": SamplingConfig(batch=subject.batch),
        "seed": seed,
        "cond": cond,
    }
    yield "plain", sample(own, count, steps=STEPS, **plain), STEPS
    yield "more steps", sample(own, count, steps=budget, **plain), budget
    twice = {name: torch.cat([value, value]) for name, value in cond.items()}
    pool = sample(own, 2 * count, steps=STEPS, seed=seed, **subject.options, cond=twice)
    yield "drop half", pool.surest(0.5, subject.score), budget
    if "y" in cond:
        keep = [rows[pool.score(subject.score)[rows].argsort()[: len(rows) // 2]] for rows in _classes(pool.cond["y"])]
        yield "drop half of each class", pool.take(torch.cat(keep)), budget
    run, spent = rewound(subject, count, seed, cond)
    yield "rewind", run, spent
    done = best_of(own, count, 2, score=subject.score, seed=seed, steps=STEPS, **subject.options, cond=cond)
    yield "best of 2", done.run, done.evaluations / count
    for stop in stops:
        for signal in SIGNALS[: 4 if subject.check else 3]:
            k = round(stop * STEPS)
            each_one = k + (subject.check.evaluations if signal == "check" else 0)
            n = (budget - (STEPS - k)) // each_one
            if n > 1:
                yield (
                    f"early stop at {stop} by {signal}, {n} candidates",
                    *stopped(subject, count, n, stop, signal, seed, cond),
                )


# ---- tables ------------------------------------------------------------------------------------------------------


def judged(folder: Path) -> list[dict[str, Any]]:
    """Judge crystals that were drawn elsewhere."""
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
        own = [row for row in rows if row["method"] == name]
        bad = [100 * row["bad"] for row in own if "bad" in row]
        more = {k: np.mean([row[k] for row in own]) for k in own[0] if k in ("kl", "unique")}
        words = f"{np.mean(bad):.2f} ± {np.std(bad, ddof=1) if len(bad) > 1 else 0:.2f}" if bad else "–"
        spent = np.mean([row["evaluations"] for row in own])
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
