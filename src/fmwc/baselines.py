"""Baselines that confidence is compared with: repeated trajectories, dropout, and the scores of other papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import UsageError
from fmwc.estimators import Noisy, unit_probes
from fmwc.flow import Space, as_space, path_sample
from fmwc.modes import Bound
from fmwc.moments import Moments
from fmwc.randomness import Randomness, Stream, as_randomness, signs
from fmwc.sampling import SamplingConfig, sample
from fmwc.state import State, channels, tree_map

__all__ = [
    "Dropout",
    "HeteroscedasticHead",
    "HeteroscedasticVariance",
    "PosteriorTrace",
    "StateSensitivity",
    "dispersion",
    "ensemble_ends",
    "nll",
    "stochastic_ends",
]


# ---- spread of repeated trajectories ---------------------------------------------------------------------------------
# Endpoint dispersion: by how much k trajectories from one x0 disagree, at k times the cost (sec:method-readouts).


def dispersion(ends: State, space: Space | Sequence[int] | int | None = None) -> Tensor:  # (k, B, *) -> (B,)
    """‖std_k(x₁)‖₂ over all channels, with the unbiased variance.

    With a space, ends are seen from the first of them along geodesics (two sides of a torus' border are close), and
    channels are added up by their weight in the loss.
    """
    found, space = [], None if space is None else as_space(space)
    for name, values in channels(ends).items():
        if len(values) < 2:
            raise UsageError("dispersion takes at least 2 trajectories")
        if space is not None:
            values = space.channels[name].manifold.logmap(values[:1].expand_as(values), values)
        weight = 1.0 if space is None else space.channels[name].weight  # as channels add up in a score
        found.append(values.var(0).flatten(1).sum(1) * weight)
    return torch.stack(found).sum(0).sqrt()


def stochastic_ends(
    field: Any,
    x0: State,
    trajectories: int,
    *,
    steps: int = 50,
    seed: int = 0,
    space: Space | None = None,
    cond: Mapping[str, Any] | None = None,
    config: SamplingConfig | None = None,
) -> Any:  # -> (k, B, *)
    """Ends of stochastic trajectories from the same x0, each with noise of its own: MC-dropout, or posterior draws.

    `cond` and `config` are those of :func:`fmwc.sampling.sample`.
    """

    config = (config or SamplingConfig()).with_defaults(decoder="stochastic", space=space)

    def end(seed: int) -> Any:
        return sample(field, x0=x0, steps=steps, seed=seed, confidence=None, cond=cond, config=config).x

    ends = [end(s) for s in range(seed * trajectories, (seed + 1) * trajectories)]
    return tree_map(lambda *c: torch.stack(c), *ends)


def ensemble_ends(
    members: Sequence[Any],
    x0: State,
    *,
    steps: int = 50,
    space: Space | None = None,
    cond: Mapping[str, Any] | None = None,
    config: SamplingConfig | None = None,
) -> Any:  # -> (k, B, *)
    """Ends of one trajectory a member, from the same x0; `cond` and `config` as in :func:`stochastic_ends`."""
    config = (config or SamplingConfig()).with_defaults(space=space)
    ends = [sample(m, x0=x0, steps=steps, confidence=None, cond=cond, config=config).x for m in members]
    return tree_map(lambda *c: torch.stack(c), *ends)


# ---- dropout ---------------------------------------------------------------------------------------------------------
# MC-dropout: fixed dropout after every activation, kept on while sampling.

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

    def draw(self, x: Any, t: Any, *, seed: Any = None, cond: Mapping[str, Any] | None = None) -> Any:
        """The velocity with dropout on."""
        return Bound(_SOURCE, (self, as_randomness(seed, self.device))).call(self.network, x, t, **(cond or {}))


# ---- scores of other papers ------------------------------------------------------------------------------------------
# Rivals: other ways to a number per step. Each is an estimator, so the one sampler reads it like our own variance.


def _jacobian_sum(
    field: Any,
    x: Tensor,
    t: Tensor,
    cond: dict[str, Any],
    quadratic: Callable[[Tensor, Tensor], Tensor],
    probes: int | None,
    randomness: Randomness,
) -> tuple[Tensor, Tensor]:
    """v, and for each sample the sum over coordinates of `quadratic(w, wᵀ∂v/∂x)`, one backward pass a probe w.

    What is quadratic in w asks only for E[wwᵀ] = 1: summed over the unit vectors (`probes=None`) it is exact, and its
    mean over random signs is unbiased.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        v = field(x, t, **cond)
        plain = v.detach()
        total = plain.new_zeros(len(plain))
        random = (signs(randomness, plain) for _ in range(probes or 0))
        for w in (w for _, _, w in unit_probes(plain)) if probes is None else random:
            (row,) = torch.autograd.grad(v, x, w, retain_graph=True)
            total += quadratic(w, row).flatten(1).sum(1)
    return plain, total / (probes or 1)


def _check_probes(probes: int | None) -> None:
    if probes is not None and probes < 1:
        raise UsageError(f"probes is None (exact) or at least 1, got {probes}")


def _one_a_sample(value: Tensor, like: Tensor) -> Tensor:  # (B,) -> (B, 1, …), as a mean over coordinates
    return (value / like[0].numel()).reshape(-1, *[1] * (like.ndim - 1))


@dataclass(frozen=True)
class StateSensitivity:
    r"""Creates the reading ‖∂v/∂x‖²_F: how hard a nudge of the state pushes the velocity. Needs no training.

    .. math:: \|J\|_F^2 = E_w \|w^T J\|^2, \quad E[ww^T] = 1

    Arguments:
        probes: `None` for the exact norm (one backward pass a coordinate), or the number of random probes w, right for
            images.
    """

    probes: int | None = None
    plain_mean = True

    def __post_init__(self) -> None:
        _check_probes(self.probes)

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, norm = _jacobian_sum(field, x, t, cond, lambda w, row: row.square(), self.probes, randomness)
        return Moments(v, _one_a_sample(norm, v))


@dataclass(frozen=True)
class PosteriorTrace:
    r"""Creates the reading of "Divergence is uncertainty" (arXiv 2605.00941), for the linear path from Gaussian noise.

    By Tweedie's second formula the data's posterior covariance follows from the divergence alone,

    .. math:: \mathrm{tr}\, Cov[x_1 | x_t] = \frac{(1-t)^2}{t} (D + (1 - t) ∇·v)

    which is exact for the optimal velocity. Where a trained one makes it negative, it is read as 0. Towards t = 0 the
    factor 1/t makes the reading one of the network's own error, so read it from some t on: `Schedule.at([0.1, …])`.

    Arguments:
        first: The floor of t, against division by zero.
        probes: `None` for the exact divergence (one backward pass a coordinate), or the number of random probes w for
            ∇·v = E[wᵀ(∂v/∂x)w], right for images. Reading negatives as 0 then adds a little: take more probes, or
            start later, where many are.
    """

    first: float = 1e-3
    probes: int | None = None
    plain_mean = True

    def __post_init__(self) -> None:
        _check_probes(self.probes)

    def __call__(self, field: Noisy, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, divergence = _jacobian_sum(field, x, t, cond, lambda w, row: row * w, self.probes, randomness)
        trace = (1 - t).square() / t.clamp_min(self.first) * (v[0].numel() + (1 - t) * divergence)
        return Moments(v, _one_a_sample(trace.clamp_min(0), v))


class HeteroscedasticHead(nn.Module):
    """Creates UA-Flow's field (arXiv 2602.10326): a network with two heads, velocity and log variance.

    Called, it is the velocity.

    Arguments:
        network: A network that gives out twice as many numbers as a sample has on dimension 1, velocity first: a
            vector's features, or an image's channels.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def both(self, x: Any, t: Any, **cond: Any) -> tuple[Tensor, Tensor]:
        v, log_var = self.network(x, t, **cond).chunk(2, 1)
        return v, log_var.clamp(-12, 12)

    def forward(self, x: Any, t: Any, **cond: Any) -> Tensor:
        return self.both(x, t, **cond)[0]

    def graft(self, flow: nn.Module) -> None:
        """Takes over a flow that is trained already: its velocity stays, and only the head of the variance can learn.

        The two networks differ in the last layer alone, `out`, which gives out twice as much here.
        """
        own = self.network.state_dict()
        with torch.no_grad():
            for name, value in flow.state_dict().items():
                own[name].zero_()[: len(value)].copy_(value)
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
    """½[(v − u)²/σ² + log σ²]: the Gaussian likelihood the two heads are trained with. `cond` goes to the network.

    Without `velocity`, v is taken as it is and only the variance learns.
    """
    t, x_t, u_t = path_sample(space, x1, randomness)
    v, log_var = head.both(x_t, t, **(cond or {}))
    v = v if velocity else v.detach()
    return ((v - u_t).square() * (-log_var).exp() + log_var).mean() / 2


@dataclass(frozen=True)
class HeteroscedasticVariance:
    """Creates the reading of a :class:`HeteroscedasticHead`'s own variance."""

    plain_mean = True

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Moments:
        v, log_var = field.both(x, t, **cond)
        return Moments(v, log_var.exp())
