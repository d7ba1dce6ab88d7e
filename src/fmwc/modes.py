"""Evaluation mode while a network is looked at, and its own modes back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Inside, dropout is off and batch norms stand still. What is not a module has no modes."""
    modes = {m: m.training for m in network.modules()} if isinstance(network, nn.Module) else {}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, training in modes.items():
            module.training = training
