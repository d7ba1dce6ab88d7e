"""What each part of a study draws: rows by label, each with what its judge needs and what it cost.

Every row has baselines with the same number of network evaluations, and the same noise where it starts from noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from experiments.common.experiment import Experiment, Intent
from fmwc.errors import CheckpointError, UsageError
from fmwc.files import write_bytes
from fmwc.provenance import Clock
from fmwc.readers import anything, check, mapping, parse_json, read_safetensors
from fmwc.references import Schedule
from fmwc.sampling import Controller, Damped, Ema, Extrapolated, Grid, SamplingConfig, Trajectory, Uniform, survey
from fmwc.sampling.controllers import needs_variance
from fmwc.sampling.scores import of_variance
from fmwc.uses.best_of import best_of
from fmwc.uses.edit import critical_time, edit, random_times
from fmwc.uses.rewind import resample

__all__ = ["DRAWINGS", "PILOT_SEED", "STEPS", "SWEEP", "Drawn", "load_drawn", "save_drawn"]

STEPS = 50
SWEEP = (5, 10, 20, 30, 50)
EXTRA = (2, 5, 10, 25)  # evaluations per sample on top of those of the first run
FIXED = (0.0, 0.2, 0.4, 0.6, 0.8)
PILOT, PILOT_SEED = 1_000, 99
BLIND = (0.0, 0.71, 0.78, 0.84, 0.85, 1.0)  # five steps found by a search for misplacement alone, on another network
APART = "|"


@dataclass(frozen=True)
class Drawn:
    """One row: what is kept of its samples, and how they were drawn."""

    kept: dict[str, Tensor]
    info: dict[str, Any]


Rows = Iterator[tuple[str, Drawn]]


def save_drawn(path: Path, rows: dict[str, Drawn]) -> Path:
    """Write rows to a safetensors file."""
    tensors = {f"{label}{APART}{key}": v for label, row in rows.items() for key, v in row.kept.items()}
    about = json.dumps({label: row.info for label, row in rows.items()})
    apart = {k: v.cpu().clone().contiguous() for k, v in tensors.items()}  # rows may share memory
    return write_bytes(path, save(apart, {"rows": about}))


def load_drawn(path: Path) -> dict[str, Drawn]:
    """Read the rows that `save_drawn` wrote."""
    tensors, metadata = read_safetensors(path, error=CheckpointError)
    what = f"{path} is not a drawing of python -m experiments study"
    found = parse_json(metadata.get("rows", ""), what, CheckpointError)
    about = check(found, mapping(mapping(anything)), what, CheckpointError)
    kept: dict[str, dict[str, Tensor]] = {label: {} for label in about}
    for key, value in tensors.items():
        label, _, name = key.rpartition(APART)
        if label not in kept:
            raise CheckpointError(f"{what}: it does not say what '{label[:60]}' is")
        kept[label][name] = value
    return {label: Drawn(kept[label], info) for label, info in about.items()}


def _row(experiment: Experiment, run: Trajectory, evaluations: float, seconds: float, **info: Any) -> Drawn:
    return Drawn(experiment.keep(run.x, run.cond), {"evaluations": evaluations, "seconds": seconds, **info})


# ---- filter and trust --------------------------------------------------------------------------------------------


def draw_samples(experiment: Experiment, seed: int, wide: bool) -> Rows:
    """Draw samples with every score and their confidence, or their rank if the reference is not valid for them."""
    clock = Clock(experiment.field.device)
    run = experiment.draw(
        experiment.sizes.samples, seed, transport=experiment.dispersion, schedule=Schedule.every(experiment.usual)
    )
    row = _row(experiment, run, run.evaluations, clock.seconds)
    row.kept["confidence"] = (run.rank if run.withheld else run.confidence).float()
    for name, score in experiment.scores(run).items():
        row.kept[f"score {name}"] = score.float()
    yield "samples", row


# ---- edit --------------------------------------------------------------------------------------------------------


def _times(experiment: Experiment, run: Trajectory, intent: Intent, seed: int, wide: bool) -> dict[str, float | Tensor]:
    """Return when to edit, by name; the first is the baseline."""
    peak = critical_time(run, intent.channel)
    found: dict[str, float | Tensor] = {
        "random": random_times(run, seed, experiment.sizes.replicates),
        "variance": peak,
    }
    kinds = {"variance": peak}
    found["transported"] = kinds["transported"] = critical_time(run, kind="transported")
    for before in experiment.befores if wide else (intent.before,):
        found |= {f"{before:g} before {name}": (t - before).clamp_min(0) for name, t in kinds.items()}
    return found | {f"t = {t}": t for t in FIXED}


def draw_edits(experiment: Experiment, seed: int, wide: bool) -> Rows:
    """Add noise to a channel at some time, and integrate all channels from there on."""
    sizes = experiment.sizes
    clock = Clock(experiment.field.device)
    run = experiment.draw(sizes.edited, seed, transport=True, config=SamplingConfig(keep_states=True))
    first = _row(experiment, run, STEPS, clock.seconds)
    steps = len(run.times)
    seldom = run.read_at(range((steps - 1) % experiment.every, steps, experiment.every))  # enough to rank the edits
    yield "seeds", Drawn({**first.kept, **experiment.shown(run)}, first.info)
    for name, intent in experiment.intents.items():
        changed = experiment.edited_conditions(run, intent, seed)
        times = _times(experiment, run, intent, seed, wide)
        for scale in intent.scales if wide else (intent.scale,):
            for label, at in times.items():
                clock = Clock(experiment.field.device)
                options = {**experiment.options(), **({"confidence": None} if wide else {})}
                ends = edit(
                    experiment.field,
                    seldom,
                    intent.channel,
                    at=at,
                    scale=scale,
                    seed=seed,
                    replicates=sizes.replicates,
                    cond=changed,
                    **options,
                )
                cond = {k: v.repeat_interleave(sizes.replicates, 0) for k, v in changed.items()}
                when = torch.as_tensor(at, dtype=torch.float32).cpu()
                each = when.reshape(-1, 1) if when.ndim < 2 else when
                info = {"time": float(when.mean()), "scale": scale, "seconds": clock.seconds}
                row = Drawn(experiment.keep(ends.x, {**ends.cond, **cond}), info)
                row.kept["time"] = each.expand(sizes.edited, sizes.replicates).flatten()
                if not wide:
                    with suppress(UsageError):  # a run of few steps has too few readings for its score
                        row.kept["score"] = ends.score(ends.default_score).float()
                row.kept.update(experiment.shown(ends, sizes.replicates))
                yield f"{name}, scale {scale:g}, {label}" if wide else f"{name}, {label}", row


# ---- steps -------------------------------------------------------------------------------------------------------


def _controllers(experiment: Experiment, pilot: Trajectory, wide: bool) -> dict[str, Callable[[int], Controller]]:
    """Return a function of the number of steps per controller; the first is the baseline."""

    def fitted(power: float) -> Callable[[int], Controller]:
        return lambda steps: Grid(survey(None, pilot=pilot, power=power).grid(steps))

    def ahead(times: Callable[[int], Controller], weight: float) -> Callable[[int], Controller]:
        return lambda steps: Extrapolated(times(steps), weight)

    if wide:
        powers, weights = (0.5, 1.0, 2.0, 3.0), (0.5, 0.75, 1.0)
        return {
            "uniform": Uniform,
            **{f"fitted grid, power {p:g}": fitted(p) for p in powers},
            **{f"uniform, extrapolated by {w:g}": ahead(Uniform, w) for w in weights},
            **{f"power {p:g}, extrapolated by {w:g}": ahead(fitted(p), w) for p in powers for w in weights},
        }
    shared = survey(None, pilot=pilot, power=experiment.power)
    return {
        "uniform": Uniform,
        "Ema (paper)": Ema,
        "Damped (paper)": Damped,
        "fitted grid": lambda steps: Grid(shared.grid(steps)),
        "uniform, extrapolated": ahead(Uniform, experiment.weight),
        "fitted grid, extrapolated": lambda steps: Extrapolated(Grid(shared.grid(steps)), experiment.weight),
        "planned, extrapolated by variance": shared.plan,
    }


def draw_steps(experiment: Experiment, seed: int, wide: bool) -> Rows:
    """Sweep the steps of every controller, at exactly N evaluations; readings of the variance only add to the time."""
    pilot = experiment.draw(min(PILOT, experiment.sizes.swept), PILOT_SEED)
    makes = _controllers(experiment, pilot, wide)
    for name, make in makes.items():
        for steps in (5, 10) if wide else SWEEP:
            controller = make(steps)
            clock = Clock(experiment.field.device)
            run = experiment.draw(
                experiment.sizes.swept,
                seed,
                **({} if needs_variance(controller) else {"confidence": None}),
                config=SamplingConfig(controller=controller),
            )
            grid = [round(float(t), 3) for t in run.grid.mean(1)]
            apart = [round(float(t), 3) for t in run.grid.std(1)]
            yield f"{name}, {steps}", _row(experiment, run, run.evaluations, clock.seconds, grid=grid, grid_std=apart)
    if not wide and experiment.name == "checkerboard":
        run = experiment.draw(
            experiment.sizes.swept, seed, confidence=None, config=SamplingConfig(controller=Grid(BLIND))
        )
        yield f"blind grid, {len(BLIND) - 1}", _row(experiment, run, run.evaluations, 0.0, grid=list(BLIND))


# ---- rewind ------------------------------------------------------------------------------------------------------


def draw_rewinds(experiment: Experiment, seed: int, wide: bool) -> Rows:
    """Spend evaluations on the most doubtful samples, and as many in other ways."""
    count = experiment.sizes.rewound
    most = max(EXTRA)
    clock = Clock(experiment.field.device)
    run = experiment.draw(count, seed, confidence=None)
    yield "plain", _row(experiment, run, STEPS, clock.seconds)
    clock = Clock(experiment.field.device)
    pool = experiment.draw(
        count * (STEPS + most) // STEPS,
        seed,
        schedule=Schedule.every(experiment.every),
        config=SamplingConfig(keep_states=True),
    )
    if not of_variance(pool.default_score):  # rewinding reads the variance only
        pool = pool.ranked_by("temporal_ratio")
    first = clock.seconds * count / len(pool)
    run = pool.take(torch.arange(count, device=pool.grid.device))

    def rewound(extra: int, before: float, scale: float, **options: Any) -> Drawn:
        clock = Clock(experiment.field.device)
        options |= {"before": before, "scale": scale, "seed": seed, **experiment.options()}
        done = resample(experiment.field, run, extra * count, **options)
        changed = float((done.branch > 0).float().mean())
        return _row(experiment, done.run, STEPS + done.evaluations / count, first + clock.seconds, changed=changed)

    if wide:
        for scale in experiment.scales:
            for before in experiment.befores:
                yield f"rewind +5, scale {scale:g}, {before:g} before", rewound(5, before, scale)
        return
    for extra in EXTRA:
        yield f"rewind, +{extra}", rewound(extra, experiment.before, experiment.scale)
        yield f"start anew, +{extra}", rewound(extra, experiment.before, experiment.scale, fresh=True)
        drawn = count * (STEPS + extra) // STEPS
        surest = pool.take(torch.arange(drawn, device=pool.grid.device)).surest(count / drawn)
        yield (
            f"draw more, drop the doubtful, +{extra}",
            _row(experiment, surest, STEPS * drawn / count, first * drawn / count),
        )
        clock = Clock(experiment.field.device)
        more = experiment.draw(count, seed, steps=STEPS + extra, confidence=None)
        yield f"more steps, +{extra}", _row(experiment, more, STEPS + extra, clock.seconds)
    clock = Clock(experiment.field.device)
    # A condition with one row per sample applies to both of its draws.
    how = {"steps": STEPS, "schedule": Schedule.every(experiment.every), "cond": run.cond, **experiment.options()}
    two = best_of(experiment.field, count, 2, seed=seed, **how)
    yield "best of two, +50", _row(experiment, two.run, two.evaluations / count, clock.seconds)
    clock = Clock(experiment.field.device)
    more = experiment.draw(count, seed, steps=2 * STEPS, confidence=None)
    yield "more steps, +50", _row(experiment, more, 2 * STEPS, clock.seconds)


# ---- guidance ----------------------------------------------------------------------------------------------------


def draw_guides(experiment: Experiment, seed: int, wide: bool) -> Rows:
    """Draw from the same noise with and without guidance away from the variance."""
    for name, guide in {"none": None, **(experiment.strengths if wide else experiment.guides)}.items():
        clock = Clock(experiment.field.device)
        options = {} if guide is None else {"config": SamplingConfig(decoder=guide)}
        run = experiment.draw(experiment.sizes.guided, seed, confidence=None, **options)
        row = _row(experiment, run, run.evaluations, clock.seconds)
        row.kept.update(experiment.shown(run))
        yield name, row


DRAWINGS: dict[str, Callable[[Experiment, int, bool], Rows]] = {
    "samples": draw_samples,
    "edit": draw_edits,
    "steps": draw_steps,
    "rewind": draw_rewinds,
    "guide": draw_guides,
}
