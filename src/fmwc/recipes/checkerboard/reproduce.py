"""Reproducing the paper's Checkerboard: train every method, read every number, one JSON file a seed and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fmwc.baselines import (
    HeteroscedasticVariance,
    PosteriorTrace,
    StateSensitivity,
    dispersion,
    ensemble_ends,
    stochastic_ends,
)
from fmwc.files import write_json
from fmwc.metrics.points import misplaced, misplacement, symmetric_kl
from fmwc.metrics.ranking import auprc
from fmwc.randomness import derive
from fmwc.recipes.checkerboard.reading import decoders, headline, read_field, scores_of
from fmwc.recipes.checkerboard.recipe import SPACE, Checkerboard
from fmwc.recipes.comparing import MEMBERS, SHARED, Bench, Say, check_cell
from fmwc.recipes.fitting import finish, identity_of
from fmwc.recipes.recipe import Clock, provenance
from fmwc.sampling import noise, sample

__all__ = ["SCHEDULES", "reproduce"]

SCHEDULES = ("constant", "cosine")
REFERENCE_DRAWS = 64  # stochastic trajectories that the transported dispersion is held against
# Readings of a plain flow, and when they are read. The posterior's trace divides the network's error by t, so it is not
# read before t = 0.1.
RIVALS: dict[str, tuple[Any, Any]] = {
    "state_sensitivity": (StateSensitivity(), 1),
    "posterior_trace": (PosteriorTrace(), tuple(0.1 + 0.02 * i for i in range(45))),
}


def cell(bench: Bench, seed: int, count: int, steps: int, draws: int, say: Say) -> dict[str, Any]:
    """Trains and reads every method at one seed and schedule."""
    fresh = derive(seed, "evaluation") % 2**31  # a seed that nothing was chosen on
    x0 = noise(SPACE, count, fresh, bench.device)
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(2) as pool:
        retrofit = bench.retrofit(seed)
        for name, field in (("retrofit", retrofit), ("joint", bench.joint(seed))):
            say(f"reading {name}")
            found[name] = read_field(field, count, steps, fresh, draws, pool)
    plain = sample(retrofit, x0=x0, steps=steps, seed=fresh, confidence=False)
    bad = misplaced(plain.x)
    found["fm"] = {"misplacement": float(bad.mean()), "kl": symmetric_kl(plain.x)}

    say("reading output-only")
    output = bench.joint(seed, "output", layers="out")
    on = sample(output, count, steps=steps, seed=fresh, confidence="linearised", schedule=1)
    off = sample(output, count, steps=steps, seed=fresh, confidence=False)
    found["output_only"] = {
        **headline(output, on, off.x),
        "kl": symmetric_kl(on.x),
        "decoders": decoders(output, count, steps, fresh),
    }

    say("reading baselines")
    members = [retrofit.network, *(bench.flow(s) for s in SHARED)]
    ends = ensemble_ends(members, x0, steps=steps, space=SPACE)
    found["ensemble"] = {
        "misplacement": float(bad.mean()),  # the sample is the first member's: the plain flow's
        "member_misplacement": [misplacement(e) for e in ends],
        "auprc": {"dispersion": auprc(dispersion(ends).cpu(), bad)},
    }
    dropout = bench.dropout(seed)
    still = sample(dropout, x0=x0, steps=steps, confidence=False, space=SPACE)
    ends = stochastic_ends(dropout, x0, MEMBERS, steps=steps, seed=fresh, space=SPACE)
    found["dropout"] = {
        "misplacement": misplacement(still.x),
        "stochastic_misplacement": misplacement(ends[0]),
        "auprc": {"dispersion": auprc(dispersion(ends).cpu(), misplaced(still.x))},
    }
    head = bench.head(seed)
    run = sample(head, x0=x0, steps=steps, confidence=HeteroscedasticVariance(), space=SPACE)
    found["head"] = {"misplacement": misplacement(run.x), "auprc": scores_of(run, misplaced(run.x))}
    for name, (reading, schedule) in RIVALS.items():
        run = sample(retrofit, x0=x0, steps=steps, confidence=reading, schedule=schedule)
        found[name] = {"auprc": scores_of(run, bad)}
    return found


def reproduce(
    recipe: Checkerboard,
    out: Path,
    device: torch.device,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    count: int = 10_000,
    steps: int = 50,
    draws: int = REFERENCE_DRAWS,
    models: Path | None = None,
    say: Say = print,
) -> list[Path]:
    """Fills `out/cells` and keeps the networks in `models`; returns the cells' files.

    The first seed's recommended and joint fields are written as checkpoints beside the networks.
    """
    models = models or out / "models"
    paths = []
    for seed in seeds:
        for decay in SCHEDULES:
            path = out / "cells" / f"{decay}-{seed}.json"
            paths.append(path)
            bench = Bench(replace(recipe, decay=decay), models, device, say)
            made_with = {
                "samples": count,
                "steps": steps,
                "draws": draws,
                "recipe": identity_of(bench.recipe, bench.data),
            }
            if path.exists():
                check_cell(path, made_with)
                say(f"{path.name} is there already")
                continue
            clock = Clock(device)
            numbers = cell(bench, seed, count, steps, draws, say)
            if seed == seeds[0]:
                _ship(bench, seed, models, clock)
            about = provenance(device, clock.seconds, seeds=[seed], **made_with)
            write_json(path, {"decay": decay, "seed": seed, "provenance": about, "numbers": numbers})
            say(f"wrote {path.name} after {clock.seconds:.0f} s")
    return paths


def _ship(bench: Bench, seed: int, models: Path, clock: Clock) -> None:
    """Writes the fields that ship: the recommended one, and the paper's under its own schedule."""
    if bench.recipe.decay == "cosine":
        finish(bench.at(seed, method="retrofit"), bench.retrofit(seed), models / "checkerboard", clock)
    else:
        finish(bench.at(seed, method="joint"), bench.joint(seed), models / "checkerboard-joint", clock)
