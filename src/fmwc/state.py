"""A state is a tensor, or a dict of named channels, each a tensor (crystals: type, coord, lattice).

What is written for one tensor is lifted to both by :func:`each`; nothing else in the library branches on which it is.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError

__all__ = [
    "State",
    "as_numbers",
    "as_rows",
    "as_state",
    "as_whole",
    "batch_size",
    "blame_conditions",
    "channels",
    "each",
    "out_of_memory",
    "per_sample",
    "precision_of",
    "require_state",
    "wide",
]

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


def precision_of(network: Any) -> torch.dtype:
    """The precision that a network's states are in: single, or double where its weights are."""
    weights = network.parameters() if isinstance(network, nn.Module) else ()
    dtype = next((p.dtype for p in weights if p.is_floating_point()), torch.float32)
    if dtype in (torch.float16, torch.bfloat16):
        raise UsageError(
            f"the network's weights are in {dtype}, too coarse for the steps of a flow: net.float(), and speed by "
            "torch.autocast around the call"
        )
    return dtype


def as_rows(value: Any, what: str) -> Tensor:
    """A tensor with a row per sample, from a tensor, an array, or a list of rows."""
    if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
        raise UsageError(
            f"{what} is one tensor with a row per sample, or a dict of channels, got {type(value).__name__}"
        )
    try:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Tensor, np.ndarray)):
            return torch.stack([torch.as_tensor(row) for row in value])
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(
            f"{what} is one tensor with a row per sample; the rows of this {type(value).__name__} are not numbers of "
            "one shape"
        ) from error


def as_state(value: Any, what: str, network: Any = None, device: torch.device | None = None) -> Any:
    """A state from tensors, arrays or lists, in the precision of a network's weights, where it has any, on a device.

    >>> as_state([[1.0, 2.0]], "x0")
    tensor([[1., 2.]])
    """
    weights = network.parameters() if isinstance(network, nn.Module) else ()
    dtype = next((p.dtype for p in weights if p.dtype in (torch.float32, torch.float64)), None)

    def one(value: Any) -> Tensor:
        found = as_rows(value, what)
        if found.is_complex() or found.dtype == torch.bool:
            raise UsageError(f"{what} holds {found.dtype}, and a flow is of real numbers; x.float()")
        if not found.ndim:
            raise ShapeError(f"{what} is one tensor with a row per sample, got a single number")
        if dtype is not None and found.dtype not in (torch.float16, torch.bfloat16):
            found = found.to(dtype)
        elif not found.is_floating_point():
            found = found.float()
        return found if device is None else found.to(device)

    return each(one, value)


SEEDS = -(1 << 63), (1 << 64) - 1  # what torch's generators take, and files hold


def as_numbers(value: Any, what: str, device: torch.device | str | None = None) -> Tensor:
    """A list or array as a tensor; text is refused in one line.

    >>> as_numbers(["cat", "dog"], "the condition 'y'")
    Traceback (most recent call last):
    fmwc.errors.UsageError: the condition 'y' is not made of numbers; give a number for each text
    """
    try:
        return torch.as_tensor(value, device=device)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{what} is not made of numbers; give a number for each text") from error


def as_whole(value: Any, name: str, low: int = SEEDS[0], high: int = SEEDS[1], unit: str = "") -> int:
    """A whole number in a range, from an int or an integer of numpy's or torch's; name and unit are for the error.

    >>> as_whole(np.int64(5), "count", 1)
    5
    """
    try:
        found = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not low <= found <= high:
        least = f"{low} {unit}".strip()
        raise UsageError(f"{name} is a whole number, at least {least} and at most {high}, got {value!r:.60}")
    return found


def out_of_memory(error: Exception) -> bool:
    """Whether that is what an error says: torch has a class of its own for it on a GPU, and words on a CPU."""
    words = ("not enough memory", "can't allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)


_DEVICE = ("CUDA error", "cuDNN error", "CUBLAS", "CUDNN", "NCCL")  # in the text of errors of a GPU itself


def blame_conditions(error: Exception, cond: dict[str, Any], count: int) -> None:
    """Raises an error that names the condition which a network failed on; returns if the error's text accuses none.

    A condition is to blame where the network has no such argument, where a number or a list was used as a tensor (the
    text names its type), or where its rows are not one per sample (the text names how many there are).
    """
    text = str(error)
    if out_of_memory(error) or any(word in text for word in _DEVICE):
        return
    reason = (text.splitlines() or [type(error).__name__])[0]
    if isinstance(error, TypeError) and (found := re.search(r"unexpected keyword argument '(\w+)'", text)):
        if found[1] in cond:
            raise UsageError(f"the network takes no condition '{found[1]}' ({reason}); leave it out") from error
        return
    for name, value in cond.items():
        if isinstance(value, Tensor):
            rows = value.shape[0] if value.ndim else 1
            if rows not in (1, count) and re.search(rf"(?<!\d){rows}(?!\d)", text):
                raise ShapeError(
                    f"condition '{name}' has {rows} rows for {count} samples; give one per sample ({reason})"
                ) from error
            continue
        used = isinstance(error, (AttributeError, TypeError)) and re.search(rf"\b{type(value).__name__}\b", text)
        if not used or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)):
            raise UsageError(
                f"the network does not take the number {name}={value} ({reason}); give one per sample: "
                f"{name}=torch.full(({count},), {value})"
            ) from error
        if isinstance(value, (list, tuple, np.ndarray)):
            raise UsageError(
                f"the network does not take a {type(value).__name__} as condition '{name}' ({reason}); give a tensor"
            ) from error


def wide(value: Tensor) -> Tensor:
    """A value in single precision at least: sums of many squares drown in half (autocast, bfloat16 networks)."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def require_state(value: Any, what: str) -> None:
    """Raises where a network gave something else than a state: a tuple, say, or a library's own class of outputs."""
    named = type(value) in (dict, OrderedDict) and value and all(isinstance(c, Tensor) for c in value.values())
    if isinstance(value, Tensor) or named:
        return
    raise UsageError(
        f"{what} is a tensor or a dict of named tensors, got {type(value).__name__}; say which part it is: "
        "fmwc.adapters.adapt(net, output=lambda found: found[0])"
    )


def per_sample(value: Tensor, count: int, owner: Tensor | None = None) -> Tensor:  # (B·k, *) -> (B,)
    """Sums everything that belongs to one sample. A layer may see a sample as several rows (tokens, patches).

    Arguments:
        owner: The sample each row belongs to, where samples have different numbers of rows (the atoms of crystals);
            `count` for a row that belongs to none.
    """
    # Dimension by dimension: flattened first, a compiler would go through them in that order, whatever their layout.
    rows = value.sum(tuple(range(1, value.ndim))) if value.ndim > 1 else value
    if owner is not None:
        return rows.new_zeros(count + 1).index_add(0, owner, rows)[:count]
    if value.shape[0] % count:
        raise ShapeError(
            f"a layer's rows ({value.shape[0]}) are not a multiple of the {count} samples, so its variance cannot be "
            "given to samples; exclude that layer from the noise: attach(net, exclude=[...])"
        )
    return rows.view(count, -1).sum(1)
