"""The verb that draws samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from fmwc.bars import sampling_bar
from fmwc.checkpoint import identity
from fmwc.cli.shared import Device, Force, JudgedBy, Network, Out, Seed, app, print_written
from fmwc.errors import UsageError, pick
from fmwc.files import new_folder
from fmwc.recipes.recipe import pick_device
from fmwc.sampling import SCORES, Compiled
from fmwc.sampling.scores import parsed
from fmwc.sampling.trajectory import DISPERSION
from fmwc.settings import open_checkpoint
from fmwc.settings.setting import say_on_stderr
from fmwc.settings.way import Way, window_of

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

    Very many are written as they come, with their scores alone, in memory that does not grow.

    Of crystals also a CIF each (or extended XYZ), and what the judge says of them in the table, as CSV and Parquet. Of
    a network of your own no picture, and the table as both.
    """
    if guide_window and not guide:
        raise UsageError("--guide-window says when to steer; add --guide and how strongly")
    window = window_of(guide_window) if guide_window else (0.0, 1.0)
    way = Way(checkpoint, stepper, propagation, controller, guide, window)
    way.check(every, transport, adaptive)
    if not 0 < keep <= 1:
        raise UsageError(f"--keep lies in (0, 1], got {keep}")
    if keep < 1 and propagation == "none" and not transport:
        raise UsageError("--keep needs a confidence to go by; leave out --propagation none")
    channel, named, _ = parsed(score)  # type/integrated@0.6-0.9: of a channel, in a window
    if score:
        pick(dict.fromkeys([*SCORES, DISPERSION]), named, "score")
    if adaptive and score:
        raise UsageError("--adaptive reads what the checkpoint's own score takes; leave out --score, or say --every 1")
    if named == DISPERSION and not transport:
        raise UsageError("--score dispersion is read from transported variance; add --transport")
    if count < 1 or steps < 1 or every < 0:
        raise UsageError(
            f"-n and --steps are at least 1, and --every is not negative: got {count}, {steps} and {every}"
        )
    field: Any
    chosen, field = open_checkpoint(checkpoint, pick_device(device), judge, network)
    if compiled:
        field = Compiled(field, say=say_on_stderr)
    chosen.conditions(field, 1, label)  # a class that does not exist is said before a folder is made
    chosen.check_format(format)
    if channel is not None and field.space is not None:
        pick(field.space.channels, channel, "channel")
    if judge or chosen.judges:
        chosen.require_judge(field)
    new_folder(out, force=force)
    profile, confidence = None, way.confidence(chosen.estimator(field))
    suited = way.suits(field, steps, confidence)
    way = replace(
        way,
        few=adaptive or (suited and not (every or score or transport)),
        identity=identity(checkpoint),
        steps=steps,
        label=label,
        transport=transport,
        selected=f"surest {keep:g}" if keep < 1 else "",
    )
    schedule: str | int | tuple[float, ...] = (
        "adaptive" if way.few else every or (1 if way.kind.reads else chosen.every)
    )
    if way.kind.piloted or (adaptive and not suited):
        with sampling_bar("a pilot run, for where the variance is", chosen.pilot(field.device)) as bar:
            if way.kind.piloted:
                profile = chosen.survey(field, seed, bar, label)
            else:
                how = {"steps": steps, "stepper": stepper, "confidence": confidence}
                # Its times alone: a pilot is too small to be a reference, so confidence is among the samples drawn.
                schedule = chosen.fit_schedule(field, seed, bar, label, **how).times
        way = replace(way, pilot=seed)
    way = replace(way, read_at=field.schedule.times if isinstance(schedule, str) else schedule)
    options = {
        **way.times(steps, profile),
        "stepper": stepper,
        "decoder": way.decoder(field),
        "schedule": schedule,
        "confidence": confidence,
    }
    together = transport or score or keep < 1
    if not together and chosen.streams(field, count, label, **options):
        with sampling_bar("drawing samples", count) as bar:
            parts = chosen.stream(field, count, seed, bar, label, **options)
            print_written(chosen.write_stream((replace(p, made=way.record()) for p in parts), count, out))
        return
    with sampling_bar("drawing samples", count) as bar:
        run = chosen.draw(field, count, seed, bar, label, **options, transport=transport, keep=chosen.keep(out))
    run = replace(run, made=way.record())
    if asked := score or (chosen.transported if transport else ""):
        run = run.ranked_by(asked)
    elif label is None and len(run.times) and getattr(field.reference, "standard", None) and run.standard is None:
        typer.echo("too few samples of each class for this setting: ranked across classes", err=True)
    written = chosen.write_samples(run.surest(keep) if keep < 1 else run, out, format)
    print_written(written)
