"""Checkpoints: a folder with `recipe.json` (the record) and `model.safetensors` (or parts of it).

The record is written last and replaces the old one atomically. It contains a hash of each weights file and a hash of
itself (:mod:`fmwc.identity`), so that a modified checkpoint is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fmwc.checks import Contest, Echo, Nearest
from fmwc.checks.evidence import missing_features
from fmwc.errors import CheckpointError, FmwcError, nearest, require_finite
from fmwc.field import Field, attach
from fmwc.files import write_bytes, write_json
from fmwc.flow import Space
from fmwc.identity import checksum, digest, digest_bytes, digest_file, plain, seal, sealed
from fmwc.networks import MLP, CSPNet, LeNet, UNet
from fmwc.quantise import decode, encode
from fmwc.readers import (
    Check,
    anything,
    array,
    boolean,
    check,
    choice,
    mapping,
    number,
    optional,
    read_json,
    read_safetensors,
    record,
    text,
    whole,
)
from fmwc.sampling import SCORES, Part, ReadWith, Reference, Standard
from fmwc.sampling.confidence import CHANGED, OTHER_SPACE
from fmwc.sampling.trajectory import DISPERSION, EVIDENCE, MOST, names_of, parsed

__all__ = [
    "FORMAT",
    "about",
    "describe_reference",
    "folder_of",
    "identity",
    "load",
    "load_network",
    "save",
    "save_network",
    "shipped",
    "update",
]

FORMAT = 3
RECORD = "recipe.json"
PART = 5_000_000  # maximum bytes per file of a quantised checkpoint, which is split so that a repository can store it
LARGEST = 8 << 30  # maximum bytes per file
LARGEST_TOTAL = 64 << 30  # maximum bytes of all files
_REFERENCE = "reference."
_SCALE = ":scale"  # suffix of the scales of a quantised matrix
_WIDTH = "noise.layers.0.inference.hidden.weight"  # its number of rows is the width of the inference networks
NETS: dict[str, type[nn.Module]] = {net.__name__: net for net in (CSPNet, LeNet, MLP, UNet)}  # rebuilt by name


# ---- the record --------------------------------------------------------------------------------------------------


def _score(value: Any, where: str) -> Any:
    text(1000)(value, where)
    for name in names_of(value):
        check(parsed(name)[1], choice(*SCORES, DISPERSION, *EVIDENCE), where)
    return value


_SIZE = whole(0, 1 << 20)
_NAMES = array(text(1000), most=100_000)
_QUANTILES = array(number(), 2, 1_000_000, rising=True)
_TIMES = array(number(0, 1, open_high=True), most=100_000, rising=True)
_SCORES = {"score": _score, "quantiles": _QUANTILES}
_STANDARD = {
    "within": text(1000),
    "centre": array(optional(number()), 1, MOST),
    "spread": array(optional(number(0, open_low=True)), 1, MOST),
}


def _nearest(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Nearest:
    """Return the check by nearest training points. The points are stored as tensors."""
    points, labels = tensors["points"], tensors.get("labels")
    if points.ndim != 2 or not points.is_floating_point() or len(points) != options["points"]:
        raise CheckpointError("its training points do not have the recorded shape")
    require_finite(points, "the training points")
    if labels is not None and tuple(labels.shape) != (len(points),):
        raise CheckpointError("its training points need one label each")
    return Nearest(points, labels, options["cond"], missing_features if options.get("features") else None)


_CHECKS: dict[str, tuple[Check, Callable[..., Any]]] = {  # name: schema, constructor
    "echo": (
        record({"times": array(number(0, 1), 1, 10_000), "draws": whole(1, 10**6)}),
        lambda options, _: Echo(**{**options, "times": tuple(options["times"])}),
    ),
    "contest": (
        record(
            {
                "cond": text(1000),
                "rivals": array(anything, 2, 100_000),
                "times": array(number(0, 1), 1, 100_000),
                "rounds": whole(1, 100_000),
                "finalists": whole(1, 100_000),
            }
        ),
        lambda options, _: Contest(
            **{**options, "rivals": torch.tensor(options["rivals"]), "times": tuple(options["times"])}
        ),
    ),
    "nearest": (record({"points": whole(1), "cond": text(1000)}, {"features": boolean}), _nearest),
}
_REFERENCE_SCHEMA = record(
    _SCORES,
    {
        "read_with": optional(
            record({"estimator": text(1000), "steps": whole(1, 10**6), "stepper": text(100), "times": _TIMES})
        ),
        "parts": array(record({**_SCORES, "weight": number()}, _STANDARD), most=100),
        "checks": record({}, {name: schema for name, (schema, _) in _CHECKS.items()}),
        "reason": text(10_000),
        "withheld": text(10_000),
        "candidates": array(mapping(anything, 100), most=1000),
        "classes": mapping(array(whole(-(1 << 62)), 1, 100_000), 100),
        **_STANDARD,
    },
)
_CHANNEL = record(
    {"shape": array(_SIZE, most=8), "manifold": text(100), "noise": text(100)},
    {
        "rows": text(100),
        "centred": boolean,
        "weight": number(0, open_low=True),
        "anneal": number(0),
        "options": mapping(anything, 100),
    },
)
_NETWORK = record({"kind": text(1000), "config": optional(mapping(anything, 100))})
_SCHEMA = record(
    {"format": whole(FORMAT, FORMAT), "network": _NETWORK},
    {
        "files": mapping(text(64, "[0-9a-f]{64}"), 1000),
        "noise": record(
            {
                "include": _NAMES,
                "exclude": _NAMES,
                "width": whole(1, 1 << 20),
                "initial_log_alpha": number(-100, 100),
                "layers": _NAMES,
            }
        ),
        "prior_rate": number(0, 1, open_low=True, open_high=True),
        "kl_factor": number(0),
        "space": mapping(_CHANNEL, 100),
        "recipe": mapping(anything, 1000),
        "reference": anything,  # checked by _REFERENCE_SCHEMA
    },
    more=True,
)


def about(path: str | Path) -> dict[str, Any]:
    """Return the record of a checkpoint, by shipped name or path."""
    return _open(path)[1]


def _open(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a checkpoint and its record."""
    folder = folder_of(path)
    content: dict[str, Any] = read_json(folder / RECORD, _SCHEMA, error=CheckpointError)
    if not (sealed(content) and content.get("files")):
        raise CheckpointError(f"{folder}/{RECORD} was changed after it was written; copy the checkpoint again")
    return folder, content


def identity(path: str | Path) -> str:
    """Return a hash of all that a checkpoint's samples and scores depend on: weights, noise, space and reference."""
    content = about(path)
    parts = ("network", "noise", "space", "reference")
    return digest({"files": list(content["files"].values()), **{name: content.get(name) for name in parts}})


def shipped() -> dict[str, Path]:
    """Return the folders of the shipped checkpoints by name."""
    return {p.parent.name: p.parent for p in sorted((Path(__file__).parent / "weights").glob("*/recipe.json"))}


def folder_of(path: str | Path) -> Path:
    """Return the folder of a checkpoint, by shipped name or path."""
    folder = Path(path)
    if (folder / RECORD).is_file():
        return folder
    names = shipped()
    if str(path) in names:
        return names[str(path)]
    if folder.exists():
        raise CheckpointError(f"{folder} is not a checkpoint: it holds no {RECORD}")
    raise CheckpointError(f"{nearest(str(path), names, 'checkpoint')}; or give the path of a folder")


# ---- writing -----------------------------------------------------------------------------------------------------


def save(
    field: Field, path: str | Path, *, recipe: dict[str, Any] | None = None, quantise: bool = False, **extra: Any
) -> Path:
    """Write a field to a folder. An existing checkpoint stays intact until the new one replaces it.

    Arguments:
        field: The field. A network of `fmwc.networks` is rebuilt on loading; pass any other network to `load`.
        path: The folder.
        recipe: The training options to record.
        quantise: Write matrices as 8-bit integers (:mod:`fmwc.quantise`), in files of a few megabytes. This rounds
            weights that are not rounded yet.
        extra: Further entries of the record, such as metrics and the fingerprint of the data.
    """
    field.check_layers()
    network = field.network
    known = NETS.get(type(network).__name__) is type(network)
    content = {
        "network": {"kind": type(network).__name__, "config": network.config if known else None},
        "noise": {**field.noise.options, "layers": field.noise.names},
        "prior_rate": field.prior_rate,
        "kl_factor": field.kl_factor,
        "space": field.space.describe() if field.space else None,
        "recipe": recipe,
        **extra,
    }
    tensors = dict(field.state_dict())
    weights = checksum(_restored(_quantised(tensors)) if quantise else tensors)
    if field.reference is not None:
        reference, spaces = _of_weights(field.reference, weights), (field.reference.space, field.space)
        if reference.space is not None and len({digest(space and space.describe()) for space in spaces}) > 1:
            reference = reference._replace(withheld=reference.withheld or OTHER_SPACE)
        content["reference"] = describe_reference(reference, "the reference")
        if (near := field.reference.checks.get("nearest")) is not None:
            tensors[f"{_REFERENCE}points"] = near.points
            tensors |= {} if near.labels is None else {f"{_REFERENCE}labels": near.labels}
    return _write(Path(path), tensors, content, quantise)


def _of_weights(reference: Reference, weights: int) -> Reference:
    """Return a reference to store beside weights with this checksum, withheld if it was made with other weights."""
    if reference.weights in (None, weights):
        return reference
    return reference._replace(withheld=reference.withheld or CHANGED)


def update(path: str | Path, *, reference: Reference | None = None, **extra: Any) -> Path:
    """Replace entries in the record of a checkpoint; its weights do not change.

    Arguments:
        path: The checkpoint.
        reference: The new reference.
        extra: Other entries, such as the provenance.
    """
    folder, content = _open(path)
    if reference is not None and "nearest" in reference.checks:
        raise CheckpointError(
            "this reference contains training points, which are stored with the weights; use fmwc.save"
        )
    weights = checksum({n: v for n, v in _read(folder, content).items() if not n.startswith(_REFERENCE)})
    if reference is not None:
        content["reference"] = describe_reference(_of_weights(reference, weights), "the reference")
    write_json(folder / RECORD, seal({**content, **plain(extra)}))
    return folder / RECORD


def describe_reference(reference: Reference, what: str) -> dict[str, Any]:
    """Return a reference as it is stored in the record; raise if it could not be read back."""
    read_with = reference.read_with
    described: dict[str, Any] = plain(
        {
            **_describe_scores(reference, what),
            "read_with": None if read_with is None else read_with._asdict(),
            "parts": [{**_describe_scores(part, what), "weight": part.weight} for part in reference.parts],
            "checks": {name: check.describe() for name, check in reference.checks.items()},
            "reason": reference.reason,
            "withheld": reference.withheld,
            "candidates": reference.candidates,
            **({"classes": reference.classes} if reference.classes else {}),
        }
    )
    check(described, _REFERENCE_SCHEMA, what, CheckpointError)
    for part in (described, *described["parts"]):
        _standard(part)
    return described


def _describe_scores(scores: Reference | Part, what: str) -> dict[str, Any]:
    """Return the name, the quantiles and the standardisation of reference scores."""
    standard: Standard | None = scores.standard
    described = {"score": scores.score, "quantiles": _digits(scores.quantiles, what)}
    if standard is not None:
        centre, spread = _digits(standard.centre, what), _digits(standard.spread, what)
        described |= {"within": standard.cond, "centre": centre, "spread": spread}
    return described


def _digits(values: Tensor, what: str) -> list[float | None]:
    """Round numbers to single precision. NaN, which marks a condition without samples, becomes `None`."""
    if values.ndim != 1 or not values.is_floating_point():
        raise CheckpointError(f"{what} must hold vectors of floats, got {values.dtype} of shape {tuple(values.shape)}")
    return [None if math.isnan(value) else float(f"{value:.9g}") for value in values.tolist()]


def save_network(network: nn.Module, path: str | Path, *, recipe: dict[str, Any] | None = None, **extra: Any) -> Path:
    """Write a network of `fmwc.networks` without noise, such as a classifier, in the format of :func:`save`."""
    kind = type(network).__name__
    if NETS.get(kind) is not type(network):
        raise CheckpointError(f"{kind} is not one of fmwc's networks; save a field with fmwc.save instead")
    content = {"network": {"kind": kind, "config": network.config}, "recipe": recipe, **extra}
    return _write(Path(path), dict(network.state_dict()), content)


def _write(path: Path, tensors: dict[str, Tensor], content: dict[str, Any], quantise: bool = False) -> Path:
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint must be a folder")
    # Copies: tied weights share memory, which the format does not support.
    tensors = {k: v.detach().cpu().clone().contiguous() for k, v in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not name.startswith(_REFERENCE):
            require_finite(tensor, f"weight '{name}'")
    parts = [to_bytes(part) for part in (_split(_quantised(tensors)) if quantise else [tensors])]
    files: dict[str, str] = {}
    for name, data in zip(_file_names(len(parts)), parts, strict=True):
        hashed = digest_bytes(data)
        if (path / name).exists() and digest_file(
            path / name
        ) != hashed:  # the old file is needed until the record is replaced
            name = f"{Path(name).stem}-{hashed[:8]}.safetensors"
        write_bytes(path / name, data)
        files[name] = hashed
    stale = _listed_files(path) - files.keys()
    write_json(path / RECORD, seal(plain({"format": FORMAT, "files": files, **content})))
    for name in stale:
        (path / name).unlink(missing_ok=True)
    return path


def _listed_files(folder: Path) -> set[str]:
    """Return the names of the files that belong to the checkpoint in a folder, if there is one."""
    try:
        content = about(folder) if (folder / RECORD).is_file() else {}
    except FmwcError:
        return set()
    return {*content.get("files", ())}


def _file_names(parts: int) -> list[str]:
    return ["model.safetensors"] if parts == 1 else [f"model-{i + 1}-of-{parts}.safetensors" for i in range(parts)]


def _quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    small: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and tensor.is_floating_point() and not name.startswith(_REFERENCE):
            small[name], small[name + _SCALE] = encode(tensor)
        else:
            small[name] = tensor
    return small


def _split(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Split the tensors, in their order, into parts of at most :data:`PART` bytes."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > PART:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


# ---- reading -----------------------------------------------------------------------------------------------------


def load(
    path: str | Path,
    network: nn.Module | None = None,
    *,
    space: Space | None = None,
    device: torch.device | str = "cpu",
) -> Field:
    """Load a field from a folder, or by the name of shipped weights.

    Arguments:
        path: A name such as `"checkerboard"`, or a folder that `save` wrote.
        network: The network to load the weights into; not needed if it is one of `fmwc.networks`.
        space: The space of the samples, if it has manifolds that are not in `fmwc.flow`.
        device: The device of the field.
    """
    folder, content = _open(path)
    if content.get("noise") is None:
        raise CheckpointError(f"{folder} holds a network without noise; load it with fmwc.checkpoint.load_network")
    tensors = _read(folder, content)
    reference = {n.removeprefix(_REFERENCE): tensors.pop(n) for n in list(tensors) if n.startswith(_REFERENCE)}
    width = tensors.get(_WIDTH)
    if content["noise"]["layers"] and (width is None or not width.ndim or len(width) != content["noise"]["width"]):
        raise CheckpointError(
            f"{folder}/{RECORD} and its weights disagree on the width of the inference networks; copy it again"
        )
    if network is None:
        _check_shapes(folder, _built(folder, content, None, space, meta=True), tensors)  # before memory is allocated
    field = _built(folder, content, network, space)
    _fill(folder, field, tensors)
    if reference or content.get("reference") is not None:
        field.reference = _reference(folder, content.get("reference"), reference)
    if field.reference is not None:  # the hashes of the files bind it to these weights
        field.reference = field.reference._replace(weights=field.checksum(), space=field.space)
    return field.to(device)


def _reference(folder: Path, described: Any, tensors: dict[str, Tensor]) -> Reference:
    """Return the reference of a record."""
    try:
        if described is None:
            raise CheckpointError("its score is not recorded")
        given = check(described, _REFERENCE_SCHEMA, "it", CheckpointError)
        return Reference(
            **_scores(given),
            read_with=_read_with(given),
            parts=tuple(Part(**_scores(part), weight=float(part["weight"])) for part in given.get("parts") or ()),
            checks={name: _CHECKS[name][1](options, tensors) for name, options in (given.get("checks") or {}).items()},
            reason=given.get("reason") or "",
            withheld=given.get("withheld") or "",
            candidates=tuple(given.get("candidates") or ()),
            classes={name: tuple(values) for name, values in (given.get("classes") or {}).items()},
        )
    except (KeyError, TypeError, ValueError, FmwcError) as error:
        raise CheckpointError(f"the reference of {folder} cannot be used: {error}") from error


def _scores(given: Mapping[str, Any]) -> dict[str, Any]:
    quantiles = torch.tensor([float(q) for q in given["quantiles"]])
    return {"score": given["score"], "quantiles": quantiles, "standard": _standard(given)}


def _standard(given: Mapping[str, Any]) -> Standard | None:
    """Return the centres and spreads of a description; raise if no condition has both."""
    if not given.get("within"):
        return None
    rows = list(zip(given["centre"], given["spread"], strict=True))
    if not any(spread is not None for _, spread in rows) or any(c is None and s is not None for c, s in rows):
        raise CheckpointError("centres must be finite and spreads positive")
    centre, spread = (torch.tensor([math.nan if v is None else float(v) for v in c]) for c in zip(*rows, strict=True))
    return Standard(given["within"], centre, spread)


def _read_with(given: Mapping[str, Any]) -> ReadWith | None:
    """Return the settings of the reference samples."""
    made = given.get("read_with")
    return None if made is None else ReadWith(**{**made, "times": tuple(made["times"])})


def load_network(path: str | Path, *, device: torch.device | str = "cpu") -> Any:
    """Load a network that `save_network` wrote, or shipped weights by name, in evaluation mode."""
    folder, content = _open(path)
    if content.get("noise") is not None:
        raise CheckpointError(f"{folder} holds a field; load it with fmwc.load")
    tensors = _read(folder, content)
    _check_shapes(folder, _network(folder, content, meta=True), tensors)
    network = _network(folder, content)
    _fill(folder, network, tensors)
    return network.to(device).eval()


def _read(folder: Path, content: dict[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    total = 0
    for name, wanted in content["files"].items():
        path = folder / name
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder}/{RECORD} lists '{name[:60]}', which is not the name of a weights file")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; copy the checkpoint again")
        total += path.stat().st_size
        if total > LARGEST_TOTAL:
            raise CheckpointError(f"the weights files of {folder} have more than {LARGEST_TOTAL:,} bytes in total")
        part, _ = read_safetensors(path, LARGEST, CheckpointError)
        if digest_file(path) != wanted:
            raise CheckpointError(f"{path} is not the file that was saved (its hash differs); copy it again")
        tensors |= part
    for key in [key for key in tensors if key.endswith(_SCALE)]:
        levels, scale = tensors.get(key.removesuffix(_SCALE)), tensors[key]
        good = levels is not None and levels.dtype == torch.int8 and scale.dtype == torch.float32
        if not good or levels is None or scale.ndim != 1 or levels.ndim < 2 or len(scale) != len(levels):
            what = key.removesuffix(_SCALE)
            raise CheckpointError(f"{folder}: '{what}' is not a matrix of 8-bit integers with one scale per row")
    return _restored(tensors)


def _restored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with quantised matrices decoded."""
    scales = {key.removesuffix(_SCALE): tensors.pop(key) for key in list(tensors) if key.endswith(_SCALE)}
    return tensors | {key: decode(tensors[key], scale) for key, scale in scales.items()}


def _fill(folder: Path, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy weights into a module with the same names, shapes and types. Double-precision weights make it double."""
    _check_shapes(folder, module, tensors)
    floating = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if floating == {torch.float64}:
        module.double()
    for name, weight in module.state_dict().items():
        # Converting half to single precision is exact; any other conversion would change the weights.
        allowed = {weight.dtype} | ({torch.float16, torch.bfloat16} if weight.is_floating_point() else set())
        if tensors[name].dtype not in allowed:
            raise CheckpointError(
                f"{folder}: weight '{name}' is {tensors[name].dtype}, but the network's is {weight.dtype}"
            )
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            require_finite(tensor, f"{folder}: weight '{name}'")
    module.load_state_dict(tensors)


def _built(
    folder: Path, content: dict[str, Any], network: nn.Module | None, space: Space | None, *, meta: bool = False
) -> Field:
    """Build the field that a record describes; with `meta`, without allocating memory."""
    noise = content["noise"]
    try:
        space = space or (Space.from_description(content["space"]) if content.get("space") else None)
    except (FmwcError, TypeError, KeyError) as error:
        raise CheckpointError(f"the space of {folder} cannot be built: {error}") from error
    with _ShapesOnly() if meta else torch.device("cpu"):
        field = attach(
            _network(folder, content, meta=meta) if network is None else network,
            include=noise["include"],
            exclude=noise["exclude"],
            width=noise["width"],
            initial_log_alpha=noise["initial_log_alpha"],
            space=space,
            prior_rate=0.3 if content.get("prior_rate") is None else content["prior_rate"],
            kl_factor=0.5 if content.get("kl_factor") is None else content["kl_factor"],
        )
    if field.noise.names != noise["layers"]:
        raise CheckpointError(
            f"{folder} is of another architecture: its noisy layers are {noise['layers']}, not {field.noise.names}"
        )
    return field


class _ShapesOnly(TorchFunctionMode):
    """A context in which tensors have shapes but no memory.

    Initial weights are not drawn: on the meta device, torch would import its compiler for them, which takes a second.
    """

    def __enter__(self) -> Any:
        self.device = torch.device("meta")
        self.device.__enter__()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self.device.__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


def _network(folder: Path, content: dict[str, Any], *, meta: bool = False) -> nn.Module:
    """Build one of fmwc's own networks without changing torch's global random state."""
    kind, config = content["network"]["kind"], content["network"]["config"]
    if config is None or kind not in NETS:
        raise CheckpointError(
            f"{folder} holds a {kind}, which is not a network of fmwc; pass it to load(path, network=net)"
        )
    try:
        check(config, mapping(_option), "its configuration")
        with torch.random.fork_rng(devices=[]), _ShapesOnly() if meta else torch.device("cpu"):
            return NETS[kind](**config)
    except Exception as error:  # whatever the constructor raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"the network of {folder} cannot be built: {reason}") from error


def _option(value: Any, where: str) -> Any:
    """Check one option of a network: a size, a rate, a name, or a short list of sizes."""
    if isinstance(value, list):
        return array(whole(0, 1 << 16), most=64)(value, where)
    if isinstance(value, int) and not isinstance(value, bool):
        return whole(0, 1000 if where in ("depth", "layers", "blocks") else 1 << 16)(value, where)
    return optional(text(1000) if isinstance(value, str) else boolean if isinstance(value, bool) else number())(
        value, where
    )


def _check_shapes(folder: Path, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    expected = {k: tuple(v.shape) for k, v in module.state_dict().items()}
    stored = {k: tuple(v.shape) for k, v in tensors.items()}
    wrong = sorted(k for k in expected.keys() | stored.keys() if expected.get(k) != stored.get(k))
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder} is of another architecture: {name} is {stored.get(name, 'missing')} in the file and "
            f"{expected.get(name, 'missing')} in the network ({len(wrong)} weights differ)"
        )
