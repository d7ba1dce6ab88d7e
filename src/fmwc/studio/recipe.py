"""The command and the Python lines that make the samples on the screen without the studio."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from fmwc.cli.sample import CONTROLS
from fmwc.cli.verbs import Edit, Filter
from fmwc.studio.models import Model
from fmwc.studio.runs import Run, Studio, kept_of, sample_options

__all__ = ["recipe"]

EDIT_OF_EDIT = "There is no command for an edit of an edit; use the Python lines."
PARTS = "Draws the same samples again if it runs on the same machine with the same version of fmwc."


def recipe(studio: Studio, run: Run, kept: Any = None) -> dict[str, str]:
    """Return the command and the Python lines that make a run, or its surest samples.

    Arguments:
        studio: The studio.
        run: The run.
        kept: The number of surest samples to keep; `None` for all.
    """
    count = kept_of(run, kept)
    few = count < run.facts.get("count", 0)
    model = studio.models.get(run.model)
    chain = [run]
    while chain[0].parent:
        chain.insert(0, studio.run(chain[0].parent["run"]))
    first, edits = chain[0], chain[1:]
    if first.opened or model is None:
        command, python = "", [f'run = fmwc.Trajectory.load("{first.samples}")']
        imports, source = ["import fmwc"], str(first.samples)
    else:
        command = _words("sample", sample_options(model, first, Path("samples")), "count")
        imports, python = _drawn(model, first, bool(edits))
        source = "samples"
    commands = [command] if command else []
    for place, edit in enumerate(edits):
        assert edit.parent is not None
        commands.append(_edit_command(edit, model, source) if place == 0 else "")
        python += [*_edited(edit, edit.parent["sample"], place == 0)]
    if edits:
        imports += ["import torch", "from fmwc.uses.edit import edit"]
    if few:
        commands.append(_words("filter", Filter(Path(source), Path("surest"), budget=count)))
        imports.append("from fmwc.uses.filter import choose")
        python.append(f"surest = run.take(choose(run.score(), budget={count}))")
    possible = "" not in commands
    text = "\n".join([*_sorted(imports), "", *python])
    return {
        "command": "\n".join(commands) if possible else "",
        "python": text,
        "note": PARTS if possible else EDIT_OF_EDIT,
    }


def _words(verb: str, options: Any, *always: str) -> str:
    """Return a command line with all options that are not defaults.

    >>> _words("filter", Filter(Path("mine"), Path("surest"), budget=5))
    'fmwc filter mine --out surest --budget 5'
    """
    words, paths = ["fmwc", verb], []
    for option in fields(options):
        value = getattr(options, option.name)
        needed = option.default is MISSING
        if needed and option.name != "out":
            words.append(str(value))
        elif needed:
            paths = ["--out", str(value)]
        elif value != option.default or option.name in always:
            name = f"--{option.name.replace('_', '-')}"
            paths += [name] if value is True else [name, str(value)]
    return shlex.join([*words, *paths])


def _edit_command(run: Run, model: Model | None, source: str) -> str:
    assert run.parent is not None
    options = run.options
    label = int(options["label"]) if options.get("label") else None
    at, only = f"{options['at']:g}", str(run.parent["sample"])
    given = {"channel": options.get("channel") or "", "scale": options["scale"], "seed": options["seed"]}
    judge = model.judge if model else ""
    return _words("edit", Edit(Path(source), Path("edited"), at=at, label=label, only=only, judge=judge, **given))


def _drawn(model: Model, run: Run, states: bool) -> tuple[list[str], list[str]]:
    """Return the imports and the lines that draw a run."""
    options = sample_options(model, run)
    imports = ["import torch", "from fmwc.registry import open_checkpoint"]
    opening = [f'"{model.checkpoint}"', f'torch.device("{model.device}")']
    opening += [f"{name}={value!r}" for name in ("judge", "network") if (value := getattr(model, name))]
    config = {"stepper": repr(options.stepper)} if options.stepper != "euler" else {}
    config |= {"keep_states": "True"} if states else {}
    given = {"label": options.label} if options.label is not None else {}
    given |= {"steps": options.steps} if options.steps != 50 else {}
    arguments = [f"field, {options.count}, seed={options.seed}, progress=None", *_named(given)]
    if options.propagation:
        imports += ["from fmwc.estimators import as_estimator"]
        known = {"none": "None", "linearised": "domain.estimator(field)"}
        arguments.append(f"confidence={known.get(options.propagation, f'as_estimator({options.propagation!r})')}")
    arguments += ["check=False"] if options.no_check else []
    if config:
        imports.append("from fmwc.sampling import SamplingConfig")
        arguments.append(f"config=SamplingConfig({', '.join(f'{n}={v}' for n, v in config.items())})")
    lines = [f"domain, field = open_checkpoint({', '.join(opening)})"]
    if options.check:
        imports.append("from fmwc.checks import choose_check")
        lines.append(f'classes = {{"y": torch.tensor({model.classes})}}' if model.classes else "classes = {}")
        arguments.append(
            f"check=choose_check(field.space, classes, {options.check}, field.reference.checks, rivals=classes)"
        )
    if controls := {name: value for name in CONTROLS if (value := getattr(options, name))}:
        lines.append(f"domain = domain.with_controls({controls!r})")
    return imports, [*lines, f"run = domain.draw({', '.join(arguments)})"]


def _named(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in values.items()]


def _edited(run: Run, sample: int, first: bool) -> list[str]:
    """Return the lines that edit one sample."""
    options = run.options
    channel = repr(options["channel"]) if options.get("channel") else "None"
    given = {"at": options["at"], "scale": options["scale"], "seed": options["seed"]}
    cond = [f'cond={{"y": torch.tensor([{options["label"]}])}}'] if options.get("label") else []
    source = f"run.take(torch.tensor([{sample}]))" if first else "run"
    return [f"run = edit({', '.join(['field', source, channel, *_named(given), *cond, 'confidence=None'])})"]


def _sorted(imports: list[str]) -> list[str]:
    """Return imports without repetitions: modules, then names from fmwc.

    >>> _sorted(["import torch", "from fmwc.registry import x", "import fmwc", "import torch"])
    ['import fmwc', 'import torch', 'from fmwc.registry import x']
    """
    return sorted({*imports}, key=lambda line: (line.startswith("from"), line))
