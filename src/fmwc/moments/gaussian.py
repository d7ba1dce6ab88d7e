"""The Gaussian tensor: a tensor that carries a diagonal Gaussian through torch operations.

A network that is given one runs as it was written. Each torch function it calls looks up its rule in :data:`RULES`;
an operation without a rule raises. It never falls back to the mean, which would lose variance in silence.

A complex Gaussian has independent parts: its mean is complex, and its variance holds Var[Re] + i Var[Im].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import NoRuleError, ShapeError
from fmwc.moments.closures import Closure, GaussHermite, Moments

__all__ = [
    "EXACT",
    "FIRST_ORDER",
    "GAUSSIAN",
    "INDEPENDENT",
    "QUADRATURE",
    "RULES",
    "Gaussian",
    "Rule",
    "known",
    "moments_of",
    "register",
]

# How far a rule can be trusted: every rule says which.
EXACT = "exact"
INDEPENDENT = "exact for independent inputs"
GAUSSIAN = "exact for Gaussian inputs"
QUADRATURE = "quadrature"  # or what else the closure does
FIRST_ORDER = "first order"


@dataclass(frozen=True)
class Rule:
    """One row of the table: how an operation acts on moments, and how exact that is."""

    apply: Callable[..., Any]  # (func, args, kwargs) -> what the operation returns
    exactness: str
    family: str
    complex: bool = False  # whether it knows what to do with complex Gaussians


# The names operands may have where they are given by name, in the order in which they stand where they are not.
_OPERANDS = (
    "condition", "input", "mat1", "batch1", "mat", "other", "exponent", "mat2", "batch2", "vec", "vec2",
)  # fmt: skip

RULES: dict[Callable[..., Any], Rule] = {}


def register(
    *functions: Callable[..., Any], exactness: str, family: str | None = None, complex: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a rule for torch functions. A rule is called as `apply(func, args, kwargs)`."""

    def enter(apply: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = Rule(apply, exactness, family or apply.__name__.replace("_", " "), complex)
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
        if not (mean.is_floating_point() or mean.is_complex()):
            raise NoRuleError(
                f"{mean.dtype} carries no variance; keep to floating point, or use propagation='linearised'"
            )
        if var.stride() != mean.stride():  # what is a view of the mean must be one of the variance
            var = torch.empty_like(mean, dtype=var.dtype).copy_(var)
        self = Tensor._make_wrapper_subclass(cls, mean.shape, mean.stride(), dtype=mean.dtype, device=mean.device)
        self._mean, self._var, self._closure = mean, var, closure
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gaussian(mean={self._mean}, var={self._var})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = (*args, *(kwargs.pop(name) for name in _OPERANDS if name in kwargs))  # rules read them in order
        rule = RULES.get(func)
        if rule is None or kwargs.get("out") is not None:
            return _of_the_known(func, args, kwargs)
        if not rule.complex and any(g._mean.is_complex() for g in gaussians([*args, *kwargs.values()])):
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


def known(value: Tensor, closure: Closure) -> Gaussian:
    """A Gaussian without variance, into which Gaussians may be written."""
    return Gaussian(value, torch.zeros_like(value), closure)


def gaussians(value: Any) -> list[Gaussian]:
    """Every Gaussian in nested lists and tuples."""
    if isinstance(value, Gaussian):
        return [value]
    return [g for v in value for g in gaussians(v)] if isinstance(value, (list, tuple)) else []


def walk(value: Any, f: Callable[[Tensor], Any]) -> Any:
    """Applies `f` to every tensor in nested lists and tuples."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, (list, tuple)):
        return type(value)(walk(v, f) for v in value)
    return value


def mean_of(value: Any) -> Any:
    return value._mean if isinstance(value, Gaussian) else value


def _of_the_known(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation without a rule, on Gaussians without variance: they are known, so it is done to their values."""
    if kwargs.get("out") is not None or any(bool(g._var.any()) for g in gaussians([*args, *kwargs.values()])):
        raise NoRuleError(refusal(func, args, kwargs))
    return func(*walk(args, mean_of), **{k: walk(v, mean_of) for k, v in kwargs.items()})


def is_inplace(func: Any) -> bool:
    name = getattr(func, "__name__", str(func))
    augmented = name.startswith("__i") and name.endswith("__")
    return augmented or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def refusal(func: Any, args: Any, kwargs: Any) -> str:
    name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
    kinds = ", ".join([_kind(a) for a in args] + [f"{k}={_kind(v)}" for k, v in kwargs.items()])
    if is_inplace(func) or kwargs.get("out") is not None:
        return (
            f"{name}({kinds}) writes in place into what holds no variance, which would lose it; write it out of place "
            "(x = x + y), make the target with x.new_zeros, or use propagation='linearised'"
        )
    return (
        f"no rule carries a variance through {name}({kinds}); add one with fmwc.moments.register (fmwc rules), "
        "or use propagation='linearised', which needs no rules"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(value).__name__}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_kind(v) for v in value)}]"
    return type(value).__name__
