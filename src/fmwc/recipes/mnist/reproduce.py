"""Reproducing the paper's MNIST columns: tasks that train a network or read numbers, each kept when it is done.

A task that is done is not done again, so a run that was stopped goes on where it was; and several processes may be
given different tasks (`--only`), to share a GPU that one small network does not fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fmwc.baselines import HeteroscedasticVariance, dispersion, ensemble_ends, stochastic_ends
from fmwc.checkpoint import load_network
from fmwc.data import fingerprint, mnist
from fmwc.errors import UsageError, pick
from fmwc.metrics.images import accuracy, activations, failed, frechet
from fmwc.randomness import derive
from fmwc.recipes.comparing import MEMBERS, SHARED, Bench, Say, join, once, piece
from fmwc.recipes.fitting import finish, identity_of
from fmwc.recipes.mnist.reading import RIVALS, Examiner, lifts, read_field, scores_of
from fmwc.recipes.mnist.recipe import JUDGE, Mnist, batch_for
from fmwc.recipes.recipe import Clock
from fmwc.sampling import Trajectory

__all__ = ["TASKS", "reproduce"]

SHOWN = 1_000  # digits of the run that pictures are made from
REPEATS = SHARED[:1]  # members of the ensemble whose retrofit is read too: how far numbers move between seeds


@dataclass(frozen=True)
class Desk:
    """What a task works with."""

    bench: Bench
    examiner: Examiner
    seed: int
    trajectories: int
    few: int
    out: Path
    say: Say


def _run(desk: Desk, start: Trajectory) -> dict[str, Any]:
    """The options of another run like one that was drawn."""
    where = {"space": desk.bench.recipe.space(), "batch": batch_for(desk.bench.device)}
    return {"steps": desk.examiner.steps, **where, **start.cond}


def _ends(desk: Desk, ends: Any, y: Any) -> dict[str, Any]:
    """How well the dispersion of all ends finds the failures among the first ones."""
    bad = failed(desk.examiner.judge, ends[0], y)
    return lifts({"dispersion": dispersion(ends)}, y, bad)


def read_retrofit(desk: Desk) -> dict[str, Any]:
    field = desk.bench.retrofit(desk.seed)
    found, _ = read_field(
        field, desk.examiner, projections=8, trajectories=desk.trajectories, few=desk.few, say=desk.say
    )
    shown = min(SHOWN, desk.examiner.count)
    desk.examiner.draw(field, shown, confidence=True, transport=True).compact().save(desk.out / "samples.safetensors")
    return found


def read_joint(desk: Desk) -> dict[str, Any]:
    field = desk.bench.joint(desk.seed)
    found, _ = read_field(field, desk.examiner, projections=8, trajectories=MEMBERS, few=desk.few, say=desk.say)
    return {**found, "sweep": desk.examiner.sweep(field, field.space)}


def read_plain(desk: Desk) -> dict[str, Any]:
    """Plain FM, what an ensemble of it disagrees on, and the floor of the distance: training images against test."""
    examiner, space = desk.examiner, desk.bench.recipe.space()
    members = [desk.bench.flow(s) for s in (desk.seed, *SHARED)]
    sweep = examiner.sweep(members[0], space)
    start = examiner.draw(members[0], space=space)
    ends = ensemble_ends(members, start.x0, **_run(desk, start))
    train, test = desk.bench.recipe.images(), examiner.test
    some = mnist.unit(train.x[: examiner.count])
    floor = frechet(activations(examiner.judge, some), activations(examiner.judge, mnist.unit(test.x)))
    return {
        **examiner.quality(start),
        "sweep": sweep,
        "floor_fid": floor,
        "judge_accuracy": accuracy(examiner.judge, mnist.unit(test.x), test.y),
        "members": [examiner.quality(replace(start, x=e)) for e in ends],
        "ensemble": _ends(desk, ends, start.cond["y"]),
    }


def read_dropout(desk: Desk) -> dict[str, Any]:
    dropout, space = desk.bench.dropout(desk.seed), desk.bench.recipe.space()
    still = desk.examiner.draw(dropout, space=space)
    ends = stochastic_ends(dropout, still.x0, MEMBERS, seed=desk.examiner.seed, **_run(desk, still))
    bad = desk.examiner.bad(still)
    return {
        **desk.examiner.quality(still),
        "stochastic": desk.examiner.quality(replace(still, x=ends[0])),
        "scores": lifts({"dispersion": dispersion(ends)}, still.cond["y"], bad),
    }


def read_head(desk: Desk) -> dict[str, Any]:
    """UA-Flow as published: both heads from scratch by their likelihood."""
    return _read_head(desk, desk.bench.head(desk.seed))


def read_variance(desk: Desk) -> dict[str, Any]:
    """UA-Flow's variance on the plain flow: its samples are FM's."""
    return _read_head(desk, desk.bench.variance(desk.seed))


def _read_head(desk: Desk, head: Any) -> dict[str, Any]:
    space = desk.bench.recipe.space()
    run = desk.examiner.draw(head, confidence=HeteroscedasticVariance(), record="total", space=space)
    return {
        **desk.examiner.quality(run),
        "samples": len(run),
        "scores": lifts(scores_of(run), run.cond["y"], desk.examiner.bad(run)),
    }


def read_rivals(desk: Desk) -> dict[str, Any]:
    flow, space = desk.bench.flow(desk.seed), desk.bench.recipe.space()
    found = {}
    for name, (reading, schedule) in RIVALS.items():
        run = desk.examiner.draw(flow, confidence=reading, schedule=schedule, space=space)
        found[name] = lifts(scores_of(run), run.cond["y"], desk.examiner.bad(run))
    return found


def read_repeats(desk: Desk) -> dict[str, Any]:
    found = {}
    for seed in REPEATS:
        run = desk.examiner.draw(desk.bench.retrofit(seed), confidence=True)
        scores = lifts(scores_of(run), run.cond["y"], desk.examiner.bad(run))
        found[str(seed)] = {**desk.examiner.quality(run), "linearised": scores}
    return found


NETWORKS = ("flow", "retrofit", "joint", "dropout", "head", "variance")
TASKS: dict[str, Callable[[Desk], dict[str, Any]]] = {
    "retrofit": read_retrofit,
    "joint": read_joint,
    "plain": read_plain,
    "dropout": read_dropout,
    "head": read_head,
    "variance": read_variance,
    "rivals": read_rivals,
    "repeats": read_repeats,
}


def _split(only: str) -> list[tuple[str, int | None]]:
    """`flow:1001,joint:0,read:joint` as (what, seed); a reading has no seed of its own."""
    found: list[tuple[str, int | None]] = []
    for text in (part.strip() for part in only.split(",")) if only else ():
        what, _, which = text.partition(":")
        if what == "read":
            pick(TASKS, which, "reading")
            found.append((which, None))
            continue
        pick(dict.fromkeys(NETWORKS), what, "network")
        if not which.isdigit():
            raise UsageError(f"--only takes network:seed or read:name, got '{text}'")
        found.append((what, int(which)))
    return found


def reproduce(
    recipe: Mnist,
    out: Path,
    device: torch.device,
    *,
    seeds: Sequence[int] = (0,),
    count: int = 10_000,
    steps: int = 50,
    draws: int = 20,
    few: int = 2_500,
    only: str = "",
    judge: str | Path = JUDGE,
    say: Say = print,
) -> list[Path]:
    """Fills `out/cells` and keeps the networks in `out/models`; returns the files of the cells that are complete.

    Arguments:
        recipe: The sizes and the schedule.
        seeds: Seeds of the networks; digits are of a seed derived from it, which nothing was chosen on.
        count, steps: Digits a reading, Euler steps.
        draws: Stochastic trajectories the transported dispersion is held against, on the first `few` digits.
        only: Tasks to do, `flow:0,read:joint`; all of them if empty.
        judge: The judge, by shipped name or folder.
    """
    chosen = _split(only)
    if count < 1 or steps < 1:
        raise UsageError(f"a reading takes at least 1 digit and 1 step, got {count} and {steps}")
    if draws < MEMBERS:
        raise UsageError(f"the dispersion is held against at least {MEMBERS} trajectories, got {draws}")
    few = min(few, count)
    eye, test = load_network(judge, device=device), recipe.images("test")
    bench = Bench(recipe, out / "models", device, say)
    sources = {"data": bench.data, "judge": fingerprint(*(p for p in eye.state_dict().values()))}
    for what, seed in chosen:
        if seed is not None:
            getattr(bench, what)(seed)
    readings = [what for what, seed in chosen if seed is None] if only else list(TASKS)
    paths = []
    for seed in seeds:
        fresh = derive(seed, "evaluation") % 2**31
        examiner = Examiner(eye, test, count, steps, fresh, few=min(500, few))
        desk = Desk(bench, examiner, seed, draws, few, out, say)
        kept = identity_of(recipe, "", ("references",))
        made_with = {"samples": count, "steps": steps, "draws": draws, "few": few, "recipe": kept, **sources}
        for name in readings:
            once(piece(out, seed, name), partial(TASKS[name], desk), seed, made_with, device, say)
        if not only:
            paths.append(join(out, "mnist", seed, TASKS))
            for kind, folder in (("retrofit", "mnist"), ("joint", "mnist-joint")):
                if seed == seeds[0] and not (out / "models" / folder / "recipe.json").exists():
                    field = getattr(bench, kind)(seed)
                    finish(bench.at(seed, method=kind), field, out / "models" / folder, Clock(device))
    return paths
