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

__all__ = ["Draw", "Pass", "Weights"]


class Pass:
    """Creates a pass that changes nothing. `noisy` is the layer's noise, `layer` the user's own module."""

    def before(self, noisy: NoisyLayer, layer: Any, h: Tensor) -> Tensor:
        return h

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        return y


class Weights:
    """Creates one draw of the weights per sample, kept for as long as the pass lasts: √α ε θ of each layer.

    Arguments:
        randomness: Where ε comes from.
    """

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self.drawn: dict[NoisyLayer, Tensor] = {}

    def __call__(self, noisy: NoisyLayer, layer: Any, h: Tensor, log_alpha: Tensor) -> Tensor:
        """What the draw adds to the layer's output."""
        if noisy not in self.drawn:
            weight = noisy.kind.weight(layer)
            self.drawn[noisy] = self.randomness.normal(weight.new_empty(noisy.samples, *weight.shape))
        return noisy.whole(layer, h, log_alpha, self.drawn[noisy])


class Draw(Pass):
    r"""Creates a pass that draws the weights once, by local reparameterisation (eqn:local-reparam). Exact.

    .. math:: y = θh + b + \sqrt{θ^2 (α h^2)} \; ε, \quad ε ∼ N(0, 1)

    A layer that sees a sample at several positions (pixels, tokens, steps of a recurrence) draws for each of them, as
    the local form has it. `shared` draws the weights themselves, once per sample: positions then share them.

    Arguments:
        randomness: Where ε comes from.
        shared: Whether one draw of each layer's weights is used at every position and call.
    """

    def __init__(self, randomness: Randomness, shared: bool = False) -> None:
        self.randomness = randomness
        self.weights: Weights | None = Weights(randomness) if shared else None
        self.log_alphas: list[Tensor] = []
        self.owners: list[Tensor | None] = []

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        log_alpha = noisy.log_alpha(h)
        self.log_alphas.append(log_alpha)
        self.owners.append(noisy.owner(h))
        if self.weights is not None:
            return y + self.weights(noisy, layer, h, log_alpha)
        var = noisy.output_var(layer, h, log_alpha)
        # The floor keeps the square root's slope finite where the input is exactly zero.
        std = var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()
        return y + std * noisy.joined(layer, h, log_alpha, std, self.randomness.normal(y))
