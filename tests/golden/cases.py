"""Small runs of the library whose results are recorded in golden.json.

A case is a function without arguments that returns tensors, arrays, numbers and texts by name. Only this file uses the
library. If its names or modules change, change the calls here, but not the results of a case.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

import fmwc
from experiments.checkerboard.evaluate import symmetric_kl
from experiments.common.comparisons import (
    HeteroscedasticHead,
    HeteroscedasticVariance,
    PosteriorTrace,
    StateSensitivity,
    nll,
)
from experiments.common.evaluation import agreement, along
from experiments.mnist.evaluate import frechet
from fmwc import checkerboard
from fmwc.baselines import Dropout, dispersion, ensemble_ends, stochastic_ends
from fmwc.checkerboard import data as points
from fmwc.checks import Contest, Echo
from fmwc.estimators import Diagonal, Linearised, MonteCarlo, Tangent
from fmwc.flow import Channel, FlatTorus, Space
from fmwc.metrics import ranking
from fmwc.metrics.divergence import divergence, estimates
from fmwc.metrics.ranking import rate, rate_kept
from fmwc.mnist import classifier as images
from fmwc.networks import MLP, UNet
from fmwc.randomness import Stream
from fmwc.sampling import (
    Damped,
    Ema,
    Extrapolated,
    Grid,
    SamplingConfig,
    Schedule,
    Trajectory,
    Uniform,
    default_estimator,
    fit_grid,
    fit_schedule,
    noise,
    reread,
    stream,
    survey,
)
from fmwc.training import TrainingConfig, train
from fmwc.uses.best_of import best_of
from fmwc.uses.continuation import continue_from, with_states
from fmwc.uses.edit import critical_time, edit, random_times
from fmwc.uses.filter import choose, ranks
from fmwc.uses.guidance import Guidance, variance_gradient
from fmwc.uses.heads import fit_head
from fmwc.uses.rewind import resample, rewind
from fmwc.uses.risk import reliability, required_labels, risk_control
from tests.command import runner
from tests.options import arguments, reader

__all__ = ["CASES", "quietly"]

Found = dict[str, Any]
CASES: dict[str, Callable[[], Found]] = {}
CPU = torch.device("cpu")
LEFT_OUT = {"provenance", "seconds", "minutes", "commit", "date", "path", "wall", "peak_bytes"}


def case(function: Callable[[], Found]) -> Callable[[], Found]:
    """Add a function to the cases. It runs with seeded global randomness in a separate environment."""
    CASES[function.__name__] = function
    return function


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Run with one thread, seeded global randomness and no data of this machine, and print nothing.

    NumPy and SciPy ignore torch's number of threads, and their last bits depend on the threads of their OpenBLAS. The
    environment variable limits copies of OpenBLAS that are loaded later.
    """
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with (
        tempfile.TemporaryDirectory() as cache,
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(action="ignore"),
        threadpool_limits(1, user_api="blas"),
    ):
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        patch.delenv("FMWC_DATA", raising=False)
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("COLUMNS", "300")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(state)


# ---- what is recorded of runs and tables ----------------------------------------------------------------------------


def flat(name: str, value: Any) -> Found:
    """Return the values of nested mappings and sequences by name, without `None` and empty texts."""
    if value is None or (isinstance(value, str) and not value):
        return {}
    if isinstance(value, Mapping):
        return {k: v for key, part in value.items() for k, v in flat(f"{name}/{key}", part).items()}
    if isinstance(value, (list, tuple)) and not all(isinstance(v, (int, float)) for v in value):
        return {k: v for i, part in enumerate(value) for k, v in flat(f"{name}/{i}", part).items()}
    return {name: value}


SCORES = ("endpoint", "integrated", "temporal_ratio", "peak", "geometric", "integrated@0.3-0.8")


def of_run(run: Trajectory, within: str = "", name: str = "") -> Found:
    """Return all results of a run."""
    given = {n: getattr(run, n) for n in ("x", "x0", "times", "mean", "var", "grid", "scores", "reference", "states")}
    found = {
        **{k: v for n, value in given.items() for k, v in flat(n, value).items()},
        **flat("evidence", run.evidence),
        **flat("cond", run.cond),
        "default_score": run.default_score,
        "evaluations": run.evaluations,
    }
    with contextlib.suppress(fmwc.FmwcError):
        found["score"] = run.score()
        found["rank"] = run.rank
    if not run.withheld:
        found["confidence"] = run.confidence
    if len(run.times):
        found |= {"std": run.std, "rms": run.rms, "weights": run.weights}
        channels = list(run.var) if isinstance(run.var, dict) else []
        for score in (*SCORES, *(f"{c}/{s}" for c in channels for s in SCORES)):
            with contextlib.suppress(fmwc.FmwcError):
                found[f"score {score}"] = run.score(score)
                if within:
                    found[f"score {score} within"] = run.score(score, within=within)
    if "guess" in run.evidence:
        found["score spread"] = run.score("spread")
        found["score spread@0.3-0.8"] = run.score("spread@0.3-0.8")
    if run.transported is not None:
        found |= {"score dispersion": run.score("dispersion"), "transported var": run.transported.var}
        found |= {"transported profile": run.transported.profile}
    return {f"{name} {k}".strip(): v for k, v in found.items()}


def of_numbers(name: str, found: Any) -> Found:
    """Return the numbers of a table of results, one row per part, without times and dates."""

    def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            for key, part in value.items():
                if key not in LEFT_OUT:
                    yield from leaves(f"{path}/{key}", part)
        elif isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                yield from leaves(f"{path}/{i}", part)
        else:
            yield path, value

    result: Found = {}
    for key, part in found.items():
        if key in LEFT_OUT:
            continue
        numbers = [float(v) for _, v in leaves("", part) if isinstance(v, (int, float))]
        result[f"{name}{key}"] = np.array(numbers)
    return result


def of_weights(name: str, module: nn.Module) -> Found:
    """The parameters and buffers of a module, one after another."""
    values = [v.detach().flatten().double() for v in module.state_dict().values() if isinstance(v, Tensor)]
    return {name: torch.cat(values)}


def of_reference(name: str, field: Any) -> Found:
    """Return the reference of a field."""
    known = field.reference
    found: Found = {f"{name} score": known.score, f"{name} quantiles": known.quantiles}
    found[f"{name} withheld"] = bool(known.withheld)
    for i, part in enumerate(known.parts):
        found |= {f"{name} part {i} weight": part.weight, f"{name} part {i} quantiles": part.quantiles}
    for row in known.candidates:
        label = str(row.get("name", ""))
        found |= {f"{name} candidate {label} {k}": v for k, v in row.items() if isinstance(v, (int, float))}
    return found


@functools.cache
def shipped(name: str) -> Any:
    return fmwc.load(name)


def fresh(name: str) -> Any:
    """Return a copy of a shipped field, which may be changed."""
    return fmwc.load(name)


DIGITS = torch.arange(6)


def crystal_cond(count: int, seed: int = 3) -> Found:
    return {"atoms": shipped("crystals").network.draw_sizes(count, seed)}


# ---- shipped checkpoints --------------------------------------------------------------------------------------------


def board(name: str) -> Found:
    field = shipped(name)
    found = of_run(fmwc.sample(field, 200, steps=50, seed=1), name="default")
    found |= of_run(fmwc.sample(field, 200, steps=20, seed=2), name="twenty")
    read = fmwc.sample(
        field, 200, steps=20, seed=3, confidence=Linearised(), schedule=Schedule.every(1), transport=True
    )
    return {**found, **of_run(read, name="read"), **of_reference("reference", field)}


@case
def checkerboard_shipped() -> Found:
    return board("checkerboard")


@case
def checkerboard_joint_shipped() -> Found:
    return board("checkerboard-joint")


def digits(name: str) -> Found:
    field = shipped(name)
    found = of_run(fmwc.sample(field, 6, seed=1, cond={"y": DIGITS}), name="default")
    read = {"confidence": default_estimator(field.space), "schedule": Schedule.every(1), "transport": True}
    run = fmwc.sample(field, 6, **arguments(steps=8, seed=2, cond={"y": DIGITS % 3}, **read))
    return {**found, **of_run(run, "y", name="read"), **of_reference("reference", field)}


@case
def mnist_shipped() -> Found:
    return digits("mnist")


@case
def mnist_joint_shipped() -> Found:
    return digits("mnist-joint")


@case
def crystals_shipped() -> Found:
    field = shipped("crystals")
    found = of_run(fmwc.sample(field, 4, steps=50, seed=1, cond=crystal_cond(4)), name="default")
    read = {"confidence": default_estimator(field.space), "schedule": Schedule.every(1), "transport": True}
    found |= of_run(
        fmwc.sample(field, 2, **arguments(steps=4, seed=2, cond=crystal_cond(2, 4), **read)),
        name="transported",
    )
    run = fmwc.sample(field, 4, **arguments(steps=8, seed=2, cond=crystal_cond(4, 4), **{**read, "transport": False}))
    return {**found, **of_run(run, name="read"), **of_reference("reference", field)}


@case
def networks_plain() -> Found:
    """The velocity of every shipped network, and the logits of the judge, at one state."""
    found: Found = {}
    for name in ("checkerboard", "checkerboard-joint", "mnist", "mnist-joint", "crystals"):
        field = shipped(name)
        cond = {"y": DIGITS} if name.startswith("mnist") else crystal_cond(6) if name == "crystals" else {}
        x0 = noise(field.space, 6, 5, cond=cond)
        with torch.no_grad():
            found |= flat(f"{name} noise", x0)
            found |= flat(f"{name} velocity", field(x0, torch.linspace(0.05, 0.95, 6), **cond))
            found |= flat(f"{name} draw", field.draw(x0, 0.4, seed=7, cond=cond))
    return found


# ---- estimators -----------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, Any] = {
    "diagonal": "diagonal",
    "tangent": "tangent",
    "tangent of three": Tangent(3),
    "monte carlo": "monte_carlo",
    "monte carlo of eight": MonteCarlo(8),
    "linearised": "linearised",
    "linearised by probes": Linearised(2),
    "linearised, shared": Linearised(shared=True),
}


def moments(field: Any, x: Any, t: Any, estimator: Any, name: str, cond: Any = None) -> Found:
    found = field.moments(x, t, estimator, seed=11, cond=cond)
    return {**flat(f"{name} mean", found.mean), **flat(f"{name} var", found.var)}


@case
def estimators_on_points() -> Found:
    found: Found = {}
    for which in ("checkerboard", "checkerboard-joint"):
        field = shipped(which)
        x, t = noise(field.space, 40, 2), torch.linspace(0, 0.99, 40)
        for name, estimator in ESTIMATORS.items():
            count = 6 if name == "monte carlo" else 40
            found |= moments(field, x[-count:], t[-count:], estimator, f"{which} {name}")
    return found


@case
def estimators_on_digits() -> Found:
    found: Found = {}
    for which in ("mnist", "mnist-joint"):
        field = shipped(which)
        x, t = noise(field.space, 3, 2), torch.tensor([0.2, 0.5, 0.9])
        for name in ("diagonal", "linearised by probes", "tangent of three", "monte carlo of eight"):
            found |= moments(field, x, t, ESTIMATORS[name], f"{which} {name}", cond={"y": torch.tensor([1, 4, 8])})
    return found


@case
def estimators_on_crystals() -> Found:
    field, cond = shipped("crystals"), crystal_cond(3)
    x, t = noise(field.space, 3, 2, cond=cond), torch.tensor([0.2, 0.5, 0.9])
    found: Found = {}
    for name in ("diagonal", "linearised by probes", "monte carlo of eight"):
        found |= moments(field, x, t, ESTIMATORS[name], name, cond=cond)
    return found


# ---- ways of sampling -----------------------------------------------------------------------------------------------


@case
def steppers_and_controllers() -> Found:
    field = shipped("checkerboard")
    seen = survey(field, pilot=60, steps=20, seed=3)
    grid = (0.0, 0.1, 0.35, 0.5, 0.8, 1.0)
    ways: dict[str, Any] = {
        "midpoint": {"stepper": "midpoint", "steps": 6},
        "heun": {"stepper": "heun", "evaluations": 11},
        "ema": {"controller": Ema(8)},
        "ema with boost": {"controller": Ema(6, rate=0.3, boost=1.0)},
        "damped": {"controller": Damped(8, late=0.5, gain=0.3)},
        "grid": {"controller": Grid(grid)},
        "times": {"controller": Grid(grid)},
        "planned": {"controller": seen.plan(6)},
        "grid of the profile": {"controller": Grid(seen.grid(6))},
        "extrapolated": {"controller": Extrapolated(Uniform(8))},
        "extrapolated by variance": {"controller": Extrapolated(Uniform(8), boost=1.0, profile=seen)},
        "from the middle": {"start": 0.3, "steps": 6},
        "anti-annealed": {"anneal": dict.fromkeys(field.space.channels, 2.0), "steps": 6},
    }
    found: Found = {"profile usual": seen.usual, "profile shares": seen.shares}
    found["fitted grid"] = np.array(fit_grid(field, 5, pilot=40, seed=1).times)
    for name, way in ways.items():
        found |= of_run(
            fmwc.sample(field, 40, **arguments(seed=4, confidence=Linearised(), check=False, **way)), name=name
        )
    return found


@case
def decoders_and_guidance() -> Found:
    field = shipped("checkerboard-joint")
    ways: dict[str, Any] = {
        "stochastic": "stochastic",
        "mean of five": "mean5",
        "guided": Guidance(0.2),
        "guided in a window": Guidance(0.2, 0.5, 0.9, objective="std", limit=0.5),
        "guided by probes": Guidance(0.3, probes=2),
    }
    found: Found = {}
    for name, decoder in ways.items():
        run = fmwc.sample(
            field, 30, steps=8, seed=5, confidence=Linearised(), check=False, config=SamplingConfig(decoder=decoder)
        )
        found |= of_run(run, name=name)
    x, t = noise(field.space, 10, 6), torch.full((10,), 0.6)
    v, var, slope = variance_gradient(field, x, t)
    found |= {"gradient v": v, "gradient var": var, "gradient slope": slope}
    digits = fmwc.sample(
        shipped("mnist"),
        3,
        steps=3,
        seed=5,
        cond={"y": DIGITS[:3]},
        config=SamplingConfig(decoder=Guidance(0.2, probes=1)),
    )
    return {**found, **of_run(digits, name="guided digits")}


@case
def schedules_and_records() -> Found:
    field = shipped("checkerboard")
    read = {"confidence": Linearised(), "check": False, "seed": 6}
    found: Found = {}
    when = {"every third": Schedule.every(3), "times": Schedule.at([0.2, 0.35, 0.9]), "adaptive": Schedule.adaptive()}
    for name, schedule in when.items():
        steps = 50 if name == "adaptive" else 10
        found |= of_run(fmwc.sample(field, 40, **arguments(steps=steps, schedule=schedule, **read)), name=name)
    for record in ("full", "total", "score"):
        found |= of_run(fmwc.sample(field, 40, **arguments(steps=10, record=record, **read)), name=f"record {record}")
        found |= of_run(
            fmwc.sample(field, 20, seed=6, config=SamplingConfig(record=record)), name=f"default record {record}"
        )
    plain = fresh("checkerboard")
    plain.reference = None
    chosen = fit_schedule(plain, 3, pilot=60, steps=10, seed=2, confidence=Linearised())
    found |= {"fitted times": np.array(chosen.times), "fitted quantiles": chosen.reference.quantiles}
    found["fitted agreement"] = chosen.agreement
    kept = fmwc.sample(field, 12, **arguments(steps=6, keep_states=True, **read))
    found |= of_run(kept, name="states")
    found |= of_run(kept.take(torch.tensor([3, 1, 7])), name="taken")
    found |= of_run(kept.compact(), name="compact") | of_run(kept.read_at([0, 2, 5]), name="read at")
    found |= of_run(kept.surest(0.5), name="surest") | of_run(kept.ranked_by("peak"), name="ranked")
    found |= of_run(
        fmwc.sample(field, 25, **arguments(steps=6, batch=10, first=3, transport=True, projections=4, **read)),
        name="in batches",
    )
    for i, part in enumerate(stream(field, 30, seed=6, config=SamplingConfig(batch=12))):
        found |= of_run(part, name=f"streamed {i}")
    total = fmwc.sample(
        shipped("mnist"),
        3,
        steps=4,
        cond={"y": DIGITS[:3]},
        confidence=Linearised(1),
        config=SamplingConfig(record="total"),
    )
    return {**found, **of_run(total, name="digits")}


@case
def solvers_of_others() -> Found:
    field = shipped("checkerboard")
    watched, x = fmwc.VarianceRecorder(field), noise(field.space, 10, 8)
    with torch.no_grad():
        for step in range(6):
            x = x + watched(x, torch.tensor(step / 6)) / 6
    found = of_run(watched.trajectory(x), name="watched")
    run = fmwc.sample(field, 10, steps=6, confidence=None, check=False, config=SamplingConfig(keep_states=True))
    return {**found, **of_run(reread(field, run, Diagonal()), name="reread")}


# ---- checks ---------------------------------------------------------------------------------------------------------


def of_check(name: str, found: Any) -> Found:
    given = {n: getattr(found, n) for n in ("evidence", "score", "confidence", "rival", "margin", "evaluations")}
    return {f"{name} {k}": v for k, v in given.items() if v is not None}


@case
def checks_of_samples() -> Found:
    points_field, digits_field, crystals_field = (shipped(n) for n in ("checkerboard", "mnist", "crystals"))
    x = checkerboard.sample(50, seed=3)
    found = of_check("nearest", fmwc.check(points_field, x))
    found |= of_check("echo of points", fmwc.check(points_field, x, evaluations=8, evidence="echo", seed=2))
    found |= of_check(
        "plain network", fmwc.check(points_field.network, x, evaluations=6, space=(2,), conventions=False)
    )
    run = fmwc.sample(digits_field, 6, steps=6, cond={"y": DIGITS}, confidence=None, check=False)
    found |= of_check("contest", fmwc.check(digits_field, run.x, {"y": DIGITS}))
    found |= of_check(
        "contest of 30", fmwc.check(digits_field, run.x, {"y": (DIGITS + 1) % 10}, evaluations=30, seed=1)
    )
    found |= of_check("echo of digits", fmwc.check(digits_field, run.x, {"y": DIGITS}, evidence="echo", evaluations=4))
    few = Contest("y", torch.arange(4))
    found |= of_check("contest of four", fmwc.check(digits_field, run.x[:4], {"y": DIGITS[:4]}, evidence=few))
    cond = crystal_cond(4)
    run = fmwc.sample(crystals_field, 4, steps=4, confidence=None, check=False, cond=cond)
    found |= of_check("echo of crystals", fmwc.check(crystals_field, run.x, cond))
    own = Echo((0.3, 0.7), 2)
    found |= of_check("own echo", fmwc.check(crystals_field, run.x, cond, evidence=own, seed=4))
    checked = fmwc.sample(digits_field, 6, steps=4, cond={"y": DIGITS}, check=12)
    return {**found, **of_run(checked, name="sampled with a check")}


# ---- uses -----------------------------------------------------------------------------------------------------------


@case
def uses_on_points() -> Found:
    field = shipped("checkerboard")
    run = fmwc.sample(field, 60, steps=10, seed=9, confidence=Linearised(), check=False, transport=True)
    run = run.ranked_by("temporal_ratio")
    found: Found = {"critical": critical_time(run), "critical, transported": critical_time(run, kind="transported")}
    found |= {"random times": random_times(run, 3, 2)}
    found |= of_run(edit(field, run, None, at=0.4, scale=0.3, seed=1), name="edit")
    found |= of_run(
        edit(field, run, None, at=critical_time(run), scale=0.2, replicates=2, together=False), name="edits"
    )
    whole, spent = with_states(field, run)
    found |= {"states spent": spent, **flat("states", whole.states)}
    worst = choose(-run.score(), budget=15)
    found |= {"worst": worst, "ranks": ranks(run.score()), "kept": choose(run.score(), keep=0.5)}
    done = rewind(field, whole, worst, branches=3, before=0.3, scale=0.4, seed=2)
    found |= {**of_run(done.run, name="rewound"), "rewound branch": done.branch, "rewound spent": done.evaluations}
    for name, fresh_noise in (("resampled", False), ("started over", True)):
        done = resample(field, whole, 240, share=0.2, seed=3, fresh=fresh_noise)
        found |= {**of_run(done.run, name=name), f"{name} branch": done.branch, f"{name} spent": done.evaluations}
    assert whole.states is not None
    first = torch.arange(60) % 10
    here = torch.stack(whole.states)[first, torch.arange(60)]
    again, spent = continue_from(field, whole, here + 0.01, first)
    found |= {**of_run(again, name="resumed"), "resumed spent": spent}
    best = best_of(field, 30, 3, seed=4, steps=50)
    found |= {**of_run(best.run, name="best"), "best branch": best.branch, "best spent": best.evaluations}
    best = best_of(field, 30, budget=25, seed=4, steps=10, confidence=Linearised(), score="peak", check=False)
    return {**found, **of_run(best.run, name="best by peak"), "best by peak branch": best.branch}


@case
def uses_on_digits_and_crystals() -> Found:
    field = shipped("mnist")
    read = {"confidence": Linearised(1), "check": False}
    run = fmwc.sample(field, 4, **arguments(steps=4, seed=9, cond={"y": DIGITS[:4]}, keep_states=True, **read))
    edited = edit(
        field, run, None, at=0.5, scale=0.5, seed=1, cond={"y": torch.tensor([7, 7, 1, 2])}, confidence=Linearised(1)
    )
    found = of_run(edited, "y", name="edit of digits")
    best = best_of(field, 3, 2, cond={"y": [0, 1, 2]}, steps=6, check=12, confidence=None)
    found |= {**of_run(best.run, name="best digits"), "best digits branch": best.branch}
    field, cond = shipped("crystals"), crystal_cond(3)
    run = fmwc.sample(field, 3, **arguments(steps=4, seed=9, keep_states=True, **read, cond=cond))
    for channel in ("type", "coord", "lattice"):
        edited = edit(field, run, channel, at=0.5, scale=0.3, seed=1, confidence=None)
        found |= flat(f"edit of {channel}", edited.x)
        found[f"critical {channel}"] = critical_time(run, channel)
    return found


@case
def trust_and_heads() -> Found:
    run = fmwc.sample(shipped("checkerboard"), 400, steps=10, seed=10, confidence=Linearised(), check=False)
    bad, doubt = points.misplaced(run.x), run.score("temporal_ratio")
    made = risk_control(doubt, bad, 0.3, 0.9, seed=1)
    other = risk_control(doubt[:200], bad[:200], 0.25, 0.8, others=doubt[200:])
    found = {**of_numbers("promise ", {"own": made.as_dict(), "others": other.as_dict()}), "keeps": made.keeps(doubt)}
    told = reliability(run.ranked_by("temporal_ratio").rank, bad)
    found |= {f"reliability {k}": v for k, v in told._asdict().items()}
    found["needed"] = required_labels(0.05, 0.9)
    half = torch.arange(200)
    for kind in ("l1", "boosting"):
        head = fit_head(run.take(half), bad[:200], kind)
        found[f"head {kind}"] = head.score(run.take(half + 200))
    grouped = dataclasses.replace(run, cond={"y": torch.arange(400) % 2})
    found["head within"] = fit_head(grouped.take(half), bad[:200], "l1", within="y").score(grouped.take(half + 200))
    return {**found, "score within": grouped.score("peak", within="y")}


# ---- training -------------------------------------------------------------------------------------------------------


class Foreign(nn.Module):
    """A network as a user of another library writes it."""

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())
        self.out = nn.Linear(16, 2)
        self.table = nn.Embedding(classes, 3) if classes else None

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None) -> Tensor:
        h = torch.cat([x, t[:, None]], 1)
        return self.out(self.body(h if self.table is None or y is None else h + self.table(y)))


class TwoChannels(nn.Module):
    """A velocity network for states {place, shape}: place on a torus, shape in flat space."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.place, self.shape = nn.Linear(6, 12), nn.Linear(12, 2), nn.Linear(12, 3)

    def forward(self, x: dict[str, Tensor], t: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.hidden(torch.cat([x["place"], x["shape"], t[:, None]], -1)))
        return {"place": self.place(h), "shape": self.shape(h)}


def trained(net: nn.Module, data: Tensor, steps: int = 60, cond: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A network trained by hand."""
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(steps):
        rows = torch.arange(step, step + 64) * 7 % len(data)
        given = {k: v[rows] for k, v in (cond or {}).items()}
        loss = fmwc.flow_matching_loss(net, (2,), data[rows], seed=torch.Generator().manual_seed(step), cond=given)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net


@case
def training_joint() -> Found:
    data = checkerboard.sample(300, seed=1)
    field = fmwc.attach(MLP(2, 16, 2, 8), space=(2,), width=8)
    found = of_weights("initial", field)

    def loss(x1: Tensor, randomness: Any, beta: Tensor, cond: Any) -> Tensor:
        return fmwc.elbo_loss(field, x1, beta, seed=randomness)

    for name, options in {
        "plain": {},
        "averaged": {"average": 0.9, "weight_decay": 0.01, "decay": "cosine"},
        "clipped": {"clip": 0.1, "stratified": True},
    }.items():
        plan = TrainingConfig(**{"iterations": 12, "batch": 32, "lr": 1e-2, "beta": 1e-3, "seed": 3, **options})
        history = train(field, loss, data, plan, every=4)
        found |= {f"{name} history": np.array(history), **of_weights(f"{name} weights", field)}
    found |= moments(field, data[:20], torch.linspace(0, 0.9, 20), "linearised", "trained")
    return found


@case
def training_retrofit() -> Found:
    data = checkerboard.sample(400, seed=2)
    field = fmwc.attach(trained(Foreign(), data), space=(2,), width=8, seed=5)
    found = of_weights("network", field.network)
    found["noise history"] = np.array(
        fmwc.fit_noise(field, data, steps=15, batch=64, seed=6, confidence=False, every=5)
    )
    found |= of_weights("noise", field)
    for name in ("linearised", "diagonal", "tangent of three"):
        found |= moments(field, data[:20], 0.5, ESTIMATORS[name], name)
    fmwc.fit_noise(field, data, steps=4, pairs="ot", batch=32, confidence=False, conventions=False)
    found |= of_weights("noise by optimal transport", field)
    fmwc.fit_confidence(field, data, pilot=60, steps=20, seed=7)
    found |= of_reference("confidence", field)
    found |= of_run(fmwc.sample(field, 30, steps=20, seed=8), name="run")
    fmwc.fit_confidence(field, data, lambda x, cond: points.misplaced(x), pilot=120, steps=20, seed=7)
    found |= of_reference("by labels", field)
    fmwc.fit_confidence(field, pilot=60, steps=20)
    return {**found, **of_reference("without data", field)}


@case
def training_with_classes() -> Found:
    data = checkerboard.sample(400, seed=2)
    y = (data[:, 0] > 0).long() + 2 * (data[:, 1] > 0).long()
    field = fmwc.attach(trained(Foreign(4), data, 120, cond={"y": y}), space=(2,), width=8)
    fmwc.fit_noise(field, data, steps=10, batch=64, cond={"y": y}, confidence=False)
    fmwc.fit_confidence(field, data, cond={"y": y}, pilot=80, steps=20, seed=7)
    found = of_weights("weights", field) | of_reference("confidence", field)
    with tempfile.TemporaryDirectory() as folder:
        fmwc.save(field, Path(folder) / "saved")
        field = fmwc.load(Path(folder) / "saved", network=Foreign(4))
        run = fmwc.sample(field, 24, steps=20, seed=8, cond={"y": torch.arange(24) % 4}, confidence=Linearised())
        run.save(Path(folder) / "run.safetensors")
        run = Trajectory.load(Path(folder) / "run.safetensors")
    return {**found, **of_run(run, "y", name="run of what was saved")}


@case
def training_two_channels() -> Found:
    space = Space({"place": Channel((2,), FlatTorus(), "uniform", weight=4.0), "shape": Channel((3,))})
    generator = torch.Generator().manual_seed(0)
    data = {"place": torch.rand(200, 2, generator=generator), "shape": torch.randn(200, 3, generator=generator)}
    field = fmwc.attach(TwoChannels(), space=space, width=8)
    fmwc.fit_noise(field, data, steps=8, batch=50, confidence=False, conventions=False)
    found = of_weights("weights", field)
    for name in ("linearised", "linearised by probes", "diagonal", "monte carlo of eight"):
        found |= moments(field, {k: v[:6] for k, v in data.items()}, 0.4, ESTIMATORS[name], name)
    run = fmwc.sample(
        field, 12, steps=5, transport=True, confidence=Linearised(), config=SamplingConfig(anneal={"place": 2.0})
    )
    found |= of_run(run, name="run")
    x0 = noise(space, 6, 3)
    found |= {"divergence": divergence(field, x0, torch.full((6,), 0.3))}
    ends = stochastic_ends(field, x0, 3, steps=4, seed=2)
    return {**found, **flat("ends", ends), "dispersion": dispersion(ends, space)}


@case
def training_of_images() -> Found:
    generator = torch.Generator().manual_seed(0)
    data, y = torch.randn(60, 1, 8, 8, generator=generator), torch.arange(60) % 10
    field = fmwc.attach(UNet(base=8, cond=8), space=(1, 8, 8), width=8)
    found = of_weights("initial", field)
    optimiser = torch.optim.Adam(field.parameters(), 1e-3)
    for step in range(3):
        loss = fmwc.elbo_loss(field, data[:16], beta=1e-3, seed=torch.Generator().manual_seed(step), cond={"y": y[:16]})
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found[f"loss {step}"] = loss.detach()
    found |= of_weights("trained", field)
    for name in ("diagonal", "linearised by probes", "tangent of three"):
        found |= moments(field, data[:4], 0.4, ESTIMATORS[name], name, cond={"y": y[:4]})
    return found


# ---- baselines, diagnostics, metrics --------------------------------------------------------------------------------


@case
def divergence_along_a_run() -> Found:
    field = shipped("checkerboard")
    run = fmwc.sample(
        field, 20, steps=6, seed=3, confidence=Linearised(), check=False, config=SamplingConfig(keep_states=True)
    )
    exact = along(field, run.states, run.grid)
    found: Found = {"exact": exact, "by probes": along(field, run.states, run.grid, 2, seed=4)}
    found["agreement"] = np.array(agreement(run.std.square(), exact.abs()))
    x, t = run.x, torch.full((20,), 0.5)
    found["gaussian"] = estimates(field, x, t, 3, distribution="gaussian", seed=5)
    digits_field = shipped("mnist")
    x0 = noise(digits_field.space, 3, 1)
    found["digits"] = divergence(digits_field, x0, torch.full((3,), 0.4), 2, seed=6, cond={"y": DIGITS[:3]})
    field, cond = shipped("crystals"), crystal_cond(2)
    x0 = noise(field.space, 2, 1, cond=cond)
    return {**found, "crystals": divergence(field, x0, torch.full((2,), 0.4), 1, seed=6, cond=cond)}


@case
def baselines_of_points() -> Found:
    field, other = shipped("checkerboard"), shipped("checkerboard-joint")
    x0 = noise(field.space, 20, 4)
    ends = stochastic_ends(other, x0, 4, steps=5, seed=1)
    found: Found = {"stochastic": ends, "stochastic dispersion": dispersion(ends)}
    ends = ensemble_ends([field, other], x0, steps=5)
    found |= {"ensemble": ends, "ensemble dispersion": dispersion(ends, field.space)}
    dropout = Dropout(MLP(2, 16, 2, 8), 0.2)
    ends = stochastic_ends(dropout, x0, 3, steps=5, seed=2, space=(2,))
    found |= {"dropout": ends, "dropout still": dropout(x0, torch.full((20,), 0.5)).detach()}
    for name, reading in {"sensitivity": StateSensitivity(), "trace": PosteriorTrace(probes=2)}.items():
        found |= of_run(fmwc.sample(field, 20, steps=5, confidence=reader(reading), check=False), name=name)
    head, data = HeteroscedasticHead(MLP(2, 16, 2, 8, outputs=4)), checkerboard.sample(200, seed=1)

    def loss(x1: Tensor, randomness: Any, beta: Tensor, cond: Any) -> Tensor:
        return nll(head, field.space, x1, randomness)

    history = train(head, loss, data, TrainingConfig(8, batch=32, lr=1e-2), every=2)
    found |= {"head history": np.array(history), **of_weights("head", head)}
    found["head loss"] = nll(head, field.space, data, Stream(torch.Generator().manual_seed(0)), velocity=False).detach()
    run = fmwc.sample(
        head, 20, steps=5, confidence=HeteroscedasticVariance(), check=False, config=SamplingConfig(space=(2,))
    )
    return {**found, **of_run(run, name="head run")}


@case
def baselines_of_digits() -> Found:
    field = shipped("mnist")
    x0 = noise(field.space, 3, 4)
    ends = stochastic_ends(
        Dropout(fresh("mnist").network), x0, 2, steps=2, seed=2, cond={"y": DIGITS[:3]}, space=field.space
    )
    found: Found = {"dropout": ends}
    for name, reading in {"sensitivity": StateSensitivity(probes=1), "trace": PosteriorTrace(probes=1)}.items():
        run = fmwc.sample(field, 3, steps=3, confidence=reader(reading), check=False, cond={"y": DIGITS[:3]})
        found |= {f"{name} var": run.var, f"{name} score": run.score("integrated")}
    return found


@case
def metrics_of_rankings() -> Found:
    generator = np.random.default_rng(0)
    score, positive = generator.normal(size=300), generator.random(300) < 0.2
    score = np.round(score + positive, 1)  # with ties
    found: Found = {"auprc": ranking.auprc(score, positive), "ranking": np.array(ranking.ranking(score, positive))}
    kept = ranking.retention(score, positive)
    found |= {f"retention {k}": v for k, v in kept._asdict().items()}
    found |= of_numbers("precisions ", {"all": ranking.precisions(score, positive)})
    found |= of_numbers("compared ", ranking.compare({"one": score, "other": -(score**2)}, positive, seed=3))
    found["bootstrap"] = np.array(ranking.bootstrap(lambda rows: score[rows].mean(), 300, 4))
    return {**found, "rate": rate(positive), "rate kept": rate_kept(score, positive, 0.8)}


@case
def metrics_of_samples() -> Found:
    generator = torch.Generator().manual_seed(0)
    x = checkerboard.sample(400, seed=4) + 0.2 * torch.randn(400, 2, generator=generator)
    found: Found = {"data": x, "misplaced": points.misplaced(x), "misplacement": points.misplacement(x)}
    found |= {
        "squares": " ".join(points.squares(x)),
        "kl": symmetric_kl(x, 40),
        "inside": checkerboard.inside(x),
    }
    judge = fmwc.checkpoint.load_network("mnist-judge")
    y = torch.arange(20) % 10
    x = fmwc.sample(shipped("mnist"), 20, steps=3, cond={"y": y}, confidence=None, check=False).x
    a, b = images.activations(judge, x), images.activations(judge, x.flip(3))
    found |= {"predictions": images.predictions(judge, x), "failed": images.failed(judge, x, y), "activations": a}
    return {**found, "accuracy": images.accuracy(judge, x, y), "frechet": frechet(a[:, :12], b[:, :12])}


def structures() -> list[Any]:
    """Rock salt, the same twice as large, caesium chloride, and two impossible structures."""
    from fmwc.crystals import Candidate

    faces = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    coords, numbers = np.concatenate([faces, faces + 0.5]) % 1, np.array([11] * 4 + [17] * 4)
    twice = np.concatenate([coords, coords + np.array([1, 0, 0])]) / [2, 1, 1]
    two, pair = np.array([[0, 0, 0], [0.5, 0.5, 0.5]]), np.array([11, 17])
    return [
        Candidate("salt", numbers, coords, np.eye(3) * 5.64),
        Candidate("twice", np.tile(numbers, 2), twice, np.diag([11.28, 5.64, 5.64])),
        Candidate("caesium", np.array([55, 17]), two, np.eye(3) * 4.1),
        Candidate("close", pair, two / 10, np.eye(3) * 4),
        Candidate("flat", pair, two, np.diag([1e-3, 300, 300])),
        Candidate("potassium", np.array([19] * 4 + [17] * 4), coords, np.eye(3) * 6.3),
    ]


@case
def metrics_of_crystals() -> Found:
    pytest.importorskip("pymatgen.core", exc_type=ImportError)
    pytest.importorskip("chgnet", exc_type=ImportError)
    from fmwc.crystals import Hull, Known, judge, mp20, shipped_hull, unique, validity
    from fmwc.crystals.matching import chemistry_changed, coordinate_rmsd
    from fmwc.crystals.structures import decode, encode

    those = structures()
    found: Found = {f"validity of {c.name}": np.array(validity(c), dtype=float) for c in those}
    fine = [c for c in those if c.name not in ("close", "flat")]
    found |= {"unique": np.array(unique(fine)), "known": np.array([Known(fine[:1]).holds(c) for c in fine])}
    hull = Hull(["Na", "Cl", "NaCl", "Na3Cl"], [-1.3, -1.8, -3.4, -1.5], "mine")
    found["above"] = np.array([hull.above(f, -2.0)[0] for f in ("NaCl", "Na2Cl", "NaCl3", "Na")])
    shipped_one = shipped_hull()
    found["above the shipped hull"] = np.array([shipped_one.above(f, -3.0)[0] for f in ("NaCl", "CsCl", "Fe2O3")])
    judged = judge(those, known=those[2:3])
    for column in judged.columns:
        values = judged[column]
        if all(isinstance(v, (int, float)) for v in values):
            found[f"judged {column}"] = np.array(values, dtype=float)
        elif column != "problem":
            found[f"judged {column}"] = "\n".join(map(str, values))
    relaxed = judge(those[2:3], relax=2)
    found["relaxed"] = np.array(relaxed["e_above_hull"], dtype=float)
    data = mp20.prototypes("train").take(torch.arange(12))
    state, atoms = encode(data)
    found |= {**flat("encoded", state), "atoms": atoms}
    moved = decode({**state, "coord": (state["coord"] * 1.1) % 1, "type": state["type"].roll(1, 1)}, atoms)
    found |= {"decoded numbers": moved.numbers, "decoded coords": moved.coords, "decoded lengths": moved.lengths}
    return {**found, "rmsd": coordinate_rmsd(data, moved), "changed": chemistry_changed(data, moved)}


# ---- recipes --------------------------------------------------------------------------------------------------------


def cell_of(path: Path) -> Found:
    return of_numbers("", json.loads(path.read_text())["numbers"])


@case
def recipe_of_points() -> Found:
    import experiments.checkerboard.evaluate as evaluate
    import experiments.checkerboard.reproduce as room
    from fmwc.checkerboard.recipe import Checkerboard

    recipe = Checkerboard(
        points=200, hidden=8, depth=1, time_features=4, iterations=4, batch=8, width=4, noise_steps=2, save_every=2
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "SCHEDULES", {"cosine": room.SCHEDULES["cosine"]})
        patch.setattr(evaluate, "POINTS", 20)
        patch.setattr(evaluate, "DRAWS", 8)
        out, quiet = Path(folder), lambda text: None
        (path,) = room.reproduce(recipe, out, CPU, seeds=(0,), count=200, steps=12, draws=4, say=quiet)
        found = cell_of(path)
        for name in ("checkerboard",):
            field = fmwc.load(out / "models" / name)
            found |= {**of_weights(f"{name} weights", field), **of_reference(name, field)}
    return found


@case
def recipe_of_digits() -> Found:
    from sklearn.datasets import load_digits

    import experiments.mnist.evaluate as evaluate
    import experiments.mnist.reproduce as room
    import fmwc.mnist.recipe as recipe_room
    from fmwc.mnist.classifier import Classifier, fit_classifier

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in {"STATES": 8, "HUTCHINSON": 2, "PROBES": 2, "STEPS": (2,), "DRAWS": 4}.items():
            patch.setattr(evaluate, name, value)
        for place in (evaluate, recipe_room, room):
            patch.setattr(place, "batch_for", lambda device: 160)
        patch.setattr(recipe_room, "sample", lambda *a, steps, **k: fmwc.sample(*a, **arguments(steps=2, **k)))
        out, small = Path(folder), load_digits()
        np.savez(out / "digits.npz", x=(small.images * 15).astype(np.uint8), y=small.target)
        size = {"base": 8, "cond": 8, "iterations": 3, "batch": 8, "noise_steps": 2, "width": 8, "references": 80}
        recipe = recipe_room.Mnist(**size, save_every=2, data=str(out / "digits.npz"), own=True)
        judge = Classifier(iterations=60, batch=64, data=recipe.data, own=True)
        fit_classifier(judge, recipe.images(), recipe.images("test"), out / "judge", CPU)
        given = {"count": 160, "steps": 6, "draws": 5, "few": 80, "judge": out / "judge", "say": lambda text: None}
        (path,) = room.reproduce(recipe, out / "results", CPU, **given)
        found = cell_of(path)
        for name in ("mnist", "mnist-joint"):
            field = fmwc.load(out / "results" / "models" / name)
            found |= {**of_weights(f"{name} weights", field), **of_reference(name, field)}
    return found


@case
def recipe_of_crystals() -> Found:
    pytest.importorskip("pymatgen.core", exc_type=ImportError)
    pytest.importorskip("chgnet", exc_type=ImportError)
    import experiments.crystals.reproduce as room
    from fmwc.crystals.recipe import Mp20

    size = {"hidden": 16, "layers": 1, "frequencies": 4, "time_features": 8, "iterations": 6, "batch": 16, "width": 8}
    recipe = Mp20(**size, noise_steps=2, references=16, steps=4, save_every=4, data="prototypes")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "SAMPLERS", ((5, 0.0),))
        patch.setattr(ranking, "RESAMPLES", 50)
        out = Path(folder)
        (path,) = room.reproduce(recipe, out, CPU, count=24, draws=2, few=6, ks=(1, 2, 4), say=lambda text: None)
        found = cell_of(path)
        for name in ("crystals", "crystals-joint"):
            field = fmwc.load(out / "models" / name)
            found |= {**of_weights(f"{name} weights", field), **of_reference(name, field)}
        run = Trajectory.load(out / "draws" / "retrofit-0.safetensors")
    return {**found, **of_run(run, name="run")}


def awake(field: Any) -> Any:
    """Make the noise depend on the input, as after training."""
    generator = torch.Generator().manual_seed(0)
    for layer in field.noise.layers:
        with torch.no_grad():
            layer.inference.out.weight.copy_(torch.randn(layer.inference.out.weight.shape, generator=generator) / 2)
    return field


@case
def study_of_points() -> Found:
    import experiments.uses.drawing as drawing
    import experiments.uses.evaluate as reading
    from experiments.checkerboard.experiment import CheckerboardExperiment
    from experiments.common.experiment import Sizes
    from experiments.uses.folder import NUMBERS
    from experiments.uses.study import study
    from fmwc.registry import domain_named

    few = {"SWEEP": (2, 4), "EXTRA": (2, 5), "FIXED": (0.0, 0.4)}
    field = awake(fmwc.attach(MLP(2, 8, 1, 8), space=(2,), width=8))
    experiment = CheckerboardExperiment(domain_named("checkerboard"), field, Sizes(60, 4, 2, 8, 12, 4))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in few.items():
            patch.setattr(drawing, name, value)
        patch.setattr(reading, "LABELLED", (30,))
        patch.setattr(reading, "SPLITS", 10)
        study(experiment, Path(folder), seeds=(200, 201), say=lambda text: None)
        return of_numbers("", json.loads((Path(folder) / NUMBERS).read_text())["numbers"])


# ---- the command line -----------------------------------------------------------------------------------------------


def command(*words: object) -> str:
    """Return the output of a command, which must succeed."""
    from fmwc.__main__ import main

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        argv, verbs = runner(words)
        patch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            main(*verbs)
    assert not stop.value.code, words
    return printed.getvalue()


def tables(folder: Path, name: str) -> Found:
    """Return every table in a folder."""
    return {f"{name} {path.name}": path.read_text() for path in sorted(folder.glob("*.csv"))}


@case
def command_line_of_points() -> Found:
    found: Found = {}
    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        lines: dict[str, tuple[object, ...]] = {
            "default": ("sample", "checkerboard", "-n", 50),
            "read": ("sample", "checkerboard", "-n", 50, "--steps", 10, "--score", "temporal_ratio", "--seed", 2),
            "few": ("sample", "checkerboard", "-n", 50, "--adaptive"),
            "kept": ("filter", at / "default", "--keep", 0.5),
            "kept by another": ("filter", at / "read", "--budget", 7, "--score", "peak"),
            "edited": ("edit", at / "read", "--scale", 0.3, "--doubtful", 5, "--replicates", 2, "--device", "cpu"),
            "rewound": ("rewind", at / "read", "--extra", 3, "--share", 0.2, "--seed", 1, "--device", "cpu"),
            "checked": ("check", at / "default", "--evidence", "echo", "--evaluations", 6, "--device", "cpu"),
        }
        for name, line in lines.items():
            more = ("--device", "cpu") if line[0] == "sample" else ()
            command(*line, *more, "--out", at / name)
            found |= tables(at / name, name)
            if (at / name / "samples.safetensors").is_file():
                found |= flat(f"{name} x", Trajectory.load(at / name).x)
        sizes = ("hidden=16", "time_features=8", "iterations=40", "batch=64", "noise_steps=10", "points=2000")
        sets = [word for size in sizes for word in ("--set", size)]
        command("train", "checkerboard", "--preset", "quick", "--device", "cpu", "--out", at / "model", *sets)
        found |= of_weights("trained", fmwc.load(at / "model"))
        words = ("--checkpoint", at / "model", "-n", 200, "--device", "cpu", "--json")
        told = json.loads(command("evaluate", "checkerboard", *words))
    return {**found, **of_numbers("evaluated ", {"all": told})}


@case
def command_line_of_digits() -> Found:
    found: Found = {}
    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        words: dict[str, tuple[object, ...]] = {
            "default": ("sample", "mnist", "-n", 5, "--steps", 4),
            "plain": ("sample", "mnist", "-n", 4, "--steps", 4, "--label", 3, "--propagation", "none"),
            "rewound": ("rewind", at / "default", "--extra", 2, "--share", 0.5),
            "checked": ("check", at / "default"),
        }
        for name, line in words.items():
            command(*line, "--device", "cpu", "--out", at / name)
            found |= tables(at / name, name)
    return found


@case
def command_line_of_crystals() -> Found:
    pytest.importorskip("pymatgen.core", exc_type=ImportError)
    pytest.importorskip("chgnet", exc_type=ImportError)
    from fmwc.crystals.files import cif_text

    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        (at / "cif").mkdir()
        for candidate in (structures()[0], structures()[2]):
            (at / "cif" / f"{candidate.name}.cif").write_text(cif_text(candidate))
        printed = command("judge", at / "cif", "--json")
        command("sample", "crystals", "-n", 3, "--steps", 4, "--device", "cpu", "--out", at / "drawn")
        found = {"judged": printed, **tables(at / "drawn", "drawn")}
        for path in sorted((at / "drawn" / "cif").glob("*.cif")):
            found[f"drawn {path.name}"] = path.read_text()
    return found
