"""In-place forms agree with their operations, also in message passing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor as T

from fmwc.errors import NoRuleError
from fmwc.moments import RULES, moments_of
from fmwc.moments.table import INPLACE
from tests.moments.operands import POINTWISE, assert_same, gaussian, name_of, plain

PLACES_2 = torch.tensor([1, 0])
HERE = torch.tensor([[True, False, True], [False, True, False]])
INTO = {  # arguments after the operand, by operation
    **{name: (plain(3),) for name in ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide")},
    "neg": (), "negative": (), "pow": (2,), "addcmul": (plain(3), plain(2, 1)), "lerp": (plain(3), 0.3),
    "addmm": (plain(2, 4), plain(4, 3)), "cumsum": (1,), "index_add": (0, PLACES_2, plain(2, 3)),
    "scatter_add": (0, PLACES_2[:, None].expand(2, 3), plain(2, 3)), "index_fill": (0, PLACES_2[:1], 3.0),
    "scatter_reduce": (0, PLACES_2[:, None].expand(2, 3), plain(2, 3), "mean"), "masked_fill": (HERE, 2.0),
    "scatter": (0, PLACES_2[:, None].expand(2, 3), plain(2, 3)), "index_copy": (0, PLACES_2, plain(2, 3)),
    "index_put": ((PLACES_2,), plain(2, 3)), "masked_scatter": (HERE, plain(6)), "conj_physical": (),
}  # fmt: skip
OTHER_SHAPES = {"addmv": ((3,), (plain(3, 4), plain(4))), "baddbmm": ((1, 2, 3), (plain(1, 2, 4), plain(1, 4, 3)))}
IN_PLACE = (*INPLACE, T.copy_, T.fill_, T.zero_, T.__setitem__)  # the last four have a separate test


def arguments(operation: Callable[..., Any]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    name = operation.__name__.strip("_").replace("truediv", "div")
    if operation in POINTWISE:
        return (2, 3), POINTWISE[operation][1]
    return OTHER_SHAPES.get(name) or ((2, 3), INTO.get(name, ()))


@pytest.mark.parametrize("key", INPLACE, ids=name_of)
def test_in_place_forms_equal_the_operations(key):
    assert RULES[key].exactness == RULES[INPLACE[key]].exactness
    shape, args = arguments(INPLACE[key])
    x = gaussian(*shape, low=0.3, high=0.7)
    expected = moments_of(INPLACE[key](x, *args))
    whole = x.clone()
    target = whole.view(-1).view(shape)  # writing into a view changes the original
    assert key(target, *args) is target
    for written in (target, whole):
        assert_same(written, expected.mean, expected.var)
    if args and isinstance(args[0], T) and args[0].is_floating_point():
        with pytest.raises(NoRuleError, match="linearised"):
            key(torch.ones(shape, dtype=torch.float64), x, *args[1:])


def test_writing_into_a_gaussian():
    x, y = gaussian(4, 3), gaussian(2, 3, seed=1)
    mean, var = x._mean.clone(), x._var.clone()
    x[1:3] = y
    mean[1:3], var[1:3] = y._mean, y._var
    assert_same(x, mean, var)
    x[0] += 1
    x[3] *= y[0]
    mean[0] += 1
    var[3] = var[3] * (y._mean[0] ** 2 + y._var[0]) + mean[3] ** 2 * y._var[0]
    mean[3] *= y._mean[0]
    assert_same(x, mean, var)
    x[plain(4) > 0] = 5.0
    assert not moments_of(x[plain(4) > 0]).var.any()
    x[1].copy_(y[0])
    assert_same(x[1], y._mean[0], y._var[0])
    x[1].copy_(plain(3))
    assert_same(x[1], plain(3), torch.zeros(3, dtype=torch.float64))
    x[:2].fill_(2.0)
    x[2:].zero_()
    assert_same(x, torch.tensor([[2.0] * 3] * 2 + [[0.0] * 3] * 2).double(), torch.zeros(4, 3).double())
    for write in (lambda p: p.copy_(y), lambda p: p.__setitem__(0, y[0])):
        with pytest.raises(NoRuleError, match="new_zeros"):
            write(torch.zeros(2, 3, dtype=torch.float64))


def test_gather_and_scatter_of_messages():
    """Message passing: new_zeros, a sum in place, and a mean by counts."""
    x, source, target = gaussian(4, 3), torch.tensor([0, 1, 1, 3]), torch.tensor([2, 2, 0, 2])
    messages = x.index_select(0, source)
    out = messages.new_zeros(4, 3).scatter_add_(0, target[:, None].expand(4, 3), messages)
    count = messages.new_zeros(4).scatter_add_(0, target, messages.new_ones(4)).clamp_(min=1)
    assert_same(
        out / count[:, None],
        *(torch.zeros(4, 3).double().index_add(0, target, v[source]) / torch.tensor([1, 1, 3, 1])[:, None] ** n
          for v, n in ((x._mean, 1), (x._var, 2))),
    )  # fmt: skip
    assert bool((count > 1).any())  # a number without variance is known, so comparisons are allowed
    with pytest.raises(NoRuleError):
        bool((out > 1).any())
