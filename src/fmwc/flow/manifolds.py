"""Manifolds, each four methods: expmap, logmap, projx, proju. Any object that has them will do."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Euclidean", "FlatTorus", "Manifold"]


@runtime_checkable
class Manifold(Protocol):
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """Where the geodesic from x with velocity u is after unit time."""

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The velocity at x that reaches y in unit time."""

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point of the manifold."""

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of u that is tangent at x."""


class Euclidean:
    """Creates flat space: exp is x + u, log is y − x."""

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def projx(self, x: Tensor) -> Tensor:
        return x

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u


class FlatTorus:
    """Creates [0, 1)ⁿ with opposite faces joined: exp is x + u mod 1, log takes the shorter way round."""

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(x + u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        angle = 2 * math.pi * (y - x)
        return torch.atan2(angle.sin(), angle.cos()) / (2 * math.pi)

    def projx(self, x: Tensor) -> Tensor:
        return torch.remainder(torch.remainder(x, 1.0), 1.0)  # once rounds −1e−9 up to 1 itself

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u
