"""Drawing samples: :func:`sample`, from noise to a :class:`Trajectory`, and :func:`stream`, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.checks import run_checks
from fmwc.errors import UsageError
from fmwc.estimators import ESTIMATORS, Estimator, Transport
from fmwc.flow import Space, as_space, euclidean
from fmwc.randomness import Blocks, derive
from fmwc.references import Schedule
from fmwc.sampling.confidence import (
    chosen_checks,
    chosen_estimator,
    chosen_schedule,
    compared_by,
    kept_score,
    read_with,
    unknown_conditions,
    with_confidence,
)
from fmwc.sampling.config import AS_REFERENCE, BATCH, AsReference, SamplingConfig
from fmwc.sampling.controllers import FEW, Uniform, numbers
from fmwc.sampling.controllers import needs_variance as reads_variance
from fmwc.sampling.sampler import Sampler
from fmwc.sampling.trajectory import Trajectory
from fmwc.state import SEEDS, State, as_conditions, as_numbers, as_state, as_whole, batch_size, precision_of, tree_map

__all__ = ["for_each", "noise", "sample", "stream"]

PROJECTIONS = 8  # random projections of the endpoint, read once


def noise(
    space: Space | Sequence[int] | int,
    count: int,
    seed: int,
    device: torch.device | str = "cpu",
    *,
    first: int = 0,
    cond: Mapping[str, Any] | None = None,
) -> State:
    """Return x0 of `count` samples of a seed, from number `first` on: a longer run starts with the same samples.

    Where samples differ in their number of rows, `cond` holds the condition that counts them.
    """
    return as_space(space).given(as_conditions(cond)).noise(count, Blocks(derive(seed, "x0"), first, count), device)


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
    """Draw samples with their confidence. Reading confidence does not change a sample.

    Arguments:
        field: A field, compiled or not; with `confidence=None`, any velocity network or function.
        count: The number of samples; not needed with `x0`.
        steps: The number of equal steps, 50 by default.
        seed: Seeds the noise. Samples do not depend on the batches that they are drawn in, up to rounding.
        cond: The conditions of the network, by name: `{"y": labels}`. Tensors with one row per sample are split with
            the batches.
        x0: Start from these states in place of noise.
        confidence: The estimator that reads the variance. By default the one that the field's reference was made with,
            or :func:`default_estimator`; none where the reference needs no variance. `None` reads nothing.
        schedule: When to read the variance: `Schedule.every(5)`, `Schedule.at([0.2, 0.6])` or `Schedule.adaptive()`.
            By default as the field's reference was read, or at every step.
        transport: Also carry the variance to the endpoint, for the score `dispersion`.
        check: Check the finished samples (:mod:`fmwc.checks`): `True` for the checks of the field's reference, `False`
            for none, a number of evaluations per sample, or a check such as `Echo(...)`.
        progress: Called with the number of samples done since the last call.
        config: Everything else: stepper, controller, batch size and more (:class:`SamplingConfig`).
    """
    _require_kinds(confidence, schedule, transport, config)
    config = config or SamplingConfig()
    seed = as_whole(seed, "seed", *SEEDS)
    steps = None if steps is None else as_whole(steps, "steps", 1, 10**6, "step")
    count = None if count is None else as_whole(count, "count", 1, 10**12, "sample")
    space, x0 = _start(field, config, x0)
    total = _total(count, x0)
    plain = not hasattr(field, "run")
    if plain and (transport or isinstance(confidence, (AsReference, *map(type, ESTIMATORS.values())))):
        raise UsageError(
            "a plain network has no noise to read confidence from; attach it first, or say confidence=None"
        )
    config = replace(config.timed(steps), space=space)
    controller, _ = config.plan()
    plain_flow = config.starts_at_0 and config.anneal is None and config.decoder == "map"
    device = _device(field)
    cond = {
        k: as_numbers(v, f"the condition '{k}'", device) if isinstance(v, (list, tuple, np.ndarray)) else v
        for k, v in as_conditions(cond).items()
    }
    when, reference = chosen_schedule(field, schedule, controller)
    estimator = chosen_estimator(space, reference, confidence, always=reads_variance(controller))
    cond = for_each(cond, compared_by(reference), total, device)
    strange = unknown_conditions(reference, cond, total)
    checks = chosen_checks(field, space, reference, check, cond, confidence is not None and not strange)
    cond = for_each(cond, {getattr(own, "cond", "") for own in checks.values()}, total, device)
    projections = config.projections or (None if numbers(space) <= FEW else PROJECTIONS)
    sampler = Sampler(
        field,
        config,
        estimator=estimator,
        schedule=when,
        transport=Transport(projections) if transport else None,
        score=kept_score(reference),
        check=partial(run_checks, checks) if checks else None,
        progress=progress,
    )
    space.check_rows(cond, total)
    if x0 is None:
        x0 = noise(space, total, seed, device, first=config.first, cond=cond)
        x0 = tree_map(lambda c: c.to(precision_of(getattr(field, "network", field))), x0)
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
    """Yield the samples of `sample(field, count, …)` a batch at a time, with their scores alone.

    Memory grows neither with the samples nor with the steps. Confidence is a sample's place among the checkpoint's
    reference, so the run is read as that was.

    Arguments:
        config: Its `batch` is the number of samples drawn together and yielded.
        cond, x0, options: Those of :func:`sample`; tensors with a row for each sample are split.
    """
    count = as_whole(count, "count", 1, 10**12, "sample")
    config = config or SamplingConfig()
    if config.first:
        raise UsageError("a stream begins with its first sample; leave out first")
    batch = config.batch or BATCH
    config = replace(config, record=config.record or "score", batch=batch)
    cond = {
        k: as_numbers(v, f"the condition '{k}'") if isinstance(v, (list, np.ndarray)) else v
        for k, v in as_conditions(cond).items()
    }
    for first in range(0, count, batch):
        size = min(batch, count - first)
        own = partial(_rows, count=count, rows=slice(first, first + size))
        here = replace(config, first=first, start=own(config.start))
        start = None if x0 is None else tree_map(own, x0)
        part = sample(field, size, cond={k: own(v) for k, v in cond.items()}, x0=start, config=here, **options)
        if part.reference is None and (len(part.times) or part.scores is not None):
            raise UsageError(
                "samples that are not held together have their confidence by a checkpoint's reference; "
                f"{part.withheld.partition('; rank')[0]}"
            )
        yield part


def for_each(cond: Mapping[str, Any], names: Iterable[str], count: int, device: torch.device | str) -> dict[str, Any]:
    """Return conditions of which the named ones have one row per sample, where one value is given for all samples."""

    def spread(value: Any) -> Any:
        if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
            value = torch.as_tensor(value, device=device)
        if isinstance(value, Tensor) and (not value.ndim or len(value) == 1 < count):
            value = torch.atleast_1d(value)
            return value.expand(count, *value.shape[1:])
        return value

    return {name: spread(value) if name in names else value for name, value in cond.items()}


def _rows(value: Any, *, count: int, rows: slice) -> Any:
    return value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == count else value


def _require_kinds(confidence: Any, schedule: Any, transport: Any, config: Any) -> None:
    """Raise where an argument is of another kind, and say what to give."""
    if isinstance(confidence, (bool, str)) or not (confidence is None or callable(confidence)):
        raise UsageError(
            "confidence is an estimator such as fmwc.estimators.Linearised(), or None to read none; leave it out to "
            f"read what the field's reference was made from; got {confidence!r}"
        )
    if schedule is not None and not isinstance(schedule, Schedule):
        raise UsageError(
            "schedule is fmwc.Schedule.every(5), fmwc.Schedule.at([0.2, 0.6]) or fmwc.Schedule.adaptive(); "
            f"got {schedule!r:.60}"
        )
    if not isinstance(transport, bool):
        raise UsageError(
            f"transport is True or False; give config=SamplingConfig(projections=8) for a number; got {transport!r}"
        )
    if config is not None and not isinstance(config, SamplingConfig):
        raise UsageError(f"config is a fmwc.SamplingConfig(...), got {config!r:.60}")


def _start(field: Any, config: SamplingConfig, x0: State | None) -> tuple[Space, State | None]:
    """Return the space of the samples, and the states to start from as tensors."""
    space = getattr(field, "space", None) if config.space is None else as_space(config.space)
    if x0 is not None:
        device = _device(field) if hasattr(field, "parameters") or hasattr(field, "device") else None
        x0 = as_state(x0, "x0", getattr(field, "network", field), device)
    if space is None:
        if not isinstance(x0, Tensor):
            raise UsageError(
                "the shape of a sample is not known; give space=(...) to attach, x0, or "
                "config=SamplingConfig(space=(...))"
            )
        space = euclidean(x0.shape[1:])
    return space, x0


def _total(count: int | None, x0: State | None) -> int:
    if x0 is None:
        if count is None:
            raise UsageError("say how many samples: sample(field, 1000)")
        return count
    if count is not None and count != batch_size(x0):
        raise UsageError(f"x0 holds {batch_size(x0)} states, and {count} samples were asked for")
    return batch_size(x0)


def _device(field: Any) -> torch.device:
    """Where a field, or a plain network, lives; a velocity function that does not say lives on the CPU."""
    if hasattr(field, "device"):
        return torch.device(field.device)
    parameter = next(field.parameters(), None) if isinstance(field, nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device
