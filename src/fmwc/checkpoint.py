"""Checkpoints: a folder with `model.safetensors` and `recipe.json`. No pickle; written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from fmwc.errors import CheckpointError, nearest, require_finite
from fmwc.field import Field, Reference, attach
from fmwc.files import write_bytes, write_json
from fmwc.flow import Space
from fmwc.nets import NETS
from fmwc.weights import shipped

__all__ = ["FORMAT", "about", "load", "save"]

FORMAT = 1
_REFERENCE = "reference.quantiles"


def save(field: Field, path: str | Path, *, recipe: dict[str, Any] | None = None, **extra: Any) -> Path:
    """Writes a field to a folder.

    Arguments:
        field: The field; its network is rebuilt on loading if it is one of `fmwc.nets`, else `load` must be given one.
        path: The folder.
        recipe: How it was made.
        extra: More to record: metrics, the data's fingerprint.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder")
    # Copies, because weights that are tied share memory, which the format does not know.
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in field.state_dict().items()}
    for name, tensor in tensors.items():
        require_finite(tensor, f"weight '{name}'")
    kind = type(field.network).__name__
    known = NETS.get(kind) is type(field.network)
    record = {
        "format": FORMAT,
        "network": {"kind": kind, "config": field.network.config if known else None},
        "noise": {**field.noise.options, "layers": field.noise.names},
        "prior_rate": field.prior_rate,
        "kl_factor": field.kl_factor,
        "space": field.space.describe() if field.space else None,
        "recipe": recipe,
        **extra,
    }
    if field.reference is not None:
        record["reference"] = {"score": field.reference.score, "setting": field.reference.setting}
        tensors[_REFERENCE] = field.reference.quantiles.detach().cpu().contiguous()
    # The record goes last: a folder without one is not a checkpoint yet.
    write_bytes(path / "model.safetensors", to_bytes(tensors))
    write_json(path / "recipe.json", record)
    return path


def about(path: str | Path) -> dict[str, Any]:
    """The record of a checkpoint, by shipped name or path."""
    folder = _find(path)
    try:
        record = json.loads((folder / "recipe.json").read_text())
        version = int(record["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/recipe.json cannot be read; the checkpoint is cut off or not ours") from error
    if version > FORMAT:
        raise CheckpointError(f"{folder} has format {version} and this fmwc reads up to {FORMAT}; upgrade fmwc")
    return record


def load(path: str | Path, network: nn.Module | None = None, *, device: torch.device | str = "cpu") -> Field:
    """Reads a field from a folder, or by the name of shipped weights.

    Arguments:
        path: `"checkerboard"` and the like, or a folder that `save` wrote.
        network: The network to load into, where it is one of your own; its weights are overwritten.
        device: Where to put it.
    """
    folder, record = _find(path), about(path)
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except Exception as error:
        raise CheckpointError(f"{folder}/model.safetensors is missing or cut off; copy it again") from error
    try:
        field = _build(folder, record, network)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/recipe.json lacks what is needed to build the field ({error})") from error
    quantiles = tensors.pop(_REFERENCE, None)
    _check_shapes(folder, field, tensors)
    field.load_state_dict(tensors)
    if quantiles is not None:
        field.reference = Reference(record["reference"]["score"], record["reference"]["setting"], quantiles)
    for name, tensor in tensors.items():
        require_finite(tensor, f"{folder}: weight '{name}'")
    return field.to(device)


def _find(path: str | Path) -> Path:
    folder = Path(path)
    if (folder / "recipe.json").is_file():
        return folder
    names = shipped()
    if str(path) in names:
        return names[str(path)]
    if folder.exists():
        raise CheckpointError(f"{folder} holds no recipe.json, so it is not a checkpoint")
    raise CheckpointError(f"{nearest(str(path), names, 'checkpoint')}; or give the path of a folder")


def _build(folder: Path, record: dict[str, Any], network: nn.Module | None) -> Field:
    kind, config = record["network"]["kind"], record["network"]["config"]
    if network is None:
        if config is None or kind not in NETS:
            raise CheckpointError(f"{folder} holds a {kind}, not one of ours; give it: load(path, network=net)")
        network = NETS[kind](**config)
    noise = record["noise"]
    field = attach(
        network,
        include=noise["include"],
        exclude=noise["exclude"],
        width=noise["width"],
        initial_log_alpha=noise["initial_log_alpha"],
        space=Space.from_description(record["space"]) if record["space"] else None,
        prior_rate=record["prior_rate"],
        kl_factor=record.get("kl_factor", 0.5),
    )
    if field.noise.names != noise["layers"]:
        raise CheckpointError(
            f"{folder} is of another architecture: its noisy layers are {noise['layers']}, not {field.noise.names}"
        )
    return field


def _check_shapes(folder: Path, field: Field, tensors: dict[str, Tensor]) -> None:
    wanted = {k: tuple(v.shape) for k, v in field.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in tensors.items()}
    wrong = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder} is of another architecture: {name} is {found.get(name, 'missing')} in the file and "
            f"{wanted.get(name, 'missing')} in the network ({len(wrong)} such)"
        )
