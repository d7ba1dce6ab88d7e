r"""The adjoint of the whole ODE: how much each step and layer contributes to the variance of a sample's endpoint.

The probe w at the endpoint is pulled back step by step, λ_n = (∂x_{n+1}/∂x_n)ᵀ λ_{n+1}, and the noise at every step
contributes the square of its slope:

.. math:: Var[w·x_1] = \sum_n \sum_l \sum_u s_{n,l,u}^2 \left( \frac{∂(λ_{n+1}·x_{n+1})}{∂y_{n,l,u}} \right)^2

to first order, the limit k → ∞ of the dispersion of k stochastic trajectories. Without the sums over n and l it is the
profile. Only the states are stored: the backward pass recomputes each step, so memory holds one step's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import UsageError
from fmwc.estimators.linearised import Record, contributions, translate_checkpoint_errors, unit_probes
from fmwc.randomness import Randomness
from fmwc.state import SINGLE, batch_size, channels, tree_map

__all__ = ["Transport", "Transported"]

Advance = Callable[[int, Any, Record], Any]  # (step, state, record) -> the next state


@dataclass(frozen=True)
class Transported:
    """Result of a transport.

    Attributes:
        var: Variance of the endpoint per coordinate or random projection, `(B, probes)`, each channel times its weight
            (as in :func:`fmwc.baselines`).
        profile: The variance summed over probes, per step and layer, `(steps, L, B)`.
        layers: The names of the layers, in the order they ran.
    """

    var: Tensor
    profile: Tensor
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Transport:
    """Transport of endpoint probes back through a trajectory.

    Arguments:
        probes: `None` for one probe per coordinate (exact), or a number of random unit directions.
    """

    probes: int | None = None

    def __post_init__(self) -> None:
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes is None (exact) or at least 1, got {self.probes}")

    def __call__(
        self, advance: Advance, states: list[Any], randomness: Randomness, weights: Mapping[str, float] | None = None
    ) -> Transported:
        """Pull the probes back through the steps.

        Arguments:
            advance: Recomputes one step with a record running.
            states: The states of the trajectory, including the first and the last.
            randomness: The source of random directions.
            weights: The factor of each channel's variance, by name; 1 if not named.
        """
        end = states[-1]
        count = batch_size(end)
        profile: list[Tensor] = []
        names: tuple[str, ...] = ()
        with torch.inference_mode(False), torch.enable_grad():
            adjoints = [_weighted(probe, weights or {}) for probe in self._ends(end, randomness)]
            total = next(iter(channels(end).values())).new_zeros(count, len(adjoints))
            for step in reversed(range(len(states) - 1)):
                record = Record()
                x = tree_map(lambda c: c.clone().detach().requires_grad_(), states[step])
                after = advance(step, x, record)
                inputs: list[Tensor] = list(channels(x).values())
                # A stepper may evaluate the network several times; each layer has one row all the same.
                layers = list(dict.fromkeys(record.layers))
                rows = torch.tensor([layers.index(noisy) for noisy in record.layers], device=total.device)
                names = tuple(noisy.name for noisy in layers)
                here = total.new_zeros(len(layers), count)
                for i, adjoint in enumerate(adjoints):
                    with translate_checkpoint_errors():
                        gradients = torch.autograd.grad(
                            list(channels(after).values()),
                            [*inputs, *record.outputs],  # type: ignore[arg-type]
                            list(channels(adjoint).values()),
                            retain_graph=i + 1 < len(adjoints),
                            allow_unused=True,
                        )
                    back = [torch.zeros_like(c) if g is None else g for g, c in zip(gradients, inputs, strict=False)]
                    adjoints[i] = dict(zip(x, back, strict=True)) if isinstance(x, dict) else back[0]
                    parts = contributions(list(gradients[len(inputs) :]), record, count)
                    total[:, i] += parts.sum(0)
                    here.index_add_(0, rows, parts)
                profile.append(here)
        return Transported(total, torch.stack(profile[::-1]), names)

    def _ends(self, end: Any, randomness: Randomness) -> list[Any]:
        if self.probes is None:
            return [probe for _, _, probe in unit_probes(end)]

        def direction() -> Any:
            raw = tree_map(randomness.normal, end)
            square = sum(c.flatten(1).square().sum(1) for c in channels(raw).values())
            norm = torch.as_tensor(square).sqrt()
            return tree_map(lambda c: c / norm[(slice(None), *[None] * (c.ndim - 1))], raw)

        return [direction() for _ in range(self.probes)]


def _weighted(probe: Any, weights: Mapping[str, float]) -> Any:
    """A probe with each channel multiplied by the square root of its weight."""
    scaled = {name: value * weights.get(name, 1.0) ** 0.5 for name, value in channels(probe).items()}
    return scaled if isinstance(probe, dict) else scaled[SINGLE]
