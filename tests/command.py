"""The command as tests call it, and what it leaves: the line that it says, the tables that it writes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from fmwc.__main__ import main

__all__ = ["call", "one_line", "rows"]


def call(*words: object) -> None:
    """Runs the command, where fixtures cannot capture what it prints; it must end well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fmwc", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
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
