r"""Rules for elementwise functions, sums, products and quotients.

If each entry of a result is a sum of products a_k b_k of independent entries, each of which occurs once,

.. math:: E\Bigl[\sum_k a_k b_k\Bigr] = \sum_k μ_a μ_b, \qquad
    Var\Bigl[\sum_k a_k b_k\Bigr] = \sum_k σ_a^2 (μ_b^2 + σ_b^2) + μ_a^2 σ_b^2

so the variance is the same operation applied to squares and variances. With a known b it is θ²σ²
(eq:layerprop without noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import (
    EXACT,
    FIRST_ORDER,
    GAUSSIAN,
    INDEPENDENT,
    QUADRATURE,
    Closure,
    Gaussian,
    Taylor,
    arguments,
    closure_of,
    gaussians,
    mean_of,
    moments_of,
    refusal,
    register,
    write,
)

T = Tensor

# ---- functions of one variable ---------------------------------------------------------------------------------------

_SMOOTH_EVERYWHERE = (
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
_WITH_DOMAIN = (
    torch.sqrt, T.sqrt, torch.rsqrt, T.rsqrt, torch.log, T.log, torch.log2, T.log2, torch.log10, T.log10, torch.log1p,
    T.log1p, torch.reciprocal, T.reciprocal, torch.logit, T.logit, torch.acos, T.acos, torch.asin, T.asin, torch.atanh,
    T.atanh,
)  # fmt: skip


@register(*_SMOOTH_EVERYWHERE, exactness=QUADRATURE)
def pointwise(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """E[φ] and Var[φ] from the closure: Gauss–Hermite quadrature, or a Taylor series if requested."""
    return _closed(func, args, kwargs, args[0]._closure if isinstance(args[0], Gaussian) else None)


@register(*_WITH_DOMAIN, exactness=FIRST_ORDER)
def pointwise_within_a_domain(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """φ(μ), φ′(μ)²σ², because roots and logarithms are undefined at some quadrature nodes."""
    return _closed(func, args, kwargs, Taylor(1))


@register(*_POWERS, T.__rpow__, exactness="quadrature; first order for powers other than 0, 1, 2, …")
def power(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """The closure for exponents 0, 1, 2, … and for cˣ; φ(μ), φ′(μ)²σ² for other powers."""
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
    result = Gaussian(*closure(lambda z: func(z, *rest, **kwargs), x._mean, x._var), x._closure)
    return write(x, result) if inplace else result


# ---- two operands ----------------------------------------------------------------------------------------------------


def _over(var: Tensor, mean: Tensor) -> Tensor:
    """Expand a variance to the mean's shape in separate memory, because a network may write into it."""
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
    """μ_a/μ_b, σ_a²/μ_b² + μ_a²σ_b²/μ_b⁴.

    1/z has no finite variance for a Gaussian z, but divisors in networks are bounded away from zero.
    """
    a, b = args if func is not T.__rtruediv__ else args[::-1]
    if kwargs.get("rounding_mode") is not None:  # rounding has no derivative
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


# ---- products --------------------------------------------------------------------------------------------------------


def product_var(f: Callable[[Any, Any], Tensor], a: Any, b: Any) -> Tensor:
    """Return the variance of f(a, b), where f sums products of entries of a and b, one or both Gaussian.

    Exact for independent inputs.
    """
    if not isinstance(b, Gaussian):
        return f(a._var, b * b)
    if not isinstance(a, Gaussian):
        return f(a * a, b._var)
    return f(a._var, b._mean.square() + b._var) + f(a._mean.square(), b._var)


@register(
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d,
    exactness=INDEPENDENT,
)  # fmt: skip
def linear_and_convolution(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """θμ + b, θ²σ² (eq:layerprop without noise); the weights may be random as well."""

    def bind(input: Any, weight: Any, bias: Any = None, *rest: Any, **more: Any) -> Any:
        return input, weight, bias, rest, more

    x, weight, bias, rest, more = bind(*args, **kwargs)
    if isinstance(bias, Gaussian):
        raise NoRuleError(refusal(func, args, kwargs))
    mean = func(mean_of(x), mean_of(weight), bias, *rest, **more)
    var = product_var(lambda h, w: func(h, w, None, *rest, **more), x, weight)
    return Gaussian(mean, var, closure_of(args, kwargs))


@register(
    torch.matmul, T.matmul, T.__matmul__, T.__rmatmul__, torch.mm, T.mm, torch.bmm, T.bmm, torch.mv, T.mv, torch.dot,
    T.dot, torch.inner, T.inner, torch.outer, T.outer, torch.tensordot, exactness=INDEPENDENT,
)  # fmt: skip
def matrix_product(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σμμ, Σ σ²(μ² + σ²) + μ²σ², for one or two random operands."""
    a, b, *rest = args
    if a is b:  # its entries would occur twice
        raise NoRuleError(refusal(func, args, kwargs))
    mean = func(mean_of(a), mean_of(b), *rest, **kwargs)
    return Gaussian(mean, product_var(lambda u, v: func(u, v, *rest, **kwargs), a, b), closure_of(args, kwargs))


@register(torch.mul, T.mul, T.__mul__, T.__rmul__, torch.multiply, T.multiply, exactness=INDEPENDENT, complex=True)
def product(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Elementwise; x · x is x². A complex Gaussian may be multiplied by known numbers."""
    a, b = args
    if any(isinstance(v, Tensor) and v.is_complex() for v in args):
        return _complex_product(func, args, kwargs)
    if a is b:
        return pointwise(torch.square, (a,), {})
    return Gaussian(func(mean_of(a), mean_of(b)), product_var(func, a, b), closure_of(args, kwargs))


def _complex_product(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """(x + iy)(c + id) = (xc − yd) + i(xd + yc): Var[Re] = σ_x²c² + σ_y²d², Var[Im] = σ_x²d² + σ_y²c²."""
    x, other = args if isinstance(args[0], Gaussian) else args[::-1]
    if isinstance(other, Gaussian) or not x._mean.is_complex():
        raise NoRuleError(refusal(func, args, kwargs))
    c = torch.as_tensor(other, device=x._mean.device).to(x._mean.dtype)
    along, across = c.real.square(), c.imag.square()
    real, imag = x._var.real, x._var.imag
    var = torch.complex(real * along + imag * across, real * across + imag * along)
    return Gaussian(func(*map(mean_of, args)), var, x._closure)


@register(torch.addmm, T.addmm, torch.addmv, T.addmv, torch.baddbmm, T.baddbmm, exactness=INDEPENDENT)
def matrix_product_added(func: Any, args: Any, kwargs: Any) -> Any:
    """β a + α (b @ c)."""
    a, b, c = args
    product, beta = torch.matmul(b, c) * kwargs.get("alpha", 1), kwargs.get("beta", 1)
    return product if beta == 0 else product + (a if beta == 1 else a * beta)


# ---- compositions of other rules -------------------------------------------------------------------------------------


@register(torch.addcmul, T.addcmul, exactness=INDEPENDENT)
def product_added(func: Any, args: Any, kwargs: Any) -> Any:
    """a + v·b·c."""
    a, b, c = args
    return a + b * c * kwargs.get("value", 1)


@register(torch.lerp, T.lerp, exactness=INDEPENDENT)
def mixture(func: Any, args: Any, kwargs: Any) -> Any:
    """(1 − w) a + w b with a known w."""
    a, b, w = arguments(args, kwargs, "input", "end", "weight")
    if isinstance(w, Gaussian):
        raise NoRuleError(refusal(func, args, kwargs))
    return a * (1 - w) + b * w


@register(F.glu, exactness=QUADRATURE)
def gate(func: Any, args: Any, kwargs: Any) -> Any:
    """a·sigmoid(b) of the two halves."""
    x, dim = arguments(args, kwargs, "input", dim=-1)
    a, b = x.chunk(2, dim)
    return a * torch.sigmoid(b)


# ---- einsum ----------------------------------------------------------------------------------------------------------


@register(torch.einsum, exactness=f"{INDEPENDENT}, one or two of them")
def einsum(func: Any, args: Any, kwargs: Any) -> Any:
    """Pairs of operands from the left; indices that occur in one operand only are summed first."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    random = [id(v) for v in operands if isinstance(v, Gaussian)]
    if len({*random}) < len(random):  # one variable twice
        raise NoRuleError(refusal(func, args, kwargs))
    terms, result = _letters(equation, [v.ndim for v in operands])
    (first, x), *rest = zip(terms, operands, strict=True)
    for i, (term, y) in enumerate(rest):
        wanted = {*result, *(letter for later, _ in rest[i + 1 :] for letter in later)}
        first, x = _summed(first, x, wanted | {*term})
        term, y = _summed(term, y, wanted | {*first})
        both = "".join(dict.fromkeys(letter for letter in first + term if letter in wanted))
        first, x = both, _contracted(f"{first},{term}->{both}", x, y)
    return _alone(f"{first}->{result}", x)


def _letters(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """Return the terms of an equation with ellipses replaced by letters, and its explicit result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if c not in equation]
    spare = [n - len(term) + 3 for term, n in zip(terms, dims, strict=True) if "..." in term]
    dots = "".join(free[: max(spare, default=0)])
    terms = [
        term.replace("...", dots[len(dots) - (n - len(term) + 3) :]) if "..." in term else term
        for term, n in zip(terms, dims, strict=True)
    ]
    if not arrow:
        once = sorted(c for c in {*left} - {*",."} if left.count(c) == 1)
        right = "..." * bool(spare) + "".join(once)
    return terms, right.replace("...", dots)


def _alone(equation: str, x: Any) -> Any:
    """Return the einsum of one operand, which moves and sums entries: the same for means and variances."""
    if not isinstance(x, Gaussian):
        return torch.einsum(equation, x)
    return Gaussian(torch.einsum(equation, x._mean), torch.einsum(equation, x._var), x._closure)


def _summed(term: str, x: Any, needed: set[str]) -> tuple[str, Any]:
    left = "".join(dict.fromkeys(letter for letter in term if letter in needed))
    return left, x if left == term else _alone(f"{term}->{left}", x)


def _contracted(equation: str, a: Any, b: Any) -> Any:
    def f(u: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(equation, u, v)

    mean = f(mean_of(a), mean_of(b))
    random = gaussians((a, b))
    return Gaussian(mean, product_var(f, a, b), random[0]._closure) if random else mean
