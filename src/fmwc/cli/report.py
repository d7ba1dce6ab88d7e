"""The commands demo and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    say,
)
from fmwc.errors import UsageError

__all__ = ["demo", "report"]


@app.command()
def demo(
    domain: Which = "checkerboard",
    out: Out = Path("demo"),
    train: Annotated[
        bool, typer.Option("--train", help="checkerboard: train a small model first instead of loading weights.")
    ] = False,
    seed: Seed = 0,
    changes: Set = [],  # noqa: B006
    device: Device = "auto",
    count: Count = 0,
    force: Force = False,
) -> None:
    """Draw samples with confidence and write a report page.

    Uses the shipped weights. A second run with the same folder replaces the files of the first; other files stay.
    """
    options = locals()
    from fmwc.commands.report import write_demo

    found = write_demo(**options)
    print_rows(found.rows, f"{domain}, demonstration")
    say(f"{found.seconds:.0f} s; open {found.page}")


@app.command()
def report(
    checkpoint: Annotated[str, typer.Argument(help="A shipped name or a folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the page.")] = None,
    count: Count = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 2026,
    judge: JudgedBy = "",
    network: Network = "",
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Write the report page of a checkpoint.

    For a results folder of the paper's experiments, run python -m experiments report.
    """
    options = locals()
    from fmwc.checkpoint import about
    from fmwc.commands.report import write_report

    if out is None:
        about(checkpoint)  # a wrong name is reported first
        raise UsageError("no folder for the page; add --out FOLDER")
    found = write_report(**options)
    print_rows(found.rows, checkpoint)
    say(f"{found.seconds:.0f} s; open {found.page}")
