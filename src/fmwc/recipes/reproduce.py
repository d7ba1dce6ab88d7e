"""Reproducing the paper's Checkerboard: train every method, read every number, one JSON file a seed and schedule.

A cell is one seed under one learning-rate schedule. Networks and cells that exist are not made again, so a run that was
stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import nn

from fmwc.baselines import (
    Dropout,
    HeteroscedasticHead,
    HeteroscedasticVariance,
    PosteriorTrace,
    StateSensitivity,
    dispersion,
    ensemble_ends,
    stochastic_ends,
)
from fmwc.errors import CheckpointError
from fmwc.files import write_bytes, write_json
from fmwc.metrics.points import misplaced, misplacement, symmetric_kl
from fmwc.metrics.ranking import auprc
from fmwc.randomness import derive
from fmwc.recipes.checkerboard import (
    SPACE,
    Checkerboard,
    finish,
    fit_dropout,
    fit_head,
    fit_joint,
    fit_network,
    fit_retrofit,
)
from fmwc.recipes.reading import decoders, headline, read_field, scores_of
from fmwc.recipes.recipe import Clock, provenance
from fmwc.sampling import noise, sample

__all__ = ["SCHEDULES", "Bench", "reproduce"]

SCHEDULES = ("constant", "cosine")
MEMBERS = 5  # of an ensemble
SHARED = (1001, 1002, 1003, 1004)  # seeds of the members that the ensembles of all reported seeds have in common
REFERENCE_DRAWS = 64  # stochastic trajectories that the transported dispersion is held against
# Readings of a plain flow, and when they are read. The posterior's trace divides the network's error by t, so it is not
# read before t = 0.1.
RIVALS: dict[str, tuple[Any, Any]] = {
    "state_sensitivity": (StateSensitivity(), 1),
    "posterior_trace": (PosteriorTrace(), tuple(0.1 + 0.02 * i for i in range(45))),
}
Say = Callable[[str], None]


class Bench:
    """Creates the bench of one cell: trains what is asked for, or loads it from an earlier run.

    Arguments:
        recipe: The sizes and the schedule.
        models: A folder for the trained networks.
    """

    def __init__(self, recipe: Checkerboard, models: Path, device: torch.device, say: Say) -> None:
        self.recipe, self.models, self.device, self.say = recipe, models, device, say

    def made(self, name: str, recipe: Checkerboard, module: nn.Module, fit: Callable[[], None]) -> None:
        """Fills `module` with the weights of an earlier run of the same recipe, or fits and keeps them."""
        seed = recipe.seed
        path = self.models / f"{name}-{recipe.decay}-{seed}.safetensors"
        identity = json.dumps({k: v for k, v in vars(recipe).items() if k != "save_every"})
        if path.exists():
            try:
                with safe_open(path, framework="pt") as file:
                    same = (file.metadata() or {}).get("recipe") == identity
                    module.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
            except Exception as error:
                raise CheckpointError(f"{path} does not fit the recipe, or is cut off; delete it") from error
            if not same:
                raise CheckpointError(f"{path} was trained by another recipe; delete it, or use another --out")
            return
        clock = Clock(self.device)
        fit()
        tensors = {k: v.detach().cpu().contiguous() for k, v in module.state_dict().items()}
        write_bytes(path, to_bytes(tensors, {"recipe": identity}))
        self.say(f"trained {name}, {self.recipe.decay}, seed {seed}: {clock.seconds:.0f} s")

    def at(self, seed: int, **changes: Any) -> Checkerboard:
        return replace(self.recipe, seed=seed, **changes)

    def flow(self, seed: int) -> nn.Module:
        recipe = self.at(seed)
        network = recipe.network().to(self.device)
        self.made("flow", recipe, network, lambda: fit_network(recipe, network))
        return network

    def retrofit(self, seed: int) -> Any:
        recipe = self.at(seed, method="retrofit")
        field = recipe.attach(self.flow(seed)).to(self.device)
        self.made("retrofit", recipe, field, lambda: fit_retrofit(recipe, field))
        return field

    def joint(self, seed: int, layers: str = "*") -> Any:
        recipe = self.at(seed, method="joint", layers=layers)
        field = recipe.attach(recipe.network()).to(self.device)
        self.made("joint" if layers == "*" else "output", recipe, field, lambda: fit_joint(recipe, field))
        return field

    def dropout(self, seed: int) -> Dropout:
        recipe = self.at(seed)
        dropout = Dropout(recipe.network().to(self.device))
        self.made("dropout", recipe, dropout, lambda: fit_dropout(recipe, dropout))
        return dropout

    def head(self, seed: int) -> HeteroscedasticHead:
        recipe = self.at(seed)
        head = HeteroscedasticHead(recipe.network(outputs=4).to(self.device))
        self.made("head", recipe, head, lambda: fit_head(recipe, head))
        return head


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
    output = bench.joint(seed, "out")
    on = sample(output, count, steps=steps, seed=fresh)
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
            made_with = {"samples": count, "steps": steps, "draws": draws, "recipe": vars(bench.recipe)}
            if path.exists():
                _check_cell(path, made_with)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is cut off or not ours; delete it and reproduce again") from error


def _check_cell(path: Path, made_with: dict[str, Any]) -> None:
    about = _read(path)["provenance"]
    changed = [k for k, v in made_with.items() if json.loads(json.dumps(v)) != about.get(k, v)]
    if changed:
        raise CheckpointError(f"{path} was made with other {', '.join(changed)}; delete it, or use another --out")


def cells(out: Path) -> list[dict[str, Any]]:
    """The cells of a results folder."""
    found = [_read(p) for p in sorted((out / "cells").glob("*.json"))]
    if not found:
        raise CheckpointError(f"{out} holds no results; run fmwc reproduce checkerboard first")
    return found
