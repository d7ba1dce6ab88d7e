"""The command sample."""

from __future__ import annotations

from typing import Annotated

import typer

from fmwc.cli.shared import Device, Force, JudgedBy, Network, Out, Seed, app, print_written
from fmwc.errors import UsageError

__all__ = ["sample"]


@app.command()
def sample(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A shipped name (checkerboard, mnist, crystals, checkerboard-joint, mnist-joint) or a folder."
        ),
    ],
    out: Out,
    count: Annotated[int, typer.Option("-n", "--count", help="Number of samples.")] = 1000,
    label: Annotated[int | None, typer.Option(help="Class to draw; default: every class in turn.")] = None,
    judge: JudgedBy = "",
    network: Network = "",
    steps: Annotated[int, typer.Option(help="Integration steps.")] = 50,
    stepper: Annotated[str, typer.Option(help="euler, midpoint or heun.")] = "euler",
    propagation: Annotated[
        str,
        typer.Option(
            help="Estimator of the variance: linearised, diagonal, tangent, monte_carlo or none; default: the one "
            "that the checkpoint's confidence needs."
        ),
    ] = "",
    controller: Annotated[
        str,
        typer.Option(
            help="Step-size controller: uniform, ema or damped (the paper's), extrapolated; or fitted to the variance "
            "of a pilot run: grid (shared by all samples) or planned (per sample)."
        ),
    ] = "uniform",
    guide: Annotated[
        float, typer.Option(help="Strength of guidance towards low variance; 0.2 is strong. Several times slower.")
    ] = 0.0,
    guide_window: Annotated[str, typer.Option(help="Times at which guidance acts, as in 0.5-0.9.")] = "",
    every: Annotated[
        int,
        typer.Option(
            help="Compute the variance at every k-th step, for example for another score; default: the times that "
            "the checkpoint's confidence needs."
        ),
    ] = 0,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Compute the variance at a few steps only: those of the checkpoint's schedule, or those that a pilot "
            "run chooses.",
        ),
    ] = False,
    transport: Annotated[bool, typer.Option("--transport", help="Also compute the transported dispersion.")] = False,
    score: Annotated[
        str,
        typer.Option(help="Score to rank samples by; default: the checkpoint's, or dispersion with --transport."),
    ] = "",
    keep: Annotated[float, typer.Option(help="Share of samples to keep, most confident first.")] = 1.0,
    check: Annotated[
        int,
        typer.Option(
            help="Check finished samples with the flow itself, with at most this many network evaluations each; "
            "default: the check that the checkpoint's confidence needs."
        ),
    ] = 0,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the checks that the checkpoint's confidence needs.")
    ] = False,
    best_of: Annotated[int, typer.Option(help="Candidates per sample, of which the most confident is kept.")] = 1,
    budget: Annotated[
        int,
        typer.Option(help="Instead of --best-of: network evaluations per sample to spend on candidates."),
    ] = 0,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help="Compile the network first. This takes a minute or two and pays off for many samples.",
        ),
    ] = False,
    format: Annotated[str, typer.Option(help="crystals: cif (one file per structure) or extxyz (one file).")] = "",
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Draw samples, each with a confidence.

    Confidence is the position of a sample's score among the checkpoint's reference samples. It is withheld if samples
    are drawn differently from the reference, for example with another number of steps; the rank within the run remains.

    Writes samples.safetensors and samples.csv; for digits and crystals also a picture, most confident first. For
    crystals, also writes one CIF per structure (or one extended XYZ file) and adds the judge's results to the table.
    For crystals and networks of your own, the table is also written as Parquet.

    Resumes if interrupted: the same command draws only the missing samples. Runs of more than 50,000 samples are
    written batch by batch, with scores only, so that memory use stays constant.
    """
    options = locals()
    from fmwc.commands.sample import draw_samples

    if options.pop("no_check") and check:
        raise UsageError("--check and --no-check contradict each other; give only one")
    options["check"] = False if no_check else check or True
    print_written(draw_samples(**options))
