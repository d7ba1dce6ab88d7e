"""MC-dropout: fixed dropout after every activation, kept on while sampling."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import UsageError
from fmwc.modes import Bound
from fmwc.randomness import Randomness, as_randomness

__all__ = ["Dropout"]

# The network whose dropout is on in this thread and task, and where it draws from.
_SOURCE: ContextVar[tuple[Dropout, Randomness] | None] = ContextVar("dropout", default=None)
ACTIVATIONS = (nn.SiLU, nn.ReLU, nn.GELU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Mish)


class Dropout(nn.Module):
    """Creates a network with dropout after each of its activation modules. Called, it is the plain network.

    Arguments:
        network: The network; hooks are added, nothing is replaced.
        rate: The share of activations that is dropped; the paper's is 0.1.
    """

    def __init__(self, network: nn.Module, rate: float = 0.1) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise UsageError(f"a dropout rate lies strictly between 0 and 1, got {rate}")
        self.network, self.rate = network, rate
        found = [m for m in network.modules() if isinstance(m, ACTIVATIONS)]
        if not found:
            raise UsageError("the network has no activation module to put dropout after")
        for module in found:
            module.register_forward_hook(self._drop)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def _drop(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        running = _SOURCE.get()
        if running is None or running[0] is not self:
            return None
        return output * (running[1].uniform(output) >= self.rate) / (1 - self.rate)

    def forward(self, x: Any, t: Any, **cond: Any) -> Any:
        return self.network(x, t, **cond)

    def draw(self, x: Any, t: Any, *, seed: Any = None, **cond: Any) -> Any:
        """The velocity with dropout on."""
        return Bound(_SOURCE, (self, as_randomness(seed, self.device))).call(self.network, x, t, **cond)
