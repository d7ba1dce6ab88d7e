"""The command line: parse, call, print."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fmwc
from fmwc.errors import UsageError, pick
from fmwc.files import new_folder, write_json, write_text
from fmwc.metrics.points import misplaced
from fmwc.metrics.ranking import auprc, retention
from fmwc.propagate import ESTIMATORS
from fmwc.recipes import checkerboard, reading, reproduce
from fmwc.recipes.recipe import Clock, override, pick_device, provenance
from fmwc.recipes.reproduce import RIVALS
from fmwc.report.checkerboard import write_figures, write_report
from fmwc.report.results import write_tables
from fmwc.sampling import SCORES, STEPPERS
from fmwc.sampling.trajectory import DISPERSION

app = typer.Typer(
    help="Flow matching with confidence: samples that say how far to trust them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = Console(stderr=True)
DEMO_MARK = ".fmwc-demo"

# What can be trained, reproduced and demonstrated: its presets by name.
RECIPES = {"checkerboard": checkerboard.PRESETS}

Recipe = Annotated[str, typer.Argument(help="Which setting: checkerboard.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")]
Set = Annotated[list[str], typer.Option("--set", help="Change a recipe field: --set key=value. May be repeated.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of the run.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]


@contextmanager
def _training_bar() -> Iterator[Callable[[str, int, int, float], None]]:
    """A live bar, one line a stage of training, with the loss."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, loss: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(f"training the {stage}", total=total, loss=loss)
            bar.update(tasks[stage], completed=done, loss=loss)

        yield show


@contextmanager
def _sampling_bar(what: str, count: int) -> Iterator[Callable[[int], None]]:
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as bar:
        task = bar.add_task(what, total=count)
        yield lambda done: bar.advance(task, done)


def _numbers(trajectory: fmwc.Trajectory) -> list[dict[str, str]]:
    """The short table: what confidence does for this run."""
    bad = misplaced(trajectory.x)
    rows = [{"": "misplaced, all samples", "value": f"{bad.mean():.1%}"}]
    names = [*(["dispersion"] if trajectory.transported is not None else []), "temporal_ratio"]
    for name in names if bad.any() else []:
        score = trajectory.score(name).cpu()
        rows += [
            {"": f"misplaced, surest 90 % by {name}", "value": f"{retention(score, bad).at(0.9):.1%}"},
            {"": f"AUPRC of {name} (floor {bad.mean():.2f})", "value": f"{auprc(score, bad):.2f}"},
        ]
    return rows


def _print(rows: list[dict[str, str]], title: str) -> None:
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


@app.command()
def demo(
    recipe: Recipe = "checkerboard",
    out: Out = Path("demo"),
    seed: Seed = 0,
    set_: Set = [],  # noqa: B006
    device: Device = "auto",
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.")] = 10_000,
    force: Force = False,
) -> None:
    """Trains a small flow, draws samples with their confidence, and writes a report to look at."""
    where = pick_device(device)
    chosen = override(pick(RECIPES, recipe, "recipe")["quick"], [f"seed={seed}", *set_])
    report_folder = _demo_folder(out, force)
    clock = Clock(where)
    with _training_bar() as bar:
        field = checkerboard.fit(chosen, report_folder / "model", where, bar)
    _page(field, report_folder, seed, count, clock, "Checkerboard, small preset")


def _demo_folder(out: Path, force: bool) -> Path:
    """A demonstration is made to be run again: a folder that an earlier one marked as its own is cleared."""
    if (out / DEMO_MARK).is_file():
        shutil.rmtree(out)
    new_folder(out, force=force)
    if not any(out.iterdir()):  # forced into a folder with other files, it must never clear those
        write_text(out / DEMO_MARK, "Written by fmwc demo, which clears this folder when it is run again.\n")
    return out


def _page(field: fmwc.Field, out: Path, seed: int, count: int, clock: Clock, title: str) -> None:
    """Draws samples, prints the short table and writes samples, numbers and report."""
    with _sampling_bar("drawing samples with confidence", count) as bar:
        trajectory = fmwc.sample(field, count, steps=50, seed=seed, transport=True, batch=2048, progress=bar)
    # The page asks for the best score there is; its samples are ranked among themselves.
    trajectory = replace(trajectory, default_score="dispersion", reference=None)
    rows = _numbers(trajectory)
    about = {k: str(v) for k, v in provenance(field.device, clock.seconds, seed=seed).items()}
    _write_samples(trajectory, out)
    write_json(out / "numbers.json", {"numbers": rows, "provenance": about})
    page = write_report(out, field, trajectory, numbers=rows, provenance=about)
    _print(rows, title)
    Console().print(f"{clock.seconds:.0f} s; open {page}")


def _write_samples(trajectory: fmwc.Trajectory, out: Path) -> None:
    trajectory.save(out / "samples.safetensors")
    columns = {f"x_{i}": trajectory.x[:, i].tolist() for i in range(trajectory.x.shape[1])}
    with suppress(UsageError):  # a run too short for its score is still worth having
        columns |= {"score": trajectory.score().tolist(), "confidence": trajectory.confidence.tolist()}
    lines = [",".join(columns), *(",".join(f"{v:.6g}" for v in row) for row in zip(*columns.values(), strict=True))]
    write_text(out / "samples.csv", "\n".join(lines) + "\n")


@app.command()
def train(
    recipe: Recipe,
    out: Out,
    preset: Annotated[str, typer.Option(help="recommended, paper or quick.")] = "recommended",
    seed: Seed = 0,
    set_: Set = [],  # noqa: B006
    device: Device = "auto",
) -> None:
    """Trains a field into a folder. Killed and called again, it goes on where it was, to the same weights."""
    presets = pick(RECIPES, recipe, "recipe")
    chosen = override(pick(presets, preset, "preset"), [f"seed={seed}", *set_])
    where = pick_device(device)
    with _training_bar() as bar:
        checkerboard.fit(chosen, out, where, bar)
    Console().print(f"wrote {out}: {fmwc.checkpoint.about(out)['metrics']}")


@app.command()
def sample(
    checkpoint: Annotated[str, typer.Argument(help="A shipped name (checkerboard, checkerboard-joint) or a folder.")],
    out: Out,
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.")] = 1000,
    steps: Annotated[int, typer.Option(help="Steps of the integrator.")] = 50,
    stepper: Annotated[str, typer.Option(help="euler, midpoint or heun.")] = "euler",
    propagation: Annotated[
        str, typer.Option(help="linearised, diagonal, tangent, monte_carlo or none.")
    ] = "linearised",
    every: Annotated[int, typer.Option(help="Read the variance at every k-th step.")] = 1,
    transport: Annotated[bool, typer.Option("--transport", help="Add the transported dispersion.")] = False,
    score: Annotated[
        str, typer.Option(help="What confidence is made from; the checkpoint's own, or dispersion with --transport.")
    ] = "",
    keep: Annotated[float, typer.Option(help="Keep the surest share.")] = 1.0,
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Draws samples with their confidence: samples.safetensors and samples.csv."""
    if propagation != "none":
        pick(ESTIMATORS, propagation, "propagation")
    if not 0 < keep <= 1:
        raise UsageError(f"--keep lies in (0, 1], got {keep}")
    if keep < 1 and propagation == "none" and not transport:
        raise UsageError("--keep needs a confidence to go by; leave out --propagation none")
    pick(STEPPERS, stepper, "stepper")
    if score:
        pick(dict.fromkeys([*SCORES, DISPERSION]), score, "score")
    if score == DISPERSION and not transport:
        raise UsageError("--score dispersion is read from transported variance; add --transport")
    if count < 1 or steps < 1 or every < 1:
        raise UsageError(f"-n, --steps and --every are at least 1, got {count}, {steps} and {every}")
    field = fmwc.load(checkpoint, device=pick_device(device))
    new_folder(out, force=force)
    with _sampling_bar("drawing samples", count) as bar:
        trajectory = fmwc.sample(
            field,
            count,
            steps=steps,
            stepper=stepper,
            seed=seed,
            schedule=every,
            confidence=False if propagation == "none" else propagation,
            transport=transport,
            batch=2048,
            progress=bar,
        )
    if chosen := score or (DISPERSION if transport else ""):
        same = chosen == trajectory.default_score
        trajectory = replace(trajectory, default_score=chosen, reference=trajectory.reference if same else None)
    _write_samples(trajectory.surest(keep) if keep < 1 else trajectory, out)
    Console().print(f"wrote {out / 'samples.safetensors'} and samples.csv")


@app.command()
def evaluate(
    recipe: Recipe = "checkerboard",
    checkpoint: Annotated[str, typer.Option(help="A shipped name or a folder; the recipe's own if not given.")] = "",
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the samples; nothing was chosen on the default.")] = 2026,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recomputes the headline numbers from weights."""
    pick(RECIPES, recipe, "recipe")
    where = pick_device(device)
    clock = Clock(where)
    name = checkpoint or recipe
    field = fmwc.load(name, device=where)
    with _sampling_bar(f"reading {name}", 5 * count) as bar:
        options: dict[str, Any] = {"steps": 50, "seed": seed, "batch": 2048, "progress": bar}
        plain = fmwc.sample(field, count, confidence=False, **options)
        linear = fmwc.sample(field, count, transport=True, **options)
        diagonal = fmwc.sample(field, count, confidence="diagonal", **options)
        rivals = {n: fmwc.sample(field, count, confidence=r, schedule=s, **options) for n, (r, s) in RIVALS.items()}
    found = reading.headline(field, linear, plain.x)
    found["auprc_diagonal"] = reading.scores_of(diagonal, misplaced(plain.x))
    found["auprc_rivals"] = {n: reading.scores_of(r, misplaced(plain.x)) for n, r in rivals.items()}
    found["heads"] = reading.heads_of(linear, misplaced(plain.x))
    found = {"checkpoint": name, **found, "provenance": provenance(where, clock.seconds, seed=seed, samples=count)}
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        flat = {k: v for k, v in found.items() if not isinstance(v, dict)}
        groups = {g: found[g] for g in ("auprc", "auprc_diagonal", "kept_90", "heads")} | found["auprc_rivals"]
        for group, values in groups.items():
            flat |= {f"{group} {k}": v for k, v in values.items()}
        _print([{"": k, "value": f"{v:.4f}" if isinstance(v, float) else str(v)} for k, v in flat.items()], name)


@app.command("reproduce")
def reproduce_(
    recipe: Recipe,
    out: Annotated[Path, typer.Option("--out", "-o", help="Results folder; what is there is not made again.")] = Path(
        "runs/checkerboard"
    ),
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    set_: Set = [],  # noqa: B006
    count: Annotated[int, typer.Option("-n", "--count", help="Samples a reading.")] = 10_000,
    draws: Annotated[int, typer.Option(help="Stochastic trajectories the dispersion is held against.")] = 64,
    device: Device = "auto",
) -> None:
    """Trains every method at every seed and writes the paper's tables beside ours. Stopped, it goes on where it was."""
    chosen = override(pick(RECIPES, recipe, "recipe")["recommended"], set_)
    try:
        numbers = [int(s) for s in seeds.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds takes whole numbers separated by commas, got '{seeds}'") from error
    where = pick_device(device)
    reproduce.reproduce(chosen, out, where, seeds=numbers, count=count, draws=draws, say=console.print)
    field = fmwc.load(out / "models" / "checkerboard", device=where)
    write_figures(out / "figures", field, fmwc.sample(field, count, steps=50, seed=2026, transport=True))
    for path in write_tables(out):
        Console().print(f"wrote {path}")


@app.command()
def report(
    source: Annotated[str, typer.Argument(help="A checkpoint (shipped name or folder), or a results folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the page of a checkpoint.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 2026,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Writes report.html for a checkpoint, or the tables of a results folder again from its cells."""
    if (Path(source) / "cells").is_dir():
        for path in write_tables(Path(source)):
            Console().print(f"wrote {path}")
        return
    where = pick_device(device)
    clock = Clock(where)
    field = fmwc.load(source, device=where)
    if out is None:
        raise UsageError("say where the page goes: --out FOLDER")
    _page(field, new_folder(out, force=force), seed, count, clock, source)
