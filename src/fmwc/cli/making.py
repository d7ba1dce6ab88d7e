"""Verbs that train: train, retrofit, reproduce."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

import fmwc
from fmwc.bars import training_bar
from fmwc.cli.shared import Count, Data, Device, Force, JudgedBy, Out, Own, Seed, Set, Which, app, numbers_of, say
from fmwc.errors import UsageError, pick
from fmwc.files import claimed
from fmwc.readers import shown

__all__ = ["reproduce", "retrofit", "train"]


@app.command()
def train(
    setting: Which,
    out: Out,
    preset: Annotated[str, typer.Option(help="recommended, paper or quick; mnist also has judge.")] = "recommended",
    seed: Seed = 0,
    set_: Set = [],  # noqa: B006
    data: Data = "",
    own: Own = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Train a model with confidence; resumes if interrupted."""
    from fmwc.recipes.recipe import pick_device
    from fmwc.report.run import made_from
    from fmwc.settings import setting_named

    chosen = setting_named(setting)
    pick(chosen.presets, preset, "preset")
    recipe = chosen.recipe(preset, [f"seed={seed}", *set_], data, own)
    where = pick_device(device)
    there = (out / "recipe.json").is_file() and not force
    with training_bar() as bar:
        chosen.fit(recipe, out, where, bar, force=force)
    done = "was finished already" if there else "written"
    about = fmwc.checkpoint.about(out)
    say(f"{shown(out)} {done}: {about['metrics']}")
    if about.get("noise") is not None:  # a judge has no confidence
        say(made_from(about.get("reference")))


@app.command()
def retrofit(
    network: Annotated[
        str,
        typer.Argument(help="module:function that returns the network, or (network, space)."),
    ],
    out: Out,
    weights: Annotated[
        str, typer.Option(help="State dict of the network, .safetensors or .pt; not needed if the function loads it.")
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            help="Training samples: an .npz, .safetensors or .pt file with x (or x.CHANNEL for each channel), one row "
            "per sample; every other array is a condition of that name. Or an .npy file."
        ),
    ] = "",
    own_samples: Annotated[
        int, typer.Option(help="Without --data: draw this many samples from the network and fit the noise to those.")
    ] = 0,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 2_000,
    batch: Annotated[int, typer.Option(help="Samples per step.")] = 256,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    beta: Annotated[float, typer.Option(help="Weight of the KL divergence.")] = 1e-3,
    include: Annotated[
        list[str], typer.Option(help="Glob of layers that carry noise; default: all. May be repeated.")
    ] = [],  # noqa: B006
    exclude: Annotated[list[str], typer.Option(help="Glob of layers that do not carry noise. May be repeated.")] = [],  # noqa: B006
    score: Annotated[str, typer.Option(help="Score to compute confidence from; default: by sample size.")] = "",
    pairs: Annotated[
        str,
        typer.Option(
            help="Coupling of noise and data the network was trained with: independent, or ot (optimal "
            "transport within each batch)."
        ),
    ] = "independent",
    conventions: Annotated[
        bool, typer.Option(help="Check on a batch that the network is called as it was trained.")
    ] = True,
    capture: Annotated[
        bool,
        typer.Option(help="On a GPU, replay steps as a CUDA graph; not for networks whose shapes depend on values."),
    ] = True,
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Add confidence to a trained flow model.

    Fits only the noise; the network's weights do not change. A tenth of the data is held out; its loss is computed
    after each eighth of the steps and tells whether more steps would help. If the data has classes, confidence
    compares samples of one class. The named module is executed: name only code that you trust.
    """
    from fmwc.data import arrays
    from fmwc.recipes.named import build
    from fmwc.recipes.own import Retrofit, advice
    from fmwc.recipes.own import retrofit as fit_own
    from fmwc.recipes.recipe import pick_device
    from fmwc.report.run import made_from

    where = pick_device(device)
    made, space = build(network, weights or None)
    samples = arrays.load(data) if data else None
    how = Retrofit(
        steps,
        batch,
        lr,
        beta,
        include=tuple(include or ["*"]),
        exclude=tuple(exclude),
        own_samples=own_samples,
        score=score,
        captured=capture,
        seed=seed,
        pairs=pairs,
        conventions=conventions,
    )
    there = (out / "recipe.json").is_file() and not force
    with training_bar() as bar:
        field, looks = fit_own(
            made,
            out,
            samples,
            how,
            space=space,
            device=where,
            entry=network,
            progress=lambda done, total, loss, held: bar(f"noise (held out {held:.4g})", done, total, loss),
            force=force,
        )
    say(f"{shown(out)} {'was finished already' if there else 'written'}: {advice(looks)}")
    say(made_from(field.reference))
    call = f"{network.replace(':', '.')}()"
    say(f"field = fmwc.load({str(out)!r}, network={call if space is None else f'{call}[0]'})")
    say(f"fmwc sample {shlex.quote(str(out))} --network {shlex.quote(network)} -n 100 --out samples")


@app.command()
def reproduce(
    setting: Which,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Results folder; default: runs/SETTING. Existing results are kept."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; default: those of the setting.")] = "",
    set_: Set = [],  # noqa: B006
    count: Count = 0,
    draws: Annotated[
        int, typer.Option(help="Stochastic trajectories per sample for the dispersion; 0: the setting's number.")
    ] = 0,
    only: Annotated[
        str,
        typer.Option(help="mnist, crystals: run only these tasks (flow:0,read:joint), to share work."),
    ] = "",
    data: Data = "",
    own: Own = False,
    judge: JudgedBy = "",
    device: Device = "auto",
) -> None:
    """Reproduce the paper's tables; resumes if interrupted.

    Trains every method with every seed and writes our numbers next to the paper's.
    """
    from fmwc.recipes.recipe import pick_device
    from fmwc.settings import setting_named

    chosen = setting_named(setting, judge)
    recipe = chosen.recipe("recommended", set_, data, own)
    if getattr(recipe, "own", False) and not judge:
        raise UsageError("data of your own needs a judge: fmwc train mnist --preset judge, then --judge FOLDER")
    numbers = numbers_of(seeds or chosen.seeds)
    folder = out or Path("runs") / setting
    where = pick_device(device)
    with claimed(
        folder, "reproduce", adds=("cells/*.json", "pieces/*.json", "models/*.safetensors", "draws/*.safetensors")
    ):
        chosen.reproduce(
            recipe, folder, where, numbers, count=count or chosen.reproduced, draws=draws or chosen.draws, only=only
        )
        for path in [] if only else chosen.tables(folder):
            say(f"wrote {path}")
