"""Resume points of a training: weights, the optimiser's state and the generator's, in one file, without pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from fmwc.errors import CheckpointError
from fmwc.files import write_bytes

__all__ = ["read_point", "save_point"]


def save_point(
    path: Path,
    identity: dict[str, Any],
    done: int,
    parameters: list[Any],
    optimiser: torch.optim.Adam,
    generator: torch.Generator,
) -> None:
    tensors = {f"parameter.{i}": p.detach().cpu().contiguous() for i, p in enumerate(parameters)}
    for i, parameter in enumerate(parameters):
        for name, value in optimiser.state.get(parameter, {}).items():  # averages have none
            tensors[f"optimiser.{i}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous().clone()
    tensors["generator"] = generator.get_state().cpu()
    write_bytes(path, save(tensors, {"fmwc": json.dumps({"done": done, "identity": identity})}))


def read_point(
    path: Path,
    identity: dict[str, Any],
    parameters: list[Any],
    optimiser: torch.optim.Adam,
    generator: torch.Generator,
) -> int:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["fmwc"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        written_for, done = about["identity"], int(about["done"])
    except Exception as error:
        raise CheckpointError(f"{path} is not a resume point, or is cut off; delete it to start over") from error
    if written_for != identity:
        raise CheckpointError(f"{path} was written with another plan or other data; delete it, or use another --out")
    shapes = [tuple(tensors[f"parameter.{i}"].shape) for i in range(sum(k.startswith("parameter.") for k in tensors))]
    if shapes != [tuple(p.shape) for p in parameters]:
        raise CheckpointError(f"{path} is of another architecture; delete it, or train into another --out")
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.copy_(tensors[f"parameter.{i}"])
    # A parameter that never got a gradient (a layer that does not run) has no state.
    state = {
        i: {n: tensors[f"optimiser.{i}.{n}"] for n in ("step", "exp_avg", "exp_avg_sq")}
        for i in range(len(parameters))
        if f"optimiser.{i}.step" in tensors
    }
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    try:
        generator.set_state(tensors["generator"])
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} was written on another kind of device; go on there, or delete it") from error
    return done
