"""The Gaussian tensor: a tensor that carries a diagonal Gaussian through torch operations.

A network that is given one runs as it was written. Each torch function it calls looks up its rule in :data:`RULES`;
an operation without a rule raises. It never falls back to the mean, which would lose variance in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import NoRuleError, ShapeError
from fmwc.moments.closures import Closure, GaussHermite, Moments

__all__ = ["EXACT", "FIRST_ORDER", "INDEPENDENT", "RULES", "Gaussian", "Rule", "moments_of", "register"]

# How far a rule can be trusted: every rule says which.
EXACT = "exact"
INDEPENDENT = "exact if inputs are independent"
FIRST_ORDER = "by the closure"


@dataclass(frozen=True)
class Rule:
    """One row of the table: how an operation acts on moments, and how exact that is."""

    apply: Callable[..., Any]  # (func, args, kwargs) -> what the operation returns
    exactness: str
    family: str


RULES: dict[Callable[..., Any], Rule] = {}


def register(
    *functions: Callable[..., Any], exactness: str, family: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a rule for torch functions. A rule is called as `apply(func, args, kwargs)`."""

    def enter(apply: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = Rule(apply, exactness, family or apply.__name__)
        return apply

    return enter


class Gaussian(Tensor):
    """Creates a tensor of independent Gaussians.

    >>> y = torch.relu(Gaussian(torch.tensor([9.0]), torch.tensor([1.0]))) * 2 + 1
    >>> moments_of(y).mean.item(), round(moments_of(y).var.item(), 4)
    (19.0, 4.0)

    Arguments:
        mean: μ, any shape.
        var: σ², the same shape.
        closure: How a nonlinearity is treated.
    """

    _mean: Tensor
    _var: Tensor
    _closure: Closure

    @staticmethod
    def __new__(cls, mean: Tensor, var: Tensor, closure: Closure = GaussHermite()) -> Gaussian:  # noqa: B008
        if mean.shape != var.shape:
            raise ShapeError(f"mean and variance have one shape, got {tuple(mean.shape)} and {tuple(var.shape)}")
        self = Tensor._make_wrapper_subclass(cls, mean.shape, mean.stride(), dtype=mean.dtype, device=mean.device)
        self._mean, self._var, self._closure = mean, var, closure
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gaussian(mean={self._mean}, var={self._var})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = (*args, *(kwargs.pop(name) for name in ("input", "other") if name in kwargs))  # rules read them in order
        rule = RULES.get(func)
        if rule is None or kwargs.get("out") is not None:
            raise NoRuleError(refusal(func, args, kwargs))
        return rule.apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NoRuleError(refusal(func, args, kwargs or {}))


def moments_of(value: Tensor) -> Moments:
    """The mean and variance of a Gaussian tensor; a plain tensor is known exactly, so its variance is zero."""
    if isinstance(value, Gaussian):
        return Moments(value._mean, value._var)
    return Moments(value, torch.zeros_like(value))


def is_inplace(func: Any) -> bool:
    name = getattr(func, "__name__", str(func))
    augmented = name.startswith("__i") and name.endswith("__")
    return augmented or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def refusal(func: Any, args: Any, kwargs: Any) -> str:
    name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
    kinds = ", ".join([_kind(a) for a in args] + [f"{k}={_kind(v)}" for k, v in kwargs.items()])
    if is_inplace(func) or "out" in kwargs:
        return (
            f"{name}({kinds}) writes in place, which would lose the variance; write it out of place "
            "(x = x + y, inplace=False), or use propagation='linearised'"
        )
    return (
        f"no rule carries a variance through {name}({kinds}); add one with fmwc.moments.register, "
        "or use propagation='linearised', which needs no rules"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(value).__name__}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_kind(v) for v in value)}]"
    return type(value).__name__
