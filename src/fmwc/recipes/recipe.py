"""What recipes share: changing a field from the command line, and saying where a number came from."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from datetime import datetime, timezone
from functools import cache
from typing import Any, TypeVar

import torch

from fmwc.data import fingerprint
from fmwc.errors import UnknownNameError, UsageError, nearest
from fmwc.randomness import derive
from fmwc.training import Plan

__all__ = ["Clock", "data_of", "describe_device", "override", "pick_device", "plan_of", "provenance", "runtime"]

R = TypeVar("R")


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": _truth}


def override(recipe: R, changes: Sequence[str], what: str = "recipe field") -> R:
    """A recipe with `key=value` changes, each read as the type of its field; `what` is the word for one."""
    known = {f.name: str(f.type) for f in fields(recipe)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise UsageError(f"--set takes key=value, got '{change}'")
        if key not in known:
            raise UnknownNameError(nearest(key, known, what))
        try:
            values[key] = _READ[known[key]](value)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{what} '{key}' is of type {known[key]}, got '{value}'") from error
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
        raise UsageError("no CUDA GPU is to be had here; use --device cpu")
    return device


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


@cache
def _commit() -> str:
    """The commit of the code that runs, looked up once: the tree may move on while it does."""
    # A copy of the tree without its history is told its commit by whoever copied it.
    if given := os.environ.get("FMWC_COMMIT"):
        return given
    try:
        here = os.path.dirname(__file__)
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(asked, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def runtime(device: torch.device) -> dict[str, str]:
    """What a result depends on beside its recipe: part of the identity of every run that can be resumed."""
    from fmwc import __version__  # here, because the package itself imports from below

    return {"device": device.type, "torch": torch.__version__, "fmwc": __version__}


def provenance(device: torch.device, seconds: float, **more: Any) -> dict[str, Any]:
    """Commit, device, versions, date and wall time: what stands beside every number."""
    return {
        "commit": _commit(),
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
        _commit()

    @property
    def seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.start
