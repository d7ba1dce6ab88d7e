r"""Products: linear in each of two operands, of which one or both may be random.

Where every entry of the result sums products a_k b_k of entries that occur in it once, and all are independent,

.. math:: E\Bigl[\sum_k a_k b_k\Bigr] = \sum_k μ_a μ_b, \qquad
    Var\Bigl[\sum_k a_k b_k\Bigr] = \sum_k σ_a^2 (μ_b^2 + σ_b^2) + μ_a^2 σ_b^2

so the operation itself, done to squares and variances, gives the variance. With a known b this is θ²σ² (eq:layerprop
without noise).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import INDEPENDENT, Gaussian, mean_of, refusal, register
from fmwc.moments.operands import closure_of
from fmwc.moments.pointwise import pointwise

__all__: list[str] = []

T = Tensor


def product_var(f: Callable[[Any, Any], Tensor], a: Any, b: Any) -> Tensor:
    """The variance of f(a, b), for an f that sums products of entries of a and b, one or both of them Gaussian."""
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
    """θμ + b, θ²σ² (eq:layerprop without noise); the weights may be random, too."""

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
    """Σμμ, Σ σ²(μ² + σ²) + μ²σ², of one or two random operands."""
    a, b, *rest = args
    if a is b:  # a matrix with itself: its entries occur twice
        raise NoRuleError(refusal(func, args, kwargs))
    mean = func(mean_of(a), mean_of(b), *rest, **kwargs)
    return Gaussian(mean, product_var(lambda u, v: func(u, v, *rest, **kwargs), a, b), closure_of(args, kwargs))


@register(torch.mul, T.mul, T.__mul__, T.__rmul__, torch.multiply, T.multiply, exactness=INDEPENDENT, complex=True)
def product(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Entry by entry; x · x is x². A complex Gaussian times a known number is turned and stretched."""
    a, b = args
    if any(isinstance(v, Tensor) and v.is_complex() for v in args):
        return _turned(func, args, kwargs)
    if a is b:
        return pointwise(torch.square, (a,), {})
    return Gaussian(func(mean_of(a), mean_of(b)), product_var(func, a, b), closure_of(args, kwargs))


def _turned(func: Any, args: Any, kwargs: Any) -> Gaussian:
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
    made, beta = torch.matmul(b, c) * kwargs.get("alpha", 1), kwargs.get("beta", 1)
    return made if beta == 0 else made + (a if beta == 1 else a * beta)


# ---- einsum ----------------------------------------------------------------------------------------------------------


@register(torch.einsum, exactness=f"{INDEPENDENT}, one or two of them")
def einsum(func: Any, args: Any, kwargs: Any) -> Any:
    """Operands are contracted from the left, two at a time; what only one of them sums over is summed first."""
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
    """The terms of an equation with its dots written out, and its result written down."""
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
    """One operand: entries are moved and summed, each once, so the same is done to means and variances."""
    if not isinstance(x, Gaussian):
        return torch.einsum(equation, x)
    return Gaussian(torch.einsum(equation, x._mean), torch.einsum(equation, x._var), x._closure)


def _summed(term: str, x: Any, needed: set[str]) -> tuple[str, Any]:
    left = "".join(dict.fromkeys(letter for letter in term if letter in needed))
    return left, x if left == term else _alone(f"{term}->{left}", x)


def _contracted(equation: str, a: Any, b: Any) -> Any:
    def f(u: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(equation, u, v)

    found = [v for v in (a, b) if isinstance(v, Gaussian)]
    mean = f(mean_of(a), mean_of(b))
    return Gaussian(mean, product_var(f, a, b), found[0]._closure) if found else mean
