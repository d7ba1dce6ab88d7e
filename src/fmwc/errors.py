"""Exceptions of fmwc.

Each message is one line that says what was expected, what was found, and what to do. The command line prints it and
exits with status 2.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CheckpointError",
    "DataError",
    "FmwcError",
    "MismatchError",
    "NoRuleError",
    "NotFiniteError",
    "OutputError",
    "ShapeError",
    "StoppedError",
    "UnknownNameError",
    "UsageError",
    "nearest",
    "pick",
    "require_finite",
]

T = TypeVar("T")


class FmwcError(Exception):
    """Base class of all errors about input. The message is always printed as one line."""

    def __str__(self) -> str:
        return " ".join(line.strip() for line in super().__str__().splitlines())


class UsageError(FmwcError, ValueError):
    """Invalid value."""


class ShapeError(UsageError):
    """Tensor of the wrong shape."""


class NotFiniteError(UsageError):
    """NaN or infinity instead of a finite number."""


class UnknownNameError(UsageError):
    """Unknown name; the message lists the known names and the nearest match."""


class NoRuleError(FmwcError):
    """Operation without a rule for variances.

    Not a TypeError, which torch's operators turn into NotImplemented: `x += 1` would silently become `x = x + 1`.
    """


class CheckpointError(FmwcError):
    """Checkpoint that cannot be read by this version or into this network."""


class MismatchError(FmwcError):
    """Files or settings that do not belong together."""


class DataError(FmwcError):
    """Data that is missing, truncated or of the wrong kind."""


class StoppedError(FmwcError):
    """Work stopped by a time limit; repeating the command resumes it."""


class OutputError(FmwcError):
    """Path that cannot or must not be written to."""


def nearest(name: str, names: Iterable[str], what: str) -> str:
    """Return the error message for an unknown name.

    >>> nearest("peek", ["peak", "endpoint"], "score")
    "unknown score 'peek'; did you mean 'peak'? Known: endpoint, peak"
    """
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"unknown {what} '{name}'{hint} Known: {', '.join(known)}"


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """Return the entry of a table; raise an error that lists the names if there is none."""
    if name not in table:
        raise UnknownNameError(nearest(name, table, what))
    return table[name]


def require_finite(tensor: Tensor, what: str) -> None:
    """Raise if a tensor holds NaN or infinity."""
    if not tensor.is_floating_point():
        return
    tensor = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()  # torch cannot sum 8-bit floats
    if math.isfinite(float(tensor.sum())):  # one pass, without a mask
        return
    if not (finite := tensor.isfinite()).all():  # a sum of finite numbers may overflow
        count = int((~finite).sum())
        raise NotFiniteError(f"{what} holds {count} NaN or infinite values of {tensor.numel()}; all must be finite")
