"""What the verbs share: the app, options that mean the same everywhere, and printing.

Nothing here, nor at the top of a module of verbs, imports torch: `fmwc --help` must not wait for it. Verbs import what
they call when they are called.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

import fmwc
from fmwc.errors import UsageError
from fmwc.readers import shown

__all__ = [
    "SETTINGS",
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
    "say",
]

SETTINGS = ("checkerboard", "mnist", "crystals")  # the keys of fmwc.settings.SETTINGS, whose import takes seconds

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _built_from() -> str:
    """The commit that was written into the package when it was built; empty in a source tree."""
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
    ] = False,  # read by fmwc.__main__, which prints errors
) -> None:
    """Flow matching with confidence: samples that say how far to trust them."""


Which = Annotated[str, typer.Argument(help=f"Which setting: {' or '.join(SETTINGS)}.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")]
Set = Annotated[list[str], typer.Option("--set", help="Change a recipe field: --set key=value. May be repeated.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(min=-(1 << 63), max=(1 << 63) - 1, help="Seed of the run.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")]
Count = Annotated[int, typer.Option("-n", "--count", help="Number of samples; 0: the setting's default.")]
Data = Annotated[str, typer.Option(help="Where the data is; default: FMWC_DATA, or the cache (downloaded if needed).")]
JudgedBy = Annotated[
    str,
    typer.Option("--judge", help="mnist: a judge trained on your data. crystals: an energy model; default: chgnet."),
]
Network = Annotated[
    str,
    typer.Option(
        help="For a field from fmwc retrofit: module:function that builds its network. Name only code that you trust."
    ),
]
Own = Annotated[bool, typer.Option("--own", help="--data is your own: idx files, .npz, or a folder of images.")]
Samples = Annotated[Path, typer.Argument(help="A folder that fmwc sample wrote, or its samples.safetensors.")]
Checkpoint = Annotated[
    str, typer.Option(help="What drew the samples: a shipped name or a folder; default: as recorded in their file.")
]


def numbers_of(text: str) -> list[int]:
    """Seeds, as a user gives them."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--seeds takes whole numbers separated by commas, got '{text}'") from error


# ---- printing ----------------------------------------------------------------------------------------------------


def say(text: str, *, err: bool = False) -> None:
    """Print text as it is: no markup, no wrapping; control characters (of file names, of titles) as question marks."""
    print("\n".join(shown(line) for line in text.splitlines()), file=sys.stderr if err else sys.stdout, flush=True)


def print_rows(rows: list[dict[str, str]], title: str) -> None:
    """Print rows of a name and a value."""
    _print_table([list(row.values()) for row in rows], [], title)


def print_table(rows: list[dict[str, str]], title: str) -> None:
    """Print rows below the names of their columns."""
    _print_table([list(row.values()) for row in rows], list(rows[0]) if rows else [], title)


def _print_table(rows: list[list[str]], header: list[str], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def plain(value: str) -> Text:  # a Text is not searched for markup, emoji or numbers to colour
        return Text(shown(value))

    table = Table(title=plain(title), show_header=bool(header))
    for name in header:
        table.add_column(plain(name))
    for row in rows:
        table.add_row(*map(plain, row))
    Console(markup=False, emoji=False, highlight=False).print(table)


def print_written(paths: list[Path]) -> None:
    if paths:
        say(f"wrote {', '.join(map(shown, paths))}")
