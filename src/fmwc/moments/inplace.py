"""In-place forms: an operation whose result is written into its first operand.

Mean and variance of a view lie in the tensors of what it is a view of, so what is written into a view is seen there.
A plain tensor has no place for a variance, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments import arithmetic, attention, layout, norms, pointwise, products, reductions, sums  # noqa: F401
from fmwc.moments.gaussian import RULES, Gaussian, refusal, register
from fmwc.moments.operands import write

__all__ = ["INPLACE"]

_OTHER_SHAPE = ("rearrange", "metadata", "creation", "dropout")  # x.squeeze_() would have to become another tensor


def _twins() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Every in-place function of torch whose operation has a rule: x.add_ and x += y for x.add."""
    found = {}
    for room in (Tensor, torch, F):
        for name in dir(room):
            plain = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
            if name.startswith("__i") and name.endswith("__"):
                plain = f"__{name[3:]}"
            operation = getattr(room, plain, None) if plain else None
            if operation in RULES and RULES[operation].family not in _OTHER_SHAPE:
                found[getattr(room, name)] = operation
    return found


def _written(operation: Callable[..., Any]) -> Callable[..., Any]:
    rule = RULES[operation]

    def apply(func: Any, args: Any, kwargs: Any) -> Gaussian:
        target = args[0]
        if not isinstance(target, Gaussian):
            raise NoRuleError(refusal(func, args, kwargs))
        return write(target, rule.apply(operation, args, kwargs))

    return apply


INPLACE = _twins()  # in place: out of place
for _twin, _operation in INPLACE.items():
    _row = RULES[_operation]
    register(_twin, exactness=_row.exactness, family=_row.family, complex=_row.complex)(_written(_operation))
