"""The verb that measures what confidence is for: study."""

from __future__ import annotations

from typing import Annotated

import typer

import fmwc
from fmwc.cli.shared import Data, Device, JudgedBy, Out, Which, app, numbers_of, print_rows, print_written
from fmwc.errors import UsageError
from fmwc.files import claimed

__all__ = ["study"]


@app.command()
def study(
    setting: Which,
    out: Out,
    seeds: Annotated[
        str, typer.Option(help="Seeds, separated by commas; default: seeds that were not used to choose anything.")
    ] = "",
    only: Annotated[
        str, typer.Option(help="Run only these tasks (draw:edit,read:edit), to share work between machines.")
    ] = "",
    wide: Annotated[
        bool, typer.Option("--wide", help="Measure all options that were considered, on the validation seed.")
    ] = False,
    sizes: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="Samples per seed: samples=…,edited=…,replicates=…,swept=…,rewound=…,guided=…",
        ),
    ] = [],  # noqa: B006
    checkpoint: Annotated[str, typer.Option(help="A shipped name or a folder; default: the shipped weights.")] = "",
    data: Data = "",
    judge: JudgedBy = "",
    device: Device = "auto",
) -> None:
    """Measure each use of confidence; resumes if interrupted.

    Filtering, guarantees, edits, step-size control, rewinding and guidance, each next to baselines of the same cost.
    Writes tables, figures and a page.
    """
    from fmwc.recipes.recipe import pick_device
    from fmwc.recipes.uses.study import REPORTED, VALIDATION
    from fmwc.recipes.uses.study import study as fill
    from fmwc.report.uses import write_study
    from fmwc.settings import setting_named, setting_of
    from fmwc.settings.setting import say_on_stderr

    name = checkpoint or setting_named(setting).name
    chosen = setting_of(name, judge)
    if chosen.name != setting:
        raise UsageError(f"{checkpoint} is of {chosen.name}; say fmwc study {chosen.name}")
    numbers = numbers_of(seeds) if seeds else VALIDATION if wide else REPORTED
    changes = [change for given in sizes for change in given.split(",")]
    field = fmwc.load(name, device=pick_device(device))
    subject = chosen.subject(field, data, changes)
    with claimed(out, "study", adds=("pieces/*.json", "draws/*.safetensors")):
        if fill(subject, out, seeds=numbers, only=only, wide=wide, say=say_on_stderr) is None:
            print_written([out / "draws"])
            return
        written = write_study(out)
    print_rows(written.findings, f"what confidence is for: {setting}")
    print_written(written.written)
