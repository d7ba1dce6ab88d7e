"""Slow, independent reference implementations of the formulas of the library, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmwc.field import Field
from fmwc.noise import Pass

# ---- moments -------------------------------------------------------------------------------------------------------


def integral(f: Callable[[Tensor], Tensor], mean: Tensor, var: Tensor, points: int = 20_001) -> tuple[Tensor, Tensor]:
    """E[φ(z)] and Var[φ(z)] for z ~ N(μ, σ²), by the trapezium rule over ±9σ in float64."""
    z = torch.linspace(-9, 9, points, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    value = f(mean.double()[..., None] + var.double().sqrt()[..., None] * z)
    first = torch.trapezoid(value * density, z)
    second = torch.trapezoid((value - first[..., None]).square() * density, z)
    return first, second


def drawn(
    f: Callable[..., Tensor], inputs: Sequence[tuple[Tensor, Tensor]], draws: int = 20_000, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean and variance of f of independent Gaussians by Monte Carlo in float64, and their standard errors."""
    generator = torch.Generator().manual_seed(seed)
    samples = [
        m.double() + v.double().sqrt() * torch.randn(draws, *m.shape, dtype=torch.float64, generator=generator)
        for m, v in inputs
    ]
    return statistics(torch.func.vmap(f)(*samples))


def delta(f: Callable[..., Tensor], inputs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return f(μ) and Σ J²σ² with torch's Jacobian: the moments of f of independent inputs, to first order; exact for
    a linear f."""
    means = tuple(m.double() for m, _ in inputs)
    value = f(*means)
    jacobians = torch.autograd.functional.jacobian(f, means)
    var = sum(
        j.reshape(value.numel(), -1).square() @ v.double().flatten()
        for j, (_, v) in zip(jacobians, inputs, strict=True)
    )
    return value, torch.as_tensor(var).reshape(value.shape)


def statistics(values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (N, *) -> four of (*)
    """Return sample mean and variance, and their standard errors."""
    count = len(values)
    mean, var = values.mean(0), values.var(0)
    fourth = (values - mean).pow(4).mean(0)
    return mean, var, (var / count).sqrt(), ((fourth - var.square()).clamp_min(0) / count).sqrt()


def assert_within(found: Tensor, expected: Tensor, error: Tensor, sigmas: float = 6.0) -> None:
    """Fail if an estimate differs by more than six standard errors (which happens by chance once in 5·10⁸)."""
    off = (found.double() - expected.double()).abs()
    allowed = sigmas * error.double() + 1e-6 * expected.double().abs() + 1e-9
    assert bool((off <= allowed).all()), f"off by up to {float((off / allowed).max()) * sigmas:.1f} standard errors"


# ---- noise ---------------------------------------------------------------------------------------------------------


def noise_var(layer: nn.Module, h: Tensor, alpha: Tensor) -> Tensor:
    """Return θ²(α h²) by the dense matrix of the layer (one basis input at a time), with squared entries."""
    flat = h[0].numel()
    basis = torch.eye(flat, dtype=h.dtype).reshape(flat, *h.shape[1:])
    with torch.no_grad():
        matrix = (layer(basis) - layer(torch.zeros_like(basis))).flatten(1)  # (in, out), without bias
        shape = layer(h[:1]).shape[1:]
    power = (alpha.expand_as(h) * h.square()).flatten(1)
    return (power @ matrix.square()).reshape(len(h), *shape)


def scale(layer: nn.Module, h: Tensor, alpha: Tensor) -> Tensor:
    """Return √(θ²(α h²)) for the two kinds of layer in these tests."""
    power = alpha * h.square()
    if isinstance(layer, nn.Linear):
        return F.linear(power, layer.weight.square()).sqrt()
    if isinstance(layer, nn.ConvTranspose2d):
        return F.conv_transpose2d(power, layer.weight.square(), stride=layer.stride, padding=layer.padding).sqrt()
    assert isinstance(layer, nn.Conv2d)
    return F.conv2d(power, layer.weight.square(), stride=layer.stride, padding=layer.padding).sqrt()


class Given(Pass):
    """A draw with given ε, one tensor per call of a noisy layer; with `None`, it records the required shapes."""

    def __init__(self, eps: Sequence[Tensor] | None) -> None:
        self.eps, self.shapes = eps, []  # type: ignore[var-annotated]

    def after(self, noisy: Any, layer: Any, h: Tensor, y: Tensor) -> Tensor:
        self.shapes.append(y.shape)
        if self.eps is None:
            return y
        return y + scale(layer, h, noisy.log_alpha(h).exp()) * self.eps[len(self.shapes) - 1]


def jacobian_var(f: Callable[[Pass], Any]) -> tuple[Tensor, Tensor]:
    """Var = Σ (∂f/∂ε)² at ε = 0, from the whole Jacobian: per coordinate `(B, D)`, and per layer call `(calls, B)`."""
    probe = Given(None)
    f(probe)
    eps = tuple(torch.zeros(s, dtype=torch.float64) for s in probe.shapes)
    jacobians = torch.autograd.functional.jacobian(lambda *e: f(Given(e)).flatten(1), eps)
    squares = torch.stack([j.square().flatten(2).sum(2) for j in jacobians])  # (calls, B, D)
    return squares.sum(0), squares.sum(2)


def jacobian_moments(field: Field, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and first-order variance of the velocity, the variance from the whole Jacobian ∂v/∂ε."""
    var, _ = jacobian_var(lambda given: field.run(given, x, t))
    return field(x, t).detach(), var.reshape(x.shape)


# ---- flows ----------------------------------------------------------------------------------------------------------


def integrate(velocity: Callable[[Tensor, float], Tensor], x: Tensor, times: Sequence[float], stepper: str) -> Tensor:
    """Integrate in flat space, step by step."""
    for t, after in pairwise(times):
        dt = after - t
        v = velocity(x, t)
        if stepper == "euler":
            x = x + dt * v
        elif stepper == "midpoint":
            x = x + dt * velocity(x + dt / 2 * v, t + dt / 2)
        elif stepper == "heun":
            x = x + dt * (v + velocity(x + dt * v, after)) / 2
        else:
            raise AssertionError(stepper)
    return x


def average_precision(score: Sequence[float], positive: Sequence[bool]) -> float:
    """Return Σ (R_n − R_{n−1}) P_n over distinct thresholds."""
    total, before = 0.0, 0.0
    positives = sum(positive)
    for threshold in sorted(set(score), reverse=True):
        kept = [p for s, p in zip(score, positive, strict=True) if s >= threshold]
        recall = sum(kept) / positives
        total += (recall - before) * sum(kept) / len(kept)
        before = recall
    return total
