"""How a network runs while it is looked at, and as its user had it afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["eagerly", "evaluating"]


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


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, what torch.compile made runs as it was written: compiled code does not see hooks that came after it."""
    # Nothing was compiled: asking torch would load its compiler, for seconds. Or torch is compiling this, with the hooks.
    if torch.compiler.is_compiling() or "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
