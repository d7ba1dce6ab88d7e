"""The verb that draws samples."""

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
            help="A shipped name (checkerboard, mnist, crystals; checkerboard-joint, mnist-joint) or a folder."
        ),
    ],
    out: Out,
    count: Annotated[int, typer.Option("-n", "--count", help="Number of samples.")] = 1000,
    label: Annotated[int | None, typer.Option(help="The class to draw; default: every class in turn.")] = None,
    judge: JudgedBy = "",
    network: Network = "",
    steps: Annotated[int, typer.Option(help="Integration steps.")] = 50,
    stepper: Annotated[str, typer.Option(help="euler, midpoint or heun.")] = "euler",
    propagation: Annotated[
        str,
        typer.Option(
            help="Estimator of the variance: linearised, diagonal, tangent, monte_carlo or none; default: what the "
            "checkpoint's confidence takes."
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
            help="Compute the variance at every k-th step, for example to use another score; default: as the "
            "checkpoint's confidence takes it."
        ),
    ] = 0,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Compute the variance at a few steps only: those of the checkpoint's schedule, or chosen by a pilot "
            "run.",
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
            help="Check finished samples by the flow itself, with at most this many evaluations each; default: as the "
            "checkpoint's confidence needs."
        ),
    ] = 0,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Leave out the checks that the checkpoint's confidence needs.")
    ] = False,
    best_of: Annotated[int, typer.Option(help="Draw this many candidates per sample and keep the surest.")] = 1,
    budget: Annotated[
        int,
        typer.Option(help="In place of --best-of: evaluations per sample, for as many candidates as they allow."),
    ] = 0,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled",
            help="Compile the network first, which takes a minute or two; pays for many samples.",
        ),
    ] = False,
    format: Annotated[str, typer.Option(help="crystals: cif (one file per structure) or extxyz (one file).")] = "",
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Draw samples, each with a confidence.

    Confidence is a sample's place among the checkpoint's reference. It is withheld where samples are drawn otherwise
    than that was, for example with other steps; their rank within the run is there in any case.

    Writes samples.safetensors and samples.csv; for digits and crystals also a picture, most confident first. For
    crystals, also writes one CIF per structure (or one extended XYZ file) and adds the judge's results to the table, as
    CSV and Parquet. For a network of your own, writes the table in both formats.

    Resumes if interrupted: the same command draws only what is missing. Runs of more than 50,000 samples are written
    batch by batch with scores only, so that memory does not grow.
    """
    from fmwc.recipes.recipe import pick_device
    from fmwc.settings.drawing import draw_samples

    if check and no_check:
        raise UsageError("--check and --no-check contradict each other; give one")
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
            check=False if no_check else check or True,
            best_of=best_of,
            budget=budget,
            compiled=compiled,
            format=format,
            seed=seed,
            force=force,
        )
    )
