"""Scores of other papers that the variance is compared with: estimators that the sampler reads like the variance."""

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

EARLIEST = 1e-3  # the floor of t, against division by zero


# ---- scores of the Jacobian --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _JacobianScore:
    """A reading of ∂v/∂x.

    Arguments:
        probes: `None` for an exact reading (one backward pass per coordinate), or the number of random probes w, which
            suits images.
    """

    probes: int | None = None
    plain_mean = True

    def __post_init__(self) -> None:
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes is None (exact) or at least 1, got {self.probes}")

    def _sum(
        self,
        field: Any,
        x: Tensor,
        t: Tensor,
        cond: dict[str, Any],
        quadratic: Callable[[Tensor, Tensor], Tensor],
        randomness: Randomness,
    ) -> tuple[Tensor, Tensor]:
        """Return v, and per sample the sum over coordinates of `quadratic(w, wᵀ∂v/∂x)`.

        A quadratic form in w only needs E[wwᵀ] = 1: its sum over the unit vectors is exact, and its mean over random
        signs is unbiased.
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
    r"""The squared Frobenius norm ‖∂v/∂x‖²_F: how much a small change of the state changes the velocity.

    .. math:: \|J\|_F^2 = E_w \|w^T J\|^2, \quad E[ww^T] = 1
    """

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, norm = self._sum(field, x, t, cond, lambda w, row: row.square(), randomness)
        return Moments(v, _per_coordinate(norm, v))


@dataclass(frozen=True)
class PosteriorTrace(_JacobianScore):
    r"""The trace of the posterior covariance of the data, of "Divergence is uncertainty" (arXiv 2605.00941).

    By Tweedie's second formula, for the linear path from Gaussian noise,

    .. math:: \mathrm{tr}\, Cov[x_1 | x_t] = \frac{(1-t)^2}{t} (D + (1 - t) ∇·v), \quad ∇·v = E[w^T J w]

    This is exact for the optimal velocity. Negative values of a trained velocity are set to 0, which biases random
    probes slightly. Near t = 0 the factor 1/t amplifies the error of the network, so read it from a later time on:
    `Schedule.at([0.1, …])`.
    """

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, divergence = self._sum(field, x, t, cond, lambda w, row: row * w, randomness)
        trace = (1 - t).square() / t.clamp_min(EARLIEST) * (v[0].numel() + (1 - t) * divergence)
        return Moments(v, _per_coordinate(trace.clamp_min(0), v))


# ---- a second head for the variance ------------------------------------------------------------------------------


class HeteroscedasticHead(nn.Module):
    """The field of UA-Flow (arXiv 2602.10326): a network with two heads, velocity and log variance.

    When called, it returns the velocity.

    Arguments:
        network: A network whose output has twice the size of a sample on dimension 1 (features of a vector, channels
            of an image), velocity first.
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
        """Copy the weights of a trained flow, and let only the head of the variance learn.

        The two networks differ only in the last layer, `out`, which is twice as large here.
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
    """Return ½[(v − u)²/σ² + log σ²], the Gaussian negative log-likelihood that trains both heads.

    Without `velocity`, only the variance learns. `cond` is passed to the network.
    """
    t, x_t, u_t = path_sample(space, x1, randomness)
    v, log_var = head.both(x_t, t, **(cond or {}))
    v = v if velocity else v.detach()
    return ((v - u_t).square() * (-log_var).exp() + log_var).mean() / 2


@dataclass(frozen=True)
class HeteroscedasticVariance:
    """The variance that a :class:`HeteroscedasticHead` predicts."""

    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, log_var = field.both(x, t, **cond)
        return Moments(v, log_var.exp())
