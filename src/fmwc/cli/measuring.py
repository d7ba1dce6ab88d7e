"""The verb that measures what confidence costs: bench."""

from __future__ import annotations

from typing import Annotated

import typer

import fmwc
from fmwc.cli.shared import Count, Device, Force, Out, app, print_written
from fmwc.costs import measure, report, words_of
from fmwc.files import new_folder
from fmwc.recipes.recipe import pick_device
from fmwc.settings import SETTINGS, setting_named
from fmwc.settings.setting import say_on_stderr

__all__ = ["bench"]


@app.command()
def bench(
    out: Out,
    settings: Annotated[list[str], typer.Argument(help=f"Some of {', '.join(SETTINGS)}; all if not given.")] = [],  # noqa: B006
    count: Count = 0,
    steps: Annotated[int, typer.Option(min=1, help="Euler steps.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Times each case is measured, in turns.")] = 5,
    minutes: Annotated[
        float, typer.Option(min=0, help="For each setting: what does not fit is left out, and named.")
    ] = 10.0,
    only: Annotated[
        str,
        typer.Option(
            help="Cases whose name holds one of these, beside plain (linearised,diagonal); or whole parts: sampling, "
            "training, sweep."
        ),
    ] = "",
    backend: Annotated[str, typer.Option(help="Of torch.compile; eager needs no compiler.")] = "inductor",
    tf32: Annotated[
        bool, typer.Option("--tf32", help="A GPU's matrix products in TensorFloat-32, plain sampling's too.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Measures what confidence costs beside plain sampling and training: time and memory, compiled and not."""
    chosen = [setting_named(name) for name in settings or SETTINGS]
    words_of(only)
    new_folder(out, force=force)
    written = []
    for setting in chosen:
        field = fmwc.load(setting.name, device=pick_device(device))
        say_on_stderr(f"{setting.name}:")
        costs = measure(
            setting,
            field,
            count=count,
            steps=steps,
            rounds=rounds,
            minutes=minutes,
            only=only,
            backend=backend,
            tf32=tf32,
            say=say_on_stderr,
        )
        written += report(out, setting.name, costs)
    for path in written[1::2]:
        typer.echo(path.read_text())
    print_written(written)
