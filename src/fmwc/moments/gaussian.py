r"""The Gaussian tensor, which carries a diagonal Gaussian through torch operations, and the closures of nonlinearities.

A network runs unchanged on a Gaussian tensor. Each torch function that it calls looks up its rule in :data:`RULES`; an
operation without a rule raises instead of falling back to the mean, which would lose variance silently.

A closure is called as `closure(φ, μ, σ²)` and returns the moments of φ(z) for z ~ N(μ, σ²), one coordinate at a time
(App. propagation). φ is any elementwise torch function; its derivatives come from automatic differentiation.

A complex Gaussian has independent parts: the mean is complex, and the variance holds Var[Re] + i Var[Im].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import NoRuleError, ShapeError, UsageError, pick

# ---- closures --------------------------------------------------------------------------------------------------------

Pointwise = Callable[[Tensor], Tensor]


class Moments(NamedTuple):
    """Mean and variance of a velocity.

    `var` has the mean's shape. If an estimator gives one number per sample (the mean over its coordinates), `var` has
    size 1 in every dimension but the first.
    """

    mean: Tensor
    var: Tensor


class Closure(Protocol):
    """Function that computes the moments of f(z) for z ~ N(mean, var), one coordinate at a time."""

    def __call__(self, f: Pointwise, mean: Tensor, var: Tensor) -> Moments: ...


@lru_cache
def _nodes(count: int) -> tuple[tuple[float, float], ...]:
    z, w = np.polynomial.hermite_e.hermegauss(count)
    return tuple(zip(z.tolist(), (w / w.sum()).tolist(), strict=True))


@dataclass(frozen=True)
class GaussHermite:
    r"""Gauss–Hermite quadrature with n nodes, exact for polynomials φ with 2·deg φ ≤ 2n − 1.

    .. math:: E[φ(z)] ≈ \sum_i w_i φ(μ + σ z_i), \quad Var[φ(z)] ≈ \sum_i w_i (φ(μ + σ z_i) - E[φ])^2

    >>> mean, var = GaussHermite(3)(torch.square, torch.tensor([2.0]), torch.tensor([0.25]))
    >>> mean.item(), round(var.item(), 4)  # E = μ² + σ², Var = 4μ²σ² + 2σ⁴
    (4.25, 4.125)

    Arguments:
        nodes: The number of nodes n; the paper uses 10.
    """

    nodes: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 100:
            raise UsageError(f"Gauss–Hermite takes 1 to 100 nodes, got {self.nodes}")

    def __call__(self, f: Pointwise, mean: Tensor, var: Tensor) -> Moments:
        std = var.sqrt()
        # Sum φ − φ(μ), to avoid cancellation.
        centre = f(mean)
        first = torch.zeros_like(mean)
        second = torch.zeros_like(mean)
        for z, w in _nodes(self.nodes):
            shift = f(mean + std * z) - centre
            first = first + w * shift
            second = second + w * shift.square()
        return Moments(centre + first, (second - first.square()).clamp_min(0))


@dataclass(frozen=True)
class Taylor:
    r"""Taylor closure of first or second order, exact for linear or quadratic φ.

    .. math:: E[φ] ≈ φ(μ) + \tfrac12 φ''(μ) σ^2, \quad Var[φ] ≈ φ'(μ)^2 σ^2 + \tfrac12 φ''(μ)^2 σ^4

    First order omits both terms in φ''.

    Arguments:
        order: 1 or 2.
    """

    order: int = 1

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise UsageError(f"the Taylor closure has order 1 or 2, got {self.order}")

    def __call__(self, f: Pointwise, mean: Tensor, var: Tensor) -> Moments:
        if self.order == 1:
            value, first = torch.func.jvp(f, (mean,), (torch.ones_like(mean),))  # type: ignore[misc]
            return Moments(value, first.square() * var)

        # φ is elementwise, so the gradient of its sum is φ', and the gradient of that sum is φ''. Reverse mode, because
        # torch cannot differentiate every activation twice in forward mode.
        def slope(z: Tensor) -> Tensor:
            return torch.func.grad(lambda y: f(y).sum())(z)

        first, second = slope(mean), torch.func.grad(lambda z: slope(z).sum())(mean)
        return Moments(f(mean) + second * var / 2, first.square() * var + (second * var).square() / 2)


def preserves_mean(closure: Closure) -> bool:
    """Return whether the rules keep the plain network's mean: at first order, except for the maximum of two values."""
    return closure == Taylor(1)


CLOSURES: dict[str, Closure] = {"gauss_hermite": GaussHermite(), "taylor1": Taylor(1), "taylor2": Taylor(2)}


def as_closure(closure: str | Closure) -> Closure:
    """Return a closure by name; return a closure object unchanged."""
    return pick(CLOSURES, closure, "closure") if isinstance(closure, str) else closure


# ---- the rule table --------------------------------------------------------------------------------------------------

# The exactness of rules.
EXACT = "exact"
INDEPENDENT = "exact for independent inputs"
GAUSSIAN = "exact for Gaussian inputs"
QUADRATURE = "quadrature"  # by the closure
FIRST_ORDER = "first order"


@dataclass(frozen=True)
class Rule:
    """Rule for an operation: how it acts on moments, and how exact it is."""

    apply: Callable[..., Any]  # (func, args, kwargs) -> the result of the operation
    exactness: str
    family: str
    complex: bool = False  # whether it accepts complex Gaussians


# Names of operands that may be passed by keyword, in their positional order.
_OPERANDS = (
    "condition", "input", "mat1", "batch1", "mat", "other", "exponent", "mat2", "batch2", "vec", "vec2",
)  # fmt: skip

RULES: dict[Callable[..., Any], Rule] = {}


def register(
    *functions: Callable[..., Any], exactness: str, family: str | None = None, complex: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for torch functions. A rule is called as `apply(func, args, kwargs)`."""

    def enter(apply: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = Rule(apply, exactness, family or apply.__name__.replace("_", " "), complex)
        return apply

    return enter


class Gaussian(Tensor):
    """A tensor of independent Gaussians.

    >>> y = torch.relu(Gaussian(torch.tensor([9.0]), torch.tensor([1.0]))) * 2 + 1
    >>> moments_of(y).mean.item(), round(moments_of(y).var.item(), 4)
    (19.0, 4.0)

    Arguments:
        mean: μ, of any shape.
        var: σ², of the same shape.
        closure: The closure of nonlinearities.
    """

    _mean: Tensor
    _var: Tensor
    _closure: Closure

    @staticmethod
    def __new__(cls, mean: Tensor, var: Tensor, closure: Closure = GaussHermite()) -> Gaussian:  # noqa: B008
        if mean.shape != var.shape:
            raise ShapeError(f"mean and variance must have one shape, got {tuple(mean.shape)} and {tuple(var.shape)}")
        if not (mean.is_floating_point() or mean.is_complex()):
            raise NoRuleError(f"{mean.dtype} carries no variance; use floating point, or the linearised estimator")
        if var.stride() != mean.stride():  # so that mean and variance allow the same views
            var = torch.empty_like(mean, dtype=var.dtype).copy_(var)
        self = Tensor._make_wrapper_subclass(cls, mean.shape, mean.stride(), dtype=mean.dtype, device=mean.device)
        self._mean, self._var, self._closure = mean, var, closure
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gaussian(mean={self._mean}, var={self._var})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = (*args, *(kwargs.pop(name) for name in _OPERANDS if name in kwargs))  # rules expect them in order
        rule = RULES.get(func)
        if rule is None or kwargs.get("out") is not None:
            return _of_known_values(func, args, kwargs)
        if not rule.complex and any(g._mean.is_complex() for g in gaussians([*args, *kwargs.values()])):
            raise NoRuleError(refusal(func, args, kwargs))
        return rule.apply(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NoRuleError(refusal(func, args, kwargs or {}))


def moments_of(value: Tensor) -> Moments:
    """Return the mean and variance of a Gaussian tensor; the variance of a plain tensor is zero."""
    if isinstance(value, Gaussian):
        return Moments(value._mean, value._var)
    return Moments(value, torch.zeros_like(value))


def known(value: Tensor, closure: Closure) -> Gaussian:
    """Return a Gaussian with zero variance, which a network may write Gaussians into."""
    return Gaussian(value, torch.zeros_like(value), closure)


def gaussians(value: Any) -> list[Gaussian]:
    """Return every Gaussian in nested lists and tuples."""
    if isinstance(value, Gaussian):
        return [value]
    return [g for v in value for g in gaussians(v)] if isinstance(value, (list, tuple)) else []


def walk(value: Any, f: Callable[[Tensor], Any]) -> Any:
    """Apply `f` to every tensor in nested lists and tuples."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, (list, tuple)):
        return type(value)(walk(v, f) for v in value)
    return value


def mean_of(value: Any) -> Any:
    """Return the mean of a Gaussian; any other value unchanged."""
    return value._mean if isinstance(value, Gaussian) else value


def _of_known_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operation without a rule to Gaussians whose variance is zero; raise for any other variance."""
    if kwargs.get("out") is not None or any(bool(g._var.any()) for g in gaussians([*args, *kwargs.values()])):
        raise NoRuleError(refusal(func, args, kwargs))
    return func(*walk(args, mean_of), **{k: walk(v, mean_of) for k, v in kwargs.items()})


def is_inplace(func: Any) -> bool:
    """Return whether a torch function writes into its first argument, by its name."""
    name = getattr(func, "__name__", str(func))
    augmented = name.startswith("__i") and name.endswith("__")
    return augmented or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def refusal(func: Any, args: Any, kwargs: Any) -> str:
    """Return the error message for an operation that has no rule for these arguments."""
    name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
    kinds = ", ".join([_kind(a) for a in args] + [f"{k}={_kind(v)}" for k, v in kwargs.items()])
    if is_inplace(func) or kwargs.get("out") is not None:
        return (
            f"{name}({kinds}) writes in place into a plain tensor, which holds no variance; write it out of place "
            "(x = x + y), create the target with x.new_zeros, or use the linearised estimator"
        )
    return (
        f"no rule carries a variance through {name}({kinds}); add one with fmwc.moments.register, "
        "or use the linearised estimator, which needs no rules"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(value).__name__}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_kind(v) for v in value)}]"
    return type(value).__name__


# ---- helpers of rules ------------------------------------------------------------------------------------------------


def arguments(args: Any, kwargs: Any, *names: str, **defaults: Any) -> list[Any]:
    """Return the arguments of a torch function in order, whether they were passed by position or by name.

    >>> arguments((1,), {"dim": 0}, "input", p=2, dim=-1)
    [1, 2, 0]
    """
    order = (*names, *defaults)
    values = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
    return [values[name] for name in order]


def closure_of(args: Any, kwargs: Any) -> Closure:
    """Return the closure of the first Gaussian among the arguments."""
    return gaussians([*args, *kwargs.values()])[0]._closure


def on(f: Callable[[Tensor], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with `f` applied to every tensor."""
    return [walk(a, f) for a in args], {k: walk(v, f) for k, v in kwargs.items()}


def paired(mean: Any, var: Any, closure: Closure) -> Any:
    """Join the results of an operation on means and on variances."""
    if isinstance(mean, Tensor):
        return Gaussian(mean, var, closure)
    if not isinstance(mean, (list, tuple)):  # x.type() returns a string
        return mean
    return type(mean)(paired(m, v, closure) for m, v in zip(mean, var, strict=True))


def variance_at(value: Tensor) -> Tensor:
    """Return the variance of a value; integers and masks, which are indices, unchanged."""
    return moments_of(value).var if value.is_floating_point() or value.is_complex() else value


def getter(name: str) -> Any:
    """Return the function that torch dispatches on when a property is read."""
    return getattr(torch.Tensor, name).__get__


def write(target: Gaussian, value: Gaussian) -> Gaussian:
    """Write a value into the memory of a Gaussian's mean and variance, so that its views see it."""
    target._mean.copy_(value._mean)
    target._var.copy_(value._var)
    return target
