"""Resume points of a training: weights, the optimiser's state and the generator's, in one file, without pickle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmwc.errors import CheckpointError, MismatchError
from fmwc.files import read_tensors, write_tensors
from fmwc.identity import SEAL, difference, plain
from fmwc.readers import (
    anything,
    array,
    mapping,
    number,
    optional,
    record,
    text,
    whole,
)

__all__ = ["read_point", "save_point"]

STATE = ("step", "exp_avg", "exp_avg_sq")  # of Adam
_ABOUT = record(
    {
        "done": whole(),
        "identity": mapping(anything, 1000),
        "history": array(array(optional(number()), 2, 2)),
        SEAL: text(64, "[0-9a-f]{64}"),
    }
)


def save_point(
    path: Path,
    identity: dict[str, Any],
    done: int,
    history: Sequence[tuple[int, float]],
    kept: Sequence[Tensor],
    parameters: Sequence[Tensor],
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    """Write a resume point: all of it or nothing.

    Arguments:
        identity: Everything that the result depends on; a point is only resumed by a training that has the same.
        done: Steps taken.
        history: (step, loss) so far.
        kept: Parameters, averages and buffers.
        parameters: The tensors that the optimiser has a state for.
    """
    tensors = {f"kept.{i}": value.detach().cpu().clone().contiguous() for i, value in enumerate(kept)}
    for i, parameter in enumerate(parameters):
        for name, value in optimiser.state.get(parameter, {}).items():
            tensors[f"optimiser.{i}.{name}"] = torch.as_tensor(value).detach().cpu().clone().contiguous()
    tensors["generator"] = generator.get_state().cpu()
    about = {"done": done, "identity": plain(identity), "history": [_row(*row) for row in history]}
    write_tensors(path, tensors, about)


def read_point(
    path: Path,
    identity: dict[str, Any],
    kept: Sequence[Tensor],
    parameters: Sequence[Tensor],
    optimiser: torch.optim.Optimizer,
    generator: torch.Generator,
) -> tuple[int, list[tuple[int, float]]]:
    """Restore what :func:`save_point` wrote; return the steps taken and (step, loss) along the way."""
    tensors, about = read_tensors(path, _ABOUT, "a resume point")
    if rows := difference(about["identity"], identity):
        raise MismatchError(f"{path} is of a training with other settings ({rows}); delete it, or use another --out")
    try:
        own = [tensors[f"kept.{i}"] for i in range(sum(key.startswith("kept.") for key in tensors))]
        if [(v.shape, v.dtype) for v in own] != [(v.shape, v.dtype) for v in kept]:
            raise CheckpointError(f"{path} is of another architecture; delete it, or train into another --out")
        # A parameter that never got a gradient (a layer that does not run) has no state.
        states = {
            i: {name: tensors[f"optimiser.{i}.{name}"] for name in STATE}
            for i in range(len(parameters))
            if f"optimiser.{i}.step" in tensors
        }
        optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})
        generator.set_state(tensors["generator"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} was written on another kind of device; go on there, or delete it") from error
    with torch.no_grad():
        for value, read in zip(kept, own, strict=True):
            value.copy_(read)
    return about["done"], [(int(step), math.nan if loss is None else float(loss)) for step, loss in about["history"]]


def _row(step: int, loss: float) -> list[float | None]:
    return [step, loss if math.isfinite(loss) else None]  # clipped gradients survive a loss that is not a number
