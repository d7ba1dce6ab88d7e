"""A network of the user's own, by the name of the function that builds it, with the weights its author saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fmwc.adapters import Adapted, Denoised
from fmwc.data import arrays
from fmwc.entry import called, one_line
from fmwc.errors import CheckpointError, FmwcError, UsageError
from fmwc.flow import Space, as_space
from fmwc.modes import evaluating
from fmwc.state import State, batch_size, channels, each, precision_of

__all__ = ["build", "try_once"]

LARGEST = 1 << 28  # numbers of a sample


def build(entry: str, weights: str | Path | None = None) -> tuple[nn.Module, Space | None]:
    """The network that `module:function` makes, with weights from a file if one is given.

    The function takes no arguments and returns the network, or a pair of it and its space. The module is looked for
    where Python looks, and in the working directory.

    Arguments:
        entry: `package.module:function`.
        weights: A state dict: .safetensors, or .pt of tensors only.
    """
    made = called(entry, "a network")
    network, space = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if isinstance(space, (tuple, list)) and all(isinstance(size, int) for size in space):
        if not all(1 <= size <= LARGEST for size in space) or not 1 <= math.prod(space) <= LARGEST:
            raise UsageError(f"'{entry}' returns the shape {str(tuple(space))[:100]}, which no sample can have")
        space = as_space(space)
    if not isinstance(network, nn.Module) or not (space is None or isinstance(space, Space)):
        raise UsageError(
            f"'{entry}' returns a torch module, or a pair of one and its space: fmwc.flow.Space, or a shape; got "
            f"{type(made).__name__}"
        )
    for name, weight in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(weight) or weight.is_meta:
            raise UsageError(f"'{entry}' returns a network whose '{name}' has no numbers yet; run it once, or load it")
    if weights is not None:
        try:
            _fill(network, arrays.read(weights))
        except RuntimeError as error:
            reason = " ".join(line.strip() for line in str(error).splitlines()[1:3])[:300]
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


def try_once(network: nn.Module, x: State, cond: dict[str, Any]) -> None:
    """Runs the network once, as everything after does, and says what it does not take."""
    few = each(lambda c: c[:2].to(precision_of(network)), x)
    value = next(iter(channels(few).values()))
    half = torch.full((batch_size(few),), 0.5, device=value.device, dtype=value.dtype)
    shapes = ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in channels(x).items())
    given = f" and conditions {', '.join(cond)}" if cond else ""
    try:
        with evaluating(network), torch.no_grad():
            velocity = network(few, half, **{k: v[:2] for k, v in cond.items()})
    except FmwcError:
        raise
    except Exception as error:  # whatever the user's own code raises
        raise UsageError(
            f"the network does not run as network(x, t) on samples of {shapes}{given}: {one_line(error)}; one that is "
            "called otherwise gets an adapter, fmwc.adapters.adapt(net, time_first=True)"
        ) from error
    alike = isinstance(velocity, (Tensor, dict)) and isinstance(velocity, dict) == isinstance(few, dict)
    found = channels(velocity) if alike else {}
    wanted = {name: value.shape for name, value in channels(few).items()}
    if {name: getattr(value, "shape", None) for name, value in found.items()} != wanted:
        came = {n: tuple(getattr(v, "shape", ())) for n, v in found.items()} or type(velocity).__name__
        raise UsageError(f"the network returns a velocity of the samples' shape, {shapes}{given}; got {came}")
