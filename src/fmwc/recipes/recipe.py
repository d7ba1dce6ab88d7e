"""`Recipe`: the options of a training run, which `--set key=value` can change."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fmwc.data.arrays import fingerprint
from fmwc.errors import UnknownNameError, UsageError, nearest
from fmwc.field import Field, attach
from fmwc.flow import Space
from fmwc.randomness import derive
from fmwc.readers import shown
from fmwc.sampling import Reference
from fmwc.training import TrainingConfig

__all__ = ["RENAMED", "Recipe", "data_of", "literals_of", "override"]

RENAMED = {"eightbit": "quantised"}  # names of fields in files and `--set`: names in the code

R = TypeVar("R")


@dataclass(frozen=True)
class Recipe(ABC):
    """Options of a training run. Values are the paper's unless a comment gives a reason.

    Fields with the names of :class:`fmwc.training.TrainingConfig` configure the training of the flow.
    """

    name: ClassVar[str]
    counts: ClassVar[tuple[str, ...]] = ("width", "noise_steps")  # fields that must be at least 1

    method: str = "retrofit"  # retrofit: train the flow, then fit the noise; joint: both at once, as in the paper
    seed: int = 0
    beta: float = 1e-3
    prior_rate: float = 0.3
    cycles: int = 4
    warmup: float = 0.1
    width: int = 64  # of the inference networks
    noise_steps: int = 2_000  # of the retrofit

    # Defaults of fields that only some recipes have.
    include = "*"  # glob pattern of layers with noise
    exclude = ""  # glob pattern of layers without noise
    noise_lr = 1e-3
    noise_compiled = False
    enough = 1.0  # share of the steps that is sufficient if the time limit stops training
    quantised = False  # round weights to 8-bit integers, as shipped, before the reference is fitted
    flow = ""  # a checkpoint whose flow is used instead of training one

    def __post_init__(self) -> None:
        if self.method not in ("retrofit", "joint"):
            raise UnknownNameError(nearest(self.method, ("retrofit", "joint"), "method"))
        if not 0 < self.prior_rate < 1:
            raise UsageError(f"prior_rate must lie strictly between 0 and 1, got {self.prior_rate}")
        for name in (*Recipe.counts, *self.counts):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def noise_batch(self) -> int:
        return self.plan.batch

    @property
    def plan(self) -> TrainingConfig:
        """The configuration of the flow's training."""
        known = {f.name for f in fields(TrainingConfig)}
        literals = {name: value for name, value in vars(self).items() if name in known}
        return TrainingConfig(**{**literals, "seed": derive(self.seed, "train")})

    @abstractmethod
    def space(self) -> Space:
        """Return the space of the samples."""

    @abstractmethod
    def rows(self) -> tuple[Any, dict[str, Any]]:
        """Return the training data and its conditions."""

    @abstractmethod
    def build(self, heads: int) -> Any:
        """Return a new network with `heads` times as many outputs."""

    @abstractmethod
    def reference(self, field: Field) -> tuple[Reference, dict[str, float]]:
        """Fit the reference of the confidence; return it and metrics of samples."""

    def source(self) -> tuple[Tensor, ...]:
        """Return the data from which `rows` is computed."""
        data, cond = self.rows()
        return data, *cond.values()

    def network(self, heads: int = 1) -> Any:
        """Return a new network. Its initial weights depend only on the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "network"))
            return self.build(heads)

    def attach(self, network: nn.Module) -> Field:
        """Attach noise to a network."""
        return attach(
            network,
            include=[self.include],
            exclude=[self.exclude] if self.exclude else [],
            space=self.space(),
            prior_rate=self.prior_rate,
            width=self.width,
            seed=derive(self.seed, "noise"),
        )


def data_of(recipe: Recipe) -> str:
    """Return the fingerprint of a recipe's training data."""
    return fingerprint(*recipe.source())


def literals_of(recipe: Any) -> dict[str, Any]:
    """Return the fields of a recipe under the names used in files."""
    names = {new: old for old, new in RENAMED.items()}
    return {names.get(name, name): value for name, value in asdict(recipe).items()}


# ---- overrides ---------------------------------------------------------------------------------------------------

MOST = 1 << 30
LONGEST = 4096  # maximum characters of a string
LIMITS: dict[str, tuple[float, float]] = {  # range of a field; other integers must fit into 64 bits
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
    """Return a recipe with `key=value` changes, each parsed as the type of its field.

    Arguments:
        recipe: A dataclass of numbers, strings and Booleans.
        changes: The changes.
        what: The word for a field in error messages.
    """
    known = {f.name: str(f.type) for f in fields(recipe)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise UsageError(f"--set takes key=value, got '{shown(change)[:100]}'")
        key = RENAMED.get(key, key)
        if key not in known:
            raise UnknownNameError(nearest(shown(key)[:100], known, what))
        kind, parse, good = _READ[known[key]]
        try:
            values[key] = parse(value)
            if not good(values[key]):
                raise ValueError(value)
        except ValueError as error:
            raise UsageError(f"{what} '{key}' must be {kind}, got '{shown(value)[:100]}'") from error
        low, high = LIMITS.get(key, (-math.inf, math.inf))
        if known[key] in ("int", "float") and not low <= values[key] <= high:
            raise UsageError(f"{what} '{key}' must lie between {low:g} and {high:g}, got {value[:100]}")
    return replace(recipe, **values)  # type: ignore[type-var]
