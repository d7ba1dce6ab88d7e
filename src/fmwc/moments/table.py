"""The rule table as a whole: in-place forms of every rule, and the rows that `fmwc rules` prints."""

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


# ---- rows ------------------------------------------------------------------------------------------------------------

_SHORT = {"torch.nn.functional.": "F.", "torch.Tensor.": "Tensor.", "torch.functional.": "torch."}


def rule_rows() -> list[dict[str, Any]]:
    """Return one row per operation: its name, the exactness of its rule, its action on (μ, σ²), and its functions."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for function, rule in RULES.items():
        text = (rule.apply.__doc__ or "").strip().partition("\n\n")[0]
        row = {"operation": rule.family, "exactness": rule.exactness, "rule": " ".join(text.split()), "spellings": []}
        rows.setdefault((rule.family, rule.exactness), row)["spellings"].append(_spelling(function))
    return list(rows.values())


def _spelling(function: Any) -> str:
    """Return the name in user code: torch.add, Tensor.add, F.silu, Tensor.shape."""
    name = torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name.removesuffix(".__get__")


def short_names(spellings: list[str]) -> str:
    """Return the names of a row without namespaces, in-place forms and methods of operators.

    >>> short_names(["F.relu", "torch.relu", "Tensor.relu_", "Tensor.__add__", "torch.linalg.vector_norm"])
    'relu, vector_norm'
    """
    names = (spelling.rpartition(".")[2] for spelling in spellings)
    return ", ".join(dict.fromkeys(name.removesuffix("_") for name in names if not name.startswith("__")))
