"""Verbs that say how good something is: evaluate, judge, rules."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

import fmwc
from fmwc.bars import sampling_bar, stages_bar
from fmwc.cli.shared import Count, Data, Device, Force, JudgedBy, Which, app, print_rows, print_table, say
from fmwc.errors import UsageError
from fmwc.files import claimed

__all__ = ["evaluate", "judge", "rules"]


def _flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested numbers with their names joined; intervals beside what they are of."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        label = f"{before} {name}".strip()
        if isinstance(value, list):
            value = "–".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value)
        flat |= _flat(value, label) if isinstance(value, dict) else {label: value}
    return flat


@app.command()
def evaluate(
    setting: Which = "checkerboard",
    checkpoint: Annotated[str, typer.Option(help="A shipped name or a folder; default: the shipped weights.")] = "",
    count: Count = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples; the default was not used to choose anything.")] = 2026,
    data: Data = "",
    judge: JudgedBy = "",
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the main numbers of a checkpoint."""
    from fmwc.recipes.recipe import Clock, pick_device, provenance
    from fmwc.settings import setting_named, setting_of

    chosen, where = setting_of(checkpoint or setting_named(setting).name, judge), pick_device(device)
    if chosen.name != setting_named(setting).name:
        raise UsageError(f"{checkpoint} is of {chosen.name}; say fmwc evaluate {chosen.name}")
    if count < 0:
        raise UsageError(f"-n is at least 1, or 0 for the setting's own number; got {count}")
    clock = Clock(where)
    name, count = checkpoint or setting, count or chosen.count(where)
    field = fmwc.load(name, device=where)
    chosen.require_judge(field)
    with sampling_bar(f"reading {name}", None) as bar:
        found = chosen.evaluate(field, count, seed, data, bar)
    found = {"checkpoint": name, **found, "provenance": provenance(where, clock.seconds, seed=seed, samples=count)}
    if as_json:
        say(json.dumps(found, indent=1))
        return
    print_rows(
        [{"": k, "value": f"{v:.4f}" if isinstance(v, float) else str(v)} for k, v in _flat(found).items()], name
    )


@app.command()
def judge(
    structures: Annotated[list[Path], typer.Argument(help="CIF, POSCAR or extended XYZ files, or folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the table, as CSV and Parquet.")] = None,
    calculator: Annotated[
        str, typer.Option(help="The energy model: chgnet, others by name, or module:function.")
    ] = "chgnet",
    relax: Annotated[int, typer.Option(help="Relax each structure first, by at most this many steps.")] = 0,
    data: Annotated[str, typer.Option(help="Where MP-20 is: its hull, and novelty against its training set.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per structure.")] = False,
    force: Force = False,
) -> None:
    """Judge crystal structures by energy, validity and novelty.

    Accepts structures of any generator and prints one row per structure: energy above the hull, validity, uniqueness,
    novelty. Exits with 1 if a structure could not be judged; its row says why.
    """
    from fmwc.metrics.crystals import calculator as load_calculator
    from fmwc.settings.judging import judge_files, judged_rows, judged_summary, write_judged

    model = load_calculator(calculator)
    with claimed(out, "judge", force=force) if out is not None else nullcontext():
        with stages_bar() as bar:
            found = judge_files(structures, model, relax, data, bar)
        for path in write_judged(found, out, relaxed=relax > 0) if out is not None else ():
            say(f"wrote {path}", err=True)
    if as_json:
        for row in found.rows():
            say(json.dumps({k: None if v != v else v for k, v in row.items()}))
    else:
        print_table(judged_rows(found), "judged")
        print_rows(
            [{"": k, "value": v} for k, v in judged_summary(found).items()],
            f"{len(found)} structure{'s' * (len(found) != 1)}",
        )
    if any(found["problem"]):
        raise typer.Exit(1)


@app.command()
def rules(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every form of an operation.")] = False,
) -> None:
    """List the operations that the diagonal estimator supports.

    The other estimators need no rules.
    """
    from fmwc.moments.table import names_of, rule_rows

    rows = rule_rows()
    if as_json:
        say(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    shown = ("operation", "exactness")
    print_table([{**{k: row[k] for k in shown}, "names": names_of(row["spellings"])} for row in rows], "rules")
    say("Each in every form that torch has: torch.x, Tensor.x, F.x, operators, in place (x_). --json lists them all.")
