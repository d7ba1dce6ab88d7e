"""The Monte Carlo estimator: moments of k posterior draws, the reference for all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.estimators.base import Noisy, register
from fmwc.moments import Moments
from fmwc.noise import Draw
from fmwc.randomness import Randomness
from fmwc.state import batch_size, tree_map, wide

__all__ = ["MonteCarlo"]


@register("monte_carlo")
@dataclass(frozen=True, repr=False)
class MonteCarlo:
    """Monte Carlo estimator: sample mean and unbiased sample variance of posterior draws.

    Arguments:
        draws: The number k of draws, at least 2.
        abreast: The number of draws in one batch; it must divide `draws`.
        shared: Whether all positions and calls of a layer share one draw of its weights per sample; otherwise each
            output has independent noise, as in training.
    """

    draws: int = 64
    abreast: int = 1
    shared: bool = False
    plain_mean = False

    def __post_init__(self) -> None:
        if self.draws < 2:
            raise UsageError(f"a variance takes at least 2 draws, got {self.draws}")
        if self.abreast < 1 or self.draws % self.abreast:
            raise UsageError(f"abreast must divide the {self.draws} draws, got {self.abreast}")

    def __repr__(self) -> str:
        return f"MonteCarlo(draws={self.draws}, abreast={self.abreast}{', shared=True' if self.shared else ''})"

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        count, side = batch_size(x), self.abreast

        def widen(value: Any) -> Any:
            rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == count
            return value.repeat(side, *[1] * (value.ndim - 1)) if rows and side > 1 else value

        wide_x, wide_t, wide_cond = tree_map(widen, x), widen(t), {k: widen(v) for k, v in cond.items()}
        with torch.no_grad():
            centre = field(x, t, **cond)  # sums are about the plain output, to avoid cancellation
            first = second = tree_map(lambda c: torch.zeros_like(wide(c)), centre)
            for _ in range(self.draws // side):
                drawn = field.run(Draw(randomness, self.shared), wide_x, wide_t, cond=wide_cond)
                shift = tree_map(lambda d, c: wide(d).reshape(side, *c.shape) - c, drawn, centre)
                first = tree_map(lambda s, d: s + d.sum(0), first, shift)
                second = tree_map(lambda s, d: s + d.square().sum(0), second, shift)
            k = self.draws
            mean = tree_map(lambda c, s: c + s / k, centre, first)
            var = tree_map(lambda s2, s1: ((s2 - s1.square() / k) / (k - 1)).clamp_min(0), second, first)
        return Moments(mean, var)
