"""Entries that are asked about, moved, repeated, dropped or put among others, never mixed: exact whatever they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments.gaussian import EXACT, Gaussian, known, mean_of, moments_of, refusal, register, walk
from fmwc.moments.operands import closure_of, getter, on, paired, variance_at

__all__: list[str] = []

T = Tensor

# ---- what does not depend on the values ---------------------------------------------------------------------------

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
    """Shape, type, place: asked of the mean."""
    args, kwargs = on(mean_of, args, kwargs)
    return func(*args, **kwargs)


@register(
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, T.new_zeros, T.new_ones, T.new_empty,
    T.new_full, T.new_tensor, exactness=EXACT,
)  # fmt: skip
def creation(func: Any, args: Any, kwargs: Any) -> Any:
    """New entries have no variance; they are Gaussian all the same, so that a network may write into them."""
    closure = closure_of(args, kwargs)
    args, kwargs = on(mean_of, args, kwargs)
    made = func(*args, **kwargs)
    return known(made, closure) if made.is_floating_point() else made


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
    """Views, slices, indices, copies, types: the same to μ and σ²."""
    means, mean_kwargs = on(mean_of, args, kwargs)
    variances, var_kwargs = on(variance_at, args, kwargs)
    return paired(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(T.view_as, T.reshape_as, T.expand_as, T.type_as, T.to, exactness=EXACT, family="rearrange", complex=True)
def rearrange_like(func: Any, args: Any, kwargs: Any) -> Any:
    """The shape or the type of another tensor: of that one, nothing else matters."""
    x, *like = args
    like = [walk(v, mean_of) for v in like]
    mean = func(mean_of(x), *like, **kwargs)
    return Gaussian(mean, func(x._var, *like, **kwargs), x._closure) if isinstance(x, Gaussian) else mean


@register(T.__iter__, exactness=EXACT, family="rearrange", complex=True)
def rows(func: Any, args: Any, kwargs: Any) -> Any:
    return iter(args[0].unbind(0))


@register(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, exactness=EXACT)
def dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Nothing, when it is off; on, it is refused."""

    def bind(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return input, training

    x, training = bind(*args, **kwargs)
    if training:
        raise NoRuleError("dropout is on, which is noise of its own; call network.eval() first, or use 'monte_carlo'")
    return x


# ---- entries put among others ---------------------------------------------------------------------------------------

_PLACES: dict[Any, tuple[int | str, ...]] = {  # which arguments are values; the others say where
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
    """The variance of a value that is put somewhere: what is not Gaussian is known, whatever its type."""
    if isinstance(value, (Tensor, list, tuple)):
        return walk(value, lambda v: moments_of(v).var)
    return 0


@register(*_PLACES, exactness=EXACT)
def placed(func: Any, args: Any, kwargs: Any) -> Any:
    """Joined, masked, scattered: what is put in brings its own variance, and what is known none."""
    values = _PLACES[func]
    variances = [_spread(a) if i in values else a for i, a in enumerate(args)]
    var_kwargs = {k: _spread(v) if k in values else v for k, v in kwargs.items()}
    means, mean_kwargs = on(mean_of, args, kwargs)
    return Gaussian(func(*means, **mean_kwargs), func(*variances, **var_kwargs), closure_of(args, kwargs))


@register(T.copy_, T.fill_, T.zero_, T.__setitem__, exactness=EXACT, family="placed")
def written(func: Any, args: Any, kwargs: Any) -> Any:
    """Both tensors of the target are written where they lie, so that its views see it."""
    target, *where, value = (*args, 0) if func is T.zero_ else args
    if not isinstance(target, Gaussian):
        raise NoRuleError(refusal(func, args, kwargs))
    for part, part_of in ((target._var, _spread), (target._mean, mean_of)):
        func(part, *where, *([] if func is T.zero_ else [part_of(value)]))
    return None if func is T.__setitem__ else target


@register(F.pad, exactness=EXACT)
def pad(func: Any, args: Any, kwargs: Any) -> Gaussian:
    """A constant is known, so its variance is zero; reflected, replicated or wrapped entries are copies."""
    if kwargs["mode"] != "constant":
        return rearrange(func, args, kwargs)
    x, *rest = args
    return Gaussian(func(x._mean, *rest, **kwargs), func(x._var, *rest, **{**kwargs, "value": 0}), x._closure)
