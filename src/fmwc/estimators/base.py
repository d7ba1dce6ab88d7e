"""The interface of estimators and of the fields that they read, and the estimators by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fmwc.errors import UsageError, pick
from fmwc.noise import Pass
from fmwc.randomness import Randomness
from fmwc.state import State, tree_map

__all__ = [
    "ESTIMATORS",
    "Estimator",
    "Noisy",
    "StateMoments",
    "as_estimator",
    "as_normal_tensor",
    "estimator_of",
    "normal_inputs",
    "plain_output",
    "register",
]


class Noisy(Protocol):
    """A field as an estimator uses it.

    Attributes:
        row_order_checked: Whether the rows of every layer have been found to be in the order of the samples.
    """

    row_order_checked: bool

    @property
    def fused(self) -> bool:
        """Whether torch has fused kernels for parts of the network, which are not used while a pass runs."""

    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Any:
        """The velocity without noise."""

    def run(self, current: Pass, x: Any, t: Tensor, *, cond: Mapping[str, Any] | None = None) -> Any:
        """The velocity while a pass runs."""


class StateMoments(Protocol):
    """Moments of a state: `mean` and `var` are states (:class:`fmwc.moments.Moments` is one)."""

    @property
    def mean(self) -> State: ...
    @property
    def var(self) -> State: ...


class Estimator(Protocol):
    """Computes :class:`fmwc.moments.Moments` as `estimator(field, x, t, cond, randomness)`.

    With `plain_mean`, the mean is the plain network's output bit for bit, so that a sampler may step on it. With an
    attribute `rounds` that is true, the variance may be computed in half precision: it is a sum of squares, or is
    carried forward, so its relative error is that of rounding. A difference of draws is not.
    """

    @property
    def plain_mean(self) -> bool: ...

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any: ...


def plain_output(field: Noisy, x: Any, t: Tensor, cond: dict[str, Any]) -> Any:
    """The network's output without a pass.

    A pass without noise changes the last digits where torch has fused kernels (`field.fused`). Estimators take their
    mean from here, so that no estimator changes a sample.
    """
    with torch.no_grad():
        return field(x, t, **cond)


def as_normal_tensor(value: Any) -> Any:
    """A copy of a tensor that was created in inference mode, which has no derivatives; any other value unchanged."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def normal_inputs(x: Any, t: Tensor, cond: dict[str, Any]) -> tuple[Any, Tensor, dict[str, Any]]:
    """The inputs of a field as tensors that can be differentiated."""
    return tree_map(as_normal_tensor, x), as_normal_tensor(t), {k: as_normal_tensor(c) for k, c in cond.items()}


# ---- by name ---------------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, Estimator] = {}  # filled by the modules of this package
_E = TypeVar("_E")


def register(name: str) -> Callable[[type[_E]], type[_E]]:
    """Enter a class of estimators, with its default options, under a name."""

    def enter(kind: type[_E]) -> type[_E]:
        ESTIMATORS[name] = kind()  # type: ignore[assignment]
        return kind

    return enter


def as_estimator(estimator: str | Estimator) -> Estimator:
    """An estimator by its name; an estimator object unchanged."""
    return pick(ESTIMATORS, estimator, "propagation") if isinstance(estimator, str) else estimator


def estimator_of(text: str) -> Estimator | None:
    """The estimator with this representation; `None` if it has options other than integers, booleans and None.

    >>> estimator_of("Linearised(probes=2)"), estimator_of("Linearised(closure=mine)")
    (Linearised(probes=2), None)
    """
    kinds = {type(estimator).__name__: estimator for estimator in ESTIMATORS.values()}
    name, _, options = text.removesuffix(")").partition("(")
    if name not in kinds or str(kinds[name]) == text:
        return kinds.get(name)
    words = {"None": None, "True": True, "False": False}
    found = re.findall(r"(\w+)=(\w+)", options)
    try:
        made: Estimator = type(kinds[name])(**{n: words[v] if v in words else int(v) for n, v in found})
    except (TypeError, ValueError, UsageError):
        return None
    return made if str(made) == text else None
