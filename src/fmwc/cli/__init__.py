"""The command line: parse, call, print. `app` is the command; each module holds the verbs of one kind."""

# Imported for their verbs, in the order in which the help is to list them.
from fmwc.cli import showing, making, sampling, checking, using, reading, studying, measuring  # noqa: I001
from fmwc.cli.shared import app

__all__ = ["app", "checking", "making", "measuring", "reading", "sampling", "showing", "studying", "using"]
