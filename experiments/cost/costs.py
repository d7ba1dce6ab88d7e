"""Measure the cost of confidence in time and memory, relative to plain sampling and plain training.

All measurements are interleaved. Cases are measured in order of importance; cases beyond the time limit are listed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from experiments.cost.meter import Meter, peak, reset_peak, spread
from fmwc.baselines import stochastic_ends
from fmwc.domains import Domain
from fmwc.errors import UsageError, nearest
from fmwc.estimators import Diagonal, MonteCarlo, Tangent
from fmwc.field import Field
from fmwc.flow import elbo_loss, flow_matching_loss
from fmwc.modes import tensor_float
from fmwc.provenance import Clock, provenance
from fmwc.sampling import AsReference, SamplingConfig, Schedule, noise, sample
from fmwc.training import TrainingConfig, train

MEMBERS = 5  # trajectories of an ensemble or of a stochastic flow
STEPS = 10  # optimiser steps per timing
SIZES = {  # the default number of samples
    "checkerboard": {"cpu": 2048, "cuda": 65_536},
    "mnist": {"cpu": 16, "cuda": 1024},
    "crystals": {"cpu": 8, "cuda": 512},
}


@dataclass(frozen=True)
class Case:
    """A kind of sampling.

    Arguments:
        options: Options of :func:`fmwc.sample`; `AsReference()` stands for the domain's estimator.
        runs: Trajectories per sample.
        stochastic: Whether trajectories use random draws of the weights.
    """

    options: Mapping[str, Any]
    runs: int = 1
    stochastic: bool = False


PLAIN = "plain"
CASES: dict[str, Case] = {  # in order of importance; ratios are relative to the first
    PLAIN: Case({"confidence": None}),
    "linearised, every step": Case({"confidence": AsReference()}),
    "linearised, every 5th step": Case({"confidence": AsReference(), "schedule": Schedule.every(5)}),
    "diagonal Taylor-1, every step": Case({"confidence": Diagonal("taylor1")}),
    "diagonal Gauss–Hermite, every step": Case({"confidence": Diagonal()}),
    "linearised, every 10th step": Case({"confidence": AsReference(), "schedule": Schedule.every(10)}),
    "diagonal Gauss–Hermite, every 5th step": Case({"confidence": Diagonal(), "schedule": Schedule.every(5)}),
    "diagonal Gauss–Hermite, every 10th step": Case({"confidence": Diagonal(), "schedule": Schedule.every(10)}),
    "ensemble of 5": Case({"confidence": None}, runs=MEMBERS),
    "dispersion of 5 stochastic trajectories": Case({}, runs=MEMBERS, stochastic=True),
    "tangent (1 probe), every step": Case({"confidence": Tangent()}),
    "Monte Carlo variance (k = 5), every step": Case({"confidence": MonteCarlo(MEMBERS)}),
    "transported dispersion": Case({"confidence": None, "transport": True}),
}
PARTS = {"sampling": 0.75, "training": 1.0}  # the latest end of each part, as a share of the time limit

Loss = Callable[..., Any]


def _plain_loss(model: Field) -> Loss:
    space: Any = model.space
    return lambda x1, randomness, beta, cond: flow_matching_loss(model.network, space, x1, seed=randomness, cond=cond)


def _joint_loss(model: Field) -> Loss:
    return lambda x1, randomness, beta, cond: elbo_loss(model, x1, beta, seed=randomness, cond=cond)


# The trained module and its loss; ratios are relative to the first.
TRAINING: dict[str, tuple[Callable[[Field], Any], Callable[[Field], Loss]]] = {
    "flow matching": (lambda model: model.network, _plain_loss),
    "joint training (elbo)": (lambda model: model, _joint_loss),
    "retrofit": (lambda model: model.noise, _joint_loss),
}


def words_of(only: str) -> list[str]:
    """Split `--only` into words; each is the name of a part, or occurs in the name of a case."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    for word in words:
        if word not in PARTS and not any(word in name for name in CASES):
            raise UsageError(nearest(word, [*PARTS, "linearised", "diagonal", *CASES], "case"))
    return words


@dataclass(frozen=True)
class Bench:
    """Measures the costs of one field.

    Arguments:
        domain, model: The field and its domain.
        count: The number of samples.
        steps: The number of Euler steps.
        names: The cases to measure.
    """

    domain: Domain
    model: Field
    count: int
    steps: int
    names: Sequence[str]

    def _start(self, count: int) -> tuple[Any, dict[str, Any]]:
        """Return noise and conditions."""
        cond = {k: v.to(self.model.device) for k, v in self.domain.conditions(self.model, count).items()}
        return noise(self.model.space, count, 0, self.model.device, cond=cond), cond  # type: ignore[arg-type]

    def _tasks(self, count: int, names: Iterable[str]) -> dict[str, Callable[[], object]]:
        """Return a function for each case; all sample from the same noise."""
        x0, cond = self._start(count)

        def run(case: Case) -> None:
            options = {"steps": self.steps, "cond": cond, "config": SamplingConfig(batch=count), **case.options}
            if isinstance(options.get("confidence"), AsReference):
                options["confidence"] = self.domain.estimator(self.model)
            if case.stochastic:
                stochastic_ends(self.model, x0, case.runs, **options)
                return
            for _ in range(case.runs):
                sample(self.model, x0=x0, **options)

        return {name: partial(run, CASES[name]) for name in names}

    def sampling(self, meter: Meter) -> dict[str, Any]:
        """Measure each case, in the same rounds."""
        return {"cases": meter(self._tasks(self.count, self.names), "sampling")}

    def training(self, meter: Meter) -> dict[str, Any]:
        """Measure the time per training step of each method, without the first steps, which include compilation."""
        times: dict[str, list[float]] = {}
        memory: dict[str, float | None] = {}
        for name, (part, loss) in TRAINING.items():
            if time.perf_counter() >= meter.until:
                meter.left_out.append(f"training: {name}")
                continue
            ends: list[float] = []
            reset_peak(self.model.device)
            try:
                self._train(part, loss, lambda *_: ends.append(time.perf_counter()), meter.rounds + 1)  # noqa: B023
            except UsageError as error:  # the steps cannot be captured as a CUDA graph
                meter.left_out.append(f"training: {name} ({error})")
                continue
            times[name] = [(b - a) / STEPS for a, b in pairwise(ends)]
            memory[name] = peak(self.model.device)
            meter.say(f"training: {name}, {statistics.median(times[name]):.3g} s per step")
        if next(iter(TRAINING)) not in times:
            return {}  # nothing to compare with
        return {"training": {name: row | {"peak_mib": memory[name]} for name, row in spread(times).items()}}

    def _train(
        self,
        part: Callable[[Field], Any],
        loss: Callable[[Field], Loss],
        progress: Callable[[int, float], None],
        times: int,
    ) -> None:
        """Train a copy of the model, calling `progress` after every `STEPS` steps."""
        data, cond = self._start(self.count)
        copy = deepcopy(self.model)
        module = part(copy)
        copy.requires_grad_(False)
        module.requires_grad_(True)
        # With as many strata as samples, each step uses every sample once.
        plan = TrainingConfig(STEPS * times, self.count, 1e-5, stratified=True)
        train(module, loss(copy), data, plan, cond=cond, progress=progress, every=STEPS)


def measure(
    domain: Domain,
    model: Field,
    *,
    count: int = 0,
    steps: int = 10,
    rounds: int = 5,
    minutes: float = 10.0,
    only: str = "",
    tf32: bool = False,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure all costs of a domain; `cases` in the result is the table of sampling.

    Arguments:
        count: The number of samples; 0 for the device's default (`SIZES`).
        steps: The number of Euler steps.
        rounds: The number of measurements per case.
        minutes: The time limit; cases that have not started by then are listed as skipped.
        only: Words separated by commas. Measure only plain sampling and cases whose names contain one of the words;
            `sampling` and `training` select whole parts.
        tf32: Use TensorFloat-32 matrix products on a GPU, also for plain sampling.
        say: Called with progress messages.
    """
    clock = Clock(model.device)
    words = words_of(only)
    parts = [word for word in words if word in PARTS] or (["sampling"] if words else list(PARTS))
    picked = [word for word in words if word not in PARTS]
    names = [n for n in CASES if n == PLAIN or not picked or any(word in n for word in picked)]
    bench = Bench(domain, model, count or SIZES[domain.name][model.device.type], steps, names)
    begin = time.perf_counter()
    left_out: list[str] = []
    costs: dict[str, Any] = {"rounds": rounds}
    for part in parts:
        share = PARTS[part] if part != parts[-1] else 1.0
        meter = Meter(model.device, rounds, begin + 60 * minutes * share, say)
        with tensor_float(tf32):
            costs |= getattr(bench, part)(meter)
        left_out += meter.left_out
    about = provenance(
        model.device,
        clock.seconds,
        samples=bench.count,
        steps=steps,
        seeds=[0],
        reading=str(domain.estimator(model)),
        tf32=tf32,
    )
    return {"provenance": about, **costs, "left_out": left_out}
