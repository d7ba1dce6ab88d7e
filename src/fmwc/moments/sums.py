"""Sums and means with known weights: over all, in windows, by an index, between neighbours.

y = M x with a known matrix M has Var[y] = M² σ² for independent entries; no rule here builds M.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import INDEPENDENT, Gaussian, mean_of, refusal, register
from fmwc.moments.operands import closure_of, on, variance_at

__all__: list[str] = []

T = Tensor


@register(torch.sum, T.sum, torch.cumsum, T.cumsum, F.fold, exactness=INDEPENDENT)
def total(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σμ, Σσ²."""
    x, *rest = args
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **kwargs), x._closure)


@register(torch.mean, T.mean, exactness=INDEPENDENT)
def mean(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σμ/n, Σσ²/n²."""
    x, *rest = args
    centre = func(x._mean, *rest, **kwargs)
    return Gaussian(centre, func(x._var, *rest, **kwargs) * (centre.numel() / x._mean.numel()), x._closure)


# ---- by an index -----------------------------------------------------------------------------------------------------


@register(torch.index_add, T.index_add, torch.scatter_add, T.scatter_add, exactness=INDEPENDENT)
def scattered_sum(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Entries added to those of a table (the messages to an atom): means add, and so do variances."""
    (means, mean_kwargs), (variances, var_kwargs) = (on(f, args, kwargs) for f in (mean_of, variance_at))
    if "alpha" in var_kwargs:
        var_kwargs["alpha"] = var_kwargs["alpha"] ** 2
    return Gaussian(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(torch.scatter_reduce, T.scatter_reduce, exactness=INDEPENDENT)
def scattered_sum_or_mean(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """The same with `reduce="sum"`; a mean divides the sum of n variances by n once more."""

    def bind(input: Any, dim: int, index: Tensor, src: Any, reduce: str, include_self: bool = True) -> Any:
        return input, dim, index, src, reduce, include_self

    x, dim, index, src, reduce, include = bind(*args, **kwargs)
    if reduce not in ("sum", "mean"):
        raise NoRuleError(refusal(func, args, kwargs))

    def reduced(f: Any, how: str) -> Tensor:
        return func(f(x), dim, index, f(src), how, include_self=include)

    var = reduced(variance_at, reduce)
    if reduce == "mean":
        var = var / reduced(lambda v: torch.ones_like(mean_of(v)), "sum")
    return Gaussian(reduced(mean_of, reduce), var, closure_of(args, kwargs))


# ---- in windows ------------------------------------------------------------------------------------------------------

_ADAPTIVE = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}


@register(F.avg_pool2d, F.avg_pool3d, exactness=INDEPENDENT)
def average_pool(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """w Σ_window wσ², where every entry of a window has the weight w: one over its size, or the divisor given.

    Padding and a last window that hangs over the edge make w differ between windows, so it is read off an image of
    ones: pooled it is cw, for a window with c entries in the image, and with the divisor 1 it is c.
    """
    x, *rest = args
    ones = x._var.new_ones(1, *x.shape[-2 if func is F.avg_pool2d else -3 :])
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    counting = {**dict(zip(names, rest, strict=False)), **kwargs, "divisor_override": 1}
    weight = func(ones, *rest, **kwargs) / func(ones, **counting)
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **kwargs) * weight, x._closure)


@register(F.avg_pool1d, exactness=INDEPENDENT, family="average pool")
def average_pool_of_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """As an image of one row: there is no divisor to choose in one dimension."""

    def bind(input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, *rest: Any, **more: Any) -> Any:
        kernel, step, edge = (v[0] if isinstance(v, (list, tuple)) else v for v in (kernel_size, stride, padding))
        return F.avg_pool2d(input.unsqueeze(-2), (1, kernel), (1, step or kernel), (0, edge), *rest, **more)

    return bind(*args, **kwargs).squeeze(-2)


@register(*_ADAPTIVE, exactness=INDEPENDENT)
def adaptive_average_pool(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σσ²/n² over windows that reach from ⌊iH/h⌋ to ⌈(i + 1)H/h⌉, so that n may differ between them."""
    x, *rest = args
    centre = func(x._mean, *rest, **kwargs)
    var = func(x._var, *rest, **kwargs)
    for axis in range(-_ADAPTIVE[func], 0):
        side, count = x.shape[axis], centre.shape[axis]
        sizes = var.new_tensor([-(-(i + 1) * side // count) - i * side // count for i in range(count)])
        var = var / sizes.reshape(-1, *[1] * (-1 - axis))
    return Gaussian(centre, var, x._closure)


# ---- between neighbours ----------------------------------------------------------------------------------------------


@register(F.interpolate, exactness=INDEPENDENT)
def interpolate(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Weights act on each axis alone, so they are read off an identity matrix, axis by axis, and squared.

    The nearest is a copy (exact); linear, cubic and area are weighted means. With `antialias`, torch's own weights are
    wrong for images one entry wide (2.13, CPU), and could not be read off.
    """
    (x,) = args
    if kwargs.get("antialias"):
        raise NoRuleError(refusal(func, args, kwargs))
    if kwargs.get("mode", "nearest") in ("nearest", "nearest-exact"):
        return Gaussian(func(x._mean, **kwargs), func(x._var, **kwargs), x._closure)
    given = {k: kwargs.pop(k) for k in ("size", "scale_factor")}
    dims = x.ndim - 2

    def along(axis: int, value: Any, elsewhere: Any) -> Any:  # the size or the factor of this axis alone
        if value is None:
            return None
        every = value if isinstance(value, (tuple, list)) else [value] * dims
        return [every[i] if i == axis else elsewhere for i in range(dims)]

    var = x._var
    for axis in range(dims):
        side = x.shape[2 + axis]
        identity = torch.eye(side, dtype=var.dtype, device=var.device)
        identity = identity.reshape(side, 1, *[side if i == axis else 1 for i in range(dims)])
        here = {k: along(axis, v, 1 if k == "size" else 1.0) for k, v in given.items()}
        weights = func(identity, **here, **kwargs).reshape(side, -1)
        var = torch.tensordot(var, weights.square(), ([2 + axis], [0])).movedim(-1, 2 + axis)
    return Gaussian(func(x._mean, **given, **kwargs), var, x._closure)
