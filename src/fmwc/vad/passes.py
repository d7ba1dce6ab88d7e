"""A pass says what the noisy layers do while the network runs once.

Each chosen layer calls `before` with its input and `after` with its output; with no pass running it does nothing at
all. Estimators are passes of their own (`fmwc.propagate`); the one that draws is here, because training needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fmwc.randomness import Randomness

if TYPE_CHECKING:
    from fmwc.vad.noise import NoisyLayer

__all__ = ["Draw", "Pass"]


class Pass:
    """Creates a pass that changes nothing. `noisy` is the layer's noise, `layer` the user's own module."""

    def before(self, noisy: NoisyLayer, layer: Any, h: Tensor) -> Tensor:
        return h

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        return y


class Draw(Pass):
    r"""Creates a pass that draws the weights once, by local reparameterisation (eqn:local-reparam). Exact.

    .. math:: y = θh + b + \sqrt{θ^2 (α h^2)} \; ε, \quad ε ∼ N(0, 1)

    Arguments:
        randomness: Where ε comes from.
    """

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self.log_alphas: list[Tensor] = []
        self.owners: list[Tensor | None] = []

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        log_alpha = noisy.log_alpha(h)
        self.log_alphas.append(log_alpha)
        self.owners.append(noisy.owner(h))
        var = noisy.output_var(layer, h, log_alpha)
        # The floor keeps the square root's slope finite where the input is exactly zero.
        std = var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()
        return y + std * self.randomness.normal(y)
