"""Fields on the Hugging Face hub: `save_pretrained`, `from_pretrained` and `push_to_hub`.

A repository holds a checkpoint as :func:`fmwc.save` writes it (`recipe.json` and safetensors) and a model card made
from its record. Code is never read from a repository: give a network that is not one of `fmwc.networks` yourself.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from fmwc import checkpoint
from fmwc.entry import build, one_line
from fmwc.errors import CheckpointError, UsageError
from fmwc.field import Field
from fmwc.files import write_json, write_text
from fmwc.flow import Space

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]

MARKDOWN = re.compile(r"[\\`*_~^{}\[\]()<>!|:@&$]|(?<=www)\.", re.IGNORECASE)  # a colon or www. begins a link
CARD = """---
{header}
---

# {title}

A flow-matching model ({kind}) whose samples come with a confidence, made with fmwc.

## Use

```python
import fmwc
field = fmwc.from_pretrained({place}{network})
run = fmwc.sample(field, 16{steps}{cond})
print(run.x, run.rank, run.confidence)
```

## Training

{training}

## Confidence

{confidence}

Confidence is the share of the model's pilot samples with a higher score, not a probability of being right. It holds
for runs with the settings of the reference; for other runs it is withheld with the reason.

## Metrics

{metrics}
"""


def save_pretrained(
    source: Field | str | Path, folder: str | Path, *, repo_id: str = "", licence: str = "", **extra: Any
) -> Path:
    """Write a field, or a copy of a checkpoint, with a model card to a folder, and return the folder.

    Arguments:
        source: A field, or a checkpoint by shipped name or path, whose record then fills the model card.
        folder: The folder.
        repo_id: The name of the repository, `organisation/name`, for the example in the model card.
        licence: The licence, as an identifier of the hub (`mit`, `apache-2.0`). Left out if empty.
        extra: Further entries of the record of a field, as in :func:`fmwc.save`: `recipe=…`, `metrics=…`.
    """
    folder = Path(folder)
    if isinstance(source, Field):
        checkpoint.save(source, folder, **extra)
    elif extra:
        raise UsageError(f"{next(iter(extra))} belongs to a field's record, but a checkpoint is copied as it is")
    elif (origin := checkpoint.folder_of(source)).resolve() != folder.resolve():
        folder.mkdir(parents=True, exist_ok=True)
        for name in [*checkpoint.about(origin)["files"], checkpoint.RECORD]:
            shutil.copyfile(origin / name, folder / name)
    content = checkpoint.about(folder)
    write_json(folder / "config.json", {"library_name": "fmwc", "network": content["network"]})  # counts downloads
    write_text(folder / "README.md", _card(content, repo_id, licence))
    return folder


def push_to_hub(
    source: Field | str | Path, repo_id: str, *, private: bool | None = None, token: str | None = None, **card: Any
) -> str:
    """Upload a field or a checkpoint with a model card to the hub, and return the address of the commit.

    If the reference of the field compares samples with training data (`nearest`), the upload contains these data.

    Arguments:
        source: A field, or a checkpoint by shipped name or path.
        repo_id: The repository, `organisation/name`; created if it does not exist.
        private: Whether a new repository is private; by default as the organisation has it.
        token: A token of the hub; by default that of `hf auth login`.
        card: Arguments of :func:`save_pretrained`.
    """
    api = _hub().HfApi(token=token)
    with TemporaryDirectory() as temporary:
        folder = save_pretrained(source, Path(temporary) / "model", repo_id=repo_id, **card)
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message="Upload with fmwc"))


def from_pretrained(
    name: str | Path,
    network: nn.Module | str | Callable[[], nn.Module] | None = None,
    *,
    space: Space | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Field:
    """Load a field from a folder, from shipped weights, or from a repository of the hub.

    Arguments:
        name: A folder, a name such as `checkerboard`, or a repository, `organisation/name`.
        network: The network, a function that returns it, or `module:function` of your own code; not needed for
            networks of `fmwc.networks`.
        space: The space of the samples, if it has manifolds that are not in `fmwc.flow`.
        device: The device of the field.
        options: Those of `huggingface_hub.snapshot_download`: `revision`, `cache_dir`, `token`, `local_files_only`.
    """
    if not Path(name).is_dir() and str(name) not in checkpoint.shipped():
        hub, wanted = _hub(), [checkpoint.RECORD, "*.safetensors"]
        try:
            name = hub.snapshot_download(str(name), allow_patterns=wanted, **options)
        except (OSError, ValueError) as error:  # the bases of the hub's exceptions
            raise CheckpointError(
                f"{name} is no folder, no shipped weights ({', '.join(checkpoint.shipped())}), and no repository that "
                f"can be read ({one_line(error)}); check the name, the connection and the token"
            ) from error
    if isinstance(network, str):
        network, built_space = build(network)
        space = space or built_space
    elif network is not None and not isinstance(network, nn.Module):
        network = network()
    return checkpoint.load(name, network, space=space, device=device)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError("the Hugging Face hub needs huggingface_hub: pip install 'fmwc[hub]'") from error
    return huggingface_hub


def _card(content: Mapping[str, Any], repo_id: str, licence: str) -> str:
    """Return the model card of a checkpoint, from its record."""
    reference, recipe = content.get("reference") or {}, content.get("recipe") or {}
    kind, own, made = content["network"]["kind"], content["network"]["config"] is not None, reference.get("read_with")
    header = {"library_name": "fmwc", "tags": ["flow-matching", "uncertainty", "confidence"]}
    header |= {"license": licence} if licence else {}
    points = ((reference.get("checks") or {}).get("nearest") or {}).get("points")
    chosen = {
        "score": reference.get("score", "none: samples have a rank within their run but no confidence"),
        "chosen because": reference.get("reason"),
        "withheld": reference.get("withheld"),
        "steps of runs": made["steps"] if made else "",
        "training points in the weights file, with which samples are compared": points,
    }
    training = {"data": (content.get("data") or {}).get("name"), **recipe, **(content.get("provenance") or {})}
    classes = {
        name: [values[i % len(values)] for i in range(16)] for name, values in (reference.get("classes") or {}).items()
    }
    given = ", ".join(f"{json.dumps(name)}: {values}" for name, values in classes.items())
    return CARD.format(
        header="\n".join(f"{name}: {json.dumps(value)}" for name, value in header.items()),  # JSON is YAML
        title=_plain(repo_id.partition("/")[2] or recipe.get("name") or kind),
        kind=_plain(kind),
        place=json.dumps(repo_id or "path/to/this/folder"),
        network="" if own else ", network=your_network",
        steps=f", steps={int(made['steps'])}" if made else "",
        cond=f", cond={{{given}}}" if classes else "",
        training=_table(training),
        confidence=_table(chosen),
        metrics=_table(content.get("metrics") or {}),
    )


def _table(rows: Mapping[str, Any]) -> str:
    """Return a Markdown table of simple values."""
    simple = {name: value for name, value in rows.items() if isinstance(value, (str, int, float)) and str(value) != ""}
    lines = [f"| {_plain(name)} | {_plain(value)} |" for name, value in simple.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines]) if lines else "Not recorded."


def _plain(value: Any) -> str:
    """Return a value of the record as one line that cannot change the page."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return MARKDOWN.sub(r"\\\g<0>", " ".join(shown.split())[:500])
