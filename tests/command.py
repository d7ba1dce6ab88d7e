"""The command as tests call it, and what it leaves: the line that it says, the tables that it writes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from fmwc.__main__ import main

__all__ = ["call", "one_line", "rows", "runner"]

OF_EXPERIMENTS = ("bench", "evaluate", "reproduce", "study")  # verbs that only python -m experiments has


def runner(words: tuple[object, ...]) -> tuple[list[str], tuple[str, str]]:
    """The arguments of a command line, and the module and the name of the command.

    `experiments` as the first word stands for python -m experiments; its own verbs need no such word.
    """
    named = bool(words) and words[0] == "experiments"
    verb = str(words[0]) if words else ""
    argv = ["fmwc", *map(str, words[named:])]
    return argv, ("experiments.cli", "python -m experiments") if named or verb in OF_EXPERIMENTS else (
        "fmwc.cli",
        "fmwc",
    )


def call(*words: object) -> None:
    """Runs the command, where fixtures cannot capture what it prints; it must end well."""
    with pytest.MonkeyPatch.context() as patch:
        argv, command = runner(words)
        patch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stop:
            main(*command)
    assert not stop.value.code


def one_line(err: str) -> str:
    """The one line that says what is wrong."""
    lines = [line for line in err.splitlines() if line.startswith("fmwc:")]
    assert len(lines) == 1
    return lines[0]


def rows(path: Path) -> list[dict[str, str]]:
    """A table, row by row."""
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))
