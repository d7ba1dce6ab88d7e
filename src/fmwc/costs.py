"""What confidence costs: wall clock and memory, as ratios to plain sampling, measured interleaved, and plain training.

Plain sampling is as fast as the rest: each way (uncompiled, compiled) has its own, and is held against it. Cases are
measured in order of importance; those that a given time has no room for are named.
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

from fmwc.baselines import stochastic_ends
from fmwc.errors import UsageError, nearest
from fmwc.field import Field
from fmwc.files import write_json, write_text
from fmwc.flow import elbo, flow_matching
from fmwc.meter import Meter, peak, reset_peak, spread
from fmwc.modes import tensor_float
from fmwc.propagate import Diagonal, Linearised, MonteCarlo, Tangent
from fmwc.recipes.recipe import Clock, provenance
from fmwc.report.tables import markdown
from fmwc.sampling import Compiled, Uniform, noise, sample
from fmwc.sampling.controllers import foreseen
from fmwc.sampling.schedules import READINGS
from fmwc.settings.setting import Setting
from fmwc.training import Plan, train

__all__ = ["CASES", "SIZES", "TRAINING", "Case", "measure", "report", "words_of"]

MEMBERS = 5  # trajectories of an ensemble, or of one stochastic flow
STEPS = 10  # of the optimiser, whose time is taken together
SIZES = {  # samples, and those of the sweep, where nothing is said
    "checkerboard": {"cpu": (2048, (256, 8192)), "cuda": (65_536, (4096, 16_384, 262_144))},
    "mnist": {"cpu": (16, (4, 64)), "cuda": (1024, (64, 256, 4096))},
    "crystals": {"cpu": (8, (2, 32)), "cuda": (512, (64, 256, 2048))},
}


@dataclass(frozen=True)
class Case:
    """Creates one way to sample.

    Arguments:
        options: Those of :func:`fmwc.sample`; `confidence=True` is as the setting reads it.
        runs: How many trajectories it takes a sample.
        stochastic: Whether they follow draws of the weights.
        compiles: Whether a compiled field does it otherwise than a field.
        half: Whether the variance is computed in half precision, which takes a compiled field.
    """

    options: Mapping[str, Any]
    runs: int = 1
    stochastic: bool = False
    compiles: bool = True
    half: bool = False


Heard = Callable[[int, float], None]
PLAIN = "plain"
FEW = "few"  # the checkpoint's own schedule, of the 50 steps that it is made for: fmwc bench --steps 50
CASES: dict[str, Case] = {  # in order of importance; ratios are to the first
    PLAIN: Case({"confidence": False}),
    "linearised, few readings": Case({"confidence": True, "schedule": FEW}),
    "linearised in bf16, few readings": Case({"confidence": True, "schedule": FEW}, half=True),
    "linearised, every step": Case({"confidence": True}),
    "linearised in bf16, every step": Case({"confidence": True}, half=True),
    "linearised (1 probe) in bf16, every step": Case({"confidence": Linearised(1)}, half=True),
    "linearised, every 5th step": Case({"confidence": True, "schedule": 5}),
    "diagonal Taylor-1, every step": Case({"confidence": Diagonal("taylor1")}),
    "diagonal Taylor-1 in bf16, every step": Case({"confidence": Diagonal("taylor1")}, half=True),
    "diagonal Gauss–Hermite, every step": Case({"confidence": Diagonal()}),
    "diagonal Gauss–Hermite in bf16, every step": Case({"confidence": Diagonal()}, half=True),
    "linearised, every 10th step": Case({"confidence": True, "schedule": 10}),
    "diagonal Gauss–Hermite, every 5th step": Case({"confidence": Diagonal(), "schedule": 5}),
    "diagonal Gauss–Hermite, every 10th step": Case({"confidence": Diagonal(), "schedule": 10}),
    "ensemble of 5": Case({"confidence": False}, runs=MEMBERS),
    "dispersion of 5 stochastic trajectories": Case({}, runs=MEMBERS, stochastic=True, compiles=False),
    "tangent (1 probe), every step": Case({"confidence": Tangent()}),
    "Monte Carlo variance (k = 5), every step": Case({"confidence": MonteCarlo(MEMBERS)}),
    "transported dispersion": Case({"confidence": False, "transport": True}, compiles=False),
}
PARTS = {"sampling": 0.6, "training": 0.8, "sweep": 1.0}  # when each part ends at the latest, as shares of the time
WAYS = {"cases": "uncompiled", "compiled": "compiled"}  # the tables of sampling, and the words for them
SWEPT = (PLAIN, "linearised, every step")  # at other numbers of samples


def _plain_loss(model: Field) -> Callable[..., Any]:
    return lambda x1, randomness, beta, **cond: flow_matching(model.network, model.space, x1, seed=randomness, **cond)  # type: ignore[arg-type]


def _joint_loss(model: Field) -> Callable[..., Any]:
    return lambda x1, randomness, beta, **cond: elbo(model, x1, beta, seed=randomness, **cond)


# What is trained, and by which loss; ratios are to the first.
TRAINING: dict[str, tuple[Callable[[Field], Any], Callable[[Field], Callable[..., Any]]]] = {
    "flow matching": (lambda model: model.network, _plain_loss),
    "joint training (elbo)": (lambda model: model, _joint_loss),
    "retrofit": (lambda model: model.noise, _joint_loss),
}


def words_of(only: str) -> list[str]:
    """The words of `--only`, each a part or within the name of a case."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    for word in words:
        if word not in PARTS and not any(word in name for name in CASES):
            raise UsageError(nearest(word, [*PARTS, "linearised", "diagonal", *CASES], "case"))
    return words


def few_times(model: Field) -> tuple[float, ...]:
    """When a checkpoint's variance is read by default; where it has chosen no times, as many as others have.

    Of the 50 steps they were chosen for, where they are does not change what they cost.
    """
    return model.schedule.times if model.schedule else tuple((i + 1) / (READINGS + 1) for i in range(READINGS))


def _tasks(
    setting: Setting, model: Field, fast: Sequence[Compiled], count: int, steps: int, names: Iterable[str]
) -> dict[str, Callable[[], object]]:
    """The cases as functions, by the field or compiled fields (in full precision, in half), on the same noise."""
    cond = {k: v.to(model.device) for k, v in setting.conditions(model, count).items()}
    x0 = noise(model.space, count, 0, model.device, **cond)  # type: ignore[arg-type]

    def run(case: Case) -> None:
        options = dict(case.options)
        if options.get("schedule") == FEW:
            options["schedule"] = few_times(model)
        if options.get("confidence") is True:
            options["confidence"] = setting.estimator(model)
        options = {"steps": steps, "batch": count, **cond, **options}
        if case.stochastic:
            stochastic_ends(model, x0, case.runs, **options)
            return
        for _ in range(case.runs):
            sample(fast[case.half] if fast else model, x0=x0, **options)

    able = [name for name in names if (CASES[name].compiles if fast else not CASES[name].half)]
    return {name: partial(run, CASES[name]) for name in able}


def _trainings(setting: Setting, model: Field, count: int, compiled: bool) -> dict[str, Callable[[Heard, int], object]]:
    """Trainings of a copy, which say when another `STEPS` steps are done, so many times."""
    cond = {k: v.to(model.device) for k, v in setting.conditions(model, count).items()}
    data = noise(model.space, count, 0, model.device, **cond)  # type: ignore[arg-type]

    def run(
        part: Callable[[Field], Any], loss: Callable[[Field], Callable[..., Any]], heard: Heard, times: int
    ) -> None:
        copy = deepcopy(model)
        module = part(copy)
        copy.requires_grad_(False)
        module.requires_grad_(True)
        if reserve := getattr(copy.network, "reserve", None):
            reserve(**cond)
        # As many strata as samples: every step sees each once, so that rows reserved for them are enough.
        plan = Plan(
            STEPS * times, count, 1e-5, stratified=True, compiled=compiled, precision="bf16" if compiled else "full"
        )
        # Hooks that a compiled loss cannot put in itself; plain training has none, and what was compiled for it would
        # be taken for the same network with them.
        torch.compiler.reset()
        with nullcontext() if module is copy.network else copy.noise.hooked():
            train(module, loss(copy), data, plan, cond=cond, progress=heard, every=STEPS)

    return {name: partial(run, part, loss) for name, (part, loss) in TRAINING.items()}


def _trained(meter: Meter, setting: Setting, model: Field, fast: Any, count: int, *_: Any) -> dict[str, Any]:
    """What a step costs, each training after the other, without its first steps, which compile and are captured."""
    compiled = model.device.type == "cuda"  # as train does
    times: dict[str, list[float]] = {}
    memory: dict[str, float | None] = {}
    for name, task in _trainings(setting, model, count, compiled).items():
        if time.perf_counter() >= meter.until:
            meter.left_out.append(f"training: {name}")
            continue
        done: list[float] = []
        reset_peak(model.device)
        try:
            task(lambda *_: done.append(time.perf_counter()), meter.rounds + 1)  # noqa: B023
        except UsageError as error:  # what cannot be captured as a CUDA graph
            meter.left_out.append(f"training: {name} ({error})")
            continue
        times[name], memory[name] = [(b - a) / STEPS for a, b in pairwise(done)], peak(model.device)
        meter.say(f"training: {name}, {statistics.median(times[name]):.3g} s a step")
    if next(iter(TRAINING)) not in times:
        return {}  # there is nothing to hold the others against
    return {"training": {name: row | {"peak_mib": memory[name]} for name, row in spread(times).items()}}


def _sampling(
    meter: Meter,
    setting: Setting,
    model: Field,
    fast: Sequence[Compiled],
    count: int,
    steps: int,
    names: Iterable[str],
    *_: Any,
) -> dict[str, Any]:
    """Both ways in the same rounds, a case of one beside the same case of the other."""
    ways = {"cases": (), "compiled": fast}
    tasks = {way: _tasks(setting, model, by, count, steps, names) for way, by in ways.items()}
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
    setting: Setting,
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
            found[title] = meter(_tasks(setting, model, by, size, steps, SWEPT), title)
    return {"sweep": {title: rows for title, rows in found.items() if rows}}


_MEASURED: dict[str, Callable[..., dict[str, Any]]] = {"sampling": _sampling, "training": _trained, "sweep": _sweep}


def measure(
    setting: Setting,
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
    """All the costs of a setting; `cases` and `compiled` are the tables of sampling, each held against its own plain.

    Arguments:
        count: Samples; the device's own number (`SIZES`) if 0.
        steps: Euler steps.
        rounds: Times each case is measured.
        minutes: What has not begun after so long is left out, and named.
        only: Words, separated by commas: measure the cases that hold one in their name, beside the plain ones; and
            `sampling`, `training` and `sweep` are whole parts.
        backend: Of torch.compile.
        tf32: Matrix products of TensorFloat-32 on a GPU, for plain sampling as for the rest; torch itself has them in
            full (but for convolutions).
        say: Told what is done.
    """
    clock = Clock(model.device)
    usual, others = SIZES[setting.name][model.device.type]
    count = count or usual
    words = words_of(only)
    parts = [word for word in words if word in PARTS] or (["sampling"] if words else list(PARTS))
    picked = [word for word in words if word not in PARTS]
    names = [n for n in CASES if n == PLAIN or not picked or any(word in n for word in picked)]
    compiling: list[str] = []  # a kernel compiled on the way is no noise, but what a case costs at first

    def heard(text: str) -> None:
        if text.startswith("compiled "):
            compiling.append(text)
        say(text)

    fast = [Compiled(model, backend, heard, half) for half in (False, True)]
    begin, left_out = time.perf_counter(), []
    found: dict[str, Any] = {"rounds": rounds}
    for part in parts:
        share = PARTS[part] if part != parts[-1] else 1.0
        meter = Meter(model.device, rounds, begin + 60 * minutes * share, say)
        with tensor_float(tf32):
            found |= _MEASURED[part](meter, setting, model, fast, count, steps, names, others)
        left_out += meter.left_out
    about = provenance(
        model.device,
        clock.seconds,
        samples=count,
        steps=steps,
        seeds=[0],
        reading=str(setting.estimator(model)),
        few=few_times(model),
        tf32=tf32,
    )
    return {"provenance": about, **found, "compiling": compiling, "left_out": left_out}


def report(out: Path, setting: str, costs: dict[str, Any]) -> list[Path]:
    """Writes SETTING.json and SETTING.md."""
    about = costs["provenance"]
    measured = [row["rounds"] for way in WAYS for row in costs.get(way, {}).values()]
    rounds = min(measured, default=costs["rounds"])  # fewer than asked for where time was short
    few = len(foreseen(about["few"], Uniform(about["steps"]), torch.zeros(1)) or ())
    lines = [
        f"# What confidence costs: {setting}",
        "",
        f"{about['samples']:,} samples in one batch, {about['steps']} steps; medians of {rounds} rounds "
        f"(lowest–highest), all in one process, interleaved (trainings one after another); ratios are to plain of the "
        "same column, peaks with all that earlier cases have compiled. "
        f"{about['device']}, torch {about['torch']}{', TF32' if about.get('tf32') else ''}, commit {about['commit']}, "
        f"{about['seconds']:.0f} s. Few readings: {few}, by {about['reading']}.",
    ]
    ways = [way for way in WAYS if way in costs]
    table = []
    for name in (name for name in CASES if any(name in costs[way] for way in ways)):
        row = {"sampling": name}
        for way in ways:
            row |= {f"{WAYS[way]} {k}": v for k, v in _cells(costs[way].get(name)).items()}
        table.append(row)
    if table:
        lines += ["", markdown(table, list(table[0]))]
    tables = {"training": costs["training"]} if costs.get("training") else {}
    tables |= costs.get("sweep", {})
    for title, rows in tables.items():
        table = [{title: name, **_cells(row)} for name, row in rows.items()]
        lines += ["", markdown(table, list(table[0]))]
    if costs["compiling"]:
        lines += ["", "Compiling, once: " + "; ".join(costs["compiling"]) + "."]
    if costs["left_out"]:
        lines += ["", "Left out, for want of time where nothing else is said: " + "; ".join(costs["left_out"]) + "."]
    return [write_json(out / f"{setting}.json", costs), write_text(out / f"{setting}.md", "\n".join(lines) + "\n")]


def _cells(row: Mapping[str, Any] | None) -> dict[str, str]:
    if row is None:
        return {"seconds": "—", "÷ plain": "—", "peak MiB": "—"}
    between = f" ({row['lowest']:.2f}–{row['highest']:.2f})" if "lowest" in row else ""
    return {
        "seconds": f"{row['seconds']:.3g}",
        "÷ plain": f"{row['ratio']:.2f}×{between}",
        "peak MiB": "—" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
    }
