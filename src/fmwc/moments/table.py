"""In-place forms of every rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmwc.errors import NoRuleError
from fmwc.moments import arithmetic, attention, layout, norms  # noqa: F401
from fmwc.moments.gaussian import RULES, Gaussian, refusal, register, write

# A plain tensor has no memory for a variance, so in-place forms take a Gaussian target.
_OTHER_SHAPE = ("rearrange", "metadata", "creation", "dropout")  # x.squeeze_() would change the target's shape


def _inplace_forms() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return every in-place function of torch whose operation has a rule: x.add_ and x += y for x.add."""
    forms = {}
    for namespace in (Tensor, torch, F):
        for name in dir(namespace):
            plain = name[:-1] if name.endswith("_") and not name.endswith("__") else ""
            if name.startswith("__i") and name.endswith("__"):
                plain = f"__{name[3:]}"
            operation = getattr(namespace, plain, None) if plain else None
            if operation in RULES and RULES[operation].family not in _OTHER_SHAPE:
                forms[getattr(namespace, name)] = operation
    return forms


def _written(operation: Callable[..., Any]) -> Callable[..., Any]:
    rule = RULES[operation]

    def apply(func: Any, args: Any, kwargs: Any) -> Gaussian:
        target = args[0]
        if not isinstance(target, Gaussian):
            raise NoRuleError(refusal(func, args, kwargs))
        return write(target, rule.apply(operation, args, kwargs))

    return apply


INPLACE = _inplace_forms()  # in place: out of place
for _function, _operation in INPLACE.items():
    _row = RULES[_operation]
    register(_function, exactness=_row.exactness, family=_row.family, complex=_row.complex)(_written(_operation))
