"""Every rule against a reference: Monte Carlo, an integral, torch's Jacobian, or the operation applied to mean and
variance separately. A rule without a test fails the suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor as T

from fmwc.errors import NoRuleError
from fmwc.moments import (
    EXACT,
    FIRST_ORDER,
    GAUSSIAN,
    IN_EXPECTATION,
    INDEPENDENT,
    QUADRATURE,
    RULES,
    GaussHermite,
    Gaussian,
    moments_of,
)
from tests.moments.operands import POINTWISE, POWERS, SMOOTH, assert_same, gaussian, name_of, plain
from tests.moments.test_attention import ATTENTIONS
from tests.moments.test_inplace import IN_PLACE
from tests.moments.test_norms import NORMS
from tests.reference import assert_within, delta, drawn, integral

# ---- metadata: the answer is the mean's -----------------------------------------------------------------------------

PROPERTIES = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta",
    "is_nested", "is_sparse", "is_quantized", "is_mps", "is_xpu", "itemsize", "nbytes",
)  # fmt: skip
METADATA: dict[Callable[..., Any], tuple[Any, ...]] = {
    **{getattr(T, p).__get__: () for p in PROPERTIES},
    T.size: (1,), T.dim: (), T.ndimension: (), T.numel: (), T.nelement: (), torch.numel: (), T.stride: (),
    T.is_contiguous: (), T.is_floating_point: (), torch.is_floating_point: (), T.is_complex: (), torch.is_complex: (),
    T.element_size: (), T.__len__: (), T.__hash__: (), T.get_device: (),
}  # fmt: skip
CREATION: dict[Callable[..., Any], tuple[Any, ...]] = {
    torch.zeros_like: (), torch.ones_like: (), torch.empty_like: (), torch.full_like: (3.0,), T.new_zeros: (2,),
    T.new_ones: (2,), T.new_empty: (2,), T.new_full: ((2,), 3.0), T.new_tensor: ([1.0, 2.0],),
}  # fmt: skip
UNFILLED = (torch.empty_like, T.new_empty)


@pytest.mark.parametrize("key", METADATA, ids=name_of)
def test_metadata(key):
    x = gaussian(2, 3)
    if key is T.__hash__:  # tensors are hashed by identity
        assert len({x, x}) == 1
        return
    found = key(x, *METADATA[key])
    assert not isinstance(found, T)
    assert found == key(x._mean, *METADATA[key])


@pytest.mark.parametrize("key", CREATION, ids=name_of)
def test_created_tensors_have_zero_variance(key):
    x = gaussian(2, 3)
    found, expected = moments_of(key(x, *CREATION[key])), key(x._mean, *CREATION[key])
    assert (found.mean.shape, found.mean.dtype) == (expected.shape, expected.dtype)
    assert not found.var.any()
    if key not in UNFILLED:
        assert torch.equal(found.mean, expected)
    whole = key(x, *CREATION[key], dtype=torch.long)
    assert not isinstance(whole, Gaussian)  # operations with an index


# ---- rearrange: the same to mean and variance -----------------------------------------------------------------------

X = (2, 4, 6)
INDEX = torch.tensor([2, 0, 1])
PLACE = torch.tensor([[[3, 1, 0, 2, 2, 1]], [[0, 1, 3, 3, 2, 0]]])
LIKE = torch.zeros(4, 12, dtype=torch.float64)
REARRANGE: dict[Callable[..., Any], tuple[Any, ...]] = {
    T.reshape: (4, 12), torch.reshape: ((4, 12),), T.view: (4, 12), T.view_as: (LIKE,), T.reshape_as: (LIKE,),
    T.flatten: (1,), torch.flatten: (1,), T.unflatten: (2, (2, 3)), torch.unflatten: (2, (2, 3)), T.permute: (2, 0, 1),
    torch.permute: ((2, 0, 1),), T.transpose: (0, 2), torch.transpose: (0, 2), T.mT.__get__: (),
    T.movedim: (0, 2), torch.movedim: (0, 2), T.squeeze: (), torch.squeeze: (), T.unsqueeze: (1,),
    torch.unsqueeze: (1,), T.expand: (3, 2, 4, 6), T.expand_as: (torch.zeros(3, 2, 4, 6),),
    T.broadcast_to: ((3, 2, 4, 6),), torch.broadcast_to: ((3, 2, 4, 6),), T.repeat: (1, 2, 1),
    T.repeat_interleave: (2, 1), torch.repeat_interleave: (2, 1), T.tile: (2,), torch.tile: ((2,),), T.contiguous: (),
    T.clone: (), torch.clone: (), T.detach: (), T.to: (torch.float32,), T.float: (), T.double: (), T.half: (),
    T.bfloat16: (), T.type: (torch.float32,), T.type_as: (torch.zeros(1),), T.cpu: (), T.cuda: (),
    T.__getitem__: ((slice(None), INDEX, slice(1, 4)),), T.select: (1, 2), torch.select: (1, 2), T.narrow: (1, 1, 2),
    torch.narrow: (1, 1, 2), T.chunk: (2, 1), torch.chunk: (2, 1), T.split: (2, 1), torch.split: (2, 1),
    T.unbind: (1,), torch.unbind: (1,), T.flip: ((1,),), torch.flip: ((1,),), T.roll: (1, 2), torch.roll: (1, 2),
    T.index_select: (1, INDEX), torch.index_select: (1, INDEX), F.pixel_shuffle: (2,), F.pixel_unshuffle: (2,),
    T.ravel: (), torch.ravel: (), T.swapaxes: (0, 2), torch.swapaxes: (0, 2), T.swapdims: (0, 2),
    torch.swapdims: (0, 2), T.moveaxis: (0, 2), torch.moveaxis: (0, 2), T.data.__get__: (),
    T.split_with_sizes: ([1, 3], 1),
    torch.split_with_sizes: ([1, 3], 1), T.tensor_split: (3, 2), torch.tensor_split: (3, 2), T.unfold: (2, 3, 2),
    T.diagonal: (0, 1, 2), torch.diagonal: (0, 1, 2), torch.diag: (), torch.diag_embed: (1,),
    T.tril: (), torch.tril: (1,),
    T.triu: (), torch.triu: (1,), torch.rot90: (), T.gather: (1, PLACE), torch.gather: (1, PLACE),
    T.take_along_dim: (PLACE, 1), torch.take_along_dim: (PLACE, 1), T.masked_select: (PLACE[:, :1] > 1,),
    torch.masked_select: (PLACE[:, :1] > 1,), F.unfold: ((2, 3), 1, 1, 2), F.channel_shuffle: (2,), T.real.__get__: (),
}  # fmt: skip
# Operations on another shape than X, and operations on several tensors.
SHAPES = {T.t: (2, 3), torch.t: (2, 3), T.T.__get__: (2, 3), T.squeeze: (2, 1, 3), torch.squeeze: (2, 1, 3),
          F.pixel_shuffle: (4, 2, 3), torch.diag: (3,), F.unfold: (2, 3, 4, 5)}  # fmt: skip
REARRANGE |= {T.t: (), torch.t: (), T.T.__get__: ()}
JOINS = {
    torch.cat: (1,),
    torch.concat: (1,),
    torch.concatenate: (1,),
    torch.stack: (1,),
    torch.hstack: (),
    torch.vstack: (),
}
SEVERAL = (
    F.pad,
    F.embedding,
    T.__iter__,
    torch.view_as_real,
    torch.view_as_complex,
    T.imag.__get__,
)  # tested separately


@pytest.mark.parametrize("key", REARRANGE, ids=name_of)
def test_rearrange(key):
    if key is T.cuda and not torch.cuda.is_available():
        pytest.skip("no GPU")
    x = gaussian(*SHAPES.get(key, X))
    args = REARRANGE[key]
    assert_same(key(x, *args), key(x._mean, *args), key(x._var, *args))


@pytest.mark.parametrize("key", JOINS, ids=name_of)
@pytest.mark.parametrize("other", ["gaussian", "float", "mask", "index"])
def test_joins(key, other):
    """Inserted values that are not Gaussian have zero variance, for any type."""
    x = gaussian(2, 3)
    y = {
        "gaussian": gaussian(2, 3, seed=1),
        "float": plain(2, 3),
        "mask": plain(2, 3) > 0,
        "index": torch.ones(2, 3).long(),
    }[other]
    mean, var = (y._mean, y._var) if isinstance(y, Gaussian) else (y, torch.zeros(2, 3))
    assert_same(key([x, y], *JOINS[key]), key([x._mean, mean], *JOINS[key]), key([x._var, var], *JOINS[key]))


def test_iteration_over_rows():
    x = gaussian(3, 2)
    a, b, c = x
    for i, row in enumerate((a, b, c)):
        assert_same(row, x._mean[i], x._var[i])


def test_rows_of_an_uncertain_table():
    table, index = gaussian(5, 3), torch.tensor([[4, 0], [0, 2]])
    assert_same(F.embedding(index, table), table._mean[index], table._var[index])


def test_rotation_by_complex_numbers():
    """A rotary embedding by complex numbers equals that by sines and cosines, and is exact for known angles."""
    x, angle = gaussian(2, 4, 6), plain(4, 3)
    turned = torch.view_as_complex(x.reshape(2, 4, 3, 2)) * torch.polar(torch.ones_like(angle), angle)
    found = torch.view_as_real(turned).flatten(-2)

    def by_hand(z: T) -> T:
        a, b = z[..., ::2], z[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    mean, var = delta(by_hand, [moments_of(x)])
    torch.testing.assert_close(moments_of(found).mean, mean)
    torch.testing.assert_close(moments_of(found).var, var)
    for part, known in ((turned.real, mean[..., ::2]), (turned.imag, mean[..., 1::2])):
        torch.testing.assert_close(moments_of(part).mean, known)
    torch.testing.assert_close(moments_of(turned.imag).var, var[..., 1::2])
    stretched = moments_of(torch.view_as_real(-turned * 2 + turned.conj()).flatten(-2))
    torch.testing.assert_close(stretched.var, 5 * var)
    with pytest.raises(NoRuleError, match="exp"):
        turned.exp()  # operations without a rule for complex numbers are refused
    with pytest.raises(NoRuleError, match="mul"):
        turned * turned.conj()


@pytest.mark.parametrize("value", [None, 0, 2.5])
def test_padding_has_zero_variance(value):
    x = gaussian(2, 3, 4, 6)
    assert_same(
        F.pad(x, (1, 2, 0, 3), value=value), F.pad(x._mean, (1, 2, 0, 3), value=value), F.pad(x._var, (1, 2, 0, 3))
    )


# ---- arithmetic, sums, weights: exact for independent inputs, so Monte Carlo agrees ---------------------------------


@dataclass(frozen=True)
class Row:
    """A call of an operation on Gaussian inputs of these shapes; each variant is one call."""

    shapes: tuple[tuple[int, ...], ...]
    variants: tuple[Callable[..., Any], ...]


def pair(key: Callable[..., Any]) -> Row:
    """An operation on two Gaussians, with broadcasting, and on a Gaussian and a constant."""
    known = plain(3)
    variants = (lambda a, b: key(a, b), lambda a, b: key(a, known) + b.sum(), lambda a, b: key(a, 1.7) + b.sum())
    return Row(((2, 3), (3,)), variants)


def with_alpha(key: Callable[..., Any]) -> Row:
    row = pair(key)
    return Row(row.shapes, (*row.variants, lambda a, b: key(a, b, alpha=-2.5)))


PLACES = torch.tensor([2, 0, 2, 3, 2])  # rows to add to: three times, once, never


def variants(*calls: Callable[..., Any], shapes: Any) -> Row:
    return Row(shapes, calls)


def one_or_two(f: Callable[..., Any], *shapes: tuple[int, ...]) -> Row:
    """A product with both of its operands random, and with each of them known."""
    a, b = (plain(*shape, seed=20 + i) for i, shape in enumerate(shapes))
    return Row(shapes, (f, lambda x, y: f(x, b) + y.sum(), lambda x, y: f(a, y) + x.sum()))


def conv(key: Callable[..., Any], dims: int, transposed: bool = False) -> Row:
    """Pass stride, padding and groups by name and by position; four channels in and four out, in two groups."""
    by_position = (1, 1, 0, 2) if transposed else (1, 1, 1, 2)
    bias = plain(4, seed=8)

    def named(x: Any, w: Any) -> Any:
        return key(x[None], w, bias, stride=2, padding=1, groups=2)[0]

    row = one_or_two(named, (4, *[3] * dims), (4, 2, *[2] * dims))
    return Row(row.shapes, (*row.variants, lambda x, w: key(x[None], w, None, *by_position)[0]))


MONTE_CARLO: dict[Callable[..., Any], Row] = {
    **{key: with_alpha(key) for key in (torch.add, T.add, torch.sub, T.sub, torch.subtract, T.subtract)},
    torch.rsub: with_alpha(torch.rsub),
    **{key: pair(key) for key in (T.__add__, T.__radd__, T.__sub__, T.__rsub__)},
    **{key: pair(key) for key in (torch.mul, T.mul, T.__mul__, T.__rmul__, torch.multiply, T.multiply)},
    **{
        key: one_or_two(lambda a, b, k=key: k(a, b), (2, 3), (3,))
        for key in (torch.maximum, T.maximum, torch.minimum, T.minimum)
    },
    F.linear: one_or_two(lambda x, w: F.linear(x, w, plain(2, seed=8)), (3, 5), (2, 5)),
    F.conv1d: conv(F.conv1d, 1), F.conv2d: conv(F.conv2d, 2), F.conv3d: conv(F.conv3d, 3),
    F.conv_transpose1d: conv(F.conv_transpose1d, 1, True), F.conv_transpose2d: conv(F.conv_transpose2d, 2, True),
    F.conv_transpose3d: conv(F.conv_transpose3d, 3, True),
    **{key: one_or_two(lambda a, b, k=key: k(a, b), (2, 1, 2, 3), (2, 3, 4)) for key in (torch.matmul, T.matmul)},
    T.__matmul__: one_or_two(lambda a, b: a @ b, (2, 3), (3,)),
    T.__rmatmul__: one_or_two(lambda a, b: T.__rmatmul__(b, a), (2, 3), (3, 2)),
    **{key: one_or_two(lambda a, b, k=key: k(a, mat2=b), (2, 3), (3, 4)) for key in (torch.mm, T.mm)},
    **{key: one_or_two(lambda a, b, k=key: k(a, b), (2, 2, 3), (2, 3, 4)) for key in (torch.bmm, T.bmm)},
    **{key: one_or_two(lambda a, b, k=key: k(a, vec=b), (2, 3), (3,)) for key in (torch.mv, T.mv)},
    **{key: one_or_two(lambda a, b, k=key: k(a, b), (3,), (3,)) for key in (torch.dot, T.dot)},
    **{key: one_or_two(lambda a, b, k=key: k(a, b), (2, 3), (4, 3)) for key in (torch.inner, T.inner)},
    **{key: one_or_two(lambda a, b, k=key: k(a, b), (2,), (3,)) for key in (torch.outer, T.outer)},
    torch.tensordot: one_or_two(lambda a, b: torch.tensordot(a, b, dims=([0, 2], [1, 0])), (2, 3, 4), (4, 2, 2)),
    **{
        key: one_or_two(lambda a, b, k=key: k(plain(2, 4), a, b, beta=0.5, alpha=-2), (2, 3), (3, 4))
        for key in (torch.addmm, T.addmm)
    },
    **{key: one_or_two(lambda a, b, k=key: k(plain(2), a, b), (2, 3), (3,)) for key in (torch.addmv, T.addmv)},
    **{
        key: one_or_two(lambda a, b, k=key: k(a.sum() + plain(2, 2, 4), plain(2, 2, 3), b), (1,), (2, 3, 4))
        for key in (torch.baddbmm, T.baddbmm)
    },
    torch.einsum: variants(
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        lambda a, b: torch.einsum("...ij, ...jk -> ...ki", a, b),
        lambda a, b: torch.einsum("bij,bjk", a, plain(2, 3, 2)) + b.sum(),  # no arrow
        lambda a, b: torch.einsum("bij,cjk->ik", a, b),  # b and c occur in one operand only
        lambda a, b: torch.einsum("bij,bjk,k->bi", plain(2, 2, 3), b, plain(2)) + a.sum(),
        lambda a, b: torch.einsum("bij->ji", a) + b.sum(),
        lambda a, b: torch.einsum("bij,bjk->bik", [a, b]),
        lambda a, b: torch.einsum(a, [0, 1, 2], b, [0, 2, 3], [0, 3, 1]),
        lambda a, b: torch.einsum("bii->b", a[:, :, :2]) + b.sum(),
        shapes=((2, 2, 3), (2, 3, 2)),
    ),
    **{
        key: variants(
            lambda a, b, c, k=key: k(a, b, c, value=-0.5),
            lambda a, b, c, k=key: k(a, b, plain(3)) + c.sum(),
            shapes=((2, 3), (3,), (2, 1)),
        )
        for key in (torch.addcmul, T.addcmul)
    },
    **{
        key: Row(((2, 3), (3,)), (lambda a, b, k=key: k(a, b, 0.3), lambda a, b, k=key: k(a, b, weight=plain(3))))
        for key in (torch.lerp, T.lerp)
    },
    F.glu: variants(lambda x: F.glu(x), lambda x: F.glu(x, 0), shapes=((4, 6),)),
}  # fmt: skip


@pytest.mark.parametrize("key", MONTE_CARLO, ids=name_of)
def test_against_monte_carlo(key):
    row = MONTE_CARLO[key]
    inputs = [gaussian(*shape, seed=i) for i, shape in enumerate(row.shapes)]
    for variant in row.variants:
        found = moments_of(variant(*inputs))
        mean, var, mean_error, var_error = drawn(variant, [moments_of(x) for x in inputs], draws=4000)
        assert_within(found.mean, mean, mean_error)
        assert_within(found.var, var, var_error)


# ---- linear with known weights, or to first order: torch's own Jacobian agrees to the last digit ---------------------


def quotient(key: Callable[..., Any]) -> Row:
    row, column = plain(3), plain(4, 1, 1)
    calls = (
        lambda a, b: key(a, row) + b.sum(), lambda a, b: key(a, 1.7) + b.sum(), lambda a, b: key(a, column) + b.sum(),
        lambda a, b: key(a, b), lambda a, b: key(row, b) + a.sum(),
    )  # fmt: skip
    return Row(((2, 3), (3,)), calls)


def total(key: Callable[..., Any]) -> Row:
    return Row(((2, 3, 4),), (lambda x: key(x), lambda x: key(x, 1), lambda x: key(x, dim=(0, 2), keepdim=True)))


def scattered(key: Callable[..., Any]) -> Row:
    """Rows added to a constant or random table, and constant rows added to a random table, along both dimensions."""
    table, rows = plain(4, 3), plain(5, 3, seed=8)
    calls = (
        lambda a, b: key(table, 0, PLACES, b) + a,
        lambda a, b: key(a, 0, PLACES, b),
        lambda a, b: key(a, 0, PLACES, b, alpha=-1.5),
        lambda a, b: key(a, dim=0, index=PLACES, source=b, alpha=2),
        lambda a, b: key(a, 0, PLACES, rows, alpha=3.0) + b.sum(),
        lambda a, b: key(a.t(), 1, PLACES, b.t()),
    )
    return Row(((4, 3), (5, 3)), calls)


WHERE = PLACES[:, None].expand(5, 3)
ROWS = ((4, 3), (5, 3))


def scatter_add(key: Callable[..., Any]) -> Row:
    calls = (lambda a, b: key(a, 0, WHERE, b), lambda a, b: key(plain(4, 3), 0, index=WHERE, src=b) + a)
    return Row(ROWS, calls)


def scatter_reduce(key: Callable[..., Any]) -> Row:
    calls = (
        lambda a, b: key(a, 0, WHERE, b, "sum"), lambda a, b: key(a, 0, WHERE, b, "mean"),
        lambda a, b: key(a, 0, WHERE, b, reduce="mean", include_self=False),
        lambda a, b: key(plain(4, 3), 0, WHERE, b, "mean") + a,
    )  # fmt: skip
    return Row(ROWS, calls)


def masked(key: Callable[..., Any]) -> Row:
    mask = plain(4, 3) > 0
    return Row(((4, 3),), (lambda x: key(x, mask, 2.5), lambda x: key(x, mask[:1], value=-1.0)))


def copied(key: Callable[..., Any]) -> Row:
    index = torch.tensor([3, 0])
    return Row(
        ((4, 3), (2, 3)), (lambda a, b: key(a, 0, index, b), lambda a, b: key(plain(4, 3), 0, index, b) + a.sum())
    )


def put(key: Callable[..., Any]) -> Row:
    index = (torch.tensor([3, 0, 3]),)
    calls = (lambda a, b: key(a, (index[0][:2],), b[:2]), lambda a, b: key(a, index, b, accumulate=True))
    return Row(((4, 3), (3, 3)), calls)


def scatter(key: Callable[..., Any]) -> Row:
    index = torch.tensor([[3, 1, 0], [0, 2, 1]])
    calls = (lambda a, b: key(a, 0, index, b), lambda a, b: key(a, 0, index, value=2.0) + b.sum(),
             lambda a, b: key(plain(4, 3), 0, index, src=b) + a.sum())  # fmt: skip
    return Row(((4, 3), (2, 3)), calls)


def dims(key: Callable[..., Any], *before: Any) -> Row:
    """A reduction over one dimension, over two, and with keepdim."""
    calls = (lambda x: key(x, *before, 1), lambda x: key(x, *before, dim=-1, keepdim=True))
    return Row(((2, 3, 4),), calls)


def pools(n: int) -> dict[Callable[..., Any], Row]:
    average, adaptive = getattr(F, f"avg_pool{n}d"), getattr(F, f"adaptive_avg_pool{n}d")
    largest, largest_adaptive = getattr(F, f"max_pool{n}d"), getattr(F, f"adaptive_max_pool{n}d")
    sides = ((2, 5),), ((2, 5, 6),), ((2, 5, 4, 3),)
    divided = [] if n == 1 else [lambda x: average(x, 3, 2, 1, True, True, 5)]
    uneven = (2, 3, 2)[:n]
    return {
        average: Row(sides[n - 1], (
            lambda x: average(x, 2),
            lambda x: average(x, uneven, 1, (1, 0, 1)[:n]),
            lambda x: average(x, 3, stride=2, padding=1, ceil_mode=True),
            lambda x: average(x, 3, 2, 1, True, False),
            lambda x: average(x, kernel_size=3, stride=2, padding=1, count_include_pad=False),
            *divided,
        )),
        adaptive: Row(sides[n - 1], (
            lambda x: adaptive(x, 1),
            lambda x: adaptive(x, (3, 4, 2)[:n]),  # overlapping windows of different sizes
        )),
        largest: Row(sides[n - 1], (lambda x: largest(x, 2), lambda x: largest(x, 3, stride=1, padding=1, dilation=1))),
        largest_adaptive: Row(sides[n - 1], (lambda x: largest_adaptive(x, (3, 2, 2)[:n]),)),
    }  # fmt: skip


RESIZED = (  # dimensions, and how
    *((n, {"mode": mode, **size})
      for n in (1, 2, 3)
      for mode in ("nearest", "nearest-exact", "area", ("linear", "bilinear", "trilinear")[n - 1])
      for size in ({"scale_factor": 2.0}, {"size": (3, 2, 5)[:n]}, {"scale_factor": (0.5, 1.5, 2.0)[:n]})),
    (2, {"mode": "bicubic", "scale_factor": 2}),
    (2, {"mode": "bicubic", "size": 3, "align_corners": True}),
    (2, {"mode": "bilinear", "size": (7, 2), "align_corners": True}),
    (2, {"mode": "bilinear", "scale_factor": 1.7, "recompute_scale_factor": True}),
    (2, {"scale_factor": 2}),
)  # fmt: skip

DELTA: dict[Callable[..., Any], Row] = {
    **{key: quotient(key) for key in (torch.div, T.div, T.__truediv__, torch.divide,
                                      T.divide, torch.true_divide, T.true_divide)},
    T.__rtruediv__: Row(((2, 3),), (lambda x: 1.7 / x, lambda x: plain(3) / x)),
    **{key: Row(((2, 3),), (lambda x, k=key: k(x),))
       for key in (torch.neg, T.neg, T.__neg__, torch.negative, T.negative, torch.conj, T.conj)},
    **{key: total(key) for key in (torch.sum, T.sum, torch.mean, T.mean)},
    **{key: Row(((2, 3),), (lambda x, k=key: k(x, 1), lambda x, k=key: k(x, dim=0)))
       for key in (torch.cumsum, T.cumsum)},
    F.fold: Row(((2, 6, 4),), (lambda x: F.fold(x, (3, 4), (2, 3)),)),
    **{key: scattered(key) for key in (torch.index_add, T.index_add)},
    **{key: scatter_add(key) for key in (torch.scatter_add, T.scatter_add)},
    **{key: scatter_reduce(key) for key in (torch.scatter_reduce, T.scatter_reduce)},
    **{k: v for n in (1, 2, 3) for k, v in pools(n).items()},
    F.interpolate: Row(((1, 2, 4), (1, 1, 4, 3), (1, 1, 3, 2, 4)), tuple(
        lambda *x, n=n, how=how: F.interpolate(x[n - 1], **how) + sum(v.sum() for i, v in enumerate(x) if i != n - 1)
        for n, how in RESIZED
    )),
    torch.where: Row(((4, 3), (3,)), (
        lambda a, b: torch.where(plain(4, 3) > 0, a, b), lambda a, b: torch.where(plain(4, 3) > 0, 2.0, a) + b,
        lambda a, b: torch.where(condition=plain(4, 3) > 0, input=a, other=plain(3)) + b,
    )),
    T.where: Row(((4, 3), (3,)), (
        lambda a, b: a.where(plain(4, 3) > 0, b), lambda a, b: a.where(plain(4, 3) > 0, 1.0) + b,
    )),
    **{key: masked(key) for key in (torch.masked_fill, T.masked_fill)},
    **{key: Row(((4, 3),), (lambda x, k=key: k(x, 0, torch.tensor([2, 0]), 2.5),))
       for key in (torch.index_fill, T.index_fill)},
    **{key: copied(key) for key in (torch.index_copy, T.index_copy)},
    **{key: put(key) for key in (torch.index_put, T.index_put)},
    **{key: scatter(key) for key in (torch.scatter, T.scatter)},
    torch.select_scatter: Row(((4, 3), (3,)), (lambda a, b: torch.select_scatter(a, b, 0, 1),)),
    torch.slice_scatter: Row(((4, 3), (2, 3)), (lambda a, b: torch.slice_scatter(a, b, 0, 1, 3),)),
    **{key: Row(((2, 3), (6,)), (lambda a, b, k=key: k(a, plain(2, 3) > 0, b),))
       for key in (torch.masked_scatter, T.masked_scatter)},
    **{key: Row(((2, 3, 4),), (lambda x, k=key: k(x, 1), lambda x, k=key: k(x, dim=-1)))
                 for key in (F.softmax, torch.softmax, T.softmax, F.log_softmax, torch.log_softmax, T.log_softmax)},
    **{key: dims(key) for key in (torch.logsumexp, T.logsumexp, torch.amax, T.amax, torch.amin, T.amin)},
    **{key: Row(((2, 3, 4),), (lambda x, k=key: k(x, 1), lambda x, k=key: k(x, (0, 2), keepdim=True),
                               lambda x, k=key: k(x, dim=1, correction=0), lambda x, k=key: k(x)))
       for key in (torch.var, T.var, torch.std, T.std)},
    **{key: Row(((2, 3, 4),), tuple(
        lambda x, k=key, call=call, part=part: call(k, x)[part] for part in (0, 1) for call in (
            lambda k, x: k(x, 1), lambda k, x: k(x, (0, 2), keepdim=True), lambda k, x: k(x, dim=1, correction=0),
            lambda k, x: k(x), lambda k, x: k(x, 2, False, True),
        ))) for key in (torch.var_mean, torch.std_mean)},
    **{key: Row(((2, 3),), (lambda x, k=key: k(x, 1), lambda x, k=key: k(x))) for key in (torch.prod, T.prod)},
    torch.linalg.vector_norm: Row(((2, 3, 4),), (
        lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: torch.linalg.vector_norm(x, 3, (0, 1), True),
        lambda x: torch.linalg.vector_norm(x),
    )),
    torch.linalg.norm: Row(((2, 3, 4),), (
        lambda x: torch.linalg.norm(x, dim=-1), lambda x: torch.linalg.norm(x, 2, 1, True),
        lambda x: torch.linalg.norm(x),
        lambda x: torch.linalg.norm(x, "fro", (0, 1)),
    )),
    **{key: Row(((2, 3, 4),), (lambda x, k=key: k(x, dim=-1), lambda x, k=key: k(x, 2, 1, True), lambda x, k=key: k(x)))
       for key in (torch.norm, T.norm)},
}  # fmt: skip


@pytest.mark.parametrize("key", DELTA, ids=name_of)
def test_against_the_jacobian(key):
    row = DELTA[key]
    inputs = [gaussian(*shape, seed=i) for i, shape in enumerate(row.shapes)]
    for variant in row.variants:
        found = moments_of(variant(*inputs))
        mean, var = delta(variant, [moments_of(x) for x in inputs])
        torch.testing.assert_close(found.mean, mean)
        torch.testing.assert_close(found.var, var)


# ---- pointwise: the closure, so the integral agrees -----------------------------------------------------------------


@pytest.mark.parametrize("key", POINTWISE, ids=name_of)
def test_pointwise(key):
    tolerance, args = POINTWISE[key]
    x = gaussian(12, closure=GaussHermite(60))
    found = moments_of(key(x, *args))
    mean, var = integral(lambda z: key(z, *args), x._mean, x._var)
    torch.testing.assert_close(found.mean, mean, rtol=tolerance, atol=tolerance * 0.3)
    torch.testing.assert_close(found.var, var, rtol=tolerance, atol=tolerance * 0.1)


@pytest.mark.parametrize("power", [0, 1, 3, 2.0])
@pytest.mark.parametrize("key", POWERS, ids=name_of)
def test_integer_powers(key, power):
    x = gaussian(12, closure=GaussHermite(60))
    mean, var = integral(lambda z: z**power, x._mean, x._var)
    for found in (key(x, power), key(x, exponent=power) if key is not T.__pow__ else x**power):
        torch.testing.assert_close(moments_of(found).mean, mean, rtol=SMOOTH, atol=SMOOTH * 0.3)
        torch.testing.assert_close(moments_of(found).var, var, rtol=SMOOTH, atol=SMOOTH * 0.1)


@pytest.mark.parametrize("f", [lambda x: 2.0**x, lambda x: torch.pow(0.5, x), lambda x: plain(3, 1).abs() ** x,
                               lambda x: T.__rpow__(x, 3)])  # fmt: skip
def test_a_random_exponent(f):
    x = gaussian(4, closure=GaussHermite(60))
    mean, var = integral(lambda z: f(z.reshape(1, -1)).reshape(-1, *z.shape), x._mean, x._var)
    found = moments_of(f(x))
    torch.testing.assert_close(found.mean, mean.reshape(found.mean.shape), rtol=SMOOTH, atol=SMOOTH)
    torch.testing.assert_close(found.var, var.reshape(found.var.shape), rtol=SMOOTH, atol=SMOOTH)


SOMEWHERE = tuple(
    getattr(room, name)
    for room in (torch, T)
    for name in ("sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal", "logit", "acos", "asin", "atanh")
)
ROOTS = [
    *((k, k) for k in SOMEWHERE),
    *((k, lambda x, k=k, p=p: k(x, p)) for k in POWERS for p in (0.5, -1, -2.5, plain(5).abs())),
]


@pytest.mark.parametrize(("key", "f"), ROOTS, ids=lambda v: "")
def test_within_a_domain(key, f):
    """Compare with the Jacobian to first order, and with Monte Carlo for small noise."""
    x = gaussian(5, low=0.4, high=0.8)
    found = moments_of(f(x))
    mean, var = delta(f, [moments_of(x)])
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.var, var)
    small = Gaussian(x._mean, x._var * 1e-4)
    mean, var, mean_error, var_error = drawn(f, [moments_of(small)], draws=4000)
    assert_within(moments_of(f(small)).mean, mean, mean_error + 1e-4 * mean.abs())
    assert_within(moments_of(f(small)).var, var, var_error)


# ---- dropout --------------------------------------------------------------------------------------------------------

DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout)


@pytest.mark.parametrize("key", DROPOUT, ids=name_of)
def test_dropout_is_ignored_in_evaluation_and_refused_in_training(key):
    x = gaussian(2, 3, 2, 2, 2)
    assert_same(key(x, 0.5, False), x._mean, x._var)
    assert_same(key(x, training=False), x._mean, x._var)
    on = [lambda: key(x, 0.5, True), lambda: key(x, p=0.1, training=True)]
    for call in on if key is F.alpha_dropout else [*on, lambda: key(x), lambda: key(x, 0.5)]:
        with pytest.raises(NoRuleError, match="dropout"):
            call()


# ---- the table itself -----------------------------------------------------------------------------------------------


def test_every_rule_is_tested():
    rows = {
        *METADATA, *CREATION, *REARRANGE, *JOINS, *SEVERAL, *MONTE_CARLO, *DELTA, *POINTWISE, *POWERS, T.__rpow__,
        *SOMEWHERE, *DROPOUT, *NORMS, *ATTENTIONS, *IN_PLACE,
    }  # fmt: skip
    assert {name_of(k) for k in RULES.keys() - rows} == set(), "rules without a test row"
    assert {name_of(k) for k in rows - RULES.keys()} == set(), "test rows without a rule"


def test_every_rule_states_its_exactness():
    words = {EXACT, INDEPENDENT, GAUSSIAN, QUADRATURE, FIRST_ORDER, IN_EXPECTATION}
    assert all(any(w in rule.exactness for w in words) for rule in RULES.values())
    assert all(RULES[k].exactness == QUADRATURE for k in POINTWISE)
    assert all(RULES[k].exactness == FIRST_ORDER for k in SOMEWHERE)
    assert all(RULES[k].exactness == EXACT for k in (*METADATA, *CREATION, *REARRANGE, *JOINS, *SEVERAL, *DROPOUT))


# ---- one variable twice is one variable -----------------------------------------------------------------------------


def test_operations_of_a_variable_with_itself():
    x = gaussian(5)
    mean, var = x._mean, x._var
    cases = {
        "x + x": (x + x, 2 * mean, 4 * var),
        "x - x": (x - x, 0 * mean, 0 * var),
        "x * x": (x * x, mean**2 + var, 4 * mean**2 * var + 2 * var**2),
        "x ** 2": (x**2, mean**2 + var, 4 * mean**2 * var + 2 * var**2),
    }
    for found, expected_mean, expected_var in cases.values():
        torch.testing.assert_close(moments_of(found).mean, expected_mean)
        torch.testing.assert_close(moments_of(found).var, expected_var)


def test_product_of_two_in_closed_form():
    """Var[ab] = σ_a² μ_b² + σ_b² μ_a² + σ_a² σ_b². Monte Carlo would not detect a missing last term."""
    a, b = gaussian(5), gaussian(5, seed=1)
    expected = a._var * b._mean**2 + b._var * a._mean**2 + a._var * b._var
    torch.testing.assert_close(moments_of(a * b).var, expected)
    zero = torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(moments_of(Gaussian(zero, a._var) * Gaussian(zero, b._var)).var, a._var * b._var)


def test_maximum_of_two_in_closed_form():
    """Two of N(0, 1) have mean 1/√π and variance 1 − 1/π; two constants give the larger one."""
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    larger, smaller = (moments_of(f(Gaussian(zero, one), Gaussian(zero, one))) for f in (torch.maximum, torch.minimum))
    torch.testing.assert_close(larger.mean, one / torch.pi**0.5)
    torch.testing.assert_close(smaller.mean, -one / torch.pi**0.5)
    for found in (larger, smaller):
        torch.testing.assert_close(found.var, one - 1 / torch.pi)
    sure = moments_of(torch.maximum(Gaussian(zero, zero), torch.tensor([-1.0, 2.0], dtype=torch.float64)))
    assert sure.mean.tolist() == [0, 2]
    assert not sure.var.any()
    x = gaussian(3)
    relu = integral(lambda z: z.clamp_min(0.3), x._mean, x._var)
    found = moments_of(torch.maximum(x, torch.full((3,), 0.3, dtype=torch.float64)))
    torch.testing.assert_close(found.mean, relu[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.var, relu[1], rtol=1e-5, atol=1e-6)
