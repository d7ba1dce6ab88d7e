"""Numbers made of many entries, to first order: norms, spreads, log-sums, the largest; and the largest of a window."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import FIRST_ORDER, Gaussian, refusal, register

__all__: list[str] = []

T = Tensor

_ARGUMENTS: dict[Any, tuple[str, ...]] = {  # the names of what follows the input
    torch.linalg.vector_norm: ("ord", "dim", "keepdim"), torch.linalg.norm: ("ord", "dim", "keepdim"),
    torch.norm: ("p", "dim", "keepdim"),
    T.norm: ("p", "dim", "keepdim"), torch.logsumexp: ("dim", "keepdim"), T.logsumexp: ("dim", "keepdim"),
    torch.amax: ("dim", "keepdim"), T.amax: ("dim", "keepdim"), torch.amin: ("dim", "keepdim"),
    T.amin: ("dim", "keepdim"), torch.var: ("dim", "unbiased", "keepdim"), T.var: ("dim", "unbiased", "keepdim"),
    torch.std: ("dim", "unbiased", "keepdim"), T.std: ("dim", "unbiased", "keepdim"), torch.prod: ("dim", "keepdim"),
    T.prod: ("dim", "keepdim"),
}  # fmt: skip


@register(*_ARGUMENTS, exactness=FIRST_ORDER)
def reduction(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """f(μ), Σ_j (∂f/∂x_j)²σ_j². Each entry goes into one number, so one gradient of their sum has every slope."""
    x, *rest = args
    given = {**dict(zip(_ARGUMENTS[func], rest, strict=False)), **kwargs}
    dim = given.get("dim")
    if isinstance(dim, bool):  # x.var(False): unbiased, not a dimension
        raise NoRuleError(refusal(func, args, kwargs))
    slope = torch.func.grad(lambda z: func(z, *rest, **kwargs).sum())(x._mean)
    dims = tuple(range(x.ndim)) if dim is None or dim == () else dim
    var = torch.sum(slope.square() * x._var, dims, keepdim=given.get("keepdim", False))
    return Gaussian(func(x._mean, *rest, **kwargs), var, x._closure)


@register(torch.var_mean, torch.std_mean, exactness=FIRST_ORDER)
def spread_and_mean(func: Any, args: Any, kwargs: Any) -> tuple[Gaussian, Gaussian]:
    """Each as it is alone: the mean is exact for independent inputs."""
    x, *rest = args
    spread, arguments = (torch.var, torch.std)[func is torch.std_mean], ("dim", "unbiased", "keepdim")
    given = {**dict(zip(arguments, rest, strict=False)), **kwargs}
    dims = given.get("dim")
    dims = tuple(range(x.ndim)) if dims is None or dims == () else dims
    found = reduction(spread, args, kwargs)  # which refuses what is no dimension
    return found, torch.mean(x, dims, keepdim=given.get("keepdim", False))  # type: ignore[return-value]


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
