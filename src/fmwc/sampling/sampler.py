"""Sampling functions :func:`sample` and :func:`stream`, and :class:`Sampler`, the only loop that integrates a flow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.checks import run_checks
from fmwc.errors import ShapeError, UsageError, pick, require_finite
from fmwc.estimators import ESTIMATORS, Estimator, Record, Transport, Transported, as_normal_tensor
from fmwc.flow import Space, as_space, euclidean, restriction_of, speeds_of
from fmwc.modes import Scope, evaluating
from fmwc.randomness import Blocks, Randomness, derive
from fmwc.sampling.confidence import (
    EVERY_STEP,
    OTHER_SOURCE,
    RESTRICTED,
    Schedule,
    choose_checks,
    choose_estimator,
    choose_schedule,
    compared_by,
    foreseen,
    is_due,
    read_with,
    score_to_keep,
    unknown_conditions,
    with_confidence,
)
from fmwc.sampling.config import (
    AS_REFERENCE,
    BATCH,
    DECODERS,
    STEPPERS,
    AsReference,
    Controller,
    Grid,
    SamplingConfig,
    ScoresOnly,
    Uniform,
    begin,
    cost_of,
    decode_map,
    follows,
    is_small,
    needs_moments,
)
from fmwc.sampling.trajectory import FreeSignals, Trajectory, join
from fmwc.state import (
    SEEDS,
    SINGLE,
    State,
    as_conditions,
    as_numbers,
    as_state,
    as_whole,
    batch_size,
    blame_conditions,
    channels,
    out_of_memory,
    precision_of,
    require_state,
    select,
    select_conditions,
    tree_map,
)

PROJECTIONS = 8  # random projections of the endpoint, for transport


def noise(
    space: Space | Sequence[int] | int,
    count: int,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    first: int = 0,
    cond: Mapping[str, Any] | None = None,
) -> State:
    """Return x0 of `count` samples from index `first`. With the same seed, longer runs begin alike.

    If samples differ in their number of rows, `cond` must hold the condition that counts the rows.
    """
    return as_space(space).given(as_conditions(cond)).noise(count, Blocks(derive(seed, "x0"), first, count), device)


# ---- sample ----------------------------------------------------------------------------------------------------------


def sample(
    field: Callable[..., Any],
    count: int | None = None,
    *,
    steps: int | None = None,
    seed: int = 0,
    cond: Mapping[str, Any] | None = None,
    x0: State | None = None,
    confidence: Estimator | None = AS_REFERENCE,
    schedule: Schedule | None = None,
    transport: bool = False,
    check: Any = True,
    progress: Callable[[int], None] | None = None,
    config: SamplingConfig | None = None,
) -> Trajectory:
    """Draw samples with their confidence. Computing the confidence does not change the samples.

    Arguments:
        field: A field; with `confidence=None`, any velocity network or function.
        count: The number of samples; not needed with `x0`.
        steps: The number of equal steps, 50 by default.
        seed: The seed of the noise. Samples do not depend on the batch size, up to rounding.
        cond: The conditions of the network, by name: `{"y": labels}`. Tensors with one row per sample are split into
            batches.
        x0: States to start from instead of noise. Confidence is withheld unless they are the noise of this seed,
            because they may come from another distribution than that of the reference samples.
        confidence: The estimator of the variance. By default that of the field's reference, or
            :func:`default_estimator` without a reference; not used if the reference needs no variance. With `None`, no
            variance is read and there is no confidence.
        schedule: When to read the variance: `Schedule.every(5)` or `Schedule.at([0.2, 0.6])`. By default as for the
            field's reference, or at every step.
        transport: Whether to also transport the variance to the endpoint, for the score `dispersion`.
        check: How to check the finished samples (:mod:`fmwc.checks`): `True` for the checks of the field's reference,
            `False` for none, a number of evaluations per sample, or a check such as `Echo(...)`.
        progress: Called with the number of samples done since the last call.
        config: Further options, such as stepper, controller and batch size (:class:`SamplingConfig`).
    """
    _require_kinds(confidence, schedule, transport, config)
    config = config or SamplingConfig()
    seed = as_whole(seed, "seed", *SEEDS)
    config = config.with_steps(None if steps is None else as_whole(steps, "steps", 1, 10**6, "step"))
    device = _device_of(field)
    space, x0 = _start(field, config, x0)
    count = _count(count, x0)
    needs_field = transport or isinstance(confidence, (AsReference, *map(type, ESTIMATORS.values())))
    if needs_field and not hasattr(field, "run"):
        raise UsageError("a plain network has no noise model; call fmwc.attach(network) first, or give confidence=None")
    config = replace(config, space=space)
    controller, _ = config.plan()
    reference = getattr(field, "reference", None)
    when = choose_schedule(reference, schedule, controller)
    estimator = choose_estimator(space, reference, confidence, always=needs_moments(controller))
    cond = _expanded(_as_tensors(cond, device), compared_by(reference), count, device)
    strange = unknown_conditions(reference, cond, count)
    checks = choose_checks(field, space, reference, check, cond, confidence is not None and not strange)
    cond = _expanded(cond, {getattr(one, "cond", "") for one in checks.values()}, count, device)
    space.check_rows(cond, count)
    if not strange and restriction_of(field, cond):
        strange = RESTRICTED
    if reference is not None:
        strange = strange or reference.outdated(field, space)
    from_noise = config.starts_at_0 and not (isinstance(controller, Grid) and controller.times[0] > 0)
    if x0 is None or (reference is not None and from_noise and not strange):
        precision = precision_of(getattr(field, "network", field))
        drawn = tree_map(lambda c: c.to(precision), noise(space, count, seed, device, first=config.first, cond=cond))
        if x0 is not None and not _equal(x0, drawn):
            strange = OTHER_SOURCE
        x0 = drawn if x0 is None else x0
    sampler = Sampler(
        field,
        config,
        estimator=estimator,
        schedule=when,
        transport=Transport(config.projections or (None if is_small(space) else PROJECTIONS)) if transport else None,
        score=score_to_keep(reference),
        check=partial(run_checks, checks) if checks else None,
        progress=progress,
    )
    plain_flow = config.starts_at_0 and config.anneal is None and config.decoder == "map"
    return with_confidence(
        sampler(x0, seed=seed, cond=cond),
        reference,
        checks,
        read_with(estimator, controller.steps, config.stepper, when),
        usual=plain_flow and isinstance(controller, Uniform),
        unread=confidence is None and not checks,
        strange=strange,
    )


def stream(
    field: Callable[..., Any],
    count: int,
    *,
    cond: Mapping[str, Any] | None = None,
    x0: State | None = None,
    config: SamplingConfig | None = None,
    **options: Any,
) -> Iterator[Trajectory]:
    """Yield the samples of `sample(field, count, ...)` one batch at a time, with only their scores.

    Memory grows neither with the number of samples nor with the number of steps. Confidence needs the field's
    reference, and the samples must be drawn with the settings of that reference.

    Arguments:
        config: `batch` is the number of samples drawn together and yielded.
        cond, x0, options: As for :func:`sample`; tensors with one row per sample are split.
    """
    count = as_whole(count, "count", 1, 10**12, "sample")
    config = config or SamplingConfig()
    if config.first:
        raise UsageError("a stream always starts at sample 0; leave out first")
    batch = config.batch or BATCH
    config = ScoresOnly(**{**vars(config), "batch": batch})
    if x0 is not None:
        _count(count, x0)
    cond = {**_as_tensors(cond), "": config.start}
    for first in range(0, count, batch):
        rows = slice(first, min(first + batch, count))
        given = select_conditions(cond, rows, count)
        part_config = replace(config, first=first, start=given.pop(""))
        states = None if x0 is None else select(x0, rows)
        part = sample(field, rows.stop - first, cond=given, x0=states, config=part_config, **options)
        if part.reference is None and (len(part.times) or part.scores is not None):
            raise UsageError(
                f"a stream needs the field's reference for confidence; {part.withheld.partition('; rank')[0]}"
            )
        yield part


def _require_kinds(confidence: Any, schedule: Any, transport: Any, config: Any) -> None:
    """Raise if an argument has the wrong type; the message names the valid types."""
    is_estimator = callable(confidence) and not isinstance(confidence, (bool, str))
    for valid, value, text in (
        (
            confidence is None or is_estimator,
            confidence,
            "confidence must be an estimator such as fmwc.estimators.Linearised(), or None; leave it out to use the "
            "estimator of the field's reference",
        ),
        (
            schedule is None or isinstance(schedule, Schedule),
            schedule,
            "schedule must be fmwc.Schedule.every(5) or fmwc.Schedule.at([0.2, 0.6])",
        ),
        (
            isinstance(transport, bool),
            transport,
            "transport must be True or False; set the number of projections by config=SamplingConfig(projections=8)",
        ),
        (config is None or isinstance(config, SamplingConfig), config, "config must be a fmwc.SamplingConfig(...)"),
    ):
        if not valid:
            raise UsageError(f"{text}; got {value!r:.60}")


def _start(field: Any, config: SamplingConfig, x0: State | None) -> tuple[Space, State | None]:
    """Return the space of the samples and the initial states as tensors."""
    space = getattr(field, "space", None) if config.space is None else as_space(config.space)
    if x0 is not None:
        device = _device_of(field) if hasattr(field, "parameters") or hasattr(field, "device") else None
        x0 = as_state(x0, "x0", getattr(field, "network", field), device)
    if space is None:
        if not isinstance(x0, Tensor):
            raise UsageError(
                "the shape of a sample is not known; give attach(space=...), x0, or config=SamplingConfig(space=(...))"
            )
        space = euclidean(x0.shape[1:])
    return space, x0


def _equal(x0: State, drawn: State) -> bool:
    """Return whether two states are the same values."""
    a, b = channels(x0), channels(drawn)
    return a.keys() == b.keys() and all(torch.equal(a[name].to(b[name]), b[name]) for name in b)


def _count(count: int | None, x0: State | None) -> int:
    if count is not None:
        count = as_whole(count, "count", 1, 10**12, "sample")
    if x0 is None:
        if count is None:
            raise UsageError("count is missing; give the number of samples: sample(field, 1000)")
        return count
    if count is not None and count != batch_size(x0):
        raise UsageError(f"x0 holds {batch_size(x0)} states, but count is {count}")
    return batch_size(x0)


def _device_of(field: Any) -> torch.device:
    """Return the device of a field or a plain network; the CPU for a function."""
    if hasattr(field, "device"):
        return torch.device(field.device)
    parameter = next(field.parameters(), None) if isinstance(field, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _as_tensors(cond: Mapping[str, Any] | None, device: torch.device | None = None) -> dict[str, Any]:
    """Return the conditions by name, with lists and arrays converted to tensors."""
    return {
        name: as_numbers(value, f"the condition '{name}'", device)
        if isinstance(value, (list, tuple, np.ndarray))
        else value
        for name, value in as_conditions(cond).items()
    }


def _expanded(cond: Mapping[str, Any], names: Iterable[str], count: int, device: torch.device) -> dict[str, Any]:
    """Return the conditions, with the named ones expanded to one row per sample."""

    def expand(value: Any) -> Any:
        if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
            value = torch.as_tensor(value, device=device)
        if isinstance(value, Tensor) and (not value.ndim or len(value) == 1 < count):
            value = torch.atleast_1d(value)
            return value.expand(count, *value.shape[1:])
        return value

    return {name: expand(value) if name in names else value for name, value in cond.items()}


# ---- the loop --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sampler:
    """Sampler, which integrates noise to a :class:`Trajectory`.

    Arguments:
        field: A field, or any function `v(x, t, **cond)` if the variance is neither read nor transported.
        config: Options of the integration, with the space if the field has none.
        estimator: The estimator of the variance; `None` reads no variance.
        schedule: When to read the variance.
        transport: Transports probes of the endpoint back through the whole run, if given.
        score: What a stream keeps: the name of a score, or a function that adds the score to a
            trajectory.
        check: Called at the end of each batch with the field, the space, the samples, their conditions, the seed and
            the number of the first sample; returns evidence by name, one row per sample (:mod:`fmwc.checks`).
        progress: Called with the number of samples done since the last call.
    """

    field: Any
    config: SamplingConfig
    estimator: Estimator | None = None
    schedule: Schedule = EVERY_STEP
    transport: Transport | None = None
    score: str | Callable[[Trajectory], Trajectory] = "temporal_ratio"
    check: Callable[..., dict[str, Tensor]] | None = None
    progress: Callable[[int], None] | None = None
    space: Space = dataclass_field(init=False)
    controller: Controller = dataclass_field(init=False)
    steppers: list[str] = dataclass_field(init=False)  # the stepper of each step

    def __post_init__(self) -> None:
        config = self.config
        self.space = as_space(self.field.space if config.space is None else config.space)
        self.controller, tail = config.plan()
        self.steppers = [config.stepper] * (self.controller.steps - tail) + ["euler"] * tail
        if config.anneal is not None:
            for name in config.anneal:
                pick(self.space.channels, name, "channel")
        if config.scores_only and (config.keep_states or self.transport):
            raise UsageError("a stream keeps only one score per sample; leave out keep_states and transport")
        name = type(self.controller).__name__
        if needs_moments(self.controller) and (self.estimator is None or self.schedule.stride != 1):
            raise UsageError(
                f"{name} needs the variance at every step; give an estimator as confidence, and Schedule.every(1)"
            )
        if follows(self.controller) and (STEPPERS[config.stepper].evaluations > 1 or self.transport):
            raise UsageError(f"{name} changes the velocity; use stepper='euler' and no transport")

    def __call__(self, x0: State, *, seed: int = 0, cond: Mapping[str, Any] | None = None) -> Trajectory:
        """Integrate from `x0` at `config.start` to t = 1, and pass the conditions `cond` to the network."""
        seed, cond = as_whole(seed, "seed"), as_conditions(cond)
        self.space.check(x0)
        count = batch_size(x0)
        if count < 1:
            raise ShapeError("x0 holds no samples; give at least 1 sample")
        for name, value in channels(x0).items():
            require_finite(value, f"x0's channel '{name}'")
        start = self._start(x0)
        for name, value in cond.items():
            if isinstance(value, Tensor) and value.ndim and value.shape[0] not in (1, count):
                raise ShapeError(
                    f"condition '{name}' has {value.shape[0]} rows for {count} samples; give one per sample"
                )
        parts: list[Trajectory] = []
        done, size = 0, self.config.batch or BATCH
        while done < count:
            part, size = self._draw(x0, start, cond, seed, done, min(size, count - done))
            parts.append(part.compact() if self.config.compact else part)
            done += len(part)
            if self.progress:
                self.progress(len(part))
        return join(parts)

    def _start(self, x0: State) -> Tensor:  # -> (B,)
        """Return the time that each sample starts at."""
        count, like = batch_size(x0), next(iter(channels(x0).values()))
        value = self.controller.times[0] if isinstance(self.controller, Grid) else self.config.start
        start = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)
        if len(start) not in (1, count):
            raise ShapeError(f"start must be one number, or one per sample ({count}), got {len(start)}")
        if not bool(((start >= 0) & (start < 1)).all()):
            raise UsageError("start must lie in [0, 1)")
        return start.expand(count)

    def _draw(
        self, x0: State, start: Tensor, cond: dict[str, Any], seed: int, done: int, size: int
    ) -> tuple[Trajectory, int]:
        """Return a batch that begins with sample `done`, and its size: `size`, halved until it fits in memory."""
        part, largest, total = None, size, len(start)
        while part is None:
            rows, first = slice(done, done + size), self.config.first + done
            given = select_conditions(cond, rows, total)
            constant = getattr(self.field, "constant_weights", Scope)()
            try:
                chunk = select(x0, rows), start[rows], given, seed, first
                part = evaluating(self.field).call(constant.call, self._integrate, *chunk)
            except (AttributeError, IndexError, MemoryError, RuntimeError, TypeError) as error:
                if not out_of_memory(error) or size == 1:
                    blame_conditions(error, given, size)
                    raise
            if part is None:  # outside the handler, whose traceback keeps the memory of the failed batch
                size = (size + 1) // 2
        if size < largest:
            warnings.warn(f"{largest} samples together do not fit in memory; {size} do", RuntimeWarning, stacklevel=3)
        tensors = {k: torch.atleast_1d(v) for k, v in given.items() if isinstance(v, Tensor)}
        tensors = {k: v.expand(size, *v.shape[1:]) for k, v in tensors.items()}
        part = replace(part, seed=seed, cond=tensors, index=torch.arange(first, first + size))
        if self.config.scores_only:
            part = part.scored(self.score) if isinstance(self.score, str) else self.score(part).scored()
        return part, size

    def _integrate(self, x0: State, start: Tensor, cond: dict[str, Any], seed: int, first: int) -> Trajectory:
        """Integrate one batch, whose first sample has the index `first`."""
        config, steppers, space = self.config, self.steppers, self.space.given(cond)
        randomness = Blocks(derive(seed, "sampler"), first, len(start))
        decoder = DECODERS[config.decoder] if isinstance(config.decoder, str) else config.decoder
        controller = begin(self.controller, self._annealed())
        reader = self._reader(decoder is decode_map)
        x, t, before = x0, start, None
        grid, states, readings = [t], [x0], []
        free = FreeSignals(space, x0, len(steppers))
        evaluations = 0
        restrict = restriction_of(self.field, cond)
        if restrict and self.transport:
            raise UsageError("transport does not support samples with restricted ends; leave out transport")

        def velocity(x: Any, t: Tensor) -> Any:
            nonlocal evaluations
            evaluations += cost_of(decoder)
            return steered(x, decoder(self.field, x, t, cond, randomness), t)

        def steered(x: Any, v: Any, t: Tensor) -> Any:
            return space.steered(x, v, t, restrict) if restrict else v

        with torch.no_grad():
            read = foreseen(self.schedule, controller, start) if reader else set()
            for step, stepper in enumerate(steppers):
                due = is_due(self.schedule, step, len(steppers), before, t) if read is None else step in read
                moments, v = reader(x, t, cond, randomness) if reader and due else (None, None)
                if v is None:
                    v = velocity(x, t)
                else:
                    v, evaluations = steered(x, v, t), evaluations + 1
                if step == 0:
                    require_state(v, "the network's velocity")
                    self.space.check(v, "the network's velocity has the wrong shape: ")
                if moments is not None:
                    readings.append((t, *self._reduced(v, moments.var)))
                after = controller.next_time(step, t, start, moments)
                free.guess(step, x, t, v)
                speeds = self._speeds(t, after - t)
                v = _scaled(v, speeds)
                if follows(controller):
                    v = controller.follow(v, t, moments, speeds)  # type: ignore[attr-defined]
                paced = partial(self._paced, velocity, dt=after - t)
                x = STEPPERS[stepper].step(space, paced, x, v, t, after - t)
                if restrict and step == len(steppers) - 1:
                    x = restrict(x, torch.ones_like(after))  # exact, whatever the steps before did
                free.move(x)
                before, t = t, after
                if config.scores_only:
                    grid.clear()
                grid.append(t)
                if self.transport or config.keep_states:
                    states.append(x)
                if config.on_step:
                    config.on_step(first, t, x)
        times, mean, var = _stacked(readings, start, x)
        self._require_finite(x, var)
        transported = self._transport(states, grid, randomness, cond) if self.transport else None
        checked = self.check(self.field, self.space, x, cond, seed, first) if self.check else {}
        return Trajectory(
            x=x,
            x0=x0,
            times=times,
            mean=mean,
            var=var,
            grid=torch.stack(grid),
            transported=transported,
            evaluations=evaluations,
            states=states if config.keep_states else None,
            units={n: c.weight for n, c in space.channels.items() if c.weight != 1},
            rows={n: (c.rows, int(c.centred)) for n, c in space.channels.items() if c.rows},
            evidence={**free.evidence(), **checked},
        )

    def _reader(self, plain: bool) -> Callable[..., tuple[Any, Any]] | None:
        """Return a function that returns the moments and, if it is computed with them, the velocity to follow."""
        estimator = self.estimator
        if estimator is None:
            return None
        with_velocity = plain and getattr(estimator, "plain_mean", False)

        def read(x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> tuple[Any, Any]:
            moments = estimator(self.field, x, t, cond, randomness)
            return moments, moments.mean if with_velocity else None

        return read

    def _reduced(self, mean: Any, var: Any) -> tuple[Any, Any]:
        """Return what the run records of a reading."""
        if not self.config.scores_only:
            return mean, var
        total = tree_map(lambda m, v: v.expand_as(m).flatten(1).sum(1, keepdim=True), mean, var)
        return tree_map(torch.zeros_like, total), total

    def _require_finite(self, x: Any, var: Any) -> None:
        for what, state in (("the sampled", x), ("the variance of", var)):
            for name, value in channels(state).items():
                if not torch.isfinite(value).all():
                    if hasattr(self.field, "check_finite"):
                        self.field.check_finite()  # names the weight, if one is not finite
                    require_finite(value, f"{what} channel '{name}'")

    # ---- anti-annealing ----

    def _slopes(self) -> dict[str, float]:
        if self.config.anneal is None:
            return {name: channel.anneal for name, channel in self.space.channels.items()}
        return {name: self.config.anneal.get(name, 0.0) for name in self.space.channels}

    def _annealed(self) -> Space:
        """Return the space with the anti-annealing of this run."""
        slopes = self._slopes()
        return Space({name: replace(c, anneal=slopes[name]) for name, c in self.space.channels.items()})

    def _speeds(self, t: Tensor, dt: Tensor) -> dict[str, Tensor]:  # -> (B,) per channel
        """Return the factor 1 + s·t by which the velocity of each annealed channel is multiplied.

        It is at most (1 − t)/dt, with which a step ends at the predicted endpoint. Beyond that, samples
        overshoot. A network may have speeds of its own instead (:func:`fmwc.flow.speeds_of`).
        """
        if self.config.anneal is None and (own := speeds_of(self.field, t)) is not None:
            return own
        slopes = {name: slope for name, slope in self._slopes().items() if slope}
        if not slopes:
            return {}
        most = ((1 - t) / dt.clamp_min(torch.finfo(t.dtype).tiny)).clamp_min(1.0)
        return {name: torch.minimum(1 + slope * t, most) for name, slope in slopes.items()}

    def _paced(self, velocity: Callable[[Any, Tensor], Any], x: Any, t: Tensor, *, dt: Tensor) -> Any:
        return _scaled(velocity(x, t), self._speeds(t, dt))

    # ---- transport ----

    def _transport(
        self, states: list[Any], grid: list[Tensor], randomness: Randomness, cond: dict[str, Any]
    ) -> Transported:
        def advance(step: int, x: Any, record: Record) -> Any:
            t, dt = as_normal_tensor(grid[step]), as_normal_tensor(grid[step + 1] - grid[step])

            def velocity(x: Any, t: Tensor) -> Any:
                return self.field.run(record, x, t, cond={k: as_normal_tensor(c) for k, c in cond.items()})

            paced = partial(self._paced, velocity, dt=dt)
            return STEPPERS[self.steppers[step]].step(self.space.given(cond), paced, x, paced(x, t), t, dt)

        assert self.transport is not None
        weights = {name: channel.weight for name, channel in self.space.channels.items()}
        return self.transport(advance, states, randomness, weights)


def _scaled(v: Any, speeds: Mapping[str, Tensor]) -> Any:
    """Return the velocity with each channel multiplied by its speed."""
    if not speeds:
        return v
    scaled = {n: c * speeds[n][(..., *[None] * (c.ndim - 1))] if n in speeds else c for n, c in channels(v).items()}
    return scaled if isinstance(v, dict) else scaled[SINGLE]


def _stacked(readings: list[tuple[Tensor, Any, Any]], t: Tensor, x: Any) -> tuple[Tensor, Any, Any]:
    """Return the times, means and variances, stacked along a first dimension for the readings."""
    if not readings:
        empty = tree_map(lambda c: c.new_zeros(0, *c.shape), x)
        return t.new_zeros(0, len(t)), empty, empty
    times, means, variances = zip(*readings, strict=True)
    mean, var = (tree_map(lambda *c: torch.stack(c), *states) for states in (means, variances))
    return torch.stack(times), mean, var
