"""The posterior of variational adaptive dropout: the inference network E_γ (sec:method-fmwc) and its closed-form KL."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.errors import UsageError

__all__ = ["LOG_ALPHA_RANGE", "InferenceNetwork", "cyclic", "divergence_from_prior", "kl", "time_features"]

LOG_ALPHA_RANGE = (-10.0, 4.0)  # from negligible noise to noise that dominates the weight
TIME_FEATURES = 16


def time_features(t: Tensor) -> Tensor:  # (B,) -> (B, F)
    """Cosines and sines of π k t, smooth on [0, 1]: k = 0 … F/2 − 1 and 1 … F/2."""
    k = torch.arange(TIME_FEATURES // 2, device=t.device, dtype=t.dtype)
    angle = math.pi * t[..., None]
    return torch.cat([torch.cos(angle * k), torch.sin(angle * (k + 1))], -1)


def _linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    """A linear layer with torch's initialisation, drawn from a generator instead of the global one."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, device=torch.get_default_device())
    if layer.weight.is_meta:
        return layer
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer


class InferenceNetwork(nn.Module):
    r"""Inference network E_γ: log α per input channel of one layer, from the layer's input h and the time.

    .. math:: \log α = W_2\, \mathrm{SiLU}(W_1 [h, f(t)] + b_1) + b_2, \quad \text{clamped}

    W₂ is initialised to zero, so that every α starts at the same value for all inputs.

    Arguments:
        channels: The number of input channels of the layer.
        width: The hidden width; the paper's is 64.
        initial_log_alpha: The initial value of b₂.
        generator: The source of the initial weights; torch's global generator if `None`.
    """

    def __init__(
        self,
        channels: int,
        width: int = 64,
        initial_log_alpha: float = -3.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.hidden = _linear(channels + TIME_FEATURES, width, generator)
        self.out = _linear(width, channels, generator)
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, initial_log_alpha)

    def forward(self, h: Tensor, features: Tensor) -> Tensor:  # (..., C), (..., F) -> (..., C)
        return self.out(F.silu(self.hidden(torch.cat([h, features], -1)))).clamp(*LOG_ALPHA_RANGE)


def divergence_from_prior(log_alpha: Tensor, prior_rate: float, factor: float = 0.5) -> Tensor:
    r"""KL[N(θ, αθ²) ‖ N(0, rθ²)] per weight, exact, with r = p/(1−p) (eqn:kl_analytical, with the ½ it lacks).

    .. math:: \tfrac12 \left[ \frac{α + 1}{r} - 1 + \log r - \log α \right]

    Arguments:
        log_alpha: log α, of any shape.
        prior_rate: The prior rate p.
        factor: The leading factor; 1 is the paper's formula as printed.
    """
    if not 0 < prior_rate < 1:
        raise UsageError(f"prior_rate lies strictly between 0 and 1, got {prior_rate}")
    r = prior_rate / (1 - prior_rate)
    return factor * ((log_alpha.exp() + 1) / r - 1 + math.log(r) - log_alpha)


def kl(
    log_alphas: Sequence[Tensor],
    prior_rate: float,
    factor: float = 0.5,
    owners: Sequence[Tensor | None] | None = None,
    count: int = 0,
) -> Tensor:
    """The KL of a network: the mean over batch and channels, summed over layers.

    Arguments:
        log_alphas: log α of each layer.
        prior_rate: The prior rate p.
        factor: The leading factor.
        owners: For each layer, the sample of each row, or `None` for rows in the order of the samples.
        count: The number of samples; rows whose owner is `count` are unused, and left out of the mean.
    """
    if not log_alphas:
        raise UsageError("no noisy layer was called, so no noise can be learned; check attach's include and exclude")

    def mean(log_alpha: Tensor, owner: Tensor | None) -> Tensor:
        found = divergence_from_prior(log_alpha, prior_rate, factor)
        if owner is None:
            return found.mean()
        used = (owner < count).to(found.dtype)
        return (found.flatten(1).mean(1) * used).sum() / used.sum().clamp_min(1)

    return torch.stack([mean(a, o) for a, o in zip(log_alphas, owners or [None] * len(log_alphas), strict=True)]).sum()


def cyclic(step: int, total: int, cycles: int = 4, warmup: float = 0.1) -> float:
    """The fraction of β at a step: each cycle ramps from 0 to 1 over its first `warmup`, then stays at 1.

    >>> [cyclic(s, 400) for s in (0, 5, 10, 99, 100)]
    [0.0, 0.5, 1.0, 1.0, 0.0]
    """
    place = (step * cycles / max(total, 1)) % 1
    return 1.0 if warmup <= 0 else min(place / warmup, 1.0)
