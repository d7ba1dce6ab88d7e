"""Nonlinearities of one variable, entry by entry: by the closure (:mod:`fmwc.moments.closures`), or to first order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.closures import Closure, Taylor
from fmwc.moments.gaussian import FIRST_ORDER, QUADRATURE, Gaussian, gaussians, refusal, register
from fmwc.moments.operands import write

__all__ = ["pointwise"]

T = Tensor

_EVERYWHERE = (
    F.silu, F.relu, torch.relu, T.relu, F.gelu, F.elu, F.selu, torch.selu, F.celu, torch.celu, F.mish, F.leaky_relu,
    F.prelu, torch.prelu, T.prelu, F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6, F.threshold, torch.threshold,
    F.softshrink, F.hardshrink, F.tanhshrink, F.softplus, F.softsign, F.logsigmoid, F.sigmoid, torch.sigmoid, T.sigmoid,
    torch.special.expit, F.tanh, torch.tanh, T.tanh, torch.sin, T.sin, torch.cos, T.cos, torch.sinc, T.sinc, torch.sinh,
    T.sinh, torch.cosh, T.cosh, torch.exp, T.exp, torch.exp2, T.exp2, torch.expm1, T.expm1, torch.square, T.square,
    torch.abs, T.abs, T.__abs__, torch.absolute, T.absolute, torch.atan, T.atan, torch.asinh, T.asinh, torch.erf, T.erf,
    torch.erfc, T.erfc, torch.clamp, T.clamp, torch.clip, T.clip, torch.clamp_min, T.clamp_min, torch.clamp_max,
    T.clamp_max, torch.nan_to_num, T.nan_to_num,
)  # fmt: skip
_POWERS = (torch.pow, T.pow, T.__pow__)
_SOMEWHERE = (
    torch.sqrt, T.sqrt, torch.rsqrt, T.rsqrt, torch.log, T.log, torch.log2, T.log2, torch.log10, T.log10, torch.log1p,
    T.log1p, torch.reciprocal, T.reciprocal, torch.logit, T.logit, torch.acos, T.acos, torch.asin, T.asin, torch.atanh,
    T.atanh,
)  # fmt: skip


@register(*_EVERYWHERE, exactness=QUADRATURE)
def pointwise(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """E[φ] and Var[φ] by the closure: Gauss–Hermite quadrature, or a Taylor series if one was asked for."""
    return _closed(func, args, kwargs, args[0]._closure if isinstance(args[0], Gaussian) else None)


@register(*_SOMEWHERE, exactness=FIRST_ORDER)
def pointwise_within_a_domain(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """φ(μ), φ′(μ)²σ²: a Gaussian reaches beyond the domain of a root or a logarithm, where quadrature has no values."""
    return _closed(func, args, kwargs, Taylor(1))


@register(*_POWERS, T.__rpow__, exactness="quadrature; first order for other powers than 0, 1, 2, …")
def power(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """A power is a polynomial if it is a whole number, and a root or a pole if not; cˣ is an exponential."""
    x, other = args if func is not T.__rpow__ else args[::-1]  # x ** other
    if isinstance(other, Gaussian):
        if isinstance(x, Gaussian):
            raise NoRuleError(refusal(func, args, kwargs))
        base = torch.as_tensor(x, device=other.device, dtype=other.dtype)
        wide = other.expand(torch.broadcast_shapes(base.shape, other.shape))
        return pointwise(lambda z: torch.pow(base, z), (wide,), {})
    whole = isinstance(other, (int, float)) and other >= 0 and float(other).is_integer()
    return (pointwise if whole else pointwise_within_a_domain)(torch.pow, (x, other), kwargs)


def _closed(func: Any, args: Any, kwargs: Any, closure: Closure | None) -> Gaussian:
    x, *rest = args
    inplace = kwargs.pop("inplace", False)
    if closure is None or gaussians([*rest, *kwargs.values()]):
        raise NoRuleError(refusal(func, args, kwargs))
    found = Gaussian(*closure(lambda z: func(z, *rest, **kwargs), x._mean, x._var), x._closure)
    return write(x, found) if inplace else found
