"""Options of a run written flat and short, for tests that vary them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fmwc.estimators import Estimator, as_estimator
from fmwc.sampling import AsReference, Grid, SamplingConfig, Schedule

__all__ = ["arguments", "reader", "when"]

CONFIG = {field.name for field in fields(SamplingConfig)}


def arguments(**options: Any) -> dict[str, Any]:
    """Arguments of `sample`: the options that :class:`SamplingConfig` holds, in its `config`."""
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
    """An estimator, by name too; as the reference was made for `True`, none for `False`."""
    if isinstance(confidence, bool):
        return AsReference() if confidence else None
    return None if confidence is None else as_estimator(confidence)


def when(schedule: int | str | Sequence[float] | Schedule | None) -> Schedule | None:
    """A schedule: every k-th step for a number, the field's own for `adaptive`, chosen times for a list."""
    if schedule is None or isinstance(schedule, Schedule):
        return schedule
    if schedule == "adaptive":
        return Schedule.adaptive()
    return Schedule.every(schedule) if isinstance(schedule, int) else Schedule.at(schedule)
