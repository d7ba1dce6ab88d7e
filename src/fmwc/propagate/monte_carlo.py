"""The reference: moments of k posterior draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.moments import Moments
from fmwc.propagate.estimator import Noisy
from fmwc.randomness import Randomness
from fmwc.state import each
from fmwc.vad import Draw

__all__ = ["MonteCarlo"]


@dataclass(frozen=True)
class MonteCarlo:
    """Creates the Monte Carlo estimator: sample mean and unbiased sample variance of `draws` posterior draws.

    Arguments:
        draws: The number k of draws, at least 2.
    """

    draws: int = 64
    plain_mean = False

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise UsageError(f"a variance takes at least 2 draws, got {self.draws}")

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        with torch.no_grad():
            centre = field(x, t, **cond)  # sums are taken about the plain output, so that no digits are lost
            first, second = each(torch.zeros_like, centre), each(torch.zeros_like, centre)
            for _ in range(self.draws):
                shift = each(torch.sub, field.run(Draw(randomness), x, t, **cond), centre)
                first = each(torch.add, first, shift)
                second = each(lambda s, d: s + d.square(), second, shift)
            k = self.draws
            mean = each(lambda c, s: c + s / k, centre, first)
            var = each(lambda s2, s1: ((s2 - s1.square() / k) / (k - 1)).clamp_min(0), second, first)
        return Moments(mean, var)
