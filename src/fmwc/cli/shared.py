"""The app, options that several commands share, and printing.

No module of this package imports torch at its top, so that `fmwc --help` stays fast. Commands import what they call
when they run. They pass their options on by name: those of a command are parameters of the function it calls.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

import fmwc
from fmwc.domains import DOMAINS
from fmwc.errors import UsageError
from fmwc.readers import shown

__all__ = [
    "Checkpoint",
    "Count",
    "Data",
    "Device",
    "Force",
    "JudgedBy",
    "Network",
    "NoiseSeed",
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
    "say",
]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _built_from() -> str:
    """Return the commit that was recorded when the package was built; empty in a source tree."""
    try:
        return str(import_module("fmwc._commit").COMMIT)
    except (ImportError, AttributeError):
        return ""


def _version(asked: bool) -> None:
    if asked:
        say(f"fmwc {fmwc.__version__}" + (f" ({commit})" if (commit := _built_from()) else ""))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error (or FMWC_DEBUG=1). Allowed after any verb.")
    ] = False,  # handled in fmwc.__main__
) -> None:
    """Flow matching with confidence: draw samples and estimate how far to trust each of them."""


Which = Annotated[str, typer.Argument(help=f"{', '.join(DOMAINS)}.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")]
Set = Annotated[list[str], typer.Option("--set", help="Change a recipe field: --set key=value. May be repeated.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(min=-(1 << 63), max=(1 << 63) - 1, help="Seed of the run.")]
NoiseSeed = Annotated[int, typer.Option(help="Seed of the noise.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]
Count = Annotated[int, typer.Option("-n", "--count", help="Number of samples; 0: the domain's default.")]
Data = Annotated[str, typer.Option(help="Folder of the data; default: FMWC_DATA, or the cache (downloaded if needed).")]
JudgedBy = Annotated[
    str,
    typer.Option("--judge", help="mnist: folder of a judge for your data. crystals: energy model, by default chgnet."),
]
Network = Annotated[
    str,
    typer.Option(
        help="For a checkpoint of fmwc retrofit: module:function that builds its network. Name only trusted code."
    ),
]
Own = Annotated[bool, typer.Option("--own", help="The data is your own: idx files, .npz, or a folder of images.")]
Samples = Annotated[Path, typer.Argument(help="A folder that fmwc sample wrote, or its samples.safetensors.")]
Checkpoint = Annotated[
    str,
    typer.Option(help="Checkpoint of the samples, by shipped name or folder; default: the one recorded."),
]


def numbers_of(text: str) -> list[int]:
    """Return the seeds of a comma-separated list."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds must be whole numbers separated by commas; got '{text}'") from error


# ---- printing ----------------------------------------------------------------------------------------------------


def say(text: str, *, err: bool = False) -> None:
    """Print text without markup or wrapping, control characters as question marks."""
    print("\n".join(shown(line) for line in text.splitlines()), file=sys.stderr if err else sys.stdout, flush=True)


def print_rows(rows: list[dict[str, str]], title: str) -> None:
    """Print a table of names and values."""
    _print_table([list(row.values()) for row in rows], [], title)


def print_table(rows: list[dict[str, str]], title: str) -> None:
    """Print a table with the names of its columns."""
    _print_table([list(row.values()) for row in rows], list(rows[0]) if rows else [], title)


def _print_table(rows: list[list[str]], header: list[str], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def plain(value: str) -> Text:  # rich looks for markup, emoji and numbers in str, not in Text
        return Text(shown(value))

    table = Table(title=plain(title), show_header=bool(header))
    for name in header:
        table.add_column(plain(name))
    for row in rows:
        table.add_row(*map(plain, row))
    Console(markup=False, emoji=False, highlight=False).print(table)


def print_written(paths: list[Path]) -> None:
    """Print the files that were written."""
    if paths:
        say(f"wrote {', '.join(map(shown, paths))}")
