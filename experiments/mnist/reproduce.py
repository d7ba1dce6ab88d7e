"""Reproduce the paper's MNIST columns, with separate tasks that train a network or compute numbers.

Each task writes one file. Several processes can share a GPU by running different tasks (`--only`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.common.comparisons import HeteroscedasticVariance
from experiments.common.store import MEMBERS, SHARED, Networks, Say, join_results, parse_tasks, result_file, run_task
from experiments.mnist.evaluate import RIVALS, Examiner, evaluate_field, frechet
from fmwc.baselines import dispersion, ensemble_ends, stochastic_ends
from fmwc.checkpoint import load_network
from fmwc.data.arrays import fingerprint
from fmwc.errors import UsageError
from fmwc.mnist import data as mnist
from fmwc.mnist.classifier import accuracy, activations
from fmwc.mnist.recipe import JUDGE, Mnist, batch_for
from fmwc.randomness import derive
from fmwc.recipes import identity_of
from fmwc.sampling import AsReference, SamplingConfig, Trajectory

SHOWN = 1_000  # number of digits in the run used for figures
REPEATS = SHARED[:1]  # ensemble seeds whose retrofit is also evaluated, to show the variation between seeds


@dataclass(frozen=True)
class Context:
    """The settings of a task."""

    networks: Networks
    examiner: Examiner
    seed: int
    trajectories: int
    few: int
    out: Path

    @property
    def space(self) -> Any:
        return self.networks.recipe.space()

    def like(self, run: Trajectory) -> dict[str, Any]:
        """Return the options for another run with the same conditions."""
        config = SamplingConfig(space=self.space, batch=batch_for(self.networks.device))
        return {"steps": self.examiner.steps, "cond": run.cond, "config": config}

    def field(self, kind: str, trajectories: int) -> tuple[Any, dict[str, Any]]:
        """Return a field and its numbers."""
        field = getattr(self.networks, kind)(self.seed)
        say = self.networks.say
        return field, evaluate_field(field, self.examiner, trajectories=trajectories, few=self.few, say=say)


def read_retrofit(context: Context) -> dict[str, Any]:
    """Evaluate FM + retrofit, and write the samples used for figures."""
    field, numbers = context.field("retrofit", context.trajectories)
    shown = context.examiner.draw(field, min(SHOWN, context.examiner.count), confidence=AsReference(), transport=True)
    shown.compact().save(context.out / "samples.safetensors")
    return numbers


def read_joint(context: Context) -> dict[str, Any]:
    """Evaluate FMwC, trained jointly."""
    field, numbers = context.field("joint", MEMBERS)
    return {**numbers, "sweep": context.examiner.sweep(field, field.space)}


def read_plain(context: Context) -> dict[str, Any]:
    """Evaluate plain FM and an ensemble of it, and compute the FID of training images as the best possible FID."""
    examiner, space = context.examiner, context.space
    members = [context.networks.flow(s) for s in (context.seed, *SHARED)]
    sweep = examiner.sweep(members[0], space)
    start = examiner.draw(members[0], config=SamplingConfig(space=space))
    ends = ensemble_ends(members, start.x0, **context.like(start))
    test, train = mnist.unit(examiner.test.x), mnist.unit(context.networks.recipe.images().x[: examiner.count])
    return {
        **examiner.quality(start),
        "sweep": sweep,
        "floor_fid": frechet(activations(examiner.classifier, train), activations(examiner.classifier, test)),
        "judge_accuracy": accuracy(examiner.classifier, test, examiner.test.y),
        "members": [examiner.quality(replace(start, x=e)) for e in ends],
        "ensemble": examiner.lifts(replace(start, x=ends[0]), {"dispersion": dispersion(ends)}),
    }


def read_dropout(context: Context) -> dict[str, Any]:
    """Evaluate MC-dropout."""
    examiner, dropout = context.examiner, context.networks.dropout(context.seed)
    still = examiner.draw(dropout, config=SamplingConfig(space=context.space))
    ends = stochastic_ends(dropout, still.x0, MEMBERS, seed=examiner.seed, **context.like(still))
    return {
        **examiner.quality(still),
        "stochastic": examiner.quality(replace(still, x=ends[0])),
        "scores": examiner.lifts(still, {"dispersion": dispersion(ends)}),
    }


def read_head(context: Context, kind: str) -> dict[str, Any]:
    """Evaluate UA-Flow as published (`head`), or its variance head on the frozen plain flow (`variance`)."""
    head = getattr(context.networks, kind)(context.seed)
    config = SamplingConfig(space=context.space)
    run = context.examiner.draw(head, confidence=HeteroscedasticVariance(), config=config)
    return {**context.examiner.quality(run), "samples": len(run), "scores": context.examiner.lifts(run)}


def read_rivals(context: Context) -> dict[str, Any]:
    """Evaluate estimators that need no noise model."""
    flow, numbers = context.networks.flow(context.seed), {}
    for name, (estimator, schedule) in RIVALS.items():
        run = context.examiner.draw(
            flow, confidence=estimator, schedule=schedule, config=SamplingConfig(space=context.space)
        )
        numbers[name] = context.examiner.lifts(run)
    return numbers


def read_repeats(context: Context) -> dict[str, Any]:
    """Evaluate FM + retrofit with other seeds of the flow."""
    numbers = {}
    for seed in REPEATS:
        run = context.examiner.draw(context.networks.retrofit(seed), confidence=AsReference())
        numbers[str(seed)] = {**context.examiner.quality(run), "linearised": context.examiner.lifts(run)}
    return numbers


NETWORKS = ("flow", "retrofit", "joint", "dropout", "head", "variance")
TASKS: dict[str, Callable[[Context], dict[str, Any]]] = {
    "retrofit": read_retrofit,
    "joint": read_joint,
    "plain": read_plain,
    "dropout": read_dropout,
    "head": partial(read_head, kind="head"),
    "variance": partial(read_head, kind="variance"),
    "rivals": read_rivals,
    "repeats": read_repeats,
}


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
    """Write the result files to `out/cells` and the networks to `out/models`; return the complete result files.

    Arguments:
        recipe: The sizes and the schedule.
        seeds: Seeds of the networks. Seeds of the digits are derived from them; no option was tuned on them.
        count, steps: Digits per evaluation, Euler steps.
        draws: Stochastic trajectories per sample, as the reference of the transported dispersion.
        few: Digits for this comparison.
        only: Tasks to run, such as `flow:0,read:joint`; all if empty.
        judge: The judge, by shipped name or folder.
    """
    chosen = parse_tasks(only, {"read": TASKS}, NETWORKS)
    if count < 1 or steps < 1:
        raise UsageError(f"count and steps must be at least 1, got {count} and {steps}")
    if draws < MEMBERS:
        raise UsageError(f"draws must be at least {MEMBERS}, got {draws}")
    few = min(few, count)
    classifier, test = load_network(judge, device=device), recipe.images("test")
    networks = Networks(recipe, out / "models", device, say)
    sources = {"data": networks.data, "judge": fingerprint(*classifier.state_dict().values())}
    for verb, name in chosen:
        if verb != "read":
            getattr(networks, verb)(int(name))
    paths = []
    for seed in seeds:
        fresh = derive(seed, "evaluation") % 2**31
        examiner = Examiner(classifier, test, count, steps, fresh, few=min(500, few))
        context = Context(networks, examiner, seed, draws, few, out)
        kept = identity_of(recipe, "", ("references",))
        settings = {"samples": count, "steps": steps, "draws": draws, "few": few, "recipe": kept, **sources}
        for name in [name for verb, name in chosen if verb == "read"] if only else TASKS:
            run_task(result_file(out, seed, name), partial(TASKS[name], context), seed, settings, device, say)
        if not only:
            paths.append(join_results(out, "mnist", seed, TASKS))
            if seed == seeds[0]:
                networks.save_field("retrofit", seed, out / "models" / "mnist")
                networks.save_field("joint", seed, out / "models" / "mnist-joint")
    return paths
