"""The study: every experiment drawn, judged and read; each kept when it is done, so that a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from fmwc.data import fingerprint
from fmwc.errors import CheckpointError, UsageError, pick
from fmwc.files import write_bytes, write_json
from fmwc.readers import read_safetensors
from fmwc.recipes.comparing import Say, check_cell, once, piece, read_piece
from fmwc.recipes.recipe import Clock, provenance
from fmwc.recipes.uses.drawing import APART, DRAWINGS, STEPS, Drawn, load_drawn, save_drawn
from fmwc.recipes.uses.reading import READINGS, Seen
from fmwc.recipes.uses.subject import Outcome, Subject

__all__ = ["NUMBERS", "REPORTED", "VALIDATION", "drawn_at", "judged_at", "load_outcomes", "study"]

NUMBERS = "uses.json"

REPORTED = (200, 201, 202)  # seeds that nothing was chosen on
VALIDATION = (100,)
JUDGE = "judge"  # a subject's network that looks at samples as they are drawn


def _split(only: str) -> list[tuple[str, str]]:
    """`draw:edit,read:edit` as (verb, what)."""
    found = []
    for text in (part.strip() for part in only.split(",")) if only else ():
        verb, _, what = text.partition(":")
        tables: dict[str, Any] = {"draw": DRAWINGS, "read": READINGS}
        pick(pick(tables, verb, "task"), what, "experiment")
        found.append((verb, what))
    return found


def drawn_at(out: Path, name: str, seed: int) -> Path:
    """The file of what an experiment drew at a seed."""
    return out / "draws" / f"{name}-{seed}.safetensors"


def judged_at(out: Path, name: str, seed: int) -> Path:
    """The file of what became of it."""
    return out / "outcomes" / f"{name}-{seed}.safetensors"


def _draw(subject: Subject, name: str, seed: int, wide: bool, path: Path, say: Say) -> dict[str, Any]:
    rows: dict[str, Drawn] = {}
    for label, row in DRAWINGS[name](subject, seed, wide):
        say(f"seed {seed}, {name}: drew {label} in {row.info['seconds']:.1f} s")
        rows[label] = row
    save_drawn(path, rows)
    return {label: row.info for label, row in rows.items()}


def _judged_by(subject: Subject) -> dict[str, str]:
    """What says what became of samples, and how good that is: all that a subject holds beside what draws them.

    Networks and data by their fingerprint, others by name.
    """
    found: dict[str, str] = {}
    for name, value in vars(subject).items():
        if value is None or name in ("field", "sizes", "metrics") or name.startswith("_"):
            continue
        value = tuple(value.state_dict().values()) if isinstance(value, nn.Module) else value
        found[name] = fingerprint(*value) if isinstance(value, tuple) else str(value)
    return found


def load_outcomes(path: Path, of: str = "") -> dict[str, dict[str, np.ndarray]] | None:
    """What became of the samples of a drawing, by label; none if it is not there, or of another drawing or judge."""
    if not path.exists():
        return None
    found: dict[str, dict[str, np.ndarray]] = {}
    tensors, metadata = read_safetensors(path, error=CheckpointError)
    if of and metadata.get("of") != of:
        return None
    for key, value in tensors.items():
        if value.dtype == torch.bfloat16:
            raise CheckpointError(f"{path}: '{key[:60]}' is of {value.dtype}, which no judge writes; delete it")
        label, _, name = key.rpartition(APART)
        found.setdefault(label, {})[name] = value.numpy()
    return found


def _outcomes(subject: Subject, drawn: Path, path: Path) -> dict[str, tuple[Drawn, Outcome]]:
    """What became of the samples of a drawing; judged once, and again where they, or who judges them, are others."""
    judged_by = json.dumps(_judged_by(subject), sort_keys=True)
    rows, of = load_drawn(drawn), hashlib.sha256(drawn.read_bytes() + judged_by.encode()).hexdigest()
    found: Any = load_outcomes(path, of)
    if found is None:
        found = {label: subject.read(row.kept) for label, row in rows.items()}
        flat = {
            f"{label}{APART}{n}": torch.as_tensor(np.ascontiguousarray(v))
            for label, o in found.items()
            for n, v in o.items()
        }
        write_bytes(path, save(flat, {"of": of}))
    return {label: (row, found[label]) for label, row in rows.items()}


def _described(subject: Subject) -> dict[str, Any]:
    """How a table is to speak of the numbers, so that it can be made from the file alone."""
    metrics = {name: {"words": m.words, "higher": m.higher, "digits": m.digits} for name, m in subject.metrics.items()}
    intents = {name: asdict(intent) for name, intent in subject.intents.items()}
    return {"bad": subject.bad, "good": subject.good, "metrics": metrics, "intents": intents}


def _earlier(path: Path, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers, and their pieces, of an earlier call on the same samples and judge, which this one adds to."""
    if not path.exists():
        return {}, {}
    found = read_piece(path)
    origin = found["provenance"]
    same = all(origin.get(key) == value for key, value in about.items())
    numbers, pieces = found.get("numbers"), origin.get("pieces")
    return (numbers, pieces) if same and isinstance(numbers, dict) and isinstance(pieces, dict) else ({}, {})


def study(
    subject: Subject,
    out: Path,
    *,
    seeds: Sequence[int] = REPORTED,
    only: str = "",
    wide: bool = False,
    say: Say = print,
) -> Path | None:
    """Fills `out` and returns `out/uses.json`, with every experiment that was read so far, if any was.

    Arguments:
        subject: The setting's field, with how many samples each experiment takes.
        seeds: Of the samples. Nothing was chosen on the default.
        only: Tasks to do, `draw:edit,read:edit`, where drawing and judging are on different machines; else all.
        wide: Draw what options were chosen from, in place of what was chosen: on the validation seed, in a folder of
            its own.
    """
    chosen = _split(only)
    if not seeds:
        raise UsageError("a study takes at least one seed")
    device, clock = subject.field.device, Clock(subject.field.device)
    shared = {"setting": subject.name, "steps": STEPS, "wide": wide}
    judged_by = _judged_by(subject)
    judge = {name: value for name, value in judged_by.items() if name == JUDGE}
    field = fingerprint(*subject.field.state_dict().values())
    made_with = {**shared, **judge, "sizes": vars(subject.sizes), "field": field}
    names = [name for name in DRAWINGS if not (wide and name == "samples")]  # nothing is chosen for those
    for name in [w for v, w in chosen if v == "draw"] if only else names:
        for seed in seeds:
            task = partial(_draw, subject, name, seed, wide, drawn_at(out, name, seed), say)
            once(piece(out, seed, f"draw-{name}"), task, seed, made_with, device, say)
    readings = [w for v, w in chosen if v == "read"] if only else [n for n, (d, _) in READINGS.items() if d in names]
    if not readings:
        return None
    shared |= {"seeds": list(seeds), "judged_by": judged_by}
    numbers, pieces = _earlier(out / NUMBERS, shared)
    for name in readings:
        drawn, read = READINGS[name]
        for seed in seeds:  # sizes are those of the drawing, which another machine may have made
            path = piece(out, seed, f"draw-{drawn}")
            if not (path.exists() and drawn_at(out, drawn, seed).exists()):
                raise CheckpointError(f"{out} holds no draw:{drawn} of seed {seed}; draw it first")
            check_cell(path, {"setting": subject.name, "wide": wide, **judge})
            pieces[f"{drawn}-{seed}"] = read_piece(path)["provenance"]
        made = [pieces[f"{drawn}-{seed}"] for seed in seeds]
        if unlike := [key for key in ("field", "sizes") if any(m.get(key) != made[0].get(key) for m in made)]:
            raise CheckpointError(
                f"the seeds of draw:{drawn} in {out} differ in their {' and '.join(unlike)}; draw anew"
            )
        seen: Seen = {
            seed: _outcomes(subject, drawn_at(out, drawn, seed), judged_at(out, drawn, seed)) for seed in seeds
        }
        numbers[name] = read(subject, seen)
        say(f"read {name}")
    ordered = {name: numbers[name] for name in READINGS if name in numbers}
    about = provenance(device, clock.seconds, **shared, pieces=pieces)
    return write_json(
        out / NUMBERS, {**_described(subject), "setting": subject.name, "provenance": about, "numbers": ordered}
    )
