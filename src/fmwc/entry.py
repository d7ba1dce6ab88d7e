"""Build networks and other objects that users name as `module:function`."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fmwc.adapters import Adapted, Denoised
from fmwc.data import arrays
from fmwc.errors import CheckpointError, FmwcError, UsageError
from fmwc.flow import Space, as_space
from fmwc.identity import digest_file
from fmwc.modes import evaluating
from fmwc.readers import shown
from fmwc.state import State, batch_size, channels, precision_of, tree_map

__all__ = ["build", "call_entry", "one_line", "source_of", "try_once"]

T = TypeVar("T")

LARGEST = 1 << 28  # maximum size of a sample, in numbers


# ---- functions ---------------------------------------------------------------------------------------------------


def call_entry(entry: str, what: str) -> Any:
    """Import `package.module:function`, call it without arguments, and return its result.

    The module is searched on Python's path and in the working directory. Every failure raises a one-line error.

    Arguments:
        entry: The function, as `package.module:function`.
        what: A description of the result for error messages, such as `a network`.
    """
    module_name, colon, name = entry.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(f"{what} must be given as module:function, such as my_models:make; got '{shown(entry)[:200]}'")
    with _importing_from(os.getcwd()):
        module = _guarded(lambda: importlib.import_module(module_name), f"module '{module_name}' cannot be imported")
        function = _guarded(lambda: getattr(module, name, None), f"'{entry}' cannot be looked up")
        if function is None:
            raise UsageError(f"module '{module_name}' has no function '{name}'")
        if not callable(function) or (hasattr(function, "state_dict") and not isinstance(function, type)):
            raise UsageError(f"'{entry}' must be a function without arguments that returns {what}")
        _require_no_arguments(entry, function)
        result = _guarded(function, f"'{entry}' failed")
        if inspect.iscoroutine(result):
            result.close()  # otherwise Python warns that it was never awaited
            raise UsageError(f"'{entry}' is asynchronous; give a plain function that returns {what}")
        return result


def source_of(entry: str) -> str | None:
    """Return a hash of the file of a module that was imported by :func:`call_entry`; `None` for other names."""
    module_name, colon, _ = entry.partition(":")
    file = getattr(sys.modules.get(module_name), "__file__", None) if colon else None
    return digest_file(Path(file)) if file and Path(file).is_file() else None


def one_line(error: BaseException, longest: int = 200) -> str:
    """Return the message of an exception as one line of bounded length."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # a user's exception class may fail to print
        words = ""
    return shown(f"{type(error).__name__}: {words}"[:longest]).removesuffix(": ")


def _require_no_arguments(entry: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"'{entry}' must be callable without arguments: {error}") from error


def _guarded(function: Callable[[], T], problem: str) -> T:
    """Call user code. Any exception, even SystemExit, becomes a UsageError; only KeyboardInterrupt passes through."""
    try:
        return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UsageError(f"{problem}: {one_line(error)}") from error


@contextmanager
def _importing_from(folder: str) -> Iterator[None]:
    """Add a folder to the search path of modules."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # a module may have changed the path itself
            sys.path.remove(folder)


# ---- networks ----------------------------------------------------------------------------------------------------


def build(entry: str, weights: str | Path | None = None) -> tuple[nn.Module, Space | None]:
    """Build a network, load its weights if a file is given, and return the network and its space.

    Arguments:
        entry: `package.module:function`; the function returns the network, or a pair of the network and its space.
        weights: A file with a state dict: .safetensors, or .pt with tensors only.
    """
    made = call_entry(entry, "a network")
    network, space = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(space, (tuple, list)) and all(isinstance(size, int) for size in space):
        if not all(1 <= size <= LARGEST for size in space) or not 1 <= math.prod(space) <= LARGEST:
            raise UsageError(
                f"'{entry}' returns the shape {str(tuple(space))[:100]}; it must have positive sizes and at most "
                f"{LARGEST:,} numbers"
            )
        space = as_space(space)
    if not isinstance(network, nn.Module) or not (space is None or isinstance(space, Space)):
        raise UsageError(
            f"'{entry}' must return a torch module, or a pair of a module and its space (fmwc.flow.Space or a shape); "
            f"got {type(made).__name__}"
        )
    for name, weight in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(weight) or weight.is_meta:
            raise UsageError(f"'{entry}' returns a network whose '{name}' is not initialised; run the network once")
    if weights is not None:
        try:
            _load_weights(network, arrays.read(weights))
        except RuntimeError as error:
            reason = " ".join(line.strip() for line in str(error).splitlines()[1:3])[:300]
            raise CheckpointError(f"{weights} does not fit the network of {entry}: {reason}") from error
    return network, space


def _load_weights(network: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load a state dict that was saved with or without an adapter, `torch.compile` or `DataParallel`."""
    for wrapper in ("_orig_mod.", "module."):
        if all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    if isinstance(network, (Adapted, Denoised)) and isinstance(network.network, nn.Module):
        inner = network.network
        network = inner if weights.keys() == inner.state_dict().keys() else network
    network.load_state_dict(weights)


def try_once(network: nn.Module, x: State, cond: dict[str, Any]) -> None:
    """Run the network on two samples; raise UsageError if it cannot be called as `network(x, t, **cond)`."""
    first = tree_map(lambda c: c[:2].to(precision_of(network)), x)
    value = next(iter(channels(first).values()))
    half = torch.full((batch_size(first),), 0.5, device=value.device, dtype=value.dtype)
    shapes = ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in channels(x).items())
    given = f" and conditions {', '.join(cond)}" if cond else ""
    try:
        with evaluating(network), torch.no_grad():
            velocity = network(first, half, **{k: v[:2] for k, v in cond.items()})
    except FmwcError:
        raise
    except Exception as error:  # user code may raise anything
        raise UsageError(
            f"the network does not run as network(x, t) on samples of {shapes}{given}: {one_line(error)}; if it has "
            "another signature, wrap it with fmwc.adapters.adapt, for example adapt(net, time_first=True)"
        ) from error
    alike = isinstance(velocity, (Tensor, dict)) and isinstance(velocity, dict) == isinstance(first, dict)
    returned = {name: getattr(v, "shape", None) for name, v in channels(velocity).items()} if alike else {}
    if returned != {name: value.shape for name, value in channels(first).items()}:
        came = {name: tuple(shape or ()) for name, shape in returned.items()} or type(velocity).__name__
        raise UsageError(f"the network must return a velocity with the shape of the samples, {shapes}; got {came}")
