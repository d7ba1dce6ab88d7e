"""The rule table as rows: what `fmwc rules` prints."""

from __future__ import annotations

from typing import Any

import torch

from fmwc.moments.gaussian import RULES

__all__ = ["names_of", "rule_rows"]

_SHORT = {"torch.nn.functional.": "F.", "torch.Tensor.": "Tensor.", "torch.functional.": "torch."}


def rule_rows() -> list[dict[str, Any]]:
    """One row an operation: its name, how exact its rule is, what that does to (μ, σ²), the spellings it answers to."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for function, rule in RULES.items():
        says = (rule.apply.__doc__ or "").strip().partition("\n\n")[0]
        row = {"operation": rule.family, "exactness": rule.exactness, "rule": " ".join(says.split()), "spellings": []}
        rows.setdefault((rule.family, rule.exactness), row)["spellings"].append(_spelling(function))
    return list(rows.values())


def _spelling(function: Any) -> str:
    """The name a user writes: torch.add, Tensor.add, F.silu, Tensor.shape."""
    name = torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name.removesuffix(".__get__")


def names_of(spellings: list[str]) -> str:
    """The names of a row in short: without their room, their in-place forms, and the methods behind operators.

    >>> names_of(["F.relu", "torch.relu", "Tensor.relu_", "Tensor.__add__", "torch.linalg.vector_norm"])
    'relu, vector_norm'
    """
    names = (spelling.rpartition(".")[2] for spelling in spellings)
    return ", ".join(dict.fromkeys(name.removesuffix("_") for name in names if not name.startswith("__")))
