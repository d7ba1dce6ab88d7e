r"""Normalisations: entries less their group's mean, over its standard deviation.

A group holds many entries, so its statistics hardly vary: they are taken in expectation. Over n entries (μ_i, σ_i²)
with weight γ and bias β,

.. math::
    V &= \frac1n \sum_j (μ_j - \bar μ)^2 + \Bigl(1 - \frac1n\Bigr) \frac1n \sum_j σ_j^2, \qquad
    s = \sqrt{V + ε}, \qquad z_i = (μ_i - \bar μ) / s \\
    E[y_i] &≈ γ_i z_i + β_i, \qquad Var[y_i] ≈ \frac{γ_i^2}{s^2} \sum_j J_{ij}^2 σ_j^2, \qquad
    J_{ij} = δ_{ij} - \frac{1 + z_i z_j}{n}

where J/s is the Jacobian of normalisation. V is exact for independent entries and the rest is first order in σ²; what
that leaves out falls as 1/n, so that a large group may be as noisy as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError, ShapeError
from fmwc.moments.closures import Moments
from fmwc.moments.gaussian import Gaussian, refusal, register

__all__ = ["IN_EXPECTATION"]

IN_EXPECTATION = "first order, statistics in expectation"


def normalised(mean: Tensor, var: Tensor, eps: float) -> Moments:  # (…, n), (…, n)
    r"""z and its variance over the last dimension, the square of J multiplied out so that no n × n matrix is built.

    .. math:: Var[z_i] = \frac{1}{s^2} \Bigl[ σ_i^2 \Bigl(1 - \frac{2 (1 + z_i^2)}{n}\Bigr)
        + \frac1n \bigl( \overline{σ^2} + 2 z_i \overline{z σ^2} + z_i^2 \overline{z^2 σ^2} \bigr) \Bigr]
    """
    n = mean.shape[-1]

    def average(value: Tensor) -> Tensor:
        return value.mean(-1, keepdim=True)

    centred = mean - average(mean)
    precision = 1 / (average(centred.square()) + (1 - 1 / n) * average(var) + eps)
    z = centred * precision.sqrt()
    own = var * (1 - 2 * (1 + z.square()) / n)
    shared = average(var) + 2 * z * average(z * var) + z.square() * average(z.square() * var)
    return Moments(z, (precision * (own + shared / n)).clamp_min(0))  # a sum of squares, but for rounding


class Call(NamedTuple):
    """A normalisation with its arguments told apart; `grouped` lays each group out along the last dimension."""

    x: Any
    grouped: Callable[[Tensor], Tensor]
    weight: Any
    bias: Any
    eps: float


def _by_channel(value: Tensor | None, x: Tensor) -> Tensor | None:  # (C,) -> (C, 1, …)
    return None if value is None else value.reshape(-1, *[1] * (x.ndim - 2))


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Call:
    def grouped(value: Tensor) -> Tensor:  # (B, C, *) -> (B, G, n)
        return value.unflatten(1, (num_groups, -1)).flatten(2)

    return Call(input, grouped, _by_channel(weight, input), _by_channel(bias, input), eps)


def _layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Call:
    count = len(normalized_shape)
    if tuple(input.shape[-count:]) != tuple(normalized_shape):
        raise ShapeError(f"layer_norm over {tuple(normalized_shape)} was given entries of shape {tuple(input.shape)}")
    return Call(input, lambda value: value.flatten(-count), weight, bias, eps)


def _instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call | None:
    if running_mean is not None or running_var is not None or not use_input_stats:
        return None  # it would write into the running statistics, or normalise by them
    return Call(input, lambda value: value.flatten(2), _by_channel(weight, input), _by_channel(bias, input), eps)


CALLS: dict[Callable[..., Any], Callable[..., Call | None]] = {
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
}


@register(*CALLS, exactness=IN_EXPECTATION)
def normalise(func: Any, args: Any, kwargs: Any) -> Gaussian:
    call = CALLS[func](*args, **kwargs)
    if call is None or [isinstance(v, Gaussian) for v in (call.x, call.weight, call.bias)] != [True, False, False]:
        raise NoRuleError(refusal(func, args, kwargs))
    x = call.x
    mean, var = (v.reshape(x.shape) for v in normalised(call.grouped(x._mean), call.grouped(x._var), call.eps))
    if call.weight is not None:
        mean, var = mean * call.weight, var * call.weight.square()
    return Gaussian(mean if call.bias is None else mean + call.bias, var, x._closure)
