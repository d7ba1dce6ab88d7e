"""Reproducing the paper's crystal columns: tasks that train, draw or read, each kept when it is done.

A task that is done is not done again, so a run that was stopped goes on where it was. Training and drawing take a GPU;
judging takes pymatgen and an energy model: with `--only` they are done where they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fmwc.errors import CheckpointError, UsageError, pick
from fmwc.files import write_bytes, write_json, write_text
from fmwc.metrics.crystals import Judgement
from fmwc.metrics.crystals.table import csv_text
from fmwc.propagate import Diagonal, Linearised
from fmwc.randomness import derive
from fmwc.readers import anything, read_json, read_safetensors
from fmwc.recipes.comparing import Bench, Say, join, once, piece, read_piece
from fmwc.recipes.crystals.drawing import KS, draw_diagonal, draw_dispersion, draw_linearised, flops, run_batch, sweep
from fmwc.recipes.crystals.reading import (
    good_of,
    heads_of,
    hutchinson_rows,
    judged,
    lift_of,
    lifts,
    quality_of,
    read_run,
    scores_of,
    thinned,
)
from fmwc.recipes.crystals.recipe import EVERY, SCORE, Mp20
from fmwc.recipes.fitting import finish, identity_of
from fmwc.recipes.recipe import Clock
from fmwc.sampling import Trajectory

__all__ = ["DRAWS", "READINGS", "SAMPLERS", "reproduce"]

ESTIMATORS: dict[str, Any] = {"linearised": Linearised(16), "diagonal": Diagonal()}
SAMPLERS = (
    (20, 20.0),
    (50, 0.0),
    (50, 3.0),
    (50, 80.0),
    (100, 20.0),
    (200, 20.0),
)  # steps and anti-annealing, beside the recipe's own
FEW = 200  # crystals where a reading takes a thousand backward passes


@dataclass(frozen=True)
class Desk:
    """What a task works with."""

    bench: Bench
    seed: int
    count: int
    draws: int
    out: Path
    calculator: str
    few: int = FEW
    ks: tuple[int, ...] = KS

    @property
    def recipe(self) -> Mp20:
        return self.bench.at(self.seed)

    @property
    def fresh(self) -> int:
        """A seed that nothing was chosen on."""
        return derive(self.seed, "evaluation") % 2**31

    def file(self, name: str) -> Path:
        return self.out / "draws" / f"{name}-{self.seed}.safetensors"

    def run(self, name: str) -> Trajectory:
        return Trajectory.load(self.file(name))


# ---- drawing ------------------------------------------------------------------------------------------------------


def _draw_field(desk: Desk, kind: str) -> dict[str, Any]:
    field = getattr(desk.bench, kind)(desk.seed)
    run = draw_linearised(desk.recipe, field, desk.count, desk.fresh)
    # In the same batches: sums in another order round otherwise. A GPU's sums have no order at all, so what confidence
    # changes is held against what drawing the plain flow twice does.
    options = {"confidence": False, "batch": run_batch(field.device)}
    plain, twice = (desk.recipe.draw(field.network, desk.count, desk.fresh, **options) for _ in range(2))
    apart, anyway = (
        max(float((a.x[name] - b.x[name]).abs().max()) for name in a.x) for a, b in ((run, plain), (plain, twice))
    )
    run.save(desk.file(kind))
    draw_diagonal(desk.recipe, field, desk.count, desk.fresh).save(desk.file(f"{kind}-diagonal"))
    spread = {"dispersion": draw_dispersion(desk.recipe, field, run, desk.draws).cpu()}
    write_bytes(desk.file(f"{kind}-dispersion"), save(spread))
    trained = desk.bench.trained("joint" if kind == "joint" else "flow", desk.seed)
    return {"trained": trained, "bit_for_bit": apart == 0, "largest_difference": apart, "plain_twice": anyway}


def draw_retrofit(desk: Desk) -> dict[str, Any]:
    return _draw_field(desk, "retrofit")


def draw_joint(desk: Desk) -> dict[str, Any]:
    return _draw_field(desk, "joint")


def draw_sweep(desk: Desk) -> None:
    """Divergences and variances at the same states, and what each costs."""
    field = desk.bench.retrofit(desk.seed)
    found = sweep(desk.recipe, field, desk.few, desk.fresh, ESTIMATORS, desk.ks)
    found["atoms"] = field.network.draw_sizes(desk.few, derive(desk.fresh, "atoms")).float()
    write_bytes(desk.file("sweep"), save({k: v.contiguous() for k, v in found.items()}))
    read = {**ESTIMATORS, "linearised, 1 probe a channel": Linearised(1)}
    counted = flops(desk.recipe, field, read, min(32, desk.few))
    write_json(desk.file("sweep").with_suffix(".json"), counted)


def draw_samplers(desk: Desk) -> None:
    """The same flow followed in other ways: more or fewer steps, more or less anti-annealing."""
    field = desk.bench.retrofit(desk.seed)
    for steps, anneal in SAMPLERS:
        recipe = replace(desk.recipe, steps=steps, anneal=anneal)
        every = max(1, steps // 50)
        run = draw_linearised(recipe, field, min(desk.count, 1_000), desk.fresh, schedule=every)
        run.save(desk.file(f"sampler-{steps}-{anneal:g}"))


DRAWS: dict[str, Callable[[Desk], Any]] = {
    "retrofit": draw_retrofit,
    "joint": draw_joint,
    "sweep": draw_sweep,
    "samplers": draw_samplers,
}


# ---- reading ------------------------------------------------------------------------------------------------------


def _judged(desk: Desk, name: str, run: Trajectory) -> Judgement:
    found = judged(run, desk.recipe.crystals(), desk.calculator)
    write_text(desk.out / "judged" / f"{name}-{desk.seed}.csv", csv_text(found.columns))
    return found


def _read_field(desk: Desk, kind: str) -> dict[str, Any]:
    run, diagonal = desk.run(kind), desk.run(f"{kind}-diagonal")
    judgement = _judged(desk, kind, run)
    drawn = read_piece(piece(desk.out, desk.seed, f"draw-{kind}"))["numbers"]
    found: dict[str, Any] = {**read_run(run, judgement), **drawn}
    good = good_of(judgement)
    if "own" not in found:  # nothing to tell apart
        return found
    spread = read_safetensors(desk.file(f"{kind}-dispersion"), error=CheckpointError)[0]["dispersion"]
    return {
        **found,
        "every_5th": lifts(scores_of(thinned(run, EVERY)), good),
        "diagonal": lifts(scores_of(diagonal), good),
        "dispersion": lift_of(spread, good),
        "heads_diagonal": heads_of(diagonal, good, run.score(SCORE)),
    }


def read_retrofit(desk: Desk) -> dict[str, Any]:
    found = _read_field(desk, "retrofit")
    found["sampler"] = {}
    for steps, anneal in SAMPLERS:
        run = desk.run(f"sampler-{steps}-{anneal:g}")
        judgement = _judged(desk, f"sampler-{steps}-{anneal:g}", run)
        row: dict[str, Any] = {"quality": quality_of(judgement)}
        if 0 < (good := good_of(judgement)).sum() < len(good):
            row["own"] = lift_of(run.score(SCORE), good)
        found["sampler"][f"{steps} steps, anneal {anneal:g}"] = row
    return found


def read_joint(desk: Desk) -> dict[str, Any]:
    return _read_field(desk, "joint")


def read_hutchinson(desk: Desk) -> list[dict[str, Any]]:
    found: dict[str, Tensor] = read_safetensors(desk.file("sweep"), error=CheckpointError)[0]
    units = {name: channel.weight for name, channel in desk.recipe.space().channels.items()}
    return hutchinson_rows(
        found, read_json(desk.file("sweep").with_suffix(".json"), anything, error=CheckpointError), units
    )


READINGS: dict[str, Callable[[Desk], Any]] = {
    "retrofit": read_retrofit,
    "joint": read_joint,
    "hutchinson": read_hutchinson,
}
NETWORKS = ("flow", "retrofit", "joint")


def _split(only: str) -> list[tuple[str, str]]:
    """`flow:0,draw:joint,read:joint` as (verb, what)."""
    found = []
    for text in (part.strip() for part in only.split(",")) if only else ():
        verb, _, what = text.partition(":")
        if verb in ("draw", "read"):
            pick(DRAWS if verb == "draw" else READINGS, what, "drawing" if verb == "draw" else "reading")
        else:
            pick(dict.fromkeys(NETWORKS), verb, "network")
            if not what.isdigit():
                raise UsageError(f"--only takes network:seed, draw:name or read:name, got '{text}'")
        found.append((verb, what))
    return found


def reproduce(
    recipe: Mp20,
    out: Path,
    device: torch.device,
    *,
    seeds: Sequence[int] = (0,),
    count: int = 2_500,
    draws: int = 5,
    only: str = "",
    calculator: str = "chgnet",
    few: int = FEW,
    ks: tuple[int, ...] = KS,
    say: Say = print,
) -> list[Path]:
    """Fills `out/cells` and keeps networks in `out/models` and runs in `out/draws`; returns the complete cells.

    Arguments:
        recipe: The sizes and the schedule.
        seeds: Seeds of the networks; crystals are of a seed derived from it, which nothing was chosen on.
        count: Crystals a reading.
        draws: Stochastic trajectories of the dispersion.
        only: Tasks to do, `flow:0,draw:retrofit`; all of them if empty.
        calculator: The energy model that judges.
        few, ks: Crystals and Hutchinson probes of the sweep.
    """
    chosen = _split(only)
    if count < 1 or draws < 2:
        raise UsageError(f"a reading takes at least 1 crystal and 2 trajectories, got {count} and {draws}")
    bench = Bench(recipe, out / "models", device, say)
    for verb, what in chosen:
        if verb in NETWORKS:
            getattr(bench, verb)(int(what))
    paths = []
    for seed in seeds:
        desk = Desk(bench, seed, count, draws, out, calculator, min(few, count), ks)
        kept = identity_of(recipe, "", ("references",))
        made_with = {"samples": count, "draws": draws, "few": desk.few, "recipe": kept, "data": bench.data}
        for name in [w for v, w in chosen if v == "draw"] if only else list(DRAWS):
            once(piece(out, seed, f"draw-{name}"), partial(DRAWS[name], desk), seed, made_with, device, say)
        for name in [w for v, w in chosen if v == "read"] if only else list(READINGS):
            judged_with = {**made_with, "calculator": calculator}
            once(piece(out, seed, name), partial(READINGS[name], desk), seed, judged_with, device, say)
        if any(piece(out, seed, name).exists() for name in READINGS):
            paths.append(join(out, "crystals", seed, READINGS, [f"draw-{name}" for name in DRAWS]))
        if not only:
            for kind, folder in (("retrofit", "crystals"), ("joint", "crystals-joint")):
                if seed == seeds[0] and not (out / "models" / folder / "recipe.json").exists():
                    field = getattr(bench, kind)(seed)
                    finish(bench.at(seed, method=kind), field, out / "models" / folder, Clock(device))
    return paths
