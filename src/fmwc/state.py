"""States, which are tensors or dicts of named channels (crystals: type, coord, lattice).

:func:`tree_map` applies a function of tensors to both kinds.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fmwc.errors import ShapeError, UsageError

__all__ = [
    "State",
    "as_conditions",
    "as_labels",
    "as_numbers",
    "as_rows",
    "as_state",
    "as_whole",
    "batch_size",
    "blame_conditions",
    "channels",
    "first_channel",
    "has_rows",
    "out_of_memory",
    "per_sample",
    "precision_of",
    "require_labels",
    "require_state",
    "select",
    "select_conditions",
    "tree_map",
    "unsqueeze_like",
    "wide",
]

State = Tensor | dict[str, Tensor]

SINGLE = "x"  # the channel name of a state that is a single tensor


def channels(state: State) -> dict[str, Tensor]:
    """Return the channels by name; a single tensor is the channel `x`."""
    return state if isinstance(state, dict) else {SINGLE: state}


def tree_map(f: Callable[..., Any], *states: Any) -> Any:
    """Apply `f` to each channel. If some states are dicts, plain tensors are passed with every channel.

    >>> import torch
    >>> tree_map(torch.add, {"a": torch.ones(1)}, {"a": torch.ones(1)})
    {'a': tensor([2.])}
    """
    names = next((list(s) for s in states if isinstance(s, dict)), None)
    if names is None:
        return f(*states)
    return {name: f(*(s[name] if isinstance(s, dict) else s for s in states)) for name in names}


def first_channel(state: State) -> Tensor:
    """Return the first channel; all channels have the same batch size and device."""
    return next(iter(channels(state).values()))


def batch_size(state: State) -> int:
    """Return the number of samples in a state."""
    return first_channel(state).shape[0]


def unsqueeze_like(value: Tensor, like: Tensor) -> Tensor:  # (B,) -> (B, 1, …)
    """Append dimensions of size 1 until a tensor has as many dimensions as another."""
    return value[(..., *[None] * (like.ndim - value.ndim))]


def precision_of(network: Any) -> torch.dtype:
    """Return the precision of a network's states: double if its weights are double, else single."""
    weights = network.parameters() if isinstance(network, nn.Module) else ()
    dtype = next((p.dtype for p in weights if p.is_floating_point()), torch.float32)
    if dtype in (torch.float16, torch.bfloat16):
        raise UsageError(
            f"the network's weights are in {dtype}, which is too coarse for the steps of a flow; use net.float(), with "
            "torch.autocast around the call for speed"
        )
    return dtype


def as_rows(value: Any, what: str) -> Tensor:
    """Convert a tensor, an array or a list of rows to a tensor with one row per sample."""
    if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
        raise UsageError(
            f"{what} must be one tensor with one row per sample, or a dict of channels; got {type(value).__name__}"
        )
    try:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Tensor, np.ndarray)):
            return torch.stack([torch.as_tensor(row) for row in value])
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(
            f"{what} must be one tensor with a row per sample; the rows of this {type(value).__name__} are not numbers "
            "of one shape"
        ) from error


def as_state(value: Any, what: str, network: Any = None, device: torch.device | None = None) -> Any:
    """Convert tensors, arrays or lists to a state on a device, in the precision of a network's weights.

    >>> as_state([[1.0, 2.0]], "x0")
    tensor([[1., 2.]])
    """
    weights = network.parameters() if isinstance(network, nn.Module) else ()
    dtype = next((p.dtype for p in weights if p.dtype in (torch.float32, torch.float64)), None)

    def one(value: Any) -> Tensor:
        rows = as_rows(value, what)
        if rows.is_complex() or rows.dtype == torch.bool:
            raise UsageError(f"{what} has type {rows.dtype}, but a flow needs real numbers; use x.float()")
        if not rows.ndim:
            raise ShapeError(f"{what} must be one tensor with one row per sample; got a single number")
        if dtype is not None and rows.dtype not in (torch.float16, torch.bfloat16):
            rows = rows.to(dtype)
        elif not rows.is_floating_point():
            rows = rows.float()
        return rows if device is None else rows.to(device)

    return tree_map(one, value)


SEEDS = -(1 << 63), (1 << 64) - 1  # the range of torch's generators


def as_numbers(value: Any, what: str, device: torch.device | str | None = None) -> Tensor:
    """Convert a list or array to a tensor; raise if it holds text.

    >>> as_numbers(["cat", "dog"], "the condition 'y'")
    Traceback (most recent call last):
    fmwc.errors.UsageError: the condition 'y' must hold numbers; give a number for each text
    """
    try:
        return torch.as_tensor(value, device=device)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{what} must hold numbers; give a number for each text") from error


def as_labels(value: Any, what: str) -> np.ndarray:
    """Return labels as numbers: 1 for failed (or positive) samples, 0 for others, NaN for those without a label.

    >>> as_labels([True, False, None], "labels")
    array([ 1.,  0., nan])
    """
    try:
        found = np.asarray(value.detach().cpu().double() if isinstance(value, Tensor) else value, dtype=float)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} must hold True, False, or None for samples without a label, got {value!r:.60}"
        ) from error
    strange = found[~(np.isnan(found) | (found == 0) | (found == 1))]
    if strange.size:
        raise UsageError(
            f"{what} must hold 1 (or True), 0 (or False), or NaN for samples without a label, got {strange[0]:.6g}; "
            "compare numbers with a limit, as in energy > 0.1"
        )
    return found


def require_labels(value: Any, what: str) -> np.ndarray:
    """Return labels as booleans; raise if a sample has none."""
    found = as_labels(value, what)
    if missing := int(np.isnan(found).sum()):
        raise UsageError(f"{what} must hold one label per sample; {missing} of {found.size} are missing (NaN or None)")
    return found == 1


def as_whole(value: Any, name: str, low: int = SEEDS[0], high: int = SEEDS[1], unit: str = "") -> int:
    """Convert an integer of Python, numpy or torch to an int, and check its range; `name` and `unit` are for the error.

    >>> as_whole(np.int64(5), "count", 1)
    5
    """
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        least = f"{low} {unit}".strip()
        raise UsageError(f"{name} must be a whole number, at least {least} and at most {high}; got {value!r:.60}")
    return number


def out_of_memory(error: Exception) -> bool:
    """Return whether an error reports a lack of memory; on a CPU, torch reports it only in the text."""
    words = ("not enough memory", "can't allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(word in str(error) for word in words)


_DEVICE = ("CUDA error", "cuDNN error", "CUBLAS", "CUDNN", "NCCL")  # parts of errors of the GPU


def as_conditions(cond: Any) -> dict[str, Any]:
    """Return the conditions by name; an empty dict for `None`. Small integer types are converted to 64 bits.

    Data files often hold labels as bytes, which embeddings do not accept.

    >>> as_conditions({"y": 3}), as_conditions(None)
    ({'y': 3}, {})
    """
    if cond is not None and not isinstance(cond, Mapping):
        raise UsageError(f"conditions must be given by name, such as cond={{'y': y}}; got {type(cond).__name__}")
    return {name: _widened(value) for name, value in (cond or {}).items()}


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype in (torch.uint8, torch.int8, torch.int16):
        return value.long()
    return value.astype(np.int64) if isinstance(value, np.ndarray) and value.dtype.kind in "iu" else value


def select(state: State, rows: Any) -> Any:
    """Return some of the samples of a state, by a slice, a mask or indices."""
    return tree_map(lambda c: c[rows], state)


def has_rows(value: Any, count: int) -> bool:
    """Return whether a condition is a tensor with one row per sample."""
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def select_conditions(cond: Mapping[str, Any], rows: Any, count: int) -> dict[str, Any]:
    """Return the conditions of some of `count` samples. Values without one row per sample are kept unchanged.

    Arguments:
        cond: The conditions. Tensors, and lists of texts, may have one row per sample.
        rows: A slice, or a tensor of indices.
        count: The number of samples.
    """

    def one(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            return value[rows] if isinstance(rows, slice) else [value[row] for row in rows.tolist()]
        return value[rows] if has_rows(value, count) else value

    return {name: one(value) for name, value in cond.items()}


def blame_conditions(error: Exception, cond: dict[str, Any], count: int) -> None:
    """Raise an error that names the condition on which a network failed; return if none can be identified.

    A condition is identified if it is missing, if the network has no such argument, if it is a number or a list used as
    a tensor (the error contains its type), or if it does not have one row per sample (the error contains its number of
    rows).
    """
    text = str(error)
    if out_of_memory(error) or any(word in text for word in _DEVICE):
        return
    reason = (text.splitlines() or [type(error).__name__])[0]
    if isinstance(error, TypeError) and (argument := re.search(r"unexpected keyword argument '(\w+)'", text)):
        if argument[1] in cond:
            raise UsageError(f"the network has no condition '{argument[1]}' ({reason}); leave it out") from error
        return
    if isinstance(error, TypeError) and (missing := re.search(r"missing \d+ required [\w-]+ arguments?: (.+)", text)):
        raise UsageError(
            f"the network needs the conditions {missing[1]}; give cond={{name: values}}, with one row per sample"
        ) from error
    for name, value in cond.items():
        kind = type(value).__name__
        if isinstance(value, Tensor):
            if value.dtype == torch.bool and "Bool" in text:
                raise UsageError(
                    f"the network does not accept True and False as condition '{name}' ({reason}); give numbers: "
                    f"cond={{'{name}': values.long()}}"
                ) from error
            rows = value.shape[0] if value.ndim else 1
            if rows != count and re.search(rf"(?<!\d){rows}(?!\d)", text):
                raise ShapeError(
                    f"condition '{name}' has {rows} row{'s' * (rows != 1)} for {count} samples; give one per sample "
                    f"({reason})"
                ) from error
        elif isinstance(error, (AttributeError, TypeError)) and re.search(rf"\b{kind}\b", text):
            if isinstance(value, (int, float)):
                raise UsageError(
                    f"the network does not accept the number {name}={value} ({reason}); give one per sample: "
                    f"cond={{'{name}': torch.full(({count},), {value:g})}}"
                ) from error
            if isinstance(value, (list, tuple, np.ndarray)):
                raise UsageError(
                    f"the network does not accept a {kind} as condition '{name}' ({reason}); give a tensor"
                ) from error


def wide(value: Tensor) -> Tensor:
    """Convert half precision to single, in which sums of many squares are accurate."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def require_state(value: Any, what: str) -> None:
    """Raise if a network's output is not a state but, for example, a tuple or an output class of another library."""
    named = type(value) in (dict, OrderedDict) and value and all(isinstance(c, Tensor) for c in value.values())
    if isinstance(value, Tensor) or named:
        return
    raise UsageError(
        f"{what} must be a tensor or a dict of tensors; got {type(value).__name__}; select the right part with "
        "fmwc.adapters.adapt(net, output=lambda result: result[0])"
    )


def per_sample(value: Tensor, count: int, owner: Tensor | None = None) -> Tensor:  # (B·k, *) -> (B,)
    """Sum the values of each sample. A layer may have several rows per sample (tokens, patches).

    Arguments:
        owner: The sample index of each row, if samples have different numbers of rows (the atoms of crystals); `count`
            for unused rows.
    """
    # Do not flatten first: a compiler would then traverse the dimensions in that order, whatever their layout.
    rows = value.sum(tuple(range(1, value.ndim))) if value.ndim > 1 else value
    if owner is not None:
        return rows.new_zeros(count + 1).index_add(0, owner, rows)[:count]
    if value.shape[0] % count:
        raise ShapeError(
            f"a layer's rows ({value.shape[0]}) are not a multiple of the {count} samples, so its variance cannot be "
            "assigned to samples; exclude that layer from the noise: attach(net, exclude=[...])"
        )
    return rows.view(count, -1).sum(1)
