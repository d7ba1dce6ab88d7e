"""What each experiment draws: rows by label, each with what its judge needs and what it cost.

Every row stands beside baselines with the same evaluations of the network, and the same noise where it starts from
noise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fmwc.confidence.best import best_of
from fmwc.confidence.editing import critical_time, edit, random_times
from fmwc.confidence.rewinding import resample
from fmwc.errors import CheckpointError, UsageError
from fmwc.files import write_bytes
from fmwc.readers import anything, check, mapping, parse_json, read_safetensors
from fmwc.recipes.uses.subject import Intent, Subject
from fmwc.sampling import Controller, Damped, Ema, Extrapolated, Grid, Trajectory, Uniform, survey
from fmwc.sampling.controllers import needs_variance
from fmwc.sampling.scores import of_variance

__all__ = ["DRAWINGS", "PILOT_SEED", "STEPS", "SWEEP", "Drawn", "load_drawn", "save_drawn"]

STEPS = 50
SWEEP = (5, 10, 20, 30, 50)
EXTRA = (2, 5, 10, 25)  # evaluations a sample on top of the first run's
FIXED = (0.0, 0.2, 0.4, 0.6, 0.8)
PILOT, PILOT_SEED = 1_000, 99
BLIND = (0.0, 0.71, 0.78, 0.84, 0.85, 1.0)  # five steps found by a search for misplacement alone, on another network
APART = "|"


@dataclass(frozen=True)
class Drawn:
    """One row: what is kept of its samples, and numbers of how they were made."""

    kept: dict[str, Tensor]
    info: dict[str, Any]


Rows = Iterator[tuple[str, Drawn]]


def save_drawn(path: Path, rows: dict[str, Drawn]) -> Path:
    tensors = {f"{label}{APART}{key}": v for label, row in rows.items() for key, v in row.kept.items()}
    about = json.dumps({label: row.info for label, row in rows.items()})
    apart = {k: v.cpu().clone().contiguous() for k, v in tensors.items()}  # rows that changed nothing share memory
    return write_bytes(path, save(apart, {"rows": about}))


def load_drawn(path: Path) -> dict[str, Drawn]:
    """Read what `save_drawn` wrote."""
    tensors, metadata = read_safetensors(path, error=CheckpointError)
    what = f"{path} is not a drawing of fmwc study"
    found = parse_json(metadata.get("rows", ""), what, CheckpointError)
    about = check(found, mapping(mapping(anything)), what, CheckpointError)
    kept: dict[str, dict[str, Tensor]] = {label: {} for label in about}
    for key, value in tensors.items():
        label, _, name = key.rpartition(APART)
        if label not in kept:
            raise CheckpointError(f"{what}: it does not say what '{label[:60]}' is")
        kept[label][name] = value
    return {label: Drawn(kept[label], info) for label, info in about.items()}


class _Watch:
    """Seconds on the device since it was made."""

    def __init__(self, subject: Subject) -> None:
        self.device = subject.field.device
        self.begin = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._now() - self.begin


def _row(subject: Subject, run: Trajectory, evaluations: float, seconds: float, **info: Any) -> Drawn:
    return Drawn(subject.kept(run.x, run.cond), {"evaluations": evaluations, "seconds": seconds, **info})


# ---- filter and trust --------------------------------------------------------------------------------------------


def draw_samples(subject: Subject, seed: int, wide: bool) -> Rows:
    """Samples with every score, and their confidence; their rank where the checkpoint's reference gives none."""
    watch = _Watch(subject)
    run = subject.draw(subject.sizes.samples, seed, transport=subject.dispersion, schedule=subject.usual)
    row = _row(subject, run, run.evaluations, watch.seconds)
    row.kept["confidence"] = (run.rank if run.withheld else run.confidence).float()
    for name, score in subject.scores(run).items():
        row.kept[f"score {name}"] = score.float()
    yield "samples", row


# ---- edit --------------------------------------------------------------------------------------------------------


def _times(subject: Subject, run: Trajectory, intent: Intent, seed: int, wide: bool) -> dict[str, float | Tensor]:
    """When to edit; the first is the baseline."""
    peak = critical_time(run, intent.channel)
    found: dict[str, float | Tensor] = {"random": random_times(run, seed, subject.sizes.replicates), "variance": peak}
    kinds = {"variance": peak}
    found["transported"] = kinds["transported"] = critical_time(run, kind="transported")
    for before in subject.befores if wide else (intent.before,):
        found |= {f"{before:g} before {name}": (t - before).clamp_min(0) for name, t in kinds.items()}
    return found | {f"t = {t}": t for t in FIXED}


def draw_edits(subject: Subject, seed: int, wide: bool) -> Rows:
    """Noise in a channel at some time, and all channels free from there on."""
    sizes = subject.sizes
    watch = _Watch(subject)
    run = subject.draw(sizes.edited, seed, keep_states=True, transport=True)
    first = _row(subject, run, STEPS, watch.seconds)
    steps = len(run.times)
    seldom = run.read_at(range((steps - 1) % subject.every, steps, subject.every))  # enough to tell the surest edits
    yield "seeds", Drawn({**first.kept, **subject.shown(run)}, first.info)
    for name, intent in subject.intents.items():
        changed = subject.conditions(run, intent, seed)
        times = _times(subject, run, intent, seed, wide)
        for scale in intent.scales if wide else (intent.scale,):
            for label, at in times.items():
                watch = _Watch(subject)
                options = {**subject.options(), **changed, **({"confidence": False} if wide else {})}
                ends = edit(
                    subject.field,
                    seldom,
                    intent.channel,
                    at=at,
                    scale=scale,
                    seed=seed,
                    replicates=sizes.replicates,
                    **options,
                )
                cond = {k: v.repeat_interleave(sizes.replicates, 0) for k, v in changed.items()}
                when = torch.as_tensor(at, dtype=torch.float32).cpu()
                each = when.reshape(-1, 1) if when.ndim < 2 else when
                info = {"time": float(when.mean()), "scale": scale, "seconds": watch.seconds}
                row = Drawn(subject.kept(ends.x, {**ends.cond, **cond}), info)
                row.kept["time"] = each.expand(sizes.edited, sizes.replicates).flatten()
                if not wide:
                    with suppress(UsageError):  # a run of few steps is read too seldom for its score
                        row.kept["score"] = ends.score(ends.default_score).float()
                row.kept.update(subject.shown(ends, sizes.replicates))
                yield f"{name}, scale {scale:g}, {label}" if wide else f"{name}, {label}", row


# ---- steps -------------------------------------------------------------------------------------------------------


def _controllers(subject: Subject, pilot: Trajectory, wide: bool) -> dict[str, Callable[[int], Controller]]:
    """Each controller at N steps; the first is the baseline."""

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
    shared = survey(None, pilot=pilot, power=subject.power)
    return {
        "uniform": Uniform,
        "Ema (paper)": Ema,
        "Damped (paper)": Damped,
        "fitted grid": lambda steps: Grid(shared.grid(steps)),
        "uniform, extrapolated": ahead(Uniform, subject.weight),
        "fitted grid, extrapolated": lambda steps: Extrapolated(Grid(shared.grid(steps)), subject.weight),
        "planned, extrapolated by variance": shared.plan,
    }


def draw_steps(subject: Subject, seed: int, wide: bool) -> Rows:
    """The N-sweep of every controller, at exactly N evaluations; reading the variance comes on top, in seconds."""
    pilot = subject.draw(min(PILOT, subject.sizes.swept), PILOT_SEED)
    makes = _controllers(subject, pilot, wide)
    for name, make in makes.items():
        for steps in (5, 10) if wide else SWEEP:
            controller = make(steps)
            watch = _Watch(subject)
            run = subject.draw(subject.sizes.swept, seed, controller=controller, confidence=needs_variance(controller))
            grid = [round(float(t), 3) for t in run.grid.mean(1)]
            apart = [round(float(t), 3) for t in run.grid.std(1)]
            yield f"{name}, {steps}", _row(subject, run, run.evaluations, watch.seconds, grid=grid, grid_std=apart)
    if not wide and subject.name == "checkerboard":
        run = subject.draw(subject.sizes.swept, seed, times=BLIND, confidence=False)
        yield f"blind grid, {len(BLIND) - 1}", _row(subject, run, run.evaluations, 0.0, grid=list(BLIND))


# ---- rewind ------------------------------------------------------------------------------------------------------


def draw_rewinds(subject: Subject, seed: int, wide: bool) -> Rows:
    """Evaluations spent on the most doubtful samples, and the same spent in other ways."""
    count = subject.sizes.rewound
    most = max(EXTRA)
    watch = _Watch(subject)
    run = subject.draw(count, seed, confidence=False)
    yield "plain", _row(subject, run, STEPS, watch.seconds)
    watch = _Watch(subject)
    pool = subject.draw(count * (STEPS + most) // STEPS, seed, schedule=subject.every, keep_states=True)
    if not of_variance(pool.default_score):  # only the variance is read when samples are rewound
        pool = pool.ranked_by("temporal_ratio")
    first = watch.seconds * count / len(pool)
    run = pool.take(torch.arange(count, device=pool.grid.device))

    def again(extra: int, before: float, scale: float, **options: Any) -> Drawn:
        watch = _Watch(subject)
        options |= {"before": before, "scale": scale, "seed": seed, **subject.options()}
        done = resample(subject.field, run, extra * count, **options)
        changed = float((done.branch > 0).float().mean())
        return _row(subject, done.run, STEPS + done.evaluations / count, first + watch.seconds, changed=changed)

    if wide:
        for scale in subject.scales:
            for before in subject.befores:
                yield f"rewind +5, scale {scale:g}, {before:g} before", again(5, before, scale)
        return
    for extra in EXTRA:
        yield f"rewind, +{extra}", again(extra, subject.before, subject.scale)
        yield f"start anew, +{extra}", again(extra, subject.before, subject.scale, fresh=True)
        drawn = count * (STEPS + extra) // STEPS
        surest = pool.take(torch.arange(drawn, device=pool.grid.device)).surest(count / drawn)
        yield (
            f"draw more, drop the doubtful, +{extra}",
            _row(subject, surest, STEPS * drawn / count, first * drawn / count),
        )
        watch = _Watch(subject)
        more = subject.draw(count, seed, steps=STEPS + extra, confidence=False)
        yield f"more steps, +{extra}", _row(subject, more, STEPS + extra, watch.seconds)
    watch = _Watch(subject)
    # A condition with a row a sample goes to both draws of it.
    two = best_of(
        subject.field, count, 2, seed=seed, steps=STEPS, schedule=subject.every, **{**subject.options(), **run.cond}
    )
    yield "best of two, +50", _row(subject, two.run, two.evaluations / count, watch.seconds)
    watch = _Watch(subject)
    more = subject.draw(count, seed, steps=2 * STEPS, confidence=False)
    yield "more steps, +50", _row(subject, more, 2 * STEPS, watch.seconds)


# ---- guidance ----------------------------------------------------------------------------------------------------


def draw_guides(subject: Subject, seed: int, wide: bool) -> Rows:
    """The same noise with and without steering away from the variance."""
    for name, guide in {"none": None, **(subject.strengths if wide else subject.guides)}.items():
        watch = _Watch(subject)
        options = {} if guide is None else {"decoder": guide}
        run = subject.draw(subject.sizes.guided, seed, confidence=False, **options)
        row = _row(subject, run, run.evaluations, watch.seconds)
        row.kept.update(subject.shown(run))
        yield name, row


DRAWINGS: dict[str, Callable[[Subject, int, bool], Rows]] = {
    "samples": draw_samples,
    "edit": draw_edits,
    "steps": draw_steps,
    "rewind": draw_rewinds,
    "guide": draw_guides,
}
