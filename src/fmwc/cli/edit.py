"""The commands edit and rewind."""

from __future__ import annotations

from typing import Annotated

import typer

from fmwc.cli.shared import Checkpoint, Device, Force, JudgedBy, NoiseSeed, Out, Samples, app, print_rows, print_written

__all__ = ["edit", "rewind"]


@app.command()
def edit(
    samples: Samples,
    out: Out,
    channel: Annotated[
        str, typer.Option(help="Channel to perturb (crystals: type, coord, lattice); default: all.")
    ] = "",
    at: Annotated[
        str,
        typer.Option(
            help="Time of the edit: critical (the peak of the variance), transported (the time that contributes most "
            "to the endpoint's variance; needs samples drawn with --transport), random, or a number in [0, 1)."
        ),
    ] = "critical",
    before: Annotated[float, typer.Option(help="Start this long before the critical time.")] = 0.0,
    scale: Annotated[
        float,
        typer.Option(help="Standard deviation of the noise, in the channel's unit (all channels: training units)."),
    ] = 0.2,
    replicates: Annotated[int, typer.Option(help="Edits per sample.")] = 1,
    label: Annotated[int | None, typer.Option(help="mnist: the class after the edit.")] = None,
    only: Annotated[str, typer.Option(help="Edit only these samples: numbers from 0, separated by commas.")] = "",
    surest: Annotated[int | None, typer.Option(help="Edit this many samples, most confident first.")] = None,
    doubtful: Annotated[int | None, typer.Option(help="Edit this many samples, least confident first.")] = None,
    checkpoint: Checkpoint = "",
    judge: JudgedBy = "",
    seed: NoiseSeed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Edit samples: add noise at a chosen time and integrate again.

    Writes the edited samples as fmwc sample does, edits.csv (what changed), and edits.png (before and after).
    """
    options = locals()
    from fmwc.commands.edit import edit_samples

    found = edit_samples(**options)
    print_rows(found.rows, "edit")
    print_written(found.written)


@app.command()
def rewind(
    samples: Samples,
    out: Out,
    extra: Annotated[int, typer.Option(help="Extra network evaluations per sample, averaged over all samples.")],
    share: Annotated[float, typer.Option(help="Share of samples to redraw per round, least confident first.")] = 0.1,
    before: Annotated[float, typer.Option(help="Go back to this long before the critical time.")] = 0.2,
    scale: Annotated[float, typer.Option(help="Standard deviation of the noise, in training units.")] = 0.2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over from new noise instead of going back: the baseline.")
    ] = False,
    checkpoint: Checkpoint = "",
    judge: JudgedBy = "",
    seed: NoiseSeed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Redraw the least confident samples from an earlier time.

    A sample is replaced if its new version is more confident. Writes the samples as fmwc sample does, and rewound.csv
    (the version that was kept, and the score before and after).
    """
    options = locals()
    from fmwc.commands.edit import rewind_samples

    found = rewind_samples(**options)
    print_rows(found.rows, "rewind")
    print_written(found.written)
