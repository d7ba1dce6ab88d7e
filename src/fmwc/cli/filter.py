"""The command filter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fmwc.cli.shared import Force, Out, Samples, app, print_rows, print_written

__all__ = ["filter_"]


@app.command("filter")
def filter_(
    samples: Samples,
    out: Out,
    keep: Annotated[float | None, typer.Option(help="Share of samples to keep, in (0, 1].")] = None,
    budget: Annotated[int | None, typer.Option(help="Number of samples to keep.")] = None,
    max_risk: Annotated[
        float | None,
        typer.Option(help="Keep as many samples as possible with a guaranteed failure rate of at most this value."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate",
            "--promise",
            help="Keep by a promise.json that --max-risk wrote for samples drawn and scored in the same way.",
        ),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="Which samples failed: a CSV file, matched by its column name if it has one, with a column bad or "
            "good (or the column given by --good or --bad); a text file with 1 (failed) or 0 per line; or a column "
            "of the samples' table. Samples may lack a label; choose those to label at random."
        ),
    ] = "",
    good: Annotated[str, typer.Option(help="Column of --labels that is true for good samples (metastable).")] = "",
    bad: Annotated[str, typer.Option(help="Column of --labels that is true for failed samples.")] = "",
    probability: Annotated[float, typer.Option(help="Probability with which the guarantee of --max-risk holds.")] = 0.9,
    score: Annotated[str, typer.Option(help="Score to rank by; default: the run's score.")] = "",
    force: Force = False,
) -> None:
    """Keep the samples with the highest confidence.

    Keeps a share, a number, or as many as a failure rate can be guaranteed for. Writes the kept samples, their rows of
    the table with their rank, and their structure files.
    """
    options = locals()
    from fmwc.commands.filter import filter_samples

    found = filter_samples(**options)
    print_rows(found.rows(), "filter")
    print_written(found.written)
