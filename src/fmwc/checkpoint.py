"""Checkpoints: a folder with `recipe.json` and `model.safetensors` (or its parts), written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from fmwc.eightbit import decode, encode
from fmwc.errors import CheckpointError, nearest, require_finite
from fmwc.field import Field, Reference, Schedule, attach
from fmwc.files import write_bytes, write_json
from fmwc.flow import Space
from fmwc.nets import NETS
from fmwc.sampling import Standard
from fmwc.weights import shipped

__all__ = ["FORMAT", "about", "load", "load_network", "save", "save_network", "save_schedule"]

FORMAT = 1
PART = 5_000_000  # bytes a file, at most, where a checkpoint is in parts: what a repository takes without complaint
_REFERENCE = "reference."
_SCHEDULE = "schedule.json"
_SCALE = ":scale"  # of a matrix in eight bits


def save(
    field: Field, path: str | Path, *, recipe: dict[str, Any] | None = None, eightbit: bool = False, **extra: Any
) -> Path:
    """Writes a field to a folder.

    Arguments:
        field: The field; its network is rebuilt on loading if it is one of `fmwc.nets`, else `load` must be given one.
        path: The folder.
        recipe: How it was made.
        eightbit: Write matrices in eight bits (:mod:`fmwc.eightbit`), in files of a few megabytes: for shipping a large
            network. What was not rounded before is rounded by it.
        extra: More to record: metrics, the data's fingerprint.
    """
    network = field.network
    known = NETS.get(type(network).__name__) is type(network)
    record = {
        "network": {"kind": type(network).__name__, "config": network.config if known else None},
        "noise": {**field.noise.options, "layers": field.noise.names},
        "prior_rate": field.prior_rate,
        "kl_factor": field.kl_factor,
        "space": field.space.describe() if field.space else None,
        "recipe": recipe,
        **extra,
    }
    tensors = dict(field.state_dict())
    if field.reference is not None:
        record["reference"] = {"score": field.reference.score, "setting": field.reference.setting}
        tensors[f"{_REFERENCE}quantiles"] = field.reference.quantiles
        if (standard := field.reference.standard) is not None:
            record["reference"]["within"] = standard.cond
            tensors |= {f"{_REFERENCE}centre": standard.centre, f"{_REFERENCE}spread": standard.spread}
    folder = _write(Path(path), tensors, record, eightbit)
    if field.schedule is None:
        (folder / _SCHEDULE).unlink(missing_ok=True)
    else:
        save_schedule(field.schedule, folder)
    return folder


def save_schedule(schedule: Schedule, folder: str | Path) -> Path:
    """Writes a schedule beside the weights it was fitted to: they are not touched."""
    reference, standard = schedule.reference, schedule.reference.standard
    found = {"score": reference.score, "setting": reference.setting, "quantiles": _digits(reference.quantiles)}
    if standard is not None:
        found |= {"within": standard.cond, "centre": _digits(standard.centre), "spread": _digits(standard.spread)}
    content = {"times": schedule.times, "agreement": round(schedule.agreement, 4), "reference": found}
    return write_json(Path(folder) / _SCHEDULE, content)


def _digits(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def save_network(network: nn.Module, path: str | Path, *, recipe: dict[str, Any] | None = None, **extra: Any) -> Path:
    """Writes a network of `fmwc.nets` that has no noise (a judge), in the same format."""
    kind = type(network).__name__
    if NETS.get(kind) is not type(network):
        raise CheckpointError(f"{kind} is not one of fmwc's networks, so it could not be built again")
    record = {"network": {"kind": kind, "config": network.config}, "recipe": recipe, **extra}
    return _write(Path(path), dict(network.state_dict()), record)


def _write(path: Path, tensors: dict[str, Tensor], record: dict[str, Any], eightbit: bool = False) -> Path:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a folder")
    # Copies, because weights that are tied share memory, which the format does not know.
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not name.startswith(_REFERENCE):  # NaN there is a condition never seen
            require_finite(tensor, f"weight '{name}'")
    parts = _parts(_compressed(tensors)) if eightbit else [tensors]
    # The record goes last, and an old one goes first: a folder without one is not a checkpoint.
    (path / "recipe.json").unlink(missing_ok=True)
    for name, part in zip(_files(len(parts)), parts, strict=True):
        write_bytes(path / name, to_bytes(part))
    write_json(path / "recipe.json", {"format": FORMAT, **({"parts": len(parts)} if eightbit else {}), **record})
    return path


def _files(parts: int) -> list[str]:
    return ["model.safetensors"] if parts == 1 else [f"model-{i + 1}-of-{parts}.safetensors" for i in range(parts)]


def _compressed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    small: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and tensor.is_floating_point() and not name.startswith(_REFERENCE):
            small[name], small[name + _SCALE] = encode(tensor)
        else:
            small[name] = tensor
    return small


def _parts(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The tensors in their order, in parts of a few megabytes each."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        here = tensor.numel() * tensor.element_size()
        if parts[-1] and size + here > PART:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += here
    return parts


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


def load(
    path: str | Path,
    network: nn.Module | None = None,
    *,
    space: Space | None = None,
    device: torch.device | str = "cpu",
) -> Field:
    """Reads a field from a folder, or by the name of shipped weights.

    Arguments:
        path: `"checkerboard"` and the like, or a folder that `save` wrote.
        network: The network to load into, where it is one of your own; its weights are overwritten.
        space: Its space, where that is made of manifolds of your own.
        device: Where to put it.
    """
    folder, record = _find(path), about(path)
    if "noise" not in record and "network" in record:
        raise CheckpointError(f"{folder} holds a network without noise; read it with fmwc.checkpoint.load_network")
    tensors = _read(folder, record)
    try:
        field = _build(folder, record, network, space)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/recipe.json lacks what is needed to build the field ({error})") from error
    reference = {n.removeprefix(_REFERENCE): tensors.pop(n) for n in list(tensors) if n.startswith(_REFERENCE)}
    _fill(folder, field, tensors)
    if reference:
        field.reference = _reference(folder, record, reference)
    if (folder / _SCHEDULE).is_file():
        field.schedule = _schedule(folder)
    return field.to(device)


def _schedule(folder: Path) -> Schedule:
    try:
        found = json.loads((folder / _SCHEDULE).read_text())
        own = {name: torch.tensor(v) for name, v in found["reference"].items() if isinstance(v, list)}
        return Schedule(tuple(found["times"]), _reference(folder, found, own), float(found["agreement"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}/{_SCHEDULE} cannot be read; delete it, and fit the schedule anew") from error


def _reference(folder: Path, record: dict[str, Any], tensors: dict[str, Tensor]) -> Reference:
    try:
        about, standard = record["reference"], None
        if within := about.get("within"):
            standard = Standard(within, tensors["centre"], tensors["spread"])
        return Reference(about["score"], about["setting"], tensors["quantiles"], standard)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}/recipe.json lacks what its reference needs ({error})") from error


def load_network(path: str | Path, *, device: torch.device | str = "cpu") -> Any:
    """Reads a network that `save_network` wrote, or by the name of shipped weights; in evaluation mode."""
    folder, record = _find(path), about(path)
    if "noise" in record:
        raise CheckpointError(f"{folder} holds a field, not a lone network; read it with fmwc.load")
    try:
        network = NETS[record["network"]["kind"]](**record["network"]["config"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}/recipe.json lacks what is needed to build the network ({error})") from error
    _fill(folder, network, _read(folder, record))
    return network.to(device).eval()


def _read(folder: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    parts = record.get("parts", 1)
    if not isinstance(parts, int) or parts < 1:
        raise CheckpointError(f"{folder}/recipe.json says that it has {parts!r} parts; copy the checkpoint again")
    for name in _files(parts):
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except Exception as error:
            raise CheckpointError(f"{folder}/{name} is missing or cut off; copy it again") from error
    scales = {key.removesuffix(_SCALE): tensors.pop(key) for key in list(tensors) if key.endswith(_SCALE)}
    return {key: decode(value, scales[key]) if key in scales else value for key, value in tensors.items()}


def _fill(folder: Path, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    _check_shapes(folder, module, tensors)
    module.load_state_dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            require_finite(tensor, f"{folder}: weight '{name}'")


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


def _build(folder: Path, record: dict[str, Any], network: nn.Module | None, space: Space | None) -> Field:
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
        space=space or (Space.from_description(record["space"]) if record["space"] else None),
        prior_rate=record["prior_rate"],
        kl_factor=record.get("kl_factor", 0.5),
    )
    if field.noise.names != noise["layers"]:
        raise CheckpointError(
            f"{folder} is of another architecture: its noisy layers are {noise['layers']}, not {field.noise.names}"
        )
    return field


def _check_shapes(folder: Path, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    wanted = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in tensors.items()}
    wrong = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder} is of another architecture: {name} is {found.get(name, 'missing')} in the file and "
            f"{wanted.get(name, 'missing')} in the network ({len(wrong)} such)"
        )
