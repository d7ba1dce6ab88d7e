"""Decoders: which velocity a sample follows (App. sampling-strategy)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import pick
from fmwc.randomness import Randomness
from fmwc.state import each

__all__ = ["DECODERS", "Decoder", "cost_of", "decode_map", "decode_mean", "decode_stochastic"]

Decoder = Callable[[Any, Any, Tensor, dict[str, Any], Randomness], Any]


def decode_map(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
    """MAP: the plain network."""
    return field(x, t, **cond)


def decode_stochastic(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
    """Stochastic: one posterior draw at each evaluation."""
    return field.draw(x, t, seed=randomness, **cond)


def decode_mean(draws: int) -> Decoder:
    """Mean velocity: the average of k posterior draws at each evaluation."""

    def decode(field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
        total = field.draw(x, t, seed=randomness, **cond)
        for _ in range(draws - 1):
            total = each(torch.add, total, field.draw(x, t, seed=randomness, **cond))
        return each(lambda c: c / draws, total)

    decode.evaluations = draws  # type: ignore[attr-defined]
    return decode


def cost_of(decoder: str | Decoder) -> int:
    """Evaluations of the network that one velocity takes."""
    chosen = pick(DECODERS, decoder, "decoder") if isinstance(decoder, str) else decoder
    return getattr(chosen, "evaluations", 1)


DECODERS: dict[str, Decoder] = {"map": decode_map, "stochastic": decode_stochastic, "mean5": decode_mean(5)}
