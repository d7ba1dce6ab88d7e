"""What the verbs share: the app, options that mean the same everywhere, and how rows are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fmwc.errors import UsageError
from fmwc.settings import SETTINGS

__all__ = [
    "Checkpoint",
    "Count",
    "Data",
    "Device",
    "Force",
    "JudgedBy",
    "Network",
    "Out",
    "Own",
    "Samples",
    "Seed",
    "Set",
    "Which",
    "app",
    "numbers_of",
    "print_rows",
    "print_table",
    "print_written",
]

app = typer.Typer(
    help="Flow matching with confidence: samples that say how far to trust them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

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
Network = Annotated[
    str,
    typer.Option(
        help="Of a field from fmwc retrofit: module:function, which builds its network. Name only code that you trust."
    ),
]
Own = Annotated[bool, typer.Option("--own", help="The data is of your own: idx files, .npz, or a folder of images.")]
Samples = Annotated[Path, typer.Argument(help="A folder that fmwc sample wrote, or its samples.safetensors.")]
Checkpoint = Annotated[
    str, typer.Option(help="What drew the samples, a shipped name or a folder; as their file says if not given.")
]


def numbers_of(text: str) -> list[int]:
    """Seeds, as a user gives them."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds takes whole numbers separated by commas, got '{text}'") from error


def print_rows(rows: list[dict[str, str]], title: str) -> None:
    """Rows of a name and a value."""
    table = Table(title=title, show_header=False)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def print_table(rows: list[dict[str, str]], title: str) -> None:
    """Rows below the names of their columns."""
    table = Table(*(rows[0] if rows else ()), title=title)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def print_written(paths: list[Path]) -> None:
    Console().print(f"wrote {', '.join(map(str, paths))}")
