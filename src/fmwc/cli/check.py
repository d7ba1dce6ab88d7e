"""The command check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fmwc.cli.shared import Device, Force, Network, Out, Seed, app, print_rows, print_written

__all__ = ["check"]


@app.command()
def check(
    samples: Annotated[
        Path,
        typer.Argument(
            help="A folder that fmwc sample wrote, an array file (.npz with x and conditions by name), a folder of "
            "images with one subfolder per class, or CIF files."
        ),
    ],
    out: Out,
    checkpoint: Annotated[
        str,
        typer.Option(help="Checkpoint that checks the samples, by shipped name or folder; default: the one recorded."),
    ] = "",
    network: Network = "",
    evaluations: Annotated[
        int,
        typer.Option(
            help="Maximum number of network evaluations per sample; default: that of the checkpoint's reference, or 20."
        ),
    ] = 0,
    evidence: Annotated[
        str,
        typer.Option(
            help="contest (the requested condition against the others), echo, or nearest (training points stored in "
            "the checkpoint); default: that of the checkpoint's reference, or contest if there are classes."
        ),
    ] = "",
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Check finished samples from any source with a flow model.

    Writes checks.csv (condition, score, rank, and for a contest the rival and the margin), checks.json, and a page,
    checks.html. For images, also writes checks.png with the most doubtful ones.

    The confidence in checks.csv places the score of the check alone among the checkpoint's reference samples. The
    confidence of fmwc sample may also use the trajectory (its spread), which finished samples do not have, so the two
    numbers can differ for the same sample.
    """
    options = locals()
    from fmwc.commands.check import check_samples

    found = check_samples(**options)
    print_rows(found.rows, "check")
    print_written(found.written)
