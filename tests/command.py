"""Run commands in tests; read the line that they print and the tables that they write."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from fmwc.__main__ import main

__all__ = ["call", "one_line", "rows", "runner"]

OF_EXPERIMENTS = ("bench", "evaluate", "reproduce", "study")  # commands that only python -m experiments has


def runner(words: tuple[object, ...]) -> tuple[list[str], tuple[str, str]]:
    """Return the arguments of a command line, and the module and name of the command.

    `experiments` as the first word stands for python -m experiments; commands that only it has do not need it.
    """
    named = bool(words) and words[0] == "experiments"
    verb = str(words[0]) if words else ""
    argv = ["fmwc", *map(str, words[named:])]
    return argv, ("experiments.cli", "python -m experiments") if named or verb in OF_EXPERIMENTS else (
        "fmwc.cli",
        "fmwc",
    )


def call(*words: object) -> None:
    """Run a command where the fixture `run` is not available; it must succeed."""
    with pytest.MonkeyPatch.context() as patch:
        argv, command = runner(words)
        patch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            main(*command)
    assert not stop.value.code


def one_line(err: str) -> str:
    """Return the one line of an error."""
    lines = [line for line in err.splitlines() if line.startswith("fmwc:")]
    assert len(lines) == 1
    return lines[0]


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV table."""
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))
