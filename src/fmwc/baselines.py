"""Baselines to compare confidence with: the dispersion of repeated trajectories, and MC-dropout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.errors import UsageError
from fmwc.flow import Space, as_space
from fmwc.modes import Bound
from fmwc.randomness import Randomness, as_randomness
from fmwc.sampling import SamplingConfig, sample
from fmwc.state import State, channels, tree_map

__all__ = ["Dropout", "dispersion", "ensemble_ends", "stochastic_ends"]


# ---- dispersion of repeated trajectories -------------------------------------------------------------------------


def dispersion(ends: State, space: Space | Sequence[int] | int | None = None) -> Tensor:  # (k, B, *) -> (B,)
    """Return ‖std_k(x₁)‖₂, the spread of the endpoints of k trajectories from the same x0 (sec:method-readouts).

    The variance is unbiased and is summed over channels.

    Arguments:
        ends: The endpoints.
        space: If given, differences are geodesic, measured from the first endpoint, and channels are weighted by their
            training weights. On a torus, points on either side of the boundary are then close.
    """
    variances, space = [], None if space is None else as_space(space)
    for name, values in channels(ends).items():
        if len(values) < 2:
            raise UsageError("dispersion needs at least 2 trajectories")
        weight = 1.0
        if space is not None:
            channel = space.channels[name]
            values, weight = channel.manifold.logmap(values[:1].expand_as(values), values), channel.weight
        variances.append(values.var(0).flatten(1).sum(1) * weight)
    return torch.stack(variances).sum(0).sqrt()


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
    """Return the endpoints of stochastic trajectories from the same x0 (posterior samples of a field, or MC-dropout).

    `cond` and `config` are those of :func:`fmwc.sampling.sample`.
    """
    config = (config or SamplingConfig()).with_defaults(decoder="stochastic", space=space)
    seeds = range(seed * trajectories, (seed + 1) * trajectories)
    return _ends(sample(field, x0=x0, steps=steps, seed=s, confidence=None, cond=cond, config=config) for s in seeds)


def ensemble_ends(
    members: Sequence[Any],
    x0: State,
    *,
    steps: int = 50,
    space: Space | None = None,
    cond: Mapping[str, Any] | None = None,
    config: SamplingConfig | None = None,
) -> Any:  # -> (k, B, *)
    """Return the endpoints of one trajectory per member, from the same x0; options as in :func:`stochastic_ends`."""
    config = (config or SamplingConfig()).with_defaults(space=space)
    return _ends(sample(m, x0=x0, steps=steps, confidence=None, cond=cond, config=config) for m in members)


def _ends(runs: Iterable[Any]) -> Any:
    return tree_map(lambda *ends: torch.stack(ends), *[run.x for run in runs])


# ---- dropout -----------------------------------------------------------------------------------------------------

# The network whose dropout is active in this thread and task, and its random numbers.
_SOURCE: ContextVar[tuple[Dropout, Randomness] | None] = ContextVar("dropout", default=None)
ACTIVATIONS = (nn.SiLU, nn.ReLU, nn.GELU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Mish)


class Dropout(nn.Module):
    """A network with optional dropout after each activation module.

    Calling it applies no dropout; :meth:`draw` applies it.

    Arguments:
        network: The network. Dropout is added by forward hooks; no module is replaced.
        rate: The fraction of activations to drop (0.1 in the paper).
    """

    def __init__(self, network: nn.Module, rate: float = 0.1) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise UsageError(f"rate must be strictly between 0 and 1, got {rate}")
        self.network, self.rate = network, rate
        activations = [m for m in network.modules() if isinstance(m, ACTIVATIONS)]
        if not activations:
            raise UsageError(
                "the network has no activation module for dropout to follow; use modules such as nn.SiLU, not functions"
            )
        for module in activations:
            module.register_forward_hook(self._drop)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def _drop(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        source = _SOURCE.get()
        if source is None or source[0] is not self:
            return None
        return output * (source[1].uniform(output) >= self.rate) / (1 - self.rate)

    def forward(self, x: Any, t: Any, **cond: Any) -> Any:
        return self.network(x, t, **cond)

    def draw(self, x: Any, t: Any, *, seed: Any = None, cond: Mapping[str, Any] | None = None) -> Any:
        """Return the velocity, computed with dropout."""
        return Bound(_SOURCE, (self, as_randomness(seed, self.device))).call(self.network, x, t, **(cond or {}))
