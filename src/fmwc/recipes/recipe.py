"""What recipes share: changing a field from the command line, and saying where a number came from."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import datetime, timezone
from typing import Any, TypeVar

import torch

from fmwc.data import fingerprint
from fmwc.errors import UnknownNameError, UsageError, nearest
from fmwc.randomness import derive
from fmwc.readers import shown
from fmwc.recipes.commit import code, commit
from fmwc.training import Plan

__all__ = ["Clock", "data_of", "describe_device", "override", "pick_device", "plan_of", "provenance", "runtime"]

R = TypeVar("R")


MOST = 1 << 30
LONGEST = 4096  # characters of a text
LIMITS: dict[str, tuple[float, float]] = {  # what a number of a recipe can be; other whole numbers have 64 bits
    **dict.fromkeys(("points", "iterations", "noise_steps", "save_every", "samples", "swept", "guided"), (1, MOST)),
    **dict.fromkeys(("edited", "rewound", "references", "steps", "batch", "noise_batch"), (1, 10_000_000)),
    **dict.fromkeys(("hidden", "time_features", "frequencies", "width", "cond", "base"), (1, 16_384)),
    **dict.fromkeys(("depth", "layers", "blocks"), (1, 1_000)),
    **dict.fromkeys(("cycles", "classes", "replicates"), (1, 100_000)),
    **dict.fromkeys(("lr", "noise_lr", "last_lr", "weight_decay"), (0.0, 1e3)),
    **dict.fromkeys(("beta", "clip", "type_weight", "coord_weight", "minutes"), (0.0, 1e9)),
    **dict.fromkeys(("prior_rate", "warmup", "average", "enough"), (0.0, 1.0)),
    "anneal": (0.0, 1e3),
}


def _whole(text: str) -> int:
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("it does not fit 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("it is not finite")
    return value


def _plain(text: str) -> str:
    if len(text) > LONGEST or not text.isprintable():
        raise ValueError("it is not printable, or too long")
    return text


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_READ: dict[str, Callable[[str], Any]] = {"int": _whole, "float": _finite, "str": _plain, "bool": _truth}
_KINDS = {"int": "a whole number", "float": "a finite number", "str": "text", "bool": "true or false"}


def override(recipe: R, changes: Sequence[str], what: str = "recipe field") -> R:
    """A recipe with `key=value` changes, each read as the type of its field; `what` is the word for one."""
    known = {f.name: str(f.type) for f in fields(recipe)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise UsageError(f"--set takes key=value, got '{shown(change)[:100]}'")
        if key not in known:
            raise UnknownNameError(nearest(shown(key)[:100], known, what))
        try:
            values[key] = _READ[known[key]](value)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{what} '{key}' is {_KINDS[known[key]]}, got '{shown(value)[:100]}'") from error
        low, high = LIMITS.get(key, (-math.inf, math.inf))
        if known[key] in ("int", "float") and not low <= values[key] <= high:
            raise UsageError(f"{what} '{key}' lies between {low:g} and {high:g}, got {value[:100]}")
    return replace(recipe, **values)  # type: ignore[type-var]


def data_of(recipe: Any) -> str:
    """The fingerprint of what a recipe trains on: of the source where its rows are computed from one, because machines
    round otherwise."""
    if hasattr(recipe, "source"):
        return fingerprint(*recipe.source())
    data, cond = recipe.rows()
    return fingerprint(data, *cond.values())


def plan_of(recipe: Any) -> Plan:
    """The training plan a recipe's fields make, by their names; its seed is derived from the recipe's."""
    known = {f.name for f in fields(Plan)}
    literals = {name: value for name, value in vars(recipe).items() if name in known}
    return Plan(**{**literals, "seed": derive(recipe.seed, "train")})


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device '{name}'; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device '{name}' is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("CUDA is not available; use --device cpu")
    return device


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def runtime(device: torch.device) -> dict[str, str]:
    """What a result depends on beside its recipe: part of the identity of every run that can be resumed."""
    from fmwc import __version__  # here, because the package itself imports from below

    return {"device": device.type, "torch": torch.__version__, "fmwc": __version__}


def provenance(device: torch.device, seconds: float, **more: Any) -> dict[str, Any]:
    """Commit, device, versions, date and wall time: what stands beside every number.

    `commit` is that of fmwc's own code, and `code` a hash of the files that run: it differs where they were edited.
    """
    return {
        "commit": commit(),
        "code": code(),
        "device": describe_device(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        **more,
    }


class Clock:
    """Wall time since it was made; waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.start = device, time.perf_counter()
        commit(), code()  # looked up once: the files may change while it runs

    @property
    def seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.start
