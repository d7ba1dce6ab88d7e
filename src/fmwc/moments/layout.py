"""Rules that move entries (exact), and rules that sum entries with known weights.

For independent entries and a known matrix M, Var[M x] = M² σ², with M squared elementwise. No rule builds M.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import (
    EXACT,
    INDEPENDENT,
    Gaussian,
    arguments,
    closure_of,
    getter,
    known,
    mean_of,
    moments_of,
    on,
    paired,
    refusal,
    register,
    variance_at,
    walk,
)

T = Tensor

# ---- metadata and creation ---------------------------------------------------------------------------

_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta",
    "is_nested", "is_sparse", "is_quantized", "is_mps", "is_xpu", "itemsize", "nbytes",
)  # fmt: skip
_QUESTIONS = (
    T.size, T.dim, T.ndimension, T.numel, T.nelement, torch.numel, T.stride, T.is_contiguous, T.is_floating_point,
    torch.is_floating_point, T.is_complex, torch.is_complex, T.element_size, T.__len__, T.__hash__, T.get_device,
)  # fmt: skip


@register(*(getter(p) for p in _PROPERTIES), *_QUESTIONS, exactness=EXACT, complex=True)
def metadata(func: Any, args: Any, kwargs: Any) -> Any:
    """Shape, type and device of the mean."""
    args, kwargs = on(mean_of, args, kwargs)
    return func(*args, **kwargs)


@register(
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, T.new_zeros, T.new_ones, T.new_empty,
    T.new_full, T.new_tensor, exactness=EXACT,
)  # fmt: skip
def creation(func: Any, args: Any, kwargs: Any) -> Any:
    """New entries with zero variance; they are Gaussian, so that a network may write into them."""
    closure = closure_of(args, kwargs)
    args, kwargs = on(mean_of, args, kwargs)
    created = func(*args, **kwargs)
    return known(created, closure) if created.is_floating_point() else created


# ---- moves ----------------------------------------------------------------------------------------------------------

_MOVES = (
    T.reshape, torch.reshape, T.view, T.flatten, torch.flatten, T.ravel, torch.ravel,
    T.unflatten, torch.unflatten, T.permute, torch.permute, T.transpose, torch.transpose, T.swapaxes, torch.swapaxes,
    T.swapdims, torch.swapdims, T.t, torch.t, getter("mT"), getter("T"), T.movedim, torch.movedim, T.moveaxis,
    torch.moveaxis, T.squeeze, torch.squeeze, T.unsqueeze, torch.unsqueeze, T.expand, T.broadcast_to,
    torch.broadcast_to, T.repeat, T.repeat_interleave, torch.repeat_interleave, T.tile, torch.tile, T.contiguous,
    T.clone, torch.clone, T.detach, getter("data"), T.float, T.double, T.half, T.bfloat16, T.type,
    T.cpu, T.cuda, T.__getitem__, T.select, torch.select, T.narrow, torch.narrow, T.chunk, torch.chunk, T.split,
    torch.split, T.split_with_sizes, torch.split_with_sizes, T.tensor_split, torch.tensor_split, T.unbind, torch.unbind,
    T.flip, torch.flip, T.roll, torch.roll, T.unfold, T.diagonal, torch.diagonal, torch.diag, torch.diag_embed,
    T.tril, torch.tril, T.triu, torch.triu, torch.rot90, T.index_select, torch.index_select, T.gather, torch.gather,
    T.take_along_dim, torch.take_along_dim, T.masked_select, torch.masked_select, F.embedding, F.unfold,
    F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, torch.view_as_real, torch.view_as_complex, getter("real"),
    getter("imag"),
)  # fmt: skip


@register(*_MOVES, exactness=EXACT, complex=True)
def rearrange(func: Any, args: Any, kwargs: Any) -> Any:
    """Views, slices, indices, copies, types: the same for μ and σ²."""
    means, mean_kwargs = on(mean_of, args, kwargs)
    variances, var_kwargs = on(variance_at, args, kwargs)
    return paired(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(T.view_as, T.reshape_as, T.expand_as, T.type_as, T.to, exactness=EXACT, family="rearrange", complex=True)
def rearrange_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Rearrangement to the shape or type of another tensor, whose values are not used."""
    x, *like = args
    like = [walk(v, mean_of) for v in like]
    mean = func(mean_of(x), *like, **kwargs)
    return Gaussian(mean, func(x._var, *like, **kwargs), x._closure) if isinstance(x, Gaussian) else mean


@register(T.__iter__, exactness=EXACT, family="rearrange", complex=True)
def rows(func: Any, args: Any, kwargs: Any) -> Any:
    return iter(args[0].unbind(0))


@register(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, exactness=EXACT)
def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """The identity in evaluation mode; refused in training mode."""
    x, _, training = arguments(args, kwargs, "input", p=0.5, training=True)
    if training:
        raise NoRuleError("dropout is on; call network.eval() first, or use the monte_carlo estimator")
    return x


# ---- entries put among others ---------------------------------------------------------------------------------------

_PLACES: dict[Any, tuple[int | str, ...]] = {  # the arguments that are values; the others are positions
    torch.cat: (0, "tensors"), torch.concat: (0, "tensors"), torch.concatenate: (0, "tensors"),
    torch.stack: (0, "tensors"), torch.hstack: (0, "tensors"), torch.vstack: (0, "tensors"),
    torch.where: (1, 2), T.where: (0, 2), torch.masked_fill: (0, 2, "value"), T.masked_fill: (0, 2, "value"),
    torch.index_fill: (0, 3, "value"), T.index_fill: (0, 3, "value"), torch.index_copy: (0, 3, "source"),
    T.index_copy: (0, 3, "source"), torch.index_put: (0, 2, "values"), T.index_put: (0, 2, "values"),
    torch.scatter: (0, 3, "src", "value"), T.scatter: (0, 3, "src", "value"),
    torch.select_scatter: (0, 1, "src"), torch.slice_scatter: (0, 1, "src"),
    torch.masked_scatter: (0, 2, "source"), T.masked_scatter: (0, 2, "source"),
}  # fmt: skip


def _spread(value: Any) -> Any:
    """Return the variance of an inserted value; zero unless it is Gaussian."""
    if isinstance(value, (Tensor, list, tuple)):
        return walk(value, lambda v: moments_of(v).var)
    return 0


@register(*_PLACES, exactness=EXACT)
def placed(func: Any, args: Any, kwargs: Any) -> Any:
    """Joined, masked, scattered: entries keep their variance, and known entries have none."""
    values = _PLACES[func]
    variances = [_spread(a) if i in values else a for i, a in enumerate(args)]
    var_kwargs = {k: _spread(v) if k in values else v for k, v in kwargs.items()}
    means, mean_kwargs = on(mean_of, args, kwargs)
    return Gaussian(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(T.copy_, T.fill_, T.zero_, T.__setitem__, exactness=EXACT, family="placed")
def written(func: Any, args: Any, kwargs: Any) -> Any:
    """Written into the memory of the target, so that its views see it."""
    target, *where, value = (*args, 0) if func is T.zero_ else args
    if not isinstance(target, Gaussian):
        raise NoRuleError(refusal(func, args, kwargs))
    for part, part_of in ((target._var, _spread), (target._mean, mean_of)):
        func(part, *where, *([] if func is T.zero_ else [part_of(value)]))
    return None if func is T.__setitem__ else target


@register(F.pad, exactness=EXACT)
def pad(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """A constant has zero variance; reflected, replicated or wrapped entries are copies."""
    if kwargs["mode"] != "constant":
        return rearrange(func, args, kwargs)
    x, *rest = args
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **{**kwargs, "value": 0}), x._closure)


# ---- sums and means --------------------------------------------------------------------------------------------------


@register(torch.sum, T.sum, torch.cumsum, T.cumsum, F.fold, exactness=INDEPENDENT)
def total(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σμ, Σσ²."""
    x, *rest = args
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **kwargs), x._closure)


@register(torch.mean, T.mean, exactness=INDEPENDENT)
def mean(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σμ/n, Σσ²/n²."""
    x, *rest = args
    centre = func(x._mean, *rest, **kwargs)
    return Gaussian(centre, func(x._var, *rest, **kwargs) * (centre.numel() / x._mean.numel()), x._closure)


# ---- by an index -----------------------------------------------------------------------------------------------------


@register(torch.index_add, T.index_add, torch.scatter_add, T.scatter_add, exactness=INDEPENDENT)
def scattered_sum(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Entries added by index (messages to an atom): means add, and so do variances."""
    (means, mean_kwargs), (variances, var_kwargs) = (on(f, args, kwargs) for f in (mean_of, variance_at))
    if "alpha" in var_kwargs:
        var_kwargs["alpha"] = var_kwargs["alpha"] ** 2
    return Gaussian(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(torch.scatter_reduce, T.scatter_reduce, exactness=INDEPENDENT)
def scattered_sum_or_mean(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """A sum, or a mean: the sum of n variances over n²."""
    x, dim, index, src, reduce, include = arguments(
        args, kwargs, "input", "dim", "index", "src", "reduce", include_self=True
    )
    if reduce not in ("sum", "mean"):
        raise NoRuleError(refusal(func, args, kwargs))

    def reduced(f: Any, reduce: str) -> Tensor:
        return func(f(x), dim, index, f(src), reduce, include_self=include)

    var = reduced(variance_at, reduce)
    if reduce == "mean":
        var = var / reduced(lambda v: torch.ones_like(mean_of(v)), "sum")
    return Gaussian(reduced(mean_of, reduce), var, closure_of(args, kwargs))


# ---- in windows ------------------------------------------------------------------------------------------------------

_ADAPTIVE = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}


@register(F.avg_pool2d, F.avg_pool3d, exactness=INDEPENDENT)
def average_pool(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """w Σ_window wσ², where the weight w is one over the window's size, or over the given divisor.

    Padding and windows that cross the edge make w differ between windows. Pooling an image of ones gives cw for a
    window with c entries inside the image, and c if the divisor is 1; w is their ratio.
    """
    x, *rest = args
    ones = x._var.new_ones(1, *x.shape[-2 if func is F.avg_pool2d else -3 :])
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    counting = {**dict(zip(names, rest, strict=False)), **kwargs, "divisor_override": 1}
    weight = func(ones, *rest, **kwargs) / func(ones, **counting)
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **kwargs) * weight, x._closure)


@register(F.avg_pool1d, exactness=INDEPENDENT, family="average pool")
def average_pool_of_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """The pool of an image with one row."""
    x, *window, ceil_mode, count_include_pad = arguments(
        args, kwargs, "input", "kernel_size", stride=None, padding=0, ceil_mode=False, count_include_pad=True
    )
    kernel, stride, padding = (v[0] if isinstance(v, (list, tuple)) else v for v in window)
    sizes = (1, kernel), (1, stride or kernel), (0, padding)
    return F.avg_pool2d(x.unsqueeze(-2), *sizes, ceil_mode, count_include_pad).squeeze(-2)


@register(*_ADAPTIVE, exactness=INDEPENDENT)
def adaptive_average_pool(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Σσ²/n² over windows from ⌊iH/h⌋ to ⌈(i + 1)H/h⌉, with n entries each."""
    x, *rest = args
    centre = func(x._mean, *rest, **kwargs)
    var = func(x._var, *rest, **kwargs)
    for axis in range(-_ADAPTIVE[func], 0):
        side, count = x.shape[axis], centre.shape[axis]
        sizes = var.new_tensor([-(-(i + 1) * side // count) - i * side // count for i in range(count)])
        var = var / sizes.reshape(-1, *[1] * (-1 - axis))
    return Gaussian(centre, var, x._closure)


# ---- between neighbours ----------------------------------------------------------------------------------------------


@register(F.interpolate, exactness=INDEPENDENT)
def interpolate(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """Squared weights. They are separable, and computed for each axis from an identity matrix.

    Nearest neighbours are copies (exact); linear, cubic and area modes are weighted means. `antialias` is refused,
    because torch's weights are wrong for images one entry wide (2.13, CPU).
    """
    (x,) = args
    if kwargs.get("antialias"):
        raise NoRuleError(refusal(func, args, kwargs))
    if kwargs.get("mode", "nearest") in ("nearest", "nearest-exact"):
        return Gaussian(func(x._mean, **kwargs), func(x._var, **kwargs), x._closure)
    sizes = {k: kwargs.pop(k) for k in ("size", "scale_factor")}
    dims = x.ndim - 2

    def along(axis: int, value: Any, other: Any) -> Any:  # the size or factor of this axis
        if value is None:
            return None
        values = value if isinstance(value, (tuple, list)) else [value] * dims
        return [values[i] if i == axis else other for i in range(dims)]

    var = x._var
    for axis in range(dims):
        side = x.shape[2 + axis]
        identity = torch.eye(side, dtype=var.dtype, device=var.device)
        identity = identity.reshape(side, 1, *[side if i == axis else 1 for i in range(dims)])
        options = {k: along(axis, v, 1 if k == "size" else 1.0) for k, v in sizes.items()}
        weights = func(identity, **options, **kwargs).reshape(side, -1)
        var = torch.tensordot(var, weights.square(), ([2 + axis], [0])).movedim(-1, 2 + axis)
    return Gaussian(func(x._mean, **sizes, **kwargs), var, x._closure)
