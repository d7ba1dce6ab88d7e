"""The rule table: one row an operation, by family.

| family | what it does to (μ, σ²) | exactness |
|---|---|---|
| metadata | shape, dtype, …: asked of the mean | exact |
| rearrange | moves or repeats entries, or puts in known ones: the same on both | exact |
| weighted | θ: θμ + b, θ²σ² (eq:layerprop without noise) | exact if inputs are independent |
| total | sums Σμ, Σσ² and means Σμ/n, Σσ²/n², over all or in windows | exact if inputs are independent |
| addition, product, quotient | arithmetic | exact if inputs are independent |
| pointwise | φ, by the closure | by the closure |
| normalise | (μ − μ̄)/s within a group (:mod:`fmwc.moments.norms`) | first order, statistics in expectation |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.closures import Closure
from fmwc.moments.gaussian import EXACT, FIRST_ORDER, INDEPENDENT, Gaussian, moments_of, refusal, register

__all__ = ["closure_of"]

T = Tensor


def _walk(value: Any, f: Callable[[Tensor], Tensor]) -> Any:
    """Applies `f` to every tensor in nested lists and tuples."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_walk(v, f) for v in value)
    return value


def _gaussians(value: Any) -> list[Gaussian]:
    if isinstance(value, Gaussian):
        return [value]
    return [g for v in value for g in _gaussians(v)] if isinstance(value, (list, tuple)) else []


def closure_of(args: Any, kwargs: Any) -> Closure:
    return _gaussians([*args, *kwargs.values()])[0]._closure


def _pair(mean: Any, var: Any, closure: Closure) -> Any:
    """Joins what an operation returned for the means with what it returned for the variances."""
    if isinstance(mean, Tensor):
        return Gaussian(mean, var, closure)
    if not isinstance(mean, (list, tuple)):  # x.type() asks, and gets a word
        return mean
    return type(mean)(_pair(m, v, closure) for m, v in zip(mean, var, strict=True))


def _mean(value: Tensor) -> Tensor:
    return value._mean if isinstance(value, Gaussian) else value


def _variance(value: Tensor) -> Tensor:
    """The variance of a value; an integer is an index, which says where and not how much."""
    return moments_of(value).var if value.is_floating_point() else value


def _on(f: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    return [_walk(a, f) for a in args], {k: _walk(v, f) for k, v in kwargs.items()}


def _getter(name: str) -> Any:
    """The function torch dispatches on when a property is read."""
    return getattr(T, name).__get__


# ---- metadata: what does not depend on the values --------------------------------------------------------------

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta")
_QUESTIONS = (
    T.size, T.dim, T.numel, torch.numel, T.stride, T.is_contiguous, T.is_floating_point, torch.is_floating_point,
    T.__len__, T.__hash__, T.get_device, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like,
    T.new_zeros, T.new_ones, T.new_empty, T.new_full, T.new_tensor,
)  # fmt: skip


@register(*(_getter(p) for p in _PROPERTIES), *_QUESTIONS, exactness=EXACT)
def metadata(func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = _on(_mean, args, kwargs)
    return func(*args, **kwargs)


# ---- rearrange: entries are moved, repeated or dropped, never mixed ----------------------------------------------

_MOVES = (
    T.reshape, torch.reshape, T.view, T.view_as, T.reshape_as, T.flatten, torch.flatten, T.unflatten, torch.unflatten,
    T.permute, torch.permute, T.transpose, torch.transpose, T.t, torch.t, _getter("mT"), _getter("T"), T.movedim,
    torch.movedim, T.squeeze, torch.squeeze, T.unsqueeze, torch.unsqueeze, T.expand, T.expand_as, T.broadcast_to,
    torch.broadcast_to, T.repeat, T.repeat_interleave, torch.repeat_interleave, T.tile, torch.tile, T.contiguous,
    T.clone, torch.clone, T.detach, T.to, T.float, T.double, T.half, T.bfloat16, T.type, T.type_as, T.cpu, T.cuda,
    T.__getitem__, T.select, torch.select, T.narrow, torch.narrow, T.chunk, torch.chunk, T.split, torch.split,
    T.unbind, torch.unbind, T.flip, torch.flip, T.roll, torch.roll, T.index_select, torch.index_select, torch.cat,
    torch.concat, torch.stack, F.pixel_shuffle, F.pixel_unshuffle,
)  # fmt: skip


_JOINS = (torch.cat, torch.concat, torch.stack)


@register(*_MOVES, exactness=EXACT)
def rearrange(func: Any, args: Any, kwargs: Any) -> Any:
    def variance(value: Tensor) -> Tensor:
        # What is joined to Gaussians is known exactly, be it a float or a mask.
        return moments_of(value).var if func in _JOINS else _variance(value)

    means, mean_kwargs = _on(_mean, args, kwargs)
    variances, var_kwargs = _on(variance, args, kwargs)
    return _pair(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(F.interpolate, exactness=EXACT, family="rearrange")
def resize(func: Any, args: Any, kwargs: Any) -> Gaussian:
    if kwargs["mode"] not in ("nearest", "nearest-exact"):  # the others mix entries
        raise NoRuleError(refusal(func, args, kwargs))
    return rearrange(func, args, kwargs)


@register(F.pad, exactness=EXACT, family="rearrange")
def pad(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """A constant is known, so its variance is zero; reflected, replicated or wrapped entries are copies."""
    if kwargs["mode"] != "constant":
        return rearrange(func, args, kwargs)
    x, *rest = args
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **{**kwargs, "value": 0}), x._closure)


# ---- weighted: linear in the input with known weights (eq:layerprop) ----------------------------------------------


@register(
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    exactness=INDEPENDENT,
)  # fmt: skip
def weighted(func: Any, args: Any, kwargs: Any) -> Gaussian:
    def bind(input: Any, weight: Any, bias: Any = None, *rest: Any, **more: Any) -> Any:
        return input, weight, bias, rest, more

    x, weight, bias, rest, more = bind(*args, **kwargs)
    if not isinstance(x, Gaussian) or isinstance(weight, Gaussian) or isinstance(bias, Gaussian):
        raise NoRuleError(refusal(func, args, kwargs))
    mean = func(x._mean, weight, bias, *rest, **more)
    return Gaussian(mean, func(x._var, weight.square(), None, *rest, **more), x._closure)


# ---- total -------------------------------------------------------------------------------------------------------


@register(torch.sum, T.sum, exactness=INDEPENDENT)
def total(func: Any, args: Any, kwargs: Any) -> Gaussian:
    x, *rest = args
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **kwargs), x._closure)


@register(torch.index_add, T.index_add, exactness=INDEPENDENT, family="total")
def scattered(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Rows added to the rows of a table (the messages to an atom): means add, and so do variances."""
    (means, mean_kwargs), (variances, var_kwargs) = (_on(f, args, kwargs) for f in (_mean, _variance))
    if "alpha" in var_kwargs:
        var_kwargs["alpha"] = var_kwargs["alpha"] ** 2
    return Gaussian(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(torch.mean, T.mean, exactness=INDEPENDENT, family="total")
def average(func: Any, args: Any, kwargs: Any) -> Gaussian:
    x, *rest = args
    mean = func(x._mean, *rest, **kwargs)
    return Gaussian(mean, func(x._var, *rest, **kwargs) * (mean.numel() / x._mean.numel()), x._closure)


@register(F.avg_pool2d, exactness=INDEPENDENT, family="total")
def pool(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Var = w Σ_window wσ², where every entry of a window has the weight w: one over its size, or the divisor given.

    Padding and a last window that hangs over the edge make w differ between windows, so it is read off an image of
    ones: pooled it is cw, for a window with c entries in the image, and with the divisor 1 it is c.
    """
    x, *rest = args
    ones = x._var.new_ones(1, *x.shape[-2:])
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    counting = {**dict(zip(names, rest, strict=False)), **kwargs, "divisor_override": 1}
    weight = func(ones, *rest, **kwargs) / func(ones, **counting)
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **kwargs) * weight, x._closure)


@register(F.adaptive_avg_pool2d, exactness=INDEPENDENT, family="total")
def adaptive_pool(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σσ²/n² over windows that reach from ⌊iH/h⌋ to ⌈(i + 1)H/h⌉, so that n may differ between them."""
    x, *rest = args
    mean = func(x._mean, *rest, **kwargs)
    rows, columns = (
        x._var.new_tensor([-(-(i + 1) * side // count) - i * side // count for i in range(count)])
        for side, count in zip(x.shape[-2:], mean.shape[-2:], strict=True)
    )
    return Gaussian(mean, func(x._var, *rest, **kwargs) / (rows[:, None] * columns), x._closure)


# ---- arithmetic ----------------------------------------------------------------------------------------------------


@register(
    torch.add, T.add, T.__add__, T.__radd__, torch.sub, T.sub, T.__sub__, T.__rsub__, torch.subtract, T.subtract,
    exactness=INDEPENDENT,
)  # fmt: skip
def addition(func: Any, args: Any, kwargs: Any) -> Gaussian:
    a, b = args
    if a is b:  # x + x is 2x and x − x is 0: an operation on one variable, not on two
        return pointwise(lambda z: func(z, z, **kwargs), (a,), {})
    mean = func(_mean(a), _mean(b), **kwargs)
    square = kwargs.get("alpha", 1) ** 2
    var: Any = (a._var if isinstance(a, Gaussian) else 0) + (b._var * square if isinstance(b, Gaussian) else 0)
    return Gaussian(mean, var.expand_as(mean), closure_of(args, kwargs))


@register(torch.mul, T.mul, T.__mul__, T.__rmul__, torch.multiply, T.multiply, exactness=INDEPENDENT)
def product(func: Any, args: Any, kwargs: Any) -> Gaussian:
    a, b = args
    if a is b:
        return pointwise(torch.square, (a,), {})
    mean = func(_mean(a), _mean(b))
    var: Any = 0
    if isinstance(a, Gaussian):
        var = var + a._var * _mean(b) ** 2
    if isinstance(b, Gaussian):
        var = var + b._var * _mean(a) ** 2
    if isinstance(a, Gaussian) and isinstance(b, Gaussian):
        var = var + a._var * b._var
    return Gaussian(mean, var.expand_as(mean), closure_of(args, kwargs))


@register(torch.div, T.div, T.__truediv__, torch.true_divide, T.true_divide, exactness=EXACT)
def quotient(func: Any, args: Any, kwargs: Any) -> Gaussian:
    a, b = args
    if isinstance(b, Gaussian) or kwargs:  # 1/z has no variance for a Gaussian z; rounding modes are not smooth
        raise NoRuleError(refusal(func, args, kwargs))
    mean = func(a._mean, b)
    return Gaussian(mean, (a._var / b**2).expand_as(mean), a._closure)


@register(torch.neg, T.neg, T.__neg__, torch.negative, exactness=EXACT, family="rearrange")
def negation(func: Any, args: Any, kwargs: Any) -> Gaussian:
    (x,) = args
    return Gaussian(func(x._mean), x._var, x._closure)


# ---- pointwise: one nonlinearity, one variable --------------------------------------------------------------------

_POINTWISE = (
    F.silu, F.relu, torch.relu, T.relu, F.gelu, F.elu, F.selu, F.celu, F.mish, F.leaky_relu, F.hardswish, F.hardtanh,
    F.relu6, F.softplus, F.softsign, F.logsigmoid, F.sigmoid, torch.sigmoid, T.sigmoid, F.tanh, torch.tanh, T.tanh,
    torch.sin, T.sin, torch.cos, T.cos, torch.exp, T.exp, torch.square, T.square, torch.pow, T.pow, T.__pow__,
    torch.abs, T.abs, torch.atan, T.atan, torch.erf, T.erf, torch.clamp, T.clamp,
)  # fmt: skip


@register(*_POINTWISE, exactness=FIRST_ORDER)
def pointwise(func: Any, args: Any, kwargs: Any) -> Gaussian:
    x, *rest = args
    if kwargs.get("inplace"):
        raise NoRuleError(
            f"{func.__name__}(inplace=True) would lose the variance; build the network with inplace=False, "
            "or use propagation='linearised'"
        )
    if not isinstance(x, Gaussian) or _gaussians([*rest, *kwargs.values()]):
        raise NoRuleError(refusal(func, args, kwargs))
    return Gaussian(*x._closure(lambda z: func(z, *rest, **kwargs), x._mean, x._var), x._closure)


@register(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, exactness=EXACT, family="rearrange")
def dropout(func: Any, args: Any, kwargs: Any) -> Gaussian:
    x, _, training = (*args, *[kwargs.get(k, d) for k, d in (("p", 0.5), ("training", True))][len(args) - 1 :])[:3]
    if training:
        raise NoRuleError("dropout is on, which is noise of its own; call network.eval() first, or use 'monte_carlo'")
    return x
