"""The command rules."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fmwc.cli.shared import app, print_table, say

__all__ = ["rules"]


@app.command()
def rules(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every form of an operation.")] = False,
) -> None:
    """List the operations that the diagonal estimator supports.

    The other estimators need no rules.
    """
    from fmwc.moments import rule_rows, short_names

    rows = rule_rows()
    if as_json:
        say(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    shown = ("operation", "exactness")
    print_table([{**{k: row[k] for k in shown}, "names": short_names(row["spellings"])} for row in rows], "rules")
    say("Each rule covers every form in torch: torch.x, Tensor.x, F.x, operators, in-place x_. --json lists them all.")
