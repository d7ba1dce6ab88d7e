"""Verbs that use the confidence of samples that were drawn: filter, edit, rewind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fmwc.cli.shared import Checkpoint, Device, Force, JudgedBy, Out, Samples, app, print_rows, print_written

__all__ = ["edit", "filter_", "rewind"]


@app.command("filter")
def filter_(
    samples: Samples,
    out: Out,
    keep: Annotated[float | None, typer.Option(help="Share of samples to keep, in (0, 1].")] = None,
    budget: Annotated[int | None, typer.Option(help="Number of samples to keep.")] = None,
    max_risk: Annotated[
        float | None, typer.Option(help="Keep as many as possible with at most this share of failures guaranteed.")
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
    probability: Annotated[float, typer.Option(help="Probability with which the guarantee of --max-risk holds.")] = 0.9,
    score: Annotated[str, typer.Option(help="Rank by this score; default: the run's score.")] = "",
    force: Force = False,
) -> None:
    """Keep the samples with the highest confidence.

    Keeps a share, a number, or as many as a failure rate can be guaranteed for. Writes the kept samples, their rows of
    the table with their rank, and their structure files.
    """
    from fmwc.settings.filtering import filter_samples

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
        str, typer.Option(help="Channel that gets the noise (crystals: type, coord, lattice); default: all.")
    ] = "",
    at: Annotated[
        str,
        typer.Option(
            help="When: critical (where the variance peaks), transported (where the endpoint's variance is made; needs "
            "samples drawn with --transport), random, or a time in [0, 1)."
        ),
    ] = "critical",
    before: Annotated[float, typer.Option(help="Start this long before the critical time.")] = 0.0,
    scale: Annotated[
        float,
        typer.Option(help="Standard deviation of the noise, in the channel's unit (of all: training units)."),
    ] = 0.2,
    replicates: Annotated[int, typer.Option(help="Edits per sample.")] = 1,
    label: Annotated[int | None, typer.Option(help="mnist: the class after the edit.")] = None,
    only: Annotated[str, typer.Option(help="Edit these samples only: numbers from 0, separated by commas.")] = "",
    surest: Annotated[int | None, typer.Option(help="Edit this many, most confident first.")] = None,
    doubtful: Annotated[int | None, typer.Option(help="Edit this many, most doubtful first.")] = None,
    checkpoint: Checkpoint = "",
    judge: JudgedBy = "",
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Edit samples: add noise at a chosen time and integrate again.

    Writes the edited samples as fmwc sample does, edits.csv (what changed), and edits.png (before and after).
    """
    from fmwc.recipes.recipe import pick_device
    from fmwc.settings.editing import edit_samples

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
    extra: Annotated[int, typer.Option(help="Extra network evaluations per sample, averaged over all samples.")],
    share: Annotated[float, typer.Option(help="Share of samples that a round redraws, most doubtful first.")] = 0.1,
    before: Annotated[float, typer.Option(help="Go back to this long before the critical time.")] = 0.2,
    scale: Annotated[float, typer.Option(help="Standard deviation of the noise, in training units.")] = 0.2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over from new noise instead of going back: the baseline.")
    ] = False,
    checkpoint: Checkpoint = "",
    judge: JudgedBy = "",
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Redraw the most doubtful samples from an earlier time.

    A sample is replaced if its new version is more confident. Writes the samples as fmwc sample does, and rewound.csv
    (the version that was kept, and the score before and after).
    """
    from fmwc.recipes.recipe import pick_device
    from fmwc.settings.rewinding import rewind_samples

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
