r"""Guidance: steer the velocity away from states of high variance.

.. math:: v'(x, t) = v(x, t) - λ(t) \, ∇_x \log Σ_c w_c \, Var[v_c](x, t)

The variance is the linearised one, to first order in the noise. Its gradient is computed by autograd: exactly, with one
probe per coordinate, or with random probes for large states. A guided velocity costs one network evaluation and several
backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmwc.errors import UsageError, nearest
from fmwc.estimators import Record, as_normal_tensor, contributions, translate_checkpoint_errors, unit_probes
from fmwc.randomness import Randomness, signs
from fmwc.state import batch_size, channels, tree_map

__all__ = ["OBJECTIVES", "Guidance", "variance_gradient"]

OBJECTIVES = ("log_var", "std")


class _DifferentiableRecord(Record):
    """A record whose variances are differentiable."""

    following = nullcontext


def variance_gradient(
    field: Any,
    x: Any,
    t: Tensor,  # (B,)
    cond: Mapping[str, Any] | None = None,
    *,
    objective: str = "log_var",
    probes: int | None = None,
    randomness: Randomness | None = None,
) -> tuple[Any, Tensor, Any]:
    """Return the velocity, its total variance per sample, and the gradient of the objective with respect to the state.

    The total variance is the sum over channels of each variance times the channel's training weight.

    Arguments:
        field: A field.
        x, t, cond: The states, their times and their conditions.
        objective: `log_var` for the logarithm of the total variance, or `std` for its square root.
        probes: The number of random probes, or `None` for one probe per coordinate (exact to first order).
        randomness: The source of random numbers for random probes.
    """
    if objective not in OBJECTIVES:
        raise UsageError(nearest(objective, OBJECTIVES, "objective"))
    if probes is not None and (probes < 1 or randomness is None):
        raise UsageError("random probes need randomness, and probes must be at least 1")
    # Use plain attention, because torch's fused attention has no second derivative.
    with torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        x = tree_map(lambda c: as_normal_tensor(c).detach().requires_grad_(), x)
        record = _DifferentiableRecord()
        v = field.run(record, x, as_normal_tensor(t), cond={k: as_normal_tensor(c) for k, c in (cond or {}).items()})
        plain = tree_map(Tensor.detach, v)
        weights = {n: c.weight for n, c in field.space.channels.items()} if field.space else {}
        total = next(iter(channels(plain).values())).new_zeros(batch_size(v))
        for weight, probe in _weighted_probes(plain, weights, probes, randomness):
            with translate_checkpoint_errors():
                gradients = torch.autograd.grad(
                    list(channels(v).values()),
                    record.outputs,
                    list(probe.values()),
                    create_graph=True,
                    allow_unused=True,
                )
            total = total + weight * contributions(list(gradients), record, len(total)).sum(0)
        floor = torch.finfo(total.dtype).tiny
        aim = total.clamp_min(floor).log() if objective == "log_var" else total.clamp_min(floor).sqrt()
        gradients = torch.autograd.grad(aim.sum(), list(channels(x).values()), materialize_grads=True)
        gradient = dict(zip(x, gradients, strict=True)) if isinstance(x, dict) else gradients[0]
    return plain, total.detach(), gradient


def _weighted_probes(
    v: Any, weights: Mapping[str, float], probes: int | None, randomness: Randomness | None
) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Yield probes by channel, each with its weight in the total variance."""
    if probes is None:
        for name, _, probe in unit_probes(v):
            yield weights.get(name, 1.0), channels(probe)
        return
    assert randomness is not None
    for _ in range(probes):  # one sign per coordinate: cross terms vanish on average
        yield 1 / probes, {n: signs(randomness, c) * weights.get(n, 1.0) ** 0.5 for n, c in channels(v).items()}


@dataclass(frozen=True)
class Guidance:
    """A decoder that steers away from high variance: `sample(decoder=Guidance(0.1))`.

    Arguments:
        strength: λ for early ≤ t < late, and 0 otherwise. Negative values steer towards high variance.
        early, late: The time window.
        objective: The quantity to decrease: `log_var` or `std`.
        limit: The maximum norm of the steering term, relative to that of the velocity, per sample and channel.
        probes: As in :func:`variance_gradient`.
    """

    strength: float
    early: float = 0.0
    late: float = 1.0
    objective: str = "log_var"
    limit: float = 1.0
    probes: int | None = None
    evaluations = 1

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UsageError(nearest(self.objective, OBJECTIVES, "objective"))
        if not 0 <= self.early <= self.late <= 1:
            raise UsageError(f"early and late must satisfy 0 ≤ early ≤ late ≤ 1, got {self.early} to {self.late}")
        if self.probes is not None and self.probes < 1:
            raise UsageError(f"probes must be None (exact) or at least 1, got {self.probes}")
        if not self.limit >= 0:
            raise UsageError(f"limit must be at least 0, got {self.limit}")

    def __call__(self, field: Any, x: Any, t: Tensor, cond: dict[str, Any], randomness: Randomness) -> Any:
        if not hasattr(field, "run"):
            raise UsageError("guidance needs a field with noise; attach the network first: fmwc.attach(network)")
        strength = self.strength * ((t >= self.early) & (t < self.late))
        if not bool((strength != 0).any()):
            return field(x, t, **cond)
        v, _, slope = variance_gradient(
            field, x, t, cond, objective=self.objective, probes=self.probes, randomness=randomness
        )

        def steered(v: Tensor, slope: Tensor) -> Tensor:
            wide = (slice(None), *[None] * (v.ndim - 1))
            push = strength.to(v)[wide] * slope
            length, speed = (c.flatten(1).norm(dim=1) for c in (push, v))
            factor = (self.limit * speed / length.clamp_min(torch.finfo(v.dtype).tiny)).clamp_max(1.0)
            return v - push * factor[wide]

        return tree_map(steered, v, slope)
