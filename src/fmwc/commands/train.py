"""Training and retrofitting into a checkpoint folder: what `fmwc train` and `fmwc retrofit` do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fmwc import retrofit
from fmwc.checkpoint import about
from fmwc.data import arrays
from fmwc.domains import domain_named
from fmwc.entry import build
from fmwc.errors import pick
from fmwc.progress import training_bar
from fmwc.provenance import pick_device
from fmwc.readers import shown
from fmwc.report.run import confidence_source

__all__ = ["retrofit_network", "train_model"]


def train_model(
    domain: str,
    out: Path,
    *,
    preset: str = "recommended",
    seed: int = 0,
    changes: Sequence[str] = (),
    data: str = "",
    own: bool = False,
    device: str | torch.device = "auto",
    force: bool = False,
) -> list[str]:
    """Train a domain's recipe into a checkpoint; resume if interrupted. Return what there is to say about it.

    Arguments:
        domain: The domain.
        out: The folder of the checkpoint.
        preset: The name of the recipe.
        seed: Seeds the training.
        changes: `key=value` changes of the recipe.
        data: Where the data is.
        own: Whether the data is your own.
        device: Where to train.
        force: Write into a folder that is not empty.
    """
    chosen = domain_named(domain)
    pick(chosen.presets, preset, "preset")
    recipe = chosen.recipe(preset, [f"seed={seed}", *changes], data, own)
    where, state = pick_device(device), _state(out, force)
    with training_bar() as bar:
        chosen.fit(recipe, out, where, bar, force=force)
    record = about(out)
    said = [f"{shown(out)} {state}: {record['metrics']}"]
    if record.get("noise") is not None:  # judges have none
        said.append(confidence_source(record.get("reference")))
    return said


def retrofit_network(
    network: str,
    out: Path,
    *,
    weights: str = "",
    data: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    device: str | torch.device = "auto",
    force: bool = False,
    **options: Any,
) -> list[str]:
    """Fit noise to a trained network and write a checkpoint. Return what there is to say about it.

    Arguments:
        network: `module:function` that returns the network, or (network, space).
        out: The folder of the checkpoint.
        weights: A file with the state dict of the network.
        data: A file with training samples; else `own_samples` of the network's samples are used.
        include, exclude: Globs of layers that carry noise.
        device: Where to fit.
        force: Write into a folder that is not empty.
        options: Other fields of :class:`fmwc.retrofit.Retrofit`.
    """
    where, state = pick_device(device), _state(out, force)
    built, space = build(network, weights or None)
    how = retrofit.Retrofit(include=tuple(include or ["*"]), exclude=tuple(exclude), **options)
    with training_bar() as bar:
        field, looks = retrofit.retrofit(
            built,
            out,
            arrays.load(data) if data else None,
            how,
            space=space,
            device=where,
            entry=network,
            progress=lambda done, total, loss, held: bar(f"noise (held out {held:.4g})", done, total, loss),
            force=force,
        )
    call = f"{network.replace(':', '.')}()"
    return [
        f"{shown(out)} {state}: {retrofit.advice(looks)}",
        confidence_source(field.reference),
        f"field = fmwc.load({str(out)!r}, network={call if space is None else f'{call}[0]'})",
        f"fmwc sample {shlex.quote(str(out))} --network {shlex.quote(network)} -n 100 --out samples",
    ]


def _state(out: Path, force: bool) -> str:
    return "was finished already" if (out / "recipe.json").is_file() and not force else "written"
