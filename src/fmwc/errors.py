"""The exceptions a user can meet.

Every message is one line that says what was expected, what came, and what to do; the command line prints it as it
is and exits with 2.
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
    """Base of every error that is about what the user gave us. Its message is one line, whatever names are in it."""

    def __str__(self) -> str:
        return " ".join(line.strip() for line in super().__str__().splitlines())


class UsageError(FmwcError, ValueError):
    """A value that cannot be used as it is."""


class ShapeError(UsageError):
    """A tensor of the wrong shape."""


class NotFiniteError(UsageError):
    """NaN or infinity where a number was expected."""


class UnknownNameError(UsageError):
    """A name that is in no table; the message lists the table and the nearest match."""


class NoRuleError(FmwcError):
    """An operation that cannot carry a variance.

    Not a TypeError: torch's operators turn that into NotImplemented, and `x += 1` would quietly become `x = x + 1`.
    """


class CheckpointError(FmwcError):
    """A checkpoint that cannot be read, or not by this version, or not into this network."""


class MismatchError(FmwcError):
    """Files or settings that do not belong together."""


class DataError(FmwcError):
    """Data that is missing, cut off or of another kind."""


class StoppedError(FmwcError):
    """Work that a clock stopped, and that goes on where it was when it is asked for again."""


class OutputError(FmwcError):
    """A place that must not be written to."""


def nearest(name: str, names: Iterable[str], what: str) -> str:
    """The message for an unknown name.

    >>> nearest("peek", ["peak", "endpoint"], "score")
    "unknown score 'peek'; did you mean 'peak'? Known: endpoint, peak"
    """
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"unknown {what} '{name}'{hint} Known: {', '.join(known)}"


def pick(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of a table of named choices, or an error that names the right ones."""
    if name not in table:
        raise UnknownNameError(nearest(name, table, what))
    return table[name]


def require_finite(tensor: Tensor, what: str) -> None:
    """Raise where a tensor holds NaN or infinity."""
    if not tensor.is_floating_point():
        return
    tensor = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()  # torch has none for eight bits
    if math.isfinite(float(tensor.sum())):  # one pass, without a mask
        return
    if not (finite := tensor.isfinite()).all():  # a sum of finite numbers may overflow
        count = int((~finite).sum())
        raise NotFiniteError(f"{what} holds {count} NaN or infinite values of {tensor.numel()}; all must be finite")
