"""The commands train and retrofit."""

from __future__ import annotations

from typing import Annotated

import typer

from fmwc.cli.shared import Data, Device, Force, Out, Own, Seed, Set, Which, app, say

__all__ = ["retrofit", "train"]


@app.command()
def train(
    domain: Which,
    out: Out,
    preset: Annotated[str, typer.Option(help="recommended, paper or quick; mnist also has judge.")] = "recommended",
    seed: Seed = 0,
    changes: Set = [],  # noqa: B006
    data: Data = "",
    own: Own = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Train a model with confidence; resumes if interrupted."""
    options = locals()
    from fmwc.commands.train import train_model

    for line in train_model(**options):
        say(line)


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
            help="Coupling of noise and data in the network's training: independent, or ot (optimal transport "
            "within each batch)."
        ),
    ] = "independent",
    conventions: Annotated[
        bool, typer.Option(help="Check on a batch that the network is called as it was trained.")
    ] = True,
    captured: Annotated[
        bool,
        typer.Option(
            "--capture/--no-capture",
            help="On a GPU, replay steps as a CUDA graph; not for networks whose shapes depend on values.",
        ),
    ] = True,
    seed: Seed = 0,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Add confidence to a trained flow model.

    Fits only the noise; the network's weights do not change. A tenth of the data is held out; its loss is computed
    after each eighth of the steps and shows whether more steps would help. If the data has classes, confidence
    compares samples of one class. The named module is executed, so name only code that you trust.
    """
    options = locals()
    from fmwc.commands.train import retrofit_network

    for line in retrofit_network(**options):
        say(line)
