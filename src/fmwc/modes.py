"""How a network runs while it is looked at, and as its user had it afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["eagerly", "evaluating", "unfused"]


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
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; asking torch would load its compiler, for seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def unfused() -> Iterator[None]:
    """Inside, attention is written out in operations that have every derivative; it may round otherwise than fused."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
