"""A network of the user's own, by the name of the function that builds it, with the weights its author saved."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmwc.adapters import Adapted, Denoised
from fmwc.data import arrays
from fmwc.errors import CheckpointError, UsageError
from fmwc.flow import Space, as_space
from fmwc.modes import evaluating
from fmwc.state import State, batch_size, channels, each, precision_of

__all__ = ["build", "try_once"]


def build(entry: str, weights: str | Path | None = None) -> tuple[nn.Module, Space | None]:
    """The network that `module:function` makes, with weights from a file if one is given.

    The function takes no arguments and returns the network, or a pair of it and its space. The module is looked for
    where Python looks, and in the working directory.

    Arguments:
        entry: `package.module:function`.
        weights: A state dict: .safetensors, or .pt of tensors only.
    """
    module_name, colon, name = entry.partition(":")
    if not (module_name and colon and name):
        raise UsageError(f"a network is named module:function, got '{entry}'")
    with _importing_from(str(Path.cwd())):
        made = _called(entry, module_name, name)
    network, space = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(space, Sequence) and all(isinstance(size, int) for size in space):
        space = as_space(space)
    if not isinstance(network, nn.Module) or not (space is None or isinstance(space, Space)):
        raise UsageError(
            f"'{entry}' returns a torch module, or a pair of one and its space: fmwc.flow.Space, or a shape"
        )
    if weights is not None:
        try:
            _fill(network, arrays.read(weights))
        except RuntimeError as error:
            reason = " ".join(line.strip() for line in str(error).splitlines()[1:3])
            raise CheckpointError(f"{weights} does not fit the network of {entry}: {reason}") from error
    return network, space


def _fill(network: nn.Module, found: dict[str, Tensor]) -> None:
    """Loads weights as their author saved them: of the network below an adapter, compiled or in parallel or not."""
    for wrapper in ("_orig_mod.", "module."):
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): value for name, value in found.items()}
    inner = network.network if isinstance(network, (Adapted, Denoised)) else None
    below = inner is not None and found.keys() == inner.state_dict().keys()
    (inner if inner is not None and below else network).load_state_dict(found)


@contextmanager
def _importing_from(folder: str) -> Iterator[None]:
    """Inside, modules are also looked for in a folder: also those that a function imports when it is called."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # a module may have put its own in order
            sys.path.remove(folder)


def _called(entry: str, module_name: str, name: str) -> Any:
    """What the function of a module gives."""
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise UsageError(f"module '{module_name}' cannot be imported: {error}") from error
    except AttributeError as error:
        raise UsageError(f"module '{module_name}' has no '{name}'") from error
    if not callable(function) or isinstance(function, nn.Module):
        raise UsageError(f"'{entry}' is to be a function without arguments that returns the network")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsageError(f"'{entry}' is called without arguments, and it has some: {error}") from error
    try:
        return function()
    except Exception as error:  # whatever the user's own code raises
        raise UsageError(f"'{entry}' ended with {type(error).__name__}: {error}") from error


def try_once(network: nn.Module, x: State, cond: dict[str, Any]) -> None:
    """Runs the network once, as everything after does, and says what it does not take."""
    try:
        with evaluating(network), torch.no_grad():
            few = each(lambda c: c[:2].to(precision_of(network)), x)
            value = next(iter(channels(few).values()))
            half = torch.full((batch_size(few),), 0.5, device=value.device, dtype=value.dtype)
            network(few, half, **{k: v[:2] for k, v in cond.items()})
    except (RuntimeError, TypeError, IndexError) as error:
        shapes = ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in channels(x).items())
        given = f" and conditions {', '.join(cond)}" if cond else ""
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"the network does not run as network(x, t) on samples of {shapes}{given}: {reason}; one that is called "
            "otherwise gets an adapter, fmwc.adapters.adapt(net, time_first=True)"
        ) from error
