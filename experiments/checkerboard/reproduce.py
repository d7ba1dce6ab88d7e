"""Reproduce the paper's Checkerboard: train every method and write one result file per seed and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.checkerboard.evaluate import RIVALS, auprcs, decoders, evaluate_field, main_numbers, symmetric_kl
from experiments.common.comparisons import HeteroscedasticVariance
from experiments.common.store import MEMBERS, SHARED, Networks, Say, run_task
from fmwc.baselines import dispersion, ensemble_ends, stochastic_ends
from fmwc.checkerboard.data import misplaced, misplacement
from fmwc.checkerboard.recipe import SPACE, Checkerboard
from fmwc.estimators import Linearised
from fmwc.metrics.ranking import auprc
from fmwc.provenance import Clock
from fmwc.randomness import derive
from fmwc.recipes import identity_of
from fmwc.sampling import SamplingConfig, Schedule, noise, sample

# The kind and the name of the shipped field for each learning-rate schedule: the paper's and the recommended one.
SCHEDULES = {"constant": ("joint", "checkerboard-joint"), "cosine": ("retrofit", "checkerboard")}


def _numbers(networks: Networks, seed: int, count: int, steps: int, draws: int) -> dict[str, Any]:
    """Train and evaluate every method at one seed and schedule."""
    fresh = derive(seed, "evaluation") % 2**31  # no option was tuned on this seed
    x0, say = noise(SPACE, count, fresh, networks.device), networks.say
    numbers: dict[str, Any] = {}
    with ThreadPoolExecutor(2) as pool:
        retrofit = networks.retrofit(seed)
        for name, field in (("retrofit", retrofit), ("joint", networks.joint(seed))):
            say(f"evaluating {name}")
            numbers[name] = evaluate_field(field, count, steps, fresh, draws, pool)
    plain = sample(retrofit, x0=x0, steps=steps, seed=fresh, confidence=None)
    bad = misplaced(plain.x)
    numbers["fm"] = {"misplacement": float(bad.mean()), "kl": symmetric_kl(plain.x)}

    say("evaluating output-only")
    output = networks.joint(seed, "output", layers="out")
    on = sample(output, count, steps=steps, seed=fresh, confidence=Linearised(), schedule=Schedule.every(1))
    off = sample(output, count, steps=steps, seed=fresh, confidence=None)
    kl = symmetric_kl(on.x)
    numbers["output_only"] = {**main_numbers(on, off.x), "kl": kl, "decoders": decoders(output, count, steps, fresh)}

    say("evaluating baselines")
    members = [retrofit.network, *(networks.flow(s) for s in SHARED)]
    ends = ensemble_ends(members, x0, steps=steps, space=SPACE)
    numbers["ensemble"] = {
        "misplacement": float(bad.mean()),  # the samples are those of the first member, the plain flow
        "member_misplacement": [misplacement(e) for e in ends],
        "auprc": {"dispersion": auprc(dispersion(ends).cpu(), bad)},
    }
    dropout = networks.dropout(seed)
    still = sample(dropout, x0=x0, steps=steps, confidence=None, config=SamplingConfig(space=SPACE))
    ends = stochastic_ends(dropout, x0, MEMBERS, steps=steps, seed=fresh, space=SPACE)
    numbers["dropout"] = {
        "misplacement": misplacement(still.x),
        "stochastic_misplacement": misplacement(ends[0]),
        "auprc": {"dispersion": auprc(dispersion(ends).cpu(), misplaced(still.x))},
    }
    run = sample(
        networks.head(seed),
        x0=x0,
        steps=steps,
        confidence=HeteroscedasticVariance(),
        config=SamplingConfig(space=SPACE),
    )
    numbers["head"] = {"misplacement": misplacement(run.x), "auprc": auprcs(run, misplaced(run.x))}
    for name, (estimator, schedule) in RIVALS.items():
        run = sample(retrofit, x0=x0, steps=steps, confidence=estimator, schedule=schedule)
        numbers[name] = {"auprc": auprcs(run, bad)}
    return numbers


def reproduce(
    recipe: Checkerboard,
    out: Path,
    device: torch.device,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    count: int = 10_000,
    steps: int = 50,
    draws: int = 64,
    say: Say = print,
) -> list[Path]:
    """Write the result files to `out/cells` and the networks to `out/models`; return the result files.

    For the first seed, also write the two shipped fields as checkpoints: the retrofit with cosine decay, and the joint
    field with a constant learning rate.

    Arguments:
        draws: Stochastic trajectories per sample, as the reference of the transported dispersion.
    """
    paths = []
    for seed in seeds:
        for decay, (kind, folder) in SCHEDULES.items():
            path = out / "cells" / f"{decay}-{seed}.json"
            clock = Clock(device)
            networks = Networks(replace(recipe, decay=decay), out / "models", device, say)
            identity = identity_of(networks.recipe, networks.data)
            settings = {"samples": count, "steps": steps, "draws": draws, "recipe": identity}
            task = partial(_numbers, networks, seed, count, steps, draws)
            run_task(path, task, seed, settings, device, say, {"decay": decay, "seed": seed})
            if seed == seeds[0]:
                networks.save_field(kind, seed, out / "models" / folder, clock)
            paths.append(path)
    return paths
