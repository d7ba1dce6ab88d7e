"""Fields in the layout of the Hugging Face hub: `save_pretrained`, `from_pretrained` and `push_to_hub`.

A repository holds the checkpoint as :func:`fmwc.save` writes it (`recipe.json` and safetensors), a `config.json`, and a
model card made from the record. Only JSON and safetensors are read. Code is never read from a repository: for a network
that is not one of `fmwc.networks`, give your own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import fmwc
from fmwc import checkpoint
from fmwc.entry import build, one_line
from fmwc.errors import CheckpointError, FmwcError, UsageError
from fmwc.field import Field
from fmwc.files import write_bytes, write_json, write_text
from fmwc.flow import Space
from fmwc.readers import JSON_LIMIT, read_bytes

__all__ = ["from_pretrained", "model_card", "push_to_hub", "save_pretrained"]

CARD, CONFIG = "README.md", "config.json"
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
MARKDOWN = re.compile(r"[\\`*_~^{}\[\]()<>!|:@&$]|(?<=www)\.", re.IGNORECASE)  # a colon or www. begins a link
REVISION = re.compile(r"[0-9a-f]{40}")


# ---- writing ---------------------------------------------------------------------------------------------------------


def save_pretrained(
    source: Field | str | Path,
    folder: str | Path,
    *,
    repo_id: str = "",
    licence: str = "",
    description: str = "",
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
    **extra: Any,
) -> Path:
    """Write a field, or a copy of a checkpoint, with a model card to a folder, and return the folder.

    Arguments:
        source: A field, or a checkpoint by shipped name or path, whose record then fills the model card.
        folder: The folder.
        repo_id: The name of the repository, `organisation/name`, for the example in the model card.
        licence: The licence, as an identifier of the hub (`mit`, `apache-2.0`). Left out if empty.
        description: The first paragraph of the model card.
        datasets: Names of datasets on the hub.
        tags: Further tags.
        extra: Further entries of the record of a field, as in :func:`fmwc.save`: `recipe=…`, `metrics=…`.
    """
    folder = Path(folder)
    if isinstance(source, Field):
        checkpoint.save(source, folder, **extra)
    elif extra:
        raise UsageError(
            f"{next(iter(extra))} belongs to a field's record, but a checkpoint is copied as it is; leave it out"
        )
    else:
        _copy(source, folder)
    content = checkpoint.about(folder)
    config = {"library_name": "fmwc", "fmwc_version": fmwc.__version__, "architectures": [content["network"]["kind"]]}
    write_json(folder / CONFIG, {**config, "network": content["network"]["config"], "space": content.get("space")})
    write_text(folder / CARD, model_card(content, repo_id, licence, description, datasets, tags))
    return folder


def push_to_hub(
    source: Field | str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    message: str = "Upload with fmwc",
    **card: Any,
) -> str:
    """Upload a field or a checkpoint with a model card to the hub, and return the address of the commit.

    If the reference of the field compares samples with training data (`nearest`), the upload contains these data.

    Arguments:
        source: A field, or a checkpoint by shipped name or path.
        repo_id: The repository, `organisation/name`; created if it does not exist.
        private: Whether a new repository is private; by default as the organisation has it.
        token: A token of the hub; by default that of `hf auth login`.
        message: The message of the commit.
        card: Arguments of :func:`save_pretrained`.
    """
    hub = _hub()
    _require_name(repo_id)
    with TemporaryDirectory() as temporary:
        folder = save_pretrained(source, Path(temporary) / "model", repo_id=repo_id, **card)
        api = hub.HfApi(token=token)
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message=message))


def _copy(source: str | Path, folder: Path) -> None:
    """Copy a checkpoint; its record is written last."""
    origin = checkpoint.folder_of(source)
    content = checkpoint.about(origin)
    if folder.exists() and folder.resolve() == origin.resolve():
        return
    for name in content["files"]:
        write_bytes(folder / name, read_bytes(origin / _weights(name), checkpoint.LARGEST, CheckpointError))
    write_bytes(folder / checkpoint.RECORD, read_bytes(origin / checkpoint.RECORD, JSON_LIMIT, CheckpointError))


def _weights(name: str) -> str:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise CheckpointError(f"the record lists '{name[:60]}', which is not the name of a weights file")
    return name


# ---- reading ---------------------------------------------------------------------------------------------------------


def from_pretrained(
    name: str | Path,
    network: nn.Module | str | Callable[[], nn.Module] | None = None,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    space: Space | None = None,
    device: torch.device | str = "cpu",
) -> Field:
    """Load a field from a folder, from shipped weights, or from a repository of the hub.

    Arguments:
        name: A folder, a name such as `checkerboard`, or a repository, `organisation/name`.
        network: The network, a function that returns it, or `module:function` of your own code; not needed for
            networks of `fmwc.networks`.
        revision: The branch, tag or commit of a repository.
        cache_dir: The cache of downloaded files.
        token: A token of the hub.
        local_files_only: Use the cache only. Setting `HF_HUB_OFFLINE=1` has the same effect.
        space: The space of the samples, if it has manifolds that are not in `fmwc.flow`.
        device: The device of the field.
    """
    local = Path(name).is_dir() or str(name) in checkpoint.shipped()
    folder = Path(name) if local else _downloaded(str(name), revision, cache_dir, token, local_files_only)
    if isinstance(network, str):
        network, built_space = build(network)
        space = space or built_space
    elif network is not None and not isinstance(network, nn.Module):
        network = network()
    return checkpoint.load(folder, network, space=space, device=device)


def _downloaded(
    repo_id: str, revision: str | None, cache_dir: str | Path | None, token: str | None, local_only: bool
) -> Path:
    """Return the folder of a repository in the cache, with its record and the weights files that the record lists."""
    hub = _hub()
    _require_name(repo_id)
    local_only = local_only or hub.constants.HF_HUB_OFFLINE

    left = checkpoint.LARGEST_TOTAL

    def fetched(name: str, limit: int, revision: str | None) -> Path:
        nonlocal left
        try:
            if not local_only:
                size = hub.get_hf_file_metadata(hub.hf_hub_url(repo_id, name, revision=revision), token=token).size
                if size is not None and limit >= size > left:
                    raise CheckpointError(
                        f"the files of {repo_id} have more than {checkpoint.LARGEST_TOTAL:,} bytes in total, which is "
                        "the most that is read"
                    )
                if size is None or size > limit:
                    raise CheckpointError(
                        f"{name} of {repo_id} has {size or 'an unknown number of'} bytes; at most {limit:,} are read"
                    )
                left -= size
            options = {"revision": revision, "cache_dir": cache_dir, "token": token, "local_files_only": local_only}
            return Path(hub.hf_hub_download(repo_id, name, **options))
        except FmwcError:
            raise
        except Exception as error:  # the hub's exceptions have no common base
            where = "is not in the cache" if local_only else "cannot be downloaded"
            raise CheckpointError(
                f"{name} of {repo_id} {where} ({one_line(error)}); check the name, the connection and the token, or "
                "give a folder"
            ) from error

    record = fetched(checkpoint.RECORD, JSON_LIMIT, revision)
    folder = record.parent
    commit = folder.name if REVISION.fullmatch(folder.name) else revision  # all files of one commit
    for name in checkpoint.about(folder)["files"]:
        if fetched(_weights(name), checkpoint.LARGEST, commit).parent != folder:
            raise CheckpointError(f"{repo_id} changed during the download; call from_pretrained again")
    return folder


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants  # not an attribute until it is imported
    except ImportError as error:
        raise UsageError("the Hugging Face hub needs huggingface_hub: pip install 'fmwc[hub]'") from error
    return huggingface_hub


def _require_name(repo_id: str) -> None:
    if not REPOSITORY.fullmatch(repo_id):
        raise CheckpointError(
            f"'{repo_id[:100]}' is neither a folder, shipped weights ({', '.join(checkpoint.shipped())}) nor a "
            "repository such as organisation/name"
        )


# ---- the model card --------------------------------------------------------------------------------------------------


def model_card(
    content: Mapping[str, Any],
    repo_id: str = "",
    licence: str = "",
    description: str = "",
    datasets: Sequence[str] = (),
    tags: Sequence[str] = (),
) -> str:
    """Return the model card of a checkpoint: Markdown with a YAML header.

    Arguments:
        content: The record of the checkpoint (:func:`fmwc.checkpoint.about`).
        repo_id, licence, description, datasets, tags: As in :func:`save_pretrained`.
    """
    recipe = content.get("recipe") or {}
    title = repo_id.partition("/")[2] or recipe.get("name") or content["network"]["kind"]
    front = {
        "library_name": "fmwc",
        **({"license": licence} if licence else {}),
        **({"datasets": list(datasets)} if datasets else {}),
        "tags": list(dict.fromkeys(["flow-matching", "uncertainty", "confidence", *tags])),
    }
    sections = {
        "Use": _use(content, repo_id),
        "Training": _training(content),
        "Confidence": _confidence(content),
        "Metrics": _table(content.get("metrics") or {}, "metric", "value") or "No metrics are recorded.",
        "Limits": _limits(content),
    }
    kind = _plain(content["network"]["kind"])
    about = description or f"A flow-matching model ({kind}) whose samples come with a confidence, made with fmwc."
    # JSON is YAML.
    header = "\n".join(f"{name}: {json.dumps(value)}" for name, value in front.items())
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items())
    return f"---\n{header}\n---\n\n# {_plain(title)}\n\n{about}\n\n{body}\n"


def _use(content: Mapping[str, Any], repo_id: str) -> str:
    own = content["network"]["config"] is not None
    reference = content.get("reference") or {}
    classes = "".join(
        f", cond={{{json.dumps(_identifier(name))}: {list(values)[:16]}}}"
        for name, values in (reference.get("classes") or {}).items()
    )
    count = len(next(iter((reference.get("classes") or {}).values()), range(16))[:16])
    made = reference.get("read_with") or {}
    steps = f", steps={made['steps']!r}" if made.get("steps", 50) != 50 else ""
    told = "confidence" if reference and not reference.get("withheld") else "rank"
    place = json.dumps(repo_id or "path/to/this/folder")
    lines = [
        "import fmwc",
        *([] if own else ["from my_code import network  # this repository holds no code"]),
        f"field = fmwc.from_pretrained({place}{'' if own else ', network=network'})",
        f"run = fmwc.sample(field, {count}{steps}{classes})",
        f"print(run.x, run.{told})",
    ]
    return "\n".join(["```python", *lines, "```"])


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise CheckpointError(f"the record has a condition '{name[:60]}', which is not the name of an argument")
    return name


def _training(content: Mapping[str, Any]) -> str:
    data = content.get("data") or {}
    rows = {
        "data": data.get("name"),
        "fingerprint of the data": data.get("fingerprint"),
        **(content.get("recipe") or {}),
        **(content.get("provenance") or {}),
    }
    return _table(rows, "setting", "value") or "The record does not say how the model was trained."


def _confidence(content: Mapping[str, Any]) -> str:
    reference = content.get("reference")
    if not reference:
        return "The checkpoint holds no reference, so samples have a rank within their run but no confidence."
    lines = [f"- score: {_plain(reference['score'])}"]
    lines += [f"- chosen because {_plain(reference['reason'])}"] if reference.get("reason") else []
    if made := reference.get("read_with"):
        read = f", read {len(made['times'])} times by {_plain(made['estimator'])}" if made["estimator"] else ""
        lines.append(f"- for runs with {_plain(made['steps'])} steps ({_plain(made['stepper'])}){read}")
    if reference.get("withheld"):
        lines.append(f"- **withheld**: {_plain(reference['withheld'])}")
    candidates = {row["score"]: row.get("auroc", row.get("why", "")) for row in reference.get("candidates") or ()}
    table = _table(candidates, "candidate", "AUROC, or evidence")
    return "\n".join(lines) + (f"\n\n{table}" if table else "")


def _limits(content: Mapping[str, Any]) -> str:
    reference = content.get("reference") or {}
    lines = [
        "- Confidence is the share of the model's pilot samples with a higher score, not a probability of being right.",
        "- It holds for runs with the settings of the reference; for other runs it is withheld with the reason.",
    ]
    if points := ((reference.get("checks") or {}).get("nearest") or {}).get("points"):
        lines.append(f"- The weights files contain {points:,} training points, with which samples are compared.")
    if content["network"]["config"] is None:
        lines.append(
            "- The network is not one of `fmwc.networks`: loading needs its code, which this repository does not hold."
        )
    return "\n".join(lines)


def _table(rows: Mapping[str, Any], left: str, right: str) -> str:
    """Return a Markdown table of simple values; empty if there are none."""
    simple = {n: v for n, v in rows.items() if isinstance(v, (str, int, float)) and str(v) != ""}
    if not simple:
        return ""
    lines = [f"| {_plain(name)} | {_plain(value)} |" for name, value in simple.items()]
    return "\n".join([f"| {left} | {right} |", "| --- | --- |", *lines])


def _plain(value: Any) -> str:
    """Return a value of the record as one line that cannot change the page."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return MARKDOWN.sub(r"\\\g<0>", " ".join(shown.split())[:500])
