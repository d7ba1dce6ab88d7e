"""Verbs that make something to look at: demo, report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fmwc
from fmwc.bars import sampling_bar, training_bar
from fmwc.cli.shared import (
    Count,
    Device,
    Force,
    JudgedBy,
    Network,
    Out,
    Seed,
    Set,
    Which,
    app,
    print_rows,
    print_written,
    say,
)
from fmwc.errors import UsageError
from fmwc.files import claimed, write_json

if TYPE_CHECKING:
    from fmwc.recipes.recipe import Clock
    from fmwc.sampling import Trajectory
    from fmwc.settings import Setting

__all__ = ["demo", "report"]


@app.command()
def demo(
    setting: Which = "checkerboard",
    out: Out = Path("demo"),
    train: Annotated[
        bool, typer.Option("--train", help="Train the Checkerboard's model first, for minutes, instead of loading it.")
    ] = False,
    seed: Seed = 0,
    set_: Set = [],  # noqa: B006
    device: Device = "auto",
    count: Count = 0,
    force: Force = False,
) -> None:
    """Draw samples with confidence and write a report page.

    Uses the shipped weights. Called again with the same folder, it replaces the files that it wrote; other files stay.
    """
    from fmwc.modes import one_thread
    from fmwc.recipes.recipe import Clock, pick_device
    from fmwc.settings import setting_named

    chosen, where = setting_named(setting), pick_device(device)
    if count < 0:
        raise UsageError(f"-n is at least 1, or 0 for the setting's own number; got {count}")
    if set_ and not train:
        raise UsageError("--set changes the training, and the demonstration shows shipped weights; add --train")
    recipe = chosen.demo_recipe([f"seed={seed}", *set_]) if train else None  # raises before anything is written
    with claimed(out, "demo", force=force, again=True) as folder:
        clock = Clock(where)
        if recipe is not None:
            with training_bar() as bar:
                chosen.fit(recipe, folder.path / "model", where, bar, force=True)
        field = fmwc.load(setting if recipe is None else folder.path / "model", device=where)
        with one_thread() if chosen.one_thread else nullcontext():
            _page(chosen, field, folder.path, seed, count, clock, f"{setting}, demonstration", chosen.glance)


@app.command()
def report(
    source: Annotated[str, typer.Argument(help="A checkpoint (shipped name or folder), or a results folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the page of a checkpoint.")] = None,
    count: Count = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 2026,
    judge: JudgedBy = "",
    network: Network = "",
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Write the report page of a checkpoint or a results folder.

    For a results folder of fmwc reproduce or fmwc study, writes its tables, figures and pages again from its files.
    """
    from fmwc.recipes.comparing import setting_of_results
    from fmwc.recipes.recipe import Clock, pick_device
    from fmwc.recipes.uses.study import NUMBERS
    from fmwc.report.uses import write_study
    from fmwc.settings import open_checkpoint, setting_named

    if (Path(source) / NUMBERS).is_file():
        print_written(write_study(Path(source)).written)
        return
    if (Path(source) / "cells").is_dir():
        for path in setting_named(setting_of_results(Path(source))).tables(Path(source)):
            say(f"wrote {path}")
        return
    if count < 0:
        raise UsageError(f"-n is at least 1, or 0 for the setting's own number; got {count}")
    where = pick_device(device)
    clock = Clock(where)
    chosen, field = open_checkpoint(source, where, judge, network)
    if out is None:
        raise UsageError("say where the page goes: --out FOLDER")
    chosen.require_judge(field)
    with claimed(out, "report", force=force) as folder:
        _page(chosen, field, folder.path, seed, count, clock, source, chosen.shown)


def _page(
    chosen: Setting,
    field: fmwc.Field,
    out: Path,
    seed: int,
    count: int,
    clock: Clock,
    title: str,
    draw: Callable[..., Trajectory],
) -> None:
    """Draw samples, print the short table and write samples, numbers and report."""
    from fmwc.recipes.recipe import provenance
    from fmwc.report.run import made_from

    count = count or chosen.count(field.device)
    with sampling_bar("drawing samples with confidence", count) as bar:
        run = draw(field, count, seed, bar)
    rows = [*chosen.numbers(run, chosen.judge(run)), {"": "in this checkpoint", "value": made_from(field.reference)}]
    about = {k: str(v) for k, v in provenance(field.device, clock.seconds, seed=seed).items()}
    chosen.write_samples(run, out)
    write_json(out / "numbers.json", {"numbers": rows, "provenance": about})
    page = chosen.page(field, run, out, rows, about)
    print_rows(rows, title)
    say(f"{clock.seconds:.0f} s; open {page}")
