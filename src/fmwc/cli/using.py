"""Verbs that use the confidence of samples that were drawn: filter, edit, rewind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fmwc.cli.shared import Checkpoint, Device, Force, JudgedBy, Out, Samples, app, print_rows, print_written
from fmwc.recipes.recipe import pick_device
from fmwc.settings.editing import edit_samples
from fmwc.settings.filtering import filter_samples
from fmwc.settings.rewinding import rewind_samples

__all__ = ["edit", "filter_", "rewind"]


@app.command("filter")
def filter_(
    samples: Samples,
    out: Out,
    keep: Annotated[float | None, typer.Option(help="Keep the surest share, in (0, 1].")] = None,
    budget: Annotated[int | None, typer.Option(help="Keep so many, the surest.")] = None,
    max_risk: Annotated[
        float | None, typer.Option(help="Keep as many as at most this share of failures can be promised for.")
    ] = None,
    promise: Annotated[
        Path | None,
        typer.Option(help="Keep by a promise.json that --max-risk wrote for samples drawn and scored in the same way."),
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="Which samples failed: a CSV file, matched by its column name where it has one, with a column bad or "
            "good (or the column that --good or --bad names); a text file with 1 (failed) or 0 per line; or a column "
            "of the samples' table. Samples without a label are allowed; label some at random."
        ),
    ] = "",
    good: Annotated[str, typer.Option(help="The column of --labels that is true of good samples (metastable).")] = "",
    bad: Annotated[str, typer.Option(help="The column of --labels that is true of failed samples.")] = "",
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
        good=good,
        bad=bad,
        probability=probability,
        score=score,
        force=force,
    )
    print_rows(found.rows(), "filter")
    print_written(found.written)


@app.command()
def edit(
    samples: Samples,
    out: Out,
    channel: Annotated[
        str, typer.Option(help="Which channel gets the noise (crystals: type, coord, lattice); all if not given.")
    ] = "",
    at: Annotated[
        str,
        typer.Option(
            help="When: critical (the variance's peak, of that channel), transported (what moves the end most; samples "
            "drawn with --transport), random, or a time in [0, 1)."
        ),
    ] = "critical",
    before: Annotated[float, typer.Option(help="So long before a critical time.")] = 0.0,
    scale: Annotated[
        float, typer.Option(help="Standard deviation of the noise, in the channel's unit (of all: in training units).")
    ] = 0.2,
    replicates: Annotated[int, typer.Option(help="Edits of each sample.")] = 1,
    label: Annotated[int | None, typer.Option(help="mnist: the class from the edit on.")] = None,
    only: Annotated[str, typer.Option(help="Edit these samples: numbers from 0, separated by commas.")] = "",
    surest: Annotated[int | None, typer.Option(help="Edit so many, the surest first.")] = None,
    doubtful: Annotated[int | None, typer.Option(help="Edit so many, the most doubtful first.")] = None,
    checkpoint: Checkpoint = "",
    judge: JudgedBy = "",
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Edits samples: noise in a channel where their way is undecided, and on from there with all channels free.

    Writes the edited samples as fmwc sample does, edits.csv (what changed), and edits.png (before and after).
    """
    found = edit_samples(
        samples,
        out,
        device=pick_device(device),
        channel=channel,
        at=at,
        before=before,
        scale=scale,
        replicates=replicates,
        label=label,
        only=only,
        surest=surest,
        doubtful=doubtful,
        checkpoint=checkpoint,
        judge=judge,
        seed=seed,
        force=force,
    )
    print_rows(found.rows, "edit")
    print_written(found.written)


@app.command()
def rewind(
    samples: Samples,
    out: Out,
    extra: Annotated[int, typer.Option(help="Evaluations of the network to spend, a sample, over all samples.")],
    share: Annotated[
        float, typer.Option(help="The share of samples, the most doubtful, that a round takes back.")
    ] = 0.1,
    before: Annotated[float, typer.Option(help="So long before the critical time.")] = 0.2,
    scale: Annotated[float, typer.Option(help="Standard deviation of the noise, in training units.")] = 0.2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over from new noise in place of going back: the baseline.")
    ] = False,
    checkpoint: Checkpoint = "",
    judge: JudgedBy = "",
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Takes the most doubtful samples back to before they were undecided, and keeps what is surer.

    Writes the samples as fmwc sample does, and rewound.csv (which branch each is, its score before and after).
    """
    found = rewind_samples(
        samples,
        out,
        extra=extra,
        device=pick_device(device),
        share=share,
        before=before,
        scale=scale,
        fresh=fresh,
        checkpoint=checkpoint,
        judge=judge,
        seed=seed,
        force=force,
    )
    print_rows(found.rows, "rewind")
    print_written(found.written)
