"""Every row of the rule table, against Monte Carlo, an integral, or the operation done to mean and variance apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor as T

from fmwc.errors import NoRuleError
from fmwc.moments import EXACT, FIRST_ORDER, IN_EXPECTATION, INDEPENDENT, RULES, GaussHermite, Gaussian, moments_of
from tests.moments.test_norms import NORMS
from tests.reference import assert_within, drawn, integral, noise_var


def gaussian(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0, closure: Any = None) -> Gaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = low + (high - low) * torch.rand(shape, dtype=torch.float64, generator=generator)
    var = 0.02 + 0.2 * torch.rand(shape, dtype=torch.float64, generator=generator)
    return Gaussian(mean, var, closure or GaussHermite())


def plain(*shape: int, seed: int = 7) -> T:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def name_of(key: Callable[..., Any]) -> str:
    return torch.overrides.resolve_name(key) or str(key)


# ---- metadata: the answer is the mean's -----------------------------------------------------------------------------

PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta")
METADATA: dict[Callable[..., Any], tuple[Any, ...]] = {
    **{getattr(T, p).__get__: () for p in PROPERTIES},
    T.size: (1,), T.dim: (), T.numel: (), torch.numel: (), T.stride: (), T.is_contiguous: (), T.is_floating_point: (),
    torch.is_floating_point: (), T.__len__: (), T.__hash__: (), T.get_device: (), torch.zeros_like: (),
    torch.ones_like: (), torch.empty_like: (), torch.full_like: (3.0,), T.new_zeros: (2,), T.new_ones: (2,),
    T.new_empty: (2,), T.new_full: ((2,), 3.0), T.new_tensor: ([1.0, 2.0],),
}  # fmt: skip
UNFILLED = (torch.empty_like, T.new_empty)


@pytest.mark.parametrize("key", METADATA, ids=name_of)
def test_metadata(key):
    x = gaussian(2, 3)
    if key is T.__hash__:  # a tensor is hashed by its identity, the mean's or its own
        assert len({x, x}) == 1
        return
    found, expected = key(x, *METADATA[key]), key(x._mean, *METADATA[key])
    assert not isinstance(found, Gaussian)
    if key in UNFILLED:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    elif isinstance(expected, T):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        assert found == expected


# ---- rearrange: the same to mean and variance -----------------------------------------------------------------------

X = (2, 4, 6)
INDEX = torch.tensor([2, 0, 1])
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
}  # fmt: skip
# Those that take another shape than X, and those that take several tensors.
SHAPES = {T.t: (2, 3), torch.t: (2, 3), T.T.__get__: (2, 3), T.squeeze: (2, 1, 3), torch.squeeze: (2, 1, 3),
          F.pixel_shuffle: (4, 2, 3)}  # fmt: skip
REARRANGE |= {T.t: (), torch.t: (), T.T.__get__: ()}
JOINS = {torch.cat: (1,), torch.concat: (1,), torch.stack: (1,)}
RESIZES = (F.interpolate, F.pad)  # several modes each, so a test each


def assert_same(found: Any, mean: Any, var: Any) -> None:
    if isinstance(mean, T):
        assert isinstance(found, Gaussian)
        assert torch.equal(moments_of(found).mean, mean)
        assert torch.equal(moments_of(found).var, var)
        assert found.shape == mean.shape
        assert found.dtype == mean.dtype
        return
    assert len(found) == len(mean)
    for parts in zip(found, mean, var, strict=True):
        assert_same(*parts)


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
    """What is joined and is no Gaussian is known exactly, whatever its type: its variance is zero."""
    x = gaussian(2, 3)
    y = {
        "gaussian": gaussian(2, 3, seed=1),
        "float": plain(2, 3),
        "mask": plain(2, 3) > 0,
        "index": torch.ones(2, 3).long(),
    }[other]
    mean, var = (y._mean, y._var) if isinstance(y, Gaussian) else (y, torch.zeros(2, 3))
    assert_same(key([x, y], *JOINS[key]), key([x._mean, mean], *JOINS[key]), key([x._var, var], *JOINS[key]))


def test_asking_for_the_type_gives_a_word():
    assert gaussian(2).type() == "torch.DoubleTensor"


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("size", [{"scale_factor": 2}, {"size": (7, 2)}, {"scale_factor": (0.5, 1.5)}], ids=str)
def test_interpolate_copies_the_nearest(mode, size):
    x = gaussian(2, 3, 4, 6)
    assert_same(*(F.interpolate(v, mode=mode, **size) for v in (x, x._mean, x._var)))
    assert_same(*(F.interpolate(v, **size) for v in (x, x._mean, x._var)))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "area"])
def test_interpolate_by_mixing_is_refused(mode):
    with pytest.raises(NoRuleError, match=r"no rule carries a variance through .*interpolate"):
        F.interpolate(gaussian(1, 1, 4, 4), scale_factor=2, mode=mode)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_with_copies(mode):
    x = gaussian(2, 3, 4, 6)
    assert_same(*(F.pad(v, (1, 2, 0, 3), mode=mode) for v in (x, x._mean, x._var)))


@pytest.mark.parametrize("value", [None, 0, 2.5])
def test_padding_with_what_is_known_has_no_variance(value):
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
    """An operation on two Gaussians, broadcast, and on one beside what is known."""
    known = plain(3)
    variants = (lambda a, b: key(a, b), lambda a, b: key(a, known) + b.sum(), lambda a, b: key(a, 1.7) + b.sum())
    return Row(((2, 3), (3,)), variants)


def with_alpha(key: Callable[..., Any]) -> Row:
    row = pair(key)
    return Row(row.shapes, (*row.variants, lambda a, b: key(a, b, alpha=-2.5)))


def quotient(key: Callable[..., Any]) -> Row:
    row, column = plain(3), plain(4, 1, 1)
    return Row(((2, 3),), (lambda a: key(a, row), lambda a: key(a, 1.7), lambda a: key(a, column)))


def linear() -> Row:
    weight, bias = plain(2, 5), plain(2, seed=8)
    return Row(((3, 5),), (lambda x: F.linear(x, weight, bias), lambda x: F.linear(x, weight=weight)))


def total(key: Callable[..., Any]) -> Row:
    variants = (lambda x: key(x), lambda x: key(x, 1), lambda x: key(x, dim=(0, 2), keepdim=True))
    return Row(((2, 3, 4),), variants)


PLACES = torch.tensor([2, 0, 2, 3, 2])  # where rows are added: thrice, once, never


def scattered(key: Callable[..., Any]) -> Row:
    """Rows added to a known table, to an uncertain one, and known rows to an uncertain table; and across."""
    table, rows = plain(4, 3), plain(5, 3, seed=8)
    variants = (
        lambda a, b: key(table, 0, PLACES, b) + a,
        lambda a, b: key(a, 0, PLACES, b),
        lambda a, b: key(a, 0, PLACES, b, alpha=-1.5),
        lambda a, b: key(a, dim=0, index=PLACES, source=b, alpha=2),
        lambda a, b: key(a, 0, PLACES, rows, alpha=3.0) + b.sum(),
        lambda a, b: key(a.t(), 1, PLACES, b.t()),
    )
    return Row(((4, 3), (5, 3)), variants)


def conv(key: Callable[..., Any], dims: int, transposed: bool = False) -> Row:
    """With stride, padding and groups by name, and by position."""
    weight, bias = plain(4, 2, *[3] * dims), plain(4, seed=8)  # four channels in and four out, in two groups
    by_position = (1, 1, 0, 2) if transposed else (1, 1, 1, 2)
    variants = (
        lambda x: key(x[None], weight, bias, stride=2, padding=1, groups=2)[0],
        lambda x: key(x[None], weight, None, *by_position)[0],
    )
    return Row(((4, *[4] * dims),), variants)


POOLS: dict[Callable[..., Any], tuple[Callable[..., Any], ...]] = {
    F.avg_pool2d: (
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, (2, 3), 1, (1, 0)),
        lambda x: F.avg_pool2d(x, 3, stride=2, padding=1, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
        lambda x: F.avg_pool2d(x, 3, 2, 1, True, True, 5),
        lambda x: F.avg_pool2d(x, kernel_size=3, stride=2, padding=1, count_include_pad=False),
    ),
    F.adaptive_avg_pool2d: (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, (3, 4)),  # windows of different sizes, which overlap
        lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
    ),
}

MONTE_CARLO: dict[Callable[..., Any], Row] = {
    **{key: with_alpha(key) for key in (torch.add, T.add, torch.sub, T.sub, torch.subtract, T.subtract)},
    **{key: pair(key) for key in (T.__add__, T.__radd__, T.__sub__, T.__rsub__)},
    **{key: pair(key) for key in (torch.mul, T.mul, T.__mul__, T.__rmul__, torch.multiply, T.multiply)},
    **{key: quotient(key) for key in (torch.div, T.div, T.__truediv__, torch.true_divide, T.true_divide)},
    **{key: Row(((2, 3),), (lambda x, k=key: k(x),)) for key in (torch.neg, T.neg, T.__neg__, torch.negative)},
    **{key: total(key) for key in (torch.sum, T.sum, torch.mean, T.mean)},
    **{key: scattered(key) for key in (torch.index_add, T.index_add)},
    **{key: Row(((2, 5, 6),), variants) for key, variants in POOLS.items()},
    F.linear: linear(),
    F.conv1d: conv(F.conv1d, 1), F.conv2d: conv(F.conv2d, 2), F.conv3d: conv(F.conv3d, 3),
    F.conv_transpose1d: conv(F.conv_transpose1d, 1, True), F.conv_transpose2d: conv(F.conv_transpose2d, 2, True),
    F.conv_transpose3d: conv(F.conv_transpose3d, 3, True),
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


@pytest.mark.parametrize(("key", "number"), [(k, i) for k, v in POOLS.items() for i in range(len(v))])
def test_pools_in_closed_form(key, number):
    """A pool is a matrix M, so Var = M² σ²."""
    f, x = POOLS[key][number], gaussian(3, 2, 5, 6)
    expected = noise_var(f, x._var.sqrt(), torch.ones(1, dtype=torch.float64))
    torch.testing.assert_close(moments_of(f(x)).var, expected)
    assert torch.equal(moments_of(f(x)).mean, f(x._mean))


@pytest.mark.parametrize("key", [torch.index_add, T.index_add], ids=name_of)
@pytest.mark.parametrize("alpha", [1, -1.5])
def test_scattered_sums_in_closed_form(key, alpha):
    table, rows = gaussian(4, 3), gaussian(5, 3, seed=1)
    found = moments_of(key(table, 0, PLACES, rows, alpha=alpha))
    mean, var = table._mean.clone(), table._var.clone()
    for place, m, v in zip(PLACES.tolist(), rows._mean, rows._var, strict=True):
        mean[place] += alpha * m
        var[place] += alpha**2 * v
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.var, var)
    assert torch.equal(found.var[1], table._var[1])  # nothing was added there
    assert torch.equal(moments_of(key(plain(4, 3), 0, PLACES, rows)).var[1], torch.zeros(3, dtype=torch.float64))
    known = moments_of(key(table, 0, PLACES, plain(5, 3), alpha=alpha))
    assert torch.equal(known.var, table._var)


# ---- pointwise: the closure, so the integral agrees -----------------------------------------------------------------

SMOOTH, KINKED = 2e-4, 3e-2  # what 60 Gauss–Hermite nodes can do with a smooth function, and with a kink
POINTWISE: dict[Callable[..., Any], tuple[float, tuple[Any, ...]]] = {
    F.silu: (SMOOTH, ()), F.relu: (KINKED, ()), torch.relu: (KINKED, ()), T.relu: (KINKED, ()), F.gelu: (SMOOTH, ()),
    F.elu: (KINKED, (0.7,)), F.selu: (KINKED, ()), F.celu: (KINKED, (0.7,)), F.mish: (SMOOTH, ()),
    F.leaky_relu: (KINKED, (0.2,)), F.hardswish: (KINKED, ()), F.hardtanh: (KINKED, (-1.5, 1.0)), F.relu6: (KINKED, ()),
    F.softplus: (SMOOTH, (2.0,)), F.softsign: (KINKED, ()), F.logsigmoid: (SMOOTH, ()), F.sigmoid: (SMOOTH, ()),
    torch.sigmoid: (SMOOTH, ()), T.sigmoid: (SMOOTH, ()), F.tanh: (SMOOTH, ()), torch.tanh: (SMOOTH, ()),
    T.tanh: (SMOOTH, ()), torch.sin: (SMOOTH, ()), T.sin: (SMOOTH, ()), torch.cos: (SMOOTH, ()), T.cos: (SMOOTH, ()),
    torch.exp: (SMOOTH, ()), T.exp: (SMOOTH, ()), torch.square: (SMOOTH, ()), T.square: (SMOOTH, ()),
    torch.pow: (SMOOTH, (3,)), T.pow: (SMOOTH, (3,)), T.__pow__: (SMOOTH, (3,)), torch.abs: (KINKED, ()),
    T.abs: (KINKED, ()), torch.atan: (SMOOTH, ()), T.atan: (SMOOTH, ()), torch.erf: (SMOOTH, ()), T.erf: (SMOOTH, ()),
    torch.clamp: (KINKED, (-1.0, 1.5)), T.clamp: (KINKED, (-1.0, 1.5)),
}  # fmt: skip


@pytest.mark.parametrize("key", POINTWISE, ids=name_of)
def test_pointwise(key):
    tolerance, args = POINTWISE[key]
    x = gaussian(12, closure=GaussHermite(60))
    found = moments_of(key(x, *args))
    mean, var = integral(lambda z: key(z, *args), x._mean, x._var)
    torch.testing.assert_close(found.mean, mean, rtol=tolerance, atol=tolerance * 0.3)
    torch.testing.assert_close(found.var, var, rtol=tolerance, atol=tolerance * 0.1)


# ---- dropout --------------------------------------------------------------------------------------------------------

DROPOUT = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)


@pytest.mark.parametrize("key", DROPOUT, ids=name_of)
def test_dropout_is_nothing_when_off_and_refused_when_on(key):
    x = gaussian(2, 3, 2, 2, 2)
    assert_same(key(x, 0.5, False), x._mean, x._var)
    assert_same(key(x, training=False), x._mean, x._var)
    for call in (lambda: key(x), lambda: key(x, 0.5), lambda: key(x, 0.5, True), lambda: key(x, p=0.1, training=True)):
        with pytest.raises(NoRuleError, match=r"dropout is on.*eval\(\)"):
            call()


# ---- the table itself -----------------------------------------------------------------------------------------------


def test_every_rule_has_a_row_and_every_row_a_rule():
    rows = {*METADATA, *REARRANGE, *JOINS, *RESIZES, *MONTE_CARLO, *POINTWISE, *DROPOUT, *NORMS}
    assert {name_of(k) for k in RULES.keys() - rows} == set(), "rules without a test row"
    assert {name_of(k) for k in rows - RULES.keys()} == set(), "test rows without a rule"


def test_every_rule_says_how_exact_it_is():
    assert {rule.exactness for rule in RULES.values()} == {EXACT, INDEPENDENT, FIRST_ORDER, IN_EXPECTATION}
    assert all(RULES[k].exactness == FIRST_ORDER for k in POINTWISE)
    assert all(RULES[k].exactness == EXACT for k in (*METADATA, *REARRANGE, *JOINS, *RESIZES, *DROPOUT))
    assert all(RULES[k].exactness == IN_EXPECTATION for k in NORMS)


# ---- one variable twice is one variable -----------------------------------------------------------------------------


def test_an_operation_of_a_variable_with_itself():
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


def test_a_product_of_two_in_closed_form():
    """Var[ab] = σ_a² μ_b² + σ_b² μ_a² + σ_a² σ_b²; the last term is too small for Monte Carlo to miss."""
    a, b = gaussian(5), gaussian(5, seed=1)
    expected = a._var * b._mean**2 + b._var * a._mean**2 + a._var * b._var
    torch.testing.assert_close(moments_of(a * b).var, expected)
    zero = torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(moments_of(Gaussian(zero, a._var) * Gaussian(zero, b._var)).var, a._var * b._var)


def test_arguments_by_keyword():
    x, two = gaussian(2, 3), torch.tensor(2.0, dtype=torch.float64)
    assert_same(torch.sum(input=x, dim=1), x._mean.sum(1), x._var.sum(1))
    assert_same(torch.add(x, other=two), x._mean + 2, x._var)
    assert_same(torch.mul(input=x, other=two), x._mean * 2, x._var * 4)
    assert_same(F.linear(input=x, weight=plain(4, 3)), x._mean @ plain(4, 3).T, x._var @ plain(4, 3).square().T)
    assert_same(torch.flatten(input=x), x._mean.flatten(), x._var.flatten())


def test_operators_as_python_writes_them():
    x = gaussian(2, 3)
    assert_same(1 - x, 1 - x._mean, x._var)
    assert_same(-x / 2 + plain(3), -x._mean / 2 + plain(3), x._var / 4)
    assert_same(plain(3) * x, plain(3) * x._mean, x._var * plain(3) ** 2)
    assert_same(plain(3) + x, plain(3) + x._mean, x._var)
    assert_same(plain(3) - x, plain(3) - x._mean, x._var)
