r"""Closures: the moments of φ(z) for z ~ N(μ, σ²), one coordinate at a time (App. propagation).

A closure is called as `closure(φ, μ, σ²)` and returns :class:`Moments`. φ is any elementwise torch function; its
derivatives are taken by automatic differentiation, so a new nonlinearity needs no new formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fmwc.errors import UsageError, pick

__all__ = ["CLOSURES", "Closure", "GaussHermite", "Moments", "Taylor", "as_closure", "keeps_the_mean"]

Pointwise = Callable[[Tensor], Tensor]


class Moments(NamedTuple):
    """Mean and variance of a velocity. `var` has the mean's shape, or size 1 in every dimension but the first where
    an estimator gives one number a sample: then each coordinate is said to carry that much."""

    mean: Tensor
    var: Tensor


class Closure(Protocol):
    def __call__(self, f: Pointwise, mean: Tensor, var: Tensor) -> Moments: ...


@lru_cache
def _nodes(count: int) -> tuple[tuple[float, float], ...]:
    z, w = np.polynomial.hermite_e.hermegauss(count)
    return tuple(zip(z.tolist(), (w / w.sum()).tolist(), strict=True))


@dataclass(frozen=True)
class GaussHermite:
    r"""Creates an n-node Gauss–Hermite quadrature, exact for polynomials φ with 2·deg φ ≤ 2n − 1.

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
        # Sums are taken of φ − φ(μ): what is subtracted at the end is then small, and no digits are lost.
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
    r"""Creates a Taylor closure of first or second order, exact for linear or quadratic φ.

    .. math:: E[φ] ≈ φ(μ) + \tfrac12 φ''(μ) σ^2, \quad Var[φ] ≈ φ'(μ)^2 σ^2 + \tfrac12 φ''(μ)^2 σ^4

    First order leaves out both terms in φ''.

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

        # φ acts on each entry alone, so the gradient of the sum of φ is φ', entry by entry, and once more φ''.
        # Reverse mode, because torch cannot differentiate every activation twice forwards.
        def slope(z: Tensor) -> Tensor:
            return torch.func.grad(lambda y: f(y).sum())(z)

        first, second = slope(mean), torch.func.grad(lambda z: slope(z).sum())(mean)
        return Moments(f(mean) + second * var / 2, first.square() * var + (second * var).square() / 2)


def keeps_the_mean(closure: Closure) -> bool:
    """Whether rules leave the mean what the plain network computes: to first order it does not move. (All but that of
    the larger of two, which has a mean of its own.)"""
    return closure == Taylor(1)


CLOSURES: dict[str, Closure] = {"gauss_hermite": GaussHermite(), "taylor1": Taylor(1), "taylor2": Taylor(2)}


def as_closure(closure: str | Closure) -> Closure:
    return pick(CLOSURES, closure, "closure") if isinstance(closure, str) else closure
