"""Verbs that make something to look at: demo, report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
)
from fmwc.errors import UsageError
from fmwc.files import new_folder, write_json, write_text
from fmwc.recipes.comparing import setting_of_results
from fmwc.recipes.recipe import Clock, pick_device, provenance
from fmwc.recipes.uses.study import NUMBERS
from fmwc.report.uses import write_study
from fmwc.settings import Setting, open_checkpoint, setting_named

__all__ = ["demo", "report"]

DEMO_MARK = ".fmwc-demo"


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
    chosen, where = setting_named(setting), pick_device(device)
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
    """Writes report.html for a checkpoint, or the tables of a results folder again from its cells.

    Of a folder that fmwc study filled, tables, figures and page again from its files.
    """
    if (Path(source) / NUMBERS).is_file():
        print_written(write_study(Path(source)).written)
        return
    if (Path(source) / "cells").is_dir():
        for path in setting_named(setting_of_results(Path(source))).tables(Path(source)):
            Console().print(f"wrote {path}")
        return
    where = pick_device(device)
    clock = Clock(where)
    chosen, field = open_checkpoint(source, where, judge, network)
    if out is None:
        raise UsageError("say where the page goes: --out FOLDER")
    chosen.require_judge(field)
    _page(chosen, field, new_folder(out, force=force), seed, count, clock, source)


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
    print_rows(rows, title)
    Console().print(f"{clock.seconds:.0f} s; open {page}")
