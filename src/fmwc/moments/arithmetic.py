"""Sums, differences and quotients of two operands, and what is made of them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import (
    EXACT,
    GAUSSIAN,
    INDEPENDENT,
    QUADRATURE,
    Gaussian,
    mean_of,
    moments_of,
    refusal,
    register,
)
from fmwc.moments.operands import closure_of
from fmwc.moments.pointwise import pointwise

__all__: list[str] = []

T = Tensor


def _over(var: Tensor, mean: Tensor) -> Tensor:
    """A variance in the mean's shape, with memory of its own: a network may write into it."""
    return var if var.shape == mean.shape else var.expand_as(mean).clone()


@register(
    torch.add, T.add, T.__add__, T.__radd__, torch.sub, T.sub, T.__sub__, T.__rsub__, torch.subtract, T.subtract,
    exactness=INDEPENDENT, complex=True,
)  # fmt: skip
def addition(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """μ ± μ, σ² + σ²; x + x is 2x and x − x is 0."""
    a, b = args
    if a is b:
        return pointwise(lambda z: func(z, z, **kwargs), (a,), {})
    mean = func(mean_of(a), mean_of(b), **kwargs)
    square = kwargs.get("alpha", 1) ** 2
    var: Any = (a._var if isinstance(a, Gaussian) else 0) + (b._var * square if isinstance(b, Gaussian) else 0)
    return Gaussian(mean, _over(var, mean), closure_of(args, kwargs))


@register(torch.rsub, exactness=INDEPENDENT, family="addition", complex=True)
def subtracted_from(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args
    return b - a * kwargs.get("alpha", 1)


@register(torch.neg, T.neg, T.__neg__, torch.negative, T.negative, torch.conj, T.conj, exactness=EXACT, complex=True)
def negation(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """−μ, σ²; the same for the conjugate."""
    (x,) = args
    return Gaussian(func(x._mean), x._var.clone(), x._closure)


@register(
    torch.div, T.div, T.__truediv__, torch.divide, T.divide, torch.true_divide, T.true_divide, T.__rtruediv__,
    exactness="exact; first order in a random divisor",
)  # fmt: skip
def quotient(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """μ_a/μ_b, σ_a²/μ_b² + μ_a²σ_b²/μ_b⁴. 1/z has no variance for a Gaussian z, but what networks divide by stays away
    from zero, and there first order is right."""
    a, b = args if func is not T.__rtruediv__ else args[::-1]
    if kwargs.get("rounding_mode") is not None:  # steps have no slope
        raise NoRuleError(refusal(func, args, kwargs))
    if a is b:
        return pointwise(lambda z: z / z, (a,), {})
    mean = mean_of(a) / mean_of(b)
    var: Any = 0
    if isinstance(a, Gaussian):
        var = var + a._var / mean_of(b) ** 2
    if isinstance(b, Gaussian):
        var = var + (mean / b._mean).square() * b._var
    return Gaussian(mean, _over(var, mean), closure_of(args, kwargs))


@register(torch.maximum, T.maximum, torch.minimum, T.minimum, exactness=GAUSSIAN)
def larger_or_smaller(func: Any, args: Any, kwargs: Any) -> Gaussian:
    r"""Clark's moments of the larger or smaller of two Gaussians.

    With θ² = σ_a² + σ_b², d = μ_a − μ_b, z = d/θ, and the standard normal φ and Φ,

    .. math:: E[\max] = μ_b + d Φ(z) + θ φ(z), \quad
        Var[\max] = σ_b^2 + (σ_a^2 - σ_b^2) Φ(z) + d^2 Φ(z) Φ(-z) + d θ φ(z) (1 - 2 Φ(z)) - θ^2 φ(z)^2
    """
    a, b = args
    if a is b:
        return a.clone()
    sign = 1 if func in (torch.maximum, T.maximum) else -1  # min(a, b) = −max(−a, −b)
    (mean_a, var_a), (mean_b, var_b) = moments_of(a), moments_of(b)
    d = sign * (mean_a - mean_b)
    theta = (var_a + var_b).sqrt()
    z = d / theta.clamp_min(torch.finfo(theta.dtype).tiny)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    above, below = torch.special.ndtr(z), torch.special.ndtr(-z)
    mean = mean_b + sign * (d * above + theta * density)
    var = var_b + (var_a - var_b) * above + d.square() * above * below
    var = var + d * theta * density * (below - above) - (theta * density).square()
    return Gaussian(mean, var.clamp_min(0), closure_of(args, kwargs))


# ---- made of the others ---------------------------------------------------------------------------------------------


@register(torch.addcmul, T.addcmul, exactness=INDEPENDENT)
def product_added(func: Any, args: Any, kwargs: Any) -> Any:
    """a + v·b·c."""
    a, b, c = args
    return a + b * c * kwargs.get("value", 1)


@register(torch.lerp, T.lerp, exactness=INDEPENDENT)
def mixture(func: Any, args: Any, kwargs: Any) -> Any:
    """(1 − w) a + w b with a known w."""

    def bind(input: Any, end: Any, weight: Any) -> Any:
        return input, end, weight

    a, b, w = bind(*args, **kwargs)
    if isinstance(w, Gaussian):
        raise NoRuleError(refusal(func, args, kwargs))
    return a * (1 - w) + b * w


@register(F.glu, exactness=QUADRATURE)
def gate(func: Any, args: Any, kwargs: Any) -> Any:
    """a·sigmoid(b) of the two halves."""

    def bind(input: Any, dim: int = -1) -> Any:
        return input.chunk(2, dim)

    a, b = bind(*args, **kwargs)
    return a * torch.sigmoid(b)
