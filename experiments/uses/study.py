"""The study of the uses of confidence: draw, judge and evaluate samples. A stopped study can be resumed."""

from __future__ import annotations

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
    load_drawn,
    save_drawn,
)
from fmwc.data.arrays import fingerprint
from fmwc.errors import CheckpointError, UsageError
from fmwc.files import write_json
from fmwc.provenance import Clock, provenance

REPORTED = (200, 201, 202)  # seeds on which no option was tuned


def study(
    experiment: Experiment,
    out: Path,
    *,
    seeds: Sequence[int] = REPORTED,
    only: str = "",
    say: Say = print,
) -> Path | None:
    """Run a study in `out`; return the path of `out/uses.json`, or `None` if no use was evaluated.

    Arguments:
        experiment: The experiment with its field and sizes.
        out: The folder.
        seeds: Seeds of the samples. No option was tuned on the default seeds.
        only: Tasks to run, such as `draw:edit,read:edit`, if samples are drawn and judged on different machines.
        say: Called with progress messages.
    """
    drawings, uses = _tasks(only)
    if not seeds:
        raise UsageError("a study needs at least one seed")
    device, judged_by = experiment.field.device, experiment.judged_by()
    clock = Clock(device)
    shared = {"setting": experiment.name}
    # The judge is already used when samples are drawn.
    shared |= {name: value for name, value in judged_by.items() if name == "judge"}
    field = fingerprint(*experiment.field.state_dict().values())
    settings = {**shared, "steps": STEPS, "sizes": vars(experiment.sizes), "field": field}
    for name, seed in product(drawings, seeds):
        task = partial(_draw, experiment, name, seed, drawn_at(out, name, seed), say)
        run_task(result_file(out, seed, f"draw-{name}"), task, seed, settings, device, say)
    if not uses:
        return None
    about = {"setting": experiment.name, "steps": STEPS, "seeds": list(seeds), "judged_by": judged_by}
    numbers: dict[str, Any] = {}
    origins: dict[str, Any] = {}
    judged: dict[str, dict[int, dict[str, tuple[Drawn, Outcome]]]] = {}
    for use in uses:
        drawing, evaluate = READINGS[use]
        if drawing not in judged:
            origins |= _origins(out, drawing, seeds, shared)
            judged[drawing] = {seed: _judged(experiment, drawn_at(out, drawing, seed)) for seed in seeds}
        numbers[use] = evaluate(experiment, judged[drawing])
        say(f"read {use}")
    about = provenance(device, clock.seconds, **about, pieces=origins)
    return write_json(out / NUMBERS, {**_described(experiment), "provenance": about, "numbers": numbers})


def _tasks(only: str) -> tuple[list[str], list[str]]:
    """Return the drawings to make and the uses to evaluate."""
    tasks = parse_tasks(only, {"draw": DRAWINGS, "read": READINGS})
    if only:
        drawings, uses = ([name for verb, name in tasks if verb == kind] for kind in ("draw", "read"))
        return drawings, uses
    return list(DRAWINGS), list(READINGS)


def _draw(experiment: Experiment, name: str, seed: int, path: Path, say: Say) -> dict[str, Any]:
    rows: dict[str, Drawn] = {}
    for label, row in DRAWINGS[name](experiment, seed):
        say(f"seed {seed}, {name}: drew {label} in {row.info['seconds']:.1f} s")
        rows[label] = row
    save_drawn(path, rows)
    return {label: row.info for label, row in rows.items()}


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


def _judged(experiment: Experiment, path: Path) -> dict[str, tuple[Drawn, Outcome]]:
    """Return the rows of a drawing with their outcomes."""
    return {label: (row, experiment.judge(row.tensors)) for label, row in load_drawn(path).items()}


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
