"""The verb that checks finished samples."""

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
            "images with one subfolder for each class, or CIF files."
        ),
    ],
    out: Out,
    checkpoint: Annotated[
        str, typer.Option(help="What checks them: a shipped name or a folder; default: what drew them, if they say so.")
    ] = "",
    network: Network = "",
    evaluations: Annotated[
        int,
        typer.Option(
            help="Evaluations of the network per sample, at most; default: those of the checkpoint's reference, or 20."
        ),
    ] = 0,
    evidence: Annotated[
        str,
        typer.Option(
            help="contest (the condition asked for against the others), echo, or nearest (training points that the "
            "checkpoint holds); default: that of the checkpoint's reference, or contest where there are classes."
        ),
    ] = "",
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Check finished samples from anywhere by the flow itself.

    Writes checks.csv (what was asked for, score, rank, and for a contest the rival and the margin), checks.json, and a
    page, checks.html. For images, also checks.png with the most doubtful.

    Confidence in checks.csv is the place of the check's score alone among the checkpoint's reference samples. The
    confidence of fmwc sample may also use the trajectory (its spread), which finished samples do not have, so the two
    numbers can differ for the same sample.
    """
    from fmwc.recipes.recipe import pick_device
    from fmwc.settings.checking import check_samples

    found = check_samples(
        samples,
        out,
        device=pick_device(device),
        checkpoint=checkpoint,
        network=network,
        evaluations=evaluations,
        evidence=evidence,
        seed=seed,
        force=force,
    )
    print_rows(found.rows, "check")
    print_written(found.written)
