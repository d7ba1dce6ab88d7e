"""The time and memory that confidence costs, relative to plain sampling and plain training.

Uncompiled cases are compared with uncompiled plain sampling, and compiled cases with compiled plain sampling; all are
measured interleaved. Cases are measured in order of importance; those that do not fit the time limit are listed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from experiments.cost.meter import Meter, peak, reset_peak, spread
from fmwc.baselines import stochastic_ends
from fmwc.compiled import Compiled
from fmwc.domains.domain import Domain
from fmwc.errors import UsageError, nearest
from fmwc.estimators import Diagonal, Linearised, MonteCarlo, Tangent
from fmwc.field import Field
from fmwc.files import write_json, write_text
from fmwc.flow import elbo_loss, flow_matching_loss
from fmwc.modes import tensor_float
from fmwc.provenance import Clock, provenance
from fmwc.references import Schedule
from fmwc.report.table import MISSING, Table
from fmwc.sampling import AsReference, SamplingConfig, Uniform, noise, sample
from fmwc.sampling.controllers import foreseen
from fmwc.sampling.schedules import READINGS
from fmwc.training import TrainingConfig, train

__all__ = ["CASES", "SIZES", "TRAINING", "Case", "measure", "report", "words_of"]

MEMBERS = 5  # trajectories of an ensemble or of a stochastic flow
STEPS = 10  # optimiser steps that are timed together
SIZES = {  # the default number of samples, and those of the sweep
    "checkerboard": {"cpu": (2048, (256, 8192)), "cuda": (65_536, (4096, 16_384, 262_144))},
    "mnist": {"cpu": (16, (4, 64)), "cuda": (1024, (64, 256, 4096))},
    "crystals": {"cpu": (8, (2, 32)), "cuda": (512, (64, 256, 2048))},
}


@dataclass(frozen=True)
class Case:
    """A kind of sampling.

    Arguments:
        options: Those of :func:`fmwc.sample`; the default `confidence` means the domain's estimator.
        runs: Trajectories per sample.
        stochastic: Whether the trajectories follow draws of the weights.
        compiles: Whether compilation makes a difference.
        half: Whether the variance is computed in half precision, which needs a compiled field.
    """

    options: Mapping[str, Any]
    runs: int = 1
    stochastic: bool = False
    compiles: bool = True
    half: bool = False


Heard = Callable[[int, float], None]
PLAIN = "plain"
FEW = "few"  # the checkpoint's own schedule, which is made for 50 steps: python -m experiments bench --steps 50
CASES: dict[str, Case] = {  # in order of importance; ratios are to the first
    PLAIN: Case({"confidence": None}),
    "linearised, few readings": Case({"confidence": AsReference(), "schedule": FEW}),
    "linearised in bf16, few readings": Case({"confidence": AsReference(), "schedule": FEW}, half=True),
    "linearised, every step": Case({"confidence": AsReference()}),
    "linearised in bf16, every step": Case({"confidence": AsReference()}, half=True),
    "linearised (1 probe) in bf16, every step": Case({"confidence": Linearised(1)}, half=True),
    "linearised, every 5th step": Case({"confidence": AsReference(), "schedule": Schedule.every(5)}),
    "diagonal Taylor-1, every step": Case({"confidence": Diagonal("taylor1")}),
    "diagonal Taylor-1 in bf16, every step": Case({"confidence": Diagonal("taylor1")}, half=True),
    "diagonal Gauss–Hermite, every step": Case({"confidence": Diagonal()}),
    "diagonal Gauss–Hermite in bf16, every step": Case({"confidence": Diagonal()}, half=True),
    "linearised, every 10th step": Case({"confidence": AsReference(), "schedule": Schedule.every(10)}),
    "diagonal Gauss–Hermite, every 5th step": Case({"confidence": Diagonal(), "schedule": Schedule.every(5)}),
    "diagonal Gauss–Hermite, every 10th step": Case({"confidence": Diagonal(), "schedule": Schedule.every(10)}),
    "ensemble of 5": Case({"confidence": None}, runs=MEMBERS),
    "dispersion of 5 stochastic trajectories": Case({}, runs=MEMBERS, stochastic=True, compiles=False),
    "tangent (1 probe), every step": Case({"confidence": Tangent()}),
    "Monte Carlo variance (k = 5), every step": Case({"confidence": MonteCarlo(MEMBERS)}),
    "transported dispersion": Case({"confidence": None, "transport": True}, compiles=False),
}
PARTS = {"sampling": 0.6, "training": 0.8, "sweep": 1.0}  # the latest end of each part, as a share of the time
WAYS = {"cases": "uncompiled", "compiled": "compiled"}  # the keys of the tables of sampling, and their names
SWEPT = (PLAIN, "linearised, every step")  # at other numbers of samples


def _plain_loss(model: Field) -> Callable[..., Any]:
    space: Any = model.space
    return lambda x1, randomness, beta, cond: flow_matching_loss(model.network, space, x1, seed=randomness, cond=cond)


def _joint_loss(model: Field) -> Callable[..., Any]:
    return lambda x1, randomness, beta, cond: elbo_loss(model, x1, beta, seed=randomness, cond=cond)


# What is trained, and by which loss; ratios are to the first.
TRAINING: dict[str, tuple[Callable[[Field], Any], Callable[[Field], Callable[..., Any]]]] = {
    "flow matching": (lambda model: model.network, _plain_loss),
    "joint training (elbo)": (lambda model: model, _joint_loss),
    "retrofit": (lambda model: model.noise, _joint_loss),
}


def words_of(only: str) -> list[str]:
    """Split `--only` into words, each the name of a part or a part of the name of a case."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    for word in words:
        if word not in PARTS and not any(word in name for name in CASES):
            raise UsageError(nearest(word, [*PARTS, "linearised", "diagonal", *CASES], "case"))
    return words


def few_times(model: Field) -> Schedule:
    """Return when a checkpoint's variance is read by default, or as many evenly spaced times if it has no schedule.

    Where the times are does not change their cost.
    """
    return model.schedule or Schedule.at((i + 1) / (READINGS + 1) for i in range(READINGS))


def _tasks(
    domain: Domain, model: Field, fast: Sequence[Compiled], count: int, steps: int, names: Iterable[str]
) -> dict[str, Callable[[], object]]:
    """Return the cases as functions on the same noise, with the field or with compiled ones (full, half precision)."""
    cond = {k: v.to(model.device) for k, v in domain.conditions(model, count).items()}
    x0 = noise(model.space, count, 0, model.device, cond=cond)  # type: ignore[arg-type]

    def run(case: Case) -> None:
        options = dict(case.options)
        if options.get("schedule") == FEW:
            options["schedule"] = few_times(model)
        if isinstance(options.get("confidence"), AsReference):
            options["confidence"] = domain.estimator(model)
        options = {"steps": steps, "cond": cond, "config": SamplingConfig(batch=count), **options}
        if case.stochastic:
            stochastic_ends(model, x0, case.runs, **options)
            return
        for _ in range(case.runs):
            sample(fast[case.half] if fast else model, x0=x0, **options)

    able = [name for name in names if (CASES[name].compiles if fast else not CASES[name].half)]
    return {name: partial(run, CASES[name]) for name in able}


def _trainings(domain: Domain, model: Field, count: int, compiled: bool) -> dict[str, Callable[[Heard, int], object]]:
    """Return trainings of a copy, which call back after every `STEPS` steps."""
    cond = {k: v.to(model.device) for k, v in domain.conditions(model, count).items()}
    data = noise(model.space, count, 0, model.device, cond=cond)  # type: ignore[arg-type]

    def run(
        part: Callable[[Field], Any], loss: Callable[[Field], Callable[..., Any]], heard: Heard, times: int
    ) -> None:
        copy = deepcopy(model)
        module = part(copy)
        copy.requires_grad_(False)
        module.requires_grad_(True)
        if reserve := getattr(copy.network, "reserve", None):
            reserve(**cond)
        # As many strata as samples: each step uses every sample once, so the reserved rows suffice.
        plan = TrainingConfig(
            STEPS * times, count, 1e-5, stratified=True, compiled=compiled, precision="bf16" if compiled else "full"
        )
        # A compiled loss cannot add hooks itself. Plain training has none, and its compiled code would be reused for
        # the same network with hooks.
        torch.compiler.reset()
        with nullcontext() if module is copy.network else copy.noise.keep_hooks():
            train(module, loss(copy), data, plan, cond=cond, progress=heard, every=STEPS)

    return {name: partial(run, part, loss) for name, (part, loss) in TRAINING.items()}


def _trained(meter: Meter, domain: Domain, model: Field, fast: Any, count: int, *_: Any) -> dict[str, Any]:
    """Measure a step of each training in turn, without the first steps, which compile."""
    compiled = model.device.type == "cuda"  # as train does
    times: dict[str, list[float]] = {}
    memory: dict[str, float | None] = {}
    for name, task in _trainings(domain, model, count, compiled).items():
        if time.perf_counter() >= meter.until:
            meter.left_out.append(f"training: {name}")
            continue
        done: list[float] = []
        reset_peak(model.device)
        try:
            task(lambda *_: done.append(time.perf_counter()), meter.rounds + 1)  # noqa: B023
        except UsageError as error:  # it cannot be captured as a CUDA graph
            meter.left_out.append(f"training: {name} ({error})")
            continue
        times[name], memory[name] = [(b - a) / STEPS for a, b in pairwise(done)], peak(model.device)
        meter.say(f"training: {name}, {statistics.median(times[name]):.3g} s a step")
    if next(iter(TRAINING)) not in times:
        return {}  # nothing to compare with
    return {"training": {name: row | {"peak_mib": memory[name]} for name, row in spread(times).items()}}


def _sampling(
    meter: Meter,
    domain: Domain,
    model: Field,
    fast: Sequence[Compiled],
    count: int,
    steps: int,
    names: Iterable[str],
    *_: Any,
) -> dict[str, Any]:
    """Measure each case uncompiled and compiled, in the same rounds."""
    ways = {"cases": (), "compiled": fast}
    tasks = {way: _tasks(domain, model, by, count, steps, names) for way, by in ways.items()}
    merged = {f"{WAYS[way]} {n}": tasks[way][n] for n in names for way in ways if n in tasks[way]}
    rows = meter(merged, "sampling")
    found: dict[str, Any] = {}
    for way, word in WAYS.items():
        own = {n: rows[f"{word} {n}"] for n in names if f"{word} {n}" in rows}
        if PLAIN not in own:
            continue
        unit = own[PLAIN]["ratio"]
        found[way] = {
            n: {k: v / unit if k in ("ratio", "lowest", "highest") else v for k, v in row.items()}
            for n, row in own.items()
        }
    return found


def _sweep(
    meter: Meter,
    domain: Domain,
    model: Field,
    fast: Sequence[Compiled],
    count: int,
    steps: int,
    names: Iterable[str],
    others: Iterable[int],
) -> dict[str, Any]:
    found = {}
    for size in others:
        for way, by in (("uncompiled", ()), ("compiled", fast)):
            title = f"{size} samples, {way}"
            found[title] = meter(_tasks(domain, model, by, size, steps, SWEPT), title)
    return {"sweep": {title: rows for title, rows in found.items() if rows}}


_MEASURED: dict[str, Callable[..., dict[str, Any]]] = {"sampling": _sampling, "training": _trained, "sweep": _sweep}


def measure(
    domain: Domain,
    model: Field,
    *,
    count: int = 0,
    steps: int = 10,
    rounds: int = 5,
    minutes: float = 10.0,
    only: str = "",
    backend: str = "inductor",
    tf32: bool = False,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure all the costs of a domain. `cases` and `compiled` are the tables of sampling.

    Arguments:
        count: Samples; 0 means the device's default (`SIZES`).
        steps: Euler steps.
        rounds: How often each case is measured.
        minutes: The time limit; cases that have not begun by then are listed as left out.
        only: Words separated by commas: measure only the cases with one of them in the name, and the plain ones;
            `sampling`, `training` and `sweep` are whole parts.
        backend: The backend of torch.compile.
        tf32: Use TensorFloat-32 matrix products on a GPU, also for plain sampling.
        say: Called with progress messages.
    """
    clock = Clock(model.device)
    usual, others = SIZES[domain.name][model.device.type]
    count = count or usual
    words = words_of(only)
    parts = [word for word in words if word in PARTS] or (["sampling"] if words else list(PARTS))
    picked = [word for word in words if word not in PARTS]
    names = [n for n in CASES if n == PLAIN or not picked or any(word in n for word in picked)]
    compiling: list[str] = []  # compilation is not noise but a one-time cost

    def heard(text: str) -> None:
        if text.startswith("compiled "):
            compiling.append(text)
        say(text)

    fast = [Compiled(model, backend, heard, half, cuda_graph=True) for half in (False, True)]
    begin, left_out = time.perf_counter(), []
    found: dict[str, Any] = {"rounds": rounds}
    for part in parts:
        share = PARTS[part] if part != parts[-1] else 1.0
        meter = Meter(model.device, rounds, begin + 60 * minutes * share, say)
        with tensor_float(tf32):
            found |= _MEASURED[part](meter, domain, model, fast, count, steps, names, others)
        left_out += meter.left_out
    about = provenance(
        model.device,
        clock.seconds,
        samples=count,
        steps=steps,
        seeds=[0],
        reading=str(domain.estimator(model)),
        few=few_times(model).times,
        tf32=tf32,
    )
    return {"provenance": about, **found, "compiling": compiling, "left_out": left_out}


def report(out: Path, name: str, costs: dict[str, Any]) -> list[Path]:
    """Write the costs as JSON and as Markdown."""
    about = costs["provenance"]
    measured = [row["rounds"] for way in WAYS for row in costs.get(way, {}).values()]
    rounds = min(measured, default=costs["rounds"])  # fewer than requested if time was short
    few = len(foreseen(Schedule.at(about["few"]), Uniform(about["steps"]), torch.zeros(1)) or ())
    lines = [
        f"# What confidence costs: {name}",
        "",
        f"{about['samples']:,} samples in one batch, {about['steps']} steps; medians of {rounds} rounds "
        f"(lowest–highest), all in one process, interleaved (trainings one after another); ratios are to plain of the "
        "same column, peaks with all that earlier cases have compiled. "
        f"{about['device']}, torch {about['torch']}{', TF32' if about.get('tf32') else ''}, commit {about['commit']}, "
        f"{about['seconds']:.0f} s. Few readings: {few}, by {about['reading']}.",
    ]
    ways = [way for way in WAYS if way in costs]
    table = []
    for case in (case for case in CASES if any(case in costs[way] for way in ways)):
        row = {"sampling": case}
        for way in ways:
            row |= {f"{WAYS[way]} {k}": v for k, v in _cells(costs[way].get(case)).items()}
        table.append(row)
    if table:
        lines += ["", Table(table).markdown()]
    tables = {"training": costs["training"]} if costs.get("training") else {}
    tables |= costs.get("sweep", {})
    for title, rows in tables.items():
        table = [{title: case, **_cells(row)} for case, row in rows.items()]
        lines += ["", Table(table).markdown()]
    if costs["compiling"]:
        lines += ["", "Compiling, once: " + "; ".join(costs["compiling"]) + "."]
    if costs["left_out"]:
        lines += ["", "Left out, for want of time where nothing else is said: " + "; ".join(costs["left_out"]) + "."]
    return [write_json(out / f"{name}.json", costs), write_text(out / f"{name}.md", "\n".join(lines) + "\n")]


def _cells(row: Mapping[str, Any] | None) -> dict[str, str]:
    if row is None:
        return dict.fromkeys(("seconds", "÷ plain", "peak MiB"), MISSING)
    between = f" ({row['lowest']:.2f}–{row['highest']:.2f})" if "lowest" in row else ""
    return {
        "seconds": f"{row['seconds']:.3g}",
        "÷ plain": f"{row['ratio']:.2f}×{between}",
        "peak MiB": MISSING if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
    }
