"""The linearised estimator in forward mode."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._C import _exit_dual_level
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmwc.errors import UsageError
from fmwc.estimators.base import Noisy, normal_inputs, plain_output, register
from fmwc.modes import Scope
from fmwc.moments import Moments
from fmwc.noise import NoisyLayer, Pass, Weights
from fmwc.randomness import Randomness
from fmwc.state import tree_map, wide

__all__ = ["Tangent"]


class Push(Pass):
    """Pass that pushes one random direction of the noise forward with the values."""

    def __init__(self, randomness: Randomness, shared: bool = False) -> None:
        self.randomness = randomness
        self.weights = Weights(randomness) if shared else None

    def after(self, noisy: NoisyLayer, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        value, tangent = forward_ad.unpack_dual(y)
        known = forward_ad.unpack_dual(h).primal
        log_alpha = noisy.log_alpha(known)
        if self.weights is not None:
            direction = self.weights(noisy, layer, known, log_alpha)
        else:
            std = noisy.output_var(layer, known, log_alpha).sqrt()
            direction = std * noisy.correlated(layer, known, log_alpha, std, self.randomness.normal(value))
        return forward_ad.make_dual(value, direction if tangent is None else tangent + direction)


_FORWARD = RLock()  # torch has one level of forward mode and one choice of attention kernels for all threads


class _Level(Scope):
    """A level of forward mode, held by one thread at a time."""

    opened = False

    def open(self) -> None:
        self.opened = forward_ad._current_level < 0  # torch refuses a level inside a level of the user
        forward_ad.enter_dual_level()

    def close(self) -> None:
        if self.opened:
            with suppress(RuntimeError):  # an interrupt may come before it is entered, or after it is left
                _exit_dual_level(level=0)
            forward_ad._current_level = -1
            self.opened = False


@register("tangent")
@dataclass(frozen=True, repr=False)
class Tangent:
    """Linearised estimator in forward mode: one pass gives an unbiased variance of every coordinate.

    torch has one level of forward mode per process, so concurrent readings take turns, and no other thread may be
    inside `torch.autograd.forward_ad.dual_level` at the same time.

    Arguments:
        probes: The number of random directions to average.
        shared: As in :class:`Linearised`.
    """

    probes: int = 1
    shared: bool = False
    plain_mean = True
    rounds = True

    def __repr__(self) -> str:
        return f"Tangent(probes={self.probes}{', shared=True' if self.shared else ''})"

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        if self.probes < 1:
            raise UsageError(f"tangent takes at least 1 probe, got {self.probes}")
        with _FORWARD, torch.inference_mode(False), torch.no_grad():
            x, t, cond = normal_inputs(x, t, cond)
            try:
                found, fused = self._pushed(field, x, t, cond, randomness), field.fused
            except NotImplementedError:  # torch's fused attention kernels have no forward mode
                with sdpa_kernel(SDPBackend.MATH):
                    found, fused = self._pushed(field, x, t, cond, randomness), True
            return found._replace(mean=plain_output(field, x, t, cond)) if fused else found

    def _pushed(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        mean, var = None, None

        def pushed() -> tuple[Any, Any]:
            v = tree_map(forward_ad.unpack_dual, field.run(Push(randomness, self.shared), x, t, cond=cond))
            # Values outlive the level, so they are copied out of their dual pairs.
            tangent = tree_map(lambda c: wide(torch.zeros_like(c.primal) if c.tangent is None else c.tangent), v)
            return tree_map(lambda c: c.primal.clone(), v), tree_map(torch.square, tangent)

        for _ in range(self.probes):
            mean, square = _Level().call(pushed)
            var = square if var is None else tree_map(torch.add, var, square)
        return Moments(mean, tree_map(lambda c: c / self.probes, var))  # type: ignore[arg-type]
