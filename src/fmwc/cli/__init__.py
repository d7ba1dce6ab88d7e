"""The command line: each command parses its options, calls one function of :mod:`fmwc.commands`, and prints."""

# Imported in the order in which the help lists the commands.
from fmwc.cli import report, train, sample, check, filter, edit, judge, rules  # isort: skip
from fmwc.cli.shared import app

__all__ = ["app", "check", "edit", "filter", "judge", "report", "rules", "sample", "train"]
