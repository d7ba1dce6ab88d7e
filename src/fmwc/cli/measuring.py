"""The verb that measures what confidence costs: bench."""

from __future__ import annotations

from typing import Annotated

import typer

import fmwc
from fmwc.cli.shared import SETTINGS, Count, Device, Force, Out, app, print_written, say
from fmwc.files import claimed

__all__ = ["bench"]


@app.command()
def bench(
    out: Out,
    settings: Annotated[list[str], typer.Argument(help=f"Some of {', '.join(SETTINGS)}; default: all.")] = [],  # noqa: B006
    count: Count = 0,
    steps: Annotated[int, typer.Option(min=1, help="Euler steps.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements per case, interleaved.")] = 5,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time limit per setting; cases that do not fit are skipped and listed.")
    ] = 10.0,
    only: Annotated[
        str,
        typer.Option(
            help="Only cases whose name contains one of these (linearised,diagonal), and plain; or whole parts: "
            "sampling, training, sweep."
        ),
    ] = "",
    backend: Annotated[str, typer.Option(help="Backend of torch.compile; eager needs no compiler.")] = "inductor",
    tf32: Annotated[
        bool, typer.Option("--tf32", help="Use TensorFloat-32 matrix products on a GPU, also for plain sampling.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
) -> None:
    """Measure the time and memory that confidence costs.

    Compares with plain sampling and training, compiled and not.
    """
    from fmwc.costs import measure, report, words_of
    from fmwc.recipes.recipe import pick_device
    from fmwc.settings import setting_named
    from fmwc.settings.setting import say_on_stderr

    chosen = [setting_named(name) for name in settings or SETTINGS]
    words_of(only)
    written = []
    with claimed(out, "bench", force=force):
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
        say(path.read_text())
    print_written(written)
