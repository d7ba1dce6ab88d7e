r"""Rules for normalisations, and for norms, spreads and extremes.

A normalisation subtracts the mean of a group of entries and divides by its standard deviation. Groups are large, so
their statistics are replaced by expectations. Over n entries (μ_i, σ_i²) with weight γ and bias β,

.. math::
    V &= \frac1n \sum_j (μ_j - \bar μ)^2 + \Bigl(1 - \frac1n\Bigr) \frac1n \sum_j σ_j^2, \qquad
    s = \sqrt{V + ε}, \qquad z_i = (μ_i - \bar μ) / s \\
    E[y_i] &≈ γ_i z_i + β_i, \qquad Var[y_i] ≈ \frac{γ_i^2}{s^2} \sum_j J_{ij}^2 σ_j^2, \qquad
    J_{ij} = δ_{ij} - \frac{1 + z_i z_j}{n}

where J/s is the Jacobian of normalisation. V is exact for independent entries and the rest is first order in σ², with
an error of order 1/n. In an RMS norm, nothing is subtracted, V is the mean of μ² + σ², and J = δ_ij − z_i z_j / n. With
a closure of first order, V omits its term in σ², and the mean is the plain network's.

With running statistics (batch norm in evaluation mode), normalisation is linear and the rule is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError, ShapeError
from fmwc.moments.gaussian import (
    EXACT,
    FIRST_ORDER,
    Gaussian,
    Moments,
    arguments,
    mean_of,
    preserves_mean,
    refusal,
    register,
    walk,
)

T = Tensor

IN_EXPECTATION = "first order, statistics in expectation"


Known = tuple[Any, Tensor]  # the plain network's m (none in an RMS norm) and 1/s²
Over = Sequence[Sequence[int]]  # sets of dimensions, averaged over one after the other


def _average(value: Tensor, over: Over) -> Tensor:
    """Return the average over sets of dimensions; flattening them would reorder memory with channels last."""
    for dims in over:
        value = value.mean(tuple(dims), keepdim=True)
    return value


def normalised(mean: Tensor, var: Tensor, eps: float, over: Over = ((-1,),), known: Known | None = None) -> Moments:
    r"""Return z and its variance over some dimensions, with J² expanded so that no n × n matrix is built. First order.

    .. math:: Var[z_i] = \frac{1}{s^2} \Bigl[ σ_i^2 \Bigl(1 - \frac{2 (1 + z_i^2)}{n}\Bigr)
        + \frac1n \bigl( \overline{σ^2} + 2 z_i \overline{z σ^2} + z_i^2 \overline{z^2 σ^2} \bigr) \Bigr]

    All averages but the first are of centred, unscaled values, so that a compiler can fuse them.
    """
    n = math.prod(mean.shape[i] for dims in over for i in dims)
    centred = mean - (_average(mean, over) if known is None else known[0])
    square = centred.square()
    noise, first, second = (_average(v, over) for v in (var, centred * var, square * var))
    precision = 1 / (_average(square, over) + (1 - 1 / n) * noise + eps) if known is None else known[1]
    diagonal = var * (1 - 2 * (1 + precision * square) / n)
    # Two moderate factors, because 1/s⁴ overflows single precision if a group is all zero.
    shared = noise + 2 * precision * centred * first + (precision * square) * (precision * second)
    # Non-negative up to rounding.
    return Moments(centred * precision.sqrt(), (precision * (diagonal + shared / n)).clamp_min(0))


def normalised_by_root(
    mean: Tensor, var: Tensor, eps: float, over: Over = ((-1,),), known: Known | None = None
) -> Moments:
    r"""Return z and its variance for the RMS norm. First order.

    .. math:: Var[z_i] = \frac{1}{s^2} \Bigl[ σ_i^2 \Bigl(1 - \frac{2 z_i^2}{n}\Bigr)
        + \frac{z_i^2}{n} \overline{z^2 σ^2} \Bigr]
    """
    n, square = math.prod(mean.shape[i] for dims in over for i in dims), mean.square()
    precision = 1 / (_average(square + var, over) + eps) if known is None else known[1]
    diagonal = var * (1 - 2 * precision * square / n)
    shared = (precision * square) * (precision * _average(square * var, over))
    return Moments(mean * precision.sqrt(), (precision * (diagonal + shared / n)).clamp_min(0))


class Call(NamedTuple):
    """The arguments of a normalisation.

    Arguments:
        over: The dimensions of the statistics, of channels split into groups if `groups` is not 0.
        known: Computes the plain network's statistics with the network's own operation, which a compiler can share.
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
        mean = mean if weight is None else mean.to(weight.dtype)  # half precision under autocast
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
        raise ShapeError(f"layer_norm over {tuple(normalized_shape)} got an input of shape {tuple(input.shape)}")

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
        return None  # batch statistics mix samples
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
        return None  # it would update the running statistics
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
    plain = preserves_mean(x._closure)
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
    """x/‖x‖, which is the RMS norm divided by √n."""
    x, p, dim, eps = arguments(args, kwargs, "input", p=2.0, dim=1, eps=1e-12)
    if p != 2 or not isinstance(dim, int):
        raise NoRuleError(refusal(func, args, kwargs))
    n, plain, small = x.shape[dim], preserves_mean(x._closure), eps**2 / x.shape[dim]
    known = _root([[dim]], small)(x._mean) if plain else None
    mean, var = normalised_by_root(x._mean, x._var, small, [[dim]], known)
    return Gaussian(F.normalize(x._mean, p, dim, eps) if plain else mean / n**0.5, var / n, x._closure)


# ---- norms, spreads and extremes -------------------------------------------------------------------------------------

_REDUCTIONS: dict[Any, tuple[str, ...]] = {  # with the names of their arguments after the input
    **dict.fromkeys((torch.linalg.vector_norm, torch.linalg.norm), ("ord", "dim", "keepdim")),
    **dict.fromkeys((torch.norm, T.norm), ("p", "dim", "keepdim")),
    **dict.fromkeys((torch.logsumexp, T.logsumexp, torch.prod, T.prod), ("dim", "keepdim")),
    **dict.fromkeys((torch.amax, T.amax, torch.amin, T.amin), ("dim", "keepdim")),
    **dict.fromkeys((torch.var, T.var, torch.std, T.std), ("dim", "unbiased", "keepdim")),
}


@register(*_REDUCTIONS, exactness=FIRST_ORDER)
def reduction(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """f(μ), Σ_j (∂f/∂x_j)²σ_j². Each entry affects one result, so the gradient of the results' sum holds every
    derivative.
    """
    x, *rest = args
    given = {**dict(zip(_REDUCTIONS[func], rest, strict=False)), **kwargs}
    dim = given.get("dim")
    if isinstance(dim, bool):  # x.var(False): unbiased, not a dimension
        raise NoRuleError(refusal(func, args, kwargs))
    slope = torch.func.grad(lambda z: func(z, *rest, **kwargs).sum())(x._mean)
    dims = tuple(range(x.ndim)) if dim is None or dim == () else dim
    var = torch.sum(slope.square() * x._var, dims, keepdim=given.get("keepdim", False))
    return Gaussian(func(x._mean, *rest, **kwargs), var, x._closure)


@register(torch.var_mean, torch.std_mean, exactness=FIRST_ORDER)
def spread_and_mean(func: Any, args: Any, kwargs: Any) -> tuple[Gaussian, Gaussian]:
    """The rules of its two parts; the mean is exact for independent inputs."""
    x, dims, _, keepdim = arguments(args, kwargs, "input", dim=None, unbiased=True, keepdim=False)
    spread = reduction(torch.std if func is torch.std_mean else torch.var, args, kwargs)  # raises if dim is a bool
    dims = tuple(range(x.ndim)) if dims is None or dims == () else dims
    return spread, torch.mean(x, dims, keepdim=keepdim)  # type: ignore[return-value]


_WINDOWS: dict[Any, tuple[Any, int]] = {
    F.max_pool1d: (F.max_pool1d_with_indices, 1),
    F.max_pool2d: (F.max_pool2d_with_indices, 2),
    F.max_pool3d: (F.max_pool3d_with_indices, 3),
    F.adaptive_max_pool1d: (F.adaptive_max_pool1d_with_indices, 1),
    F.adaptive_max_pool2d: (F.adaptive_max_pool2d_with_indices, 2),
    F.adaptive_max_pool3d: (F.adaptive_max_pool3d_with_indices, 3),
}


@register(*_WINDOWS, exactness=FIRST_ORDER)
def largest_of_a_window(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """The μ and σ² of the entry with the largest mean."""
    if kwargs.pop("return_indices", False):
        raise NoRuleError(refusal(func, args, kwargs))
    x, *rest = args
    pool, dims = _WINDOWS[func]
    mean, index = pool(x._mean, *rest, **kwargs)
    var = x._var.flatten(-dims).gather(-1, index.flatten(-dims)).view_as(mean)
    return Gaussian(mean, var, x._closure)
