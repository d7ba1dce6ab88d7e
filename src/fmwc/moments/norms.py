r"""Normalisations: entries less their group's mean, over its standard deviation.

A group holds many entries, so its statistics hardly vary: they are taken in expectation. Over n entries (μ_i, σ_i²)
with weight γ and bias β,

.. math::
    V &= \frac1n \sum_j (μ_j - \bar μ)^2 + \Bigl(1 - \frac1n\Bigr) \frac1n \sum_j σ_j^2, \qquad
    s = \sqrt{V + ε}, \qquad z_i = (μ_i - \bar μ) / s \\
    E[y_i] &≈ γ_i z_i + β_i, \qquad Var[y_i] ≈ \frac{γ_i^2}{s^2} \sum_j J_{ij}^2 σ_j^2, \qquad
    J_{ij} = δ_{ij} - \frac{1 + z_i z_j}{n}

where J/s is the Jacobian of normalisation. V is exact for independent entries and the rest is first order in σ²; what
that leaves out falls as 1/n, so that a large group may be as noisy as it likes. By the root of the mean square alone
(RMS norm), nothing is subtracted, V is the mean of μ² + σ², and J = δ_ij − z_i z_j / n.

By running statistics (batch norm in evaluation mode) it is a known line, and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError, ShapeError
from fmwc.moments.closures import Moments
from fmwc.moments.gaussian import EXACT, Gaussian, refusal, register

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


def normalised_by_root(mean: Tensor, var: Tensor, eps: float) -> Moments:  # (…, n), (…, n)
    r"""The same by the root of the mean square.

    .. math:: Var[z_i] = \frac{1}{s^2} \Bigl[ σ_i^2 \Bigl(1 - \frac{2 z_i^2}{n}\Bigr)
        + \frac{z_i^2}{n} \overline{z^2 σ^2} \Bigr]
    """
    n = mean.shape[-1]
    precision = 1 / ((mean.square() + var).mean(-1, keepdim=True) + eps)
    z = mean * precision.sqrt()
    shared = z.square() * (z.square() * var).mean(-1, keepdim=True)
    return Moments(z, (precision * (var * (1 - 2 * z.square() / n) + shared / n)).clamp_min(0))


class Call(NamedTuple):
    """A normalisation with its arguments told apart; `grouped` lays each group out along the last dimension."""

    x: Any
    grouped: Callable[[Tensor], Tensor]
    weight: Any
    bias: Any
    eps: float
    normalise: Callable[[Tensor, Tensor, float], Moments] = normalised


def _by_channel(value: Any, x: Tensor) -> Any:  # (C,) -> (C, 1, …)
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


def _rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Call:
    call = _layer_norm(input, normalized_shape, weight)
    return call._replace(eps=torch.finfo(input.dtype).eps if eps is None else eps, normalise=normalised_by_root)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call | None:
    if training or running_mean is None or running_var is None:
        return None  # statistics of a batch would mix its samples
    centre, spread = _by_channel(running_mean, input), _by_channel(running_var, input)

    def by_running(mean: Tensor, var: Tensor, eps: float) -> Moments:
        return Moments((mean - centre) / (spread + eps).sqrt(), var / (spread + eps))

    return Call(input, lambda value: value, _by_channel(weight, input), _by_channel(bias, input), eps, by_running)


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
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None or running_var is not None:
        return None  # it would write into the running statistics
    return Call(input, lambda value: value.flatten(2), _by_channel(weight, input), _by_channel(bias, input), eps)


CALLS: dict[Callable[..., Any], Callable[..., Call | None]] = {
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
}


@register(F.batch_norm, exactness=EXACT, family="batch norm by running statistics")
@register(
    F.group_norm, torch.group_norm, F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.instance_norm,
    exactness=IN_EXPECTATION,
)  # fmt: skip
def normalise(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """(μ − m)/s, and the squared Jacobian times σ²; running statistics m and s are known."""
    call = CALLS[func](*args, **kwargs)
    if call is None or [isinstance(v, Gaussian) for v in (call.x, call.weight, call.bias)] != [True, False, False]:
        raise NoRuleError(refusal(func, args, kwargs))
    x = call.x
    found = call.normalise(call.grouped(x._mean), call.grouped(x._var), call.eps)
    mean, var = (v.reshape(x.shape) for v in found)
    if call.weight is not None:
        mean, var = mean * call.weight, var * call.weight.square()
    return Gaussian(mean if call.bias is None else mean + call.bias, var, x._closure)


@register(F.normalize, exactness=IN_EXPECTATION, family="normalise")
def unit_length(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """x/‖x‖ is the RMS norm over √n."""

    def bind(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Any:
        return input, p, dim, eps

    x, p, dim, eps = bind(*args, **kwargs)
    if p != 2 or not isinstance(dim, int):
        raise NoRuleError(refusal(func, args, kwargs))
    n = x.shape[dim]
    mean, var = normalised_by_root(x._mean.movedim(dim, -1), x._var.movedim(dim, -1), eps**2 / n)
    return Gaussian((mean / n**0.5).movedim(-1, dim), (var / n).movedim(-1, dim), x._closure)
