"""Verbs that train: train, retrofit, reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import fmwc
from fmwc.bars import training_bar
from fmwc.cli.shared import Count, Data, Device, Force, JudgedBy, Out, Own, Seed, Set, Which, app, numbers_of
from fmwc.data import arrays
from fmwc.errors import UsageError, pick
from fmwc.files import check_folder
from fmwc.recipes.named import build
from fmwc.recipes.own import Retrofit, advice
from fmwc.recipes.own import retrofit as fit_own
from fmwc.recipes.recipe import pick_device
from fmwc.settings import setting_named

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
) -> None:
    """Trains a field into a folder. Killed and called again, it goes on where it was (a judge starts over)."""
    chosen = setting_named(setting)
    pick(chosen.presets, preset, "preset")
    recipe = chosen.recipe(preset, [f"seed={seed}", *set_], data, own)
    where = pick_device(device)
    with training_bar() as bar:
        chosen.fit(recipe, out, where, bar)
    Console().print(f"wrote {out}: {fmwc.checkpoint.about(out)['metrics']}")


@app.command()
def retrofit(
    network: Annotated[
        str, typer.Argument(help="module:function, which takes nothing and returns the network, or (network, space).")
    ],
    out: Out,
    weights: Annotated[
        str, typer.Option(help="Its state dict, .safetensors or .pt; if not given, the function loads its own.")
    ] = "",
    data: Annotated[
        str,
        typer.Option(
            help="Samples: an .npz, .safetensors or .pt file with x (or x.CHANNEL for each), a row a sample, and every "
            "other array a condition by its name; or an .npy file."
        ),
    ] = "",
    own_samples: Annotated[
        int, typer.Option(help="Without data: draw so many samples of the network's own, and fit to those.")
    ] = 0,
    steps: Annotated[int, typer.Option(help="Steps of the optimiser.")] = 2_000,
    batch: Annotated[int, typer.Option(help="Samples a step.")] = 256,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    beta: Annotated[float, typer.Option(help="Weight of the KL.")] = 1e-3,
    include: Annotated[
        list[str], typer.Option(help="A glob over the layers that carry noise, all if not given. May be repeated.")
    ] = [],  # noqa: B006
    exclude: Annotated[list[str], typer.Option(help="A glob over layers that do not. May be repeated.")] = [],  # noqa: B006
    score: Annotated[str, typer.Option(help="What confidence is made from; one that suits the size if empty.")] = "",
    capture: Annotated[
        bool,
        typer.Option(help="On a GPU, replay a step as a CUDA graph; not for networks whose shapes depend on values."),
    ] = True,
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Gives confidence to a flow model that is trained already: the network stays as it is, only the noise is fitted.

    A tenth of the data is held out; its loss is looked at after each eighth of the steps, and says when more would not
    help. Where the data has classes, confidence is within a class. Runs the module you name: name only code that you
    trust.
    """
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
    )
    check_folder(out, force=force)  # said before anything is computed, and made when there is something to write
    with training_bar() as bar:
        _, looks = fit_own(
            made,
            out,
            samples,
            how,
            space=space,
            device=where,
            entry=network,
            progress=lambda done, total, loss, held: bar(f"noise (held out {held:.4g})", done, total, loss),
        )
    Console().print(f"wrote {out}: {advice(looks)}")
    call = f"{network.replace(':', '.')}()"
    Console().print(f"field = fmwc.load({str(out)!r}, network={call if space is None else f'{call}[0]'})")
    Console().print(f"fmwc sample {out} --network {network} -n 100 --out samples")


@app.command()
def reproduce(
    setting: Which,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Results folder, runs/SETTING; what is there is not made again.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; the setting's own if not given.")] = "",
    set_: Set = [],  # noqa: B006
    count: Count = 0,
    draws: Annotated[
        int, typer.Option(help="Stochastic trajectories the dispersion is held against; 0 is the setting's own number.")
    ] = 0,
    only: Annotated[
        str, typer.Option(help="mnist, crystals: do these tasks only (flow:0,read:joint), so that machines can share.")
    ] = "",
    data: Data = "",
    own: Own = False,
    judge: JudgedBy = "",
    device: Device = "auto",
) -> None:
    """Trains every method at every seed and writes the paper's tables beside ours. Stopped, it goes on where it was."""
    chosen = setting_named(setting, judge)
    recipe = chosen.recipe("recommended", set_, data, own)
    if getattr(recipe, "own", False) and not judge:
        raise UsageError("data of your own needs a judge: fmwc train mnist --preset judge, then --judge FOLDER")
    numbers = numbers_of(seeds or chosen.seeds)
    folder = out or Path("runs") / setting
    where = pick_device(device)
    chosen.reproduce(
        recipe, folder, where, numbers, count=count or chosen.reproduced, draws=draws or chosen.draws, only=only
    )
    for path in [] if only else chosen.tables(folder):
        Console().print(f"wrote {path}")
