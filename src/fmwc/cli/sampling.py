"""The verb that draws samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from fmwc.bars import sampling_bar
from fmwc.cli.shared import Device, Force, JudgedBy, Network, Out, Seed, app, print_written, say
from fmwc.errors import UsageError, pick
from fmwc.files import new_folder

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
        str, typer.Option(help="linearised, diagonal, tangent, monte_carlo or none.")
    ] = "linearised",
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
            help="Compute the variance at every k-th step, for example to use another score; default: at the few steps "
            "that the checkpoint's schedule names, if it has one."
        ),
    ] = 0,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Compute the variance at a few steps only, chosen by a pilot run if the checkpoint has no schedule.",
        ),
    ] = False,
    transport: Annotated[bool, typer.Option("--transport", help="Also compute the transported dispersion.")] = False,
    score: Annotated[
        str,
        typer.Option(
            help="Score to compute confidence from; default: the checkpoint's, or dispersion with --transport."
        ),
    ] = "",
    keep: Annotated[float, typer.Option(help="Share of samples to keep, most confident first.")] = 1.0,
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

    Writes samples.safetensors, samples.csv and a picture of the samples, most confident first. For crystals, also
    writes one CIF per structure (or one extended XYZ file) and adds the judge's results to the table, as CSV and
    Parquet. For a network of your own, writes the table in both formats and no picture.

    Runs of more than 50,000 samples are written batch by batch with scores only, so that memory does not grow.
    """
    from fmwc.checkpoint import identity
    from fmwc.recipes.recipe import pick_device
    from fmwc.sampling import SCORES, Compiled
    from fmwc.sampling.scores import parsed
    from fmwc.sampling.trajectory import DISPERSION
    from fmwc.settings import open_checkpoint
    from fmwc.settings.setting import say_on_stderr
    from fmwc.settings.way import Way, window_of

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
        say("too few samples of each class for this setting: ranked across classes", err=True)
    written = chosen.write_samples(run.surest(keep) if keep < 1 else run, out, format)
    print_written(written)
