"""The command judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fmwc.cli.shared import Force, app, print_rows, print_table, say

__all__ = ["judge"]


@app.command()
def judge(
    structures: Annotated[list[Path], typer.Argument(help="CIF, POSCAR or extended XYZ files, or folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the table, as CSV and Parquet.")] = None,
    calculator: Annotated[
        str, typer.Option(help="Energy model: chgnet, mace, mattersim, orb, uma, or module:function.")
    ] = "chgnet",
    relax: Annotated[int, typer.Option(help="Relax each structure first, with at most this many steps.")] = 0,
    data: Annotated[
        str, typer.Option(help="Folder of MP-20, for its hull and for novelty with respect to its training set.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per structure.")] = False,
    force: Force = False,
) -> None:
    """Judge crystal structures by energy, validity and novelty.

    Accepts structures of any generator and prints one row per structure: energy above the hull, validity, uniqueness,
    novelty. Exits with 1 if a structure could not be judged; its row says why.
    """
    from fmwc.commands.judge import judge_files, judged_rows, judged_summary

    found, written = judge_files(structures, out, calculator=calculator, relax=relax, data=data, force=force)
    for path in written:
        say(f"wrote {path}", err=True)
    if as_json:
        for row in found.rows():
            say(json.dumps({k: None if v != v else v for k, v in row.items()}))
    else:
        print_table(judged_rows(found), "judged")
        print_rows(judged_summary(found), f"{len(found)} structure{'s' * (len(found) != 1)}")
    if any(found["problem"]):
        raise typer.Exit(1)
