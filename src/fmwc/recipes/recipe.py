"""What a recipe is, and how `--set key=value` changes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from fmwc.data.arrays import fingerprint
from fmwc.errors import UnknownNameError, UsageError, nearest
from fmwc.field import Field
from fmwc.flow import Space
from fmwc.randomness import derive
from fmwc.readers import shown
from fmwc.references import Reference
from fmwc.training import TrainingConfig

__all__ = ["Recipe", "data_of", "override", "plan_of", "require_counts", "require_method"]

R = TypeVar("R")


class Recipe(Protocol):
    """What fitting asks of a recipe: a frozen dataclass of literals, each with its reason."""

    @property
    def name(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def plan(self) -> TrainingConfig: ...
    @property
    def noise_steps(self) -> int: ...
    @property
    def noise_lr(self) -> float: ...

    def space(self) -> Space:
        """Return the space of the samples."""

    def rows(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the training data and its conditions."""

    def network(self, heads: int = 1) -> nn.Module:
        """Return a new network whose initial weights depend on the seed only; `heads` multiplies its outputs."""

    def attach(self, network: nn.Module) -> Field:
        """Attach noise to a network."""

    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Return the reference of the confidence, and metrics of the samples."""


def plan_of(recipe: Any) -> TrainingConfig:
    """Return the training plan made of a recipe's fields of the same names; its seed is derived from the recipe's."""
    known = {f.name for f in fields(TrainingConfig)}
    literals = {name: value for name, value in vars(recipe).items() if name in known}
    return TrainingConfig(**{**literals, "seed": derive(recipe.seed, "train")})


def data_of(recipe: Any) -> str:
    """Return the fingerprint of a recipe's training data: of its source, if rows are computed and rounding differs."""
    if hasattr(recipe, "source"):
        return fingerprint(*recipe.source())
    data, cond = recipe.rows()
    return fingerprint(data, *cond.values())


def require_method(recipe: Any) -> None:
    """Raise unless the method and prior rate of a recipe are valid."""
    if recipe.method not in ("retrofit", "joint"):
        raise UnknownNameError(nearest(recipe.method, ("retrofit", "joint"), "method"))
    if not 0 < recipe.prior_rate < 1:
        raise UsageError(f"prior_rate must lie strictly between 0 and 1, got {recipe.prior_rate}")


def require_counts(recipe: Any, *names: str) -> None:
    """Raise unless each of these fields is at least 1."""
    for name in names:
        if getattr(recipe, name) < 1:
            raise UsageError(f"{name} must be at least 1, got {getattr(recipe, name)}")


# ---- overrides ---------------------------------------------------------------------------------------------------

MOST = 1 << 30
LONGEST = 4096  # characters of a text
LIMITS: dict[str, tuple[float, float]] = {  # by field; other whole numbers have 64 bits
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
_READ: dict[str, tuple[str, Callable[[str], Any], Callable[[Any], bool]]] = {  # field type: name, parser, check
    "int": ("a whole number of at most 64 bits", int, lambda value: -(1 << 63) <= value < 1 << 63),
    "float": ("a finite number", float, math.isfinite),
    "str": ("printable text", str, lambda value: len(value) <= LONGEST and value.isprintable()),
    "bool": ("true or false", lambda text: {"true": True, "false": False}.get(text.lower()), lambda v: v is not None),
}


def override(recipe: R, changes: Sequence[str], what: str = "recipe field") -> R:
    """Return a recipe with `key=value` changes, each parsed as the type of its field; `what` names one in messages."""
    known = {f.name: str(f.type) for f in fields(recipe)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise UsageError(f"--set takes key=value, got '{shown(change)[:100]}'")
        if key not in known:
            raise UnknownNameError(nearest(shown(key)[:100], known, what))
        kind, parse, good = _READ[known[key]]
        try:
            values[key] = parse(value)
            if not good(values[key]):
                raise ValueError(value)
        except ValueError as error:
            raise UsageError(f"{what} '{key}' is {kind}, got '{shown(value)[:100]}'") from error
        low, high = LIMITS.get(key, (-math.inf, math.inf))
        if known[key] in ("int", "float") and not low <= values[key] <= high:
            raise UsageError(f"{what} '{key}' must lie between {low:g} and {high:g}, got {value[:100]}")
    return replace(recipe, **values)  # type: ignore[type-var]
