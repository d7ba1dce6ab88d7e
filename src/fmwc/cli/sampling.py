"""The verb that draws samples."""

from __future__ import annotations

from typing import Annotated

import typer

from fmwc.cli.shared import Device, Force, JudgedBy, Network, Out, Seed, app, print_written
from fmwc.recipes.recipe import pick_device
from fmwc.settings.drawing import draw_samples

__all__ = ["sample"]


@app.command()
def sample(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A shipped name (checkerboard, mnist, crystals; checkerboard-joint, mnist-joint) or a folder."
        ),
    ],
    out: Out,
    count: Annotated[int, typer.Option("-n", "--count", help="How many samples.")] = 1000,
    label: Annotated[int | None, typer.Option(help="The class to draw; every class in turn if not given.")] = None,
    judge: JudgedBy = "",
    network: Network = "",
    steps: Annotated[int, typer.Option(help="Steps of the integrator.")] = 50,
    stepper: Annotated[str, typer.Option(help="euler, midpoint or heun.")] = "euler",
    propagation: Annotated[
        str, typer.Option(help="linearised, diagonal, tangent, monte_carlo or none.")
    ] = "linearised",
    controller: Annotated[
        str,
        typer.Option(
            help="What picks the steps: uniform, ema or damped (the paper's), extrapolated, or, fitted to the variance "
            "of a pilot run, grid (shared) or planned (each sample's own)."
        ),
    ] = "uniform",
    guide: Annotated[
        float, typer.Option(help="Steer away from doubt, so strongly: 0.2 is much. Several times as slow.")
    ] = 0.0,
    guide_window: Annotated[str, typer.Option(help="Steer only then, as in 0.5-0.9.")] = "",
    every: Annotated[
        int,
        typer.Option(
            help="Read the variance at every k-th step, for other scores than the checkpoint's own and for its way; if "
            "not given, at the few steps that the checkpoint has chosen for the score, where it has."
        ),
    ] = 0,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Read the variance at the few steps that tell most of the score also where the checkpoint has chosen "
            "none: a pilot run finds them.",
        ),
    ] = False,
    transport: Annotated[bool, typer.Option("--transport", help="Add the transported dispersion.")] = False,
    score: Annotated[
        str, typer.Option(help="What confidence is made from; the checkpoint's own, or dispersion with --transport.")
    ] = "",
    keep: Annotated[float, typer.Option(help="Keep the surest share.")] = 1.0,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help="Compile the network and its readings first, for a minute or two: for many samples.",
        ),
    ] = False,
    format: Annotated[str, typer.Option(help="crystals: cif (a file each) or extxyz (one file).")] = "",
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Draws samples with their confidence: samples.safetensors, samples.csv, and a picture, surest first.

    Resumes if interrupted: the same command draws only what is missing. Very many samples are written as they come,
    with their scores alone, in memory that does not grow.

    Of crystals also a CIF each (or extended XYZ), and what the judge says of them in the table, as CSV and Parquet. Of
    a network of your own no picture, and the table as both.
    """
    print_written(
        draw_samples(
            checkpoint,
            out,
            device=pick_device(device),
            count=count,
            label=label,
            judge=judge,
            network=network,
            steps=steps,
            stepper=stepper,
            propagation=propagation,
            controller=controller,
            guide=guide,
            guide_window=guide_window,
            every=every,
            adaptive=adaptive,
            transport=transport,
            score=score,
            keep=keep,
            compiled=compiled,
            format=format,
            seed=seed,
            force=force,
        )
    )
