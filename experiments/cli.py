"""The command line of the experiments: `python -m experiments reproduce | study | evaluate | bench | report`."""

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
    print_table,
    print_written,
    say,
)
from fmwc.errors import UsageError
from fmwc.files import fresh, locked, moved, write_json
from fmwc.progress import sampling_bar
from fmwc.registry import DOMAINS

CheckpointName = Annotated[str, typer.Option(help="A shipped name or a folder; default: the shipped weights.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def reproduce(
    experiment: Which,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Results folder; default: runs/EXPERIMENT. Existing results are kept."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; default: those of the experiment.")] = "",
    changes: Set = None,
    count: Count = 0,
    draws: Annotated[
        int, typer.Option(help="Stochastic trajectories per sample for the dispersion; 0: the experiment's default.")
    ] = 0,
    only: Annotated[
        str,
        typer.Option(
            help="mnist, crystals: run only these tasks (flow:0,read:joint), to split work between processes."
        ),
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

    chosen = experiment_named(experiment, judge)
    recipe = chosen.domain.recipe("recommended", changes or [], data, own)
    if getattr(recipe, "own", False) and not judge:
        raise UsageError(
            "custom data needs a judge; train one with fmwc train mnist --preset judge, then use --judge FOLDER"
        )
    sizes = {"count": count or chosen.reproduced, "draws": draws or chosen.draws}
    numbers, folder = _seeds(seeds or chosen.seeds), out or Path("runs") / experiment
    where = pick_device(device)
    with locked(folder):
        chosen.reproduce(recipe, folder, where, numbers, **sizes, only=only)
        for path in [] if only else chosen.tables(folder):
            say(f"wrote {path}")


def _seeds(text: str) -> list[int]:
    """Return the seeds of a comma-separated list."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds must be integers separated by commas, got '{text}'") from error


@app.command()
def evaluate(
    experiment: Which = "checkerboard",
    checkpoint: CheckpointName = "",
    count: Count = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples. No option was tuned on the default.")] = 2026,
    data: Data = "",
    judge: JudgedBy = "",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the main numbers of a checkpoint."""
    from experiments.common.registry import experiment_of
    from fmwc.provenance import Clock, pick_device, provenance

    chosen, where = experiment_of(experiment, checkpoint, judge), pick_device(device)
    clock = Clock(where)
    name, count = checkpoint or experiment, count or chosen.domain.count(where)
    field = fmwc.load(name, device=where)
    chosen.domain.require_judge(field)
    with sampling_bar(f"evaluating {name}", None) as bar:
        numbers = chosen.evaluate(field, count, seed, data, bar)
    about = provenance(where, clock.seconds, seed=seed, samples=count)
    numbers = {"checkpoint": name, **numbers, "provenance": about}
    if as_json:
        say(json.dumps(numbers, indent=1))
    else:
        print_rows([{"": label, "value": value} for label, value in _flat(numbers).items()], name)


predict = typer.Typer(no_args_is_help=True, help="Predict the structures of MP-20's test split; draw, then match.")
app.add_typer(predict, name="predict")
Split = Annotated[str, typer.Option(help="train, val or test.")]


@predict.command("draw")
def predict_draw(
    out: Out,
    checkpoint: CheckpointName = "crystals",
    count: Annotated[
        int, typer.Option("-n", "--count", min=0, help="Number of compositions; 0: all of the split.")
    ] = 0,
    each: Annotated[int, typer.Option(min=1, max=999, help="Candidates per composition.")] = 1,
    anneal: Annotated[
        float | None,
        typer.Option(min=0, help="Coordinates move at 1 + s·t times their velocity; default: s of the checkpoint."),
    ] = None,
    steps: Annotated[int, typer.Option(min=20, help="Euler steps.")] = 50,
    batch: Annotated[int, typer.Option(min=1, help="Crystals drawn together, and per file.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Seed of the compositions and of the candidates.")] = 2026,
    split: Split = "test",
    data: Data = "",
    device: Device = "auto",
) -> None:
    """Draw candidates for the compositions of a split; needs no chemistry packages.

    Resumes if interrupted. Repeat the command with a larger --count or --each to add candidates.
    """
    from experiments.crystals.prediction import draw
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import pick_device

    options: dict[str, Any] = {
        "count": count,
        "each": each,
        "anneal": anneal,
        "steps": steps,
        "batch": batch,
        "seed": seed,
    }
    field = fmwc.load(checkpoint, device=pick_device(device))
    with locked(out):
        written = draw(field, out, checkpoint=checkpoint, data=data, split=split, say=say_on_stderr, **options)
    print_written(written)


@predict.command("match")
def predict_match(
    folder: Annotated[Path, typer.Argument(help="A folder that predict draw wrote.")],
    data: Data = "",
    judge: Annotated[
        str, typer.Option(help="Energy model that chooses candidates in comparison: chgnet, module:function or none.")
    ] = "chgnet",
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Number of processes.")] = 1,
) -> None:
    """Match drawn candidates to the true structures; resumes if interrupted.

    Reports the match rate and RMSE of the first candidate, of the surest, of the one with the lowest energy, and of the
    best. Brackets hold 90 % intervals. The gain is that over a random candidate. Published rows count a match only if
    the candidate is valid by CDVAE's rules; so do the last two columns.
    """
    from experiments.crystals.prediction import match, table
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import Clock, pick_device, provenance

    clock = Clock(where := pick_device("cpu"))
    with locked(folder):
        model = "" if judge == "none" else judge
        numbers = match(folder, data=data, model=model, jobs=jobs, say=say_on_stderr)
        numbers["provenance"] = provenance(where, clock.seconds, judge=judge)
        written = write_json(folder / "numbers.json", numbers)
    print_table(table(numbers), f"{numbers['compositions']} compositions of {numbers['split']}")
    print_written([written])


@app.command()
def screen(
    folder: Annotated[Path, typer.Argument(help="A folder with samples.safetensors, and relaxed.npz if relaxed.")],
    relax: Annotated[
        int, typer.Option(min=0, help="Relax so many structures and compute all fingerprints; 0: use the files.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Maximum steps of --relax.")] = 200,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Number of processes for --relax.")] = 1,
    data: Data = "",
    judge: JudgedBy = "chgnet",
) -> None:
    """Judge drawn and relaxed crystals, and measure what confidence is worth; resumes if interrupted.

    Writes the tables of CDVAE, FlowMM and MatterGen before and after relaxation beside published rows, and every
    quantity against confidence. The folder is one that fmwc sample crystals wrote.
    """
    from experiments.crystals.screening import complete, tables_of_structures
    from experiments.crystals.screening import screen as run
    from experiments.crystals.screening_tables import verdicts, write_figures, write_screening
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import Clock, pick_device, provenance

    clock = Clock(where := pick_device("cpu"))
    with locked(folder):
        if relax:
            complete(folder, relax, steps, data=data, model=judge, jobs=jobs, say=say_on_stderr)
        numbers = run(folder, data=data, model=judge, say=say_on_stderr)
        numbers["provenance"] = provenance(where, clock.seconds, judge=judge)
        written = [write_json(folder / "numbers.json", numbers), *write_screening(folder, numbers)]
        written += write_figures(folder, tables_of_structures(folder))
    for sentence in verdicts(numbers):
        say(sentence)
    print_written(written)


@app.command()
def control(
    out: Out,
    checkpoint: CheckpointName = "crystals",
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Number of crystals under each control.")] = 100,
    pool: Annotated[int, typer.Option(min=1, help="Number of crystals without controls, for rejection.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 2026,
    judge: JudgedBy = "chgnet",
    device: Device = "auto",
) -> None:
    """Measure what controls of chemistry cost in quality; resumes if interrupted.

    Compares crystals drawn with excluded elements, listed elements or a chemical system with those that rejection
    keeps.
    """
    from experiments.crystals.controlled import controlled
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import Clock, pick_device, provenance

    where = pick_device(device)
    clock, field = Clock(where), fmwc.load(checkpoint, device=where)
    with locked(out):
        numbers = controlled(field, out, count=count, pool=pool, seed=seed, model=judge, say=say_on_stderr)
        about = provenance(where, clock.seconds, count=count, pool=pool, seed=seed, judge=judge)
        written = write_json(out / "numbers.json", {"checkpoint": checkpoint, **numbers, "provenance": about})
    print_rows([{"": label, "value": value} for label, value in _flat(numbers).items()], "control")
    print_written([written])


def _flat(values: dict[str, Any], before: str = "") -> dict[str, str]:
    """Flatten nested numbers by joining their names, and format them."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        label = f"{before} {name}".strip()
        if isinstance(value, dict):
            flat |= _flat(value, label)
        elif isinstance(value, list):
            flat[label] = "–".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value)
        else:
            flat[label] = f"{value:.4f}" if isinstance(value, float) else str(value)
    return flat


@app.command()
def study(
    experiment: Which,
    out: Out,
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas; default: seeds on which no option was tuned.")
    ] = "",
    only: Annotated[
        str, typer.Option(help="Run only these tasks (draw:edit,read:edit), to split work between machines.")
    ] = "",
    sizes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Samples per seed: samples=…,edited=…,replicates=…,swept=…,guided=…"),
    ] = None,
    checkpoint: CheckpointName = "",
    data: Data = "",
    judge: JudgedBy = "",
    device: Device = "auto",
) -> None:
    """Measure each use of confidence; resumes if interrupted.

    Compares filtering, guarantees, edits, step-size control and guidance with baselines of the same cost.
    Writes tables, figures and a page.
    """
    from experiments.common.registry import experiment_of
    from experiments.uses.report import write_study
    from experiments.uses.study import REPORTED
    from experiments.uses.study import study as run
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import pick_device

    chosen = experiment_of(experiment, checkpoint, judge, "study")
    numbers = _seeds(seeds) if seeds else REPORTED
    changes = [change for part in sizes or [] for change in part.split(",")]
    field = fmwc.load(checkpoint or chosen.name, device=pick_device(device))
    studied = chosen.with_field(field, data, changes)
    with locked(out):
        complete = run(studied, out, seeds=numbers, only=only, say=say_on_stderr) is not None
        written = write_study(out) if complete else [out / "draws"]
    print_written(written)


@app.command()
def bench(
    out: Out,
    experiments: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(DOMAINS)}; default: all.")] = None,
    count: Count = 0,
    steps: Annotated[int, typer.Option(min=1, help="Euler steps.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per case, interleaved.")] = 5,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time limit per experiment; cases that do not fit are skipped and listed.")
    ] = 10.0,
    only: Annotated[
        str,
        typer.Option(
            help="Only plain sampling and cases whose names contain one of these words (linearised,diagonal), or whole "
            "parts: sampling, training."
        ),
    ] = "",
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Use TensorFloat-32 matrix products on a GPU, also for plain sampling.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Measure the cost of confidence in time and memory.

    Compares with plain sampling and training, with and without compilation.
    """
    from experiments.common.registry import experiment_named
    from experiments.cost.costs import measure, words_of
    from experiments.cost.tables import write_costs
    from fmwc.progress import say_on_stderr
    from fmwc.provenance import pick_device

    domains = [experiment_named(name).domain for name in experiments or DOMAINS]
    words_of(only)
    options: dict[str, Any] = {"count": count, "steps": steps, "rounds": rounds, "minutes": minutes, "only": only}
    options |= {"tf32": tf32, "say": say_on_stderr}
    written = []
    with fresh(out, force=force) as place:
        for domain in domains:
            field = fmwc.load(domain.name, device=pick_device(device))
            say_on_stderr(f"{domain.name}:")
            written += write_costs(place, domain.name, measure(domain, field, **options))
    written = moved(written, place, out)
    for path in written[1::2]:
        say(path.read_text())
    print_written(written)


@app.command()
def report(results: Annotated[Path, typer.Argument(help="A folder written by reproduce or study.")]) -> None:
    """Regenerate the tables, figures and pages of a results folder."""
    from experiments.common.registry import experiment_named
    from experiments.common.store import experiment_of_results
    from experiments.uses.folder import NUMBERS
    from experiments.uses.report import write_study

    if (results / NUMBERS).is_file():
        print_written(write_study(results))
    else:
        print_written(experiment_named(experiment_of_results(results)).tables(results))
