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
(RMS norm), nothing is subtracted, V is the mean of μ² + σ², and J = δ_ij − z_i z_j / n. Where the closure is of first
order, so is V: without its term in σ², and the mean is the plain network's.

By running statistics (batch norm in evaluation mode) it is a known line, and exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError, ShapeError
from fmwc.moments.closures import Moments, keeps_the_mean
from fmwc.moments.gaussian import EXACT, Gaussian, mean_of, refusal, register, walk

__all__ = ["IN_EXPECTATION"]

IN_EXPECTATION = "first order, statistics in expectation"


Known = tuple[Any, Tensor]  # the plain network's m (none by the root) and 1/s²
Over = Sequence[Sequence[int]]  # dimensions, which are averaged over one set after the other


def _average(value: Tensor, over: Over) -> Tensor:
    """Not over one flattened dimension: that is out of order where channels come last in memory."""
    for dims in over:
        value = value.mean(tuple(dims), keepdim=True)
    return value


def normalised(mean: Tensor, var: Tensor, eps: float, over: Over = ((-1,),), known: Known | None = None) -> Moments:
    r"""z and its variance over some dimensions, the square of J multiplied out so that no n × n matrix is built.

    .. math:: Var[z_i] = \frac{1}{s^2} \Bigl[ σ_i^2 \Bigl(1 - \frac{2 (1 + z_i^2)}{n}\Bigr)
        + \frac1n \bigl( \overline{σ^2} + 2 z_i \overline{z σ^2} + z_i^2 \overline{z^2 σ^2} \bigr) \Bigr]

    All averages but the first are of what is centred and not yet scaled, so that a compiler takes them in one go.
    """
    n = math.prod(mean.shape[i] for dims in over for i in dims)
    centred = mean - (_average(mean, over) if known is None else known[0])
    square = centred.square()
    noise, first, second = (_average(v, over) for v in (var, centred * var, square * var))
    precision = 1 / (_average(square, over) + (1 - 1 / n) * noise + eps) if known is None else known[1]
    own = var * (1 - 2 * (1 + precision * square) / n)
    # Two factors, neither of them large: 1/s⁴ is beyond single precision where a group is all zero.
    shared = noise + 2 * precision * centred * first + (precision * square) * (precision * second)
    # A sum of squares, but for rounding.
    return Moments(centred * precision.sqrt(), (precision * (own + shared / n)).clamp_min(0))


def normalised_by_root(
    mean: Tensor, var: Tensor, eps: float, over: Over = ((-1,),), known: Known | None = None
) -> Moments:
    r"""The same by the root of the mean square.

    .. math:: Var[z_i] = \frac{1}{s^2} \Bigl[ σ_i^2 \Bigl(1 - \frac{2 z_i^2}{n}\Bigr)
        + \frac{z_i^2}{n} \overline{z^2 σ^2} \Bigr]
    """
    n, square = math.prod(mean.shape[i] for dims in over for i in dims), mean.square()
    precision = 1 / (_average(square + var, over) + eps) if known is None else known[1]
    own = var * (1 - 2 * precision * square / n)
    shared = (precision * square) * (precision * _average(square * var, over))
    return Moments(mean * precision.sqrt(), (precision * (own + shared / n)).clamp_min(0))


class Call(NamedTuple):
    """A normalisation with its arguments told apart.

    Arguments:
        over: What is averaged over, of channels told into groups where there are `groups`.
        known: The plain network's own statistics, by the operation that it computes them with, so that a compiler sees
            that it is one.
    """

    x: Any
    over: Over
    weight: Any
    bias: Any
    eps: float
    known: Callable[[Tensor], Known | None]
    normalise: Callable[[Tensor, Tensor, float, Over, Known | None], Moments] = normalised
    groups: int = 0


def _by_channel(value: Any, x: Tensor) -> Any:  # (C,) -> (C, 1, …)
    return None if value is None else value.reshape(-1, *[1] * (x.ndim - 2))


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Call:
    def known(mean: Tensor) -> Known:
        mean = mean if weight is None else mean.to(weight.dtype)  # under autocast it may be in half
        batch, channels, *space = mean.shape
        size = batch, channels, math.prod(space), num_groups, eps
        _, centre, root = torch.native_group_norm(mean.contiguous(), weight, bias, *size)
        centre, root = (v[(..., *[None] * (mean.ndim - 1))] for v in (centre, root))
        return centre, root.square()

    over = [dims for dims in (range(3, input.ndim + 1), [2]) if dims]  # of (B, G, C/G, *)
    return Call(input, over, _by_channel(weight, input), _by_channel(bias, input), eps, known, groups=num_groups)


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

    def known(mean: Tensor) -> Known:
        _, centre, root = torch.native_layer_norm(mean.contiguous(), normalized_shape, weight, bias, eps)
        return centre, root.square()

    return Call(input, [range(-count, 0)], weight, bias, eps, known)


def _rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Call:
    call = _layer_norm(input, normalized_shape, weight)
    small = torch.finfo(input.dtype).eps if eps is None else eps
    return call._replace(eps=small, known=_root(call.over, small), normalise=normalised_by_root)


def _root(over: Over, eps: float) -> Callable[[Tensor], Known]:
    return lambda mean: (None, 1 / (_average(mean.square(), over) + eps))


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

    def by_running(mean: Tensor, var: Tensor, eps: float, over: Over, known: Known | None) -> Moments:
        return Moments((mean - centre) / (spread + eps).sqrt(), var / (spread + eps))

    return Call(input, (), _by_channel(weight, input), _by_channel(bias, input), eps, lambda _: None, by_running)


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
    return _group_norm(input, input.shape[1], weight, bias, eps)


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
    plain = keeps_the_mean(x._closure)
    known = call.known(x._mean) if plain else None
    mean, var = (v.unflatten(1, (call.groups, -1)) if call.groups else v for v in (x._mean, x._var))
    mean, var = (v.reshape(x.shape) for v in call.normalise(mean, var, call.eps, call.over, known))
    if call.weight is not None:
        mean, var = mean * call.weight, var * call.weight.square()
    if call.bias is not None:
        mean = mean + call.bias
    if plain:
        mean = func(*walk(list(args), mean_of), **{k: mean_of(v) for k, v in kwargs.items()})
    return Gaussian(mean, var, x._closure)


@register(F.normalize, exactness=IN_EXPECTATION, family="normalise")
def unit_length(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """x/‖x‖ is the RMS norm over √n."""

    def bind(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Any:
        return input, p, dim, eps

    x, p, dim, eps = bind(*args, **kwargs)
    if p != 2 or not isinstance(dim, int):
        raise NoRuleError(refusal(func, args, kwargs))
    n, plain, small = x.shape[dim], keeps_the_mean(x._closure), eps**2 / x.shape[dim]
    known = _root([[dim]], small)(x._mean) if plain else None
    mean, var = normalised_by_root(x._mean, x._var, small, [[dim]], known)
    return Gaussian(F.normalize(x._mean, p, dim, eps) if plain else mean / n**0.5, var / n, x._closure)
