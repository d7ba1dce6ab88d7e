"""The study of the uses of confidence: draw, judge, read. Parts that are done are kept, so a stopped run resumes."""

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

from experiments.common.experiment import Experiment, Outcome
from experiments.common.store import Say, check_settings, parse_tasks, read_result, result_file, run_task
from experiments.uses.drawing import APART, DRAWINGS, STEPS, Drawn, load_drawn, save_drawn
from experiments.uses.evaluate import READINGS, Seen
from fmwc.data.arrays import fingerprint
from fmwc.errors import CheckpointError, UsageError
from fmwc.files import write_bytes, write_json
from fmwc.provenance import Clock, provenance
from fmwc.readers import read_safetensors

__all__ = ["NUMBERS", "REPORTED", "VALIDATION", "drawn_at", "judged_at", "load_outcomes", "study"]

NUMBERS = "uses.json"
REPORTED = (200, 201, 202)  # seeds that were not used to choose anything
VALIDATION = (100,)


def drawn_at(out: Path, name: str, seed: int) -> Path:
    """Return the file of what was drawn at a seed."""
    return out / "draws" / f"{name}-{seed}.safetensors"


def judged_at(out: Path, name: str, seed: int) -> Path:
    """Return the file of its outcome."""
    return out / "outcomes" / f"{name}-{seed}.safetensors"


def _draw(experiment: Experiment, name: str, seed: int, wide: bool, path: Path, say: Say) -> dict[str, Any]:
    rows: dict[str, Drawn] = {}
    for label, row in DRAWINGS[name](experiment, seed, wide):
        say(f"seed {seed}, {name}: drew {label} in {row.info['seconds']:.1f} s")
        rows[label] = row
    save_drawn(path, rows)
    return {label: row.info for label, row in rows.items()}


def load_outcomes(path: Path, of: str = "") -> dict[str, dict[str, np.ndarray]] | None:
    """Return the outcomes of a drawing by label, or `None` if the file is missing or belongs to another drawing."""
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


def _outcomes(experiment: Experiment, drawn: Path, path: Path) -> dict[str, tuple[Drawn, Outcome]]:
    """Judge the samples of a drawing, unless the outcomes of the same samples by the same judge exist."""
    judged_by = json.dumps(experiment.judged_by(), sort_keys=True)
    rows, of = load_drawn(drawn), hashlib.sha256(drawn.read_bytes() + judged_by.encode()).hexdigest()
    found: Any = load_outcomes(path, of)
    if found is None:
        found = {label: experiment.judge(row.kept) for label, row in rows.items()}
        flat = {
            f"{label}{APART}{n}": torch.as_tensor(np.ascontiguousarray(v))
            for label, o in found.items()
            for n, v in o.items()
        }
        write_bytes(path, save(flat, {"of": of}))
    return {label: (row, found[label]) for label, row in rows.items()}


def _described(experiment: Experiment) -> dict[str, Any]:
    """Return the words of the tables, so that they can be made from the file alone."""
    metrics = {
        name: {"words": m.words, "higher": m.higher, "digits": m.digits} for name, m in experiment.metrics.items()
    }
    intents = {name: asdict(intent) for name, intent in experiment.intents.items()}
    return {"bad": experiment.bad, "good": experiment.good, "metrics": metrics, "intents": intents}


def _earlier(path: Path, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers and drawings of an earlier call on the same samples and judge, which this one adds to."""
    if not path.exists():
        return {}, {}
    found = read_result(path)
    origin = found["provenance"]
    same = all(origin.get(key) == value for key, value in about.items())
    numbers, drawings = found.get("numbers"), origin.get("pieces")
    return (numbers, drawings) if same and isinstance(numbers, dict) and isinstance(drawings, dict) else ({}, {})


def study(
    experiment: Experiment,
    out: Path,
    *,
    seeds: Sequence[int] = REPORTED,
    only: str = "",
    wide: bool = False,
    say: Say = print,
) -> Path | None:
    """Fill `out` and return `out/uses.json` with every part that was read so far, or `None` if there is none.

    Arguments:
        experiment: The experiment with its field and sizes.
        seeds: Seeds of the samples; the default seeds were not used to choose anything.
        only: Tasks to run, such as `draw:edit,read:edit`, if drawing and judging are on different machines.
        wide: Draw all options that were compared instead of those that were chosen: on the validation seed, in a
            folder of its own.
    """
    chosen = parse_tasks(only, {"draw": DRAWINGS, "read": READINGS})
    if not seeds:
        raise UsageError("a study takes at least one seed")
    device = experiment.field.device
    clock, judged_by = Clock(device), experiment.judged_by()
    shared = {"setting": experiment.name, "steps": STEPS, "wide": wide}
    judge = {name: value for name, value in judged_by.items() if name == "judge"}  # looks at samples as they are drawn
    field = fingerprint(*experiment.field.state_dict().values())
    settings = {**shared, **judge, "sizes": vars(experiment.sizes), "field": field}
    if not only:
        drawings = [name for name in DRAWINGS if not (wide and name == "samples")]  # no option is chosen by samples
        chosen = [("draw", name) for name in drawings]
        chosen += [("read", name) for name, (drawn, _) in READINGS.items() if drawn in drawings]
    for name in (name for verb, name in chosen if verb == "draw"):
        for seed in seeds:
            task = partial(_draw, experiment, name, seed, wide, drawn_at(out, name, seed), say)
            run_task(result_file(out, seed, f"draw-{name}"), task, seed, settings, device, say)
    readings = [name for verb, name in chosen if verb == "read"]
    if not readings:
        return None
    shared |= {"seeds": list(seeds), "judged_by": judged_by}
    numbers, origins = _earlier(out / NUMBERS, shared)
    for name in readings:
        drawn, read = READINGS[name]
        for seed in seeds:  # with the sizes of the drawing, which another machine may have made
            path = result_file(out, seed, f"draw-{drawn}")
            if not (path.exists() and drawn_at(out, drawn, seed).exists()):
                raise CheckpointError(f"{out} holds no draw:{drawn} of seed {seed}; draw it first")
            check_settings(path, {"setting": experiment.name, "wide": wide, **judge})
            origins[f"{drawn}-{seed}"] = read_result(path)["provenance"]
        first, *others = [origins[f"{drawn}-{seed}"] for seed in seeds]
        if unlike := [key for key in ("field", "sizes") if any(o.get(key) != first.get(key) for o in others)]:
            raise CheckpointError(
                f"the seeds of draw:{drawn} in {out} differ in their {' and '.join(unlike)}; draw them again"
            )
        seen: Seen = {
            seed: _outcomes(experiment, drawn_at(out, drawn, seed), judged_at(out, drawn, seed)) for seed in seeds
        }
        numbers[name] = read(experiment, seen)
        say(f"read {name}")
    ordered = {name: numbers[name] for name in READINGS if name in numbers}
    about = provenance(device, clock.seconds, **shared, pieces=origins)
    found = {**_described(experiment), "setting": experiment.name, "provenance": about, "numbers": ordered}
    return write_json(out / NUMBERS, found)
