"""How a network runs while it is looked at, and as its user had it afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["eagerly", "evaluating", "tensor_float"]


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
def tensor_float(on: bool = True) -> Iterator[None]:
    """Inside, a GPU's matrix products are of TensorFloat-32, where that is on: ten bits of each factor."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls run as they were written: code that torch compiled does not see hooks that came after it.

    So does what it calls, and so it is where a compiled function calls it that torch could not keep in one piece.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; asking torch would load its compiler, for seconds
        return function

    def call(*args: Any, **options: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **options)

    return torch.compiler.disable(call)
