"""The experiments from the command line: `python -m experiments reproduce | study | evaluate | bench | report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import fmwc
from fmwc.cli.verbs import (
    Count,
    Data,
    Device,
    Force,
    JudgedBy,
    Out,
    Own,
    Set,
    Which,
    print_rows,
    print_written,
    say,
)
from fmwc.domains import DOMAINS
from fmwc.errors import UsageError
from fmwc.files import claimed
from fmwc.progress import sampling_bar

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def reproduce(
    setting: Which,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Results folder; default: runs/SETTING. Existing results are kept."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; default: those of the setting.")] = "",
    set_: Set = None,
    count: Count = 0,
    draws: Annotated[
        int, typer.Option(help="Stochastic trajectories per sample for the dispersion; 0: the setting's number.")
    ] = 0,
    only: Annotated[
        str,
        typer.Option(help="mnist, crystals: run only these tasks (flow:0,read:joint), to share work."),
    ] = "",
    data: Data = "",
    own: Own = False,
    judge: JudgedBy = "",
    device: Device = "auto",
) -> None:
    """Reproduce the paper's tables; resumes if interrupted.

    Trains every method with every seed and writes our numbers next to the paper's.
    """
    from experiments.common.registry import experiment_named
    from fmwc.provenance import pick_device

    chosen = experiment_named(setting, judge)
    recipe = chosen.domain.recipe("recommended", set_ or [], data, own)
    if getattr(recipe, "own", False) and not judge:
        raise UsageError("data of your own needs a judge: fmwc train mnist --preset judge, then --judge FOLDER")
    numbers = numbers_of(seeds or chosen.seeds)
    folder = out or Path("runs") / setting
    where = pick_device(device)
    with claimed(
        folder, "reproduce", adds=("cells/*.json", "pieces/*.json", "models/*.safetensors", "draws/*.safetensors")
    ):
        chosen.reproduce(
            recipe, folder, where, numbers, count=count or chosen.reproduced, draws=draws or chosen.draws, only=only
        )
        for path in [] if only else chosen.tables(folder):
            say(f"wrote {path}")


def numbers_of(text: str) -> list[int]:
    """Return the seeds of a comma-separated list."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds must be whole numbers separated by commas; got '{text}'") from error


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested numbers by joining their names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        label = f"{before} {name}".strip()
        if isinstance(value, list):
            value = "–".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value)
        flat |= _flat(value, label) if isinstance(value, dict) else {label: value}
    return flat


@app.command()
def evaluate(
    setting: Which = "checkerboard",
    checkpoint: Annotated[str, typer.Option(help="A shipped name or a folder; default: the shipped weights.")] = "",
    count: Count = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples; the default was not used to choose anything.")] = 2026,
    data: Data = "",
    judge: JudgedBy = "",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the main numbers of a checkpoint."""
    from experiments.common.registry import experiment_of
    from fmwc.provenance import Clock, pick_device, provenance

    chosen, where = experiment_of(setting, checkpoint, judge), pick_device(device)
    clock = Clock(where)
    name, count = checkpoint or setting, count or chosen.domain.count(where)
    field = fmwc.load(name, device=where)
    chosen.domain.require_judge(field)
    with sampling_bar(f"reading {name}", None) as bar:
        found = chosen.evaluate(field, count, seed, data, bar)
    found = {"checkpoint": name, **found, "provenance": provenance(where, clock.seconds, seed=seed, samples=count)}
    if as_json:
        say(json.dumps(found, indent=1))
        return
    print_rows(
        [{"": k, "value": f"{v:.4f}" if isinstance(v, float) else str(v)} for k, v in _flat(found).items()], name
    )


@app.command()
def study(
    setting: Which,
    out: Out,
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas; default: seeds that were not used to choose anything.")
    ] = "",
    only: Annotated[
        str, typer.Option(help="Run only these tasks (draw:edit,read:edit), to share work between machines.")
    ] = "",
    wide: Annotated[
        bool, typer.Option("--wide", help="Measure all options that were considered, on the validation seed.")
    ] = False,
    sizes: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="Samples per seed: samples=…,edited=…,replicates=…,swept=…,rewound=…,guided=…",
        ),
    ] = [],  # noqa: B006
    checkpoint: Annotated[str, typer.Option(help="A shipped name or a folder; default: the shipped weights.")] = "",
    data: Data = "",
    judge: JudgedBy = "",
    device: Device = "auto",
) -> None:
    """Measure each use of confidence; resumes if interrupted.

    Filtering, guarantees, edits, step-size control, rewinding and guidance, each next to baselines of the same cost.
    Writes tables, figures and a page.
    """
    from experiments.common.registry import experiment_of
    from experiments.uses.report import write_study
    from experiments.uses.study import REPORTED, VALIDATION
    from experiments.uses.study import study as fill
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import pick_device

    chosen = experiment_of(setting, checkpoint, judge, "study")
    numbers = numbers_of(seeds) if seeds else VALIDATION if wide else REPORTED
    changes = [change for given in sizes for change in given.split(",")]
    field = fmwc.load(checkpoint or chosen.name, device=pick_device(device))
    experiment = chosen.with_field(field, data, changes)
    with claimed(out, "study", adds=("pieces/*.json", "draws/*.safetensors")):
        if fill(experiment, out, seeds=numbers, only=only, wide=wide, say=say_on_stderr) is None:
            print_written([out / "draws"])
            return
        written = write_study(out)
    print_written(written)


@app.command()
def bench(
    out: Out,
    settings: Annotated[list[str], typer.Argument(help=f"Some of {', '.join(DOMAINS)}; default: all.")] = [],  # noqa: B006
    count: Count = 0,
    steps: Annotated[int, typer.Option(min=1, help="Euler steps.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per case, interleaved.")] = 5,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time limit per setting; cases that do not fit are skipped and listed.")
    ] = 10.0,
    only: Annotated[
        str,
        typer.Option(
            help="Only cases whose name contains one of these (linearised,diagonal), and plain; or whole parts: "
            "sampling, training, sweep."
        ),
    ] = "",
    backend: Annotated[str, typer.Option(help="Backend of torch.compile; eager needs no compiler.")] = "inductor",
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Use TensorFloat-32 matrix products on a GPU, also for plain sampling.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Measure the time and memory that confidence costs.

    Compares with plain sampling and training, compiled and not.
    """
    from experiments.common.registry import experiment_named
    from experiments.cost.costs import measure, words_of
    from experiments.cost.tables import write_costs
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import pick_device

    chosen = [experiment_named(name).domain for name in settings or DOMAINS]
    words_of(only)
    written = []
    with claimed(out, "bench", force=force):
        for setting in chosen:
            field = fmwc.load(setting.name, device=pick_device(device))
            say_on_stderr(f"{setting.name}:")
            costs = measure(
                setting,
                field,
                count=count,
                steps=steps,
                rounds=rounds,
                minutes=minutes,
                only=only,
                backend=backend,
                tf32=tf32,
                say=say_on_stderr,
            )
            written += write_costs(out, setting.name, costs)
    for path in written[1::2]:
        say(path.read_text())
    print_written(written)


@app.command()
def report(results: Annotated[Path, typer.Argument(help="A folder of reproduce or of study.")]) -> None:
    """Write the tables, figures and pages of a results folder again from its numbers."""
    from experiments.common.registry import experiment_named
    from experiments.common.store import experiment_of_results
    from experiments.uses.folder import NUMBERS
    from experiments.uses.report import write_study

    if (results / NUMBERS).is_file():
        print_written(write_study(results))
        return
    print_written(experiment_named(experiment_of_results(results)).tables(results))
