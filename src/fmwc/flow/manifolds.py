"""Manifolds: any object with the methods expmap, logmap, projx and proju."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Euclidean", "FlatTorus", "Lattice", "Manifold"]


@runtime_checkable
class Manifold(Protocol):
    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        """The point reached from x in unit time along the geodesic with initial velocity u."""

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The velocity at x whose geodesic reaches y in unit time."""

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point on the manifold."""

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of u that is tangent at x."""


class Euclidean:
    """Flat space: exp is x + u, log is y − x."""

    flat = True  # the velocity of a geodesic is constant

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        return y - x

    def projx(self, x: Tensor) -> Tensor:
        return x

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u


class FlatTorus:
    """Flat torus [0, 1)ⁿ: exp is x + u mod 1, log is the shortest displacement."""

    flat = True

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(x + u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        angle = 2 * math.pi * (y - x)
        return torch.atan2(angle.sin(), angle.cos()) / (2 * math.pi)

    def projx(self, x: Tensor) -> Tensor:
        return torch.remainder(torch.remainder(x, 1.0), 1.0)  # one remainder rounds −1e−9 to 1

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u


@dataclass(frozen=True)
class Lattice(Euclidean):
    """Space of unit cells: three lengths in ångström, and the logits of three angles scaled to (0, 1).

    The space is flat, with a lower bound of the lengths. Noise has log-normal lengths and uniform angles.

    Arguments:
        mean, std: Mean and standard deviation of the logarithm of the lengths at t = 0.
        shortest: The lower bound of the lengths.
    """

    mean: Sequence[float] = (1.5754, 1.7017, 1.9782)
    std: Sequence[float] = (0.2444, 0.2653, 0.3536)
    shortest: float = 0.5

    def projx(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :3].clamp_min(self.shortest), x[..., 3:]], -1)

    def noise(self, randomness: Any, like: Tensor) -> Tensor:  # (B, 6)
        normal = randomness.normal(like)
        # Scalars, because a captured graph cannot copy a tensor to the device.
        drawn = torch.stack(
            [normal[..., i] * s + m for i, (s, m) in enumerate(zip(self.std, self.mean, strict=True))], -1
        )
        # 0 and 1 have no logit, and float32 draws in [0, 1) include 0.
        angles = randomness.uniform(like)[..., 3:].clamp(1e-4, 1 - 1e-4).logit()
        return torch.cat([drawn.exp(), angles], -1)
