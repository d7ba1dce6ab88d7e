"""The command line: parse, call, print."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import fmwc
from fmwc.bars import sampling_bar, stages_bar, training_bar
from fmwc.errors import UsageError, pick
from fmwc.files import new_folder, write_json, write_text
from fmwc.metrics.crystals import calculator as load_calculator
from fmwc.propagate import ESTIMATORS
from fmwc.recipes.bench import setting_of_results
from fmwc.recipes.recipe import Clock, pick_device, provenance
from fmwc.sampling import SCORES, STEPPERS
from fmwc.sampling.scores import parsed
from fmwc.sampling.trajectory import DISPERSION
from fmwc.settings import SETTINGS, Setting
from fmwc.settings.filtering import filter_samples
from fmwc.settings.judging import judge_files, judged_rows, judged_summary, write_judged

app = typer.Typer(
    help="Flow matching with confidence: samples that say how far to trust them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
DEMO_MARK = ".fmwc-demo"

Which = Annotated[str, typer.Argument(help=f"Which setting: {' or '.join(SETTINGS)}.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")]
Set = Annotated[list[str], typer.Option("--set", help="Change a recipe field: --set key=value. May be repeated.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of the run.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]
Count = Annotated[int, typer.Option("-n", "--count", help="How many samples; 0 is the setting's own number.")]
Data = Annotated[str, typer.Option(help="Where the data is; FMWC_DATA or the cache (or a download) if not given.")]
JudgedBy = Annotated[
    str,
    typer.Option("--judge", help="mnist: a judge of your own data. crystals: an energy model, chgnet if not given."),
]
Own = Annotated[bool, typer.Option("--own", help="The data is of your own: idx files, .npz, or a folder of images.")]


def _setting(name: str, judge: str = "") -> Setting:
    chosen = pick(SETTINGS, name, "setting")
    return chosen.judged_by(judge) if judge else chosen


def _setting_of(checkpoint: str, judge: str = "") -> Setting:
    """The setting a checkpoint was trained in; without its own judge where it was trained on a user's data."""
    recipe = fmwc.checkpoint.about(checkpoint).get("recipe") or {}
    if recipe.get("name") not in SETTINGS:
        raise UsageError(f"{checkpoint} is not of a recipe of fmwc; use it from Python: fmwc.sample(field, n)")
    chosen = _setting(recipe["name"], judge)
    return chosen.unjudged() if recipe.get("own") and not judge else chosen


def _print_rows(rows: list[dict[str, str]], title: str) -> None:
    table = Table(*(rows[0] if rows else ()), title=title)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested numbers with their names joined; intervals beside what they are of."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        label = f"{before} {name}".strip()
        if isinstance(value, list):
            value = "–".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value)
        flat |= _flat(value, label) if isinstance(value, dict) else {label: value}
    return flat


def _print(rows: list[dict[str, str]], title: str) -> None:
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


@app.command()
def demo(
    setting: Which = "checkerboard",
    out: Out = Path("demo"),
    seed: Seed = 0,
    set_: Set = [],  # noqa: B006
    device: Device = "auto",
    count: Count = 0,
    force: Force = False,
) -> None:
    """Draws samples with their confidence and writes a report to look at; the Checkerboard's flow is trained first."""
    chosen, where = _setting(setting), pick_device(device)
    if count < 0:
        raise UsageError(f"-n is at least 1, or 0 for the setting's own number; got {count}")
    recipe = chosen.demo_recipe([f"seed={seed}", *set_])  # what is wrong with it is said before anything is touched
    folder = _demo_folder(out, force)
    clock = Clock(where)
    with training_bar() as bar:
        field = chosen.demo_field(recipe, folder, where, bar)
    _page(chosen, field, folder, seed, count, clock, f"{setting}, demonstration")


def _demo_folder(out: Path, force: bool) -> Path:
    """A demonstration is made to be run again: a folder that an earlier one marked as its own is cleared."""
    if (out / DEMO_MARK).is_file():
        shutil.rmtree(out)
    new_folder(out, force=force)
    if not any(out.iterdir()):  # forced into a folder with other files, it must never clear those
        write_text(out / DEMO_MARK, "Written by fmwc demo, which clears this folder when it is run again.\n")
    return out


def _page(chosen: Setting, field: fmwc.Field, out: Path, seed: int, count: int, clock: Clock, title: str) -> None:
    """Draws samples, prints the short table and writes samples, numbers and report."""
    count = count or chosen.count(field.device)
    with sampling_bar("drawing samples with confidence", count) as bar:
        run = chosen.shown(field, count, seed, bar)
    rows = chosen.numbers(run, chosen.judge(run))
    about = {k: str(v) for k, v in provenance(field.device, clock.seconds, seed=seed).items()}
    chosen.write_samples(run, out)
    write_json(out / "numbers.json", {"numbers": rows, "provenance": about})
    page = chosen.page(field, run, out, rows, about)
    _print(rows, title)
    Console().print(f"{clock.seconds:.0f} s; open {page}")


@app.command()
def train(
    setting: Which,
    out: Out,
    preset: Annotated[str, typer.Option(help="recommended, paper or quick; mnist also has judge.")] = "recommended",
    seed: Seed = 0,
    set_: Set = [],  # noqa: B006
    data: Data = "",
    own: Own = False,
    device: Device = "auto",
) -> None:
    """Trains a field into a folder. Killed and called again, it goes on where it was (a judge starts over)."""
    chosen = _setting(setting)
    pick(chosen.presets, preset, "preset")
    recipe = chosen.recipe(preset, [f"seed={seed}", *set_], data, own)
    where = pick_device(device)
    with training_bar() as bar:
        chosen.fit(recipe, out, where, bar)
    Console().print(f"wrote {out}: {fmwc.checkpoint.about(out)['metrics']}")


@app.command()
def sample(
    checkpoint: Annotated[
        str, typer.Argument(help="A shipped name (checkerboard, mnist, crystals; -joint: the paper's way) or a folder.")
    ],
    out: Out,
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.")] = 1000,
    label: Annotated[int | None, typer.Option(help="The class to draw; every class in turn if not given.")] = None,
    judge: JudgedBy = "",
    steps: Annotated[int, typer.Option(help="Steps of the integrator.")] = 50,
    stepper: Annotated[str, typer.Option(help="euler, midpoint or heun.")] = "euler",
    propagation: Annotated[
        str, typer.Option(help="linearised, diagonal, tangent, monte_carlo or none.")
    ] = "linearised",
    every: Annotated[int, typer.Option(help="Read the variance at every k-th step; 0 is the setting's own.")] = 0,
    transport: Annotated[bool, typer.Option("--transport", help="Add the transported dispersion.")] = False,
    score: Annotated[
        str, typer.Option(help="What confidence is made from; the checkpoint's own, or dispersion with --transport.")
    ] = "",
    keep: Annotated[float, typer.Option(help="Keep the surest share.")] = 1.0,
    format: Annotated[str, typer.Option(help="crystals: cif (a file each) or extxyz (one file).")] = "",
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Draws samples with their confidence: samples.safetensors, samples.csv, and a picture, surest first.

    Of crystals also a CIF each (or extended XYZ), and what the judge says of them in the table, as CSV and Parquet.
    """
    if propagation != "none":
        pick(ESTIMATORS, propagation, "propagation")
    if not 0 < keep <= 1:
        raise UsageError(f"--keep lies in (0, 1], got {keep}")
    if keep < 1 and propagation == "none" and not transport:
        raise UsageError("--keep needs a confidence to go by; leave out --propagation none")
    pick(STEPPERS, stepper, "stepper")
    channel, named, _ = parsed(score)  # type/integrated@0.6-0.9: of a channel, in a window
    if score:
        pick(dict.fromkeys([*SCORES, DISPERSION]), named, "score")
    if named == DISPERSION and not transport:
        raise UsageError("--score dispersion is read from transported variance; add --transport")
    if count < 1 or steps < 1 or every < 0:
        raise UsageError(
            f"-n and --steps are at least 1, and --every is not negative: got {count}, {steps} and {every}"
        )
    chosen = _setting_of(checkpoint, judge)
    field = fmwc.load(checkpoint, device=pick_device(device))
    chosen.conditions(field, 1, label)  # a class that does not exist is said before a folder is made
    chosen.check_format(format)
    if channel is not None and field.space is not None:
        pick(field.space.channels, channel, "channel")
    if judge or chosen.judges:
        chosen.require_judge(field)
    new_folder(out, force=force)
    with sampling_bar("drawing samples", count) as bar:
        run = chosen.draw(
            field,
            count,
            seed,
            bar,
            label,
            steps=steps,
            stepper=stepper,
            schedule=every or chosen.every,
            # By its name alone, linearised is read as suits the size of a sample.
            confidence={"none": False, "linearised": True}.get(propagation, propagation),
            transport=transport,
            keep=chosen.keep(out),
        )
    if asked := score or (chosen.transported if transport else ""):
        run = run.ranked_by(asked)
    elif label is None and len(run.times) and getattr(field.reference, "standard", None) and run.standard is None:
        typer.echo("too few samples of each class for this setting: ranked across classes", err=True)
    written = chosen.write_samples(run.surest(keep) if keep < 1 else run, out, format)
    Console().print(f"wrote {', '.join(map(str, written))}")


@app.command()
def evaluate(
    setting: Which = "checkerboard",
    checkpoint: Annotated[str, typer.Option(help="A shipped name or a folder; the setting's own if not given.")] = "",
    count: Count = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples; nothing was chosen on the default.")] = 2026,
    data: Data = "",
    judge: JudgedBy = "",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recomputes the headline numbers from weights."""
    chosen, where = _setting_of(checkpoint or _setting(setting).name, judge), pick_device(device)
    if chosen.name != _setting(setting).name:
        raise UsageError(f"{checkpoint} is of {chosen.name}; say fmwc evaluate {chosen.name}")
    if count < 0:
        raise UsageError(f"-n is at least 1, or 0 for the setting's own number; got {count}")
    clock = Clock(where)
    name, count = checkpoint or setting, count or chosen.count(where)
    field = fmwc.load(name, device=where)
    chosen.require_judge(field)
    with sampling_bar(f"reading {name}", None) as bar:
        found = chosen.evaluate(field, count, seed, data, bar)
    found = {"checkpoint": name, **found, "provenance": provenance(where, clock.seconds, seed=seed, samples=count)}
    if as_json:
        print(json.dumps(found, indent=1))
        return
    _print([{"": k, "value": f"{v:.4f}" if isinstance(v, float) else str(v)} for k, v in _flat(found).items()], name)


@app.command()
def judge(
    structures: Annotated[list[Path], typer.Argument(help="CIF, POSCAR or extended XYZ files, or folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the table, as CSV and Parquet.")] = None,
    calculator: Annotated[
        str, typer.Option(help="The energy model: chgnet, others by name, or module:function.")
    ] = "chgnet",
    relax: Annotated[int, typer.Option(help="Relax each structure first, by at most so many steps.")] = 0,
    data: Annotated[
        str, typer.Option(help="MP-20: the hull of its structures, and novelty against its training set.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a structure.")] = False,
    force: Force = False,
) -> None:
    """Judges crystals of any generator: energy above the hull, validity, uniqueness, novelty; one row a structure.

    Exits with 1 where a structure could not be judged; its row says why.
    """
    model = load_calculator(calculator)
    if out is not None:
        new_folder(out, force=force)  # said before anything is computed
    with stages_bar() as bar:
        found = judge_files(structures, model, relax, data, bar)
    for path in write_judged(found, out, relaxed=relax > 0) if out is not None else ():
        typer.echo(f"wrote {path}", err=True)
    if as_json:
        for row in found.rows():
            print(json.dumps({k: None if v != v else v for k, v in row.items()}))
    else:
        _print_rows(judged_rows(found), "judged")
        _print([{"": k, "value": v} for k, v in judged_summary(found).items()], f"{len(found)} structures")
    if any(found["problem"]):
        raise typer.Exit(1)


@app.command("filter")
def filter_(
    samples: Annotated[Path, typer.Argument(help="A folder that fmwc sample wrote, or its samples.safetensors.")],
    out: Out,
    keep: Annotated[float | None, typer.Option(help="Keep the surest share, in (0, 1].")] = None,
    budget: Annotated[int | None, typer.Option(help="Keep so many, the surest.")] = None,
    max_risk: Annotated[
        float | None, typer.Option(help="Keep as many as at most this share of failures can be promised for.")
    ] = None,
    promise: Annotated[
        Path | None, typer.Option(help="Keep by a promise.json that --max-risk wrote for samples of the same kind.")
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="Which samples failed: a CSV with a column bad or good, a text file of 1 (failed) and 0, one a line, "
            "or a column of the samples' table that is true of good ones (metastable). Those left empty are not "
            "labelled; label some at random."
        ),
    ] = "",
    probability: Annotated[float, typer.Option(help="How sure the promise of --max-risk is to be.")] = 0.9,
    score: Annotated[str, typer.Option(help="Keep by this score; the run's own if not given.")] = "",
    force: Force = False,
) -> None:
    """Keeps the surest samples: a share, a number, or as many as a failure rate can be promised for.

    Writes the kept samples, their rows of the table with their rank, and their structure files.
    """
    found = filter_samples(
        samples,
        out,
        keep=keep,
        budget=budget,
        max_risk=max_risk,
        promised=promise,
        labels=labels,
        probability=probability,
        score=score,
        force=force,
    )
    _print(found.rows(), "filter")
    Console().print(f"wrote {', '.join(map(str, found.written))}")


@app.command()
def reproduce(
    setting: Which,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Results folder, runs/SETTING; what is there is not made again.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; the setting's own if not given.")] = "",
    set_: Set = [],  # noqa: B006
    count: Count = 0,
    draws: Annotated[
        int, typer.Option(help="Stochastic trajectories the dispersion is held against; 0 is the setting's own number.")
    ] = 0,
    only: Annotated[
        str, typer.Option(help="mnist, crystals: do these tasks only (flow:0,read:joint), so that machines can share.")
    ] = "",
    data: Data = "",
    own: Own = False,
    judge: JudgedBy = "",
    device: Device = "auto",
) -> None:
    """Trains every method at every seed and writes the paper's tables beside ours. Stopped, it goes on where it was."""
    chosen = _setting(setting, judge)
    recipe = chosen.recipe("recommended", set_, data, own)
    if getattr(recipe, "own", False) and not judge:
        raise UsageError("data of your own needs a judge: fmwc train mnist --preset judge, then --judge FOLDER")
    try:
        numbers = [int(s) for s in (seeds or chosen.seeds).split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds takes whole numbers separated by commas, got '{seeds}'") from error
    folder = out or Path("runs") / setting
    where = pick_device(device)
    chosen.reproduce(
        recipe, folder, where, numbers, count=count or chosen.reproduced, draws=draws or chosen.draws, only=only
    )
    for path in [] if only else chosen.tables(folder):
        Console().print(f"wrote {path}")


@app.command()
def report(
    source: Annotated[str, typer.Argument(help="A checkpoint (shipped name or folder), or a results folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the page of a checkpoint.")] = None,
    count: Count = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 2026,
    judge: JudgedBy = "",
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Writes report.html for a checkpoint, or the tables of a results folder again from its cells."""
    if (Path(source) / "cells").is_dir():
        for path in SETTINGS[setting_of_results(Path(source))].tables(Path(source)):
            Console().print(f"wrote {path}")
        return
    where = pick_device(device)
    clock = Clock(where)
    field = fmwc.load(source, device=where)
    if out is None:
        raise UsageError("say where the page goes: --out FOLDER")
    chosen = _setting_of(source, judge)
    chosen.require_judge(field)
    _page(chosen, field, new_folder(out, force=force), seed, count, clock, source)
