"""Rivals: other ways to a number per step. Each is an estimator, so the one sampler reads it like our own variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.flow import Space, path_sample
from fmwc.moments import Moments
from fmwc.propagate import Noisy, unit_probes
from fmwc.randomness import Randomness, Stream

__all__ = ["HeteroscedasticHead", "HeteroscedasticVariance", "PosteriorTrace", "StateSensitivity", "nll"]


def _jacobian_rows(field: Any, x: Tensor, t: Tensor, cond: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """v, and ∂v/∂x as `(D, B, D)`: one backward pass a coordinate."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        v = field(x, t, **cond)
        rows = [torch.autograd.grad(v, x, w, retain_graph=True)[0].flatten(1) for _, _, w in unit_probes(v)]
    return v.detach(), torch.stack(rows)


def _one_a_sample(value: Tensor, like: Tensor) -> Tensor:  # (B,) -> (B, 1, …), as a mean over coordinates
    return (value / like[0].numel()).reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True)
class StateSensitivity:
    """Creates the reading ‖∂v/∂x‖²_F: how hard a nudge of the state pushes the velocity. Needs no training."""

    plain_mean = True

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, rows = _jacobian_rows(field, x, t, cond)
        return Moments(v, _one_a_sample(rows.square().sum((0, 2)), v))


@dataclass(frozen=True)
class PosteriorTrace:
    r"""Creates the reading of "Divergence is uncertainty" (arXiv 2605.00941), for the linear path from Gaussian noise.

    By Tweedie's second formula the data's posterior covariance follows from the divergence alone,

    .. math:: \mathrm{tr}\, Cov[x_1 | x_t] = \frac{(1-t)^2}{t} (D + (1 - t) ∇·v)

    which is exact for the optimal velocity. Where a trained one makes it negative, it is read as 0. Towards t = 0 the
    factor 1/t makes the reading one of the network's own error, so read it from some t on: `schedule=[0.1, …]`.

    Arguments:
        first: The floor of t, against division by zero.
    """

    first: float = 1e-3
    plain_mean = True

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, rows = _jacobian_rows(field, x, t, cond)
        divergence = rows.diagonal(dim1=0, dim2=2).sum(1)
        trace = (1 - t).square() / t.clamp_min(self.first) * (rows.shape[0] + (1 - t) * divergence)
        return Moments(v, _one_a_sample(trace.clamp_min(0), v))


class HeteroscedasticHead(nn.Module):
    """Creates UA-Flow's field (arXiv 2602.10326): a network with two heads, velocity and log variance.

    Called, it is the velocity.

    Arguments:
        network: A network that gives out twice as many numbers as a sample has, on the last dimension.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def both(self, x: Any, t: Any, **cond: Any) -> tuple[Tensor, Tensor]:
        v, log_var = self.network(x, t, **cond).chunk(2, -1)
        return v, log_var.clamp(-12, 12)

    def forward(self, x: Any, t: Any, **cond: Any) -> Tensor:
        return self.both(x, t, **cond)[0]


def nll(head: HeteroscedasticHead, space: Space, x1: Tensor, randomness: Stream) -> Tensor:
    """½[(v − u)²/σ² + log σ²]: the Gaussian likelihood the two heads are trained with."""
    t, x_t, u_t = path_sample(space, x1, randomness)
    v, log_var = head.both(x_t, t)
    return ((v - u_t).square() * (-log_var).exp() + log_var).mean() / 2


@dataclass(frozen=True)
class HeteroscedasticVariance:
    """Creates the reading of a :class:`HeteroscedasticHead`'s own variance."""

    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, log_var = field.both(x, t, **cond)
        return Moments(v, log_var.exp())
