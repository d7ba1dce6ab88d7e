"""A state is a tensor, or a dict of named channels, each a tensor (crystals: type, coord, lattice).

What is written for one tensor is lifted to both by :func:`each`; nothing else in the library branches on which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fmwc.errors import ShapeError

__all__ = ["State", "batch_size", "channels", "each", "per_sample"]

State = Tensor | dict[str, Tensor]

SINGLE = "x"  # the name of the only channel of a state that is one tensor


def channels(state: State) -> dict[str, Tensor]:
    """The channels by name; a lone tensor is the channel `x`."""
    return state if isinstance(state, dict) else {SINGLE: state}


def each(f: Callable[..., Any], *states: Any) -> Any:
    """Applies `f` channel by channel. A lone tensor beside a dict is given to every channel.

    >>> import torch
    >>> each(torch.add, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    {'a': tensor([2.])}
    """
    names = next((list(s) for s in states if isinstance(s, dict)), None)
    if names is None:
        return f(*states)
    return {name: f(*(s[name] if isinstance(s, dict) else s for s in states)) for name in names}


def batch_size(state: State) -> int:
    """The number of samples in a state."""
    return next(iter(channels(state).values())).shape[0]


def per_sample(value: Tensor, count: int, owner: Tensor | None = None) -> Tensor:  # (B·k, *) -> (B,)
    """Sums everything that belongs to one sample. A layer may see a sample as several rows (tokens, patches).

    Arguments:
        owner: The sample each row belongs to, where samples have different numbers of rows (the atoms of crystals);
            `count` for a row that belongs to none.
    """
    if owner is not None:
        rows = value.reshape(len(owner), -1).sum(1)
        return rows.new_zeros(count + 1).index_add(0, owner, rows)[:count]
    if value.shape[0] % count:
        raise ShapeError(
            f"a layer's rows ({value.shape[0]}) are not a multiple of the {count} samples, so its variance cannot be "
            "given to samples; exclude that layer from the noise: attach(net, exclude=[...])"
        )
    return value.reshape(count, -1).sum(1)
