"""The sampler: the only loop that integrates a flow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fmwc.errors import ShapeError, UsageError, pick, require_finite
from fmwc.estimators import Estimator, Record, Transport, Transported, as_normal_tensor
from fmwc.flow import Space, as_space
from fmwc.modes import Scope, evaluating
from fmwc.randomness import Blocks, Randomness, derive
from fmwc.references import Schedule
from fmwc.sampling.config import BATCH, DECODERS, STEPPERS, SamplingConfig, cost_of, decode_map
from fmwc.sampling.controllers import Controller, Grid, begin, due, follows, foreseen, needs_variance
from fmwc.sampling.scores import Free
from fmwc.sampling.trajectory import Trajectory
from fmwc.state import (
    SINGLE,
    State,
    as_conditions,
    as_whole,
    batch_size,
    blame_conditions,
    channels,
    out_of_memory,
    require_state,
    tree_map,
)

__all__ = ["Sampler", "join"]


class VelocityField(Protocol):
    """What the sampler asks of a field; a plain network will do where no noise is asked for."""

    def __call__(self, x: Any, t: Any, **cond: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class Sampler:
    """The sampler: noise in, :class:`Trajectory` out.

    Arguments:
        field: A field, or any `v(x, t, **cond)` if neither variance nor transport is read.
        config: How the flow is integrated; it says the space where the field does not.
        estimator: Reads the variance; `None` reads none.
        schedule: When to read it.
        transport: Also carries endpoint probes back through the whole run.
        score: What a run with `record="score"` keeps: a score's name, or a function that gives a trajectory its score.
        check: Called at the end of each batch with the field, the space, the samples, their conditions, the seed and
            the number of the first sample; returns evidence by name, a row per sample (:mod:`fmwc.checks`).
        progress: Called with the number of samples done since the last call.
    """

    field: Any
    config: SamplingConfig
    estimator: Estimator | None = None
    schedule: Schedule = Schedule.every(1)
    transport: Transport | None = None
    score: str | Callable[[Trajectory], Trajectory] = "temporal_ratio"
    check: Callable[..., dict[str, Tensor]] | None = None
    progress: Callable[[int], None] | None = None
    space: Space = dataclass_field(init=False)
    controller: Controller = dataclass_field(init=False)
    tail: int = dataclass_field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        space = self.field.space if config.space is None else config.space
        controller, tail = config.plan()
        for name, value in (("space", as_space(space)), ("controller", controller), ("tail", tail)):
            object.__setattr__(self, name, value)
        for name in config.anneal or {}:
            pick(self.space.channels, name, "channel")
        if config.record == "score" and (config.keep_states or self.transport):
            raise UsageError("record='score' keeps the score per sample alone; leave out keep_states and transport")
        name = type(controller).__name__
        if needs_variance(controller) and (self.estimator is None or self.schedule.stride != 1):
            raise UsageError(f"{name} reads the variance at every step; leave confidence on, with Schedule.every(1)")
        if follows(controller) and (STEPPERS[config.stepper].evaluations > 1 or self.transport):
            raise UsageError(f"{name} changes the velocity: it takes euler steps, and no transport")

    def __call__(self, x0: State, *, seed: int = 0, cond: Mapping[str, Any] | None = None) -> Trajectory:
        """Integrate from `x0` at `config.start` to t = 1. `cond` goes to the network, by name."""
        seed, first, cond = as_whole(seed, "seed"), self.config.first, as_conditions(cond)
        self.space.check(x0)
        count = batch_size(x0)
        if count < 1:
            raise ShapeError("sampling takes at least 1 sample")
        for name, value in channels(x0).items():
            require_finite(value, f"x0's channel '{name}'")
        starts = self._starts(x0)
        device = starts.device
        for name, value in cond.items():
            if isinstance(value, Tensor) and value.ndim and value.shape[0] not in (1, count):
                raise ShapeError(f"condition '{name}' has {value.shape[0]} rows for {count} samples; give one a sample")
        parts: list[Trajectory] = []
        kept = self.config.parts
        a, size, too_many = 0, min(self.config.batch or BATCH, count), 0
        while a < count:
            if kept and (part := kept.get(first + a, count - a, device)) is not None:
                parts.append(part)
                a += len(part)
                if self.progress:
                    self.progress(len(part))
                continue
            b = min(a + size, count)
            here = {k: v[a:b] if _one_a_sample(v, count) else v for k, v in cond.items()}
            randomness = Blocks(derive(seed, "sampler"), first + a, b - a)
            place = seed, first + a
            part = None
            try:
                chunk = tree_map(lambda c: c[a:b], x0), starts[a:b], randomness, here, place  # noqa: B023
                part = evaluating(self.field).call(_steady(self.field).call, self._chunk, *chunk)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or b - a == 1:
                    blame_conditions(error, here, b - a)
                    raise
            except (AttributeError, IndexError, TypeError) as error:
                blame_conditions(error, here, b - a)
                raise
            if part is None:  # outside the handler, which holds on to all that the batch had computed
                too_many, size = too_many or b - a, (b - a + 1) // 2
                continue
            if too_many:
                warnings.warn(
                    f"{too_many} samples together do not fit in memory; {size} do", RuntimeWarning, stacklevel=2
                )
                too_many = 0
            part = replace(part, seed=seed, cond=_conditions(here, b - a), index=torch.arange(first + a, first + b))
            if self.config.record == "score":
                part = part.scored(self.score) if isinstance(self.score, str) else self.score(part).scored()
            parts.append(kept.put(part) if kept else part)
            if self.progress:
                self.progress(b - a)
            a = b
        return join(parts)

    def _starts(self, x0: State) -> Tensor:  # -> (B,)
        """The time that each sample starts at."""
        count, like = batch_size(x0), next(iter(channels(x0).values()))
        start = self.controller.times[0] if isinstance(self.controller, Grid) else self.config.start
        starts = torch.as_tensor(start, dtype=like.dtype, device=like.device).reshape(-1)
        if len(starts) not in (1, count):
            raise ShapeError(f"start is one number or one a sample ({count}), got {len(starts)}")
        if not bool(((starts >= 0) & (starts < 1)).all()):
            raise UsageError("start lies in [0, 1)")
        return starts.expand(count)

    def _chunk(
        self, x0: State, start: Tensor, randomness: Randomness, cond: dict[str, Any], place: tuple[int, int]
    ) -> Trajectory:
        config, estimator = self.config, self.estimator
        if estimator and hasattr(self.field, "reader"):  # a compiled field has a reading of its own
            estimator = self.field.reader(estimator)
        decoder = DECODERS[config.decoder] if isinstance(config.decoder, str) else config.decoder
        space = self.space.given(cond)
        controller = begin(self.controller, self._annealed())
        evaluations = 0

        def velocity(x: Any, t: Tensor) -> Any:
            nonlocal evaluations
            evaluations += cost_of(decoder)
            return decoder(self.field, x, t, cond, randomness)

        x, t, before = x0, start, None
        grid, states, steppers = [t], [x0], self._steppers()
        free = Free(space, x0, len(steppers))
        times, means, vars_ = [], [], []
        with torch.no_grad():
            read = foreseen(self.schedule, controller, start) if estimator else None
            for step, stepper in enumerate(steppers):
                moments = None
                if estimator and (due(self.schedule, step, len(steppers), before, t) if read is None else step in read):
                    moments = estimator(self.field, x, t, cond, randomness)
                    times.append(t)
                if moments is not None and getattr(estimator, "plain_mean", False) and decoder is decode_map:
                    v = moments.mean
                    evaluations += 1
                else:
                    v = velocity(x, t)
                if step == 0:
                    require_state(v, "the network's velocity")
                    self.space.check(v, "the network's velocity is of another shape: ")
                if moments is not None:
                    mean, var = self._reduce(v, moments.var)
                    means.append(mean)
                    vars_.append(var)
                after = controller.next_time(step, t, start, moments)
                pace = partial(self._pace, dt=after - t)
                free.guess(step, x, t, v)
                v = _paced(v, speeds := pace(t))
                if follows(controller):
                    v = controller.follow(v, t, moments, speeds)  # type: ignore[attr-defined]
                x = STEPPERS[stepper].step(space, lambda x, t: _paced(velocity(x, t), pace(t)), x, v, t, after - t)  # noqa: B023
                free.move(x)
                before, t = t, after
                if config.record == "score":
                    grid.clear()
                grid.append(t)
                if self.transport or config.keep_states:
                    states.append(x)
        var = _stack(vars_, x)
        for what, state in (("the sampled", x), ("the variance of", var)):
            for name, value in channels(state).items():
                if not torch.isfinite(value).all():
                    if hasattr(self.field, "check_finite"):
                        self.field.check_finite()  # names the weight, if one is to blame
                    require_finite(value, f"{what} channel '{name}'")
        transported = None
        if self.transport:
            transported = self._transport(states, grid, steppers, randomness, cond)
        empty = start.new_zeros(0, len(start))
        return Trajectory(
            x=x,
            x0=x0,
            times=torch.stack(times) if times else empty,
            mean=_stack(means, x),
            var=var,
            grid=torch.stack(grid),
            transported=transported,
            evaluations=evaluations,
            states=states if config.keep_states else None,
            units={n: c.weight for n, c in space.channels.items() if c.weight != 1},
            rows={n: (c.rows, int(c.centred)) for n, c in space.channels.items() if c.rows},
            evidence={**free.found(), **(self.check(self.field, self.space, x, cond, *place) if self.check else {})},
        )

    def _annealed(self) -> Space:
        """The space with the anti-annealing of this run."""
        if self.config.anneal is None:
            return self.space
        return Space({n: replace(c, anneal=self.config.anneal.get(n, 0.0)) for n, c in self.space.channels.items()})

    def _pace(self, t: Tensor, dt: Tensor) -> dict[str, Tensor]:  # -> (B,) a channel
        """How many times faster than its velocity each annealed channel goes: 1 + s·t.

        But no faster than (1 − t)/dt, with which a step ends where the velocity points to at t = 1: beyond that, what
        is left of the way is overshot, and grows.
        """
        own = {name: channel.anneal for name, channel in self.space.channels.items()}
        slopes = own if self.config.anneal is None else self.config.anneal
        if not any(slopes.values()):
            return {}
        most = ((1 - t) / dt.clamp_min(torch.finfo(t.dtype).tiny)).clamp_min(1.0)
        return {name: torch.minimum(1 + slope * t, most) for name, slope in slopes.items() if slope}

    def _steppers(self) -> list[str]:
        return [self.config.stepper] * (self.controller.steps - self.tail) + ["euler"] * self.tail

    def _reduce(self, mean: Any, var: Any) -> tuple[Any, Any]:
        """What is kept of a reading."""
        if self.config.record in (None, "full"):
            return mean, var
        small = tree_map(lambda m, v: v.expand_as(m).flatten(1).mean(1).reshape(-1, *[1] * (m.ndim - 1)), mean, var)
        if self.config.record == "total":
            return mean, small
        total = tree_map(lambda m, s: s.reshape(-1, 1) * m[0].numel(), mean, small)  # as Trajectory.compact has it
        return tree_map(torch.zeros_like, total), total

    def _transport(
        self, states: list[Any], grid: list[Tensor], steppers: list[str], randomness: Randomness, cond: dict[str, Any]
    ) -> Transported:
        def advance(step: int, x: Any, record: Record) -> Any:
            t, dt = as_normal_tensor(grid[step]), as_normal_tensor(grid[step + 1] - grid[step])

            def velocity(x: Any, t: Tensor) -> Any:
                v = self.field.run(record, x, t, cond={k: as_normal_tensor(c) for k, c in cond.items()})
                return _paced(v, self._pace(t, dt))

            return STEPPERS[steppers[step]].step(self.space.given(cond), velocity, x, velocity(x, t), t, dt)

        assert self.transport is not None
        weights = {name: channel.weight for name, channel in self.space.channels.items()}
        return self.transport(advance, states, randomness, weights)


def _paced(v: Any, speeds: Mapping[str, Tensor]) -> Any:
    """The velocity, each channel times its speed."""
    if not speeds:
        return v
    own = {n: c * speeds[n][(..., *[None] * (c.ndim - 1))] if n in speeds else c for n, c in channels(v).items()}
    return own if isinstance(v, dict) else own[SINGLE]


def _steady(field: Any) -> Scope:
    """Cache weight-dependent terms while a batch is drawn; a plain network has none."""
    scope: Scope = field.constant_weights() if hasattr(field, "constant_weights") else Scope()
    return scope


def _one_a_sample(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == count


def _conditions(cond: dict[str, Any], count: int) -> dict[str, Tensor]:
    """The conditions that are tensors, one row a sample."""
    tensors = {k: torch.atleast_1d(v) for k, v in cond.items() if isinstance(v, Tensor)}
    return {k: v.expand(count, *v.shape[1:]) for k, v in tensors.items()}


def _stack(values: list[Any], like: Any) -> Any:
    if not values:
        return tree_map(lambda c: c.new_zeros(0, *c.shape), like)
    return tree_map(lambda *c: torch.stack(c), *values)


def join(parts: list[Trajectory]) -> Trajectory:
    """One trajectory from those of the batches."""
    if len(parts) == 1:
        return parts[0]
    if len({len(p.times) for p in parts}) > 1:
        raise UsageError(
            "with starts of their own, batches pass the chosen times at different steps; use one batch for all, "
            "or a schedule of every k-th step"
        )
    changes: dict[str, Any] = {
        n: tree_map(lambda *c: torch.cat(c), *(getattr(p, n) for p in parts)) for n in ("x", "x0")
    }
    for name in ("times", "mean", "var", "grid"):
        changes[name] = tree_map(lambda *c: torch.cat(c, 1), *(getattr(p, name) for p in parts))
    for name in ("scores", "index"):
        if getattr(parts[0], name) is not None:
            changes[name] = torch.cat([getattr(p, name) for p in parts])
    changes["evidence"] = {n: torch.cat([p.evidence[n] for p in parts]) for n in parts[0].evidence}
    ends = [p.transported for p in parts if p.transported is not None]
    if ends:
        changes["transported"] = Transported(
            torch.cat([e.var for e in ends]), torch.cat([e.profile for e in ends], 2), ends[0].layers
        )
    if parts[0].states is not None:
        changes["states"] = [
            tree_map(lambda *c: torch.cat(c), *rows) for rows in zip(*(p.states or [] for p in parts), strict=True)
        ]
    changes["cond"] = {n: torch.cat([p.cond[n] for p in parts]) for n in parts[0].cond}
    return replace(parts[0], **changes)
