"""Manifolds, each four methods: expmap, logmap, projx, proju. Any object that has them will do."""

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
        """Where the geodesic from x with velocity u is after unit time."""

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        """The velocity at x that reaches y in unit time."""

    def projx(self, x: Tensor) -> Tensor:
        """The nearest point of the manifold."""

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        """The part of u that is tangent at x."""


class Euclidean:
    """Creates flat space: exp is x + u, log is y − x."""

    flat = True  # the velocity of a geodesic is the same all along it

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

    flat = True

    def expmap(self, x: Tensor, u: Tensor) -> Tensor:
        return self.projx(x + u)

    def logmap(self, x: Tensor, y: Tensor) -> Tensor:
        angle = 2 * math.pi * (y - x)
        return torch.atan2(angle.sin(), angle.cos()) / (2 * math.pi)

    def projx(self, x: Tensor) -> Tensor:
        return torch.remainder(torch.remainder(x, 1.0), 1.0)  # once rounds −1e−9 up to 1 itself

    def proju(self, x: Tensor, u: Tensor) -> Tensor:
        return u


@dataclass(frozen=True)
class Lattice(Euclidean):
    """Creates the space of unit cells: three lengths in ångström, and the logits of three angles' place in their range.

    It is flat, with lengths kept positive. Noise: lengths are log-normal, angles uniform in their range.

    Arguments:
        mean, std: Of the logarithm of the lengths at t = 0.
        shortest: The length a cell's edge never falls below.
    """

    mean: Sequence[float] = (1.5754, 1.7017, 1.9782)
    std: Sequence[float] = (0.2444, 0.2653, 0.3536)
    shortest: float = 0.5

    def projx(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., :3].clamp_min(self.shortest), x[..., 3:]], -1)

    def noise(self, randomness: Any, like: Tensor) -> Tensor:  # (B, 6)
        normal = randomness.normal(like)
        # By number: a tensor of them would be copied to the device, which a captured graph cannot.
        drawn = torch.stack(
            [normal[..., i] * s + m for i, (s, m) in enumerate(zip(self.std, self.mean, strict=True))], -1
        )
        # The ends of (0, 1) have no logit; float32 draws in [0, 1) do hit 0.
        angles = randomness.uniform(like)[..., 3:].clamp(1e-4, 1 - 1e-4).logit()
        return torch.cat([drawn.exp(), angles], -1)
