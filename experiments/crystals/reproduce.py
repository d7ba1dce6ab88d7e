"""Reproduce the paper's crystal columns with tasks that train, sample or evaluate. Finished tasks are not repeated.

Training and sampling need a GPU; judging needs pymatgen and an energy model. `--only` selects the tasks to run, so that
they can run on different machines.
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

from experiments.common.evaluation import thinned
from experiments.common.store import Networks, Say, join_results, parse_tasks, read_result, result_file, run_task
from experiments.crystals.evaluate import (
    KS,
    draw_diagonal,
    draw_dispersion,
    draw_linearised,
    evaluate_run,
    flops,
    heads,
    hutchinson_rows,
    lift_of,
    lifts,
    quality_of,
    run_batch,
    sweep,
)
from experiments.crystals.screening import complete, cores, screen, tables_of_structures
from experiments.crystals.screening_tables import write_figures
from fmwc.crystals import Judgement, judge, mp20
from fmwc.crystals.recipe import EVERY, SCORE, Mp20
from fmwc.crystals.structures import crystals_of
from fmwc.errors import CheckpointError, UsageError
from fmwc.estimators import Diagonal, Linearised
from fmwc.files import write_bytes, write_json, write_text
from fmwc.randomness import derive
from fmwc.readers import anything, read_json, read_safetensors
from fmwc.recipes import identity_of
from fmwc.report.table import Table
from fmwc.sampling import SamplingConfig, Schedule, Trajectory

__all__ = ["DRAWS", "READINGS", "SAMPLERS", "reproduce"]

ESTIMATORS: dict[str, Any] = {"linearised": Linearised(16), "diagonal": Diagonal()}
# Numbers of steps and anti-annealing, in addition to those of the recipe.
SAMPLERS = ((20, 80.0), (50, 0.0), (50, 3.0), (50, 20.0), (100, 80.0), (200, 80.0))
SCREENED, RELAXED = 4, 2 / 5  # crystals that are screened and relaxed, as multiples of the count: 10,000 and 1,000
RELAX_STEPS = 200
FEW = 200  # crystals of the sweep, which takes a thousand backward passes per step


@dataclass(frozen=True)
class Context:
    """The arguments of a task."""

    networks: Networks
    seed: int
    count: int
    draws: int
    out: Path
    calculator: str
    few: int = FEW
    ks: tuple[int, ...] = KS

    @property
    def recipe(self) -> Mp20:
        return self.networks.at(self.seed)

    @property
    def fresh(self) -> int:
        """The seed of the evaluation, which was not used for any choice."""
        return derive(self.seed, "evaluation") % 2**31

    def file(self, name: str) -> Path:
        return self.out / "draws" / f"{name}-{self.seed}.safetensors"

    @property
    def screening(self) -> Path:
        """The folder of the crystals that are screened."""
        return self.out / f"screening-{self.seed}"

    def run(self, name: str) -> Trajectory:
        return Trajectory.load(self.file(name))

    def judged(self, name: str, run: Trajectory) -> Judgement:
        """Judge a run and write the judgement as a table."""
        known = mp20.load_all(self.recipe.data or None)
        judgement = judge(crystals_of(run), known=known, calculator=self.calculator)
        write_text(self.out / "judged" / f"{name}-{self.seed}.csv", Table.from_columns(judgement.columns).csv())
        return judgement


def draw_field(context: Context, kind: str) -> dict[str, Any]:
    """Draw the runs of a field and check that confidence does not change the samples."""
    recipe, count, fresh = context.recipe, context.count, context.fresh
    field = getattr(context.networks, kind)(context.seed)
    run = draw_linearised(recipe, field, count, fresh)
    # Use the same batches, because sums in another order round differently. On a GPU, the order of sums is not fixed,
    # so the difference is recorded together with that of two runs of the plain flow.
    options = {"confidence": None, "config": SamplingConfig(batch=run_batch(field.device))}
    plain, twice = (recipe.draw(field.network, count, fresh, **options) for _ in range(2))
    difference, of_plain = (
        max(float((a.x[name] - b.x[name]).abs().max()) for name in a.x) for a, b in ((run, plain), (plain, twice))
    )
    run.save(context.file(kind))
    draw_diagonal(recipe, field, count, fresh).save(context.file(f"{kind}-diagonal"))
    spread = {"dispersion": draw_dispersion(recipe, field, run, context.draws).cpu()}
    write_bytes(context.file(f"{kind}-dispersion"), save(spread))
    trained = context.networks.steps("joint" if kind == "joint" else "flow", context.seed)
    check = {"bit_for_bit": difference == 0, "largest_difference": difference, "plain_twice": of_plain}
    return {"trained": trained, **check}


def draw_sweep(context: Context) -> None:
    """Compute divergences and variances at the same states, and their costs."""
    field, few = context.networks.retrofit(context.seed), context.few
    values = sweep(context.recipe, field, few, context.fresh, ESTIMATORS, context.ks)
    values["atoms"] = field.network.draw_sizes(few, derive(context.fresh, "atoms")).float()
    write_bytes(context.file("sweep"), save({k: v.contiguous() for k, v in values.items()}))
    estimators = {**ESTIMATORS, "linearised, 1 probe a channel": Linearised(1)}
    counted = flops(context.recipe, field, estimators, min(32, few))
    write_json(context.file("sweep").with_suffix(".json"), counted)


def draw_samplers(context: Context) -> None:
    """Sample the same flow with other numbers of steps and other strengths of anti-annealing."""
    field = context.networks.retrofit(context.seed)
    for steps, anneal in SAMPLERS:
        recipe = replace(context.recipe, steps=steps, anneal=anneal)
        count, every = min(context.count, 1_000), max(1, steps // 50)
        run = draw_linearised(recipe, field, count, context.fresh, schedule=Schedule.every(every))
        run.save(context.file(f"sampler-{steps}-{anneal:g}"))


def draw_screening(context: Context) -> None:
    """Sample more crystals for the statistics, with the variance at every fifth step."""
    field, count = context.networks.retrofit(context.seed), SCREENED * context.count
    run = draw_linearised(context.recipe, field, count, context.fresh, schedule=Schedule.every(EVERY))
    replace(run, default_score=SCORE).save(context.screening / "samples.safetensors")


def read_field(context: Context, kind: str) -> dict[str, Any]:
    """Evaluate the runs of a field."""
    run, diagonal = context.run(kind), context.run(f"{kind}-diagonal")
    judgement = context.judged(kind, run)
    drawn = read_result(result_file(context.out, context.seed, f"draw-{kind}"))["numbers"]
    numbers: dict[str, Any] = {**evaluate_run(run, judgement), **drawn}
    if "own" not in numbers:  # all structures are good, or none
        return numbers
    good = judgement.good
    spread = read_safetensors(context.file(f"{kind}-dispersion"), error=CheckpointError)[0]["dispersion"]
    return {
        **numbers,
        "every_5th": lifts(thinned(run, EVERY), good),
        "diagonal": lifts(diagonal, good),
        "dispersion": lift_of(spread, good),
        "heads_diagonal": heads(diagonal, good, run.score(SCORE)),
    }


def read_retrofit(context: Context) -> dict[str, Any]:
    """Evaluate FM + retrofit and the options of the sampler."""
    numbers: dict[str, Any] = {**read_field(context, "retrofit"), "sampler": {}}
    for steps, anneal in SAMPLERS:
        run = context.run(f"sampler-{steps}-{anneal:g}")
        judgement = context.judged(f"sampler-{steps}-{anneal:g}", run)
        row: dict[str, Any] = {"quality": quality_of(judgement)}
        if 0 < (good := judgement.good).sum() < len(good):
            row["own"] = lift_of(run.score(SCORE), good)
        numbers["sampler"][f"{steps} steps, anneal {anneal:g}"] = row
    return numbers


def read_hutchinson(context: Context) -> list[dict[str, Any]]:
    """Measure how well variances and Hutchinson's estimate agree with the divergence."""
    values: dict[str, Tensor] = read_safetensors(context.file("sweep"), error=CheckpointError)[0]
    units = {name: channel.weight for name, channel in context.recipe.space().channels.items()}
    counted = read_json(context.file("sweep").with_suffix(".json"), anything, error=CheckpointError)
    return hutchinson_rows(values, counted, units)


def read_screening(context: Context) -> dict[str, Any]:
    """Relax the first crystals, and compute the standard tables and what confidence is worth."""
    data, relaxed = context.recipe.data, max(1, round(RELAXED * context.count))
    complete(context.screening, relaxed, RELAX_STEPS, data=data, model=context.calculator, jobs=cores())
    numbers = screen(context.screening, data=data, model=context.calculator)
    write_figures(context.screening, tables_of_structures(context.screening))
    return numbers


DRAWS: dict[str, Callable[[Context], Any]] = {
    "retrofit": partial(draw_field, kind="retrofit"),
    "joint": partial(draw_field, kind="joint"),
    "sweep": draw_sweep,
    "samplers": draw_samplers,
    "screening": draw_screening,
}
READINGS: dict[str, Callable[[Context], Any]] = {
    "retrofit": read_retrofit,
    "joint": partial(read_field, kind="joint"),
    "hutchinson": read_hutchinson,
    "screening": read_screening,
}


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
    """Run the tasks and return the result files in `out/cells`; networks are in `out/models`, runs in `out/draws`.

    Arguments:
        recipe: The sizes and the schedule of training.
        seeds: Seeds of the networks. The seed of the crystals is derived from them and was not used for any choice.
        count: The number of crystals per run.
        draws: The number of stochastic trajectories of the dispersion.
        only: Tasks to run, such as `flow:0,draw:retrofit`; all if empty.
        calculator: The energy model that judges.
        few, ks: The number of crystals and the numbers of Hutchinson probes of the sweep.
    """
    chosen = parse_tasks(only, {"draw": DRAWS, "read": READINGS}, ("flow", "retrofit", "joint"))
    if count < 1 or draws < 2:
        raise UsageError(f"give at least 1 crystal and 2 trajectories, not {count} and {draws}")
    networks = Networks(recipe, out / "models", device, say)
    for verb, name in chosen:
        if verb not in ("draw", "read"):
            getattr(networks, verb)(int(name))
    if not only:
        chosen = [*(("draw", name) for name in DRAWS), *(("read", name) for name in READINGS)]
    paths = []
    for seed in seeds:
        context = Context(networks, seed, count, draws, out, calculator, min(few, count), ks)
        sizes = identity_of(recipe, "", ("references",))
        settings = {"samples": count, "draws": draws, "few": context.few, "recipe": sizes, "data": networks.data}
        for name in (name for verb, name in chosen if verb == "draw"):
            run_task(result_file(out, seed, f"draw-{name}"), partial(DRAWS[name], context), seed, settings, device, say)
        settings = {**settings, "calculator": calculator}
        for name in (name for verb, name in chosen if verb == "read"):
            run_task(result_file(out, seed, name), partial(READINGS[name], context), seed, settings, device, say)
        if any(result_file(out, seed, name).exists() for name in READINGS):
            paths.append(join_results(out, "crystals", seed, READINGS, [f"draw-{name}" for name in DRAWS]))
        if not only and seed == seeds[0]:
            networks.save_field("retrofit", seed, out / "models" / "crystals")
            networks.save_field("joint", seed, out / "models" / "crystals-joint")
    return paths
