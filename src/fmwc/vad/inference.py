"""The inference network E_γ: what a layer sees, and when, to how noisy its weights are (sec:method-fmwc)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LOG_ALPHA_RANGE", "TIME_FEATURES", "InferenceNetwork", "time_features"]

LOG_ALPHA_RANGE = (-10.0, 4.0)  # from no noise to speak of, to noise that drowns the weight
TIME_FEATURES = 16


def time_features(t: Tensor) -> Tensor:  # (B,) -> (B, F)
    """Cosines and sines of π k t, smooth on [0, 1]: k = 0 … F/2 − 1 and 1 … F/2."""
    k = torch.arange(TIME_FEATURES // 2, device=t.device, dtype=t.dtype)
    angle = math.pi * t[..., None]
    return torch.cat([torch.cos(angle * k), torch.sin(angle * (k + 1))], -1)


def _linear(inputs: int, outputs: int, generator: torch.Generator | None) -> nn.Linear:
    """A linear layer with torch's usual first weights, drawn from a generator: torch's global one is left alone."""
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, device=torch.get_default_device())
    if layer.weight.is_meta:  # sizes alone
        return layer
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
    bound = 1 / math.sqrt(inputs)
    nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
    return layer


class InferenceNetwork(nn.Module):
    r"""Creates E_γ, which gives log α per input channel of one layer from its input h and the time.

    .. math:: \log α = W_2\, \mathrm{SiLU}(W_1 [h, f(t)] + b_1) + b_2, \quad \text{clamped}

    W₂ starts at zero, so that every α starts at the same value whatever the input.

    Arguments:
        channels: The layer's input channels.
        width: The hidden width; the paper's is 64.
        initial_log_alpha: b₂ at the start.
        generator: Draws the first weights; torch's own if `None`.
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
