"""Short forms of the options of a run, for tests that vary them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fmwc.estimators import Estimator, as_estimator
from fmwc.sampling import AsReference, Grid, SamplingConfig, Schedule

__all__ = ["arguments", "reader", "when"]

CONFIG = {field.name for field in fields(SamplingConfig)}


def arguments(**options: Any) -> dict[str, Any]:
    """Return the arguments of `sample`; options of :class:`SamplingConfig` are moved into `config`."""
    if "times" in options:
        options["controller"] = Grid(options.pop("times"))
    if "confidence" in options:
        options["confidence"] = reader(options["confidence"])
    if "schedule" in options:
        options["schedule"] = when(options["schedule"])
    if type(options.get("transport")) is int:
        options |= {"transport": True, "projections": options["transport"]}
    config = {name: value for name, value in options.items() if name in CONFIG}
    others = {name: value for name, value in options.items() if name not in CONFIG}
    return {**others, "config": SamplingConfig(**config)} if config else others


def reader(confidence: bool | str | Estimator | None) -> Estimator | None:
    """Return an estimator: by name, that of the reference for `True`, or none for `False`."""
    if isinstance(confidence, bool):
        return AsReference() if confidence else None
    return None if confidence is None else as_estimator(confidence)


def when(schedule: int | Sequence[float] | Schedule | None) -> Schedule | None:
    """Return a schedule: every k-th step for a number, or the times of a list."""
    if schedule is None or isinstance(schedule, Schedule):
        return schedule
    return Schedule.every(schedule) if isinstance(schedule, int) else Schedule.at(schedule)
