"""Baseline scores from other papers, as estimators with the interface of the variance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import UsageError
from fmwc.estimators import Noisy, unit_probes
from fmwc.flow import Space, path_sample
from fmwc.moments import Moments
from fmwc.randomness import Randomness, Stream, signs

EARLIEST = 1e-3  # minimum t, to avoid division by zero


# ---- scores of the Jacobian --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _JacobianScore:
    """Base class of scores computed from ∂v/∂x.

    Arguments:
        probes: The number of random probes w (for images), or `None` for the exact value (one backward pass per
            coordinate).
    """

    probes: int | None = None
    plain_mean = True

    def __post_init__(self) -> None:
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes must be None (exact) or at least 1, got {self.probes}")

    def _sum(
        self,
        field: Any,
        x: Tensor,
        t: Tensor,
        cond: dict[str, Any],
        quadratic: Callable[[Tensor, Tensor], Tensor],
        randomness: Randomness,
    ) -> tuple[Tensor, Tensor]:
        """Return v, and the sum over coordinates of `quadratic(w, wᵀ∂v/∂x)` per sample.

        For a quadratic form in w, the sum over unit vectors is exact and the mean over random signs is unbiased,
        because E[wwᵀ] = 1.
        """
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            v = field(x, t, **cond)
            plain = v.detach()
            total = plain.new_zeros(len(plain))
            random = (signs(randomness, plain) for _ in range(self.probes or 0))
            for w in (w for _, _, w in unit_probes(plain)) if self.probes is None else random:
                (row,) = torch.autograd.grad(v, x, w, retain_graph=True)
                total += quadratic(w, row).flatten(1).sum(1)
        return plain, total / (self.probes or 1)


def _per_coordinate(value: Tensor, like: Tensor) -> Tensor:  # (B,) -> (B, 1, …)
    return (value / like[0].numel()).reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True)
class StateSensitivity(_JacobianScore):
    r"""The squared Frobenius norm ‖∂v/∂x‖²_F, the sensitivity of the velocity to the state.

    .. math:: \|J\|_F^2 = E_w \|w^T J\|^2, \quad E[ww^T] = 1
    """

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, norm = self._sum(field, x, t, cond, lambda w, row: row.square(), randomness)
        return Moments(v, _per_coordinate(norm, v))


@dataclass(frozen=True)
class PosteriorTrace(_JacobianScore):
    r"""The trace of the posterior covariance of the data, from "Divergence is uncertainty" (arXiv 2605.00941).

    By Tweedie's second formula, for the linear path from Gaussian noise,

    .. math:: \mathrm{tr}\, Cov[x_1 | x_t] = \frac{(1-t)^2}{t} (D + (1 - t) ∇·v), \quad ∇·v = E[w^T J w]

    This is exact for the optimal velocity. Negative values, which trained networks can have, are set to 0; with random
    probes, this adds a small bias. Near t = 0, the factor 1/t amplifies network errors, so start later:
    `Schedule.at([0.1, …])`.
    """

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, divergence = self._sum(field, x, t, cond, lambda w, row: row * w, randomness)
        trace = (1 - t).square() / t.clamp_min(EARLIEST) * (v[0].numel() + (1 - t) * divergence)
        return Moments(v, _per_coordinate(trace.clamp_min(0), v))


# ---- a second head for the variance ------------------------------------------------------------------------------


class HeteroscedasticHead(nn.Module):
    """The model of UA-Flow (arXiv 2602.10326): a network with two heads, velocity and log variance.

    Calling it returns the velocity.

    Arguments:
        network: A network whose output has twice the size of a sample along dimension 1 (features of a vector,
            channels of an image), with the velocity first.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def both(self, x: Any, t: Any, **cond: Any) -> tuple[Tensor, Tensor]:
        """Return the velocity and the log variance."""
        v, log_var = self.network(x, t, **cond).chunk(2, 1)
        return v, log_var.clamp(-12, 12)

    def forward(self, x: Any, t: Any, **cond: Any) -> Tensor:
        return self.both(x, t, **cond)[0]

    def graft(self, flow: nn.Module) -> None:
        """Copy the weights of a trained flow, and freeze all but the last layer, `out`.

        The two networks differ only in this layer, which is twice as large here.
        """
        weights = self.network.state_dict()
        with torch.no_grad():
            for name, value in flow.state_dict().items():
                weights[name].zero_()[: len(value)].copy_(value)
        self.network.requires_grad_(False)
        self.network.out.requires_grad_(True)


def nll(
    head: HeteroscedasticHead,
    space: Space,
    x1: Tensor,
    randomness: Stream,
    *,
    velocity: bool = True,
    cond: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return ½[(v − u)²/σ² + log σ²], the Gaussian negative log-likelihood for training both heads.

    With `velocity=False`, only the variance is trained. `cond` is passed to the network.
    """
    t, x_t, u_t = path_sample(space, x1, randomness)
    v, log_var = head.both(x_t, t, **(cond or {}))
    v = v if velocity else v.detach()
    return ((v - u_t).square() * (-log_var).exp() + log_var).mean() / 2


@dataclass(frozen=True)
class HeteroscedasticVariance:
    """The variance predicted by a :class:`HeteroscedasticHead`."""

    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, log_var = field.both(x, t, **cond)
        return Moments(v, log_var.exp())
