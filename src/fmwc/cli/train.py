"""Train a model, or fit noise to a trained network, into a checkpoint folder (`fmwc train`, `fmwc retrofit`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fmwc import retrofit as retrofitting
from fmwc.checkpoint import about
from fmwc.cli.verbs import Retrofit, Train
from fmwc.data import arrays
from fmwc.entry import build
from fmwc.errors import pick
from fmwc.processes import Processes, joined
from fmwc.progress import say_on_stderr, training_bar
from fmwc.readers import shown
from fmwc.registry import domain_named
from fmwc.report.run import confidence_source

__all__ = ["retrofit", "train"]


def train(options: Train) -> list[str]:
    """Train a domain's recipe; return lines that describe the checkpoint. Resumes if interrupted."""
    domain = domain_named(options.domain)
    pick(domain.presets, options.preset, "preset")
    changes = [f"seed={options.seed}", *(options.changes or [])]
    recipe = domain.recipe(options.preset, changes, options.data, options.own)
    status = _status(options.out, options.force)
    with joined(options.device) as device, _bar(device) as bar:
        domain.fit(recipe, options.out, device, bar, force=options.force)
        if not Processes().first:
            return []
    record = about(options.out)
    lines = [
        f"{shown(options.out)} {status}: {', '.join(f'{name} {value}' for name, value in record['metrics'].items())}"
    ]
    if record.get("noise") is not None:  # classifiers have no noise
        lines.append(confidence_source(record.get("reference")))
    return lines


def retrofit(options: Retrofit) -> list[str]:
    """Fit noise to a trained network; return lines that describe the checkpoint and how to use it."""
    status = _status(options.out, options.force)
    network, space = build(options.network, options.weights or None)
    names = {field.name for field in fields(retrofitting.Retrofit)}
    chosen = {name: value for name, value in vars(options).items() if name in names}
    chosen |= {"include": tuple(options.include or ["*"]), "exclude": tuple(options.exclude or [])}
    with joined(options.device) as device, _bar(device) as bar:
        field, looks = retrofitting.retrofit(
            network,
            options.out,
            arrays.load(options.data) if options.data else None,
            retrofitting.Retrofit(**chosen),
            space=space,
            device=device,
            entry=options.network,
            progress=bar and (lambda done, total, loss, held: bar(f"noise (held out {held:.4g})", done, total, loss)),
            force=options.force,
        )
        if not Processes().first:
            return []
    out, call = str(options.out), f"{options.network.replace(':', '.')}()"
    return [
        f"{shown(out)} {status}: {retrofitting.advice(looks)}",
        confidence_source(field.reference),
        f"field = fmwc.load({out!r}, network={call if space is None else f'{call}[0]'})",
        f"fmwc sample {shlex.quote(out)} --network {shlex.quote(options.network)} -n 100 --out samples",
    ]


@contextmanager
def _bar(device: torch.device) -> Iterator[Any]:
    """Show a progress bar in the first of several processes; yield `None` in the others."""
    processes = Processes()
    if not processes.first:
        yield None
        return
    if processes.count > 1:
        shared = device.type == "cuda" and not processes.nccl
        remark = "; they share a GPU, so steps are not captured as a CUDA graph" if shared else ""
        say_on_stderr(f"training with {processes.count} processes{remark}")
    with training_bar() as bar:
        yield bar


def _status(out: Path, force: bool) -> str:
    return "is already finished" if (out / "recipe.json").is_file() and not force else "written"
