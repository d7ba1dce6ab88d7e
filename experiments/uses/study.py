"""The study of the uses of confidence: draw, judge and evaluate samples. A stopped study can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from experiments.common.experiment import Experiment, Outcome
from experiments.common.store import Say, check_settings, parse_tasks, read_result, result_file, run_task
from experiments.uses.drawing import DRAWINGS, STEPS, Drawn
from experiments.uses.evaluate import READINGS
from experiments.uses.folder import (
    NUMBERS,
    drawn_at,
    judged_at,
    load_drawn,
    load_outcomes,
    save_drawn,
    save_outcomes,
)
from fmwc.data.arrays import fingerprint
from fmwc.errors import CheckpointError, UsageError
from fmwc.files import write_json
from fmwc.provenance import Clock, provenance

REPORTED = (200, 201, 202)  # seeds on which no option was tuned
VALIDATION = (100,)


def study(
    experiment: Experiment,
    out: Path,
    *,
    seeds: Sequence[int] = REPORTED,
    only: str = "",
    wide: bool = False,
    say: Say = print,
) -> Path | None:
    """Run a study in `out`; return the path of `out/uses.json`, or `None` if no use was evaluated.

    Arguments:
        experiment: The experiment with its field and sizes.
        out: The folder.
        seeds: Seeds of the samples. No option was tuned on the default seeds.
        only: Tasks to run, such as `draw:edit,read:edit`, if samples are drawn and judged on different machines.
        wide: Compare all candidate options instead of the chosen ones; use the validation seed and a separate folder.
        say: Called with progress messages.
    """
    drawings, uses = _tasks(only, wide)
    if not seeds:
        raise UsageError("a study needs at least one seed")
    device, judged_by = experiment.field.device, experiment.judged_by()
    clock = Clock(device)
    shared = {"setting": experiment.name, "wide": wide}
    # The judge is already used when samples are drawn.
    shared |= {name: value for name, value in judged_by.items() if name == "judge"}
    field = fingerprint(*experiment.field.state_dict().values())
    settings = {**shared, "steps": STEPS, "sizes": vars(experiment.sizes), "field": field}
    for name, seed in product(drawings, seeds):
        task = partial(_draw, experiment, name, seed, wide, drawn_at(out, name, seed), say)
        run_task(result_file(out, seed, f"draw-{name}"), task, seed, settings, device, say)
    if not uses:
        return None
    about = {"setting": experiment.name, "steps": STEPS, "wide": wide, "seeds": list(seeds), "judged_by": judged_by}
    numbers, origins = _earlier(out / NUMBERS, about)
    for use in uses:
        drawing, evaluate = READINGS[use]
        origins |= _origins(out, drawing, seeds, shared)
        numbers[use] = evaluate(experiment, {seed: _judged(experiment, out, drawing, seed) for seed in seeds})
        say(f"read {use}")
    about = provenance(device, clock.seconds, **about, pieces=origins)
    ordered = {use: numbers[use] for use in READINGS if use in numbers}
    return write_json(out / NUMBERS, {**_described(experiment), "provenance": about, "numbers": ordered})


def _tasks(only: str, wide: bool) -> tuple[list[str], list[str]]:
    """Return the drawings to make and the uses to evaluate; `wide` skips `samples`, which has no options."""
    tasks = parse_tasks(only, {"draw": DRAWINGS, "read": READINGS})
    if only:
        drawings, uses = ([name for verb, name in tasks if verb == kind] for kind in ("draw", "read"))
        return drawings, uses
    drawings = [name for name in DRAWINGS if not (wide and name == "samples")]
    return drawings, [use for use, (drawing, _) in READINGS.items() if drawing in drawings]


def _draw(experiment: Experiment, name: str, seed: int, wide: bool, path: Path, say: Say) -> dict[str, Any]:
    rows: dict[str, Drawn] = {}
    for label, row in DRAWINGS[name](experiment, seed, wide):
        say(f"seed {seed}, {name}: drew {label} in {row.info['seconds']:.1f} s")
        rows[label] = row
    save_drawn(path, rows)
    return {label: row.info for label, row in rows.items()}


def _earlier(path: Path, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers and origins of an earlier run with the same samples and judge, to be extended."""
    result = read_result(path) if path.exists() else {"provenance": {}}
    origin = result["provenance"]
    numbers, origins = result.get("numbers"), origin.get("pieces")
    same = all(origin.get(key) == value for key, value in about.items())
    return (numbers, origins) if same and isinstance(numbers, dict) and isinstance(origins, dict) else ({}, {})


def _origins(out: Path, drawing: str, seeds: Sequence[int], shared: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance of a drawing by seed. Sizes may differ from the current ones, but not between seeds."""
    origins = {}
    for seed in seeds:
        path = result_file(out, seed, f"draw-{drawing}")
        if not (path.exists() and drawn_at(out, drawing, seed).exists()):
            raise CheckpointError(f"{out} holds no draw:{drawing} of seed {seed}; draw it first")
        check_settings(path, shared)
        origins[f"{drawing}-{seed}"] = read_result(path)["provenance"]
    first, *others = origins.values()
    if unlike := [key for key in ("field", "sizes") if any(o.get(key) != first.get(key) for o in others)]:
        raise CheckpointError(
            f"the seeds of draw:{drawing} in {out} differ in their {' and '.join(unlike)}; draw them again"
        )
    return origins


def _judged(experiment: Experiment, out: Path, drawing: str, seed: int) -> dict[str, tuple[Drawn, Outcome]]:
    """Return the rows of a drawing with their outcomes; judge the samples unless outcomes of the same judge exist."""
    path, judged_by = drawn_at(out, drawing, seed), json.dumps(experiment.judged_by(), sort_keys=True)
    rows, of = load_drawn(path), hashlib.sha256(path.read_bytes() + judged_by.encode()).hexdigest()
    outcomes = load_outcomes(judged_at(out, drawing, seed), of)
    if outcomes is None:
        outcomes = {label: experiment.judge(row.tensors) for label, row in rows.items()}
        save_outcomes(judged_at(out, drawing, seed), outcomes, of)
    return {label: (row, outcomes[label]) for label, row in rows.items()}


def _described(experiment: Experiment) -> Mapping[str, Any]:
    """Return the names used in tables, so that a report needs only this file."""
    return {
        "setting": experiment.name,
        "bad": experiment.bad,
        "good": experiment.good,
        "metrics": {
            name: {"words": m.words, "higher": m.higher, "digits": m.digits} for name, m in experiment.metrics.items()
        },
        "intents": {name: asdict(intent) for name, intent in experiment.intents.items()},
    }
